/* shortcut.c: the parameter-free shortcut of CIFAR ResNets. */
#include "internal.h"

static const dnri_shortcut_attr *shortcut_attr(const dnri_op *op)
{
    return (const dnri_shortcut_attr *)op->attr;
}

dnr_tid dnr_shortcut_a(dnr_graph *g, const char *name, dnr_tid x, int out, int stride)
{
    if (x < 0)
        return DNRI_NONE;
    const dnr_desc *d = dnri_desc(g, x);
    const dnri_shortcut_attr a = {out, stride, d->dim[1], d->dim[2], d->dim[3]};
    dnr_tid y = DNRI_NONE;
    dnri_emit(g, &dnri_def_shortcut, name, &a, sizeof a, 1, &x, 1, &y);
    return y;
}

/* Shapes of both ends, for type `t` and n pictures. */
static dnr_status shapes(const dnri_op *op, const dnr_desc *from, dnr_desc *x, dnr_desc *y)
{
    const dnri_shortcut_attr *a = shortcut_attr(op);
    if (a->stride < 1 || a->out < a->c)
        return DNR_FAIL(DNR_EUSAGE, "use stride >= 1 and at least as many channels out as in",
                        "%s: shortcut from %lld to %d channels, stride %d", op->name,
                        (long long)a->c, a->out, a->stride);
    *x = dnri_desc4(from->dtype, from->dim[0], a->h, a->w, a->c);
    *y = dnri_desc4(from->dtype, from->dim[0], (a->h - 1) / a->stride + 1,
                    (a->w - 1) / a->stride + 1, a->out);
    return DNR_OK;
}

static dnr_status shortcut_infer(dnr_graph *g, dnri_op *op)
{
    dnr_desc x, y;
    DNR_TRY(shapes(op, dnri_desc(g, op->in[0]), &x, &y));
    DNR_TRY(dnri_want(g, op, 0, "x", x));
    return dnri_out(g, op, 0, y, "y");
}

static dnr_status bwd_infer(dnr_graph *g, dnri_op *op)
{
    dnr_desc x, y;
    DNR_TRY(shapes(op, dnri_desc(g, op->in[0]), &x, &y));
    DNR_TRY(dnri_want(g, op, 0, "dy", y));
    return dnri_out(g, op, 0, x, "dx");
}

static dnr_status shortcut_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    if (!dnri_wants_grad(g, op->in[0]))
        return DNR_OK;
    return dnri_emit(g, &dnri_def_shortcut_bwd, op->name, op->attr, sizeof(dnri_shortcut_attr), 1,
                     dy, 1, &dx[0]);
}

static double shortcut_unread(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *y = dnri_desc(g, op->out[0]);
    return (double)dnri_bytes(x) - (double)dnri_bytes(y) * (double)x->dim[3] / (double)y->dim[3];
}

const dnri_op_def dnri_def_shortcut = {.name = "shortcut.fprop",
                                       .infer = shortcut_infer,
                                       .grad = shortcut_grad,
                                       .unread = shortcut_unread};
const dnri_op_def dnri_def_shortcut_bwd = {.name = "shortcut.bwd", .infer = bwd_infer};
