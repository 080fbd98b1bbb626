/* diagnose.c: a step whose gradients are not finite, run again op by op to find where that began.
 *
 * Such a step changed no weight, and no later one did either (grad.stat in engine_ops.h), so that weights are still
 * those that it began with. Its batches are read once more: a loader's stream is a pure function of the position. The
 * caller's own batches are gone, except the last, which is still in staging. Running statistics move on the way;
 * training steps do not read them, and the run has ended. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan_internal.h"
#include "slot.h"
#include "trainer.h"

enum { CHUNK = 1 << 18, NAMES_SHOWN = 3 };

/* What the elements of a tensor are. */
typedef struct survey {
    int64_t nan, inf, first; /* counts; index of the first of either */
    double low, high;        /* of the finite ones; low > high: none */
} survey;

typedef struct search {
    dnr_trainer *t;
    int64_t step;
    void *raw; /* CHUNK elements */
    double *value;
    bool *spoilt; /* of each sample in the batch: the tensor found has such elements */
    double *
        size; /* by tensor of the program at hand: its largest magnitude when it was written, as another may lie
                     in its place by now */
    /* where it began */
    bool found;
    dnri_phase phase;
    const dnri_op *op; /* NULL: in the weights, before the step */
    const char *tensor;
    dnr_desc desc;
    survey is;
    double reach; /* largest magnitude among the op's inputs */
    bool by_sample;
} search;

static bool is_float(dnr_dtype d)
{
    return d == DNR_F16 || d == DNR_BF16 || d == DNR_F32 || d == DNR_F64;
}

/* Reads a tensor from the device. `each`: elements of one sample, to mark spoilt ones; 0 = not by sample. */
static dnr_status look(search *s, const void *address, const dnr_desc *d, int64_t each, survey *out)
{
    size_t size = dnri_dtype_size(d->dtype);
    int64_t n = dnri_count(d);
    *out = (survey){.low = DBL_MAX, .high = -DBL_MAX};
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t some = n - at < CHUNK ? n - at : CHUNK;
        DNR_TRY(dnri_copy_now(s->t->dev, s->raw, (const char *)address + (size_t)at * size,
                              (size_t)some * size));
        dnri_to_double(d->dtype, s->raw, s->value, (size_t)some);
        for (int64_t i = 0; i < some; i++) {
            double v = s->value[i];
            if (isfinite(v)) {
                out->low = v < out->low ? v : out->low;
                out->high = v > out->high ? v : out->high;
                continue;
            }
            if (out->nan + out->inf == 0)
                out->first = at + i;
            out->nan += isnan(v) != 0;
            out->inf += isinf(v) != 0;
            if (each)
                s->spoilt[(at + i) / each] = true;
        }
    }
    return DNR_OK;
}

static double magnitude(const survey *v)
{
    if (v->nan + v->inf)
        return INFINITY;
    return v->low > v->high ? 0 : fmax(fabs(v->low), fabs(v->high));
}

/* ---- where */

static dnr_status check_weights(search *s)
{
    dnri_params *params = s->t->params;
    for (int i = 0; i < dnri_params_count(params) && !s->found; i++) {
        const dnri_param *p = dnri_params_at(params, i);
        bool norm = p->kind == DNRI_NORM_W || p->kind == DNRI_NORM_B;
        dnr_dtype type = norm ? s->t->num.master : s->t->num.compute;
        dnr_desc d = {type, {p->dim[0], p->dim[1], p->dim[2], p->dim[3]}};
        if (p->kind == DNRI_RUNNING)
            continue;
        DNR_TRY(look(s, dnri_store_ptr(s->t->store, DNRI_WEIGHT, i), &d, 0, &s->is));
        s->found = s->is.nan + s->is.inf > 0;
        s->tensor = p->name;
        s->desc = d;
    }
    return DNR_OK;
}

/* Largest magnitude among the op's inputs. */
static dnr_status reach(search *s, const dnri_plan *p, const dnri_op *op)
{
    for (int k = 0; k < op->n_in; k++) {
        survey v;
        if (op->in[k] < 0 || !is_float(dnri_desc(p->g, op->in[k])->dtype))
            continue;
        if (dnri_graph_tensor(p->g, op->in[k])->home == DNRI_ARENA) {
            s->reach = fmax(s->reach, s->size[op->in[k]]);
            continue;
        }
        DNR_TRY(look(s, dnri_plan_address(p, op->in[k]), dnri_desc(p->g, op->in[k]), 0, &v));
        s->reach = fmax(s->reach, magnitude(&v));
    }
    return DNR_OK;
}

static dnr_status check_outputs(search *s, const dnri_plan *p, const dnri_op *op)
{
    for (int k = 0; k < op->n_out; k++) {
        const dnr_tid t = op->out[k];
        if (t < 0)
            continue;
        const dnri_tensor *x = dnri_graph_tensor(p->g, t);
        bool counted = x->home == DNRI_STORE && x->param < 0; /* state, header */
        if (counted || !is_float(x->desc.dtype))
            continue;
        int64_t batch = s->t->o.batch;
        bool by_sample = x->home == DNRI_ARENA && x->desc.dim[0] == batch;
        DNR_TRY(look(s, dnri_plan_address(p, t), &x->desc,
                     by_sample ? dnri_count(&x->desc) / batch : 0, &s->is));
        s->size[t] = magnitude(&s->is);
        if (s->is.nan + s->is.inf == 0)
            continue;
        s->found = true;
        s->op = op;
        s->phase = op->phase;
        s->by_sample = by_sample;
        s->tensor = x->name;
        s->desc = x->desc;
        return reach(s, p, op);
    }
    return DNR_OK;
}

/* Forward and backward of one batch in staging. */
static dnr_status replay(search *s, dnri_plan *p, void *const *cell)
{
    dnr_trainer *t = s->t;
    t->prepared = 0; /* the arena is used */
    DNR_TRY(dnri_copy_now(t->dev, dnri_store_ptr(t->store, DNRI_CELL, -1), cell, sizeof *cell));
    free(s->size);
    s->size = calloc((size_t)p->n_tensors + 1, sizeof *s->size);
    if (!s->size)
        return DNR_FAIL_NOMEM();
    for (int i = 0; i < p->n && !s->found; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        if (op->phase == DNRI_UPDATE || dnri_comm_owns(op)) /* each rank looks for itself */
            continue;
        if (p->steps[i].run)
            DNR_TRY(p->steps[i].run(p->steps[i].ctx));
        DNR_TRY(t->dev->be->sync(t->dev, DNRI_COMPUTE));
        DNR_TRY(check_outputs(s, p, op));
    }
    return DNR_OK;
}

/* ---- whose */

/* "a, b, c and 13 more", of spoilt samples where these can be told; all names, eight a line, to the log. */
static void name_samples(const search *s, const dnr_loader *l, const dnr_batch *b, char *out,
                         size_t size)
{
    char line[1000] = "";
    size_t at = 0, length = 0;
    int64_t spoilt = 0, in_line = 0;
    dnri_log(DNR_LOG_INFO, "samples of step %lld%s:", (long long)s->step + 1,
             s->by_sample ? " (! marks those that are not finite)" : "");
    for (int64_t i = 0; i < s->t->o.batch; i++) {
        const char *name = l ? dnr_loader_sample_name(l, b, i) : NULL;
        char number[32];
        snprintf(number, sizeof number, "sample %lld", (long long)i);
        name = name ? name : number;
        if (at < sizeof line)
            at += (size_t)snprintf(line + at, sizeof line - at, "  %s%s", name,
                                   s->by_sample && s->spoilt[i] ? "!" : "");
        if (++in_line == 8 || i + 1 == s->t->o.batch) {
            dnri_log(DNR_LOG_INFO, "%s", line);
            in_line = 0;
            at = 0;
        }
        if (s->by_sample && !s->spoilt[i])
            continue;
        if (spoilt++ < NAMES_SHOWN && length < size)
            length += (size_t)snprintf(out + length, size - length, "%s%.60s",
                                       spoilt > 1 ? ", " : "", name);
    }
    if (spoilt > NAMES_SHOWN && length < size)
        snprintf(out + length, size - length, " and %lld more", (long long)spoilt - NAMES_SHOWN);
}

/* ---- what, and why */

static const char *cause(const search *s)
{
    const dnr_trainer *t = s->t;
    if (!s->op)
        return t->issued[s->step & 1].fed <= t->o.accumulate
                   ? "the weights were so from the start: look at the file they were loaded from"
                   : "the last update overflowed: lower optim.lr or lengthen optim.warmup; set "
                     "train.clip_norm";
    if (strncmp(s->op->def->name, "ingest", 6) == 0)
        return "the pixels themselves overflow: correct data.mean and data.std";
    if (t->num.compute == DNR_F16)
        return s->phase == DNRI_FORWARD
                   ? "activations have grown beyond fp16's 65504: lower optim.lr, or use "
                     "train.precision = bf16"
                   : "gradients overflow fp16 even at loss scale 1: set train.clip_norm, lower "
                     "optim.lr, or use train.precision = bf16";
    return s->phase == DNRI_FORWARD
               ? "training has diverged, activations overflow: lower optim.lr or lengthen "
                 "optim.warmup; set train.clip_norm"
               : "gradients explode: set train.clip_norm, lower optim.lr, or lengthen optim.warmup";
}

static void describe(const search *s, const char *samples, char *what, size_t size)
{
    char desc[64], range[96] = "nothing finite", from[64] = "", by[2 * DNRI_NAME];
    const survey *v = &s->is;
    if (v->low <= v->high)
        snprintf(range, sizeof range, "the rest in %.3g … %.3g", v->low, v->high);
    if (isfinite(s->reach) && s->reach > 0)
        snprintf(from, sizeof from, ", from inputs up to %.3g", s->reach);
    if (s->op)
        snprintf(by, sizeof by, "%s of %s gives", s->op->def->name, s->op->name);
    else
        snprintf(by, sizeof by, "the weights before it have");
    snprintf(what, size,
             "step %lld: %s %s %s with %lld NaN and %lld infinite of %lld elements, %s%s; samples: "
             "%s",
             (long long)s->step + 1, by, s->tensor, dnri_desc_text(&s->desc, desc),
             (long long)v->nan, (long long)v->inf, (long long)dnri_count(&s->desc), range, from,
             samples);
}

/* ---- the step's batches */

static dnr_status stage(dnr_trainer *t, void *slot, double lr, bool first)
{
    *(dnri_header *)slot = (dnri_header){.lr = lr, .first = first};
    return dnri_copy_now(t->dev, t->staging[0], slot,
                         dnri_slot_bytes(t->o.batch, t->o.image, t->o.image));
}

static dnr_status from_loader(search *s, const dnri_issued *at, char *names, size_t size)
{
    dnr_trainer *t = s->t;
    dnr_loader *l = NULL;
    dnr_status st = dnr_loader_open_at(at->loader, at->position, &l);
    for (int64_t i = 0; st == DNR_OK && i < t->o.accumulate && (i == 0 || !s->found); i++) {
        dnr_batch b;
        DNR_GOTO(st, dnr_loader_next(l, &b, NULL));
        st = stage(t, b.slot, at->lr, i == 0);
        if (st == DNR_OK && !s->found)
            st = replay(s, t->program[i + 1 < t->o.accumulate ? DNRI_MICRO : DNRI_LAST].plan,
                        &t->pinned->cell[0]);
        if (s->found || i + 1 == t->o.accumulate)
            name_samples(s, l, &b, names, size);
        dnr_loader_release(l, &b);
    }
out:
    dnr_loader_close(l);
    return st;
}

static dnr_status from_staging(search *s, const dnri_issued *at, char *names, size_t size)
{
    dnr_trainer *t = s->t;
    if (t->fed - at->fed > 1) /* overwritten */
        return DNR_OK;
    if (!s->found)
        DNR_TRY(replay(s, t->program[DNRI_LAST].plan, &t->pinned->cell[(at->fed - 1) & 1]));
    name_samples(s, NULL, NULL, names, size);
    return DNR_OK;
}

static dnr_status run_search(search *s, const dnri_state *state, char *names, size_t size)
{
    dnr_trainer *t = s->t;
    const dnri_issued *at = &t->issued[s->step & 1];
    dnri_state then = *state;
    DNR_TRY(t->dev->be->sync(t->dev, DNRI_COPY));
    DNR_TRY(t->dev->be->sync(t->dev, DNRI_COMPUTE));
    then.loss_scale = t->num.scaled ? state->loss_scale / DNRI_SCALE_BACKOFF : 1;
    DNR_TRY(dnri_store_write_state(t->store, &then));
    DNR_TRY(check_weights(s));
    return at->loader ? from_loader(s, at, names, size) : from_staging(s, at, names, size);
}

dnr_status dnri_trainer_diagnose(dnr_trainer *t, int64_t step, const dnri_state *state)
{
    search s = {.t = t, .step = step};
    char names[256] = "", what[sizeof dnr_last_error()->what];
    s.raw = malloc(CHUNK * sizeof(double));
    s.value = malloc(CHUNK * sizeof *s.value);
    s.spoilt = calloc((size_t)t->o.batch, sizeof *s.spoilt);
    t->lost = calloc(1, sizeof *t->lost);
    dnr_status st = s.raw && s.value && s.spoilt && t->lost
                        ? run_search(&s, state, names, sizeof names)
                        : DNR_FAIL_NOMEM();
    if (st != DNR_OK) {
        st = dnri_fail_context("step %lld had gradients that are not finite; looking for the cause",
                               (long long)step + 1);
    } else if (s.found) {
        describe(&s, names, what, sizeof what);
        st = dnri_fail(DNR_EFAIL, DNRI_HERE, cause(&s), "%s", what);
    } else {
        st = DNR_FAIL(DNR_EFAIL,
                      "set train.clip_norm or lower optim.lr; without accumulation and with "
                      "train.deterministic = true the layer can be told",
                      "step %lld had gradients that are not finite, but running it again does not "
                      "show where: %s",
                      (long long)step + 1,
                      names[0] ? "no tensor of its last batch is so" : "its batches are gone");
    }
    if (t->lost)
        *t->lost = *dnr_last_error();
    free(s.raw);
    free(s.value);
    free(s.spoilt);
    free(s.size);
    return st;
}
