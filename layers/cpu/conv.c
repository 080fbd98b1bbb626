/* conv.c: convolutions through oneDNN. */
#include "../../runtime/cpu/cpu.h"
#include "../layers.h"

/* slot: which tensors of the op are src, weights, bias and dst (see dnri_cpu_dnn_step) */
static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_dnn_pass pass, const int slot[4],
                        dnri_step *out)
{
    const dnri_conv_attr *a = (const dnri_conv_attr *)op->attr;
    dnri_dnn_desc d = {.pass = pass,
                       .training = dnri_graph_training(g),
                       .deterministic = o->deterministic,
                       .stride = a->stride,
                       .pad = a->pad};
    for (int i = 0; i < 4; i++)
        if (slot[i] != DNRI_DNN_ABSENT)
            d.shape[i] = *dnri_desc(g, slot[i] >= 0 ? op->in[slot[i]] : op->out[~slot[i]]);
    return dnri_cpu_dnn_step(dev, &d, slot, out);
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
