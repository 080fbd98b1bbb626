/* rewrite.c: recomputation, and splitting what a back end lacks. */
#include "rewrite.h"

#include "backend.h"

#include <stdlib.h>

/* A growing op list. */
typedef struct list {
    dnri_op *ops;
    int n, room;
} list;

static dnr_status push(list *l, const dnri_op *op)
{
    if (l->n == l->room) {
        int room = l->room ? 2 * l->room : 64;
        dnri_op *ops = realloc(l->ops, (size_t)room * sizeof *ops);
        if (!ops)
            return DNR_FAIL_NOMEM();
        l->ops = ops;
        l->room = room;
    }
    l->ops[l->n++] = *op;
    return DNR_OK;
}

/* Ends a pass: its list becomes the graph's, unless it failed. */
static dnr_status finish(dnr_graph *g, dnr_status st, list *l)
{
    if (st == DNR_OK)
        dnri_graph_replace_ops(g, l->ops, l->n);
    else
        free(l->ops);
    return st;
}

/* ---- recomputation */

#define OUTSIDE INT64_C(-1) /* of every segment */

typedef struct recompute {
    dnr_graph *g;
    dnr_recompute mode;
    /* by tensor: */
    int64_t *home; /* the segment that can remake it; OUTSIDE: it is kept */
    bool *
        needed; /* backward ops or their clones read it; of DNR_RECOMPUTE_CHEAP: any op after forward does */
    dnr_tid *remade; /* its copy made by a clone, or DNRI_NONE */
    size_t bytes;    /* of DNR_RECOMPUTE_NONE: so many are to be remade all the same */
    bool *few;       /* by tensor: first result of an op that is chosen for that */
    list out;
} recompute;

/* A segment's name, from the scope of its ops. */
static int64_t segment_of(const recompute *r, const dnri_op *op)
{
    bool block = r->mode == DNR_RECOMPUTE_BLOCK;
    if (op->stage < 0 || (block && op->block < 0))
        return OUTSIDE;
    return (int64_t)op->stage << 32 | (block ? op->block : 0);
}

/* A tensor whose life is worth shortening: no vector, and not read after the program. */
static bool is_large(const dnri_tensor *t)
{
    const int64_t *dim = t->desc.dim;
    return t->home == DNRI_ARENA && !t->keep && dim[0] * dim[1] * dim[2] > 1;
}

/* Kept are: what an op outside the segment reads, what is read after the program, what small ops make, and vectors (statistics
 * of a norm), which cost little to keep and a pass over x to remake. */
static void find_homes(recompute *r)
{
    const dnr_graph *g = r->g;
    for (dnr_tid t = 0; t < dnri_graph_tensors(g); t++)
        r->home[t] = OUTSIDE;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; op->phase == DNRI_FORWARD && k < op->n_out; k++) {
            if (op->out[k] < 0)
                continue;
            const dnri_tensor *t = dnri_graph_tensor(g, op->out[k]);
            if (is_large(t) && !op->def->small)
                r->home[op->out[k]] = segment_of(r, op);
        }
    }
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; k < op->n_in; k++)
            if (op->in[k] >= 0 && r->home[op->in[k]] != segment_of(r, op))
                r->home[op->in[k]] = OUTSIDE;
    }
}

static void need_inputs(recompute *r, const dnri_op *op)
{
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] >= 0 && r->home[op->in[k]] != OUTSIDE)
            r->needed[op->in[k]] = true;
}

static bool makes_needed(const recompute *r, const dnri_op *op)
{
    for (int k = 0; k < op->n_out; k++)
        if (op->out[k] >= 0 && r->needed[op->out[k]])
            return true;
    return false;
}

static void remap_inputs(const recompute *r, dnri_op *op)
{
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] >= 0 && r->remade[op->in[k]] >= 0)
            op->in[k] = r->remade[op->in[k]];
}

static dnri_op clone_of(const dnri_op *from)
{
    dnri_op op = *from;
    op.phase = DNRI_BACKWARD;
    op.clone = true;
    if (from->def->reclone)
        from->def->reclone(from, &op);
    return op;
}

/* A clone may touch nothing that outlives the step. */
static dnr_status check_pure(const recompute *r, const dnri_op *op)
{
    for (int k = 0; k < op->n_in + op->n_out; k++) {
        bool writes = k >= op->n_in;
        dnr_tid t = writes ? op->out[k - op->n_in] : op->in[k];
        const dnri_tensor *x = t < 0 ? NULL : dnri_graph_tensor(r->g, t);
        if (x && x->home == DNRI_STORE && (writes || x->role == DNRI_BUFFER))
            return DNR_FAIL(
                DNR_EUSAGE,
                "set memory.recompute=none; this is a defect of the layer: please report it",
                "%s of %s changes %s and so cannot be recomputed", op->def->name, op->name,
                x->name);
    }
    return DNR_OK;
}

/* Gives the clone outputs of its own. */
static dnr_status renew_outputs(recompute *r, dnri_op *op)
{
    for (int k = 0; k < op->n_out; k++) {
        if (op->out[k] < 0)
            continue;
        dnri_tensor t = *dnri_graph_tensor(r->g, op->out[k]);
        t.wants_grad = t.keep = false;
        dnr_tid copy = dnri_graph_new_tensor(r->g, &t);
        if (copy < 0)
            return dnri_graph_status(r->g);
        if (r->home[op->out[k]] != OUTSIDE)
            r->remade[op->out[k]] = copy;
        op->out[k] = copy;
    }
    return DNR_OK;
}

/* Appends clones of the part of the segment's forward that leads to what its backward reads. */
static dnr_status remake(recompute *r, int64_t segment)
{
    list slice = {0}; /* last op first */
    dnr_status st = DNR_OK;
    int n = dnri_graph_ops(r->g);
    for (int i = 0; i < n; i++) {
        const dnri_op *op = dnri_graph_op_c(r->g, i);
        if (op->phase == DNRI_BACKWARD && segment_of(r, op) == segment)
            need_inputs(r, op);
    }
    for (int i = n - 1; i >= 0; i--) {
        const dnri_op *op = dnri_graph_op_c(r->g, i);
        if (op->phase != DNRI_FORWARD || segment_of(r, op) != segment || !makes_needed(r, op))
            continue;
        dnri_op clone = clone_of(op);
        need_inputs(r, &clone);
        DNR_GOTO(st, check_pure(r, &clone));
        DNR_GOTO(st, push(&slice, &clone));
    }
    while (slice.n > 0) {
        dnri_op *clone = &slice.ops[--slice.n];
        remap_inputs(r, clone);
        DNR_GOTO(st, renew_outputs(r, clone));
        DNR_GOTO(st, push(&r->out, clone));
    }
out:
    free(slice.ops);
    return st;
}

static bool begins_backward(const recompute *r, int i)
{
    const dnri_op *op = dnri_graph_op_c(r->g, i);
    int64_t segment = segment_of(r, op);
    if (op->phase != DNRI_BACKWARD || segment == OUTSIDE)
        return false;
    for (int k = 0; k < i; k++) {
        const dnri_op *before = dnri_graph_op_c(r->g, k);
        if (before->phase == DNRI_BACKWARD && segment_of(r, before) == segment)
            return false;
    }
    return true;
}

static dnr_status walk(recompute *r)
{
    bool first = true;
    find_homes(r);
    for (int i = 0; i < dnri_graph_ops(r->g); i++) {
        dnri_op op = *dnri_graph_op_c(r->g, i);
        if (begins_backward(r, i)) {
            if (!first)
                DNR_TRY(remake(r, segment_of(r, &op)));
            first = false;
        }
        if (op.phase != DNRI_FORWARD)
            remap_inputs(r, &op);
        DNR_TRY(push(&r->out, &op));
    }
    return DNR_OK;
}

/* Is the op's result had again for one pass over one tensor at most? More inputs would live longer for it. What needs
 * none is remade in every mode, but for a forward pass without recomputation only if it can be divided between the
 * two: pictures in two packings are then written once each. */
static bool is_cheap(const recompute *r, const dnri_op *op)
{
    int large = 0;
    for (int k = 0; k < op->n_in; k++)
        large += op->in[k] >= 0 && is_large(dnri_graph_tensor(r->g, op->in[k]));
    if (op->phase != DNRI_FORWARD || !op->def->cheap)
        return false;
    if (op->n_out && op->out[0] >= 0 && r->few[op->out[0]])
        return true;
    return large <= (r->mode == DNR_RECOMPUTE_CHEAP) &&
           (r->mode != DNR_RECOMPUTE_NONE || op->def->spare);
}

/* What remaking the op as well would save: what backward keeps of its results. 0 where its input would have to be
 * kept in their place. */
static size_t remade_bytes(const recompute *r, const dnri_op *op)
{
    size_t bytes = 0;
    int large = 0;
    if (op->phase != DNRI_FORWARD || !op->def->cheap || op->def->spare)
        return 0;
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] >= 0 && is_large(dnri_graph_tensor(r->g, op->in[k])) &&
            (large++ || !r->needed[op->in[k]]))
            return 0;
    for (int k = 0; k < op->n_out; k++)
        if (op->out[k] >= 0 && is_large(dnri_graph_tensor(r->g, op->out[k])) &&
            r->needed[op->out[k]])
            bytes += dnri_bytes(dnri_desc(r->g, op->out[k]));
    return bytes;
}

/* Sets `few` for r->bytes at least, or all there is: each pass costs what it saves, so that as few as will do are
 * best, and little more than is asked for: the smallest that is enough, as long as there is none the largest. */
static void choose_few(recompute *r)
{
    size_t left = r->bytes, best;
    do {
        dnr_tid next = DNRI_NONE;
        best = 0;
        for (int i = 0; i < dnri_graph_ops(r->g); i++) {
            const dnri_op *op = dnri_graph_op_c(r->g, i);
            const size_t bytes = remade_bytes(r, op);
            if (bytes && !r->few[op->out[0]] &&
                (best < left ? bytes > best : bytes >= left && bytes < best)) {
                best = bytes;
                next = op->out[0];
            }
        }
        if (next >= 0)
            r->few[next] = true;
        left -= best < left ? best : left;
    } while (best && left);
}

/* A clone that makes no more than what is read. */
static dnri_op spare_clone_of(const recompute *r, const dnri_op *from)
{
    dnri_op op = clone_of(from);
    for (int k = 0; k < op.n_out; k++)
        if (op.def->spare >> k & 1 && op.out[k] >= 0 && !r->needed[op.out[k]])
            op.out[k] = DNRI_NONE;
    return op;
}

/* What a forward op makes for its clone's readers alone, it no longer makes. */
static void leave_to_clone(const recompute *r, int i, dnri_op *op)
{
    for (int k = 0; k < op->n_out; k++) {
        bool read = !(op->def->spare >> k & 1) || op->out[k] < 0 || r->home[op->out[k]] != i;
        for (int m = i; !read && m < dnri_graph_ops(r->g); m++) {
            const dnri_op *late = dnri_graph_op_c(r->g, m);
            for (int j = 0; late->phase == DNRI_FORWARD && j < late->n_in; j++)
                read |= late->in[j] == op->out[k];
        }
        if (!read)
            op->out[k] = DNRI_NONE;
    }
}

/* DNR_RECOMPUTE_CHEAP, and of other modes what is_cheap has left: clones of cheap ops alone, each before the first
 * backward op that reads it. `home` is here the op that makes the tensor. */
static dnr_status walk_cheap(recompute *r)
{
    for (int i = 0; i < dnri_graph_ops(r->g); i++) {
        const dnri_op *op = dnri_graph_op_c(r->g, i);
        for (int k = 0; op->phase != DNRI_FORWARD && k < op->n_in; k++)
            if (op->in[k] >= 0)
                r->needed[op->in[k]] = true;
    }
    for (dnr_tid t = 0; t < dnri_graph_tensors(r->g); t++)
        r->home[t] = OUTSIDE;
    if (r->bytes)
        choose_few(r);
    for (int i = 0; i < dnri_graph_ops(r->g); i++) {
        const dnri_op *op = dnri_graph_op_c(r->g, i);
        if (!is_cheap(r, op))
            continue;
        const dnri_op clone = spare_clone_of(r, op); /* its outputs are still those of `op` */
        for (int k = 0; k < clone.n_out; k++)
            if (clone.out[k] >= 0 && is_large(dnri_graph_tensor(r->g, clone.out[k])))
                r->home[clone.out[k]] = i;
    }
    for (int i = 0; i < dnri_graph_ops(r->g); i++) {
        dnri_op op = *dnri_graph_op_c(r->g, i);
        for (int k = 0; op.phase != DNRI_FORWARD && k < op.n_in; k++) {
            if (op.in[k] < 0 || r->home[op.in[k]] == OUTSIDE || r->remade[op.in[k]] >= 0)
                continue;
            dnri_op clone = spare_clone_of(r, dnri_graph_op_c(r->g, (int)r->home[op.in[k]]));
            DNR_TRY(check_pure(r, &clone));
            DNR_TRY(renew_outputs(r, &clone));
            DNR_TRY(push(&r->out, &clone));
        }
        if (op.phase != DNRI_FORWARD)
            remap_inputs(r, &op);
        else
            leave_to_clone(r, i, &op);
        DNR_TRY(push(&r->out, &op));
    }
    return DNR_OK;
}

/* One pass over the graph. */
static dnr_status pass(dnr_graph *g, dnr_recompute mode, size_t bytes,
                       dnr_status (*over)(recompute *))
{
    dnr_status st;
    int tensors = dnri_graph_tensors(g);
    size_t n = (size_t)tensors + 1;
    recompute r = {.g = g,
                   .mode = mode,
                   .bytes = bytes,
                   .home = malloc(n * sizeof *r.home),
                   .needed = calloc(n, sizeof *r.needed),
                   .remade = malloc(n * sizeof *r.remade),
                   .few = calloc(n, sizeof *r.few)};
    if (!r.home || !r.needed || !r.remade || !r.few) {
        st = DNR_FAIL_NOMEM();
    } else {
        for (dnr_tid t = 0; t < tensors; t++)
            r.remade[t] = DNRI_NONE;
        st = over(&r);
    }
    free(r.home);
    free(r.needed);
    free(r.remade);
    free(r.few);
    return finish(g, st, &r.out);
}

dnr_status dnri_rewrite_recompute(dnr_graph *g, dnr_recompute mode)
{
    DNR_TRY(dnri_graph_status(g));
    if (mode == DNR_RECOMPUTE_STAGE || mode == DNR_RECOMPUTE_BLOCK)
        DNR_TRY(pass(g, mode, 0, walk));
    return pass(g, mode, 0, walk_cheap);
}

dnr_status dnri_rewrite_remake(dnr_graph *g, size_t bytes)
{
    DNR_TRY(dnri_graph_status(g));
    return pass(g, DNR_RECOMPUTE_NONE, bytes, walk_cheap);
}

/* ---- splitting */

#define DEEPEST 8 /* splits of splits: more is an op that splits into itself */

/* Appends op to `out`, or what it splits into. The graph's own list serves as the place where expand emits. */
static dnr_status split(dnr_graph *g, dnr_device *dev, const dnri_op *op, int depth, list *out)
{
    if (dnri_device_supports(dev, g, op))
        return push(out, op);
    if (!op->def->expand || depth == DEEPEST)
        return DNR_FAIL(DNR_EUSAGE, "use another device, precision or model",
                        "%s can run neither %s of %s nor simpler ops in its place", dev->name,
                        op->def->name, op->name);
    dnri_graph_replace_ops(g, NULL, 0);
    DNR_TRY(op->def->expand(g, op));
    DNR_TRY(dnri_graph_status(g));
    list parts = {0};
    dnr_status st = DNR_OK;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        dnri_op part = *dnri_graph_op_c(g, i);
        part.stage = op->stage;
        part.block = op->block;
        part.phase = op->phase;
        part.clone = op->clone;
        DNR_GOTO(st, push(&parts, &part));
    }
    for (int i = 0; i < parts.n; i++)
        DNR_GOTO(st, split(g, dev, &parts.ops[i], depth + 1, out));
out:
    free(parts.ops);
    return st;
}

dnr_status dnri_rewrite_split(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    list whole = {0}, out = {0};
    dnr_status st = DNR_OK;
    for (int i = 0; i < dnri_graph_ops(g) && st == DNR_OK; i++)
        st = push(&whole, dnri_graph_op_c(g, i));
    for (int i = 0; i < whole.n && st == DNR_OK; i++)
        st = split(g, dev, &whole.ops[i], 0, &out);
    free(whole.ops);
    return finish(g, st, &out);
}
