/* fuse_input.c: lets ingest write pictures as the first layer likes to read them. */
#include "fuse.h"

#include "../runtime/backend.h"

#include <string.h>

static void set_attr(dnri_op *op, const void *attr, size_t size)
{
    memset(op->attr, 0, sizeof op->attr);
    memcpy(op->attr, attr, size);
}

/* The packed form of ingest or of an op that reads it; false where it has none. */
static bool packed_form(const dnri_op *from, dnri_packing packing, dnri_op *op)
{
    *op = *from;
    if (from->def == &dnri_def_ingest) {
        const dnri_packed_ingest_attr a = {*(const dnri_ingest_attr *)from->attr, packing};
        op->def = &dnri_def_packed_ingest;
        op->out[0] = DNRI_NONE;
        set_attr(op, &a, sizeof a);
        return true;
    }
    const dnri_packed_conv_attr a = {*(const dnri_conv_attr *)from->attr, packing};
    op->def = from->def == &dnri_def_conv ? &dnri_def_packed_conv : &dnri_def_packed_conv_wgrad;
    set_attr(op, &a, sizeof a);
    return from->def == &dnri_def_conv || from->def == &dnri_def_conv_wgrad;
}

static bool reads(const dnri_op *op, dnr_tid t)
{
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] == t)
            return true;
    return false;
}

dnr_status dnri_fuse_input(dnr_graph *g, dnr_device *dev, dnri_packing packing)
{
    DNR_TRY(dnri_graph_status(g));
    const int n = dnri_graph_ops(g);
    int first = 0;
    dnri_op op;
    while (first < n && dnri_graph_op_c(g, first)->def != &dnri_def_ingest)
        first++;
    if (first == n)
        return DNR_OK;
    const dnr_tid x = dnri_graph_op_c(g, first)->out[0];
    if (dnri_graph_tensor(g, x)->keep)
        return DNR_OK;
    for (int i = first; i < n; i++) /* all or none */
        if ((i == first || reads(dnri_graph_op_c(g, i), x)) &&
            !(packed_form(dnri_graph_op_c(g, i), packing, &op) &&
              dnri_device_supports(dev, g, &op)))
            return DNR_OK;
    packed_form(dnri_graph_op_c(g, first), packing, &op);
    DNR_TRY(op.def->infer(g, &op)); /* makes the packed x */
    const dnr_tid packed = op.out[0];
    *dnri_graph_op(g, first) = op;
    for (int i = first + 1; i < n; i++) {
        if (!reads(dnri_graph_op_c(g, i), x))
            continue;
        packed_form(dnri_graph_op_c(g, i), packing, &op);
        op.in[0] = packed;
        DNR_TRY(op.def->infer(g, &op)); /* checks it */
        *dnri_graph_op(g, i) = op;
    }
    return DNR_OK;
}
