/* conv_packed.c: the first convolution over pictures that lie as the device likes them. Made by the rewrite in
 * fuse_input.c, not by models. */
#include "../runtime/engine_ops.h"
#include "internal.h"

static const dnri_packed_conv_attr *attr_of(const dnri_op *op)
{
    return (const dnri_packed_conv_attr *)op->attr;
}

dnr_desc dnri_packed_weight(dnr_dtype t, int64_t k, int64_t r, int64_t packing, int64_t lead)
{
    const int64_t m = (r + lead + 1) / 2;
    return packing == DNRI_QUADS ? dnri_desc4(t, k, r, r, 4) : dnri_desc4(t, k, m, m, 16);
}

/* Checks x of n pictures; sets the output's sides. */
static dnr_status check(const dnr_graph *g, const dnri_op *op, int64_t *p, int64_t *q)
{
    const dnri_conv_attr *a = &attr_of(op)->conv;
    const dnr_desc x = *dnri_desc(g, op->in[0]);
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, p, q));
    return dnri_want(g, op, 0, "x",
                     dnri_packed_desc(x.dtype, x.dim[0], a->h, a->w, attr_of(op)->packing));
}

static dnr_status infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]), w = *dnri_desc(g, op->in[1]);
    const int64_t k = attr_of(op)->conv.kernel;
    int64_t p, q;
    DNR_TRY(check(g, op, &p, &q));
    DNR_TRY(dnri_want(g, op, 1, "weight",
                      w.dim[3] == 3 ? dnri_desc4(x.dtype, w.dim[0], k, k, 3)
                                    : dnri_packed_weight(x.dtype, w.dim[0], k, attr_of(op)->packing,
                                                         attr_of(op)->conv.pad % 2)));
    DNR_TRY(dnri_out(g, op, 0, dnri_desc4(x.dtype, x.dim[0], p, q, w.dim[0]), "y"));
    for (int i = 1; i < op->n_out; i++)
        DNR_TRY(dnri_out(g, op, i, dnri_desc1(dnri_graph_numerics(g)->master, w.dim[0]),
                         i == 1 ? "sum" : "sqsum"));
    return DNR_OK;
}

static dnr_status wgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]), dy = *dnri_desc(g, op->in[1]);
    const int64_t k = attr_of(op)->conv.kernel;
    int64_t p, q;
    DNR_TRY(check(g, op, &p, &q));
    DNR_TRY(dnri_want(g, op, 1, "dy", dnri_desc4(x.dtype, x.dim[0], p, q, dy.dim[3])));
    return dnri_out(g, op, 0, dnri_desc4(dnri_graph_numerics(g)->master, dy.dim[3], k, k, 3), "dw");
}

/* As of conv.fprop and conv.wgrad: what the packing adds is no work. */
static double flops(const dnr_graph *g, const dnri_op *op)
{
    const int k = attr_of(op)->conv.kernel;
    const dnr_tid y = op->def == &dnri_def_packed_conv ? op->out[0] : op->in[1];
    return 2.0 * (double)dnri_count(dnri_desc(g, y)) * k * k * 3;
}

const dnri_op_def dnri_def_packed_conv = {
    .name = "conv_packed.fprop", .infer = infer, .flops = flops};
const dnri_op_def dnri_def_packed_conv_wgrad = {
    .name = "conv_packed.wgrad", .infer = wgrad_infer, .flops = flops};
