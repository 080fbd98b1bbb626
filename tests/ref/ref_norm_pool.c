/* ref_norm_pool.c: norm with ReLU and max pool as one op. x [N,H,W,C], y [N,P,Q,C]. */
#include "ref.h"

enum { X, GAMMA, BETA, MEAN, VAR, SUM, SQSUM };
enum { Y, INDEX, OUT_MEAN, OUT_INVSTD };
enum { B_X, B_INDEX, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD };

/* Offset in x of pixel t of window i = (n, p, q), channel 0; −1 in the padding, and for a t that names none. */
static int64_t tap(const dnri_pool_attr *a, const dnr_desc *y, int64_t i, int64_t t)
{
    const int64_t q = i % y->dim[2], p = i / y->dim[2] % y->dim[1], n = i / y->dim[2] / y->dim[1];
    const int64_t h = p * a->stride - a->pad + t / a->kernel;
    const int64_t w = q * a->stride - a->pad + t % a->kernel;
    if (t >= a->kernel * a->kernel || h < 0 || h >= a->h || w < 0 || w >= a->w)
        return -1;
    return ((n * a->h + h) * a->w + w) * y->dim[3];
}

/* The windows of channel c. */
static void pool(const ref_step *s, int64_t c, double mean, double invstd)
{
    const dnri_pool_attr *a = &((const dnri_norm_pool_attr *)s->op.attr)->pool;
    const dnr_desc *d = &s->out[Y];
    const double *x = s->at.in[X];
    const double gamma = ((const double *)s->at.in[GAMMA])[c];
    const double beta = ((const double *)s->at.in[BETA])[c];
    double *y = s->at.out[Y];
    uint8_t *index = s->at.out[INDEX];
    for (int64_t i = 0; i < dnri_count(d) / d->dim[3]; i++) {
        double best = -INFINITY;
        int64_t where = 0;
        for (int64_t t = 0; t < a->kernel * a->kernel; t++) {
            const int64_t at = tap(a, d, i, t);
            if (at < 0)
                continue;
            double v = gamma * (x[at + c] - mean) * invstd + beta;
            v = v < 0 ? 0 : v;
            if (v > best || (isnan(v) && !isnan(best))) {
                best = v;
                where = t;
            }
        }
        y[i * d->dim[3] + c] = best;
        index[i * d->dim[3] + c] = best > 0 ? (uint8_t)where : 255;
    }
}

static void train(const ref_step *s)
{
    const dnri_norm_attr *a = &((const dnri_norm_pool_attr *)s->op.attr)->norm;
    const int64_t C = s->in[X].dim[3], M = dnri_count(&s->in[X]) / C;
    const double *mean = s->at.out[OUT_MEAN], *invstd = s->at.out[OUT_INVSTD];
    REF_PARALLEL
    for (int64_t c = 0; c < C; c++) {
        ref_batch_stats(s, a, M, c, MEAN, OUT_MEAN);
        pool(s, c, mean[c], invstd[c]);
    }
}

static void apply(const ref_step *s)
{
    const double *mean = s->at.in[MEAN], *invstd = s->at.in[VAR];
    REF_PARALLEL
    for (int64_t c = 0; c < s->in[X].dim[3]; c++)
        pool(s, c, mean[c], invstd[c]);
}

static void bwd(const ref_step *s)
{
    const dnri_pool_attr *a = (const dnri_pool_attr *)s->op.attr;
    const dnr_desc *d = &s->in[B_DY];
    const int64_t C = d->dim[3], M = dnri_count(&s->in[B_X]) / C;
    const double *x = s->at.in[B_X], *dy = s->at.in[B_DY], *dy2 = s->at.in[B_DY2];
    const double *gamma = s->at.in[B_GAMMA], *mean = s->at.in[B_MEAN];
    const double *invstd = s->at.in[B_INVSTD];
    const uint8_t *index = s->at.in[B_INDEX];
    double *dx = s->at.out[0], *dgamma = s->at.out[1], *dbeta = s->at.out[2];
    REF_PARALLEL
    for (int64_t c = 0; c < C; c++) {
        double sum = 0, sum_xhat = 0;
        for (int64_t i = c; i < M * C; i += C)
            dx[i] = 0;
        for (int64_t i = 0; i < dnri_count(d) / C; i++) {
            const int64_t at = tap(a, d, i, index[i * C + c]);
            if (at >= 0)
                dx[at + c] += dy[i * C + c] + (dy2 ? dy2[i * C + c] : 0);
        }
        for (int64_t i = c; i < M * C; i += C) {
            sum += dx[i];
            sum_xhat += dx[i] * (x[i] - mean[c]) * invstd[c];
        }
        dbeta[c] = sum;
        dgamma[c] = sum_xhat;
        for (int64_t i = c; i < M * C; i += C) {
            const double xhat = (x[i] - mean[c]) * invstd[c];
            dx[i] = gamma[c] * invstd[c] * (dx[i] - sum / (double)M - xhat * sum_xhat / (double)M);
        }
    }
}

const ref_row ref_norm_pool_rows[] = {
    {&dnri_def_norm_pool_train, train},
    {&dnri_def_norm_pool_apply, apply},
    {&dnri_def_norm_pool_bwd, bwd},
    {NULL, NULL},
};
