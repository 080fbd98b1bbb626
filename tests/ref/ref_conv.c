/* ref_conv.c: convolution and option A's shortcut. x [N,H,W,C], w [K,R,R,C], y [N,P,Q,K]. */
#include "ref.h"

#include <math.h>
#include <string.h>

typedef struct shape {
    int64_t N, H, W, C, K, P, Q, R, stride, pad;
} shape;

static shape shape_of(const dnr_desc *x, const dnr_desc *y, const dnri_conv_attr *a)
{
    return (shape){x->dim[0], x->dim[1], x->dim[2], x->dim[3], y->dim[3],
                   y->dim[1], y->dim[2], a->kernel, a->stride, a->pad};
}

/* Kernel columns s0 … s1−1 of output column q lie inside the picture, from x's column w0 on. In
 * memory (column, channel) is one run both in x and in w. */
typedef struct run {
    int64_t w0, s0, s1;
} run;

static run columns(const shape *z, int64_t q)
{
    const int64_t left = q * z->stride - z->pad;
    const int64_t s0 = left < 0 ? -left : 0;
    const int64_t s1 = left + z->R > z->W ? z->W - left : z->R;
    return (run){left + s0, s0, s1 > s0 ? s1 : s0};
}

static void conv_fprop(const ref_step *s)
{
    const shape z = shape_of(&s->in[0], &s->out[0], (const dnri_conv_attr *)s->op.attr);
    const double *x = s->at.in[0], *w = s->at.in[1];
    double *y = s->at.out[0];
    REF_PARALLEL
    for (int64_t row = 0; row < z.N * z.P; row++) {
        const int64_t n = row / z.P, p = row % z.P;
        for (int64_t k = 0; k < z.K; k++)
            for (int64_t q = 0; q < z.Q; q++) {
                const run c = columns(&z, q);
                double sum = 0;
                for (int64_t r = 0; r < z.R; r++) {
                    const int64_t h = p * z.stride - z.pad + r;
                    if (h >= 0 && h < z.H)
                        sum += ref_dot(x + ((n * z.H + h) * z.W + c.w0) * z.C,
                                       w + ((k * z.R + r) * z.R + c.s0) * z.C, (c.s1 - c.s0) * z.C);
                }
                y[(row * z.Q + q) * z.K + k] = sum;
            }
    }
}

static void conv_act(const ref_step *s)
{
    const bool relu =
        ((const dnri_conv_act_attr *)s->op.attr)->relu; /* conv's attributes come first */
    const double *bias = s->at.in[2], *residual = s->at.in[3];
    double *y = s->at.out[0];
    conv_fprop(s);
    for (int64_t i = 0; i < dnri_count(&s->out[0]); i++) {
        const double v = y[i] + bias[i % s->out[0].dim[3]] + (residual ? residual[i] : 0);
        y[i] = relu && v < 0 ? 0 : v;
    }
}

/* Offset of weight [k,r,s,c] in packed form; w is [K,R,R,C]. */
static int64_t packed_at(const dnri_fold_attr *a, const dnr_desc *w, int64_t k, int64_t r,
                         int64_t s, int64_t c)
{
    const int64_t R = w->dim[1], m = (R + a->lead + 1) / 2;
    if (a->packing == DNRI_QUADS)
        return ((k * R + r) * R + s) * 4 + c;
    r += a->lead;
    s += a->lead;
    return ((k * m + r / 2) * m + s / 2) * 16 + (r % 2 * 2 + s % 2) * 4 + c;
}

static void fold(const ref_step *s)
{
    const dnri_fold_attr *a = (const dnri_fold_attr *)s->op.attr;
    const dnr_desc *d = &s->in[0];
    const double *w = s->at.in[0], *gamma = s->at.in[1], *beta = s->at.in[2];
    const double *mean = s->at.in[3], *var = s->at.in[4];
    double *folded = s->at.out[0], *bias = s->at.out[1];
    memset(folded, 0, dnri_bytes(&s->out[0]));
    for (int64_t i = 0; i < dnri_count(d); i++) {
        const int64_t c = i % d->dim[3], t = i / d->dim[3] % d->dim[2];
        const int64_t r = i / d->dim[3] / d->dim[2] % d->dim[1],
                      k = i / d->dim[3] / d->dim[2] / d->dim[1];
        folded[a->packing ? packed_at(a, d, k, r, t, c) : i] =
            w[i] * gamma[k] / sqrt(var[k] + a->eps);
    }
    for (int64_t k = 0; k < d->dim[0]; k++)
        bias[k] = beta[k] - mean[k] * gamma[k] / sqrt(var[k] + a->eps);
    if (s->op.n_out > 2 && s->at.out[2])
        memcpy(s->at.out[2], bias, (size_t)d->dim[0] * sizeof *bias);
}

static void conv_stats(const ref_step *s)
{
    const int64_t K = s->out[0].dim[3], M = dnri_count(&s->out[0]) / K;
    const double *y = s->at.out[0];
    double *sum = s->at.out[1], *sqsum = s->at.out[2];
    conv_fprop(s);
    for (int64_t k = 0; k < K; k++) {
        sum[k] = sqsum[k] = 0;
        for (int64_t i = k; i < M * K; i += K) {
            sum[k] += y[i];
            sqsum[k] += y[i] * y[i];
        }
    }
}

/* dx[n,h,w,c] = Σ dy[n,p,q,k] · w[k,r,s,c] over p·stride − pad + r = h and q·stride − pad + s = w */
static void conv_dgrad(const ref_step *s)
{
    const shape z = shape_of(&s->out[0], &s->in[0], (const dnri_conv_attr *)s->op.attr);
    const double *dy = s->at.in[0], *w = s->at.in[1];
    double *dx = s->at.out[0];
    REF_PARALLEL
    for (int64_t row = 0; row < z.N * z.H; row++) {
        const int64_t n = row / z.H, h = row % z.H;
        double *to = dx + row * z.W * z.C;
        memset(to, 0, (size_t)(z.W * z.C) * sizeof *to);
        for (int64_t r = 0; r < z.R; r++) {
            const int64_t top = h + z.pad - r, p = top / z.stride;
            if (top < 0 || top % z.stride || p >= z.P)
                continue;
            for (int64_t k = 0; k < z.K; k++)
                for (int64_t q = 0; q < z.Q; q++) {
                    const run c = columns(&z, q);
                    ref_axpy(to + c.w0 * z.C, dy[((n * z.P + p) * z.Q + q) * z.K + k],
                             w + ((k * z.R + r) * z.R + c.s0) * z.C, (c.s1 - c.s0) * z.C);
                }
        }
    }
}

/* dw[k,r,s,c] = Σ dy[n,p,q,k] · x[n, p·stride − pad + r, q·stride − pad + s, c] */
static void conv_wgrad(const ref_step *s)
{
    const shape z = shape_of(&s->in[0], &s->in[1], (const dnri_conv_attr *)s->op.attr);
    const double *x = s->at.in[0], *dy = s->at.in[1];
    double *dw = s->at.out[0];
    REF_PARALLEL
    for (int64_t k = 0; k < z.K; k++) {
        double *to = dw + k * z.R * z.R * z.C;
        memset(to, 0, (size_t)(z.R * z.R * z.C) * sizeof *to);
        for (int64_t row = 0; row < z.N * z.P; row++)
            for (int64_t r = 0; r < z.R; r++) {
                const int64_t n = row / z.P, h = row % z.P * z.stride - z.pad + r;
                if (h < 0 || h >= z.H)
                    continue;
                for (int64_t q = 0; q < z.Q; q++) {
                    const run c = columns(&z, q);
                    ref_axpy(to + (r * z.R + c.s0) * z.C, dy[(row * z.Q + q) * z.K + k],
                             x + ((n * z.H + h) * z.W + c.w0) * z.C, (c.s1 - c.s0) * z.C);
                }
            }
    }
}

static void grad_widen(const ref_step *s)
{
    for (int k = 0; k < s->op.n_in; k++)
        memcpy(s->at.out[k], s->at.in[k], dnri_bytes(&s->in[k]));
}

/* Visits the pixels of y that take one from x: y[row, q, before + c] and x[row', q·stride, c]. */
static void shortcut(const dnr_desc *x, const dnr_desc *y, int64_t stride, double *to_y,
                     double *to_x, const double *from)
{
    const int64_t H = x->dim[1], W = x->dim[2], C = x->dim[3];
    const int64_t P = y->dim[1], Q = y->dim[2], K = y->dim[3], before = (K - C) / 2;
    for (int64_t n = 0; n < x->dim[0]; n++)
        for (int64_t p = 0; p < P; p++)
            for (int64_t q = 0; q < Q; q++) {
                const int64_t iy = ((n * P + p) * Q + q) * K + before;
                const int64_t ix = ((n * H + p * stride) * W + q * stride) * C;
                for (int64_t c = 0; c < C; c++)
                    if (to_y)
                        to_y[iy + c] = from[ix + c];
                    else
                        to_x[ix + c] = from[iy + c];
            }
}

static void shortcut_fprop(const ref_step *s)
{
    const dnri_shortcut_attr *a = (const dnri_shortcut_attr *)s->op.attr;
    memset(s->at.out[0], 0, dnri_bytes(&s->out[0]));
    shortcut(&s->in[0], &s->out[0], a->stride, s->at.out[0], NULL, s->at.in[0]);
}

static void shortcut_bwd(const ref_step *s)
{
    const dnri_shortcut_attr *a = (const dnri_shortcut_attr *)s->op.attr;
    memset(s->at.out[0], 0, dnri_bytes(&s->out[0]));
    shortcut(&s->out[0], &s->in[0], a->stride, NULL, s->at.out[0], s->at.in[0]);
}

const ref_row ref_conv_rows[] = {
    {&dnri_def_conv, conv_fprop},           {&dnri_def_conv_stats, conv_stats},
    {&dnri_def_conv_act, conv_act},         {&dnri_def_fold, fold},
    {&dnri_def_conv_dgrad, conv_dgrad},     {&dnri_def_conv_wgrad, conv_wgrad},
    {&dnri_def_grad_widen, grad_widen},     {&dnri_def_shortcut, shortcut_fprop},
    {&dnri_def_shortcut_bwd, shortcut_bwd}, {NULL, NULL},
};
