/* algbn.c: the ops of algebraic batch norm. None has a gradient rule or splits: they come in after the gradient walk,
 * where the device has all of them (fuse_algbn.c). */
#include "internal.h"

/* Positions of inputs and outputs, as layers.h lists them. */
enum { Z_Y, Z_DY, Z_DY2 };
enum { Z_DZ, Z_SUM };
enum { G_A, G_B };
enum { G_P, G_SUM };
enum { C_P, C_GRAM, C_SUM_A, C_SUM_DZ, C_W, C_GAMMA, C_MEAN, C_INVSTD };
enum { C_DW, C_DGAMMA, C_DBETA, C_WA, C_M, C_C };
enum { D_DZ, D_A, D_WA, D_M, D_C };
enum { S_GRAM, S_SUM_A, S_A, S_W, S_RUNNING_MEAN, S_RUNNING_VAR, S_HEADER };
enum { S_MEAN, S_INVSTD, S_STATE };
enum { F_W, F_SUM_A, F_GAMMA, F_BETA, F_INVSTD };
enum { F_WF, F_SHIFT, F_LOW };
enum { J_A, J_WF, J_SHIFT, J_RESIDUAL, J_LOW };
enum { J_Y, J_MASK };

static dnr_dtype master(const dnr_graph *g)
{
    return dnri_graph_numerics(g)->master;
}

static int64_t rows(const dnr_desc *d)
{
    return d->dim[0] * d->dim[1] * d->dim[2];
}

static dnr_status dz_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc dy = *dnri_desc(g, op->in[Z_DY]);
    if (op->in[Z_Y] < 0 && op->in[Z_DY2] < 0)
        return DNR_FAIL(DNR_EUSAGE, "use dy itself", "%s: %s of dy alone", op->name, op->def->name);
    if (op->in[Z_Y] >= 0) {
        const bool bits = dnri_desc(g, op->in[Z_Y])->dtype == DNR_U8;
        DNR_TRY(dnri_want(g, op, Z_Y, bits ? "mask" : "y", bits ? dnri_mask_of(&dy) : dy));
    }
    if (op->in[Z_DY2] >= 0) {
        dnr_desc half = dy;
        half.dim[1] = (dy.dim[1] + 1) / 2;
        half.dim[2] = (dy.dim[2] + 1) / 2;
        DNR_TRY(dnri_want(g, op, Z_DY2, "dy2",
                          dnri_desc_equal(dnri_desc(g, op->in[Z_DY2]), &half) ? half : dy));
    }
    DNR_TRY(dnri_out(g, op, Z_DZ, dy, "dz"));
    return dnri_out(g, op, Z_SUM, dnri_desc1(master(g), dy.dim[3]), "dz_sum");
}

static dnr_status gram_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc a = *dnri_desc(g, op->in[G_A]);
    dnr_desc b = a;
    if (op->in[G_B] >= 0) {
        b.dim[3] = dnri_desc(g, op->in[G_B])->dim[3];
        DNR_TRY(dnri_want(g, op, G_B, "b", b));
    }
    DNR_TRY(dnri_out(g, op, G_P, dnri_desc4(master(g), b.dim[3], 1, 1, a.dim[3]),
                     op->in[G_B] < 0 ? "gram" : "product"));
    return op->n_out > G_SUM ? dnri_out(g, op, G_SUM, dnri_desc1(master(g), a.dim[3]), "gram_sum")
                             : DNR_OK;
}

static dnr_status coef_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc w = *dnri_desc(g, op->in[C_W]);
    const int64_t K = w.dim[0], C = w.dim[3];
    const dnr_desc vector = dnri_desc1(master(g), K);
    DNR_TRY(dnri_want(g, op, C_W, "weight", dnri_desc4(w.dtype, K, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, C_P, "product", dnri_desc4(master(g), K, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, C_GRAM, "gram", dnri_desc4(master(g), C, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, C_SUM_A, "sum of a", dnri_desc1(master(g), C)));
    DNR_TRY(dnri_want(g, op, C_SUM_DZ, "sum of dz", vector));
    DNR_TRY(dnri_want(g, op, C_GAMMA, "gamma", vector));
    DNR_TRY(dnri_want(g, op, C_MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, C_INVSTD, "invstd", vector));
    DNR_TRY(dnri_out(g, op, C_DW, dnri_desc4(master(g), K, 1, 1, C), "dw"));
    DNR_TRY(dnri_out(g, op, C_DGAMMA, vector, "dgamma"));
    DNR_TRY(dnri_out(g, op, C_DBETA, vector, "dbeta"));
    DNR_TRY(dnri_out(g, op, C_WA, w, "wa"));
    DNR_TRY(dnri_out(g, op, C_M, dnri_desc4(w.dtype, C, 1, 1, C), "m"));
    return dnri_out(g, op, C_C, dnri_desc1(w.dtype, 2 * C), "c");
}

static dnr_status dgrad_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc a = *dnri_desc(g, op->in[D_A]);
    const int64_t K = dnri_desc(g, op->in[D_DZ])->dim[3], C = a.dim[3];
    dnr_desc dz = a;
    dz.dim[3] = K;
    DNR_TRY(dnri_want(g, op, D_DZ, "dz", dz));
    DNR_TRY(dnri_want(g, op, D_WA, "wa", dnri_desc4(a.dtype, K, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, D_M, "m", dnri_desc4(a.dtype, C, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, D_C, "c", dnri_desc1(a.dtype, 2 * C)));
    return dnri_out(g, op, 0, a, "da");
}

static dnr_status stats_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc a = *dnri_desc(g, op->in[S_A]), w = *dnri_desc(g, op->in[S_W]);
    const int64_t K = w.dim[0], C = a.dim[3];
    const dnr_desc vector = dnri_desc1(master(g), K);
    if (rows(&a) < 2)
        return DNR_FAIL(DNR_EUSAGE, "raise train.batch or data.image",
                        "%s: batch norm over one value a channel has no variance", op->name);
    DNR_TRY(dnri_want(g, op, S_W, "weight", dnri_desc4(a.dtype, K, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, S_GRAM, "gram", dnri_desc4(master(g), C, 1, 1, C)));
    DNR_TRY(dnri_want(g, op, S_SUM_A, "sum of a", dnri_desc1(master(g), C)));
    DNR_TRY(dnri_want(g, op, S_RUNNING_MEAN, "running mean", vector));
    DNR_TRY(dnri_want(g, op, S_RUNNING_VAR, "running variance", vector));
    DNR_TRY(dnri_out(g, op, S_MEAN, vector, "mean"));
    return dnri_out(g, op, S_INVSTD, vector, "invstd");
}

static dnr_status fold_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc w = *dnri_desc(g, op->in[F_W]);
    const dnr_desc vector = dnri_desc1(master(g), w.dim[0]);
    DNR_TRY(dnri_want(g, op, F_W, "weight", dnri_desc4(w.dtype, w.dim[0], 1, 1, w.dim[3])));
    DNR_TRY(dnri_want(g, op, F_SUM_A, "sum of a", dnri_desc1(master(g), w.dim[3])));
    DNR_TRY(dnri_want(g, op, F_GAMMA, "gamma", vector));
    DNR_TRY(dnri_want(g, op, F_BETA, "beta", vector));
    DNR_TRY(dnri_want(g, op, F_INVSTD, "invstd", vector));
    DNR_TRY(dnri_out(g, op, F_WF, w, "folded"));
    DNR_TRY(dnri_out(g, op, F_SHIFT, vector, "shift"));
    return op->n_out > F_LOW
               ? dnri_out(g, op, F_LOW, dnri_desc1(w.dtype, w.dim[0]), "rounded shift")
               : DNR_OK;
}

static dnr_status join_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc a = *dnri_desc(g, op->in[J_A]);
    const int64_t K = dnri_desc(g, op->in[J_WF])->dim[0];
    dnr_desc y = a;
    y.dim[3] = K;
    DNR_TRY(dnri_want(g, op, J_WF, "wf", dnri_desc4(a.dtype, K, 1, 1, a.dim[3])));
    DNR_TRY(dnri_want(g, op, J_SHIFT, "shift", dnri_desc1(master(g), K)));
    if (op->in[J_RESIDUAL] >= 0)
        DNR_TRY(dnri_want(g, op, J_RESIDUAL, "residual", y));
    if (op->in[J_LOW] >= 0)
        DNR_TRY(dnri_want(g, op, J_LOW, "rounded shift", dnri_desc1(a.dtype, K)));
    DNR_TRY(dnri_out(g, op, J_Y, y, "y"));
    if (op->n_out <= J_MASK)
        return DNR_OK;
    if (!((const dnri_algbn_join_attr *)op->attr)->relu || K % 8)
        return DNR_FAIL(DNR_EUSAGE, "ask for a mask after a ReLU, of 8·n channels",
                        "%s: no mask of %d channels", op->name, (int)K);
    return dnri_out(g, op, J_MASK, dnri_mask_of(&y), "mask");
}

static double gram_flops(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *p = dnri_desc(g, op->out[G_P]);
    return 2 * (double)rows(dnri_desc(g, op->in[G_A])) * (double)dnri_count(p);
}

/* Two products of small matrices. */
static double coef_flops(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *w = dnri_desc(g, op->in[C_W]);
    return 4 * (double)dnri_count(w) * (double)w->dim[3];
}

static double dgrad_flops(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *dz = dnri_desc(g, op->in[D_DZ]), *a = dnri_desc(g, op->in[D_A]);
    return 2 * (double)dnri_count(a) * (double)(dz->dim[3] + a->dim[3]);
}

/* w·gram; where the long way, which reads a, is not taken. */
static double stats_flops(const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *w = dnri_desc(g, op->in[S_W]);
    return 2 * (double)dnri_count(w) * (double)w->dim[3];
}

static double stats_unread(const dnr_graph *g, const dnri_op *op)
{
    return (double)dnri_bytes(dnri_desc(g, op->in[S_A]));
}

static double join_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2 * (double)dnri_count(dnri_desc(g, op->out[J_Y])) *
           (double)dnri_desc(g, op->in[J_A])->dim[3];
}

const dnri_op_def dnri_def_norm_dz = {
    .name = "norm.dz", .infer = dz_infer, .takes = {1u << Z_Y | 1u << Z_DY | 1u << Z_DY2}};
const dnri_op_def dnri_def_gram = {
    .name = "gram", .infer = gram_infer, .flops = gram_flops, .small = true};
const dnri_op_def dnri_def_algbn_coef = {
    .name = "algbn.coef", .infer = coef_infer, .flops = coef_flops};
const dnri_op_def dnri_def_algbn_dgrad = {
    .name = "algbn.dgrad", .infer = dgrad_infer, .flops = dgrad_flops};
const dnri_op_def dnri_def_algbn_stats = {
    .name = "algbn.stats", .infer = stats_infer, .flops = stats_flops, .unread = stats_unread};
const dnri_op_def dnri_def_algbn_fold = {.name = "algbn.fold", .infer = fold_infer, .small = true};
const dnri_op_def dnri_def_algbn_join = {
    .name = "algbn.join", .infer = join_infer, .flops = join_flops, .takes = {1u << J_RESIDUAL}};
