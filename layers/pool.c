/* pool.c: maximum, average and global average pooling. */
#include "internal.h"

static const dnri_pool_attr *pool_attr(const dnri_op *op)
{
    return (const dnri_pool_attr *)op->attr;
}

static dnr_tid pool(dnr_graph *g, const dnri_op_def *def, const char *name, dnr_tid x,
                    const dnr_pool_opts *o, int n_out)
{
    if (x < 0)
        return DNRI_NONE;
    const dnr_desc *d = dnri_desc(g, x);
    const dnri_pool_attr a = {o->kernel, o->stride, o->pad, d->dim[1], d->dim[2], false};
    dnr_tid out[2] = {DNRI_NONE, DNRI_NONE};
    dnri_emit(g, def, name, &a, sizeof a, 1, &x, n_out, out);
    return out[0];
}

dnr_tid dnr_max_pool(dnr_graph *g, const char *name, dnr_tid x, const dnr_pool_opts *o)
{
    return pool(g, &dnri_def_max_pool, name, x, o, 2);
}

dnr_tid dnr_avg_pool(dnr_graph *g, const char *name, dnr_tid x, const dnr_pool_opts *o)
{
    return pool(g, &dnri_def_avg_pool, name, x, o, 1);
}

dnr_tid dnr_global_avg_pool(dnr_graph *g, const char *name, dnr_tid x)
{
    return pool(g, &dnri_def_global_pool, name, x, &(dnr_pool_opts){0}, 1);
}

/* Shape of y: every window holds at least one pixel, because pad <= kernel/2. */
static dnr_status pooled(const dnri_op *op, const dnr_desc *from, dnr_desc *y)
{
    const dnri_pool_attr *a = pool_attr(op);
    int64_t p, q;
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, &p, &q));
    if (a->pad > a->kernel / 2)
        return DNR_FAIL(DNR_EUSAGE, "pad by at most half of the kernel",
                        "%s: pad %d of a pool with kernel %d", op->name, a->pad, a->kernel);
    *y = dnri_desc4(from->dtype, from->dim[0], p, q, from->dim[3]);
    return DNR_OK;
}

static dnr_desc unpooled(const dnri_op *op, const dnr_desc *dy)
{
    const dnri_pool_attr *a = pool_attr(op);
    return dnri_desc4(dy->dtype, dy->dim[0], a->h, a->w, dy->dim[3]);
}

static dnr_status pool_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]);
    dnr_desc y;
    DNR_TRY(pooled(op, &x, &y));
    DNR_TRY(dnri_want(g, op, 0, "x", unpooled(op, &x)));
    return dnri_out(g, op, 0, y, "y");
}

static dnr_status max_infer(dnr_graph *g, dnri_op *op)
{
    if (pool_attr(op)->kernel > 15)
        return DNR_FAIL(DNR_EUSAGE, "use a kernel of at most 15", "%s: max pool with kernel %d",
                        op->name, pool_attr(op)->kernel);
    DNR_TRY(pool_infer(g, op));
    dnr_desc index = *dnri_desc(g, op->out[0]);
    index.dtype = DNR_U8;
    return dnri_out(g, op, 1, index, "index");
}

static dnr_status act_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_dtype master = dnri_graph_numerics(g)->master;
    if (!pool_attr(op)->positive)
        return DNR_FAIL(DNR_EUSAGE, "use max_pool.fprop", "%s: %s without ReLU", op->name,
                        op->def->name);
    DNR_TRY(dnri_want(g, op, 1, "bias", dnri_desc1(master, dnri_desc(g, op->in[0])->dim[3])));
    return pool_infer(g, op);
}

static dnr_status bwd_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc dy = *dnri_desc(g, op->in[0]);
    dnr_desc y;
    DNR_TRY(pooled(op, &dy, &y));
    DNR_TRY(dnri_want(g, op, 0, "dy", y));
    return dnri_out(g, op, 0, unpooled(op, &dy), "dx");
}

static dnr_status max_bwd_infer(dnr_graph *g, dnri_op *op)
{
    dnr_desc index = *dnri_desc(g, op->in[0]);
    index.dtype = DNR_U8;
    DNR_TRY(dnri_want(g, op, 1, "index", index));
    return bwd_infer(g, op);
}

static dnr_status global_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[0]);
    DNR_TRY(dnri_want(g, op, 0, "x", unpooled(op, &x)));
    return dnri_out(g, op, 0, dnri_desc4(x.dtype, x.dim[0], 1, 1, x.dim[3]), "y");
}

static dnr_status global_bwd_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc dy = *dnri_desc(g, op->in[0]);
    DNR_TRY(dnri_want(g, op, 0, "dy", dnri_desc4(dy.dtype, dy.dim[0], 1, 1, dy.dim[3])));
    return dnri_out(g, op, 0, unpooled(op, &dy), "dx");
}

static dnr_status emit_bwd(dnr_graph *g, const dnri_op_def *def, const dnri_op *op, dnr_tid dy,
                           dnr_tid index, dnr_tid *dx)
{
    if (!dnri_wants_grad(g, op->in[0]))
        return DNR_OK;
    return dnri_emit(g, def, op->name, op->attr, sizeof(dnri_pool_attr), index >= 0 ? 2 : 1,
                     (dnr_tid[]){dy, index}, 1, dx);
}

static dnr_status max_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return emit_bwd(g, &dnri_def_max_pool_bwd, op, dy[0], op->out[1], &dx[0]);
}

static dnr_status avg_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return emit_bwd(g, &dnri_def_avg_pool_bwd, op, dy[0], DNRI_NONE, &dx[0]);
}

static dnr_status global_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return emit_bwd(g, &dnri_def_global_pool_bwd, op, dy[0], DNRI_NONE, &dx[0]);
}

const dnri_op_def dnri_def_max_pool = {
    .name = "max_pool.fprop", .infer = max_infer, .grad = max_grad};
const dnri_op_def dnri_def_max_pool_bwd = {.name = "max_pool.bwd", .infer = max_bwd_infer};
const dnri_op_def dnri_def_max_pool_act = {.name = "max_pool.act", .infer = act_infer};
const dnri_op_def dnri_def_avg_pool = {
    .name = "avg_pool.fprop", .infer = pool_infer, .grad = avg_grad};
const dnri_op_def dnri_def_avg_pool_bwd = {.name = "avg_pool.bwd", .infer = bwd_infer};
const dnri_op_def dnri_def_global_pool = {
    .name = "global_pool.fprop", .infer = global_infer, .grad = global_grad};
const dnri_op_def dnri_def_global_pool_bwd = {.name = "global_pool.bwd", .infer = global_bwd_infer};
