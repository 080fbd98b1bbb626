/* pool.c: maximum, average and global average, NHWC. Backward gathers, for each pixel of dx, from the
 * windows that hold it, so that no two threads write one place and sums have a fixed order. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"
#include "pool.h"

#include <math.h>

enum { CHUNK = 64 }; /* channels held in registers or L1 at a time */

typedef dnri_pool pool;

/* ---- forward: a row is one picture line of y */

DNRI_INLINE void max_rows(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const pool *s = ctx;
    const void *x = s->b.in[0];
    void *y = s->b.out[0];
    uint8_t *index = s->b.out[1];
    const bool positive = s->positive;
    float best[CHUNK];
    int32_t tap[CHUNK];
    for (int64_t row = begin; row < end; row++)
        for (int64_t q = 0; q < s->q; q++) {
            int64_t n = row / s->p, h0 = row % s->p * s->stride - s->pad,
                    w0 = q * s->stride - s->pad;
            int64_t r0 = dnri_at_least(0, -h0), r1 = dnri_at_most(s->kernel, s->h - h0);
            int64_t s0 = dnri_at_least(0, -w0), s1 = dnri_at_most(s->kernel, s->w - w0);
            for (int64_t c0 = 0; c0 < s->c; c0 += CHUNK) {
                int m = (int)dnri_at_most(CHUNK, s->c - c0);
                for (int j = 0; j < m; j++) {
                    best[j] = -INFINITY;
                    tap[j] = (int32_t)(r0 * s->kernel + s0);
                }
                for (int64_t r = r0; r < r1; r++)
                    for (int64_t t = s0; t < s1; t++) {
                        int64_t from = ((n * s->h + h0 + r) * s->w + w0 + t) * s->c + c0;
                        int32_t here = (int32_t)(r * s->kernel + t);
                        DNRI_EACH (j, 0, m) {
                            float v = dnri_ld(x, from + j, bf16), b = best[j];
                            /* the first of equals; NaN wins and stays */
                            bool take = b == b && !(v <= b);
                            best[j] = take ? v : b;
                            tap[j] = take ? here : tap[j];
                        }
                    }
                int64_t to = (row * s->q + q) * s->c + c0;
                DNRI_EACH (j, 0, m) {
                    dnri_st(y, to + j, best[j], bf16);
                    index[to + j] = positive && !(best[j] > 0) ? 255 : (uint8_t)tap[j];
                }
            }
        }
}
DNRI_KERNEL(max_rows);

DNRI_INLINE void avg_rows(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const pool *s = ctx;
    const void *x = s->b.in[0];
    void *y = s->b.out[0];
    const float scale = s->scale;
    float sum[CHUNK];
    for (int64_t row = begin; row < end; row++)
        for (int64_t q = 0; q < s->q; q++) {
            int64_t n = row / s->p, h0 = row % s->p * s->stride - s->pad,
                    w0 = q * s->stride - s->pad;
            int64_t r0 = dnri_at_least(0, -h0), r1 = dnri_at_most(s->kernel, s->h - h0);
            int64_t s0 = dnri_at_least(0, -w0), s1 = dnri_at_most(s->kernel, s->w - w0);
            for (int64_t c0 = 0; c0 < s->c; c0 += CHUNK) {
                int m = (int)dnri_at_most(CHUNK, s->c - c0);
                memset(sum, 0, sizeof sum);
                for (int64_t r = r0; r < r1; r++)
                    for (int64_t t = s0; t < s1; t++) {
                        int64_t from = ((n * s->h + h0 + r) * s->w + w0 + t) * s->c + c0;
                        DNRI_EACH (j, 0, m)
                            sum[j] += dnri_ld(x, from + j, bf16);
                    }
                int64_t to = (row * s->q + q) * s->c + c0;
                DNRI_EACH (j, 0, m)
                    dnri_st(y, to + j, sum[j] * scale, bf16);
            }
        }
}
DNRI_KERNEL(avg_rows);

/* ---- backward: a row is one picture line of dx; `is_max` takes dy only where the index points here */

DNRI_INLINE void bwd_rows(const pool *s, int64_t begin, int64_t end, bool is_max, bool bf16)
{
    const void *dy = s->b.in[0];
    const uint8_t *index = is_max ? s->b.in[1] : NULL;
    void *dx = s->b.out[0];
    const float scale = s->scale;
    float sum[CHUNK];
    for (int64_t row = begin; row < end; row++)
        for (int64_t w = 0; w < s->w; w++) {
            int64_t n = row / s->h, h = row % s->h;
            /* windows p with p·stride − pad <= h < p·stride − pad + kernel */
            int64_t p0 = dnri_at_least(0, (h + s->pad - s->kernel + s->stride) / s->stride);
            int64_t p1 = dnri_at_most(s->p, (h + s->pad) / s->stride + 1);
            int64_t q0 = dnri_at_least(0, (w + s->pad - s->kernel + s->stride) / s->stride);
            int64_t q1 = dnri_at_most(s->q, (w + s->pad) / s->stride + 1);
            for (int64_t c0 = 0; c0 < s->c; c0 += CHUNK) {
                int m = (int)dnri_at_most(CHUNK, s->c - c0);
                memset(sum, 0, sizeof sum);
                for (int64_t p = p0; p < p1; p++)
                    for (int64_t q = q0; q < q1; q++) {
                        int64_t from = ((n * s->p + p) * s->q + q) * s->c + c0;
                        int here = (int)((h + s->pad - p * s->stride) * s->kernel + w + s->pad -
                                         q * s->stride);
                        DNRI_EACH (j, 0, m)
                            sum[j] += dnri_keep_if(!is_max || index[from + j] == here,
                                                   dnri_ld(dy, from + j, bf16));
                    }
                int64_t to = (row * s->w + w) * s->c + c0;
                DNRI_EACH (j, 0, m)
                    dnri_st(dx, to + j, sum[j] * scale, bf16);
            }
        }
}

DNRI_INLINE void max_bwd_rows(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    bwd_rows(ctx, begin, end, true, bf16);
}
DNRI_KERNEL(max_bwd_rows);

DNRI_INLINE void avg_bwd_rows(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    bwd_rows(ctx, begin, end, false, bf16);
}
DNRI_KERNEL(avg_bwd_rows);

/* ---- global average: rows are pictures */

DNRI_INLINE void global_pictures(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const pool *s = ctx;
    const int64_t area = s->h * s->w;
    double sum[CHUNK];
    for (int64_t n = begin; n < end; n++)
        for (int64_t c0 = 0; c0 < s->c; c0 += CHUNK) {
            int m = (int)dnri_at_most(CHUNK, s->c - c0);
            memset(sum, 0, sizeof sum);
            for (int64_t i = 0; i < area; i++)
                DNRI_EACH (j, 0, m)
                    sum[j] += (double)dnri_ld(s->b.in[0], (n * area + i) * s->c + c0 + j, bf16);
            for (int j = 0; j < m; j++)
                dnri_st(s->b.out[0], n * s->c + c0 + j, (float)(sum[j] / (double)area), bf16);
        }
}
DNRI_KERNEL(global_pictures);

DNRI_INLINE void global_bwd_pictures(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const pool *s = ctx;
    const void *dy = s->b.in[0];
    void *dx = s->b.out[0];
    const int64_t area = s->h * s->w, c = s->c;
    const float scale = s->scale;
    for (int64_t n = begin; n < end; n++)
        for (int64_t i = 0; i < area; i++)
            DNRI_EACH (j, 0, c)
                dnri_st(dx, (n * area + i) * c + j, dnri_ld(dy, n * c + j, bf16) * scale, bf16);
}
DNRI_KERNEL(global_bwd_pictures);

/* ---- steps */

#define POOL_RUN(name, rows, kernel)                                                               \
    static dnr_status name##_run(void *ctx)                                                        \
    {                                                                                              \
        pool *s = ctx;                                                                             \
        dnri_slices(s->slices, rows, s->fast ? s->fast : kernel[s->bf16], s);                      \
        return DNR_OK;                                                                             \
    }
POOL_RUN(max, s->n * s->p, max_rows_k)
POOL_RUN(max_bwd, s->n * s->h, max_bwd_rows_k)
POOL_RUN(avg, s->n * s->p, avg_rows_k)
POOL_RUN(avg_bwd, s->n * s->h, avg_bwd_rows_k)
POOL_RUN(global, s->n, global_pictures_k)
POOL_RUN(global_bwd, s->n, global_bwd_pictures_k)

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    enum { MAX, AVG, GLOBAL };
    static const struct {
        const dnri_op_def *def;
        dnr_status (*run)(void *ctx);
        bool forward;
        int kind;
    } kinds[] = {{&dnri_def_max_pool, max_run, true, MAX},
                 {&dnri_def_max_pool_bwd, max_bwd_run, false, MAX},
                 {&dnri_def_avg_pool, avg_run, true, AVG},
                 {&dnri_def_avg_pool_bwd, avg_bwd_run, false, AVG},
                 {&dnri_def_global_pool, global_run, true, GLOBAL},
                 {&dnri_def_global_pool_bwd, global_bwd_run, false, GLOBAL}};
    int k = 0;
    while (kinds[k].def != op->def)
        k++;
    pool *s = dnri_cpu_step(out, sizeof *s, kinds[k].run, 1);
    if (!s)
        return DNR_EMEM;
    const dnr_desc *x = dnri_desc(g, kinds[k].forward ? op->in[0] : op->out[0]);
    const dnr_desc *y = dnri_desc(g, kinds[k].forward ? op->out[0] : op->in[0]);
    const dnri_pool_attr *a = (const dnri_pool_attr *)op->attr;
    s->bf16 = x->dtype == DNR_BF16;
    s->fast = s->bf16 && kinds[k].kind == MAX ? dnri_max_pool_avx512(kinds[k].forward) : NULL;
    s->positive = a->positive;
    s->kernel = a->kernel;
    s->stride = a->stride;
    s->pad = a->pad;
    s->n = x->dim[0];
    s->h = x->dim[1];
    s->w = x->dim[2];
    s->c = x->dim[3];
    s->p = y->dim[1];
    s->q = y->dim[2];
    const int64_t taps = kinds[k].kind == AVG      ? s->kernel * s->kernel
                         : kinds[k].kind == GLOBAL ? s->h * s->w
                                                   : 1;
    s->scale = 1 / (float)taps;
    s->slices = dnri_slices_for(dev, dnri_count(x));
    return DNR_OK;
}

const dnri_lowering dnri_cpu_pool[] = {{&dnri_def_max_pool, NULL, lower},
                                       {&dnri_def_max_pool_bwd, NULL, lower},
                                       {&dnri_def_avg_pool, NULL, lower},
                                       {&dnri_def_avg_pool_bwd, NULL, lower},
                                       {&dnri_def_global_pool, NULL, lower},
                                       {&dnri_def_global_pool_bwd, NULL, lower},
                                       {0}};
