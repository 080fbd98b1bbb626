/* ref_norm.c: batch normalisation and ReLU. A tensor is a matrix [M, C], M = N·H·W. */
#include "ref.h"

/* Inputs of norm.train, .apply and .eval; of norm.bwd. */
enum { X, GAMMA, BETA, RESIDUAL, MEAN, VAR, SUM, SQSUM };
enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD };

static const dnri_norm_attr *norm_attr(const ref_step *s)
{
    return (const dnri_norm_attr *)s->op.attr;
}

/* y = act(gamma · (x − mean) · invstd + beta + residual) for channel c. All three kinds end here, so
 * that a recomputed y has the same bits. */
static void normalise(const ref_step *s, int64_t c, double mean, double invstd)
{
    const int64_t C = s->in[X].dim[3], M = dnri_count(&s->in[X]) / C;
    const double *x = s->at.in[X], *residual = s->at.in[RESIDUAL];
    const double gamma = ((const double *)s->at.in[GAMMA])[c];
    const double beta = ((const double *)s->at.in[BETA])[c];
    double *y = s->at.out[0];
    for (int64_t i = c; i < M * C; i += C) {
        double v = gamma * (x[i] - mean) * invstd + beta;
        if (residual)
            v += residual[i];
        y[i] = norm_attr(s)->relu && v < 0 ? 0 : v;
    }
}

/* Over this and the other ranks' rows, M in all. */
static void normalise_by_batch(const ref_step *s, const dnri_norm_attr *a, int64_t ranks)
{
    const int64_t C = s->in[X].dim[3], M = dnri_count(&s->in[X]) / C * ranks;
    const double *mean = s->at.out[1], *invstd = s->at.out[2];
    REF_PARALLEL
    for (int64_t c = 0; c < C; c++) {
        ref_batch_stats(s, a, M, c, MEAN, 1);
        normalise(s, c, mean[c], invstd[c]);
    }
}

static void norm_train(const ref_step *s)
{
    normalise_by_batch(s, norm_attr(s), 1);
    if (s->op.n_out > 3)
        ref_mask(s->at.out[3], s->at.out[0], dnri_count(&s->in[X]));
}

static void norm_apply(const ref_step *s)
{
    const double *mean = s->at.in[MEAN], *invstd = s->at.in[VAR];
    REF_PARALLEL
    for (int64_t c = 0; c < s->in[X].dim[3]; c++)
        normalise(s, c, mean[c], invstd[c]);
}

static void norm_eval(const ref_step *s)
{
    const double *mean = s->at.in[MEAN], *var = s->at.in[VAR];
    REF_PARALLEL
    for (int64_t c = 0; c < s->in[X].dim[3]; c++)
        normalise(s, c, mean[c], 1 / sqrt(var[c] + norm_attr(s)->eps));
}

/* (dy + dy2) · [y > 0 where relu] */
static double dz_at(const ref_step *s, int64_t i)
{
    const double *dy = s->at.in[B_DY], *dy2 = s->at.in[B_DY2];
    if (((const dnri_norm_bwd_attr *)s->op.attr)->relu &&
        !ref_positive(s->in[B_Y].dtype, s->at.in[B_Y], i))
        return 0;
    return dy[i] + (dy2 ? dy2[i] : 0);
}

static void norm_bwd(const ref_step *s)
{
    const int64_t C = s->in[B_X].dim[3], M = dnri_count(&s->in[B_X]) / C;
    const double *x = s->at.in[B_X];
    const double *gamma = s->at.in[B_GAMMA];
    const double *mean = s->at.in[B_MEAN], *invstd = s->at.in[B_INVSTD];
    double *dx = s->at.out[0], *dgamma = s->at.out[1], *dbeta = s->at.out[2];
    double *dresidual = s->at.out[3];
    REF_PARALLEL
    for (int64_t c = 0; c < C; c++) {
        double sum = 0, sum_xhat = 0;
        for (int64_t i = c; i < M * C; i += C) {
            const double dz = dz_at(s, i);
            if (dresidual)
                dresidual[i] = dz;
            sum += dz;
            sum_xhat += dz * (x[i] - mean[c]) * invstd[c];
        }
        dbeta[c] = sum;
        dgamma[c] = sum_xhat;
        for (int64_t i = c; i < M * C; i += C) {
            const double xhat = (x[i] - mean[c]) * invstd[c];
            const double dz = dresidual ? dresidual[i] : dz_at(s, i);
            dx[i] = gamma[c] * invstd[c] * (dz - sum / (double)M - xhat * sum_xhat / (double)M);
        }
    }
}

static void norm_sums(const ref_step *s)
{
    const int64_t C = s->in[0].dim[3], n = dnri_count(&s->in[0]);
    const double *x = s->at.in[0];
    double *sum = s->at.out[0], *sqsum = s->at.out[1];
    for (int64_t c = 0; c < C; c++) {
        sum[c] = sqsum[c] = 0;
        for (int64_t i = c; i < n; i += C) {
            sum[c] += x[i];
            sqsum[c] += x[i] * x[i];
        }
    }
}

static void norm_sync(const ref_step *s)
{
    const dnri_norm_sync_attr *a = (const dnri_norm_sync_attr *)s->op.attr;
    normalise_by_batch(s, &a->norm, a->ranks);
}

static void norm_bwd_sums(const ref_step *s)
{
    const dnri_norm_bwd_attr *a = (const dnri_norm_bwd_attr *)s->op.attr;
    const int64_t C = s->in[B_X].dim[3], n = dnri_count(&s->in[B_X]);
    const double *x = s->at.in[B_X], *dy = s->at.in[B_DY], *dy2 = s->at.in[B_DY2];
    const double *mean = s->at.in[B_MEAN], *invstd = s->at.in[B_INVSTD];
    double *dgamma = s->at.out[0], *dbeta = s->at.out[1];
    double *sum = s->at.out[2], *dot = s->at.out[3], *dresidual = s->at.out[4];
    for (int64_t c = 0; c < C; c++) {
        sum[c] = dot[c] = 0;
        for (int64_t i = c; i < n; i += C) {
            double dz = dy[i] + (dy2 ? dy2[i] : 0);
            if (a->relu && !ref_positive(s->in[B_Y].dtype, s->at.in[B_Y], i))
                dz = 0;
            if (dresidual)
                dresidual[i] = dz;
            sum[c] += dz;
            dot[c] += dz * (x[i] - mean[c]) * invstd[c];
        }
        dbeta[c] = sum[c];
        dgamma[c] = dot[c];
    }
}

static void norm_bwd_dx(const ref_step *s)
{
    enum { D_GAMMA = 4, D_MEAN, D_INVSTD, D_SUM, D_DOT };
    const dnri_norm_dx_attr *a = (const dnri_norm_dx_attr *)s->op.attr;
    const int64_t C = s->in[0].dim[3], n = dnri_count(&s->in[0]);
    const double M = (double)(n / C * a->ranks);
    const double *x = s->at.in[0], *dy = s->at.in[2], *dy2 = s->at.in[3];
    const double *gamma = s->at.in[D_GAMMA], *mean = s->at.in[D_MEAN];
    const double *invstd = s->at.in[D_INVSTD], *sum = s->at.in[D_SUM], *dot = s->at.in[D_DOT];
    double *dx = s->at.out[0];
    for (int64_t i = 0; i < n; i++) {
        const int64_t c = i % C;
        const double xhat = (x[i] - mean[c]) * invstd[c];
        double dz = dy[i] + (dy2 ? dy2[i] : 0);
        if (a->relu && !ref_positive(s->in[B_Y].dtype, s->at.in[B_Y], i))
            dz = 0;
        dx[i] = gamma[c] * invstd[c] * (dz - sum[c] / M - xhat * dot[c] / M);
    }
}

static void relu(const ref_step *s)
{
    const double *x = s->at.in[0];
    double *y = s->at.out[0];
    for (int64_t i = 0; i < dnri_count(&s->in[0]); i++)
        y[i] = x[i] < 0 ? 0 : x[i];
}

static void relu_bwd(const ref_step *s)
{
    const double *y = s->at.in[0], *dy = s->at.in[1];
    double *dx = s->at.out[0];
    for (int64_t i = 0; i < dnri_count(&s->in[0]); i++)
        dx[i] = y[i] > 0 ? dy[i] : 0;
}

const ref_row ref_norm_rows[] = {
    {&dnri_def_norm_train, norm_train},
    {&dnri_def_norm_apply, norm_apply},
    {&dnri_def_norm_eval, norm_eval},
    {&dnri_def_norm_bwd, norm_bwd},
    {&dnri_def_norm_sums, norm_sums},
    {&dnri_def_norm_sync, norm_sync},
    {&dnri_def_norm_bwd_sums, norm_bwd_sums},
    {&dnri_def_norm_bwd_dx, norm_bwd_dx},
    {&dnri_def_relu, relu},
    {&dnri_def_relu_bwd, relu_bwd},
    {NULL, NULL},
};
