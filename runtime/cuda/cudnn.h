/* cudnn.h: convolutions through cuDNN's graph API. */
#ifndef DNR_CUDNN_H
#define DNR_CUDNN_H

#include "cuda.h"

typedef enum dnri_conv_kind { DNRI_FPROP, DNRI_DGRAD, DNRI_WGRAD } dnri_conv_kind;

/* One convolution, NHWC, square kernel; all fields of one width, so that two compare by memcmp. */
typedef struct dnri_conv_problem {
    int64_t kind; /* dnri_conv_kind */
    int64_t type; /* dnr_dtype of all three tensors: F16, BF16, F32; sums are fp32 */
    int64_t tf32; /* F32 may be multiplied in TF32 */
    int64_t n, h, w, c, p, q, k;
    int64_t kernel, stride, pad;
    int64_t deterministic; /* engines that repeat their bits, taken in cuDNN's order, untimed */
    int64_t benchmark;     /* else: time candidates, doubtful ones too */
    int64_t workspace_cap; /* bytes */
} dnri_conv_problem;

typedef struct dnri_cudnn_keep dnri_cudnn_keep;

/* The plan chosen for a problem. */
typedef struct dnri_conv_plan {
    struct dnri_conv_plan *next;
    dnri_conv_problem problem;
    cudnnBackendDescriptor_t plan; /* NULL: cuDNN has none within these bounds */
    size_t workspace;
    char impl[64]; /* "cudnn eng67 k2=4,13=0": engine and knobs */
    dnri_cudnn_keep *keep;
} dnri_conv_plan;

/* ---- tune.c. Chosen once for each problem of a device, which owns the plan. */
dnr_status dnri_cudnn_choose(dnri_cuda *d, const dnri_conv_problem *p, const dnri_conv_plan **out);
void dnri_cudnn_drop_plans(dnri_cuda *d);

/* ---- cudnn.c */
/* Where plans are built: a handle, or (in tests) the properties of a device that is not there. */
typedef struct dnri_cudnn_target {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t device;
    bool *said_refused; /* the remark was made */
} dnri_cudnn_target;

typedef struct dnri_conv_candidate {
    cudnnBackendDescriptor_t plan;
    size_t workspace;
    bool doubtful; /* may sum in less than fp32 */
    char impl[64];
} dnri_conv_candidate;

dnri_cudnn_keep *dnri_cudnn_keep_new(void); /* NULL: out of memory */
void dnri_cudnn_keep_free(dnri_cudnn_keep *k);

/* Up to `max` plans that compute `p` within its bounds, the likeliest to be fast first. They live in `k`. */
dnr_status dnri_cudnn_candidates(dnri_cudnn_keep *k, const dnri_cudnn_target *t,
                                 const dnri_conv_problem *p, int max, dnri_conv_candidate *c,
                                 int *n);

/* The addresses of a plan's run; w is dw for DNRI_WGRAD. Destroy with cudnnBackendDestroyDescriptor, also
 * after a failure where *out is not NULL. */
dnr_status dnri_cudnn_pack(cudnnBackendDescriptor_t *out, void *x, void *w, void *y,
                           void *workspace);

/* For tests on machines without a GPU: the first candidate on the device that `json` (cuDNN's device
 * properties) describes; `impl` is "" where there is none. */
dnr_status dnri_cudnn_probe(const char *json, const dnri_conv_problem *p, char impl[64],
                            size_t *workspace);

#endif
