/* sync_norm.c: batch norm over the batches of all ranks: the ops, and the rewrite that makes norm.train and norm.bwd into
 * them. */
#include "internal.h"

#include "../runtime/model.h"
#include "../runtime/reduce.h"

#include <stdlib.h>
#include <string.h>

/* Inputs and outputs of what is rewritten, as layers.h lists them. */
enum { X, GAMMA, BETA, RESIDUAL, MEAN, VAR, N_TRAIN, SUM = N_TRAIN, SQSUM, N_SYNC };
enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD, N_BWD };
enum { B_DX, B_DGAMMA, B_DBETA, B_DRESIDUAL };
/* norm.bwd.sums has norm.bwd's inputs */
enum { S_DGAMMA, S_DBETA, S_SUM, S_DOT, S_DRESIDUAL, N_SUMS };
enum { D_X, D_Y, D_DY, D_DY2, D_GAMMA, D_MEAN, D_INVSTD, D_SUM, D_DOT, N_DX };

static dnr_desc vector_of(const dnr_graph *g, dnr_tid x)
{
    return dnri_desc1(dnri_graph_numerics(g)->master, dnri_desc(g, x)->dim[3]);
}

static dnr_status sums_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(dnri_out(g, op, 0, vector_of(g, op->in[0]), "sum"));
    return dnri_out(g, op, 1, vector_of(g, op->in[0]), "sqsum");
}

static dnr_status sync_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc x = *dnri_desc(g, op->in[X]), vector = vector_of(g, op->in[X]);
    DNR_TRY(dnri_want(g, op, SUM, "sum", vector));
    DNR_TRY(dnri_want(g, op, SQSUM, "sum of squares", vector));
    DNR_TRY(dnri_out(g, op, 0, x, "y"));
    DNR_TRY(dnri_out(g, op, 1, vector, "mean"));
    return dnri_out(g, op, 2, vector, "invstd");
}

/* The copy reads the saved statistics in place of the running ones, as norm.train's. */
static void sync_reclone(const dnri_op *from, dnri_op *op)
{
    op->def = &dnri_def_norm_apply;
    op->in[MEAN] = from->out[1];
    op->in[VAR] = from->out[2];
    op->n_in = N_TRAIN;
    op->n_out = 1;
}

static dnr_status bwd_sums_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc vector = vector_of(g, op->in[B_X]);
    DNR_TRY(dnri_out(g, op, S_DGAMMA, vector, "dgamma"));
    DNR_TRY(dnri_out(g, op, S_DBETA, vector, "dbeta"));
    DNR_TRY(dnri_out(g, op, S_SUM, vector, "dsum"));
    DNR_TRY(dnri_out(g, op, S_DOT, vector, "ddot"));
    return ((const dnri_norm_bwd_attr *)op->attr)->residual
               ? dnri_out(g, op, S_DRESIDUAL, *dnri_desc(g, op->in[B_X]), "dresidual")
               : DNR_OK;
}

static dnr_status bwd_dx_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(dnri_want(g, op, D_SUM, "sum", vector_of(g, op->in[D_X])));
    DNR_TRY(dnri_want(g, op, D_DOT, "dot", vector_of(g, op->in[D_X])));
    return dnri_out(g, op, 0, *dnri_desc(g, op->in[D_X]), "dx");
}

const dnri_op_def dnri_def_norm_sums = {.name = "norm.sums", .infer = sums_infer};
const dnri_op_def dnri_def_norm_sync = {
    .name = "norm.sync", .infer = sync_infer, .reclone = sync_reclone, .cheap = true};
const dnri_op_def dnri_def_norm_bwd_sums = {.name = "norm.bwd.sums", .infer = bwd_sums_infer};
const dnri_op_def dnri_def_norm_bwd_dx = {.name = "norm.bwd.dx", .infer = bwd_dx_infer};

/* ---- the rewrite */

typedef struct pass {
    dnr_graph *g;
    int ranks, group;
    dnri_op *ops;
    int n;
} pass;

/* A copy of `like` (its name, place and phase) as another op. */
static dnri_op *append(pass *p, const dnri_op *like, const dnri_op_def *def)
{
    dnri_op *op = &p->ops[p->n++];
    *op = *like;
    op->def = def;
    memset(op->attr, 0, sizeof op->attr);
    for (int i = 0; i < DNRI_MAX_IN; i++)
        op->in[i] = DNRI_NONE;
    for (int i = 0; i < DNRI_MAX_OUT; i++)
        op->out[i] = DNRI_NONE;
    return op;
}

/* Both vectors over all ranks; the second reduction waits for the first as well. */
static void append_reductions(pass *p, const dnri_op *like, dnr_tid a, dnr_tid b)
{
    const dnr_tid t[] = {a, b};
    for (int i = 0; i < 2; i++) {
        dnri_op *op = append(p, like, &dnri_def_reduce);
        dnri_reduce_attr attr = {
            .count = dnri_count(dnri_desc(p->g, t[i])),
            .sum = dnri_graph_numerics(p->g)->master == DNR_F64 ? DNRI_SUM_F64 : DNRI_SUM_F32,
            .bucket = -1,
            .wait = 1 + i,
            .group = p->group,
        };
        memcpy(op->attr, &attr, sizeof attr);
        op->n_in = op->n_out = 1;
        op->in[0] = op->out[0] = t[i];
    }
}

static dnr_status sync_forward(pass *p, const dnri_op *from)
{
    dnri_op *sums = append(p, from, &dnri_def_norm_sums);
    sums->n_in = 1;
    sums->n_out = 2;
    sums->in[0] = from->in[X];
    DNR_TRY(sums->def->infer(p->g, sums));
    append_reductions(p, from, sums->out[0], sums->out[1]);
    dnri_op *norm = append(p, from, &dnri_def_norm_sync);
    dnri_norm_sync_attr a = {.ranks = p->ranks};
    memcpy(&a.norm, from->attr, sizeof a.norm);
    memcpy(norm->attr, &a, sizeof a);
    memcpy(norm->in, from->in, sizeof norm->in);
    memcpy(norm->out, from->out, sizeof norm->out);
    norm->n_in = N_SYNC;
    norm->in[SUM] = sums->out[0];
    norm->in[SQSUM] = sums->out[1];
    return norm->def->infer(p->g, norm);
}

static dnr_status sync_backward(pass *p, const dnri_op *from)
{
    const dnri_norm_bwd_attr *a = (const dnri_norm_bwd_attr *)from->attr;
    dnri_op *sums = append(p, from, &dnri_def_norm_bwd_sums);
    memcpy(sums->in, from->in, sizeof sums->in);
    memcpy(sums->attr, from->attr, sizeof *a);
    sums->n_in = N_BWD;
    sums->n_out = N_SUMS;
    sums->out[S_DGAMMA] = from->out[B_DGAMMA];
    sums->out[S_DBETA] = from->out[B_DBETA];
    sums->out[S_DRESIDUAL] = from->out[B_DRESIDUAL];
    DNR_TRY(sums->def->infer(p->g, sums));
    append_reductions(p, from, sums->out[S_SUM], sums->out[S_DOT]);
    dnri_op *dx = append(p, from, &dnri_def_norm_bwd_dx);
    bool masked = from->out[B_DRESIDUAL] >= 0; /* it is dz already */
    dnri_norm_dx_attr d = {.relu = a->relu && !masked, .ranks = p->ranks};
    memcpy(dx->attr, &d, sizeof d);
    dx->n_in = N_DX;
    dx->n_out = 1;
    dx->in[D_X] = from->in[B_X];
    dx->in[D_Y] = d.relu ? from->in[B_Y] : DNRI_NONE;
    dx->in[D_DY] = masked ? from->out[B_DRESIDUAL] : from->in[B_DY];
    dx->in[D_DY2] = masked ? DNRI_NONE : from->in[B_DY2];
    dx->in[D_GAMMA] = from->in[B_GAMMA];
    dx->in[D_MEAN] = from->in[B_MEAN];
    dx->in[D_INVSTD] = from->in[B_INVSTD];
    dx->in[D_SUM] = sums->out[S_SUM];
    dx->in[D_DOT] = sums->out[S_DOT];
    dx->out[0] = from->out[B_DX];
    return dx->def->infer(p->g, dx);
}

dnr_status dnri_model_sync_norms(dnr_graph *g, int ranks, int group)
{
    DNR_TRY(dnri_graph_status(g));
    const int n = dnri_graph_ops(g);
    pass p = {.g = g,
              .ranks = group ? group : ranks,
              .group = group,
              .ops = malloc((size_t)(4 * n + 1) * sizeof *p.ops)};
    if (!p.ops)
        return DNR_FAIL_NOMEM();
    dnr_status st = DNR_OK;
    for (int i = 0; i < n && st == DNR_OK; i++) {
        const dnri_op op = *dnri_graph_op_c(g, i);
        if (op.def == &dnri_def_norm_train)
            st = sync_forward(&p, &op);
        else if (op.def == &dnri_def_norm_bwd)
            st = sync_backward(&p, &op);
        else
            p.ops[p.n++] = op;
    }
    if (st == DNR_OK)
        dnri_graph_replace_ops(g, p.ops, p.n);
    else
        free(p.ops);
    return st;
}
