/* dense.c: the fully connected layer. */
#include "internal.h"

dnr_tid dnr_dense(dnr_graph *g, const char *name, dnr_tid x, int out)
{
    if (x < 0)
        return DNRI_NONE;
    const dnr_desc d = *dnri_desc(g, x);
    if (out < 1) {
        DNR_FAIL(DNR_EUSAGE, "use at least one output (model.classes)", "%s: %d outputs", name,
                 out);
        dnri_graph_fail(g);
        return DNRI_NONE;
    }
    dnr_tid w = dnri_layer_param(g, DNRI_WEIGHT, name, "weight",
                                 (dnri_param){.kind = DNRI_DENSE_W,
                                              .init = DNRI_INIT_LINEAR,
                                              .fan = d.dim[3],
                                              .dim = {out, 1, 1, d.dim[3]}});
    dnr_tid b = dnri_layer_param(
        g, DNRI_WEIGHT, name, "bias",
        (dnri_param){
            .kind = DNRI_BIAS, .init = DNRI_INIT_LINEAR, .fan = d.dim[3], .dim = {1, 1, 1, out}});
    dnr_tid y = DNRI_NONE;
    dnri_emit(g, &dnri_def_dense, name, NULL, 0, 3, (dnr_tid[]){x, w, b}, 1, &y);
    return y;
}

/* [n,1,1,c]: the shape of input i, once it is known to have one pixel. */
static dnr_status one_pixel(const dnr_graph *g, const dnri_op *op, int i)
{
    char t[64];
    const dnr_desc *d = dnri_desc(g, op->in[i]);
    if (d->dim[1] == 1 && d->dim[2] == 1)
        return DNR_OK;
    return DNR_FAIL(DNR_EUSAGE, "put a global average pool before it",
                    "%s (%s): input %s has more than one pixel", op->name, op->def->name,
                    dnri_desc_text(d, t));
}

static dnr_status dense_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]), w = *dnri_desc(g, op->in[1]);
    DNR_TRY(one_pixel(g, op, 0));
    DNR_TRY(dnri_want(g, op, 1, "weight", dnri_desc4(x.dtype, w.dim[0], 1, 1, x.dim[3])));
    DNR_TRY(dnri_want(g, op, 2, "bias", dnri_desc1(x.dtype, w.dim[0])));
    return dnri_out(g, op, 0, dnri_desc4(x.dtype, x.dim[0], 1, 1, w.dim[0]), "y");
}

static dnr_status dgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc dy = *dnri_desc(g, op->in[0]), w = *dnri_desc(g, op->in[1]);
    DNR_TRY(one_pixel(g, op, 0));
    DNR_TRY(dnri_want(g, op, 1, "weight", dnri_desc4(dy.dtype, dy.dim[3], 1, 1, w.dim[3])));
    return dnri_out(g, op, 0, dnri_desc4(dy.dtype, dy.dim[0], 1, 1, w.dim[3]), "dx");
}

static dnr_status wgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]), dy = *dnri_desc(g, op->in[1]);
    const dnr_dtype master = dnri_graph_numerics(g)->master;
    DNR_TRY(one_pixel(g, op, 0));
    DNR_TRY(dnri_want(g, op, 1, "dy", dnri_desc4(x.dtype, x.dim[0], 1, 1, dy.dim[3])));
    DNR_TRY(dnri_out(g, op, 0, dnri_desc4(master, dy.dim[3], 1, 1, x.dim[3]), "dw"));
    return dnri_out(g, op, 1, dnri_desc1(master, dy.dim[3]), "db");
}

static dnr_status dense_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    const dnr_tid x = op->in[0], w = op->in[1], b = op->in[2];
    if (dnri_wants_grad(g, w))
        DNR_TRY(dnri_emit(g, &dnri_def_dense_wgrad, op->name, NULL, 0, 2, (dnr_tid[]){x, dy[0]}, 2,
                          (dnr_tid[]){dnri_grad_of(g, w), dnri_grad_of(g, b)}));
    if (dnri_wants_grad(g, x))
        DNR_TRY(dnri_emit(g, &dnri_def_dense_dgrad, op->name, NULL, 0, 2, (dnr_tid[]){dy[0], w}, 1,
                          &dx[0]));
    return DNR_OK;
}

static double flops(const dnr_graph *g, dnr_tid y, dnr_tid x)
{
    return 2.0 * (double)dnri_count(dnri_desc(g, y)) * (double)dnri_desc(g, x)->dim[3];
}

static double dense_flops(const dnr_graph *g, const dnri_op *op)
{
    return flops(g, op->out[0], op->in[0]);
}

static double dgrad_flops(const dnr_graph *g, const dnri_op *op)
{
    return flops(g, op->in[0], op->out[0]);
}

static double wgrad_flops(const dnr_graph *g, const dnri_op *op)
{
    return flops(g, op->in[1], op->in[0]);
}

const dnri_op_def dnri_def_dense = {
    .name = "dense.fprop", .infer = dense_infer, .grad = dense_grad, .flops = dense_flops};
const dnri_op_def dnri_def_dense_dgrad = {
    .name = "dense.dgrad", .infer = dgrad_infer, .flops = dgrad_flops};
const dnri_op_def dnri_def_dense_wgrad = {
    .name = "dense.wgrad", .infer = wgrad_infer, .flops = wgrad_flops};
