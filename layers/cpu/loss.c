/* loss.c: softmax cross-entropy, in double: it is small, and its rounding reaches every gradient. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"

#include <math.h>

enum { COUNTED = 1, CORRECT1 = 2, CORRECT5 = 4 };

typedef struct loss {
    dnri_binding b;
    int64_t n, k; /* samples, classes */
    bool bf16;
    int slices;
    dnri_loss_attr a;
    double grad_scale; /* of this step */
} loss;

/* A label outside 0…k−1 counts nowhere. */
DNRI_INLINE bool counts(const loss *s, int64_t i)
{
    int32_t label = ((const int32_t *)s->b.in[1])[i];
    return label >= 0 && label < s->k;
}

/* The target distribution of sample i at class j. */
DNRI_INLINE double target(const loss *s, int64_t i, int64_t j)
{
    const float *soft = s->b.in[2];
    double t = soft ? (double)soft[i * s->k + j] : ((const int32_t *)s->b.in[1])[i] == j;
    return (1 - s->a.smoothing) * t + s->a.smoothing / (double)s->k;
}

/* log Σ exp(logit) */
DNRI_INLINE double log_sum(const loss *s, int64_t i, bool bf16)
{
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < s->k; j++)
        max = fmax(max, (double)dnri_ld(s->b.in[0], i * s->k + j, bf16));
    for (int64_t j = 0; j < s->k; j++)
        sum += exp((double)dnri_ld(s->b.in[0], i * s->k + j, bf16) - max);
    return max + log(sum);
}

/* out[0] ← losses; workspace ← what each sample counts for */
DNRI_INLINE void losses(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const loss *s = ctx;
    const void *logits = s->b.in[0];
    for (int64_t i = begin; i < end; i++) {
        unsigned char *flags = (unsigned char *)s->b.workspace + i;
        float *out = (float *)s->b.out[0] + i;
        *flags = 0;
        *out = 0;
        if (!counts(s, i))
            continue;
        int64_t label = ((const int32_t *)s->b.in[1])[i], above = 0;
        float own = dnri_ld(logits, i * s->k + label, bf16);
        double lse = log_sum(s, i, bf16), sum = 0;
        bool nan = false;
        for (int64_t j = 0; j < s->k; j++) {
            float v = dnri_ld(logits, i * s->k + j, bf16);
            double t = target(s, i, j);
            if (t != 0) /* 0 · ∞ = 0 here */
                sum += t * (lse - (double)v);
            nan |= v != v;
            above += v > own || (v == own && j < label);
        }
        *out = (float)sum;
        *flags = (unsigned char)(COUNTED | (!nan && above < 1 ? CORRECT1 : 0) |
                                 (!nan && above < 5 ? CORRECT5 : 0));
    }
}
DNRI_KERNEL(losses);

static dnr_status fprop_run(void *ctx)
{
    loss *s = ctx;
    dnri_state *state = s->b.out[1];
    const dnri_header *header = s->b.in[3];
    dnri_slices(s->slices, s->n, losses_k[s->bf16], s);
    if (header->first) {
        state->loss_sum = 0;
        state->correct1 = state->correct5 = state->samples = 0;
    }
    for (int64_t i = 0; i < s->n; i++) {
        int flags = ((const unsigned char *)s->b.workspace)[i];
        state->loss_sum += (double)((const float *)s->b.out[0])[i];
        state->samples += !!(flags & COUNTED);
        state->correct1 += !!(flags & CORRECT1);
        state->correct5 += !!(flags & CORRECT5);
    }
    state->forwards += s->a.training;
    return DNR_OK;
}

DNRI_INLINE void gradients(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const loss *s = ctx;
    for (int64_t i = begin; i < end; i++) {
        bool on = counts(s, i);
        double lse = on ? log_sum(s, i, bf16) : 0, sum = 0;
        for (int64_t j = 0; on && j < s->k; j++)
            sum += target(s, i, j);
        for (int64_t j = 0; j < s->k; j++) {
            double d = 0;
            if (on)
                d = exp((double)dnri_ld(s->b.in[0], i * s->k + j, bf16) - lse) * sum -
                    target(s, i, j);
            dnri_st(s->b.out[0], i * s->k + j, (float)(d * s->grad_scale), bf16);
        }
    }
}
DNRI_KERNEL(gradients);

static dnr_status bwd_run(void *ctx)
{
    loss *s = ctx;
    s->grad_scale = s->a.grad_scale * (double)((const dnri_state *)s->b.in[3])->loss_scale;
    dnri_slices(s->slices, s->n, gradients_k[s->bf16], s);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    bool forward = op->def == &dnri_def_loss;
    loss *s = dnri_cpu_step(out, sizeof *s, forward ? fprop_run : bwd_run, 1);
    if (!s)
        return DNR_EMEM;
    const dnr_desc *x = dnri_desc(g, op->in[0]);
    s->n = x->dim[0];
    s->k = x->dim[3];
    s->bf16 = x->dtype == DNR_BF16;
    memcpy(&s->a, op->attr, sizeof s->a);
    s->slices = dnri_slices_for(dev, s->n * s->k * 16); /* an exp is worth many moves */
    out->workspace = forward ? (size_t)s->n : 0;
    return DNR_OK;
}

const dnri_lowering dnri_cpu_loss[] = {
    {&dnri_def_loss, NULL, lower}, {&dnri_def_loss_bwd, NULL, lower}, {0}};
