/* narrow.h: our own product (narrow.cu) beside another way to the same result. */
#ifndef DNR_NARROW_H
#define DNR_NARROW_H

#include "../../runtime/cuda/device.h"
#include "kernels.h"

/* What is timed: `a` without addresses, with a residual that d lies over and with a mask where these are said to be
 * there. */
typedef struct dnri_narrow_contest {
    const char *name; /* of the op */
    k_narrow_args a;
    bool residual, mask;
    /* Enqueues the other way, whose addresses are a's; `own` is passed on. It may fail: then it loses. */
    dnr_status (*rival)(dnri_cuda *d, const void *own, cudaStream_t s, const k_narrow_args *a,
                        void *workspace);
    const void *own;
    size_t workspace; /* of the rival, bytes */
} dnri_narrow_contest;

/* Is k_narrow the faster one? By the device's earlier choice, else by time. */
dnr_status dnri_narrow_wins(dnri_cuda *d, const dnri_narrow_contest *c, bool *wins);

#endif
