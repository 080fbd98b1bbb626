/* conv_act.c: convolution with bias, residual and ReLU, and the fold of a batch norm into weights and bias. Made by the
 * rewrites in fuse_eval.c, not by models. */
#include "../runtime/engine_ops.h"
#include "internal.h"

enum { X, W, BIAS, RESIDUAL, LOW, N_IN };
enum { F_W, GAMMA, BETA, MEAN, VAR };
enum { FOLDED, F_BIAS, F_LOW, N_OUT };

static dnr_status infer(dnr_graph *g, dnri_op *op)
{
    const dnri_conv_act_attr *a = (const dnri_conv_act_attr *)op->attr;
    const dnri_numerics *num = dnri_graph_numerics(g);
    const int64_t k = dnri_desc(g, op->in[W])->dim[0];
    DNR_TRY(dnri_conv_infer(g, op, &a->conv));
    DNR_TRY(dnri_want(g, op, BIAS, "bias", dnri_desc1(num->master, k)));
    if (op->in[RESIDUAL] >= 0)
        DNR_TRY(dnri_want(g, op, RESIDUAL, "residual", *dnri_desc(g, op->out[0])));
    return op->in[LOW] < 0 ? DNR_OK
                           : dnri_want(g, op, LOW, "rounded bias", dnri_desc1(num->compute, k));
}

static double flops(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *w = dnri_desc(g, op->in[W]);
    return 2.0 * (double)dnri_count(dnri_desc(g, op->out[0])) *
           (double)(w->dim[1] * w->dim[2] * w->dim[3]);
}

static dnr_status fold_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_fold_attr *a = (const dnri_fold_attr *)op->attr;
    const dnri_numerics *num = dnri_graph_numerics(g);
    const dnr_desc w = *dnri_desc(g, op->in[F_W]), vector = dnri_desc1(num->master, w.dim[0]);
    dnr_desc folded = w;
    DNR_TRY(dnri_want(g, op, F_W, "weight",
                      dnri_desc4(num->master, w.dim[0], w.dim[1], w.dim[1], w.dim[3])));
    DNR_TRY(dnri_want(g, op, GAMMA, "norm's weight", vector));
    DNR_TRY(dnri_want(g, op, BETA, "norm's bias", vector));
    DNR_TRY(dnri_want(g, op, MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, VAR, "variance", vector));
    folded.dtype = num->compute;
    if (a->packing && w.dim[3] != 3)
        return DNR_FAIL(DNR_EUSAGE, "pack the weights of the first layer",
                        "%s: %d channels cannot be packed", op->name, (int)w.dim[3]);
    if (a->packing)
        folded = dnri_packed_weight(num->compute, w.dim[0], w.dim[1], a->packing, a->lead);
    DNR_TRY(dnri_out(g, op, FOLDED, folded, "folded"));
    DNR_TRY(dnri_out(g, op, F_BIAS, vector, "bias"));
    return op->n_out <= F_LOW
               ? DNR_OK
               : dnri_out(g, op, F_LOW, dnri_desc1(num->compute, w.dim[0]), "rounded bias");
}

const dnri_op_def dnri_def_conv_act = {
    .name = "conv.act", .infer = infer, .flops = flops, .unread = dnri_conv_unread};
const dnri_op_def dnri_def_fold = {.name = "fold", .infer = fold_infer};
