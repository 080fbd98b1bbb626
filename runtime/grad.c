/* grad.c: the gradient walk: reverse-mode differentiation over the op list. */
#include "graph.h"

#include <stdlib.h>

/* The gradient of one tensor so far: the sum of what its consumers sent, in the order of the walk.
 */
static void accumulate(dnr_graph *g, dnr_tid *grad, dnr_tid t, dnr_tid d, const char *name)
{
    if (d >= 0 && dnri_wants_grad(g, t))
        grad[t] = grad[t] < 0 ? d : dnri_add(g, name, grad[t], d);
}

dnr_status dnri_graph_backward(dnr_graph *g)
{
    DNR_TRY(dnri_graph_status(g));
    int n = dnri_graph_ops(g), losses = 0;
    int tensors = dnri_graph_tensors(g); /* gradients themselves need none */
    for (int i = 0; i < n; i++)
        losses += dnri_graph_op(g, i)->def->is_loss;
    if (losses != 1)
        return DNR_FAIL(DNR_EUSAGE, "emit exactly one loss before the gradient walk",
                        "the graph has %d losses", losses);
    dnr_tid *grad = malloc((size_t)tensors * sizeof *grad);
    if (!grad)
        return DNR_FAIL_NOMEM();
    for (int t = 0; t < tensors; t++)
        grad[t] = DNRI_NONE;
    dnri_graph_phase(g, DNRI_BACKWARD);
    dnr_status st = DNR_OK;
    for (int i = n - 1; i >= 0 && st == DNR_OK; i--) {
        const dnri_op op = *dnri_graph_op(g, i); /* a copy: emits move the list */
        if (!op.def->grad)
            continue;
        dnr_tid dy[DNRI_MAX_OUT], dx[DNRI_MAX_IN];
        bool reached = op.def->is_loss;
        for (int k = 0; k < op.n_out; k++) {
            dy[k] = op.out[k] >= 0 && op.out[k] < tensors ? grad[op.out[k]] : DNRI_NONE;
            reached |= dy[k] >= 0;
        }
        if (!reached)
            continue;
        for (int k = 0; k < op.n_in; k++)
            dx[k] = DNRI_NONE;
        dnri_graph_scope(g, op.stage, op.block);
        DNR_GOTO(st, op.def->grad(g, &op, dy, dx));
        for (int k = 0; k < op.n_in; k++)
            accumulate(g, grad, op.in[k], dx[k], op.name);
        st = dnri_graph_status(g);
    }
out:
    free(grad);
    dnri_graph_scope(g, -1, -1);
    dnri_graph_phase(g, DNRI_UPDATE);
    return st;
}
