/* norm.c: batch normalisation with fused ReLU and residual, and the ReLU that it splits into. */
#include "internal.h"

/* Positions of inputs and outputs, as layers.h lists them. */
enum { X, GAMMA, BETA, RESIDUAL, MEAN, VAR, N_IN, SUM = N_IN, SQSUM, N_TRAIN_IN };
enum { OUT_MASK = 3 }; /* of norm.train */
enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD, N_BWD_IN };
enum { B_DX, B_DGAMMA, B_DBETA, B_DRESIDUAL, N_BWD_OUT };

static const dnri_norm_attr *norm_attr(const dnri_op *op)
{
    return (const dnri_norm_attr *)op->attr;
}

static const dnri_norm_bwd_attr *bwd_attr(const dnri_op *op)
{
    return (const dnri_norm_bwd_attr *)op->attr;
}

dnr_tid dnr_norm(dnr_graph *g, const char *name, dnr_tid x, dnr_tid residual,
                 const dnr_norm_opts *o)
{
    if (x < 0)
        return DNRI_NONE;
    const int64_t c = dnri_desc(g, x)->dim[3];
    const dnri_param vector = {.dim = {1, 1, 1, c}};
    dnri_param gamma = vector, beta = vector, mean = vector, var = vector;
    gamma.kind = DNRI_NORM_W;
    gamma.init = o->zero_init ? DNRI_INIT_ZERO : DNRI_INIT_ONE;
    beta.kind = DNRI_NORM_B;
    mean.kind = var.kind = DNRI_RUNNING;
    var.init = DNRI_INIT_ONE;
    const dnr_tid in[N_IN] = {
        [X] = x,
        [GAMMA] = dnri_layer_param(g, DNRI_MASTER, name, "weight", gamma),
        [BETA] = dnri_layer_param(g, DNRI_MASTER, name, "bias", beta),
        [RESIDUAL] = residual,
        [MEAN] = dnri_layer_param(g, DNRI_BUFFER, name, "running_mean", mean),
        [VAR] = dnri_layer_param(g, DNRI_BUFFER, name, "running_var", var),
    };
    const bool training = dnri_graph_training(g);
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, o->relu};
    dnr_tid out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnri_emit(g, training ? &dnri_def_norm_train : &dnri_def_norm_eval, name, &a, sizeof a, N_IN,
              in, training ? 3 : 1, out);
    return out[0];
}

dnr_desc dnri_mask_of(const dnr_desc *x)
{
    return dnri_desc4(DNR_U8, x->dim[0], x->dim[1], x->dim[2], x->dim[3] / 8);
}

static dnr_status norm_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[X]);
    const dnr_desc vector = dnri_desc1(dnri_graph_numerics(g)->master, x.dim[3]);
    DNR_TRY(dnri_want(g, op, GAMMA, "weight", vector));
    DNR_TRY(dnri_want(g, op, BETA, "bias", vector));
    DNR_TRY(dnri_want(g, op, MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, VAR, "variance", vector));
    if (op->in[RESIDUAL] >= 0)
        DNR_TRY(dnri_want(g, op, RESIDUAL, "residual", x));
    return dnri_out(g, op, 0, x, "y");
}

static dnr_status train_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[X]);
    const dnr_desc vector = dnri_desc1(dnri_graph_numerics(g)->master, x.dim[3]);
    if (x.dim[0] * x.dim[1] * x.dim[2] < 2)
        return DNR_FAIL(DNR_EUSAGE, "raise train.batch or data.image",
                        "%s: batch norm over one value a channel has no variance", op->name);
    DNR_TRY(norm_infer(g, op));
    for (int i = SUM; i < op->n_in; i++)
        if (op->in[i] >= 0)
            DNR_TRY(dnri_want(g, op, i, i == SUM ? "sum" : "sum of squares", vector));
    DNR_TRY(dnri_out(g, op, 1, vector, "mean"));
    DNR_TRY(dnri_out(g, op, 2, vector, "invstd"));
    if (op->n_out <= OUT_MASK)
        return DNR_OK;
    if (!norm_attr(op)->relu || op->in[RESIDUAL] < 0 || x.dim[3] % 8)
        return DNR_FAIL(DNR_EUSAGE, "ask for a mask after a ReLU and a residual, of 8·n channels",
                        "%s: no mask of %d channels, relu %d, residual %d", op->name, (int)x.dim[3],
                        norm_attr(op)->relu, op->in[RESIDUAL] >= 0);
    return dnri_out(g, op, OUT_MASK, dnri_mask_of(&x), "mask");
}

static dnr_status train_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    const bool relu = norm_attr(op)->relu, residual = op->in[RESIDUAL] >= 0;
    const dnri_norm_bwd_attr a = {relu, relu && residual};
    const dnr_tid in[N_BWD_IN] = {
        [B_X] = op->in[X],
        [B_Y] = relu ? op->out[0] : DNRI_NONE,
        [B_DY] = dy[0],
        [B_DY2] = DNRI_NONE,
        [B_GAMMA] = op->in[GAMMA],
        [B_BETA] = op->in[BETA],
        [B_MEAN] = op->out[1],
        [B_INVSTD] = op->out[2],
    };
    dnr_tid out[N_BWD_OUT] = {
        [B_DX] = DNRI_NONE,
        [B_DGAMMA] = dnri_grad_of(g, op->in[GAMMA]),
        [B_DBETA] = dnri_grad_of(g, op->in[BETA]),
        [B_DRESIDUAL] = DNRI_NONE,
    };
    DNR_TRY(dnri_emit(g, &dnri_def_norm_bwd, op->name, &a, sizeof a, N_BWD_IN, in, N_BWD_OUT, out));
    dx[X] = out[B_DX];
    if (residual)
        dx[RESIDUAL] = relu ? out[B_DRESIDUAL] : dy[0];
    return DNR_OK;
}

/* The copy reads the saved statistics in place of the running ones. */
static void train_reclone(const dnri_op *from, dnri_op *op)
{
    op->def = &dnri_def_norm_apply;
    op->in[MEAN] = from->out[1];
    op->in[VAR] = from->out[2];
    op->n_in = N_IN;
    op->n_out = 1;
}

/* An elementwise pass may end where it began, and the place of a sum of gradients is that of one of them. dresidual
 * is not written over x, which the pass for dx reads after it. */
#define OVER_FORWARD (1u << X | 1u << RESIDUAL)
#define OVER_BWD     (1u << B_Y | 1u << B_DY | 1u << B_DY2)

static dnr_status cannot_split(const dnri_op *op)
{
    return DNR_FAIL(DNR_EUSAGE, "use another device",
                    "the device cannot run %s of %s, which does not split", op->def->name,
                    op->name);
}

/* norm(x) [+ residual] [then relu] */
static dnr_status norm_expand(dnr_graph *g, const dnri_op *from)
{
    const dnri_op op = *from; /* emits may move the list */
    const bool relu = norm_attr(&op)->relu, residual = op.in[RESIDUAL] >= 0;
    dnri_norm_attr a = *norm_attr(&op);
    dnr_tid in[N_TRAIN_IN], out[3] = {DNRI_NONE, op.out[1], op.out[2]}, sum = DNRI_NONE;
    if ((!relu && !residual) || op.n_out > OUT_MASK)
        return cannot_split(&op);
    a.relu = false;
    for (int i = 0; i < op.n_in; i++)
        in[i] = i == RESIDUAL ? DNRI_NONE : op.in[i];
    DNR_TRY(dnri_emit(g, op.def, op.name, &a, sizeof a, op.n_in, in, op.n_out, out));
    dnr_tid t = out[0];
    if (residual) {
        sum = relu ? DNRI_NONE : op.out[0];
        DNR_TRY(dnri_emit(g, &dnri_def_add, op.name, NULL, 0, 2, (dnr_tid[]){t, op.in[RESIDUAL]}, 1,
                          &sum));
        t = sum;
    }
    if (relu)
        DNR_TRY(dnri_emit(g, &dnri_def_relu, op.name, NULL, 0, 1, &t, 1, (dnr_tid[]){op.out[0]}));
    return DNR_OK;
}

static dnr_status bwd_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_norm_bwd_attr *a = bwd_attr(op);
    const dnr_desc x = *dnri_desc(g, op->in[B_X]);
    const dnr_desc vector = dnri_desc1(dnri_graph_numerics(g)->master, x.dim[3]);
    if (a->relu != (op->in[B_Y] >= 0) || (a->residual && !a->relu))
        return DNR_FAIL(DNR_EUSAGE, "give norm.bwd y where there was a ReLU, and only there",
                        "%s: norm.bwd with relu %d, residual %d, y %s", op->name, a->relu,
                        a->residual, op->in[B_Y] >= 0 ? "given" : "absent");
    const bool bits = a->residual && dnri_desc(g, op->in[B_Y])->dtype == DNR_U8;
    if (a->relu)
        DNR_TRY(dnri_want(g, op, B_Y, bits ? "mask" : "y", bits ? dnri_mask_of(&x) : x));
    DNR_TRY(dnri_want(g, op, B_DY, "dy", x));
    if (op->in[B_DY2] >= 0)
        DNR_TRY(dnri_want(g, op, B_DY2, "dy2", x));
    DNR_TRY(dnri_want(g, op, B_GAMMA, "weight", vector));
    DNR_TRY(dnri_want(g, op, B_BETA, "bias", vector));
    DNR_TRY(dnri_want(g, op, B_MEAN, "mean", vector));
    DNR_TRY(dnri_want(g, op, B_INVSTD, "invstd", vector));
    DNR_TRY(dnri_out(g, op, B_DX, x, "dx"));
    DNR_TRY(dnri_out(g, op, B_DGAMMA, vector, "dgamma"));
    DNR_TRY(dnri_out(g, op, B_DBETA, vector, "dbeta"));
    return a->residual ? dnri_out(g, op, B_DRESIDUAL, x, "dresidual") : DNR_OK;
}

/* [dy + dy2, then] [relu.bwd, into dresidual where there is one, then] the plain norm.bwd */
static dnr_status bwd_expand(dnr_graph *g, const dnri_op *from)
{
    const dnri_op op = *from;
    const dnri_norm_bwd_attr *a = bwd_attr(&op), plain = {false, false};
    dnr_tid in[N_BWD_IN], out[N_BWD_OUT], dz = op.in[B_DY];
    if ((!a->relu && op.in[B_DY2] < 0) || (a->relu && dnri_desc(g, op.in[B_Y])->dtype == DNR_U8))
        return cannot_split(&op);
    if (op.in[B_DY2] >= 0) {
        dnr_tid sum = DNRI_NONE;
        DNR_TRY(dnri_emit(g, &dnri_def_add, op.name, NULL, 0, 2, (dnr_tid[]){dz, op.in[B_DY2]}, 1,
                          &sum));
        dz = sum;
    }
    if (a->relu) {
        dnr_tid masked = a->residual ? op.out[B_DRESIDUAL] : DNRI_NONE;
        DNR_TRY(dnri_emit(g, &dnri_def_relu_bwd, op.name, NULL, 0, 2, (dnr_tid[]){op.in[B_Y], dz},
                          1, &masked));
        dz = masked;
    }
    for (int i = 0; i < N_BWD_IN; i++)
        in[i] = op.in[i];
    for (int i = 0; i < N_BWD_OUT; i++)
        out[i] = op.out[i];
    in[B_DY] = dz;
    in[B_Y] = in[B_DY2] = out[B_DRESIDUAL] = DNRI_NONE;
    return dnri_emit(g, &dnri_def_norm_bwd, op.name, &plain, sizeof plain, N_BWD_IN, in, N_BWD_OUT,
                     out);
}

static dnr_status relu_infer(dnr_graph *g, dnri_op *op)
{
    return dnri_out(g, op, 0, *dnri_desc(g, op->in[0]), "relu");
}

static dnr_status relu_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    if (!dnri_wants_grad(g, op->in[0]))
        return DNR_OK;
    return dnri_emit(g, &dnri_def_relu_bwd, op->name, NULL, 0, 2, (dnr_tid[]){op->out[0], dy[0]}, 1,
                     &dx[0]);
}

static dnr_status relu_bwd_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc y = *dnri_desc(g, op->in[0]);
    DNR_TRY(dnri_want(g, op, 1, "dy", y));
    return dnri_out(g, op, 0, y, "drelu");
}

const dnri_op_def dnri_def_norm_train = {.name = "norm.train",
                                         .infer = train_infer,
                                         .grad = train_grad,
                                         .expand = norm_expand,
                                         .reclone = train_reclone,
                                         .takes = {OVER_FORWARD},
                                         .cheap = true};
const dnri_op_def dnri_def_norm_apply = {
    .name = "norm.apply", .infer = norm_infer, .expand = norm_expand, .takes = {OVER_FORWARD}};
const dnri_op_def dnri_def_norm_eval = {
    .name = "norm.eval", .infer = norm_infer, .expand = norm_expand, .takes = {OVER_FORWARD}};
const dnri_op_def dnri_def_norm_bwd = {
    .name = "norm.bwd",
    .infer = bwd_infer,
    .expand = bwd_expand,
    .takes = {[B_DX] = 1u << B_X | OVER_BWD, [B_DRESIDUAL] = OVER_BWD}};
const dnri_op_def dnri_def_relu = {
    .name = "relu", .infer = relu_infer, .grad = relu_grad, .takes = {1}};
const dnri_op_def dnri_def_relu_bwd = {.name = "relu.bwd", .infer = relu_bwd_infer, .takes = {3}};
