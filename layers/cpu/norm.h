/* norm.h: batch normalisation's passes over rows of channels, and what they share. */
#ifndef DNR_CPU_NORM_H
#define DNR_CPU_NORM_H

#include "../../runtime/cpu/cpu.h"

/* ctx is a dnri_norm, begin and end count rows. */
typedef struct dnri_norm_passes {
    dnri_slice_fn moments;   /* sums of the slice ← Σ x, Σ x² */
    dnri_slice_fn normalise; /* y = act((x − mean) · factor + beta + residual) */
    dnri_slice_fn bwd_sums; /* sums of the slice ← Σ dz, Σ dz · (x − mean); dresidual ← dz */
    dnri_slice_fn bwd_dx;
} dnri_norm_passes;

typedef struct dnri_norm {
    dnri_binding b;
    int64_t m, c;     /* rows, channels */
    int64_t all_rows; /* of all ranks */
    bool bf16, relu, dy2;
    int slices;
    double eps, momentum;
    /* what the slices read; the same for all norm.* */
    const void *x, *res;
    void *y;
    const float *mean;
    float *factor;     /* [c] gamma · invstd */
    const float *beta; /* [c]; NULL: unknown */
    /* norm.bwd */
    const void *dy, *dy2_in;
    void *dx, *dres;
    float *offset, *slope; /* [c]: dx = factor · (dz − offset − (x − mean) · slope) */
    double *sums;          /* [slices][2][c] */
    dnri_norm_passes passes;
} dnri_norm;

/* Those for bf16 on a CPU with AVX-512 and its bf16 instructions; NULL on others. Where forward added no residual, norm.bwd
 * takes the ReLU's mask from x, mean, factor and beta, which give y's signs, and reads no y. */
const dnri_norm_passes *dnri_norm_avx512(void);

#endif
