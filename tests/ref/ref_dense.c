/* ref_dense.c: the fully connected layer. x [N,C], w [K,C], b [K], y [N,K]. */
#include "ref.h"

#include <string.h>

static void dense_fprop(const ref_step *s)
{
    const int64_t N = s->in[0].dim[0], C = s->in[0].dim[3], K = s->out[0].dim[3];
    const double *x = s->at.in[0], *w = s->at.in[1], *b = s->at.in[2];
    double *y = s->at.out[0];
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            y[n * K + k] = ref_dot(x + n * C, w + k * C, C) + b[k];
}

static void dense_dgrad(const ref_step *s)
{
    const int64_t N = s->in[0].dim[0], K = s->in[0].dim[3], C = s->out[0].dim[3];
    const double *dy = s->at.in[0], *w = s->at.in[1];
    double *dx = s->at.out[0];
    memset(dx, 0, dnri_bytes(&s->out[0]));
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            ref_axpy(dx + n * C, dy[n * K + k], w + k * C, C);
}

static void dense_wgrad(const ref_step *s)
{
    const int64_t N = s->in[0].dim[0], C = s->in[0].dim[3], K = s->in[1].dim[3];
    const double *x = s->at.in[0], *dy = s->at.in[1];
    double *dw = s->at.out[0], *db = s->at.out[1];
    memset(dw, 0, dnri_bytes(&s->out[0]));
    memset(db, 0, dnri_bytes(&s->out[1]));
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++) {
            ref_axpy(dw + k * C, dy[n * K + k], x + n * C, C);
            db[k] += dy[n * K + k];
        }
}

const ref_row ref_dense_rows[] = {
    {&dnri_def_dense, dense_fprop},
    {&dnri_def_dense_dgrad, dense_dgrad},
    {&dnri_def_dense_wgrad, dense_wgrad},
    {NULL, NULL},
};
