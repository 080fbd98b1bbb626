/* problem.h: a convolution as cuDNN is asked for it. Names no vendor's header, so that tests can ask, too. */
#ifndef DNR_PROBLEM_H
#define DNR_PROBLEM_H

#include "../tensor.h"

/* FPROP_STATS: fprop, and the fp32 sums of y and y² of each channel; FPROP_ACT: y = act(fprop + residual + bias),
 * all of one type and rounded once */
typedef enum dnri_conv_kind {
    DNRI_FPROP,
    DNRI_DGRAD,
    DNRI_WGRAD,
    DNRI_FPROP_STATS,
    DNRI_FPROP_ACT
} dnri_conv_kind;

/* One convolution, NHWC, square kernel; all fields of one width, so that two compare by memcmp. */
typedef struct dnri_conv_problem {
    int64_t kind; /* dnri_conv_kind */
    int64_t type; /* dnr_dtype of all three tensors: F16, BF16, F32; sums are fp32 */
    int64_t tf32; /* F32 may be multiplied in TF32 */
    int64_t n, h, w, c, p, q, k;
    int64_t kernel, stride, pad;
    int64_t residual, relu; /* FPROP_ACT: are they there */
    int64_t deterministic;  /* engines that repeat their bits, taken in cuDNN's order, untimed */
    int64_t
        benchmark; /* else: time candidates, doubtful ones too; DNRI_ANEW: also where a choice is kept */
    int64_t workspace_cap; /* bytes */
} dnri_conv_problem;

enum { DNRI_ANEW = 2 };

/* Is there another way, by fprop's plan and a pass of our own? */
static inline bool dnri_conv_splits(const dnri_conv_problem *p)
{
    return p->kind == DNRI_FPROP_STATS || p->kind == DNRI_FPROP_ACT;
}

/* For tests on machines without a GPU: the first candidate on the device that `json` (cuDNN's device
 * properties) describes, or the same once more from its engine and knobs alone; `impl` is "" where there is
 * none. */
dnr_status dnri_cudnn_probe(const char *json, const dnri_conv_problem *p, bool again, char impl[64],
                            size_t *workspace);

#endif
