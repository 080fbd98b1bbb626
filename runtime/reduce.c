/* reduce.c: see reduce.h. */
#include "reduce.h"
#include "engine_ops.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static dnr_status in_place(dnr_graph *g, dnri_op *op)
{
    return DNR_OK;
}

static double reduce_flops(const dnr_graph *g, const dnri_op *op)
{
    return (double)((const dnri_reduce_attr *)op->attr)->count;
}

static dnr_status pack_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_wire_attr *a = (const dnri_wire_attr *)op->attr;
    return dnri_out(g, op, 0, dnri_desc1((dnr_dtype)a->type, a->count), "wire");
}

static double wire_flops(const dnr_graph *g, const dnri_op *op)
{
    return (double)((const dnri_wire_attr *)op->attr)->count;
}

const dnri_op_def dnri_def_wire_pack = {
    .name = "wire.pack", .infer = pack_infer, .flops = wire_flops};
const dnri_op_def dnri_def_wire_unpack = {
    .name = "wire.unpack", .infer = in_place, .flops = wire_flops};
const dnri_op_def dnri_def_reduce = {.name = "reduce", .infer = in_place, .flops = reduce_flops};
const dnri_op_def dnri_def_reduce_wait = {.name = "reduce.wait", .infer = in_place};

typedef struct pass {
    dnr_graph *g;
    dnri_bucket *bucket;
    int n;
    int *after;     /* [n]: the op behind which a bucket is complete */
    int after_loss; /* the op behind which the metrics are */
    dnri_op *ops;   /* the new list */
    int n_ops;
    bool one_lane;
} pass;

dnr_status dnri_graph_buckets(const dnr_graph *g, size_t bytes, dnri_bucket **out, int *n)
{
    bytes = bytes ? bytes : DNRI_BUCKET_BYTES;
    size_t first = bytes < DNRI_BUCKET_FIRST ? bytes : DNRI_BUCKET_FIRST;
    return dnri_buckets_make(dnri_graph_params(g), dnri_dtype_size(dnri_graph_numerics(g)->master),
                             first, bytes, out, n);
}

/* Which bucket a parameter is in; -1: it has no gradient. */
static int bucket_of(const dnri_params *params, const dnri_bucket *b, int n, int param)
{
    const dnri_param *p = dnri_params_at(params, param);
    for (int i = 0; p->kind != DNRI_RUNNING && i < n; i++)
        if (b[i].offset <= p->offset && p->offset < b[i].offset + b[i].count)
            return i;
    return -1;
}

void dnri_bucket_places(const dnr_graph *g, const dnri_bucket *b, int n, int *after)
{
    for (int i = 0; i < n; i++)
        after[i] = -1;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; k < op->n_out; k++) {
            const dnri_tensor *t = op->out[k] < 0 ? NULL : dnri_graph_tensor(g, op->out[k]);
            if (!t || t->home != DNRI_STORE || t->role != DNRI_GRAD || t->param < 0)
                continue;
            int at = bucket_of(dnri_graph_params(g), b, n, t->param);
            if (at >= 0)
                after[at] = i;
        }
    }
}

/* The last op that writes the state: the loss. */
static int place_of_loss(const dnr_graph *g)
{
    int at = -1;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; k < op->n_out; k++) {
            const dnri_tensor *t = op->out[k] < 0 ? NULL : dnri_graph_tensor(g, op->out[k]);
            if (t && t->home == DNRI_STORE && t->role == DNRI_STATE)
                at = i;
        }
    }
    return at;
}

static dnri_op *append(pass *p, const dnri_op_def *def, const char *name, const void *attr,
                       size_t size, dnri_phase phase)
{
    dnri_op *op = &p->ops[p->n_ops++];
    *op = (dnri_op){.def = def, .stage = -1, .block = -1, .phase = phase};
    snprintf(op->name, sizeof op->name, "%s", name);
    memcpy(op->attr, attr, size);
    return op;
}

static void append_reduce(pass *p, const char *name, dnr_tid t, dnri_sum sum, int64_t offset,
                          int64_t count, int64_t bucket)
{
    dnri_reduce_attr a = {
        .offset = offset, .count = count, .sum = sum, .bucket = bucket, .wait = p->one_lane};
    dnri_op *op =
        append(p, &dnri_def_reduce, name, &a, sizeof a, bucket < 0 ? DNRI_FORWARD : DNRI_BACKWARD);
    op->n_in = op->n_out = 1;
    op->in[0] = op->out[0] = t;
}

/* Adds the bucket to the sums over micro-batches; returns where it is then. */
static dnr_tid append_fold(pass *p, const char *name, const dnri_bucket *x)
{
    dnri_grad_fold_attr a = {x->offset, x->count};
    dnri_op *op = append(p, &dnri_def_grad_fold, name, &a, sizeof a, DNRI_BACKWARD);
    op->n_in = 2;
    op->in[0] = dnri_slab_tensor(p->g, DNRI_GRAD);
    op->in[1] = dnri_slab_tensor(p->g, DNRI_HEADER);
    op->n_out = 1;
    return op->out[0] = dnri_slab_tensor(p->g, DNRI_GSUM);
}

static dnr_status append_bucket(pass *p, int b, const dnri_reduce_opts *o)
{
    const dnri_bucket *x = &p->bucket[b];
    const dnr_dtype master = dnri_graph_numerics(p->g)->master;
    char name[32];
    snprintf(name, sizeof name, "bucket %d", b);
    dnr_tid grad = o->sums ? append_fold(p, name, x) : dnri_slab_tensor(p->g, DNRI_GRAD);
    if (o->wire != DNR_F16 && o->wire != DNR_BF16) {
        append_reduce(p, name, grad, dnri_sum_of(master),
                      x->offset * (int64_t)dnri_dtype_size(master), x->count, b);
        return DNR_OK;
    }
    dnri_wire_attr a = {x->offset, x->count, o->wire};
    dnri_op *op = append(p, &dnri_def_wire_pack, name, &a, sizeof a, DNRI_BACKWARD);
    op->n_in = op->n_out = 1;
    op->in[0] = grad;
    op->out[0] = DNRI_NONE;
    DNR_TRY(op->def->infer(p->g, op));
    append_reduce(p, name, op->out[0], dnri_sum_of(o->wire), 0, x->count, b);
    return DNR_OK;
}

dnr_status dnri_emit_reduced(dnr_graph *g, dnr_tid grad)
{
    const int n = dnri_graph_ops(g);
    DNR_TRY(dnri_emit(g, &dnri_def_reduce_wait, "update", NULL, 0, 1, &grad, 1, &grad));
    for (int i = 0; i < n; i++) {
        const dnri_op op = *dnri_graph_op_c(g, i);
        if (op.def == &dnri_def_wire_pack)
            DNR_TRY(dnri_emit(g, &dnri_def_wire_unpack, op.name, op.attr, sizeof(dnri_wire_attr), 1,
                              op.out, 1, &grad));
    }
    return DNR_OK;
}

static_assert(offsetof(dnri_state, correct5) == offsetof(dnri_state, correct1) + 8 &&
                  offsetof(dnri_state, samples) == offsetof(dnri_state, correct1) + 16,
              "the counts are summed as one array");

static void append_metrics(pass *p)
{
    dnr_tid state = dnri_slab_tensor(p->g, DNRI_STATE),
            header = dnri_slab_tensor(p->g, DNRI_HEADER);
    append_reduce(p, "loss", state, DNRI_SUM_F64, offsetof(dnri_state, loss_sum), 1, -1);
    append_reduce(p, "counts", state, DNRI_SUM_I64, offsetof(dnri_state, correct1), 3, -1);
    append_reduce(p, "stop", header, DNRI_SUM_I64, offsetof(dnri_header, stop), 1, -1);
}

static dnr_status rewrite(pass *p, const dnri_reduce_opts *o)
{
    int last = dnri_graph_ops(p->g) - 1;
    for (int b = 0; b < p->n; b++) /* one without gradients goes with the rest */
        p->after[b] = p->after[b] < 0 ? last : p->after[b];
    for (int i = 0; i <= last; i++) {
        p->ops[p->n_ops++] = *dnri_graph_op_c(p->g, i);
        if (i == p->after_loss)
            append_metrics(p);
        for (int b = 0; b < p->n; b++)
            if (p->after[b] == i)
                DNR_TRY(append_bucket(p, b, o));
    }
    return DNR_OK;
}

dnr_status dnri_rewrite_reduce(dnr_graph *g, const dnri_reduce_opts *o)
{
    DNR_TRY(dnri_graph_status(g));
    pass p = {.g = g, .after_loss = place_of_loss(g), .one_lane = o->one_lane};
    dnri_params_seal(dnri_graph_params(g));
    DNR_TRY(dnri_graph_buckets(g, o->bytes, &p.bucket, &p.n));
    p.after = malloc((size_t)(p.n + 1) * sizeof *p.after);
    p.ops = malloc((size_t)(dnri_graph_ops(g) + 3 * p.n + 4) * sizeof *p.ops);
    dnr_status st = p.after && p.ops ? DNR_OK : DNR_FAIL_NOMEM();
    if (st == DNR_OK) {
        dnri_bucket_places(g, p.bucket, p.n, p.after);
        st = rewrite(&p, o);
    }
    if (st == DNR_OK) {
        dnri_graph_replace_ops(g, p.ops, p.n_ops);
        p.ops = NULL;
        st = dnri_graph_status(g);
    }
    free(p.bucket);
    free(p.after);
    free(p.ops);
    return st;
}
