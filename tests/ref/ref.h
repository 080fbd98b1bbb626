/* ref.h: the reference back end: every op once, naively, in fp64, to be checked by eye against the
 * formulas of layers.h and engine_ops.h. Other back ends and rewrites are tested against it. Outputs may lie over
 * inputs where the op says so (dnri_op_def.takes). */
#ifndef DNR_REF_H
#define DNR_REF_H

#include "../../layers/layers.h"
#include "../../runtime/backend.h"
#include "../../runtime/engine_ops.h"
#include "../../runtime/reduce.h"

#include <math.h>

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

/* Statistics of channel c of x = in[0] over M values in all, of x itself or of the sums that are given for it: from `in` on
 * stand the running mean and variance, which move, and Σ x and Σ x²; mean and 1/std go to `out` and the one behind it. */
static inline void ref_batch_stats(const ref_step *s, const dnri_norm_attr *a, int64_t M, int64_t c,
                                   int in, int out)
{
    const int64_t C = s->in[0].dim[3], n = dnri_count(&s->in[0]);
    const double *x = s->at.in[0], m = a->momentum;
    const double *sum = s->op.n_in > in + 2 ? s->at.in[in + 2] : NULL, *sqsum = s->at.in[in + 3];
    double *running_mean = s->at.in[in], *running_var = s->at.in[in + 1];
    double mean = 0, var = 0;
    for (int64_t i = c; !sum && i < n; i += C)
        mean += x[i];
    mean = (sum ? sum[c] : mean) / (double)M;
    for (int64_t i = c; !sum && i < n; i += C)
        var += (x[i] - mean) * (x[i] - mean);
    var = sum ? fmax(0, sqsum[c] / (double)M - mean * mean) : var / (double)M;
    ((double *)s->at.out[out])[c] = mean;
    ((double *)s->at.out[out + 1])[c] = 1 / sqrt(var + a->eps);
    running_mean[c] = (1 - m) * running_mean[c] + m * mean;
    running_var[c] = (1 - m) * running_var[c] + m * var * (double)M / (double)(M - 1);
}

/* y += a · x */
static inline void ref_axpy(double *y, double a, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += a * x[i];
}

#endif
