/* ref_algbn.c: algebraic batch norm. a [M,C], b and dz [M,K], w and p [K,C], gram and m [C,C]. */
#include "ref.h"

#include <math.h>
#include <string.h>

/* Inputs and outputs of algbn.coef. */
enum { P, GRAM, SUM_A, SUM_DZ, W, GAMMA, MEAN, INVSTD, HEADER };
enum { DW, DGAMMA, DBETA, WA, M_OUT, C_OUT, STATE };

/* dy2 where dz is element i: of the same shape, or of every second pixel */
static double dy2_at(const ref_step *s, int64_t i)
{
    const double *dy2 = s->at.in[2];
    const int64_t *d = s->in[1].dim, *e = s->in[2].dim;
    if (!dy2 || (d[1] == e[1] && d[2] == e[2]))
        return dy2 ? dy2[i] : 0;
    const int64_t k = i % d[3], w = i / d[3] % d[2], h = i / d[3] / d[2] % d[1],
                  n = i / d[3] / d[2] / d[1];
    return h % 2 || w % 2 ? 0 : dy2[((n * e[1] + h / 2) * e[2] + w / 2) * d[3] + k];
}

static void norm_dz(const ref_step *s)
{
    const int64_t K = s->out[0].dim[3], n = dnri_count(&s->out[0]);
    const double *dy = s->at.in[1];
    double *dz = s->at.out[0], *sum = s->at.out[1];
    memset(sum, 0, dnri_bytes(&s->out[1]));
    for (int64_t i = 0; i < n; i++) {
        const bool passes = !s->at.in[0] || ref_positive(s->in[0].dtype, s->at.in[0], i);
        dz[i] = passes ? dy[i] + dy2_at(s, i) : 0;
        sum[i % K] += dz[i];
    }
}

static void gram(const ref_step *s)
{
    const int64_t C = s->in[0].dim[3], K = s->out[0].dim[0], M = dnri_count(&s->in[0]) / C;
    const double *a = s->at.in[0], *b = s->at.in[1] ? s->at.in[1] : s->at.in[0];
    double *p = s->at.out[0], *sum = s->op.n_out > 1 ? s->at.out[1] : NULL;
    memset(p, 0, dnri_bytes(&s->out[0]));
    REF_PARALLEL
    for (int64_t k = 0; k < K; k++)
        for (int64_t i = 0; i < M; i++)
            ref_axpy(p + k * C, b[i * K + k], a + i * C, C);
    if (sum)
        memset(sum, 0, dnri_bytes(&s->out[1]));
    for (int64_t i = 0; sum && i < M; i++)
        ref_axpy(sum, 1, a + i * C, C);
}

/* The square of what cancels in a channel. */
static double squared(const double *w, const double *g, double mean, int64_t C, double M)
{
    double apart = 0;
    for (int64_t j = 0; j < C; j++)
        apart += w[j] * w[j] * g[j * C + j] / M;
    return mean * mean <= apart ? apart : mean * mean; /* NaN stays */
}

/* Takes note of the largest r, and of channels that took the long way. */
static void note(dnri_state *state, const dnri_header *header, bool first, double r, int exact)
{
    const bool anew = first && header->first;
    state->algbn_ratio = (float)(anew ? r : fmax(r, (double)state->algbn_ratio));
    state->algbn_exact = anew ? exact : state->algbn_exact + exact;
}

static void coef(const ref_step *s)
{
    const int64_t K = s->in[W].dim[0], C = s->in[W].dim[3];
    const dnri_algbn_attr *at = (const dnri_algbn_attr *)s->op.attr;
    const double M = (double)at->rows;
    const double *p = s->at.in[P], *g = s->at.in[GRAM], *w = s->at.in[W];
    double largest = 0;
    const double *sum_a = s->at.in[SUM_A], *sum_dz = s->at.in[SUM_DZ];
    const double *gamma = s->at.in[GAMMA], *mean = s->at.in[MEAN], *invstd = s->at.in[INVSTD];
    double *dw = s->at.out[DW], *dgamma = s->at.out[DGAMMA], *dbeta = s->at.out[DBETA];
    double *wa = s->at.out[WA], *m = s->at.out[M_OUT], *c = s->at.out[C_OUT];
    memset(m, 0, dnri_bytes(&s->out[M_OUT]));
    memset(c, 0, dnri_bytes(&s->out[C_OUT]));
    for (int64_t k = 0; k < K; k++) {
        const double *wk = w + k * C, *pk = p + k * C;
        largest = fmax(largest, sqrt(squared(wk, g, mean[k], C, M)) * invstd[k]);
        dbeta[k] = sum_dz[k];
        dgamma[k] = invstd[k] * (ref_dot(pk, wk, C) - mean[k] * sum_dz[k]);
        const double A = gamma[k] * invstd[k], B = -A * invstd[k] * dgamma[k] / M;
        const double C0 = -A * dbeta[k] / M - B * mean[k];
        for (int64_t j = 0; j < C; j++) { /* gram is symmetric */
            dw[k * C + j] = A * pk[j] + B * ref_dot(wk, g + j * C, C) + C0 * sum_a[j];
            wa[k * C + j] = A * wk[j];
            ref_axpy(m + j * C, B * wk[j], wk, C);
        }
        ref_axpy(c, -sum_dz[k] / M, wa + k * C, C);
    }
    for (int64_t i = 0; i < C; i++)
        ref_axpy(c, -sum_a[i] / M, m + i * C, C); /* the lower half of 64 bits is 0 */
    note(s->at.out[STATE], s->at.in[HEADER], at->first, largest, 0);
}

static void dgrad(const ref_step *s)
{
    const int64_t K = s->in[0].dim[3], C = s->in[1].dim[3], M = dnri_count(&s->in[1]) / C;
    const double *dz = s->at.in[0], *a = s->at.in[1];
    const double *wa = s->at.in[2], *m = s->at.in[3], *c = s->at.in[4];
    double *da = s->at.out[0];
    REF_PARALLEL
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < C; j++)
            da[i * C + j] = c[j] + c[C + j];
        for (int64_t k = 0; k < K; k++)
            ref_axpy(da + i * C, dz[i * K + k], wa + k * C, C);
        for (int64_t j = 0; j < C; j++)
            ref_axpy(da + i * C, a[i * C + j], m + j * C, C);
    }
}

/* Inputs of algbn.stats. */
enum { S_GRAM, S_SUM_A, S_A, S_W, S_MEAN, S_VAR, S_HEADER };

/* Σ (w·(a − mean of a))²/M of one channel */
static double exact_variance(const ref_step *s, const double *w)
{
    const int64_t C = s->in[S_A].dim[3], M = dnri_count(&s->in[S_A]) / C;
    const double *a = s->at.in[S_A], *sum_a = s->at.in[S_SUM_A];
    double sum = 0;
    for (int64_t i = 0; i < M; i++) {
        double x = 0;
        for (int64_t j = 0; j < C; j++)
            x += w[j] * (a[i * C + j] - sum_a[j] / (double)M);
        sum += x * x;
    }
    return sum / (double)M;
}

static void stats(const ref_step *s)
{
    const dnri_algbn_stats_attr *at = (const dnri_algbn_stats_attr *)s->op.attr;
    const int64_t K = s->in[S_W].dim[0], C = s->in[S_W].dim[3];
    const double *g = s->at.in[S_GRAM], *sum_a = s->at.in[S_SUM_A];
    const double M = (double)at->rows, m = at->momentum;
    double *running_mean = s->at.in[S_MEAN], *running_var = s->at.in[S_VAR];
    double *mean = s->at.out[0], *invstd = s->at.out[1], largest = 0;
    int exact = 0;
    for (int64_t k = 0; k < K; k++) {
        const double *w = (const double *)s->at.in[S_W] + k * C;
        double square = 0;
        for (int64_t j = 0; j < C; j++)
            square += w[j] * ref_dot(w, g + j * C, C);
        mean[k] = ref_dot(w, sum_a, C) / M;
        double var = fmax(0, square / M - mean[k] * mean[k]);
        const double r = sqrt(squared(w, g, mean[k], C, M) / (var + at->eps));
        if (!(r <= DNRI_ALGBN_GUARD)) {
            var = exact_variance(s, w);
            exact++;
        }
        invstd[k] = 1 / sqrt(var + at->eps);
        largest = fmax(largest, r);
        running_mean[k] = (1 - m) * running_mean[k] + m * mean[k];
        running_var[k] = (1 - m) * running_var[k] + m * var * M / (M - 1);
    }
    note(s->at.out[2], s->at.in[S_HEADER], at->first, largest, exact);
}

static void fold(const ref_step *s)
{
    const int64_t K = s->in[0].dim[0], C = s->in[0].dim[3];
    const double *w = s->at.in[0], *sum_a = s->at.in[1], *gamma = s->at.in[2];
    const double *beta = s->at.in[3], *invstd = s->at.in[4];
    const double M = (double)((const dnri_algbn_attr *)s->op.attr)->rows;
    double *wf = s->at.out[0], *shift = s->at.out[1];
    for (int64_t k = 0; k < K; k++) {
        for (int64_t j = 0; j < C; j++)
            wf[k * C + j] = gamma[k] * invstd[k] * w[k * C + j];
        shift[k] = beta[k] - ref_dot(wf + k * C, sum_a, C) / M;
    }
    for (int64_t k = 0; s->op.n_out > 2 && k < K; k++)
        ((double *)s->at.out[2])[k] = shift[k] == 0 ? -0x1p-24 : shift[k];
}

static void join(const ref_step *s)
{
    const bool relu = ((const dnri_algbn_join_attr *)s->op.attr)->relu;
    const int64_t C = s->in[0].dim[3], K = s->in[1].dim[0], M = dnri_count(&s->in[0]) / C;
    const double *a = s->at.in[0], *wf = s->at.in[1], *shift = s->at.in[2], *residual = s->at.in[3];
    double *y = s->at.out[0];
    REF_PARALLEL
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < K; k++) {
            double v = ref_dot(a + i * C, wf + k * C, C) + shift[k];
            if (residual)
                v += residual[i * K + k];
            y[i * K + k] = relu && v < 0 ? 0 : v;
        }
    if (s->op.n_out > 1)
        ref_mask(s->at.out[1], y, M * K);
}

const ref_row ref_algbn_rows[] = {
    {&dnri_def_norm_dz, norm_dz},   {&dnri_def_gram, gram},
    {&dnri_def_algbn_coef, coef},   {&dnri_def_algbn_dgrad, dgrad},
    {&dnri_def_algbn_stats, stats}, {&dnri_def_algbn_fold, fold},
    {&dnri_def_algbn_join, join},   {NULL, NULL},
};
