/* fuse.c: fusion rewrites. */
#include "fuse.h"

#include "../runtime/backend.h"
#include "../runtime/model.h"

#include <stdlib.h>
#include <string.h>

enum { BWD_Y = 1, DY = 2, DY2 = 3 };           /* inputs of norm.bwd; DY, DY2 of norm_pool.bwd */
enum { NORM_X = 0, NORM_IN = 6, POOL_IN = 5 }; /* of norm.train and norm_pool.train without sums */
enum { MASK = 3 };                             /* its output */

/* Rows of x for each of its channels from which algebraic batch norm pays: its small products grow with the channels
 * alone. */
#define ALGBN_ROWS 16

typedef struct use {
    int count; /* reads of a tensor in the whole list */
    int op;    /* the last op that reads it */
} use;

dnr_status dnri_fuse_gradient_add(dnr_graph *g)
{
    DNR_TRY(dnri_graph_status(g));
    const int n = dnri_graph_ops(g);
    int left = 0;
    use *uses = calloc((size_t)dnri_graph_tensors(g) + 1, sizeof *uses);
    dnri_op *ops = malloc((size_t)(n ? n : 1) * sizeof *ops);
    if (!uses || !ops) {
        free(uses);
        free(ops);
        return DNR_FAIL_NOMEM();
    }
    for (int i = 0; i < n; i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; k < op->n_in; k++)
            if (op->in[k] >= 0)
                uses[op->in[k]] = (use){uses[op->in[k]].count + 1, i};
    }
    for (int i = 0; i < n; i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        if (op->def == &dnri_def_add && !dnri_graph_tensor(g, op->out[0])->keep &&
            uses[op->out[0]].count == 1) {
            dnri_op *reader = dnri_graph_op(g, uses[op->out[0]].op); /* comes later in the list */
            if ((reader->def == &dnri_def_norm_bwd || reader->def == &dnri_def_norm_pool_bwd) &&
                reader->in[DY] == op->out[0] && reader->in[DY2] < 0) {
                reader->in[DY] = op->in[0];
                reader->in[DY2] = op->in[1];
                continue;
            }
        }
        ops[left++] = *op;
    }
    free(uses);
    dnri_graph_replace_ops(g, ops, left);
    return DNR_OK;
}

/* The norm.train or norm_pool.train without sums that reads y and is the only op of the forward pass to do so, or
 * NULL. */
static dnri_op *only_norm(dnr_graph *g, dnr_tid y)
{
    dnri_op *norm = NULL;
    int reads = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op *op = dnri_graph_op(g, i);
        for (int k = 0; op->phase == DNRI_FORWARD && k < op->n_in; k++)
            if (op->in[k] == y) {
                reads++;
                norm =
                    k == NORM_X && ((op->def == &dnri_def_norm_train && op->n_in == NORM_IN) ||
                                    (op->def == &dnri_def_norm_pool_train && op->n_in == POOL_IN))
                        ? op
                        : NULL;
            }
    }
    return reads == 1 ? norm : NULL;
}

dnr_status dnri_fuse_statistics(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op *conv = dnri_graph_op(g, i), stats = *conv;
        const bool plain = conv->def == &dnri_def_conv;
        dnri_op *norm =
            plain || conv->def == &dnri_def_packed_conv ? only_norm(g, conv->out[0]) : NULL;
        if (!norm)
            continue;
        if (plain)
            stats.def = &dnri_def_conv_stats;
        stats.out[1] = stats.out[2] = DNRI_NONE;
        stats.n_out = 3;
        if (!dnri_device_prefers(dev, g, &stats))
            continue;
        DNR_TRY(stats.def->infer(g, &stats)); /* makes the sums */
        *conv = stats;
        norm->in[norm->n_in++] = stats.out[1];
        norm->in[norm->n_in++] = stats.out[2];
    }
    return dnri_graph_status(g);
}

dnr_status dnri_fuse_masks(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op *bwd = dnri_graph_op(g, i);
        if (bwd->def != &dnri_def_norm_bwd || !((const dnri_norm_bwd_attr *)bwd->attr)->residual ||
            dnri_desc(g, bwd->in[BWD_Y])->dim[3] % 8)
            continue;
        const int at = dnri_graph_writer(g, bwd->in[BWD_Y]);
        dnri_op *norm = at < 0 ? NULL : dnri_graph_op(g, at), masking;
        if (!norm || norm->def != &dnri_def_norm_train || norm->n_out > MASK)
            continue;
        masking = *norm;
        masking.out[MASK] = DNRI_NONE;
        masking.n_out = MASK + 1;
        if (!dnri_device_supports(dev, g, &masking))
            continue;
        DNR_TRY(masking.def->infer(g, &masking)); /* makes the mask */
        *norm = masking;
        bwd->in[BWD_Y] = masking.out[MASK];
    }
    return dnri_graph_status(g);
}

/* Statistics come before recomputation, which knows how to repeat the pair, and after the gradient walk, which so
 * has one rule for convolutions: their backward ops read x, w and dy alone, a norm's read mean and invstd. */
dnr_status dnri_model_fuse(dnr_graph *g, dnr_device *dev, const dnri_fuse_opts *o)
{
    const bool short_type = dnri_dtype_size(dnri_graph_numerics(g)->compute) == 2;
    const dnr_fusion level = o->fusion != DNR_FUSION_AUTO ? o->fusion
                             : short_type                 ? DNR_FUSION_D3
                                                          : DNR_FUSION_D1;
    if (level != DNR_FUSION_OFF)
        DNR_TRY(dnri_fuse_norm_pool(g)); /* before its gradients are added */
    DNR_TRY(dnri_fuse_gradient_add(g));
    if (level == DNR_FUSION_OFF)
        return DNR_OK;
    DNR_TRY(dnri_fuse_input(g, dev, DNRI_QUADS, DNRI_QUADS));
    DNR_TRY(dnri_fuse_input(g, dev, DNRI_QUADS, DNRI_BLOCKS));
    DNR_TRY(dnri_fuse_input(g, dev, DNRI_BLOCKS, DNRI_BLOCKS));
    DNR_TRY(dnri_fuse_statistics(g, dev));
    if (o->recompute == DNR_RECOMPUTE_NONE)
        DNR_TRY(dnri_fuse_masks(g, dev));
    if (level >= DNR_FUSION_D2)
        DNR_TRY(dnri_fuse_algbn(g, dev, o->algbn_rows ? o->algbn_rows : ALGBN_ROWS));
    if (level == DNR_FUSION_D3)
        DNR_TRY(dnri_fuse_algbn_forward(g, dev));
    return dnri_fuse_widen(g, dev, o->bucket_bytes);
}
