/* ref.h: the reference back end: every op once, naively, in fp64, to be checked by eye against the
 * formulas of layers.h and engine_ops.h. Other back ends and rewrites are tested against it. Outputs may lie over
 * inputs where the op says so (dnri_op_def.takes). */
#ifndef DNR_REF_H
#define DNR_REF_H

#include "../../layers/layers.h"
#include "../../runtime/backend.h"
#include "../../runtime/engine_ops.h"
#include "../../runtime/reduce.h"

/* One lowered op: its description, the shapes and the addresses of its tensors. */
typedef struct ref_step {
    dnri_op op;
    dnr_desc in[DNRI_MAX_IN], out[DNRI_MAX_OUT]; /* zero where absent */
    dnri_binding at;
    int64_t flat;         /* elements of a flat slab, for the optimizer's ops */
    unsigned char *decay; /* sgd: dnri_decay_map */
    void (*run)(const struct ref_step *s);
} ref_step;

/* A row of a table of ops; tables end with a row of NULLs. */
typedef struct ref_row {
    const dnri_op_def *def;
    void (*run)(const ref_step *s);
} ref_row;

extern const ref_row ref_conv_rows[], ref_norm_rows[], ref_pool_rows[], ref_norm_pool_rows[],
    ref_packed_rows[], ref_algbn_rows[], ref_dense_rows[], ref_loss_rows[], ref_engine_rows[];

/* Loops over independent output elements are shared by threads; each element is summed by one. */
#ifdef _OPENMP
#define REF_PARALLEL _Pragma("omp parallel for schedule(static)")
#define REF_SUM      _Pragma("omp simd reduction(+ : sum)")
#else
#define REF_PARALLEL
#define REF_SUM
#endif

static inline double ref_dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    REF_SUM
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* A bit for each of n elements: y > 0. */
static inline void ref_mask(unsigned char *mask, const double *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        mask[i / 8] = i % 8 ? mask[i / 8] : 0;
        mask[i / 8] |= (unsigned char)((y[i] > 0) << i % 8);
    }
}

/* Is y[i] > 0? From y, or from its mask. */
static inline bool ref_positive(dnr_dtype t, const void *y, int64_t i)
{
    return t == DNR_U8 ? ((const unsigned char *)y)[i / 8] >> i % 8 & 1
                       : ((const double *)y)[i] > 0;
}

/* y += a · x */
static inline void ref_axpy(double *y, double a, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += a * x[i];
}

#endif
