/* ref_engine.c: feeding a batch, adding gradients, the optimizer. */
#include "ref.h"
#include "../../runtime/slot.h"

#include <math.h>
#include <string.h>

static void ingest(const ref_step *s)
{
    const dnri_ingest_attr *a = (const dnri_ingest_attr *)s->op.attr;
    const char *slot = *(char *const *)s->at.in[0];
    const uint8_t *pixels = (const uint8_t *)slot + dnri_slot_pixels(a->n);
    double *x = s->at.out[0];
    for (int64_t i = 0; i < a->n * a->h * a->w * 3; i++)
        x[i] = pixels[i] * a->scale[i % 3] + a->shift[i % 3];
    if (!s->at.out[1]) /* a clone */
        return;
    memcpy(s->at.out[1], slot + dnri_slot_labels(), (size_t)a->n * sizeof(int32_t));
    memcpy(s->at.out[2], slot, sizeof(dnri_header));
}

static void add(const ref_step *s)
{
    const double *a = s->at.in[0], *b = s->at.in[1];
    double *y = s->at.out[0];
    for (int64_t i = 0; i < dnri_count(&s->out[0]); i++)
        y[i] = a[i] + b[i];
}

static void grad_fold(const ref_step *s)
{
    const double *grad = s->at.in[0];
    const dnri_header *header = s->at.in[1];
    const dnri_grad_fold_attr *a = (const dnri_grad_fold_attr *)s->op.attr;
    double *sum = s->at.out[0];
    for (int64_t i = a->offset; i < a->offset + a->count; i++)
        sum[i] = header->first ? grad[i] : sum[i] + grad[i];
}

static void wire_pack(const ref_step *s)
{
    const dnri_wire_attr *a = (const dnri_wire_attr *)s->op.attr;
    dnri_from_double((dnr_dtype)a->type, (const double *)s->at.in[0] + a->offset, s->at.out[0],
                     (size_t)a->count);
}

static void wire_unpack(const ref_step *s)
{
    const dnri_wire_attr *a = (const dnri_wire_attr *)s->op.attr;
    dnri_to_double((dnr_dtype)a->type, s->at.in[0], (double *)s->at.out[0] + a->offset,
                   (size_t)a->count);
}

static void grad_stat(const ref_step *s)
{
    const double *g = s->at.in[0];
    dnri_state *state = s->at.out[0];
    state->found_inf &= state->loss_scale <= 1;
    state->grad_sqsum = 0;
    for (int64_t i = 0; i < s->flat; i++) {
        const double v = g[i] / (double)state->loss_scale;
        state->found_inf |= !isfinite(g[i]);
        state->grad_sqsum += v * v;
    }
}

static void sgd(const ref_step *s)
{
    const dnri_sgd_attr *a = (const dnri_sgd_attr *)s->op.attr;
    const double *grad = s->at.in[0], lr = ((const dnri_header *)s->at.in[1])->lr;
    const dnri_state *state = s->at.in[2];
    double *w = s->at.out[0], *v = s->at.out[1]; /* WEIGHT is an alias of MASTER here */
    double factor = 1 / (double)state->loss_scale;
    if (state->found_inf)
        return;
    if (a->clip_norm > 0)
        factor *= fmin(1, a->clip_norm / (sqrt(state->grad_sqsum) + 1e-6));
    for (int64_t i = 0; i < s->flat; i++) {
        const double decay = s->decay[i / DNRI_PARAM_ALIGN] ? a->weight_decay : 0;
        const double d = grad[i] * factor + decay * w[i];
        v[i] = a->momentum * v[i] + d;
        w[i] -= lr * (a->nesterov ? d + a->momentum * v[i] : v[i]);
    }
}

static void ema(const ref_step *s)
{
    const dnri_ema_attr *a = (const dnri_ema_attr *)s->op.attr;
    if (((const dnri_state *)s->at.in[2])->found_inf)
        return;
    for (int k = 0; k < 2; k++) {
        const double *w = s->at.in[k];
        double *e = s->at.out[k];
        for (int64_t i = 0; i < dnri_count(&s->in[k]); i++)
            e[i] += (1 - a->decay) * (w[i] - e[i]);
    }
}

static void scaler(const ref_step *s)
{
    const dnri_scaler_attr *a = (const dnri_scaler_attr *)s->op.attr;
    dnri_state *state = s->at.out[0];
    state->steps++;
    if (!a->scaled)
        return;
    if (state->found_inf) {
        state->loss_scale *= DNRI_SCALE_BACKOFF;
        state->growth = 0;
        state->skipped++;
    } else if (++state->growth == DNRI_SCALE_INTERVAL) {
        if (isfinite(state->loss_scale * DNRI_SCALE_GROWTH))
            state->loss_scale *= DNRI_SCALE_GROWTH;
        state->growth = 0;
    }
}

const ref_row ref_engine_rows[] = {
    {&dnri_def_ingest, ingest},
    {&dnri_def_add, add},
    {&dnri_def_grad_fold, grad_fold},
    {&dnri_def_grad_stat, grad_stat},
    {&dnri_def_sgd, sgd},
    {&dnri_def_ema, ema},
    {&dnri_def_scaler, scaler},
    {&dnri_def_wire_pack, wire_pack},
    {&dnri_def_wire_unpack, wire_unpack},
    {NULL, NULL},
};
