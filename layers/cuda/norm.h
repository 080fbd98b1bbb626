/* norm.h: what other layers take of batch norm's statistics. */
#ifndef DNR_CUDA_NORM_H
#define DNR_CUDA_NORM_H

#include "../../runtime/cuda/device.h"

/* sum ← Σ x and sqsum ← Σ x² by channel, by our kernels, in the op's workspace: k_norm_workspace bytes. */
void dnri_cuda_sums(const dnri_cuda_op *s, const dnr_desc *d, const void *x, void *sum,
                    void *sqsum);

#endif
