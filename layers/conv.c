/* conv.c: 2-D convolution. Its three ops share one geometry: x [n,h,w,C], w [K,r,r,C], y [n,p,q,K].
 */
#include "internal.h"

static const dnri_conv_attr *conv_attr(const dnri_op *op)
{
    return (const dnri_conv_attr *)op->attr;
}

dnr_tid dnr_conv(dnr_graph *g, const char *name, dnr_tid x, const dnr_conv_opts *o)
{
    if (x < 0)
        return DNRI_NONE;
    const dnr_desc d = *dnri_desc(g, x);
    if (o->out < 1 || o->kernel < 1) {
        DNR_FAIL(DNR_EUSAGE, "use at least one output channel and kernel >= 1",
                 "%s: %d output channels, kernel %d", name, o->out, o->kernel);
        dnri_graph_fail(g);
        return DNRI_NONE;
    }
    dnr_tid w = dnri_layer_param(g, DNRI_WEIGHT, name, "weight",
                                 (dnri_param){.kind = DNRI_CONV_W,
                                              .init = DNRI_INIT_FAN_OUT,
                                              .dim = {o->out, o->kernel, o->kernel, d.dim[3]}});
    const dnri_conv_attr a = {o->kernel, o->stride, o->pad, d.dim[1], d.dim[2]};
    dnr_tid y = DNRI_NONE;
    dnri_emit(g, &dnri_def_conv, name, &a, sizeof a, 2, (dnr_tid[]){x, w}, 1, &y);
    return y;
}

dnr_status dnri_conv_infer(dnr_graph *g, dnri_op *op, const dnri_conv_attr *a)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]), w = *dnri_desc(g, op->in[1]);
    int64_t p, q, k = a->kernel;
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, &p, &q));
    DNR_TRY(dnri_want(g, op, 0, "x", dnri_desc4(x.dtype, x.dim[0], a->h, a->w, x.dim[3])));
    DNR_TRY(dnri_want(g, op, 1, "weight", dnri_desc4(x.dtype, w.dim[0], k, k, x.dim[3])));
    return dnri_out(g, op, 0, dnri_desc4(x.dtype, x.dim[0], p, q, w.dim[0]), "y");
}

static dnr_status conv_infer(dnr_graph *g, dnri_op *op)
{
    return dnri_conv_infer(g, op, conv_attr(op));
}

static dnr_status stats_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc sums =
        dnri_desc1(dnri_graph_numerics(g)->master, dnri_desc(g, op->in[1])->dim[0]);
    DNR_TRY(conv_infer(g, op));
    DNR_TRY(dnri_out(g, op, 1, sums, "sum"));
    return dnri_out(g, op, 2, sums, "sqsum");
}

static dnr_status dgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_conv_attr *a = conv_attr(op);
    const dnr_desc dy = *dnri_desc(g, op->in[0]), w = *dnri_desc(g, op->in[1]);
    int64_t p, q, k = a->kernel;
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, &p, &q));
    DNR_TRY(dnri_want(g, op, 0, "dy", dnri_desc4(dy.dtype, dy.dim[0], p, q, w.dim[0])));
    DNR_TRY(dnri_want(g, op, 1, "weight", dnri_desc4(dy.dtype, w.dim[0], k, k, w.dim[3])));
    return dnri_out(g, op, 0, dnri_desc4(dy.dtype, dy.dim[0], a->h, a->w, w.dim[3]), "dx");
}

static dnr_status wgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_conv_attr *a = conv_attr(op);
    const dnr_desc x = *dnri_desc(g, op->in[0]), dy = *dnri_desc(g, op->in[1]);
    const bool narrow = op->out[0] >= 0 && dnri_desc(g, op->out[0])->dtype == x.dtype;
    const dnr_dtype type = narrow ? x.dtype : dnri_graph_numerics(g)->master;
    int64_t p, q, k = a->kernel;
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, &p, &q));
    DNR_TRY(dnri_want(g, op, 0, "x", dnri_desc4(x.dtype, x.dim[0], a->h, a->w, x.dim[3])));
    DNR_TRY(dnri_want(g, op, 1, "dy", dnri_desc4(x.dtype, x.dim[0], p, q, dy.dim[3])));
    return dnri_out(g, op, 0, dnri_desc4(type, dy.dim[3], k, k, x.dim[3]), "dw");
}

static dnr_status widen_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_numerics *num = dnri_graph_numerics(g);
    if (op->n_in != op->n_out)
        return DNR_FAIL(DNR_EUSAGE, "give grad.widen a gradient for each tensor",
                        "%s: %d tensors, %d gradients", op->name, op->n_in, op->n_out);
    for (int k = 0; k < op->n_in; k++) {
        dnr_desc d = *dnri_desc(g, op->in[k]);
        d.dtype = num->compute;
        DNR_TRY(dnri_want(g, op, k, "dw", d));
        d.dtype = num->master;
        DNR_TRY(dnri_out(g, op, k, d, "dw"));
    }
    return DNR_OK;
}

/* wgrad comes first: it is the last reader of x. */
static dnr_status conv_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    const dnr_tid x = op->in[0], w = op->in[1];
    if (dnri_wants_grad(g, w)) {
        dnr_tid dw = dnri_grad_of(g, w);
        DNR_TRY(dnri_emit(g, &dnri_def_conv_wgrad, op->name, op->attr, sizeof(dnri_conv_attr), 2,
                          (dnr_tid[]){x, dy[0]}, 1, &dw));
    }
    if (dnri_wants_grad(g, x))
        DNR_TRY(dnri_emit(g, &dnri_def_conv_dgrad, op->name, op->attr, sizeof(dnri_conv_attr), 2,
                          (dnr_tid[]){dy[0], w}, 1, &dx[0]));
    return DNR_OK;
}

/* Multiply-adds of any of the three, padding included: each output pixel sees the whole kernel. */
static double macs(const dnr_graph *g, dnr_tid y, int kernel, int64_t in_channels)
{
    return (double)dnri_count(dnri_desc(g, y)) * kernel * kernel * (double)in_channels;
}

static double conv_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2 * macs(g, op->out[0], conv_attr(op)->kernel, dnri_desc(g, op->in[0])->dim[3]);
}

static double dgrad_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2 * macs(g, op->in[0], conv_attr(op)->kernel, dnri_desc(g, op->out[0])->dim[3]);
}

static double wgrad_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2 * macs(g, op->in[1], conv_attr(op)->kernel, dnri_desc(g, op->in[0])->dim[3]);
}

double dnri_conv_unread(const dnr_graph *g, const dnri_op *op)
{
    const double kernel = conv_attr(op)->kernel, stride = conv_attr(op)->stride;
    const double share = kernel < stride ? kernel / stride : 1;
    return (1 - share * share) * (double)dnri_bytes(dnri_desc(g, op->in[0]));
}

const dnri_op_def dnri_def_conv = {.name = "conv.fprop",
                                   .infer = conv_infer,
                                   .grad = conv_grad,
                                   .flops = conv_flops,
                                   .unread = dnri_conv_unread};
/* No gradient rule and no clone of its own: it comes in after the gradient walk, and repeated as it is it
 * gives the same bits. */
const dnri_op_def dnri_def_conv_stats = {
    .name = "conv.stats", .infer = stats_infer, .flops = conv_flops, .unread = dnri_conv_unread};
const dnri_op_def dnri_def_conv_dgrad = {
    .name = "conv.dgrad", .infer = dgrad_infer, .flops = dgrad_flops};
const dnri_op_def dnri_def_conv_wgrad = {
    .name = "conv.wgrad", .infer = wgrad_infer, .flops = wgrad_flops, .unread = dnri_conv_unread};
const dnri_op_def dnri_def_grad_widen = {.name = "grad.widen", .infer = widen_infer};
