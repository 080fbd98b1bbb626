/* norm_pool.c: a batch norm with ReLU together with the max pool that is its only reader: what lies between
 * them is never written. Made by the rewrite in fuse_pool.c, not by models. */
#include "internal.h"

enum { X, GAMMA, BETA, MEAN, VAR, N_IN, SUM = N_IN, SQSUM };
enum { Y, INDEX, OUT_MEAN, OUT_INVSTD, N_OUT };
enum { B_X, B_INDEX, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD, B_Y, N_BWD_IN };
enum { B_DX, B_DGAMMA, B_DBETA, N_BWD_OUT };

static const dnri_norm_pool_attr *attr_of(const dnri_op *op)
{
    return (const dnri_norm_pool_attr *)op->attr;
}

static dnr_status pooled(const dnri_op *op, const dnri_pool_attr *a, const dnr_desc *x, dnr_desc *y)
{
    int64_t p, q;
    DNR_TRY(dnri_window(op->name, a->kernel, a->stride, a->pad, a->h, a->w, &p, &q));
    *y = dnri_desc4(x->dtype, x->dim[0], p, q, x->dim[3]);
    return DNR_OK;
}

static dnr_status infer(dnr_graph *g, dnri_op *op)
{
    const dnri_norm_pool_attr *a = attr_of(op);
    const dnr_desc x = *dnri_desc(g, op->in[X]);
    const dnr_desc vector = dnri_desc1(dnri_graph_numerics(g)->master, x.dim[3]);
    dnr_desc y;
    if (!a->norm.relu || !a->pool.positive)
        return DNR_FAIL(DNR_EUSAGE, "use norm and max_pool", "%s: %s without ReLU", op->name,
                        op->def->name);
    DNR_TRY(pooled(op, &a->pool, &x, &y));
    DNR_TRY(
        dnri_want(g, op, X, "x", dnri_desc4(x.dtype, x.dim[0], a->pool.h, a->pool.w, x.dim[3])));
    DNR_TRY(dnri_want(g, op, GAMMA, "weight", vector));
    DNR_TRY(dnri_want(g, op, BETA, "bias", vector));
    DNR_TRY(dnri_want(g, op, MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, VAR, "variance", vector));
    for (int i = SUM; i < op->n_in; i++)
        DNR_TRY(dnri_want(g, op, i, i == SUM ? "sum" : "sum of squares", vector));
    DNR_TRY(dnri_out(g, op, Y, y, "y"));
    y.dtype = DNR_U8;
    DNR_TRY(dnri_out(g, op, INDEX, y, "index"));
    if (op->def != &dnri_def_norm_pool_train)
        return DNR_OK;
    DNR_TRY(dnri_out(g, op, OUT_MEAN, vector, "mean"));
    return dnri_out(g, op, OUT_INVSTD, vector, "invstd");
}

/* norm.train or norm.apply with its ReLU, then max_pool */
static dnr_status expand(dnr_graph *g, const dnri_op *from)
{
    const dnri_op op = *from; /* emits may move the list */
    const dnri_norm_pool_attr *a = attr_of(&op);
    const bool train = op.def == &dnri_def_norm_pool_train;
    const bool sums = op.n_in > SUM;
    const dnr_tid in[] = {op.in[X],
                          op.in[GAMMA],
                          op.in[BETA],
                          DNRI_NONE,
                          op.in[MEAN],
                          op.in[VAR],
                          sums ? op.in[SUM] : DNRI_NONE,
                          sums ? op.in[SQSUM] : DNRI_NONE};
    dnr_tid z[] = {DNRI_NONE, op.out[OUT_MEAN], op.out[OUT_INVSTD]};
    dnr_tid out[] = {op.out[Y], op.out[INDEX]};
    DNR_TRY(dnri_emit(g, train ? &dnri_def_norm_train : &dnri_def_norm_apply, op.name, &a->norm,
                      sizeof a->norm, sums ? 8 : 6, in, train ? 3 : 1, z));
    return dnri_emit(g, &dnri_def_max_pool, op.name, &a->pool, sizeof a->pool, 1, z, 2, out);
}

/* The copy reads the saved statistics in place of the running ones. */
static void reclone(const dnri_op *from, dnri_op *op)
{
    op->def = &dnri_def_norm_pool_apply;
    op->in[MEAN] = from->out[OUT_MEAN];
    op->in[VAR] = from->out[OUT_INVSTD];
    op->n_in = N_IN;
    op->n_out = INDEX + 1;
}

static dnr_status bwd_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_pool_attr *a = (const dnri_pool_attr *)op->attr;
    const dnr_desc x = *dnri_desc(g, op->in[B_X]);
    const dnr_desc vector = dnri_desc1(dnri_graph_numerics(g)->master, x.dim[3]);
    dnr_desc y, index;
    DNR_TRY(pooled(op, a, &x, &y));
    index = y;
    index.dtype = DNR_U8;
    DNR_TRY(dnri_want(g, op, B_X, "x", dnri_desc4(x.dtype, x.dim[0], a->h, a->w, x.dim[3])));
    DNR_TRY(dnri_want(g, op, B_INDEX, "index", index));
    DNR_TRY(dnri_want(g, op, B_DY, "dy", y));
    if (op->in[B_DY2] >= 0)
        DNR_TRY(dnri_want(g, op, B_DY2, "dy2", y));
    DNR_TRY(dnri_want(g, op, B_GAMMA, "weight", vector));
    DNR_TRY(dnri_want(g, op, B_BETA, "bias", vector));
    DNR_TRY(dnri_want(g, op, B_MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, B_INVSTD, "invstd", vector));
    DNR_TRY(dnri_want(g, op, B_Y, "y", y));
    DNR_TRY(dnri_out(g, op, B_DX, x, "dx"));
    DNR_TRY(dnri_out(g, op, B_DGAMMA, vector, "dgamma"));
    return dnri_out(g, op, B_DBETA, vector, "dbeta");
}

/* [dy + dy2, then] max_pool.bwd, whose index masks, then norm.bwd, which so needs no y. */
static dnr_status bwd_expand(dnr_graph *g, const dnri_op *from)
{
    const dnri_op op = *from;
    const dnri_norm_bwd_attr plain = {false, false};
    dnr_tid dy = op.in[B_DY], dz = DNRI_NONE;
    dnr_tid out[] = {op.out[B_DX], op.out[B_DGAMMA], op.out[B_DBETA], DNRI_NONE};
    if (op.in[B_DY2] >= 0) {
        dnr_tid sum = DNRI_NONE;
        DNR_TRY(dnri_emit(g, &dnri_def_add, op.name, NULL, 0, 2, (dnr_tid[]){dy, op.in[B_DY2]}, 1,
                          &sum));
        dy = sum;
    }
    DNR_TRY(dnri_emit(g, &dnri_def_max_pool_bwd, op.name, op.attr, sizeof(dnri_pool_attr), 2,
                      (dnr_tid[]){dy, op.in[B_INDEX]}, 1, &dz));
    const dnr_tid in[] = {op.in[B_X],    DNRI_NONE,      dz,
                          DNRI_NONE,     op.in[B_GAMMA], op.in[B_BETA],
                          op.in[B_MEAN], op.in[B_INVSTD]};
    return dnri_emit(g, &dnri_def_norm_bwd, op.name, &plain, sizeof plain, 8, in, 4, out);
}

const dnri_op_def dnri_def_norm_pool_train = {
    .name = "norm_pool.train", .infer = infer, .expand = expand, .reclone = reclone};
const dnri_op_def dnri_def_norm_pool_apply = {
    .name = "norm_pool.apply", .infer = infer, .expand = expand};
const dnri_op_def dnri_def_norm_pool_bwd = {.name = "norm_pool.bwd",
                                            .infer = bwd_infer,
                                            .expand = bwd_expand,
                                            .takes = {[B_DX] = 1u << B_X}};
