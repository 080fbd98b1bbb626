/* conv.c: convolutions through oneDNN, or by Winograd's method where that is allowed and faster. */
#include "../../runtime/cpu/cpu.h"
#include "../layers.h"
#include "winograd.h"

/* below this many operations timing would take longer than a wrong choice costs */
#define WORTH_TIMING 100e6

typedef struct conv {
    dnri_dnn_desc d;
    const int
        *slot; /* which tensors of the op are src, weights, bias and dst (see dnri_cpu_dnn_step) */
} conv;

static dnr_status make(dnr_device *dev, const void *what, int way, dnri_step *out)
{
    conv c = *(const conv *)what;
    if (way < 0)
        return dnri_winograd_step(dev, &c.d, c.slot, out);
    c.d.candidate = way;
    return dnri_cpu_dnn_step(dev, &c.d, c.slot, out);
}

static dnri_tune_key key_of(const dnri_dnn_desc *d)
{
    dnri_tune_key k = {{d->pass, d->training, d->stride, d->pad}};
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
    const dnri_conv_attr *a = (const dnri_conv_attr *)op->attr;
    conv c = {.d = {.pass = pass,
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
    return dnri_cpu_fastest(dev, g, op, &key, make, &c, dnri_winograd_fits(&c.d), o->workspace_cap,
                            out);
}

static dnr_status fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_FPROP, (int[]){0, 1, DNRI_DNN_ABSENT, ~0}, out);
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

const dnri_lowering dnri_cpu_conv[] = {{&dnri_def_conv, NULL, fprop},
                                       {&dnri_def_conv_dgrad, NULL, dgrad},
                                       {&dnri_def_conv_wgrad, NULL, wgrad},
                                       {0}};
