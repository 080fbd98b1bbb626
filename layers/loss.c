/* loss.c: softmax cross-entropy with label smoothing and soft targets. */
#include "../runtime/model.h"
#include "internal.h"

static const dnri_loss_attr *loss_attr(const dnri_op *op)
{
    return (const dnri_loss_attr *)op->attr;
}

dnr_tid dnr_loss(dnr_graph *g, dnr_tid logits, dnr_tid labels, dnr_tid soft, const dnr_loss_opts *o)
{
    if (logits < 0 || labels < 0)
        return DNRI_NONE;
    const dnri_loss_attr a = {o->smoothing, o->grad_scale, dnri_graph_training(g)};
    dnr_tid in[] = {logits, labels, soft, dnri_slab_tensor(g, DNRI_HEADER)};
    dnr_tid out[] = {DNRI_NONE, dnri_slab_tensor(g, DNRI_STATE)};
    dnri_emit(g, &dnri_def_loss, "loss", &a, sizeof a, 4, in, 2, out);
    return out[0];
}

dnr_status dnri_model_loss(dnr_graph *g, dnr_tid logits, dnr_tid labels, double smoothing,
                           double grad_scale)
{
    dnr_loss(g, logits, labels, DNRI_NONE, &(dnr_loss_opts){smoothing, grad_scale});
    return dnri_graph_status(g);
}

/* Checks what both ops read: {logits, labels, soft?}. */
static dnr_status check(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]);
    const int64_t n = x.dim[0], k = x.dim[3];
    const double e = loss_attr(op)->smoothing;
    if (!(e >= 0 && e < 1))
        return DNR_FAIL(DNR_EUSAGE, "set train.label_smoothing to at least 0 and less than 1",
                        "%s: label smoothing %g", op->name, e);
    DNR_TRY(dnri_want(g, op, 0, "logits", dnri_desc4(x.dtype, n, 1, 1, k)));
    DNR_TRY(dnri_want(g, op, 1, "labels", dnri_desc4(DNR_I32, n, 1, 1, 1)));
    if (op->in[2] >= 0)
        DNR_TRY(dnri_want(g, op, 2, "soft targets",
                          dnri_desc4(dnri_graph_numerics(g)->master, n, 1, 1, k)));
    return DNR_OK;
}

static dnr_status loss_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(check(g, op));
    const int64_t n = dnri_desc(g, op->in[0])->dim[0];
    return dnri_out(g, op, 0, dnri_desc4(dnri_graph_numerics(g)->master, n, 1, 1, 1), "loss");
}

static dnr_status bwd_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(check(g, op));
    return dnri_out(g, op, 0, *dnri_desc(g, op->in[0]), "dlogits");
}

/* The loss is where gradients start: its dy is 1. */
static dnr_status loss_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    if (!dnri_wants_grad(g, op->in[0]))
        return DNR_OK;
    const dnr_tid in[] = {op->in[0], op->in[1], op->in[2], op->out[1]};
    return dnri_emit(g, &dnri_def_loss_bwd, op->name, op->attr, sizeof(dnri_loss_attr), 4, in, 1,
                     &dx[0]);
}

const dnri_op_def dnri_def_loss = {
    .name = "loss.fprop", .infer = loss_infer, .grad = loss_grad, .is_loss = true};
const dnri_op_def dnri_def_loss_bwd = {.name = "loss.bwd", .infer = bwd_infer};
