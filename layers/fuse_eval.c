/* fuse_eval.c: rewrites of a graph that evaluates: what is constant between two changes of the weights is computed once
 * for all passes, and each convolution finishes what it writes. */
#include "fuse.h"

#include "../runtime/backend.h"
#include "../runtime/model.h"

#include <stdlib.h>
#include <string.h>

enum { N_X, N_GAMMA, N_BETA, N_RESIDUAL, N_MEAN, N_VAR }; /* in of norm.eval */
enum { C_X, C_W, C_BIAS, C_RESIDUAL, C_LOW, N_CONV_ACT }; /* of conv.act */
enum { F_WEIGHT, F_BIAS, F_LOW };                         /* out of fold */

static void set_attr(dnri_op *op, const void *attr, size_t size)
{
    memset(op->attr, 0, sizeof op->attr);
    memcpy(op->attr, attr, size);
}

static bool stored(const dnr_graph *g, dnr_tid t)
{
    return dnri_graph_tensor(g, t)->home == DNRI_STORE && dnri_graph_tensor(g, t)->param >= 0;
}

/* The convolution whose y only `norm` reads, where its weights and the norm's are parameters; or −1. */
static int foldable(const dnr_graph *g, const dnri_op *norm)
{
    if (norm->def != &dnri_def_norm_eval || dnri_graph_reader(g, norm->in[N_X], -1) < 0)
        return -1;
    const int c = dnri_graph_writer(g, norm->in[N_X]);
    if (c < 0 || dnri_graph_op_c(g, c)->def != &dnri_def_conv ||
        !stored(g, dnri_graph_op_c(g, c)->in[C_W]))
        return -1;
    for (int k = N_GAMMA; k <= N_VAR; k++)
        if (k != N_RESIDUAL && !stored(g, norm->in[k]))
            return -1;
    return c;
}

/* The fold and the conv.act of a pair. Their outputs are made, so that the device can be asked for them. */
static dnr_status make_pair(dnr_graph *g, const dnri_op *conv, const dnri_op *norm, dnri_op *fold,
                            dnri_op *act)
{
    const dnri_norm_attr *n = (const dnri_norm_attr *)norm->attr;
    const dnri_fold_attr fa = {.eps = n->eps};
    const dnri_conv_act_attr ca = {*(const dnri_conv_attr *)conv->attr, n->relu};
    const dnri_numerics *num = dnri_graph_numerics(g);
    const dnri_param w =
        *dnri_params_at(dnri_graph_params(g), dnri_graph_tensor(g, conv->in[C_W])->param);
    *fold = *conv;
    fold->def = &dnri_def_fold;
    fold->phase = DNRI_PREPARE;
    fold->in[0] = dnri_param_tensor(g, DNRI_MASTER, &w);
    fold->in[1] = norm->in[N_GAMMA];
    fold->in[2] = norm->in[N_BETA];
    fold->in[3] = norm->in[N_MEAN];
    fold->in[4] = norm->in[N_VAR];
    fold->n_in = 5;
    fold->n_out = num->compute == num->master ? F_LOW : F_LOW + 1;
    fold->out[F_WEIGHT] = fold->out[F_BIAS] = fold->out[F_LOW] = DNRI_NONE;
    set_attr(fold, &fa, sizeof fa);
    DNR_TRY(dnri_graph_status(g));
    DNR_TRY(fold->def->infer(g, fold));
    *act = *conv;
    act->def = &dnri_def_conv_act;
    act->in[C_W] = fold->out[F_WEIGHT];
    act->in[C_BIAS] = fold->out[F_BIAS];
    act->in[C_RESIDUAL] = norm->in[N_RESIDUAL];
    act->in[C_LOW] = fold->out[F_LOW];
    act->n_in = N_CONV_ACT;
    act->out[0] = norm->out[0];
    set_attr(act, &ca, sizeof ca);
    return act->def->infer(g, act);
}

dnr_status dnri_fuse_norm_eval(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    const int n = dnri_graph_ops(g);
    int folds = 0, left = 0;
    dnr_status st = DNR_OK;
    bool *gone = calloc((size_t)n + 1, sizeof *gone);
    dnri_op *ops = malloc((size_t)(2 * n + 1) * sizeof *ops), *rest = ops ? ops + n : NULL;
    if (!gone || !ops) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    for (int i = 0; i < n; i++) {
        dnri_op norm = *dnri_graph_op_c(g, i), fold, act;
        const int c = foldable(g, &norm);
        if (c >= 0)
            DNR_GOTO(st, make_pair(g, dnri_graph_op_c(g, c), &norm, &fold, &act));
        if (c < 0 || !dnri_device_supports(dev, g, &fold) || !dnri_device_supports(dev, g, &act)) {
            rest[i] = norm;
            continue;
        }
        ops[folds++] = fold;
        gone[c] = true;
        rest[i] = act; /* where the norm was: its residual may come after the convolution */
    }
    for (int i = 0; i < n; i++) /* folds first; there are at most as many as ops that are gone */
        if (!gone[i])
            ops[folds + left++] = rest[i];
    dnri_graph_replace_ops(g, ops, folds + left);
    ops = NULL;
out:
    free(gone);
    free(ops);
    return st;
}

/* The max pool that alone reads `act`'s y, and whose index is not read; or −1. */
static int poolable(const dnr_graph *g, const dnri_op *act)
{
    if (act->def != &dnri_def_conv_act || act->in[C_RESIDUAL] >= 0 ||
        !((const dnri_conv_act_attr *)act->attr)->relu || dnri_graph_reader(g, act->out[0], -1) < 0)
        return -1;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *p = dnri_graph_op_c(g, i);
        if (p->def != &dnri_def_max_pool || p->in[0] != act->out[0])
            continue;
        for (int k = 0; k < dnri_graph_ops(g); k++)
            for (int j = 0; j < dnri_graph_op_c(g, k)->n_in; j++)
                if (dnri_graph_op_c(g, k)->in[j] == p->out[1])
                    return -1;
        return dnri_graph_tensor(g, p->out[1])->keep ? -1 : i;
    }
    return -1;
}

dnr_status dnri_fuse_pool_act(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op conv = *dnri_graph_op_c(g, i);
        const int p = poolable(g, &conv);
        if (p < 0)
            continue;
        dnri_op pool = *dnri_graph_op_c(g, p);
        const dnri_conv_attr a = ((const dnri_conv_act_attr *)conv.attr)->conv;
        ((dnri_pool_attr *)pool.attr)->positive = true;
        pool.def = &dnri_def_max_pool_act;
        pool.in[1] = conv.in[C_BIAS];
        pool.n_in = 2;
        pool.n_out = 1;
        conv.def = &dnri_def_conv;
        conv.n_in = C_W + 1;
        set_attr(&conv, &a, sizeof a);
        if (!dnri_device_supports(dev, g, &pool) || !dnri_device_supports(dev, g, &conv))
            continue;
        DNR_TRY(pool.def->infer(g, &pool)); /* checks it */
        *dnri_graph_op(g, i) = conv;
        *dnri_graph_op(g, p) = pool;
    }
    return dnri_graph_status(g);
}

dnr_status dnri_fuse_packed_fold(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op conv = *dnri_graph_op_c(g, i);
        if (conv.def != &dnri_def_packed_conv || dnri_graph_reader(g, conv.in[C_W], -1) < 0)
            continue;
        const int f = dnri_graph_writer(g, conv.in[C_W]);
        if (f < 0 || dnri_graph_op_c(g, f)->def != &dnri_def_fold)
            continue;
        const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)conv.attr;
        dnri_op fold = *dnri_graph_op_c(g, f);
        ((dnri_fold_attr *)fold.attr)->packing = a->packing;
        ((dnri_fold_attr *)fold.attr)->lead = a->conv.pad % 2;
        fold.out[F_WEIGHT] = DNRI_NONE;
        DNR_TRY(fold.def->infer(g, &fold));
        conv.in[C_W] = fold.out[F_WEIGHT];
        if (!dnri_device_supports(dev, g, &fold) || !dnri_device_supports(dev, g, &conv))
            continue;
        DNR_TRY(conv.def->infer(g, &conv));
        *dnri_graph_op(g, f) = fold;
        *dnri_graph_op(g, i) = conv;
    }
    return dnri_graph_status(g);
}

dnr_status dnri_model_fuse_eval(dnr_graph *g, dnr_device *dev, dnr_fusion fusion)
{
    if (fusion == DNR_FUSION_OFF)
        return dnri_graph_status(g);
    DNR_TRY(dnri_fuse_norm_eval(g, dev));
    DNR_TRY(dnri_fuse_pool_act(g, dev));
    DNR_TRY(dnri_fuse_input(g, dev, DNRI_QUADS, DNRI_BLOCKS));
    DNR_TRY(dnri_fuse_input(g, dev, DNRI_BLOCKS, DNRI_BLOCKS));
    return dnri_fuse_packed_fold(g, dev);
}
