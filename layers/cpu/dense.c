/* dense.c: fully connected layers through oneDNN's inner product. */
#include "../../runtime/cpu/cpu.h"
#include "../layers.h"

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_dnn_pass pass, const int slot[4],
                        dnri_step *out)
{
    dnri_dnn_desc d = {.pass = pass,
                       .dense = true,
                       .biased = slot[DNRI_DNN_BIAS] != DNRI_DNN_ABSENT,
                       .training = dnri_graph_training(g),
                       .deterministic = o->deterministic};
    for (int i = 0; i < 4; i++)
        if (slot[i] != DNRI_DNN_ABSENT)
            d.shape[i] = *dnri_desc(g, slot[i] >= 0 ? op->in[slot[i]] : op->out[~slot[i]]);
    return dnri_cpu_dnn_step(dev, &d, slot, out);
}

static dnr_status fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_FPROP, (int[]){0, 1, 2, ~0}, out);
}

static dnr_status dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_DGRAD, (int[]){~0, 1, DNRI_DNN_ABSENT, 0}, out);
}

static dnr_status wgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    return lower(dev, g, op, o, DNRI_DNN_WGRAD, (int[]){0, ~0, ~1, 1}, out);
}

const dnri_lowering dnri_cpu_dense[] = {{&dnri_def_dense, NULL, fprop},
                                        {&dnri_def_dense_dgrad, NULL, dgrad},
                                        {&dnri_def_dense_wgrad, NULL, wgrad},
                                        {0}};
