/* fuse_widen.c: joins the casts of many layers' weight gradients. */
#include "fuse.h"

#include "../runtime/backend.h"
#include "../runtime/reduce.h"

#include <stdlib.h>

typedef struct pass {
    dnr_graph *g;
    dnri_bucket *bucket;
    int n_buckets;
    dnri_op *ops; /* the new list */
    int n;
} pass;

/* The communication bucket of the gradient that a conv.wgrad leaves in the slab; -1: of another op, or elsewhere. */
static int bucket_of(const pass *p, const dnri_op *op)
{
    const dnri_tensor *dw = op->out[0] < 0 ? NULL : dnri_graph_tensor(p->g, op->out[0]);
    if (op->def != &dnri_def_conv_wgrad || !dw || dw->home != DNRI_STORE || dw->role != DNRI_GRAD)
        return -1;
    const int64_t at = dnri_params_at(dnri_graph_params(p->g), dw->param)->offset;
    for (int b = 0; b < p->n_buckets; b++)
        if (p->bucket[b].offset <= at && at < p->bucket[b].offset + p->bucket[b].count)
            return b;
    return -1;
}

/* The bucket of the next of them behind op i. */
static int next_bucket(const pass *p, int i)
{
    int b = -1;
    while (b < 0 && ++i < dnri_graph_ops(p->g))
        b = bucket_of(p, dnri_graph_op_c(p->g, i));
    return b;
}

static dnri_op widen_of(int bucket)
{
    dnri_op op = {.def = &dnri_def_grad_widen, .stage = -1, .block = -1, .phase = DNRI_BACKWARD};
    snprintf(op.name, sizeof op.name, "bucket %d", bucket);
    return op;
}

static dnr_status rewrite(pass *p, dnr_device *dev)
{
    dnri_op widen = {0};
    for (int i = 0; i < dnri_graph_ops(p->g); i++) {
        dnri_op op = *dnri_graph_op_c(p->g, i);
        const int b = bucket_of(p, &op);
        if (b < 0) {
            p->ops[p->n++] = op;
            continue;
        }
        if (!widen.n_in)
            widen = widen_of(b);
        dnri_tensor narrow = *dnri_graph_tensor(p->g, op.out[0]);
        narrow.home = DNRI_ARENA;
        narrow.desc.dtype = dnri_graph_numerics(p->g)->compute;
        widen.out[widen.n_out++] = op.out[0];
        op.out[0] = widen.in[widen.n_in++] = dnri_graph_new_tensor(p->g, &narrow);
        if (op.out[0] < 0)
            return dnri_graph_status(p->g);
        if (!dnri_device_supports(dev, p->g, &widen)) /* of the first one: nothing is done yet */
            return DNR_OK;
        DNR_TRY(op.def->infer(p->g, &op)); /* checks it */
        p->ops[p->n++] = op;
        if (widen.n_in == DNRI_MAX_IN || next_bucket(p, i) != b) {
            DNR_TRY(widen.def->infer(p->g, &widen));
            p->ops[p->n++] = widen;
            widen.n_in = widen.n_out = 0;
        }
    }
    dnri_graph_replace_ops(p->g, p->ops, p->n);
    p->ops = NULL;
    return DNR_OK;
}

dnr_status dnri_fuse_widen(dnr_graph *g, dnr_device *dev, size_t bucket_bytes)
{
    DNR_TRY(dnri_graph_status(g));
    pass p = {.g = g};
    dnri_params_seal(dnri_graph_params(g));
    DNR_TRY(dnri_graph_buckets(g, bucket_bytes, &p.bucket, &p.n_buckets));
    p.ops = malloc((size_t)(2 * dnri_graph_ops(g) + 1) * sizeof *p.ops);
    const dnr_status st = p.ops ? rewrite(&p, dev) : DNR_FAIL_NOMEM();
    free(p.ops);
    free(p.bucket);
    return st;
}
