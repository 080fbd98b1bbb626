/* ref_pool.c: pooling. x [N,H,W,C], y [N,P,Q,C]. */
#include "ref.h"

#include <math.h>
#include <string.h>

typedef struct shape {
    int64_t N, H, W, C, P, Q, kernel, stride, pad;
} shape;

static shape shape_of(const dnr_desc *x, const dnr_desc *y, const void *attr)
{
    const dnri_pool_attr *a = attr;
    return (shape){x->dim[0], x->dim[1], x->dim[2], x->dim[3], y->dim[1],
                   y->dim[2], a->kernel, a->stride, a->pad};
}

/* Offset in x of tap (r, s) of window (n, p, q), channel 0; −1 in the padding. */
static int64_t tap(const shape *z, int64_t n, int64_t p, int64_t q, int64_t r, int64_t s)
{
    const int64_t h = p * z->stride - z->pad + r, w = q * z->stride - z->pad + s;
    return h < 0 || h >= z->H || w < 0 || w >= z->W ? -1 : ((n * z->H + h) * z->W + w) * z->C;
}

static void max_fprop(const ref_step *s)
{
    const shape z = shape_of(&s->in[0], &s->out[0], s->op.attr);
    const double *x = s->at.in[0];
    double *y = s->at.out[0];
    uint8_t *index = s->at.out[1];
    REF_PARALLEL
    for (int64_t row = 0; row < z.N * z.P; row++)
        for (int64_t q = 0; q < z.Q; q++)
            for (int64_t c = 0; c < z.C; c++) {
                double best = 0;
                int64_t where = -1;
                for (int64_t t = 0; t < z.kernel * z.kernel; t++) {
                    const int64_t i = tap(&z, row / z.P, row % z.P, q, t / z.kernel, t % z.kernel);
                    if (i >= 0 &&
                        (where < 0 || x[i + c] > best || (isnan(x[i + c]) && !isnan(best)))) {
                        best = x[i + c];
                        where = t;
                    }
                }
                y[(row * z.Q + q) * z.C + c] = best;
                if (((const dnri_pool_attr *)s->op.attr)->positive && !(best > 0))
                    where = 255;
                index[(row * z.Q + q) * z.C + c] = (uint8_t)where;
            }
}

/* max over taps of max(0, x + bias): as the convolution, norm and pool that it stands for */
static void max_act(const ref_step *s)
{
    const shape z = shape_of(&s->in[0], &s->out[0], s->op.attr);
    const double *x = s->at.in[0], *bias = s->at.in[1];
    double *y = s->at.out[0];
    REF_PARALLEL
    for (int64_t i = 0; i < z.N * z.P * z.Q * z.C; i++) {
        const int64_t c = i % z.C, q = i / z.C % z.Q, row = i / z.C / z.Q;
        double best = 0;
        for (int64_t t = 0; t < z.kernel * z.kernel; t++) {
            const int64_t at = tap(&z, row / z.P, row % z.P, q, t / z.kernel, t % z.kernel);
            const double v = at < 0 ? 0 : x[at + c] + bias[c];
            best = v > best || isnan(v) ? v : best;
            if (isnan(best))
                break;
        }
        y[i] = best;
    }
}

static void max_bwd(const ref_step *s)
{
    const shape z = shape_of(&s->out[0], &s->in[0], s->op.attr);
    const double *dy = s->at.in[0];
    const uint8_t *index = s->at.in[1];
    double *dx = s->at.out[0];
    memset(dx, 0, dnri_bytes(&s->out[0]));
    REF_PARALLEL
    for (int64_t n = 0; n < z.N; n++)
        for (int64_t pq = 0; pq < z.P * z.Q; pq++)
            for (int64_t c = 0; c < z.C; c++) {
                const int64_t i = (n * z.P * z.Q + pq) * z.C + c, t = index[i];
                if (t < z.kernel * z.kernel) /* else it names none */
                    dx[tap(&z, n, pq / z.Q, pq % z.Q, t / z.kernel, t % z.kernel) + c] += dy[i];
            }
}

static void avg_fprop(const ref_step *s)
{
    const shape z = shape_of(&s->in[0], &s->out[0], s->op.attr);
    const double *x = s->at.in[0];
    double *y = s->at.out[0];
    REF_PARALLEL
    for (int64_t row = 0; row < z.N * z.P; row++)
        for (int64_t q = 0; q < z.Q; q++)
            for (int64_t c = 0; c < z.C; c++) {
                double sum = 0;
                for (int64_t t = 0; t < z.kernel * z.kernel; t++) {
                    const int64_t i = tap(&z, row / z.P, row % z.P, q, t / z.kernel, t % z.kernel);
                    sum += i < 0 ? 0 : x[i + c];
                }
                y[(row * z.Q + q) * z.C + c] = sum / (double)(z.kernel * z.kernel);
            }
}

static void avg_bwd(const ref_step *s)
{
    const shape z = shape_of(&s->out[0], &s->in[0], s->op.attr);
    const double *dy = s->at.in[0];
    double *dx = s->at.out[0];
    memset(dx, 0, dnri_bytes(&s->out[0]));
    REF_PARALLEL
    for (int64_t n = 0; n < z.N; n++)
        for (int64_t pq = 0; pq < z.P * z.Q; pq++)
            for (int64_t t = 0; t < z.kernel * z.kernel; t++) {
                const int64_t i = tap(&z, n, pq / z.Q, pq % z.Q, t / z.kernel, t % z.kernel);
                if (i >= 0)
                    ref_axpy(dx + i, 1 / (double)(z.kernel * z.kernel),
                             dy + (n * z.P * z.Q + pq) * z.C, z.C);
            }
}

static void global_fprop(const ref_step *s)
{
    const int64_t C = s->in[0].dim[3], pixels = s->in[0].dim[1] * s->in[0].dim[2];
    const double *x = s->at.in[0];
    double *y = s->at.out[0];
    for (int64_t n = 0; n < s->in[0].dim[0]; n++)
        for (int64_t c = 0; c < C; c++) {
            double sum = 0;
            for (int64_t i = 0; i < pixels; i++)
                sum += x[(n * pixels + i) * C + c];
            y[n * C + c] = sum / (double)pixels;
        }
}

static void global_bwd(const ref_step *s)
{
    const int64_t C = s->out[0].dim[3], pixels = s->out[0].dim[1] * s->out[0].dim[2];
    const double *dy = s->at.in[0];
    double *dx = s->at.out[0];
    for (int64_t n = 0; n < s->out[0].dim[0]; n++)
        for (int64_t i = 0; i < pixels; i++)
            for (int64_t c = 0; c < C; c++)
                dx[(n * pixels + i) * C + c] = dy[n * C + c] / (double)pixels;
}

const ref_row ref_pool_rows[] = {
    {&dnri_def_max_pool, max_fprop},         {&dnri_def_max_pool_act, max_act},
    {&dnri_def_max_pool_bwd, max_bwd},       {&dnri_def_avg_pool, avg_fprop},
    {&dnri_def_avg_pool_bwd, avg_bwd},       {&dnri_def_global_pool, global_fprop},
    {&dnri_def_global_pool_bwd, global_bwd}, {NULL, NULL},
};
