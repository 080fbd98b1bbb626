/* fuse.h: rewrites that join layers' ops, after the gradient walk. Each leaves an equal graph. */
#ifndef DNR_FUSE_H
#define DNR_FUSE_H

#include "../runtime/engine_ops.h"
#include "layers.h"

/* Where ingest is read by nothing but conv.fprop and conv.wgrad, and the device has all of them in packed form, each
 * kind in its own packing, they take that form. Blocks of pictures of odd sides do not exist. */
dnr_status dnri_fuse_input(dnr_graph *g, dnr_device *dev, dnri_packing fprop, dnri_packing wgrad);

/* norm.eval of a convolution's y that nothing else reads becomes conv.act over weights that a fold makes, where the
 * device has both. */
dnr_status dnri_fuse_norm_eval(dnr_graph *g, dnr_device *dev);

/* conv.act with ReLU and no residual that only a max pool reads becomes conv.fprop and max_pool.act, where the device
 * has that: bias and ReLU after the maximum, of which there are fewer; and no index. */
dnr_status dnri_fuse_pool_act(dnr_graph *g, dnr_device *dev);

/* A fold for a packed convolution leaves the weights as that reads them. */
dnr_status dnri_fuse_packed_fold(dnr_graph *g, dnr_device *dev);

/* norm.train with ReLU and no residual, read forwards by a max pool alone, becomes norm_pool.train, and the pair
 * of their backward ops norm_pool.bwd: the norm's y is then neither written nor kept. */
dnr_status dnri_fuse_norm_pool(dnr_graph *g);

/* An add read by nothing but the dy of one norm.bwd or norm_pool.bwd becomes its dy and dy2: the sum of
 * a residual gradient is then never written. */
dnr_status dnri_fuse_gradient_add(dnr_graph *g);

/* A conv.fprop that a norm.train or norm_pool.train normalises, and that nothing else of the forward pass reads, becomes
 * conv.stats, and the norm takes its sums; likewise a conv_packed.fprop, which gives sums as well; where the device
 * prefers that. */
dnr_status dnri_fuse_statistics(dnr_graph *g, dnr_device *dev);

/* A norm.train with ReLU and residual leaves a mask of y, and its norm.bwd reads that in place of y: a sixteenth
 * of the bytes; where the device supports that. The mask lives beside y, so it is for runs that keep
 * activations. */
dnr_status dnri_fuse_masks(dnr_graph *g, dnr_device *dev);

/* The weight gradients of conv.wgrad stay in the compute type, and a grad.widen behind as many layers as it takes, and as
 * one communication bucket of `bucket_bytes` (0: the default) has, casts them at once; where the device has that. */
dnr_status dnri_fuse_widen(dnr_graph *g, dnr_device *dev, size_t bucket_bytes);

/* Algebraic batch norm (layers.h): behind a 1×1 convolution without padding that widens, norm.bwd, conv.wgrad and
 * conv.dgrad become norm.dz, gram, algbn.coef and algbn.dgrad, where the device has them and x has at least `rows`
 * rows for each of its channels. Then nothing in backward reads x. Where the convolution strides, it needs
 * stride² as many rows, and its gradient must join a norm.dz without zeros between (stride 2); `a` is every stride-th
 * pixel, taken again in backward. `rows` of 0 or less: any number of rows, any stride. A norm without ReLU shares dz with the one behind it, whose residual it
 * was. Comes after the other rewrites, before recomputation. */
dnr_status dnri_fuse_algbn(dnr_graph *g, dnr_device *dev, int64_t rows);

/* After it, in the same layers: conv.fprop (or conv.stats) and norm.train become gram, algbn.stats, algbn.fold and
 * algbn.join, where the device has them and nothing else reads what lies between. The Gram matrix is kept for
 * backward. */
dnr_status dnri_fuse_algbn_forward(dnr_graph *g, dnr_device *dev);

#endif
