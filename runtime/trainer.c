/* trainer.c: a run: its programs over one store and one arena, from its options to its end. What they are is planned in
 * trainer_plan.c, what happens in a step is in trainer_step.c. */
#include <jansson.h>
#include <stdlib.h>
#include <xxhash.h>

#include "profile.h"
#include "trainer.h"

/* ---- life */

static dnr_status take_memory(dnr_trainer *t)
{
    const dnri_backend *be = t->dev->be;
    void *pinned;
    DNR_TRY(dnri_store_new(t->dev, t->params, &t->num, dnri_trainer_store_holds(&t->o), &t->store));
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
    DNR_TRY(dnri_trainer_plan(t));
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
    dnri_trainer_free_plans(t);
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
        (json_int_t)dnri_trainer_store_bytes(t), "arena", (json_int_t)t->arena_bytes, "staging",
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
        dnri_trainer_in_part(t), t->dev->name, (double)dnri_trainer_bytes(t) / 0x1p20,
        (double)dnri_trainer_store_bytes(t) / 0x1p20, (double)t->arena_bytes / 0x1p20,
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
    *store = dnri_trainer_store_bytes(t);
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
