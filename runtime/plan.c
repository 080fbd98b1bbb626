#include "plan_internal.h"
#include "rewrite.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Lifetimes of the arena's tensors: from the op that writes one to the last that reads it. Kept
 * tensors live throughout, so that they can be written before a run and read after it. */
static void find_lifetimes(dnri_plan *p)
{
    for (dnr_tid t = 0; t < p->n_tensors; t++)
        p->spans[t] = (dnri_span){.first = p->n, .last = -1};
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        for (int k = 0; k < op->n_in + op->n_out; k++) {
            dnr_tid t = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
            if (t < 0 || dnri_graph_tensor(p->g, t)->home != DNRI_ARENA)
                continue;
            dnri_span *s = &p->spans[t];
            s->first = i < s->first ? i : s->first;
            s->last = i > s->last ? i : s->last;
            s->size = dnri_bytes(dnri_desc(p->g, t));
        }
    }
    for (dnr_tid t = 0; t < p->n_tensors; t++) {
        dnri_span *s = &p->spans[t];
        if (s->size == 0) {
            s->first = s->last = 0; /* written by no op of this program */
        } else if (dnri_graph_tensor(p->g, t)->keep) {
            s->first = 0;
            s->last = p->n - 1;
        }
    }
    for (int i = 0; i < p->n; i++)
        p->spans[p->n_tensors + i] = (dnri_span){
            .size = p->steps[i].workspace, .first = i, .last = p->join[i] ? p->join[i] : i};
    for (int i = 0; i < p->n; i++) { /* beside others: what it reads lives as long as it may run */
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        for (int k = 0; k < op->n_in; k++)
            if (op->in[k] >= 0 && p->spans[op->in[k]].size && p->spans[op->in[k]].last < p->join[i])
                p->spans[op->in[k]].last = p->join[i];
    }
}

/* ---- places */

static bool may_share(const dnri_plan *p, dnr_tid t)
{
    return t >= 0 && p->spans[t].size && !dnri_graph_tensor(p->g, t)->keep;
}

/* May the output k of op i be written over its input j? `taken`: other outputs take those. */
static bool can_take(const dnri_plan *p, int i, int k, int j, const bool *taken)
{
    const dnri_op *op = dnri_graph_op_c(p->g, i);
    const dnr_tid from = op->in[j], to = op->out[k];
    if (!may_share(p, from) || !may_share(p, to) || taken[from] || p->spans[from].last != i ||
        p->spans[to].first != i || !dnri_desc_equal(dnri_desc(p->g, from), dnri_desc(p->g, to)))
        return false;
    for (int m = 0; m < op->n_in; m++) /* it may be read as another input, too */
        if ((op->in[m] == from && !(op->def->takes[k] >> m & 1)) || op->in[m] == to)
            return false;
    return true;
}

/* Sets p->takes; where there is a choice the first input is taken, or the last. */
static void share(dnri_plan *p, bool last, bool *taken)
{
    for (dnr_tid t = 0; t < p->n_tensors; t++) {
        p->takes[t] = DNRI_NONE;
        taken[t] = false;
    }
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        for (int k = op->n_out - 1; p->steps[i].in_place && k >= 0; k--)
            for (int m = 0; m < op->n_in; m++) {
                const int j = last ? op->n_in - 1 - m : m;
                if (!(op->def->takes[k] >> j & 1) || !can_take(p, i, k, j, taken))
                    continue;
                p->takes[op->out[k]] = op->in[j];
                taken[op->in[j]] = true;
                break;
            }
    }
}

/* Offsets for the lifetimes of the first n spans, those that take a place joined with the one they take. */
static dnr_status offsets(dnri_plan *p, int n, dnri_span *joined, dnr_tid *root, size_t *peak)
{
    memcpy(joined, p->spans, (size_t)n * sizeof *joined);
    for (dnr_tid t = 0; t < p->n_tensors; t++)
        root[t] = t;
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        for (int k = 0; k < op->n_out; k++) {
            const dnr_tid t = op->out[k];
            if (t < 0 || p->takes[t] < 0)
                continue;
            root[t] = root[p->takes[t]];
            joined[root[t]].last = p->spans[t].last;
            joined[t] = (dnri_span){0};
        }
    }
    return dnri_arena_plan(joined, n, DNRI_ARENA_ALIGN, peak);
}

/* Joined lives leave first fit less freedom, so it is tried with and without. */
static dnr_status place(dnri_plan *p, bool apart)
{
    enum { APART, FIRST, LAST, WAYS };
    const int n = p->n_tensors = dnri_graph_tensors(p->g);
    const size_t spans = (size_t)(n + p->n + 1);
    dnr_tid *root = malloc(((size_t)n + 1) * sizeof *root);
    bool *taken = calloc((size_t)n + 1, sizeof *taken);
    dnri_span *joined = calloc(spans, sizeof *joined);
    size_t peak;
    dnr_status st = DNR_OK;
    p->spans = calloc(spans, sizeof *p->spans);
    p->takes = malloc(((size_t)n + 1) * sizeof *p->takes);
    if (!p->spans || !p->takes || !root || !taken || !joined) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    find_lifetimes(p);
    int best = APART;
    for (int way = APART; way <= WAYS; way++) { /* the best once more at the end */
        const int now = apart ? APART : way < WAYS ? way : best;
        share(p, now == LAST, taken);
        for (dnr_tid t = 0; now == APART && t < n; t++)
            p->takes[t] = DNRI_NONE;
        DNR_GOTO(st, offsets(p, n + p->n, joined, root, &peak));
        if (way == APART || peak <= p->arena) {
            best = way;
            p->arena = peak;
        }
    }
    for (int i = 0; i < n + p->n; i++)
        p->spans[i].offset = joined[i < n ? root[i] : i].offset;
    st = offsets(p, n, joined, root, &p->activations);
out:
    free(root);
    free(taken);
    free(joined);
    return st;
}

/* Finds the parts. What is prepared is kept, since it outlives a pass. */
static dnr_status cut(dnri_plan *p)
{
    int i = 0;
    for (; i < p->n && dnri_graph_op_c(p->g, i)->phase == DNRI_PREPARE; i++)
        for (int k = 0; k < dnri_graph_op_c(p->g, i)->n_out; k++)
            dnri_keep(p->g, dnri_graph_op_c(p->g, i)->out[k]);
    p->end[DNRI_PART_PREPARE] = i;
    while (i < p->n && (dnri_graph_training(p->g) || !dnri_graph_op_c(p->g, i)->def->is_loss))
        i++;
    p->end[DNRI_PART_FORWARD] = i;
    p->end[DNRI_PART_LOSS] = p->n;
    for (i = p->end[DNRI_PART_PREPARE]; i < p->n; i++)
        if (dnri_graph_op_c(p->g, i)->phase == DNRI_PREPARE)
            return DNR_FAIL(DNR_EUSAGE, "this is a defect of a rewrite: please report it",
                            "%s of %s is to be prepared, but stands among the ops of the pass",
                            dnri_graph_op_c(p->g, i)->def->name, dnri_graph_op_c(p->g, i)->name);
    return DNR_OK;
}

/* In the forward pass of a few pictures no op fills the device. The op whose result is first read by other than the
 * next, such as the projection of a residual block, may run beside those in between. Sets p->join; 0: it may not. */
#define FILLS_FLOPS 1e9

static void find_joins(dnri_plan *p)
{
    for (int i = 0; !dnri_graph_training(p->g) && i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const double flops = op->def->flops ? op->def->flops(p->g, op) : 0;
        if (op->phase != DNRI_FORWARD || flops <= 0 || flops > FILLS_FLOPS)
            continue;
        for (int j = i + 1; j < p->n && !p->join[i]; j++) {
            const dnri_op *reader = dnri_graph_op_c(p->g, j);
            if (reader->def->is_loss)
                break; /* of another part */
            for (int k = 0; k < reader->n_in; k++)
                for (int m = 0; m < op->n_out; m++)
                    if (op->out[m] >= 0 && reader->in[k] == op->out[m])
                        p->join[i] = j;
        }
        p->join[i] = p->join[i] == i + 1 ? 0 : p->join[i];
    }
}

static dnr_status lower(dnri_plan *p, const dnri_lower_opts *opts)
{
    dnri_lower_opts beside = *opts;
    beside.lane = DNRI_COMM;
    p->n = dnri_graph_ops(p->g);
    p->steps = calloc((size_t)p->n + 1, sizeof *p->steps);
    p->join = calloc((size_t)p->n + 1, sizeof *p->join);
    if (!p->steps || !p->join)
        return DNR_FAIL_NOMEM();
    find_joins(p);
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const dnri_lower_opts *o = p->join[i] ? &beside : opts;
        if (dnri_device_lower(p->dev, p->g, op, o, &p->steps[i]) != DNR_OK)
            return dnri_fail_context("%s of %s", op->def->name, op->name);
        if (p->steps[i].lane == DNRI_COMPUTE)
            p->join[i] = 0;
        p->forks = p->forks || p->join[i];
        if (p->steps[i].workspace > o->workspace_cap)
            return DNR_FAIL(DNR_EMEM, "raise cudnn.workspace_mb",
                            "%s of %s needs a workspace of %zu MiB, the cap is %zu MiB",
                            op->def->name, op->name, p->steps[i].workspace >> 20,
                            o->workspace_cap >> 20);
    }
    return DNR_OK;
}

dnr_status dnri_plan_build(dnr_graph *g, dnr_device *dev, const char *name,
                           const dnri_lower_opts *o, dnri_plan **out)
{
    dnr_status st;
    dnri_plan *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p) {
        dnri_graph_free(g);
        return DNR_FAIL_NOMEM();
    }
    p->g = g;
    p->dev = dev;
    p->bucket_bytes = o->bucket_bytes;
    snprintf(p->name, sizeof p->name, "%s", name);
    DNR_GOTO(st, dnri_graph_status(g));
    DNR_GOTO(st, dnri_rewrite_split(g, dev));
    DNR_GOTO(st, lower(p, o));
    DNR_GOTO(st, cut(p));
    DNR_GOTO(st, place(p, o->apart));
    *out = p;
    return DNR_OK;
out:
    dnri_plan_free(p);
    return st;
}

void dnri_plan_free(dnri_plan *p)
{
    if (!p)
        return;
    for (int i = 0; i < DNRI_PARTS; i++)
        if (p->program[i])
            p->dev->be->capture_drop(p->dev, p->program[i]);
    for (int i = 0; p->steps && i < p->n; i++)
        if (p->steps[i].drop)
            p->steps[i].drop(p->steps[i].ctx);
    free(p->steps);
    free(p->spans);
    free(p->takes);
    free(p->join);
    free(p->us);
    dnri_graph_free(p->g);
    free(p);
}

size_t dnri_plan_arena(const dnri_plan *p)
{
    return p->arena;
}

size_t dnri_plan_activations(const dnri_plan *p)
{
    return p->activations;
}

const dnr_graph *dnri_plan_graph(const dnri_plan *p)
{
    return p->g;
}

void *dnri_plan_address(const dnri_plan *p, dnr_tid t)
{
    if (t < 0)
        return NULL;
    const dnri_tensor *x = dnri_graph_tensor(p->g, t);
    if (x->home == DNRI_STORE)
        return dnri_store_ptr(p->store, x->role, x->param);
    return p->spans[t].size ? (char *)p->base + p->spans[t].offset : NULL;
}

/* Lets the compute lane wait for what op i needs from another, or the other lane for what is before op i. */
static dnr_status fence(dnri_plan *p, int i)
{
    const dnri_backend *be = p->dev->be;
    for (int k = 0; p->forks && k < i; k++)
        if (p->join[k] == i)
            DNR_TRY(be->fence(p->dev, p->steps[k].lane, DNRI_COMPUTE));
    return p->join[i] ? be->fence(p->dev, DNRI_COMPUTE, p->steps[i].lane) : DNR_OK;
}

static dnr_status run_steps(dnri_plan *p, int part)
{
    for (int i = part ? p->end[part - 1] : 0; i < p->end[part]; i++) {
        dnr_status st = fence(p, i);
        if (st == DNR_OK && p->steps[i].run)
            st = p->steps[i].run(p->steps[i].ctx);
        if (st != DNR_OK) {
            const dnri_op *op = dnri_graph_op_c(p->g, i);
            return dnri_fail_context("%s of %s", op->def->name, op->name);
        }
    }
    return DNR_OK;
}

static dnr_status capture(dnri_plan *p, int part)
{
    const dnri_backend *be = p->dev->be;
    if (p->end[part] == (part ? p->end[part - 1] : 0))
        return DNR_OK;
    DNR_TRY(be->capture_begin(p->dev));
    dnr_status st = run_steps(p, part);
    dnr_error first = *dnr_last_error();
    void *program = NULL;
    dnr_status end = be->capture_end(p->dev, &program); /* ends the capture in any case */
    if (st != DNR_OK) {
        if (program)
            be->capture_drop(p->dev, program);
        return dnri_fail_as(&first);
    }
    p->program[part] = program;
    return end;
}

dnr_status dnri_plan_bind(dnri_plan *p, dnri_store *store, void *arena, bool want_capture)
{
    p->store = store;
    p->base = arena;
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        dnri_binding b = {0};
        for (int k = 0; k < op->n_in; k++)
            b.in[k] = dnri_plan_address(p, op->in[k]);
        for (int k = 0; k < op->n_out; k++)
            b.out[k] = dnri_plan_address(p, op->out[k]);
        if (p->steps[i].workspace)
            b.workspace = (char *)arena + dnri_workspace_span(p, i)->offset;
        if (p->steps[i].bind && p->steps[i].bind(p->steps[i].ctx, &b) != DNR_OK)
            return dnri_fail_context("%s of %s", op->def->name, op->name);
    }
    if (!want_capture || !p->dev->be->capture_begin)
        return DNR_OK;
    /* Libraries load their kernels at first use, which a capture cannot record. */
    for (int part = 0; part < DNRI_PARTS; part++)
        DNR_TRY(run_steps(p, part));
    DNR_TRY(p->dev->be->sync(p->dev, DNRI_COMPUTE));
    for (int part = 0; part < DNRI_PARTS; part++)
        DNR_TRY(capture(p, part));
    return DNR_OK;
}

static dnr_status run_part(dnri_plan *p, int part)
{
    return p->program[part] ? p->dev->be->replay(p->dev, p->program[part]) : run_steps(p, part);
}

dnr_status dnri_plan_prepare(dnri_plan *p)
{
    return run_part(p, DNRI_PART_PREPARE);
}

dnr_status dnri_plan_forward(dnri_plan *p)
{
    return run_part(p, DNRI_PART_FORWARD);
}

dnr_status dnri_plan_run(dnri_plan *p)
{
    DNR_TRY(run_part(p, DNRI_PART_FORWARD));
    return run_part(p, DNRI_PART_LOSS);
}

/* Copies a kept tensor between the device and doubles on the host. */
static dnr_status transfer(dnri_plan *p, dnr_tid t, double *get, const double *put)
{
    const dnri_tensor *x = dnri_graph_tensor(p->g, t);
    if (x->home == DNRI_ARENA && (!x->keep || !p->spans[t].size))
        return DNR_FAIL(DNR_EUSAGE, "mark it with dnri_keep before the plan is built",
                        "tensor %s is not kept", x->name);
    size_t n = (size_t)dnri_count(&x->desc), bytes = dnri_bytes(&x->desc);
    void *host = malloc(bytes);
    if (!host)
        return DNR_FAIL_NOMEM();
    dnr_status st;
    if (put) {
        dnri_from_double(x->desc.dtype, put, host, n);
        st = dnri_copy_now(p->dev, dnri_plan_address(p, t), host, bytes);
    } else {
        st = dnri_copy_now(p->dev, host, dnri_plan_address(p, t), bytes);
        if (st == DNR_OK)
            dnri_to_double(x->desc.dtype, host, get, n);
    }
    free(host);
    return st;
}

dnr_status dnri_plan_read(dnri_plan *p, dnr_tid t, double *host)
{
    return transfer(p, t, host, NULL);
}

dnr_status dnri_plan_write(dnri_plan *p, dnr_tid t, const double *host)
{
    return transfer(p, t, NULL, host);
}

/* Names and shapes, not attributes: their padding is undefined, and ranks compare their cfgs
 * besides. */
uint64_t dnri_plan_hash(const dnri_plan *p)
{
    XXH64_hash_t h = XXH64(p->name, strlen(p->name), 0);
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        h = XXH64(op->def->name, strlen(op->def->name), h);
        h = XXH64(op->name, strlen(op->name), h);
        for (int k = 0; k < op->n_in + op->n_out; k++) {
            dnr_tid t = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
            if (t < 0)
                continue;
            const dnr_desc *d = dnri_desc(p->g, t);
            char text[64];
            dnri_desc_text(d, text);
            h = XXH64(text, strlen(text), h + (uint64_t)k);
        }
    }
    return h;
}

uint64_t dnri_plan_choices(const dnri_plan *p, uint64_t seed)
{
    for (int i = 0; i < p->n; i++)
        seed = XXH64(p->steps[i].impl, strlen(p->steps[i].impl), seed);
    return seed;
}
