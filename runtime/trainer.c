/* trainer.c: builds the programs of a run over one store and one arena, and the memory they share.
 * What happens in a step is in trainer_step.c. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "choices.h"
#include "engine_ops.h"
#include "model.h"
#include "pins.h"
#include "profile.h"
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

static unsigned store_holds(const dnr_trainer_opts *o)
{
    if (o->batch == 0)
        return 0;
    return DNRI_STORE_TRAIN | (o->accumulate > 1 ? DNRI_STORE_SUMS : 0u) |
           (o->ema > 0 ? DNRI_STORE_EMA : 0u);
}

static size_t store_size(const dnr_trainer *t)
{
    return dnri_store_size(t->params, &t->num, store_holds(&t->o));
}

/* The largest batch, of training and evaluation alike, whose plans fit into `have`; 0: none. Memory grows
 * almost linearly with the batch, so interpolation finds it in two or three builds. `too_much` is what the
 * batch asked for needs. */
static int64_t largest_fit(dnr_trainer *t, size_t have, size_t too_much)
{
    const dnr_trainer_opts *o = &t->o;
    int64_t good = 0, bad = o->batch > o->eval_batch ? o->batch : o->eval_batch;
    double need_good = (double)store_size(t), need_bad = (double)too_much;
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
            need = (double)(store_size(t) + arena_size(p) + 2 * slot_size(t, batch, eval));
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

static size_t needed(const dnr_trainer *t)
{
    return store_size(t) + t->arena_bytes + 2 * t->staging_bytes;
}

static dnr_status check_memory(dnr_trainer *t)
{
    size_t free_bytes, total, store = store_size(t), staging = 2 * t->staging_bytes;
    DNR_TRY(t->dev->be->memory(t->dev, &free_bytes, &total));
    size_t have = (size_t)((double)total * t->o.memory_fraction);
    have = have < free_bytes ? have : free_bytes;
    size_t need = needed(t);
    if (need <= have)
        return DNR_OK;
    int64_t fits = largest_fit(t, have, need);
    char remedy[200];
    if (fits > 0)
        snprintf(
            remedy, sizeof remedy,
            "lower train.batch to %lld (and raise train.accumulate), or set memory.recompute = "
            "block",
            (long long)fits);
    else
        snprintf(
            remedy, sizeof remedy,
            "no batch fits: free memory on the device, raise memory.fraction, or use a smaller "
            "model or picture");
    return dnri_fail(
        DNR_EMEM, DNRI_HERE, remedy,
        "%s with batch %lld (evaluation: %lld) needs %.3f GiB (store %.3f, arena %.3f, staging "
        "%.3f); %s "
        "offers %.3f GiB (%.3f free, fraction %g of %.3f); the largest batch that fits "
        "is %lld",
        t->o.model.name, (long long)t->o.batch, (long long)t->o.eval_batch, (double)need / 0x1p30,
        (double)store / 0x1p30, (double)t->arena_bytes / 0x1p30, (double)staging / 0x1p30,
        t->dev->name, (double)have / 0x1p30, (double)free_bytes / 0x1p30, t->o.memory_fraction,
        (double)total / 0x1p30, (long long)fits);
}

/* ---- life */

static dnr_status take_memory(dnr_trainer *t)
{
    const dnri_backend *be = t->dev->be;
    void *pinned;
    DNR_TRY(dnri_store_new(t->dev, t->params, &t->num, store_holds(&t->o), &t->store));
    DNR_TRY(be->alloc(t->dev, t->arena_bytes, &t->arena));
    DNR_TRY(be->alloc(t->dev, t->staging_bytes, &t->staging[0]));
    DNR_TRY(be->alloc(t->dev, t->staging_bytes, &t->staging[1]));
    DNR_TRY(be->alloc_host(t->dev, sizeof *t->pinned, &pinned));
    t->pinned = pinned;
    t->pinned->cell[0] = t->staging[0];
    t->pinned->cell[1] = t->staging[1];
    return DNR_OK;
}

/* Binding warms each program up on black pictures, which leaves rubbish in the store: weights come after. */
static dnr_status bind_programs(dnr_trainer *t)
{
    dnri_state calm = {.loss_scale = 1};
    DNR_TRY(dnri_store_write_state(t->store, &calm));
    DNR_TRY(dnri_copy_now(t->dev, dnri_store_ptr(t->store, DNRI_CELL, -1), &t->pinned->cell[0],
                          sizeof(void *)));
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (t->program[i].plan)
            DNR_TRY(dnri_plan_bind(t->program[i].plan, t->store, t->arena, true));
    return dnri_store_init(t->store, t->o.seed);
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

static const char *in_part(const dnr_trainer *t)
{
    return t->remake ? " in part" : "";
}

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
    m->need = needed(t);
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
    const size_t most = (size_t)(t->o.recompute_gib * 0x1p30);
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
                 t->o.recompute_gib, dnr_recompute_name(dnr_trainer_recompute(t)), in_part(t),
                 (double)take->need / 0x1p30);
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

static dnr_status set_up(dnr_trainer *t, const dnr_trainer_opts *opts)
{
    DNR_TRY(dnri_trainer_options(opts, &t->o));
    t->comm = dnri_comm_alone(t->o.comm) ? NULL : t->o.comm;
    t->world = dnri_comm_world(t->comm);
    if (t->comm)
        DNR_TRY(dnri_comm_attach(t->comm, t->dev));
    DNR_TRY(t->dev->be->numerics(t->dev, &t->o.precision, &t->num));
    t->num.scaled = t->num.scaled || t->extra.scaled;
    if (t->comm && t->o.batch && t->o.reduce == DNR_REDUCE_F16 && !t->num.scaled)
        return DNR_FAIL(DNR_EUSAGE,
                        "set dist.reduce_type = bf16 or fp32, or train.precision = fp16",
                        "dist.reduce_type is fp16 and the loss is not scaled: small gradients "
                        "would vanish");
    if (t->o.model.sync_bn && t->comm && t->o.model.sync_bn_group &&
        t->world % t->o.model.sync_bn_group)
        return DNR_FAIL(DNR_EUSAGE, "use a divisor of the number of ranks, or 0 for all of them",
                        "model.sync_bn_group is %d, and there are %d ranks",
                        t->o.model.sync_bn_group, t->world);
    t->params = dnri_params_new();
    if (!t->params)
        return DNR_FAIL_NOMEM();
    if (t->o.recompute == DNR_RECOMPUTE_AUTO)
        DNR_TRY(choose_recompute(t));
    if (t->o.benchmark && in_doubt(t)) { /* timing could take minutes, and more than all memory */
        DNR_TRY(plan_programs(t, false));
        free_programs(t->program);
    }
    DNR_TRY(plan_timed(t));
    if (t->extra.planned)
        return DNR_OK;
    DNR_TRY(take_memory(t));
    return bind_programs(t);
}

dnr_status dnri_trainer_create(dnr_device *dev, const dnr_trainer_opts *opts,
                               const dnri_trainer_extra *extra, dnr_trainer **out)
{
    *out = NULL;
    dnr_trainer *t = calloc(1, sizeof *t);
    if (!t)
        return DNR_FAIL_NOMEM();
    t->dev = dev;
    if (extra)
        t->extra = *extra;
    dnr_status s = set_up(t, opts);
    if (s == DNR_OK)
        *out = t;
    else
        dnr_trainer_destroy(t);
    return s;
}

dnr_status dnr_trainer_create(dnr_device *dev, const dnr_trainer_opts *opts, dnr_trainer **out)
{
    return dnri_trainer_create(dev, opts, NULL, out);
}

dnr_status dnr_tune(dnr_device *dev, const dnr_trainer_opts *opts, dnr_tune_fn fn, void *user)
{
    const dnri_trainer_extra extra = {.planned = true, .tried = fn, .tried_user = user};
    dnr_trainer *t;
    size_t free_bytes, total;
    if (!opts->benchmark || opts->deterministic)
        return DNR_FAIL(DNR_EUSAGE, "set cudnn.benchmark = true and train.deterministic = false",
                        "nothing is timed where %s",
                        opts->deterministic ? "train.deterministic is on"
                                            : "cudnn.benchmark is off");
    DNR_TRY(dnri_trainer_create(dev, opts, &extra, &t));
    dnr_trainer_destroy(t);
    return dev->be->memory(dev, &free_bytes,
                           &total); /* gives the tuner's memory back, and keeps what it found */
}

void dnr_trainer_destroy(dnr_trainer *t)
{
    if (!t)
        return;
    const dnri_backend *be = t->dev->be;
    free_programs(t->program);
    dnri_store_free(t->store);
    dnri_profile_free(t->profile);
    void *device[] = {t->arena, t->staging[0], t->staging[1]};
    for (int i = 0; i < 3; i++)
        if (device[i])
            be->free(t->dev, device[i]);
    if (t->pinned)
        be->free_host(t->dev, t->pinned);
    if (t->logits)
        be->free_host(t->dev, t->logits);
    dnri_params_free(t->params);
    free(t->lost);
    for (size_t i = 0; i < sizeof t->notes / sizeof t->notes[0]; i++) {
        free(t->notes[i][0]);
        free(t->notes[i][1]);
    }
    free((char *)t->o.model.name);
    free((char *)t->o.model.stem);
    free((char *)t->o.cache);
    free((char *)t->o.pins);
    free(t);
}

/* ---- what it is */

static dnr_status explain_json(const dnr_trainer *t, FILE *out)
{
    const dnr_trainer_opts *o = &t->o;
    json_t *programs = json_array();
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (t->program[i].plan)
            json_array_append_new(programs, dnri_plan_json(t->program[i].plan));
    char hash[24];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)dnr_trainer_plan_hash(t));
    json_t *root = json_pack(
        "{s:s, s:s, s:s, s:I, s:I, s:i, s:I, s:i, s:s, s:s, s:{s:I, s:I, s:I}, s:o}", "device",
        t->dev->name, "model", o->model.name, "precision", dnr_precision_name(o->precision),
        "batch", (json_int_t)o->batch, "accumulate", (json_int_t)o->accumulate, "image", o->image,
        "eval_batch", (json_int_t)o->eval_batch, "eval_image", o->eval_image, "recompute",
        dnr_recompute_name(dnr_trainer_recompute(t)), "hash", hash, "memory", "store",
        (json_int_t)store_size(t), "arena", (json_int_t)t->arena_bytes, "staging",
        (json_int_t)(2 * t->staging_bytes), "programs", programs);
    int failed = !root || json_dumpf(root, out, JSON_INDENT(1) | JSON_REAL_PRECISION(12)) != 0;
    json_decref(root);
    fputc('\n', out);
    return failed ? DNR_FAIL(DNR_EDISK, "check the disk or pipe written to",
                             "the plan could not be written")
                  : DNR_OK;
}

dnr_status dnr_trainer_explain(const dnr_trainer *t, dnr_explain_form form, FILE *out)
{
    const dnr_trainer_opts *o = &t->o;
    if (form == DNR_EXPLAIN_JSON)
        return explain_json(t, out);
    fprintf(
        out,
        "%s, %s, batch %lld x %lld of %d x %d pixels, recompute %s%s, on %s\n"
        "memory: %.1f MiB = store %.1f (weights, gradients, momentum) + arena %.1f (the largest "
        "program's) + staging %.1f\n\n",
        o->model.name, dnr_precision_name(o->precision), (long long)o->batch,
        (long long)o->accumulate, o->image, o->image, dnr_recompute_name(dnr_trainer_recompute(t)),
        in_part(t), t->dev->name,
        (double)(store_size(t) + t->arena_bytes + 2 * t->staging_bytes) / 0x1p20,
        (double)store_size(t) / 0x1p20, (double)t->arena_bytes / 0x1p20,
        (double)(2 * t->staging_bytes) / 0x1p20);
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (t->program[i].plan)
            dnri_plan_explain(t->program[i].plan, out);
    return ferror(out) ? DNR_FAIL(DNR_EDISK, "check the disk or pipe written to",
                                  "the plan could not be written")
                       : DNR_OK;
}

uint64_t dnr_trainer_plan_hash(const dnr_trainer *t)
{
    uint64_t hash[DNRI_PROGRAMS] = {0};
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (t->program[i].plan)
            hash[i] = dnri_plan_hash(t->program[i].plan);
    return XXH64(hash, sizeof hash, 0);
}

int64_t dnr_trainer_parameters(const dnr_trainer *t)
{
    int64_t n = 0;
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        n += p->kind == DNRI_RUNNING ? 0 : p->count;
    }
    return n;
}

void dnr_trainer_memory(const dnr_trainer *t, size_t *arena, size_t *store)
{
    *arena = t->arena_bytes;
    *store = store_size(t);
}

dnr_precision dnr_trainer_precision(const dnr_trainer *t)
{
    return t->o.precision;
}

dnr_recompute dnr_trainer_recompute(const dnr_trainer *t)
{
    return t->remake ? DNR_RECOMPUTE_CHEAP : t->o.recompute;
}

const char *dnr_recompute_name(dnr_recompute r)
{
    static const char *const names[] = {"none", "stage", "block", "cheap", "auto"};
    return names[r];
}
