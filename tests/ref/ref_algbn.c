/* ref_algbn.c: algebraic batch norm. a [M,C], b and dz [M,K], w and p [K,C], gram and m [C,C]. */
#include "ref.h"

#include <string.h>

/* Inputs and outputs of algbn.coef. */
enum { P, GRAM, SUM_A, SUM_DZ, W, GAMMA, MEAN, INVSTD };
enum { DW, DGAMMA, DBETA, WA, M_OUT, C_OUT };

/* Is y > 0? From y, from its mask, or without a ReLU. */
static bool passes(const ref_step *s, int64_t i)
{
    if (!s->at.in[0])
        return true;
    if (s->in[0].dtype == DNR_U8)
        return ((const unsigned char *)s->at.in[0])[i / 8] >> i % 8 & 1;
    return ((const double *)s->at.in[0])[i] > 0;
}

static void norm_dz(const ref_step *s)
{
    const int64_t K = s->out[0].dim[3], n = dnri_count(&s->out[0]);
    const double *dy = s->at.in[1], *dy2 = s->at.in[2];
    double *dz = s->at.out[0], *sum = s->at.out[1];
    memset(sum, 0, dnri_bytes(&s->out[1]));
    for (int64_t i = 0; i < n; i++) {
        dz[i] = passes(s, i) ? dy[i] + (dy2 ? dy2[i] : 0) : 0;
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

static void coef(const ref_step *s)
{
    const int64_t K = s->in[W].dim[0], C = s->in[W].dim[3];
    const double M = (double)((const dnri_algbn_attr *)s->op.attr)->rows;
    const double *p = s->at.in[P], *g = s->at.in[GRAM], *w = s->at.in[W];
    const double *sum_a = s->at.in[SUM_A], *sum_dz = s->at.in[SUM_DZ];
    const double *gamma = s->at.in[GAMMA], *mean = s->at.in[MEAN], *invstd = s->at.in[INVSTD];
    double *dw = s->at.out[DW], *dgamma = s->at.out[DGAMMA], *dbeta = s->at.out[DBETA];
    double *wa = s->at.out[WA], *m = s->at.out[M_OUT], *c = s->at.out[C_OUT];
    memset(m, 0, dnri_bytes(&s->out[M_OUT]));
    memset(c, 0, dnri_bytes(&s->out[C_OUT]));
    for (int64_t k = 0; k < K; k++) {
        const double *wk = w + k * C, *pk = p + k * C;
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

const ref_row ref_algbn_rows[] = {
    {&dnri_def_norm_dz, norm_dz},   {&dnri_def_gram, gram}, {&dnri_def_algbn_coef, coef},
    {&dnri_def_algbn_dgrad, dgrad}, {NULL, NULL},
};
