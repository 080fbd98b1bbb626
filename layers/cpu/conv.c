/* conv.c: convolutions through oneDNN, or by Winograd's method or AMX where that is allowed and faster. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"
#include "amx.h"
#include "winograd.h"

#include <math.h>

/* below this many operations timing would take longer than a wrong choice costs */
#define WORTH_TIMING 100e6

enum { BIAS = 2, RESIDUAL }; /* inputs of conv.act */

typedef struct conv {
    dnri_dnn_desc d;
    const int
        *slot; /* which tensors of the op are src, weights, bias and dst (see dnri_cpu_dnn_step) */
} conv;

static dnr_status make(dnr_device *dev, const void *what, int way, dnri_step *out)
{
    conv c = *(const conv *)what;
    if (way < 0)
        return dnri_amx_fits(&c.d) ? dnri_amx_step(dev, &c.d, c.slot, out)
                                   : dnri_winograd_step(dev, &c.d, c.slot, out);
    c.d.candidate = way;
    return dnri_cpu_dnn_step(dev, &c.d, c.slot, out);
}

static dnri_tune_key key_of(const dnri_dnn_desc *d)
{
    const int64_t after = d->biased + 2 * d->relu + 4 * d->added;
    dnri_tune_key k = {{d->pass + 8 * after, d->training, d->stride, d->pad}};
    int n = 4;
    for (int i = 0; i < 4; i++) {
        const dnr_desc *s = &d->shape[i];
        if (i == DNRI_DNN_BIAS)
            continue;
        k.v[n++] = s->dtype;
        for (int j = 0; j < 4; j++)
            k.v[n++] = s->dim[j];
    }
    return k;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_dnn_pass pass, const int slot[4],
                        dnri_step *out)
{
    const dnri_conv_attr *a = (const dnri_conv_attr *)op->attr; /* first in conv.act's, too */
    const bool act = op->def == &dnri_def_conv_act;
    conv c = {.d = {.pass = pass,
                    .biased = act,
                    .relu = act && ((const dnri_conv_act_attr *)op->attr)->relu,
                    .added = act && op->in[RESIDUAL] >= 0,
                    .residual = RESIDUAL,
                    .training = dnri_graph_training(g),
                    .deterministic = o->deterministic,
                    .stride = a->stride,
                    .pad = a->pad},
              .slot = slot};
    for (int i = 0; i < 4; i++)
        if (slot[i] != DNRI_DNN_ABSENT)
            c.d.shape[i] = *dnri_desc(g, slot[i] >= 0 ? op->in[slot[i]] : op->out[~slot[i]]);
    if (!o->benchmark || op->def->flops(g, op) < WORTH_TIMING)
        return make(dev, &c, 0, out);
    dnri_tune_key key = key_of(&c.d);
    const int extra = dnri_winograd_fits(&c.d) || dnri_amx_fits(&c.d); /* never both */
    return dnri_cpu_fastest(dev, g, op, &key, make, &c, extra, o, out);
}

static dnr_status fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_FPROP, (int[]){0, 1, DNRI_DNN_ABSENT, ~0}, out);
}

static dnr_status act(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                      const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_FPROP, (int[]){0, 1, BIAS, ~0}, out);
}

static dnr_status dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_DGRAD, (int[]){~0, 1, DNRI_DNN_ABSENT, 0}, out);
}

static dnr_status wgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_WGRAD, (int[]){0, ~0, DNRI_DNN_ABSENT, 1}, out);
}

/* ---- folding: once for new weights */

typedef struct fold {
    dnri_binding b;
    double eps;
    int64_t k, each; /* output channels, weights of one */
    bool bf16;
    int slices;
} fold;

DNRI_INLINE void fold_channels(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const fold *s = ctx;
    const float *w = s->b.in[0], *gamma = s->b.in[1], *beta = s->b.in[2];
    const float *mean = s->b.in[3], *var = s->b.in[4];
    float *bias = s->b.out[1];
    for (int64_t k = begin; k < end; k++) {
        const double factor = (double)gamma[k] / sqrt((double)var[k] + s->eps);
        const float f = (float)factor;
        bias[k] = (float)((double)beta[k] - (double)mean[k] * factor);
        if (s->b.out[2])
            dnri_st(s->b.out[2], k, bias[k], bf16);
        DNRI_EACH (i, k * s->each, (k + 1) * s->each)
            dnri_st(s->b.out[0], i, w[i] * f, bf16);
    }
}
DNRI_KERNEL(fold_channels);

static dnr_status fold_run(void *ctx)
{
    fold *s = ctx;
    dnri_slices(s->slices, s->k, fold_channels_k[s->bf16], s);
    return DNR_OK;
}

static bool unpacked(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return ((const dnri_fold_attr *)op->attr)->packing == 0;
}

static dnr_status lower_fold(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *w = dnri_desc(g, op->in[0]);
    fold *s = dnri_cpu_step(out, sizeof *s, fold_run, 1);
    if (!s)
        return DNR_EMEM;
    s->eps = ((const dnri_fold_attr *)op->attr)->eps;
    s->k = w->dim[0];
    s->each = dnri_count(w) / w->dim[0];
    s->bf16 = dnri_desc(g, op->out[0])->dtype == DNR_BF16;
    s->slices = dnri_slices_for(dev, dnri_count(w));
    return DNR_OK;
}

const dnri_lowering dnri_cpu_conv[] = {
    {&dnri_def_conv, NULL, fprop},          {&dnri_def_conv_act, NULL, act},
    {&dnri_def_fold, unpacked, lower_fold}, {&dnri_def_conv_dgrad, NULL, dgrad},
    {&dnri_def_conv_wgrad, NULL, wgrad},    {0}};
