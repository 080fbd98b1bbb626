/* ref_loss.c: softmax cross-entropy. logits [N,K], labels [N], soft [N,K]. */
#include "ref.h"

#include <math.h>

static const dnri_loss_attr *loss_attr(const ref_step *s)
{
    return (const dnri_loss_attr *)s->op.attr;
}

/* log Σ exp(x) */
static double log_sum_exp(const double *x, int64_t K)
{
    double top = x[0], sum = 0;
    for (int64_t k = 1; k < K; k++)
        top = fmax(top, x[k]);
    for (int64_t k = 0; k < K; k++)
        sum += exp(x[k] - top);
    return top + log(sum);
}

/* Probability of class k in the target distribution of sample n. */
static double target(const ref_step *s, int64_t n, int64_t k)
{
    const int64_t K = s->in[0].dim[3];
    const int32_t *labels = s->at.in[1];
    const double *soft = s->at.in[2], e = loss_attr(s)->smoothing;
    return (1 - e) * (soft ? soft[n * K + k] : k == labels[n]) + e / (double)K;
}

/* Is the label among the `top` largest logits? Ties go to the lower index; a NaN spoils all. */
static bool correct(const double *x, int64_t K, int64_t label, int top)
{
    int ahead = 0;
    for (int64_t k = 0; k < K; k++) {
        if (isnan(x[k]))
            return false;
        ahead += x[k] > x[label] || (x[k] == x[label] && k < label);
    }
    return ahead < top;
}

static void loss_fprop(const ref_step *s)
{
    const int64_t N = s->in[0].dim[0], K = s->in[0].dim[3];
    const double *logits = s->at.in[0];
    const int32_t *labels = s->at.in[1];
    const dnri_header *header = s->at.in[3];
    double *loss = s->at.out[0];
    dnri_state *state = s->at.out[1];
    if (header->first) {
        state->loss_sum = 0;
        state->correct1 = state->correct5 = state->samples = 0;
    }
    for (int64_t n = 0; n < N; n++) {
        const double *x = logits + n * K;
        loss[n] = 0;
        if (labels[n] < 0)
            continue;
        const double lse = log_sum_exp(x, K);
        for (int64_t k = 0; k < K; k++)
            loss[n] += target(s, n, k) * (lse - x[k]);
        state->loss_sum += loss[n];
        state->correct1 += correct(x, K, labels[n], 1);
        state->correct5 += correct(x, K, labels[n], 5);
        state->samples++;
    }
    state->forwards += loss_attr(s)->training;
}

static void loss_bwd(const ref_step *s)
{
    const int64_t N = s->in[0].dim[0], K = s->in[0].dim[3];
    const double *logits = s->at.in[0];
    const int32_t *labels = s->at.in[1];
    const dnri_state *state = s->at.in[3];
    const double scale = loss_attr(s)->grad_scale * (double)state->loss_scale;
    double *dlogits = s->at.out[0];
    for (int64_t n = 0; n < N; n++) {
        const double *x = logits + n * K, lse = log_sum_exp(x, K);
        double sum = 0; /* of the target: 1, but for soft rows that do not add up */
        for (int64_t k = 0; k < K; k++)
            sum += target(s, n, k);
        for (int64_t k = 0; k < K; k++)
            dlogits[n * K + k] =
                labels[n] < 0 ? 0 : (exp(x[k] - lse) * sum - target(s, n, k)) * scale;
    }
}

const ref_row ref_loss_rows[] = {
    {&dnri_def_loss, loss_fprop}, {&dnri_def_loss_bwd, loss_bwd}, {NULL, NULL}};
