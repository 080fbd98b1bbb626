/* trainer_plan.c: the programs of a run and the memory they need: emitted, rewritten, lowered, and held against what
 * the device has. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "choices.h"
#include "engine_ops.h"
#include "model.h"
#include "pins.h"
#include "reduce.h"
#include "rewrite.h"
#include "slot.h"
#include "trainer.h"

static const char *const NAMES[DNRI_PROGRAMS] = {"micro", "last", "eval"};

/* ---- programs */

static dnr_status emit_forward(dnr_trainer *t, dnr_graph *g, bool training, int64_t batch,
                               dnr_tid *logits)
{
    const dnr_trainer_opts *o = &t->o;
    int image = training ? o->image : o->eval_image;
    dnri_ingest_attr in = {.n = batch, .h = image, .w = image};
    for (int c = 0; c < 3; c++) {
        in.scale[c] = 1 / (255 * o->std[c]);
        in.shift[c] = -o->mean[c] / o->std[c];
    }
    dnri_model_fn model;
    dnr_tid x, labels;
    DNR_TRY(dnri_model_find(o->model.name, &model));
    DNR_TRY(dnri_ingest(g, &in, &x, &labels));
    *logits = model(g, x, &o->model);
    DNR_TRY(dnri_graph_status(g));
    if (t->extra.keep || !training) /* dnr_trainer_predict reads them */
        dnri_keep(g, *logits);
    /* the gradient is the mean's over the whole step; the reported loss of an evaluation is unsmoothed */
    double share = 1 / ((double)batch * (double)o->accumulate * t->world);
    DNR_TRY(dnri_model_loss(g, *logits, labels, training ? o->label_smoothing : 0,
                            training ? share : 1));
    if (t->extra.keep)
        dnri_keep(g, dnri_graph_op_c(g, dnri_graph_ops(g) - 1)->out[0]); /* the samples' losses */
    return DNR_OK;
}

static size_t bucket_bytes(const dnr_trainer *t)
{
    return (size_t)(t->o.bucket_mb * 0x1p20);
}

static dnr_status emit_training(dnr_trainer *t, dnr_graph *g, bool last)
{
    const dnr_optim_opts *o = &t->o.optim;
    bool sync = t->o.model.sync_bn && t->comm; /* its sums stand between what fusion joins */
    dnri_update_opts update = {.sums = t->o.accumulate > 1,
                               .last = last,
                               .reduced = last && t->comm,
                               .ema = t->o.ema,
                               .sgd = {.momentum = o->momentum,
                                       .weight_decay = o->weight_decay,
                                       .clip_norm = o->clip_norm,
                                       .nesterov = o->nesterov,
                                       .decay_norm_bias = o->decay_norm_bias,
                                       .scaled = t->num.scaled}};
    DNR_TRY(dnri_graph_backward(g));
    DNR_TRY(dnri_model_fuse(g, t->dev,
                            &(dnri_fuse_opts){.fusion = sync ? DNR_FUSION_OFF : t->o.fusion,
                                              .recompute = t->o.recompute,
                                              .algbn_rows = t->extra.algbn_rows,
                                              .bucket_bytes = bucket_bytes(t)}));
    if (sync)
        DNR_TRY(dnri_model_sync_norms(g, t->world, t->o.model.sync_bn_group));
    DNR_TRY(t->remake ? dnri_rewrite_remake(g, t->remake)
                      : dnri_rewrite_recompute(g, t->o.recompute));
    if (update.reduced) {
        static const dnr_dtype wire[] = {
            [DNR_REDUCE_F32] = DNR_F32, [DNR_REDUCE_F16] = DNR_F16, [DNR_REDUCE_BF16] = DNR_BF16};
        dnri_reduce_opts reduce = {.bytes = bucket_bytes(t),
                                   .sums = update.sums,
                                   .wire = wire[t->o.reduce],
                                   .one_lane = sync};
        DNR_TRY(dnri_rewrite_reduce(g, &reduce));
    }
    return dnri_emit_update(g, &update);
}

/* Of a forward graph, whose layers all programs share; once. */
static dnr_status check_pins(dnr_trainer *t, const dnr_graph *g)
{
    if (!t->o.pins || t->pins_checked)
        return DNR_OK;
    t->pins_checked = true;
    if (strcmp(t->dev->be->name, "cuda"))
        dnri_log(DNR_LOG_INFO, "cudnn.pin.* is for CUDA and has no effect on %s", t->dev->name);
    return dnri_pins_check(t->o.pins, g);
}

static dnr_status build_one(dnr_trainer *t, int which, int64_t batch, bool benchmark,
                            dnri_program *out)
{
    bool training = which != DNRI_EVAL;
    dnri_lower_opts lower = {.deterministic = t->o.deterministic,
                             .benchmark = benchmark && !t->o.deterministic,
                             .workspace_cap = (size_t)t->o.workspace_mb << 20,
                             .apart = t->extra.apart,
                             .pins = t->o.pins,
                             .tried = benchmark ? t->extra.tried : NULL,
                             .tried_user = t->extra.tried_user,
                             .comm = t->comm,
                             .bucket_bytes = bucket_bytes(t)};
    dnr_graph *g = dnri_graph_new(t->params, &t->num, training);
    if (!g)
        return DNR_FAIL_NOMEM();
    dnr_status s = emit_forward(t, g, training, batch, &out->logits);
    if (s == DNR_OK && training)
        s = check_pins(t, g);
    if (s == DNR_OK)
        s = training ? emit_training(t, g, which == DNRI_LAST)
                     : dnri_model_fuse_eval(g, t->dev, t->o.fusion);
    if (s == DNR_OK && which == DNRI_LAST && t->o.pins && !t->pins_told) {
        t->pins_told = true;
        dnri_pins_remark(t->o.pins, g);
    }
    if (s != DNR_OK) {
        dnri_graph_free(g);
        return s;
    }
    return dnri_plan_build(g, t->dev, NAMES[which], &lower, &out->plan);
}

static void free_programs(dnri_program *p)
{
    for (int i = 0; i < DNRI_PROGRAMS; i++) {
        dnri_plan_free(p[i].plan);
        p[i].plan = NULL;
    }
}

static dnr_status build_programs(dnr_trainer *t, int64_t batch, int64_t eval_batch, bool benchmark,
                                 dnri_program *out)
{
    bool wanted[DNRI_PROGRAMS] = {batch > 0 && t->o.accumulate > 1, batch > 0, true};
    for (int i = 0; i < DNRI_PROGRAMS; i++) {
        dnr_status s = DNR_OK;
        if (wanted[i])
            s = build_one(t, i, i == DNRI_EVAL ? eval_batch : batch, benchmark, &out[i]);
        if (s != DNR_OK) {
            free_programs(out);
            return dnri_fail_context("%s, program %s", t->o.model.name, NAMES[i]);
        }
    }
    dnri_params_seal(t->params);
    return DNR_OK;
}

/* ---- memory */

static size_t arena_size(const dnri_program *p)
{
    size_t most = 0;
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (p[i].plan && dnri_plan_arena(p[i].plan) > most)
            most = dnri_plan_arena(p[i].plan);
    return most;
}

static size_t slot_size(const dnr_trainer *t, int64_t batch, int64_t eval_batch)
{
    size_t train = dnri_slot_bytes(batch, t->o.image, t->o.image);
    size_t eval = dnri_slot_bytes(eval_batch, t->o.eval_image, t->o.eval_image);
    return train > eval ? train : eval;
}

unsigned dnri_trainer_store_holds(const dnr_trainer_opts *o)
{
    if (o->batch == 0)
        return 0;
    return DNRI_STORE_TRAIN | (o->accumulate > 1 ? DNRI_STORE_SUMS : 0u) |
           (o->ema > 0 ? DNRI_STORE_EMA : 0u);
}

size_t dnri_trainer_store_bytes(const dnr_trainer *t)
{
    return dnri_store_size(t->params, &t->num, dnri_trainer_store_holds(&t->o));
}

/* The largest batch, of training and evaluation alike, whose plans fit into `have`; 0: none. Memory grows
 * almost linearly with the batch, so interpolation finds it in two or three builds. `too_much` is what the
 * batch asked for needs. */
static int64_t largest_fit(dnr_trainer *t, size_t have, size_t too_much)
{
    const dnr_trainer_opts *o = &t->o;
    int64_t good = 0, bad = o->batch > o->eval_batch ? o->batch : o->eval_batch;
    double need_good = (double)dnri_trainer_store_bytes(t), need_bad = (double)too_much;
    if (need_good > (double)have)
        return 0;
    for (int tries = 0; bad - good > 1; tries++) {
        double share = ((double)have - need_good) / (need_bad - need_good);
        int64_t n = good + (int64_t)((double)(bad - good) * (tries < 4 ? share : 0.5));
        n = n <= good ? good + 1 : n >= bad ? bad - 1 : n;
        int64_t batch = n < o->batch ? n : o->batch;
        int64_t eval = n < o->eval_batch ? n : o->eval_batch;
        dnri_program p[DNRI_PROGRAMS] = {0};
        double need = 1e300; /* a batch too small for the model does not fit either */
        if (build_programs(t, batch, eval, false, p) == DNR_OK)
            need = (double)(dnri_trainer_store_bytes(t) + arena_size(p) +
                            2 * slot_size(t, batch, eval));
        free_programs(p);
        if (need <= (double)have) {
            good = n;
            need_good = need;
        } else {
            bad = n;
            need_bad = need < 1e300 ? need : need_bad;
        }
    }
    return good;
}

size_t dnri_trainer_bytes(const dnr_trainer *t)
{
    return dnri_trainer_store_bytes(t) + t->arena_bytes + 2 * t->staging_bytes;
}

static dnr_status check_memory(dnr_trainer *t)
{
    size_t free_bytes, total, store = dnri_trainer_store_bytes(t), staging = 2 * t->staging_bytes;
    DNR_TRY(t->dev->be->memory(t->dev, &free_bytes, &total));
    size_t have = (size_t)((double)total * t->o.memory_fraction);
    have = have < free_bytes ? have : free_bytes;
    size_t need = dnri_trainer_bytes(t);
    if (need <= have)
        return DNR_OK;
    int64_t fits = largest_fit(t, have, need);
    char remedy[200], batches[64];
    if (t->o.batch)
        snprintf(batches, sizeof batches, "%lld (evaluation: %lld)", (long long)t->o.batch,
                 (long long)t->o.eval_batch);
    else
        snprintf(batches, sizeof batches, "%lld (evaluation)", (long long)t->o.eval_batch);
    if (fits > 0)
        snprintf(
            remedy, sizeof remedy,
            "lower train.batch to %lld (and raise train.accumulate), or set memory.recompute = "
            "block",
            (long long)fits);
    else
        snprintf(
            remedy, sizeof remedy,
            "no batch fits: free memory on the device, raise memory.fraction or what limits this "
            "process (ulimit -v, a cgroup), or use a smaller model or picture");
    return dnri_fail(
        DNR_EMEM, DNRI_HERE, remedy,
        "%s with batch %s needs %.3f GiB (store %.3f, arena %.3f, staging "
        "%.3f); %s "
        "offers %.3f GiB (%.3f free, fraction %g of %.3f); the largest batch that fits "
        "is %lld",
        t->o.model.name, batches, (double)need / 0x1p30, (double)store / 0x1p30,
        (double)t->arena_bytes / 0x1p30, (double)staging / 0x1p30, t->dev->name,
        (double)have / 0x1p30, (double)free_bytes / 0x1p30, t->o.memory_fraction,
        (double)total / 0x1p30, (long long)fits);
}

/* Plans `t->program`, and refuses it where it does not fit. */
static dnr_status plan_programs(dnr_trainer *t, bool benchmark)
{
    DNR_TRY(build_programs(t, t->o.batch, t->o.eval_batch, benchmark, t->program));
    t->arena_bytes = arena_size(t->program);
    t->staging_bytes = slot_size(t, t->o.batch, t->o.eval_batch);
    return check_memory(t);
}

/* ---- memory.recompute = auto */

/* A mode that may be taken, and what it needs and costs. */
typedef struct mode {
    dnr_recompute recompute;
    size_t need;
    double cost;
} mode;

static int by_cost(const void *a, const void *b)
{
    const mode *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost < y->cost ? -1 : 1;
    return x->need < y->need ? -1 : x->need > y->need;
}

static dnr_status nothing_fits(dnr_trainer *t, const mode *m, int n, size_t most)
{
    const mode *least = m;
    char remedy[200];
    for (int i = 1; i < n; i++)
        least = m[i].need < least->need ? &m[i] : least;
    t->o.recompute = least->recompute;
    const int64_t fits = largest_fit(t, most, least->need);
    snprintf(remedy, sizeof remedy, "set memory.recompute = auto:%.2f%s",
             ceil((double)least->need / 0x1p30 * 100) / 100, fits ? "" : ", or a smaller batch");
    if (fits)
        snprintf(remedy + strlen(remedy), sizeof remedy - strlen(remedy),
                 ", or lower train.batch to %lld", (long long)fits);
    return dnri_fail(
        DNR_EMEM, DNRI_HERE, remedy,
        "memory.recompute = auto:%g: %s with batch %lld fits in no mode; the smallest, %s, needs "
        "%.3f GiB",
        t->o.recompute_gib, t->o.model.name, (long long)t->o.batch,
        dnr_recompute_name(least->recompute), (double)least->need / 0x1p30);
}

/* Sets what m->recompute needs and costs. */
static dnr_status weigh(dnr_trainer *t, mode *m)
{
    t->o.recompute = m->recompute;
    m->cost = 0;
    DNR_TRY(build_programs(t, t->o.batch, t->o.eval_batch, false, t->program));
    t->arena_bytes = arena_size(t->program);
    t->staging_bytes = slot_size(t, t->o.batch, t->o.eval_batch);
    m->need = dnri_trainer_bytes(t);
    for (int k = 0; k < DNRI_PROGRAMS; k++)
        if (t->program[k].plan)
            m->cost += dnri_plan_recomputed(t->program[k].plan);
    free_programs(t->program);
    return DNR_OK;
}

/* The whole of `cheap` is too much: only as much of it as fits. `m` keeps all, and becomes that. */
static dnr_status choose_remake(dnr_trainer *t, size_t most, mode *m)
{
    size_t before = SIZE_MAX;
    while (m->need > most && m->need < before) { /* the peak may move: then more */
        before = m->need;
        t->remake += m->need - most;
        DNR_TRY(weigh(t, m));
    }
    if (m->need > most)
        t->remake = 0;
    return DNR_OK;
}

/* Settles the mode: of those that fit the one that costs least. */
static dnr_status choose_recompute(dnr_trainer *t)
{
    const size_t most = (size_t)fmin(t->o.recompute_gib * 0x1p30, 0x1p62);
    mode m[DNR_RECOMPUTE_AUTO], none;
    for (int i = 0; i < DNR_RECOMPUTE_AUTO; i++) {
        m[i].recompute = (dnr_recompute)i;
        DNR_TRY(weigh(t, &m[i]));
    }
    none = m[DNR_RECOMPUTE_NONE];
    qsort(m, DNR_RECOMPUTE_AUTO, sizeof *m, by_cost);
    for (int i = 0; i < DNR_RECOMPUTE_AUTO; i++) {
        const mode *take = &m[i];
        if (take->need > most)
            continue;
        if (take->recompute == DNR_RECOMPUTE_CHEAP)
            DNR_TRY(choose_remake(t, most, &none));
        take = t->remake ? &none : take;
        t->o.recompute = take->recompute;
        dnri_log(DNR_LOG_INFO, "memory.recompute = auto:%g takes %s%s: %.2f GiB",
                 t->o.recompute_gib, dnr_recompute_name(dnr_trainer_recompute(t)),
                 dnri_trainer_in_part(t), (double)take->need / 0x1p30);
        return DNR_OK;
    }
    return nothing_fits(t, m, DNR_RECOMPUTE_AUTO, most);
}

/* May a plan be too large? A network takes some 50 to 800 times the memory of its pictures. */
static bool in_doubt(dnr_trainer *t)
{
    size_t free_bytes, total;
    if (t->dev->be->memory(t->dev, &free_bytes, &total) != DNR_OK)
        return true;
    return 800.0 * (double)slot_size(t, t->o.batch, t->o.eval_batch) > (double)free_bytes / 4;
}

enum { TIMING_S = 900 }; /* for which the others wait for rank 0 */

/* Ranks with devices alike compute alike: rank 0 times implementations, the others take what it chose. */
static dnr_status plan_timed(dnr_trainer *t)
{
    const bool timed = t->o.benchmark && !t->o.deterministic, together = timed && t->world > 1;
    const bool follows = together && t->comm->rank > 0;
    if (timed && !t->dev->choices && (together || t->o.cache))
        DNR_TRY(
            dnri_choices_open(follows ? NULL : t->o.cache, t->dev->description, &t->dev->choices));
    if (together)
        dnri_comm_stage(t->comm, TIMING_S, "timing implementations");
    if (follows)
        DNR_TRY(dnri_trainer_share_choices(t));
    DNR_TRY(plan_programs(t, t->o.benchmark));
    return together && !follows ? dnri_trainer_share_choices(t) : DNR_OK;
}

dnr_status dnri_trainer_plan(dnr_trainer *t)
{
    if (t->o.recompute == DNR_RECOMPUTE_AUTO)
        DNR_TRY(choose_recompute(t));
    if (t->o.benchmark && in_doubt(t)) { /* timing could take minutes, and more than all memory */
        DNR_TRY(plan_programs(t, false));
        free_programs(t->program);
    }
    return plan_timed(t);
}

void dnri_trainer_free_plans(dnr_trainer *t)
{
    free_programs(t->program);
}
