/* pool.h: pools, and what their passes share. */
#ifndef DNR_CPU_POOL_H
#define DNR_CPU_POOL_H

#include "../../runtime/cpu/cpu.h"

typedef struct dnri_pool {
    dnri_binding b;
    bool bf16, positive;
    int slices, kernel, stride, pad;
    int64_t n, h, w, c; /* of x */
    int64_t p, q;       /* of y */
    float scale;        /* of averages: 1 / taps; 1 for maxima */
    dnri_slice_fn fast; /* of a maximum; NULL: the plain one */
} dnri_pool;

/* The maximum's passes over bf16 by AVX-512: ctx is a dnri_pool, begin and end count lines of y, or of dx. The bits are the plain
 * ones'. NULL on other CPUs. */
dnri_slice_fn dnri_max_pool_avx512(bool forward);

static inline int64_t dnri_at_least(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t dnri_at_most(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
