/* norm.c: batch normalisation, NHWC: rows of C channels, M = N·H·W of them.
 *
 * Sums over the rows are taken in double, by slice, in one pass: x and its square are exact there, so
 * E[x²] − E[x]² loses nothing that a second pass would keep until |mean| exceeds about 1e5 standard
 * deviations, where fp32 has lost x itself. Slices add up in their order, so equal runs give equal bits. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"
#include "norm.h"

#include <math.h>

enum { ROWS = 4 }; /* rows added together between two visits of the accumulators */

typedef dnri_norm norm;

static size_t sums_bytes(const norm *s)
{
    return (size_t)s->slices * 2 * (size_t)s->c * sizeof(double);
}

/* ---- statistics: sums ← Σ x, Σ x² */

DNRI_INLINE void moments(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const norm *s = ctx;
    const int64_t c = s->c;
    const void *x = s->x;
    double *sum = s->sums + 2 * slice * c, *square = sum + c;
    memset(sum, 0, 2 * (size_t)c * sizeof *sum);
    int64_t r = begin;
    for (; r + ROWS <= end; r += ROWS)
        DNRI_EACH (j, 0, c) {
            double v0 = dnri_ld(x, r * c + j, bf16), v1 = dnri_ld(x, (r + 1) * c + j, bf16);
            double v2 = dnri_ld(x, (r + 2) * c + j, bf16), v3 = dnri_ld(x, (r + 3) * c + j, bf16);
            sum[j] += (v0 + v1) + (v2 + v3);
            square[j] += (v0 * v0 + v1 * v1) + (v2 * v2 + v3 * v3);
        }
    for (; r < end; r++)
        DNRI_EACH (j, 0, c) {
            double v = dnri_ld(x, r * c + j, bf16);
            sum[j] += v;
            square[j] += v * v;
        }
}
DNRI_KERNEL(moments);

/* Adds up the slices of channel j. */
static void total(const norm *s, int64_t j, double *a, double *b)
{
    *a = *b = 0;
    for (int i = 0; i < s->slices; i++) {
        *a += s->sums[(2 * i) * s->c + j];
        *b += s->sums[(2 * i + 1) * s->c + j];
    }
}

static void set_factor(const norm *s, const float *gamma, const float *invstd)
{
    for (int64_t j = 0; j < s->c; j++)
        s->factor[j] = gamma[j] * invstd[j];
}

/* ---- y = act((x − mean) · factor + beta + residual) */

DNRI_INLINE void normalise_with(const norm *s, int64_t begin, int64_t end, bool relu, bool bf16)
{
    const int64_t c = s->c;
    const float *mean = s->mean, *factor = s->factor, *beta = s->beta;
    const void *x = s->x, *res = s->res;
    void *y = s->y;
    if (res)
        for (int64_t r = begin * c; r < end * c; r += c)
            DNRI_EACH (j, 0, c) {
                float v = (dnri_ld(x, r + j, bf16) - mean[j]) * factor[j] + beta[j];
                v += dnri_ld(res, r + j, bf16);
                dnri_st(y, r + j, relu ? dnri_keep_if(!(v < 0), v) : v, bf16); /* NaN passes */
            }
    else
        for (int64_t r = begin * c; r < end * c; r += c)
            DNRI_EACH (j, 0, c) {
                float v = (dnri_ld(x, r + j, bf16) - mean[j]) * factor[j] + beta[j];
                dnri_st(y, r + j, relu ? dnri_keep_if(!(v < 0), v) : v, bf16);
            }
}

/* Options become constants, so that each case gets a loop without branches. */
DNRI_INLINE void normalise(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const norm *s = ctx;
    if (s->relu)
        normalise_with(s, begin, end, true, bf16);
    else
        normalise_with(s, begin, end, false, bf16);
}
DNRI_KERNEL(normalise);

/* Statistics of channel j from its sums over `rows` rows, running ones too. */
static void set_statistics(const norm *s, int64_t j, int64_t rows, double sum, double square)
{
    float *running_mean = s->b.in[4], *running_var = s->b.in[5];
    double m = (double)rows, w = s->momentum, unbiased = rows > 1 ? m / (m - 1) : 1;
    double mu = sum / m, var = square / m - mu * mu;
    var = var < 0 ? 0 : var; /* NaN passes */
    ((float *)s->b.out[1])[j] = (float)mu;
    ((float *)s->b.out[2])[j] = (float)(1 / sqrt(var + s->eps));
    running_mean[j] = (float)((1 - w) * (double)running_mean[j] + w * mu);
    running_var[j] = (float)((1 - w) * (double)running_var[j] + w * var * unbiased);
}

static void normalise_all(norm *s, const float *invstd)
{
    set_factor(s, s->b.in[1], invstd);
    dnri_slices(s->slices, s->m, s->passes.normalise, s);
}

static dnr_status train_run(void *ctx)
{
    norm *s = ctx;
    dnri_slices(s->slices, s->m, s->passes.moments, s);
    for (int64_t j = 0; j < s->c; j++) {
        double sum, square;
        total(s, j, &sum, &square);
        set_statistics(s, j, s->m, sum, square);
    }
    normalise_all(s, s->b.out[2]);
    return DNR_OK;
}

/* ---- over all ranks (sync_norm.c) */

static dnr_status sums_run(void *ctx)
{
    norm *s = ctx;
    float *sum = s->b.out[0], *sqsum = s->b.out[1];
    dnri_slices(s->slices, s->m, s->passes.moments, s);
    for (int64_t j = 0; j < s->c; j++) {
        double a, b;
        total(s, j, &a, &b);
        sum[j] = (float)a;
        sqsum[j] = (float)b;
    }
    return DNR_OK;
}

static dnr_status sync_run(void *ctx)
{
    norm *s = ctx;
    const float *sum = s->b.in[6], *sqsum = s->b.in[7];
    for (int64_t j = 0; j < s->c; j++)
        set_statistics(s, j, s->all_rows, (double)sum[j], (double)sqsum[j]);
    normalise_all(s, s->b.out[2]);
    return DNR_OK;
}

static dnr_status apply_run(void *ctx)
{
    norm *s = ctx;
    normalise_all(s, s->b.in[5]);
    return DNR_OK;
}

static dnr_status eval_run(void *ctx)
{
    norm *s = ctx;
    const float *gamma = s->b.in[1], *var = s->b.in[5];
    for (int64_t j = 0; j < s->c; j++)
        s->factor[j] = (float)((double)gamma[j] / sqrt((double)var[j] + s->eps));
    dnri_slices(s->slices, s->m, s->passes.normalise, s);
    return DNR_OK;
}

/* ---- backward: sums ← Σ dz, Σ dz · (x − mean); dresidual ← dz */

/* What backward reads, by value: a compiler keeps it in registers across stores. */
typedef struct bwd_in {
    const void *x, *y, *dy, *dy2;
    const float *mean;
} bwd_in;

DNRI_INLINE bwd_in bwd_inputs(const norm *s)
{
    return (bwd_in){s->x, s->y, s->dy, s->dy2_in, s->mean};
}

DNRI_INLINE float dz_at(bwd_in in, int64_t i, bool relu, bool dy2, bool bf16)
{
    float dz = dnri_ld(in.dy, i, bf16);
    if (dy2)
        dz += dnri_ld(in.dy2, i, bf16);
    if (relu)
        dz = dnri_keep_if(dnri_ld(in.y, i, bf16) > 0, dz);
    return dz;
}

DNRI_INLINE void sums_with(const norm *s, int slice, int64_t begin, int64_t end, bool relu,
                           bool dy2, bool residual, bool bf16)
{
    const bwd_in in = bwd_inputs(s);
    const int64_t c = s->c;
    void *dres = s->dres;
    double *sum = s->sums + 2 * slice * c, *dot = sum + c;
    memset(sum, 0, 2 * (size_t)c * sizeof *sum);
    int64_t r = begin * c;
    for (; r + ROWS * c <= end * c; r += ROWS * c)
        DNRI_EACH (j, 0, c) {
            const int64_t i0 = r + j, i1 = i0 + c, i2 = i1 + c, i3 = i2 + c;
            float m = in.mean[j];
            float z0 = dz_at(in, i0, relu, dy2, bf16), z1 = dz_at(in, i1, relu, dy2, bf16);
            float z2 = dz_at(in, i2, relu, dy2, bf16), z3 = dz_at(in, i3, relu, dy2, bf16);
            if (residual) {
                dnri_st(dres, i0, z0, bf16);
                dnri_st(dres, i1, z1, bf16);
                dnri_st(dres, i2, z2, bf16);
                dnri_st(dres, i3, z3, bf16);
            }
            double t0 = dnri_ld(in.x, i0, bf16) - m, t1 = dnri_ld(in.x, i1, bf16) - m;
            double t2 = dnri_ld(in.x, i2, bf16) - m, t3 = dnri_ld(in.x, i3, bf16) - m;
            double d0 = z0, d1 = z1, d2 = z2, d3 = z3;
            sum[j] += (d0 + d1) + (d2 + d3);
            dot[j] += (d0 * t0 + d1 * t1) + (d2 * t2 + d3 * t3);
        }
    for (; r < end * c; r += c)
        DNRI_EACH (j, 0, c) {
            float z = dz_at(in, r + j, relu, dy2, bf16);
            if (residual)
                dnri_st(dres, r + j, z, bf16);
            double d = z, t = dnri_ld(in.x, r + j, bf16) - in.mean[j];
            sum[j] += d;
            dot[j] += d * t;
        }
}

DNRI_INLINE void dx_with(const norm *s, int64_t begin, int64_t end, bool relu, bool dy2, bool bf16)
{
    const bwd_in in = bwd_inputs(s);
    const int64_t c = s->c;
    const float *factor = s->factor, *offset = s->offset, *slope = s->slope;
    void *dx = s->dx;
    for (int64_t r = begin * c; r < end * c; r += c)
        DNRI_EACH (j, 0, c) {
            float dz = dz_at(in, r + j, relu, dy2, bf16);
            float t = (dnri_ld(in.x, r + j, bf16) - in.mean[j]) * slope[j];
            dnri_st(dx, r + j, factor[j] * (dz - offset[j] - t), bf16);
        }
}

#define DNRI_PICK(relu, dy2, CALL)                                                                 \
    do {                                                                                           \
        if ((relu) && (dy2))                                                                       \
            CALL(true, true);                                                                      \
        else if (relu)                                                                             \
            CALL(true, false);                                                                     \
        else if (dy2)                                                                              \
            CALL(false, true);                                                                     \
        else                                                                                       \
            CALL(false, false);                                                                    \
    } while (0)

DNRI_INLINE void bwd_sums(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const norm *s = ctx;
#define PLAIN(relu, dy2)    sums_with(s, slice, begin, end, relu, dy2, false, bf16)
#define RESIDUAL(relu, dy2) sums_with(s, slice, begin, end, relu, dy2, true, bf16)
    if (s->dres)
        DNRI_PICK(s->relu, s->dy2, RESIDUAL);
    else
        DNRI_PICK(s->relu, s->dy2, PLAIN);
#undef PLAIN
#undef RESIDUAL
}
DNRI_KERNEL(bwd_sums);

DNRI_INLINE void bwd_dx(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    norm s = *(const norm *)ctx;
    if (s.dres) { /* it holds dz */
        s.dy = s.dres;
        s.relu = s.dy2 = false;
    }
#define DX(relu, dy2) dx_with(&s, begin, end, relu, dy2, bf16)
    DNRI_PICK(s.relu, s.dy2, DX);
#undef DX
}
DNRI_KERNEL(bwd_dx);

static dnr_status bwd_run(void *ctx)
{
    norm *s = ctx;
    const float *invstd = s->b.in[7];
    float *dgamma = s->b.out[1], *dbeta = s->b.out[2];
    set_factor(s, s->b.in[4], invstd);
    dnri_slices(s->slices, s->m, s->passes.bwd_sums, s);
    for (int64_t j = 0; j < s->c; j++) {
        double sum, dot, inv = (double)invstd[j], m = (double)s->m;
        total(s, j, &sum, &dot);
        dbeta[j] = (float)sum;
        dgamma[j] = (float)(dot * inv);
        s->offset[j] = (float)(sum / m);
        s->slope[j] = (float)(dot * inv * inv / m);
    }
    dnri_slices(s->slices, s->m, s->passes.bwd_dx, s);
    return DNR_OK;
}

/* ---- backward over all ranks (sync_norm.c) */

static dnr_status bwd_sums_run(void *ctx)
{
    norm *s = ctx;
    const float *invstd = s->b.in[7];
    float *dgamma = s->b.out[0], *dbeta = s->b.out[1], *all_sum = s->b.out[2],
          *all_dot = s->b.out[3];
    set_factor(s, s->b.in[4], invstd);
    dnri_slices(s->slices, s->m, s->passes.bwd_sums, s);
    for (int64_t j = 0; j < s->c; j++) {
        double sum, dot;
        total(s, j, &sum, &dot);
        dbeta[j] = all_sum[j] = (float)sum;
        dgamma[j] = all_dot[j] = (float)(dot * (double)invstd[j]);
    }
    return DNR_OK;
}

static dnr_status bwd_dx_run(void *ctx)
{
    norm *s = ctx;
    const float *gamma = s->b.in[4], *invstd = s->b.in[6], *sum = s->b.in[7], *dot = s->b.in[8];
    double m = (double)s->all_rows;
    for (int64_t j = 0; j < s->c; j++) {
        s->offset[j] = (float)((double)sum[j] / m);
        s->slope[j] = (float)((double)dot[j] * (double)invstd[j] / m);
    }
    set_factor(s, gamma, invstd);
    dnri_slices(s->slices, s->m, s->passes.bwd_dx, s);
    return DNR_OK;
}

/* ---- binding and lowering */

static dnr_status bind_forward(void *ctx, const dnri_binding *b)
{
    norm *s = ctx;
    s->b = *b;
    s->x = b->in[0];
    s->beta = b->in[2];
    s->res = b->in[3];
    s->y = b->out[0];
    s->sums = b->workspace;
    s->factor = (float *)((char *)b->workspace + sums_bytes(s));
    /* norm.train makes the mean, norm.apply and norm.eval read it */
    s->mean = b->out[1] ? b->out[1] : b->in[4];
    return DNR_OK;
}

static dnr_status bind_backward(void *ctx, const dnri_binding *b)
{
    norm *s = ctx;
    s->b = *b;
    s->x = b->in[0];
    s->y = b->in[1];
    s->dy = b->in[2];
    s->dy2_in = b->in[3];
    s->dy2 = b->in[3] != NULL;
    s->beta = b->in[5];
    s->mean = b->in[6];
    s->dx = b->out[0];
    s->dres = b->out[3];
    s->sums = b->workspace;
    s->factor = (float *)((char *)b->workspace + sums_bytes(s));
    s->offset = s->factor + s->c;
    s->slope = s->offset + s->c;
    return DNR_OK;
}

static dnr_status bind_sums(void *ctx, const dnri_binding *b)
{
    norm *s = ctx;
    s->b = *b;
    s->x = b->in[0];
    s->sums = b->workspace;
    return DNR_OK;
}

static dnr_status bind_bwd_sums(void *ctx, const dnri_binding *b)
{
    norm *s = ctx;
    DNR_TRY(bind_backward(ctx, b));
    s->dx = NULL;
    s->dres = b->out[4];
    return DNR_OK;
}

static dnr_status bind_bwd_dx(void *ctx, const dnri_binding *b)
{
    norm *s = ctx;
    DNR_TRY(bind_backward(ctx, b));
    s->beta = NULL;
    s->mean = b->in[5];
    s->dres = NULL;
    return DNR_OK;
}

static norm *make(dnr_device *dev, const dnr_graph *g, const dnri_op *op, dnr_status (*run)(void *),
                  int launches, int vectors, dnri_step *out)
{
    norm *s = dnri_cpu_step(out, sizeof *s, run, launches);
    if (!s)
        return NULL;
    const dnr_desc *x = dnri_desc(g, op->in[0]);
    s->c = x->dim[3];
    s->m = dnri_count(x) / s->c;
    s->bf16 = x->dtype == DNR_BF16;
    s->slices = dnri_slices_for(dev, dnri_count(x));
    const dnri_norm_passes *const fast = s->bf16 ? dnri_norm_avx512() : NULL;
    s->passes = fast ? *fast
                     : (dnri_norm_passes){moments_k[s->bf16], normalise_k[s->bf16],
                                          bwd_sums_k[s->bf16], bwd_dx_k[s->bf16]};
    out->in_place = true;
    out->workspace = sums_bytes(s) + (size_t)vectors * (size_t)s->c * sizeof(float);
    return s;
}

static dnr_status forward(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                          dnr_status (*run)(void *), int launches, dnri_step *out)
{
    norm *s = make(dev, g, op, run, launches, 1, out);
    if (!s)
        return DNR_EMEM;
    const dnri_norm_attr *a = (const dnri_norm_attr *)op->attr;
    s->eps = a->eps;
    s->momentum = a->momentum;
    s->relu = a->relu;
    out->bind = bind_forward;
    return DNR_OK;
}

static dnr_status train(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return forward(dev, g, op, train_run, 2, out);
}

static dnr_status apply(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return forward(dev, g, op, apply_run, 1, out);
}

static dnr_status eval(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                       const dnri_lower_opts *o, dnri_step *out)
{
    return forward(dev, g, op, eval_run, 1, out);
}

static dnr_status backward(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                           const dnri_lower_opts *o, dnri_step *out)
{
    norm *s = make(dev, g, op, bwd_run, 2, 3, out);
    if (!s)
        return DNR_EMEM;
    s->relu = ((const dnri_norm_bwd_attr *)op->attr)->relu;
    out->bind = bind_backward;
    return DNR_OK;
}

static dnr_status sums(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                       const dnri_lower_opts *o, dnri_step *out)
{
    if (!make(dev, g, op, sums_run, 1, 0, out))
        return DNR_EMEM;
    out->bind = bind_sums;
    return DNR_OK;
}

static dnr_status sync_norm(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(forward(dev, g, op, sync_run, 1, out));
    norm *s = out->ctx;
    s->all_rows = s->m * ((const dnri_norm_sync_attr *)op->attr)->ranks;
    return DNR_OK;
}

static dnr_status backward_sums(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                const dnri_lower_opts *o, dnri_step *out)
{
    norm *s = make(dev, g, op, bwd_sums_run, 1, 3, out);
    if (!s)
        return DNR_EMEM;
    s->relu = ((const dnri_norm_bwd_attr *)op->attr)->relu;
    out->bind = bind_bwd_sums;
    return DNR_OK;
}

static dnr_status backward_dx(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_norm_dx_attr *a = (const dnri_norm_dx_attr *)op->attr;
    norm *s = make(dev, g, op, bwd_dx_run, 1, 3, out);
    if (!s)
        return DNR_EMEM;
    s->relu = a->relu;
    s->all_rows = s->m * a->ranks;
    out->bind = bind_bwd_dx;
    return DNR_OK;
}

/* y itself is as near as a mask here. */
static bool without_mask(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return op->n_out == 3;
}

const dnri_lowering dnri_cpu_norm[] = {{&dnri_def_norm_train, without_mask, train},
                                       {&dnri_def_norm_apply, NULL, apply},
                                       {&dnri_def_norm_eval, NULL, eval},
                                       {&dnri_def_norm_bwd, NULL, backward},
                                       {&dnri_def_norm_sums, NULL, sums},
                                       {&dnri_def_norm_sync, NULL, sync_norm},
                                       {&dnri_def_norm_bwd_sums, NULL, backward_sums},
                                       {&dnri_def_norm_bwd_dx, NULL, backward_dx},
                                       {0}};
