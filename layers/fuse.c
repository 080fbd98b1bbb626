/* fuse.c: fusion rewrites. */
#include "fuse.h"

#include "../runtime/model.h"

#include <stdlib.h>
#include <string.h>

enum { DY = 2, DY2 = 3 }; /* inputs of norm.bwd and norm_pool.bwd */

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

dnr_status dnri_model_fuse(dnr_graph *g)
{
    DNR_TRY(dnri_fuse_norm_pool(g)); /* before its gradients are added */
    return dnri_fuse_gradient_add(g);
}
