/* fuse_pool.c: joins a batch norm and its ReLU with the max pool that follows. */
#include "fuse.h"

#include <stdlib.h>
#include <string.h>

enum { N_X, N_GAMMA, N_BETA, N_RESIDUAL, N_MEAN, N_VAR };          /* in of norm.train */
enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD }; /* in of norm.bwd */

/* The four ops, by position. */
typedef struct match {
    int norm, pool, pool_bwd, norm_bwd;
} match;

static bool matches(const dnr_graph *g, int pool, match *m)
{
    const dnri_op *p = dnri_graph_op_c(g, pool);
    if (p->def != &dnri_def_max_pool)
        return false;
    *m = (match){.norm = dnri_graph_writer(g, p->in[0]), .pool = pool};
    if (m->norm < 0)
        return false;
    const dnri_op *n = dnri_graph_op_c(g, m->norm);
    if (n->def != &dnri_def_norm_train || n->n_in != N_VAR + 1 || n->in[N_RESIDUAL] >= 0 ||
        !((const dnri_norm_attr *)n->attr)->relu)
        return false;
    m->norm_bwd = dnri_graph_reader(g, n->out[0], pool);
    m->pool_bwd = dnri_graph_reader(g, p->out[1], -1);
    if (m->norm_bwd < 0 || m->pool_bwd < 0)
        return false;
    const dnri_op *pb = dnri_graph_op_c(g, m->pool_bwd), *nb = dnri_graph_op_c(g, m->norm_bwd);
    return pb->def == &dnri_def_max_pool_bwd && nb->def == &dnri_def_norm_bwd &&
           nb->in[B_Y] == n->out[0] && nb->in[B_DY] == pb->out[0] && nb->in[B_DY2] < 0 &&
           dnri_graph_reader(g, pb->out[0], -1) == m->norm_bwd;
}

static dnri_op forward(const dnri_op *norm, const dnri_op *pool)
{
    dnri_norm_pool_attr a = {.norm = *(const dnri_norm_attr *)norm->attr,
                             .pool = *(const dnri_pool_attr *)pool->attr};
    dnri_op op = *norm;
    a.pool.positive = true;
    memset(op.attr, 0, sizeof op.attr);
    memcpy(op.attr, &a, sizeof a);
    op.def = &dnri_def_norm_pool_train;
    op.n_in = 5;
    op.in[3] = norm->in[N_MEAN];
    op.in[4] = norm->in[N_VAR];
    op.n_out = 4;
    op.out[0] = pool->out[0];
    op.out[1] = pool->out[1];
    op.out[2] = norm->out[1];
    op.out[3] = norm->out[2];
    return op;
}

static dnri_op backward(const dnri_op *pool, const dnri_op *pool_bwd, const dnri_op *norm_bwd)
{
    dnri_op op = *norm_bwd;
    memcpy(op.attr, pool_bwd->attr, sizeof op.attr);
    op.def = &dnri_def_norm_pool_bwd;
    op.n_in = 9;
    op.in[1] = pool_bwd->in[1];
    op.in[2] = pool_bwd->in[0];
    op.in[3] = DNRI_NONE;
    op.in[8] = pool->out[0];
    op.n_out = 3;
    return op;
}

dnr_status dnri_fuse_norm_pool(dnr_graph *g)
{
    DNR_TRY(dnri_graph_status(g));
    match m;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        if (!matches(g, i, &m))
            continue;
        const int n = dnri_graph_ops(g);
        int left = 0;
        dnri_op *ops = malloc((size_t)n * sizeof *ops);
        if (!ops)
            return DNR_FAIL_NOMEM();
        for (int k = 0; k < n; k++)
            if (k == m.pool)
                ops[left++] = forward(dnri_graph_op_c(g, m.norm), dnri_graph_op_c(g, k));
            else if (k == m.norm_bwd)
                ops[left++] = backward(dnri_graph_op_c(g, m.pool), dnri_graph_op_c(g, m.pool_bwd),
                                       dnri_graph_op_c(g, k));
            else if (k != m.norm && k != m.pool_bwd)
                ops[left++] = *dnri_graph_op_c(g, k);
        dnri_graph_replace_ops(g, ops, left);
    }
    return DNR_OK;
}
