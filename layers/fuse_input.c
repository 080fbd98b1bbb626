/* fuse_input.c: lets ingest write pictures as the first layer likes to read them. */
#include "fuse.h"

#include "../runtime/backend.h"

#include <string.h>

static void set_attr(dnri_op *op, const void *attr, size_t size)
{
    memset(op->attr, 0, sizeof op->attr);
    memcpy(op->attr, attr, size);
}

/* How an op that reads the picture wants it; 0: in no packing. */
static int packing_of(const dnri_op *op, dnri_packing fprop, dnri_packing wgrad)
{
    return op->def == &dnri_def_conv         ? (int)fprop
           : op->def == &dnri_def_conv_wgrad ? (int)wgrad
                                             : 0;
}

static dnri_op packed_conv(const dnri_op *from, int packing)
{
    const dnri_packed_conv_attr a = {*(const dnri_conv_attr *)from->attr, packing};
    dnri_op op = *from;
    op.def = from->def == &dnri_def_conv ? &dnri_def_packed_conv : &dnri_def_packed_conv_wgrad;
    set_attr(&op, &a, sizeof a);
    return op;
}

static dnri_op packed_ingest(const dnri_op *from, int packings)
{
    const dnri_packed_ingest_attr a = {*(const dnri_ingest_attr *)from->attr, packings};
    dnri_op op = *from;
    op.def = &dnri_def_packed_ingest;
    op.n_out = DNRI_BLOCKS_OUT + 1;
    op.out[DNRI_QUADS_OUT] = op.out[DNRI_BLOCKS_OUT] = DNRI_NONE;
    set_attr(&op, &a, sizeof a);
    return op;
}

static bool reads(const dnri_op *op, dnr_tid t)
{
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] == t)
            return true;
    return false;
}

dnr_status dnri_fuse_input(dnr_graph *g, dnr_device *dev, dnri_packing fprop, dnri_packing wgrad)
{
    DNR_TRY(dnri_graph_status(g));
    const int n = dnri_graph_ops(g);
    int first = 0, packings = 0;
    while (first < n && dnri_graph_op_c(g, first)->def != &dnri_def_ingest)
        first++;
    if (first == n)
        return DNR_OK;
    const dnri_ingest_attr in = *(const dnri_ingest_attr *)dnri_graph_op_c(g, first)->attr;
    const dnr_tid x = dnri_graph_op_c(g, first)->out[0];
    if (dnri_graph_tensor(g, x)->keep)
        return DNR_OK;
    for (int i = first + 1; i < n; i++) { /* all or none */
        const dnri_op *op = dnri_graph_op_c(g, i);
        if (!reads(op, x))
            continue;
        const int packing = packing_of(op, fprop, wgrad);
        const dnri_op conv = packing ? packed_conv(op, packing) : *op;
        if (!packing || !dnri_device_supports(dev, g, &conv))
            return DNR_OK;
        packings |= packing;
    }
    dnri_op ingest = packed_ingest(dnri_graph_op_c(g, first), packings);
    if (!packings || (packings & DNRI_BLOCKS && (in.h % 2 || in.w % 2)) ||
        !dnri_device_supports(dev, g, &ingest))
        return DNR_OK;
    DNR_TRY(ingest.def->infer(g, &ingest)); /* makes the packed pictures */
    *dnri_graph_op(g, first) = ingest;
    for (int i = first + 1; i < n; i++) {
        if (!reads(dnri_graph_op_c(g, i), x))
            continue;
        const int packing = packing_of(dnri_graph_op_c(g, i), fprop, wgrad);
        dnri_op conv = packed_conv(dnri_graph_op_c(g, i), packing);
        conv.in[0] = ingest.out[packing == DNRI_QUADS ? DNRI_QUADS_OUT : DNRI_BLOCKS_OUT];
        DNR_TRY(conv.def->infer(g, &conv)); /* checks it */
        *dnri_graph_op(g, i) = conv;
    }
    return DNR_OK;
}
