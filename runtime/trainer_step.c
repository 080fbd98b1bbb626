/* trainer_step.c: feeding batches: training steps and evaluation.
 *
 *     copy lane     slot k+1 → staging[k+1 mod 2]        (while k computes)
 *     compute lane  cell ← address of staging[k mod 2]; program; after `last`: state → pinned ring
 *
 * The host never waits for the work it has just enqueued: it waits for the run that last used the staging
 * buffer it is about to fill, for the slot's copy (so that the slot can go back to the loader), and for the
 * state of the step before. All waits are bounded. */
#include <math.h>
#include <stdlib.h>

#include "profile.h"
#include "slot.h"
#include "trainer.h"

#define WAIT_S 300.0

/* What a batch is fed to: a training program, or evaluation's, whole or without its loss. */
typedef enum feeding { FEED_MICRO, FEED_LAST, FEED_EVAL, FEED_PREDICT } feeding;

enum { MARK_RUN = 0, MARK_COPY = 2, MARK_STATE = 3, MARK_EVAL = 5 };

static dnr_status wait_for(const dnr_trainer *t, int mark, const char *what)
{
    if (dnri_wait(t->dev, mark, WAIT_S, what) == DNR_OK)
        return DNR_OK;
    dnri_fail_context("near training step %lld", (long long)t->steps);
    dnr_error own = *dnr_last_error();
    DNR_TRY(dnri_comm_check(t->comm)); /* a lost rank is why */
    return dnri_fail_as(&own);
}

/* What evaluation makes of the weights lies in the arena, and so lasts until they change or a training step runs. */
static dnr_status prepare_eval(dnr_trainer *t)
{
    const uint64_t now = dnri_store_changes(t->store);
    if (t->prepared == now)
        return DNR_OK;
    DNR_TRY(dnri_plan_prepare(t->program[DNRI_EVAL].plan));
    t->prepared = now;
    return DNR_OK;
}

static dnr_status run_program(dnr_trainer *t, feeding what)
{
    if (what >= FEED_EVAL)
        DNR_TRY(prepare_eval(t));
    else
        t->prepared = 0;
    if (t->profile && what <= FEED_LAST)
        return dnri_profile_run(t->profile,
                                t->program[what == FEED_MICRO ? DNRI_MICRO : DNRI_LAST].plan);
    switch (what) {
    case FEED_MICRO:
        return dnri_plan_run(t->program[DNRI_MICRO].plan);
    case FEED_LAST:
        return dnri_plan_run(t->program[DNRI_LAST].plan);
    case FEED_EVAL:
        return dnri_plan_run(t->program[DNRI_EVAL].plan);
    case FEED_PREDICT:
        return dnri_plan_forward(t->program[DNRI_EVAL].plan);
    }
    return DNR_OK;
}

static size_t slot_bytes(const dnr_trainer *t, feeding what)
{
    const dnr_trainer_opts *o = &t->o;
    return what >= FEED_EVAL ? dnri_slot_bytes(o->eval_batch, o->eval_image, o->eval_image)
                             : dnri_slot_bytes(o->batch, o->image, o->image);
}

/* Enqueues the copy of one batch and its run. Where the copy is on a lane of its own, MARK_COPY tells its end. */
static dnr_status enqueue(dnr_trainer *t, feeding what, dnr_lane lane, void *slot, double lr,
                          bool first)
{
    dnr_device *dev = t->dev;
    const dnri_backend *be = dev->be;
    int k = (int)(t->fed & 1);

    if (t->fed >= 2)
        DNR_TRY(wait_for(t, MARK_RUN + k, "the batch before the last"));
    *(dnri_header *)slot = (dnri_header){.lr = lr, .first = first, .stop = t->ask_stop};
    DNR_TRY(be->copy(dev, lane, t->staging[k], slot, slot_bytes(t, what)));
    if (lane != DNRI_COMPUTE) {
        DNR_TRY(be->mark(dev, lane, MARK_COPY));
        DNR_TRY(be->fence(dev, lane, DNRI_COMPUTE));
    }
    DNR_TRY(be->copy(dev, DNRI_COMPUTE, dnri_store_ptr(t->store, DNRI_CELL, -1),
                     &t->pinned->cell[k], sizeof(void *)));
    DNR_TRY(run_program(t, what));
    DNR_TRY(be->mark(dev, DNRI_COMPUTE, MARK_RUN + k));
    t->fed++;
    return DNR_OK;
}

/* Enqueues one batch; returns when its slot may be used again. */
static dnr_status feed(dnr_trainer *t, feeding what, void *slot, double lr, bool first)
{
    DNR_TRY(enqueue(t, what, DNRI_COPY, slot, lr, first));
    return wait_for(t, MARK_COPY, "the copy of a batch to the device");
}

static dnr_status copy_state(dnr_trainer *t, dnri_state *to, int mark)
{
    const dnri_backend *be = t->dev->be;
    DNR_TRY(
        be->copy(t->dev, DNRI_COMPUTE, to, dnri_store_ptr(t->store, DNRI_STATE, -1), sizeof *to));
    return be->mark(t->dev, DNRI_COMPUTE, mark);
}

/* ---- training */

/* Step `n` (from 0), one of the last two, once it is done. */
static dnr_status describe(dnr_trainer *t, int64_t n, dnr_metrics *out)
{
    *out = (dnr_metrics){0};
    if (n < 0)
        return DNR_OK;
    int r = (int)(n & 1);
    DNR_TRY(wait_for(t, MARK_STATE + r, "a training step"));
    const dnri_state *s = &t->pinned->state[r];
    if (t->lost)
        return dnri_fail_as(t->lost);
    if (s->found_inf && s->loss_scale * (t->num.scaled ? 1 / DNRI_SCALE_BACKOFF : 1) <= 1)
        return dnri_trainer_diagnose(t, n, s);
    double samples = s->samples > 0 ? (double)s->samples : NAN;
    *out = (dnr_metrics){.step = s->steps,
                         .samples = t->issued[r].samples,
                         .loss = s->loss_sum / samples,
                         .top1 = (double)s->correct1 / samples,
                         .top5 = (double)s->correct5 / samples,
                         .lr = t->issued[r].lr,
                         .loss_scale = (double)s->loss_scale,
                         .skipped = s->skipped,
                         .grad_norm = t->o.optim.clip_norm > 0 ? sqrt(s->grad_sqsum) : 0,
                         .stop = t->pinned->header[r].stop > 0,
                         .algbn_ratio = (double)s->algbn_ratio,
                         .algbn_exact = s->algbn_exact};
    return DNR_OK;
}

static double learning_rate(const dnr_trainer *t)
{
    const dnr_trainer_opts *o = &t->o;
    return dnr_learning_rate(&o->optim, t->samples, o->total_samples, o->epoch_samples,
                             dnri_trainer_global_batch(t));
}

/* What each step of several ranks begins with. */
static dnr_status begin_step(dnr_trainer *t)
{
    if (!t->comm)
        return DNR_OK;
    if (!t->shared)
        DNR_TRY(dnr_trainer_share(t));
    dnri_comm_stage(t->comm, 0, "step %lld", (long long)t->steps + 1);
    dnri_comm_advance(t->comm);
    return dnri_comm_check(t->comm);
}

static dnr_status feed_training(dnr_trainer *t, int64_t i, void *slot, double lr)
{
    return feed(t, i + 1 < t->o.accumulate ? FEED_MICRO : FEED_LAST, slot, lr, i == 0);
}

static dnr_status end_step(dnr_trainer *t, double lr, dnr_loader *l, int64_t position)
{
    int r = (int)(t->steps & 1);
    if (t->comm)
        DNR_TRY(t->dev->be->copy(t->dev, DNRI_COMPUTE, &t->pinned->header[r],
                                 dnri_store_ptr(t->store, DNRI_HEADER, -1), sizeof(dnri_header)));
    DNR_TRY(copy_state(t, &t->pinned->state[r], MARK_STATE + r));
    t->samples += dnri_trainer_global_batch(t);
    t->issued[r] = (dnri_issued){t->samples, lr, l, position, t->fed};
    t->steps++;
    return DNR_OK;
}

static dnr_status check_loader(const dnr_trainer *t, const dnr_loader *l, bool train)
{
    const dnr_loader_opts *o = dnr_loader_get_opts(l);
    int64_t batch = train ? t->o.batch : t->o.eval_batch;
    int image = train ? t->o.image : t->o.eval_image;
    if (batch == 0)
        return DNR_FAIL(DNR_EUSAGE, "create the trainer with a positive batch",
                        "this trainer was made for evaluation only");
    if (o->train != train)
        return DNR_FAIL(DNR_EUSAGE, "open the loader with the right value of `train`",
                        "%s needs a %s loader", train ? "a training step" : "an evaluation",
                        train ? "training" : "validation");
    if (o->world != t->world || (t->comm && o->rank != t->comm->rank))
        return DNR_FAIL(DNR_EUSAGE, "open the loader with the communicator's rank and world",
                        "the loader is rank %d's of %d, the trainer is in a world of %d", o->rank,
                        o->world, t->world);
    if (o->batch != batch || o->image != image)
        return DNR_FAIL(DNR_EUSAGE, "open the loader with the trainer's batch and image",
                        "the loader gives %lld pictures of %d x %d, the %s program takes %lld of "
                        "%d x %d",
                        (long long)o->batch, o->image, o->image, train ? "training" : "evaluation",
                        (long long)batch, image, image);
    return DNR_OK;
}

static dnr_status profile_step(dnr_trainer *t)
{
    bool done;
    if (!t->profile)
        return DNR_OK;
    dnr_status st = dnri_profile_step(t->profile, &done);
    if (st == DNR_OK && !done)
        return DNR_OK;
    dnri_profile_free(t->profile);
    t->profile = NULL;
    return st;
}

dnr_status dnr_trainer_profile(dnr_trainer *t, int64_t steps, const char *path)
{
    dnri_profile_free(t->profile);
    t->profile = NULL;
    return dnri_profile_new(t->dev, steps, path, &t->profile);
}

dnr_status dnr_trainer_step(dnr_trainer *t, dnr_loader *l, dnr_metrics *out)
{
    DNR_TRY(check_loader(t, l, true));
    DNR_TRY(begin_step(t));
    double lr = learning_rate(t);
    int64_t position = 0;
    for (int64_t i = 0; i < t->o.accumulate; i++) {
        dnr_batch b;
        double begin = dnri_profile_now();
        DNR_TRY(dnr_loader_next(l, &b, NULL));
        dnri_profile_host(t->profile, "data wait", begin);
        position = i ? position : b.position;
        begin = dnri_profile_now();
        dnr_status s = feed_training(t, i, b.slot, lr);
        dnri_profile_host(t->profile, "copy and enqueue", begin);
        dnr_loader_release(l, &b);
        DNR_TRY(s);
    }
    DNR_TRY(end_step(t, lr, l, position));
    DNR_TRY(profile_step(t));
    return describe(t, t->steps - 2, out);
}

static dnr_status check_batch(const dnr_batch *b, int64_t batch, int image)
{
    size_t need = dnri_slot_bytes(batch, image, image);
    if (batch == 0)
        return DNR_FAIL(DNR_EUSAGE, "create the trainer with a positive batch",
                        "this trainer was made for evaluation only");
    if (!b->slot || b->bytes != need)
        return DNR_FAIL(DNR_EUSAGE, "make the batch with the trainer's batch and image",
                        "a batch of %zu bytes; %lld pictures of %d x %d take %zu", b->bytes,
                        (long long)batch, image, image, need);
    return DNR_OK;
}

dnr_status dnr_trainer_step_on(dnr_trainer *t, const dnr_batch *b, int64_t n, dnr_metrics *out)
{
    if (n != t->o.accumulate)
        return DNR_FAIL(DNR_EUSAGE, "give as many batches as train.accumulate",
                        "%lld batches for a step of %lld", (long long)n,
                        (long long)t->o.accumulate);
    for (int64_t i = 0; i < n; i++)
        DNR_TRY(check_batch(&b[i], t->o.batch, t->o.image));
    DNR_TRY(begin_step(t));
    double lr = learning_rate(t);
    for (int64_t i = 0; i < n; i++)
        DNR_TRY(feed_training(t, i, b[i].slot, lr));
    DNR_TRY(end_step(t, lr, NULL, 0));
    return describe(t, t->steps - 2, out);
}

void dnr_trainer_ask_stop(dnr_trainer *t)
{
    t->ask_stop = true;
}

dnr_status dnr_trainer_finish(dnr_trainer *t, dnr_metrics *out)
{
    return describe(t, t->steps - 1, out);
}

dnr_status dnri_trainer_step_on(dnr_trainer *t, void *const *slots, dnr_metrics *out)
{
    DNR_TRY(begin_step(t));
    double lr = learning_rate(t);
    for (int64_t i = 0; i < t->o.accumulate; i++)
        DNR_TRY(feed_training(t, i, slots[i], lr));
    DNR_TRY(end_step(t, lr, NULL, 0));
    return dnr_trainer_finish(t, out);
}

dnr_status dnri_trainer_go_on(dnr_trainer *t, const dnri_state *state, int64_t samples)
{
    int64_t global = dnri_trainer_global_batch(t);
    int r = (int)((state->steps + 1) & 1); /* of the last step */
    DNR_TRY(dnri_store_write_state(t->store, state));
    DNR_TRY(copy_state(t, &t->pinned->state[r], MARK_STATE + r));
    t->steps = state->steps;
    t->samples = samples - global;
    t->issued[r] = (dnri_issued){.samples = samples, .lr = learning_rate(t), .fed = t->fed};
    t->samples = samples;
    free(t->lost);
    t->lost = NULL;
    return DNR_OK;
}

/* ---- evaluation */

static dnr_status end_eval(dnr_trainer *t, dnr_eval_result *out)
{
    const dnri_state *s = &t->pinned->eval;
    DNR_TRY(copy_state(t, &t->pinned->eval, MARK_EVAL));
    DNR_TRY(wait_for(t, MARK_EVAL, "an evaluation"));
    DNR_TRY(dnri_trainer_sum_eval(t, &t->pinned->eval));
    if (s->samples == 0)
        return DNR_FAIL(DNR_EDATA, "check the pictures of data.val",
                        "the evaluation met no picture that could be read");
    *out = (dnr_eval_result){.images = s->samples,
                             .correct1 = s->correct1,
                             .correct5 = s->correct5,
                             .loss = s->loss_sum / (double)s->samples};
    return DNR_OK;
}

/* Many ranks end it together, after their shares: they would wait too long for each other. */
static dnr_status cut_eval(dnr_trainer *t)
{
    DNR_TRY(copy_state(t, &t->pinned->eval, MARK_EVAL));
    DNR_TRY(wait_for(t, MARK_EVAL, "an evaluation"));
    return DNR_FAIL(DNR_STOPPED, "evaluate again", "the evaluation was stopped on request");
}

dnr_status dnr_trainer_eval(dnr_trainer *t, dnr_loader *l, dnr_eval_result *out)
{
    *out = (dnr_eval_result){0};
    DNR_TRY(check_loader(t, l, false));
    DNR_TRY(dnri_trainer_begin_eval(t));
    DNR_TRY(dnr_loader_rewind(l));
    for (bool first = true;; first = false) {
        dnr_batch b;
        bool more;
        if (t->ask_stop && t->world == 1)
            return cut_eval(t);
        DNR_TRY(dnr_loader_next(l, &b, &more));
        if (!more && first)
            return DNR_FAIL(DNR_EDATA, "check data.val", "the validation loader gave no batch");
        if (!more)
            return end_eval(t, out);
        dnr_status s = feed(t, FEED_EVAL, b.slot, 0, first);
        dnr_loader_release(l, &b);
        DNR_TRY(s);
    }
}

dnr_status dnr_trainer_eval_ema(dnr_trainer *t, dnr_loader *l, dnr_eval_result *out)
{
    *out = (dnr_eval_result){0};
    DNR_TRY(dnri_store_swap_ema(t->store));
    dnr_status s = dnr_trainer_eval(t, l, out);
    dnr_error first = *dnr_last_error();
    DNR_TRY(dnri_store_swap_ema(t->store)); /* in any case: training goes on with the weights */
    return s == DNR_OK ? s : dnri_fail_as(&first);
}

dnr_status dnri_trainer_eval_on(dnr_trainer *t, void *slot, bool first, dnr_eval_result *out)
{
    DNR_TRY(feed(t, FEED_EVAL, slot, 0, first));
    return end_eval(t, out);
}

dnr_status dnr_trainer_predict(dnr_trainer *t, const dnr_batch *b, float *logits)
{
    const dnri_backend *be = t->dev->be;
    dnri_program *p = &t->program[DNRI_EVAL];
    const dnr_desc *d = dnri_desc(dnri_plan_graph(p->plan), p->logits);
    DNR_TRY(check_batch(b, t->o.eval_batch, t->o.eval_image));
    if (logits && !t->logits)
        DNR_TRY(be->alloc_host(t->dev, dnri_bytes(d), &t->logits));
    if (!logits)
        return feed(t, FEED_PREDICT, b->slot, 0, true);
    /* nothing to overlap the copy with: in one lane it takes the fewest steps */
    DNR_TRY(enqueue(t, FEED_PREDICT, DNRI_COMPUTE, b->slot, 0, true));
    DNR_TRY(be->copy(t->dev, DNRI_COMPUTE, t->logits, dnri_plan_address(p->plan, p->logits),
                     dnri_bytes(d)));
    DNR_TRY(be->mark(t->dev, DNRI_COMPUTE, MARK_EVAL));
    DNR_TRY(wait_for(t, MARK_EVAL, "a forward pass"));
    for (int64_t at = 0, n; at < dnri_count(d); at += n) {
        double v[256];
        n = dnri_count(d) - at < 256 ? dnri_count(d) - at : 256;
        dnri_to_double(d->dtype, (char *)t->logits + (size_t)at * dnri_dtype_size(d->dtype), v,
                       (size_t)n);
        for (int64_t i = 0; i < n; i++)
            logits[at + i] = (float)v[i];
    }
    return DNR_OK;
}
