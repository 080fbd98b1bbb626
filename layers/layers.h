/* layers.h: the layers. A model calls the dnr_… builders; each layer's file describes its ops
 * (shape rule, gradient rule, how to split them) once; back ends lower them in layers/cpu,
 * layers/cuda and tests/ref.
 *
 * Builders return the output tensor, or -1 with the error kept in the graph. Tensors are NHWC in
 * the compute type; statistics, gamma, beta and the gradients of parameters are in the master type. */
#ifndef DNR_LAYERS_H
#define DNR_LAYERS_H

#include "../runtime/graph.h"

/* ---- conv.c: 2-D convolution without bias (a norm follows), square kernel.
 *   y[n,p,q,k] = Σ x[n, p·stride − pad + r, q·stride − pad + s, c] · w[k,r,s,c]
 *   P = ⌊(H + 2·pad − kernel)/stride⌋ + 1, likewise Q. Weight "NAME.weight" [K,R,S,C]. */
typedef struct dnr_conv_opts {
    int out, kernel, stride, pad;
} dnr_conv_opts;
dnr_tid dnr_conv(dnr_graph *g, const char *name, dnr_tid x, const dnr_conv_opts *o);

typedef struct dnri_conv_attr {
    int32_t kernel, stride, pad;
    int64_t h, w; /* of x: a stride may map several sizes to one */
} dnri_conv_attr;
extern const dnri_op_def dnri_def_conv; /* conv.fprop in {x, w}  out {y}  */
/* conv.stats in {x, w} out {y, sum, sqsum: master type [K]}: conv.fprop, and Σ y and Σ y² over N·P·Q, before or
 *            after y is rounded */
extern const dnri_op_def dnri_def_conv_stats;
extern const dnri_op_def dnri_def_conv_dgrad; /* conv.dgrad in {dy, w} out {dx} */
/* conv.wgrad in {x, dy} out {dw: GRAD, in the master type; or a tensor in the compute type}
 * grad.widen in {dw: compute type}, up to DNRI_MAX_OUT of them, out {as many of GRAD}: the same values; what a rewrite
 *            makes of the casts of several layers */
extern const dnri_op_def dnri_def_conv_wgrad, dnri_def_grad_widen;

/* ---- conv_act.c: convolutions with an epilogue, and batch norm folded into them; what a rewrite makes of an
 * evaluation.
 * conv.act in {x, w, bias: master type [K], residual?, low?} out {y}:
 *          y = act(conv(x, w) + bias + residual), act = ReLU or identity, rounded once. low: bias in the compute
 *          type, absent where that is the master type; a device may take either.
 * fold     in {w: MASTER, gamma, beta, running_mean, running_var} out {w', bias: master type, low?}:
 *          s = gamma / √(running_var + eps);  w'[k,…] = w[k,…] · s[k] in the compute type;
 *          bias = beta − running_mean · s;  low = bias in the compute type.
 *          So conv(x, w') + bias is norm.eval of conv(x, w). With a packing w' lies as conv_packed wants it. */
typedef struct dnri_conv_act_attr {
    dnri_conv_attr conv;
    bool relu;
} dnri_conv_act_attr;
typedef struct dnri_fold_attr {
    double eps;
    int64_t packing; /* dnri_packing, or 0: as w lies */
    int64_t lead;    /* of the packing, see dnri_packed_weight */
} dnri_fold_attr;
extern const dnri_op_def dnri_def_conv_act, dnri_def_fold;

/* ---- conv_packed.c: conv.fprop and conv.wgrad of pictures, 3 channels, that ingest.packed wrote; what a rewrite
 * makes of the first layer where the device has these ops. dw is as ever; w too, or packed (dnri_packed_weight).
 * conv_packed.fprop in {packed x, w} out {y, sum?, sqsum?: master type [K]}: the sums are conv.stats'
 * conv_packed.wgrad in {packed x, dy} out {dw} */
typedef struct dnri_packed_conv_attr {
    dnri_conv_attr conv;
    int64_t packing; /* dnri_packing */
} dnri_packed_conv_attr;
extern const dnri_op_def dnri_def_packed_conv, dnri_def_packed_conv_wgrad;
/* Shape of packed weights of k kernels of r x r pixels, fourth channels and what is beyond the kernel being 0:
 * QUADS [k,r,r,4]; BLOCKS [k,m,m,16], m = ⌈(r + lead)/2⌉, where pixel (u, v) of the kernel lies as in a picture
 * at (u + lead, v + lead). lead = pad mod 2. */
dnr_desc dnri_packed_weight(dnr_dtype t, int64_t k, int64_t r, int64_t packing, int64_t lead);

/* ---- norm.c: batch normalisation (Ioffe & Szegedy 2015, arXiv:1502.03167), PyTorch's conventions:
 * biased variance normalises, the running variance is unbiased, momentum weighs the new value.
 *   y = act(gamma · (x − mean) · invstd + beta + residual)
 * act = ReLU or identity; `residual` may be absent. */
typedef struct dnr_norm_opts {
    bool relu;
    bool zero_init; /* gamma starts at 0 */
} dnr_norm_opts;
dnr_tid dnr_norm(dnr_graph *g, const char *name, dnr_tid x, dnr_tid residual,
                 const dnr_norm_opts *o);

#define DNRI_NORM_EPS      1e-5
#define DNRI_NORM_MOMENTUM 0.1
typedef struct dnri_norm_attr {
    double eps, momentum;
    bool relu;
} dnri_norm_attr;
/* norm.train in {x, gamma, beta, residual?, running_mean, running_var, sum?, sqsum?} out {y, mean, invstd, mask?};
 *            updates the running statistics. With sum and sqsum of x (conv.stats) no pass over x is
 *            needed: mean = sum/M, var = max(0, sqsum/M − mean²), M = N·H·W. With r = |mean|/std of a
 *            channel and sums good to a share e, var is then good to (1 + r²)·e, so to nothing from r = e^−½
 *            on; fp16's own rounding of x, 3e-4·r of its std, outweighs that up to r = 3e-4/e.
 * norm.apply in {x, gamma, beta, residual?, mean, invstd} out {y}: the recompute clone
 * norm.eval  in {x, gamma, beta, residual?, running_mean, running_var} out {y} */
extern const dnri_op_def dnri_def_norm_train, dnri_def_norm_apply, dnri_def_norm_eval;
/* The mask of y, uint8 [N,H,W,C/8], has bit c mod 8 of byte ⌊c/8⌋ set where y > 0; only with relu and a residual,
 * and C a multiple of 8. A device that supports making it supports norm.bwd with the mask in y's place. */
/* norm.bwd in {x, y or its mask (relu only), dy, dy2?, gamma, beta, mean, invstd}
 *          out {dx, dgamma, dbeta, dresidual?}
 *   dz = (dy + dy2) · [y > 0 where relu];  dresidual = dz
 *   dbeta = Σ dz;  dgamma = Σ dz · (x − mean) · invstd;  M = N·H·W
 *   dx = gamma · invstd · (dz − dbeta/M − (x − mean) · invstd · dgamma/M)
 * beta lets a back end recompute the mask from x where there was no residual. attr.residual says
 * whether there was, and then dresidual is an output; only together with relu: without it dresidual
 * is dy itself. */
typedef struct dnri_norm_bwd_attr {
    bool relu, residual;
} dnri_norm_bwd_attr;
extern const dnri_op_def dnri_def_norm_bwd;
/* ---- sync_norm.c: batch norm over the batches of all ranks (model.sync_bn): what a rewrite makes of norm.train and
 * norm.bwd, with reductions (reduce.h) between. M = N·H·W · ranks.
 * norm.sums     in {x} out {sum, sqsum: master type [C]}: Σ x, Σ x² of this rank
 * norm.sync     in {x, gamma, beta, residual?, running_mean, running_var, sum, sqsum} out {y, mean, invstd}: norm.train on
 *               the sums of all ranks
 * norm.bwd.sums in norm.bwd's out {dgamma, dbeta, sum, dot, dresidual?}: dgamma and dbeta of this rank, which its
 *               gradients are; sum = dbeta, dot = dgamma, to be summed over ranks
 * norm.bwd.dx   in {x, y (relu only), dy, dy2?, gamma, mean, invstd, sum, dot} out {dx}
 *   dx = gamma · invstd · (dz − sum/M − (x − mean) · invstd · dot/M) */
typedef struct dnri_norm_sync_attr {
    dnri_norm_attr norm; /* first */
    int64_t ranks;
} dnri_norm_sync_attr;
typedef struct dnri_norm_dx_attr {
    bool relu;
    int64_t ranks;
} dnri_norm_dx_attr;
extern const dnri_op_def dnri_def_norm_sums, dnri_def_norm_sync, dnri_def_norm_bwd_sums,
    dnri_def_norm_bwd_dx;
/* relu in {x} out {y}; relu.bwd in {y, dy} out {dx}: what norm.* with relu or a residual split into,
 * with add. */
extern const dnri_op_def dnri_def_relu, dnri_def_relu_bwd;

/* ---- pool.c: PyTorch's max_pool2d and avg_pool2d (padding counts in the average, size floored),
 * and the average over the whole picture. Ties of the maximum go to the first in row-major order;
 * NaN wins. pad <= kernel/2. */
typedef struct dnr_pool_opts {
    int kernel, stride, pad;
} dnr_pool_opts;
dnr_tid dnr_max_pool(dnr_graph *g, const char *name, dnr_tid x, const dnr_pool_opts *o);
dnr_tid dnr_avg_pool(dnr_graph *g, const char *name, dnr_tid x, const dnr_pool_opts *o);
dnr_tid dnr_global_avg_pool(dnr_graph *g, const char *name, dnr_tid x);

typedef struct dnri_pool_attr {
    int32_t kernel, stride, pad;
    int64_t h, w; /* of x */
    bool positive;
} dnri_pool_attr;
/* max_pool.fprop    in {x} out {y, index: uint8, r·kernel + s}; kernel <= 15. With attr.positive (of a ReLU's
 *                   y) the index is 255, which names no pixel, where y > 0 does not hold: such a maximum
 *                   passes no gradient to what is before the ReLU
 * max_pool.bwd      in {dy, index} out {dx}
 * max_pool.act      in {x, bias: master type [C]} out {y}: y = max(0, bias + the window's maximum), where the x of
 *                   a convolution has its folded norm's bias and ReLU still before it; attr.positive is true
 * avg_pool.fprop    in {x} out {y}
 * avg_pool.bwd      in {dy} out {dx}
 * global_pool.fprop in {x} out {y[n,1,1,c]}; attr: h, w alone
 * global_pool.bwd   in {dy} out {dx} */
extern const dnri_op_def dnri_def_max_pool, dnri_def_max_pool_bwd, dnri_def_max_pool_act;
extern const dnri_op_def dnri_def_avg_pool, dnri_def_avg_pool_bwd;
extern const dnri_op_def dnri_def_global_pool, dnri_def_global_pool_bwd;

/* ---- norm_pool.c: norm with ReLU and the max pool that reads it, as one op; what a rewrite makes of the stem.
 * Equal are those pixels whose x are, or all of a channel where gamma is 0; the first wins.
 * norm_pool.train in {x, gamma, beta, running_mean, running_var, sum?, sqsum?} out {y, index, mean, invstd}:
 *                 norm.train, then max_pool.fprop with attr.positive
 * norm_pool.apply in {x, gamma, beta, mean, invstd} out {y, index}: the recompute clone
 * norm_pool.bwd   in {x, index, dy, dy2?, gamma, beta, mean, invstd, y} out {dx, dgamma, dbeta}: max_pool.bwd of
 *                 dy + dy2, then norm.bwd without a mask, since the index has it; attr: dnri_pool_attr. The norm of
 *                 what a window's index names is y, of which a back end may make dgamma */
typedef struct dnri_norm_pool_attr {
    dnri_norm_attr norm;
    dnri_pool_attr pool;
} dnri_norm_pool_attr;
extern const dnri_op_def dnri_def_norm_pool_train, dnri_def_norm_pool_apply, dnri_def_norm_pool_bwd;

/* ---- algbn.c: algebraic batch norm: the backward pass of a 1×1 convolution x = a·wᵀ and the batch norm behind
 * it, of which x and dx have K channels and a has C < K, without reading x or writing dx. With G = aᵀa and P = dzᵀa,
 * dz the gradient of the norm's output, all that is linear or quadratic in x is had from C-sized products:
 *   Σ dz·x = rowdot(P, w);   dx = A·dz + B·x + C0 by channel;   dw = dxᵀa = A·P + B·(w·G) + C0·Σa;
 *   da = dx·w = dz·(A∘w) + a·(wᵀ·diag(B)·w) + c
 * Made by a rewrite (fuse.h) out of norm.bwd, conv.wgrad and conv.dgrad. A tensor is a matrix of M = N·H·W rows.
 *
 * norm.dz     in {y or its mask?, dy, dy2?} out {dz, sum: master type [K]}
 *   dz = (dy + dy2) · [y > 0 where y is given];  sum = Σ dz. The mask is norm.train's. One of y and dy2 is given.
 *   dy2 may be [n,⌈H/2⌉,⌈W/2⌉,K]: of the pixels of even h and w, 0 elsewhere, as behind a convolution of stride 2.
 * gram        in {a, b?} out {p: master type [Kb,1,1,C], sum?: master type [C]}
 *   p = bᵀ·a, b = a where absent;  sum = Σ a. Sums are good to fp32: a tensor core rounds towards zero as it
 *   adds, so it may add no more than 1,568 rows before what it has is added up by better means; 3,136 where b is not a.
 * algbn.coef  in {p = dzᵀa, gram = aᵀa, sum_a, sum_dz, w, gamma, mean, invstd, HEADER}
 *             out {dw: GRAD [K,1,1,C], dgamma: GRAD, dbeta: GRAD, wa [K,1,1,C], m [C,1,1,C], c [2·C], STATE}; attr
 *   dbeta = sum_dz;  dgamma_k = invstd_k · (Σ_c p_kc w_kc − mean_k · sum_dz_k)
 *   A = gamma·invstd;  B = −A·invstd·dgamma/M;  C0 = −A·dbeta/M − B·mean
 *   dw_kc = A_k p_kc + B_k (w·gram)_kc + C0_k sum_a_c
 *   wa_kc = A_k w_kc;  m = wᵀ·diag(B)·w, both rounded to the compute type;
 *   c_j = −(Σ_k sum_dz_k wa_kj + Σ_i sum_a_i m_ij)/M of these rounded ones, so that Σ da = 0 as it should be; in
 *   two halves of the compute type, c[j] = round(c_j) and c[C + j] = round(c_j − c[j]): 16 bits would not do, the
 *   same error in all rows adds up.
 *   state.algbn_ratio ← the largest r, of all such ops since the one with attr.first and header.first, where r_k is
 *   what cancels in a channel of x beside its spread: the larger of |mean_k| and √(Σ_c w_kc²·gram_cc/M), times invstd_k.
 *   A sum good to e, less the squared mean that is in it, is good to (1 + r²)·e.
 * algbn.dgrad in {dz, a, wa, m, c} out {da}:  da = dz·wa + a·m + c[0..C) + c[C..2C)
 *
 * The same for the forward pass, which then does not write x either: statistics from the Gram matrix, the norm folded
 * into the weights of these statistics, and one product to y. algbn.coef reads the same Gram matrix.
 *
 * algbn.stats in {gram = aᵀa, sum_a, a, w, running_mean, running_var, HEADER} out {mean, invstd, STATE}; attr
 *   norm.train's statistics of x = a·wᵀ, running ones too:
 *   mean_k = w_k·sum_a/M;  var_k = max(0, w_k·gram·w_kᵀ/M − mean_k²), of which little is left where r is large: what all
 *   entries of gram err by in proportion shows |mean|²/var times larger, what each errs by on its own
 *   Σ w_kc²·gram_cc/(M·var) times, also where means of a cancel in mean_k. So where r, as algbn.coef has it, exceeds
 *   DNRI_ALGBN_GUARD, var_k is taken from a instead, var_k = Σ (w_k·(a − sum_a/M))²/M. NaN takes that way too.
 *   state.algbn_ratio as of algbn.coef, state.algbn_exact ← how many channels took the long way
 * algbn.fold  in {w, sum_a, gamma, beta, invstd} out {wf [K,1,1,C], shift: master type [K], low?: [K]}; attr
 *   wf_kc = gamma_k · invstd_k · w_kc, rounded;  shift_k = beta_k − Σ_c wf_kc·sum_a_c/M of the rounded ones, so that
 *   the mean of what follows is beta;  low = shift rounded to the compute type, a 0 becoming −2⁻²⁴: libraries that
 *   make a mask may count a 0 as above 0, and of a channel whose gamma and beta are 0 half the sums are
 * algbn.join  in {a, wf, shift, residual?, low?} out {y, mask?}; attr: dnri_algbn_join_attr
 *   y = act(a·wfᵀ + shift + residual), act = ReLU or identity; mask as norm.train's.
 *   A device may take `low` for shift, since libraries add nothing else. That moves a channel of y by at most
 *   u·|shift| <= u·(|beta| + |gamma|·r), u = 2⁻¹¹ in fp16, where y itself is rounded by u·|y|: as much while r is a few.
 *   Over a trained ResNet-50 y is off by 3.8e-4 with it, 2.5e-4 with an exact shift, 3.9e-4 as a norm of a rounded x
 *   (fp16, relative). The same in all rows, it drops out of the mean of the next norm. */
typedef struct dnri_algbn_attr {
    int64_t rows; /* M */
    bool first;   /* algbn.coef: of the ops of its program that write algbn_… to the state */
} dnri_algbn_attr;
/* r to which sums good to 1e-5, as a Gram matrix has them, leave invstd good to some 1e-3, as good as what the rounding
 * of x to 16 bits leaves. */
#define DNRI_ALGBN_GUARD 18
typedef struct dnri_algbn_stats_attr {
    int64_t rows; /* M */
    double eps, momentum;
    bool first; /* as above */
} dnri_algbn_stats_attr;
typedef struct dnri_algbn_join_attr {
    bool relu;
} dnri_algbn_join_attr;
extern const dnri_op_def dnri_def_norm_dz, dnri_def_gram, dnri_def_algbn_coef, dnri_def_algbn_dgrad;
extern const dnri_op_def dnri_def_algbn_stats, dnri_def_algbn_fold, dnri_def_algbn_join;

/* ---- dense.c: fully connected, x [n,1,1,C] → y [n,1,1,K] = x·wᵀ + b. "NAME.weight" [K,1,1,C],
 * "NAME.bias"; both are read in the compute type. */
dnr_tid dnr_dense(dnr_graph *g, const char *name, dnr_tid x, int out);
extern const dnri_op_def dnri_def_dense;       /* in {x, w, b} out {y} */
extern const dnri_op_def dnri_def_dense_dgrad; /* in {dy, w} out {dx} */
extern const dnri_op_def dnri_def_dense_wgrad; /* in {x, dy} out {dw, db: GRAD, master type} */

/* ---- loss.c: softmax cross-entropy. The target distribution of a sample is its label, smoothed as
 * PyTorch's CrossEntropyLoss: (1 − ε)·onehot + ε/K; or a row of `soft` (master type [n,1,1,K])
 * smoothed likewise. Samples with label < 0 count nowhere. Computed in the master type.
 *   dlogits = (softmax(logits)·Σtarget − target) · grad_scale · state.loss_scale */
typedef struct dnr_loss_opts {
    double smoothing;
    double grad_scale; /* 1 / (samples of the whole step) */
} dnr_loss_opts;
/* Emits the loss; returns the losses of the samples, master type [n,1,1,1] (0 where label < 0). */
dnr_tid dnr_loss(dnr_graph *g, dnr_tid logits, dnr_tid labels, dnr_tid soft,
                 const dnr_loss_opts *o);

typedef struct dnri_loss_attr {
    double smoothing, grad_scale;
    bool training; /* counts state.forwards */
} dnri_loss_attr;
/* loss.fprop in {logits, labels, soft?, HEADER} out {loss[n], STATE}
 * loss.bwd   in {logits, labels, soft?, STATE} out {dlogits}
 * state.loss_sum, correct1, correct5, samples start anew when header.first, then add this batch's;
 * forwards += training. A sample is correct at k when fewer than k logits exceed its label's or equal
 * it at a lower index; none with a NaN logit is. Top-5 with at most 5 classes is otherwise always
 * correct. With soft targets, labels still decide what counts as correct. */
extern const dnri_op_def dnri_def_loss, dnri_def_loss_bwd;

/* ---- shortcut.c: option A of He et al. 2015 (arXiv:1512.03385): every `stride`-th pixel, zero
 * channels added, half before and half after (the extra one after):
 *   y[n,p,q, ⌊(K−C)/2⌋ + c] = x[n, p·stride, q·stride, c];  P = ⌈H/stride⌉, likewise Q */
dnr_tid dnr_shortcut_a(dnr_graph *g, const char *name, dnr_tid x, int out, int stride);
typedef struct dnri_shortcut_attr {
    int32_t out, stride;
    int64_t h, w, c; /* of x */
} dnri_shortcut_attr;
/* shortcut.fprop in {x} out {y}; shortcut.bwd in {dy} out {dx} */
extern const dnri_op_def dnri_def_shortcut, dnri_def_shortcut_bwd;

#endif
