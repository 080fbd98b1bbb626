/* conv_run.h: what ops have in common that run a plan of cuDNN's, or plain loops where it has none. */
#ifndef DNR_CUDA_CONV_RUN_H
#define DNR_CUDA_CONV_RUN_H

#include "../../runtime/cuda/convplan.h"
#include "../layers.h"
#include "kernels.h"

/* First member of the op's own struct, which comes from malloc. */
typedef struct dnri_conv_run {
    const dnri_conv_plan *plan;    /* the device's; NULL: another way is taken */
    cudnnBackendDescriptor_t pack; /* of the plan's addresses */
    k_conv_args geometry;          /* for plain loops */
} dnri_conv_run;

/* y[n,p,q,k] of x[n,h,w,c], or backward, as cuDNN is asked for it. */
dnri_conv_problem dnri_conv_problem_of(dnri_conv_kind kind, const dnr_desc *x, const dnr_desc *y,
                                       const dnri_conv_attr *a, const dnri_lower_opts *o);
/* Remarks that plain loops are taken, where they are. */
dnri_conv_run dnri_conv_run_of(const dnri_cuda *d, const dnri_conv_problem *p, const dnri_op *op,
                               const dnri_conv_plan *plan);

/* For the op's `release`: frees the op's own struct, too. */
void dnri_conv_release(dnri_cuda_op *s);
/* For its `prepare`: the addresses of the runs to come. Nothing, where there is no plan. */
dnr_status dnri_conv_bind(dnri_cuda_op *s, const dnri_conv_at *at);
/* Enqueues the plan on the op's stream. */
dnr_status dnri_conv_execute(dnri_cuda_op *s);

#endif
