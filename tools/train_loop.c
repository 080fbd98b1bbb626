/* train_loop.c: the steps of a run. The library describes each step one step late, so that nothing waits for the
 * device; `seen` counts the steps that it has described. */
#include "train_loop.h"
#include "ranks.h"
#include "screen.h"
#include "signals.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Sums over some steps; a live line fades old ones out. */
typedef struct sums {
    double steps, loss, top1, top5, samples, seconds, waited;
} sums;

typedef struct loop {
    session *s;
    rundir *dir;
    dnr_error *err;
    dnr_metrics m;  /* of step `seen` */
    int64_t seen;   /* steps described */
    int64_t epochs; /* completed */
    sums window;    /* since the last record */
    sums recent;    /* what the live line shows */
    double ratio;   /* largest algbn_ratio since the last record, and the sum of algbn_exact */
    int64_t exact;
    double started, eval_seconds;
    double last_time, last_wait; /* when the last step was described; the loader's wait then */
    int evals;
    double best; /* top-1 so far; < 0: none */
    int64_t best_step;
    dnr_eval_result last, last_ema;
    bool owed;     /* of what falls due after step `seen`, something is not done */
    int64_t saved; /* step of the last checkpoint; < 0: none */
    double saved_time;
    int64_t bad[2]; /* pictures reported, training and validation */
} loop;

static double epoch_of(const loop *l, int64_t samples)
{
    return (double)samples / (double)l->s->epoch_samples;
}

static void add(sums *a, const sums *b)
{
    a->steps += b->steps;
    a->loss += b->loss;
    a->top1 += b->top1;
    a->top5 += b->top5;
    a->samples += b->samples;
    a->seconds += b->seconds;
    a->waited += b->waited;
}

static void fade(sums *a, double keep)
{
    const sums old = *a;
    *a = (sums){keep * old.steps,   keep * old.loss,    keep * old.top1,  keep * old.top5,
                keep * old.samples, keep * old.seconds, keep * old.waited};
}

/* ---------------------------------------------------------------- progress */

/* Of one evaluation; before the first, a forward pass for each picture: a third of what training on it takes. */
static double one_eval(const loop *l, double train)
{
    const session *s = l->s;
    if (!s->val)
        return 0;
    if (l->evals)
        return l->eval_seconds / l->evals;
    double per_picture = train / (double)l->seen / (double)s->global_batch;
    return per_picture / 3 * (double)dnr_source_count(s->val) * (s->cfg.train.ema > 0 ? 2 : 1);
}

static double seconds_left(const loop *l)
{
    const session *s = l->s;
    double train = tool_now() - l->started - l->eval_seconds;
    int64_t every = s->cfg.run.eval_every, steps = s->steps - l->seen;
    double epochs = (double)steps * (double)s->global_batch / (double)s->epoch_samples;
    return train / (double)l->seen * (double)steps +
           one_eval(l, train) * (every ? ceil(epochs / (double)every) : 1);
}

static void show_progress(const loop *l, double now)
{
    const session *s = l->s;
    const sums *r = &l->recent;
    char line[256], speed[32], eta[32];
    int64_t epoch = (l->m.samples - 1) / s->epoch_samples + 1;
    double waited = r->seconds > 0 ? r->waited / r->seconds : 0;
    snprintf(line, sizeof line,
             "epoch %lld/%lld  step %lld/%lld  loss %.4f  acc %.1f %%  lr %.4g  %s images/s  data "
             "%.0f %%%s  eta %s",
             (long long)(epoch < s->cfg.train.epochs ? epoch : s->cfg.train.epochs),
             (long long)s->cfg.train.epochs, (long long)l->m.step, (long long)s->steps,
             r->loss / r->steps, 100 * r->top1 / r->steps, l->m.lr,
             tool_thousands((int64_t)(r->samples / fmax(r->seconds, 1e-9)), speed), 100 * waited,
             waited > 0.2 && r->steps > 3 ? " (loader-bound)" : "",
             tool_duration(seconds_left(l), eta));
    screen_live(now, line);
}

static dnr_status write_record(loop *l)
{
    const dnr_metrics *m = &l->m;
    const sums *w = &l->window;
    json_t *j = json_pack(
        "{s:s, s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o, s:o, s:o}", "event",
        "train", "step", (json_int_t)m->step, "epoch", rundir_real(epoch_of(l, m->samples)),
        "samples", (json_int_t)m->samples, "loss", rundir_real(w->loss / w->steps), "top1",
        rundir_real(w->top1 / w->steps), "top5", rundir_real(w->top5 / w->steps), "lr",
        rundir_real(m->lr), "images_per_s", rundir_real(w->samples / w->seconds), "data_wait",
        rundir_real(w->waited / w->seconds), "loss_scale", rundir_real(m->loss_scale), "skipped",
        (json_int_t)m->skipped, "grad_norm",
        l->s->cfg.train.clip_norm > 0 ? rundir_real(m->grad_norm) : json_null(), "algbn_ratio",
        l->ratio > 0 ? rundir_real(l->ratio) : json_null(), "algbn_exact",
        l->ratio > 0 ? json_integer((json_int_t)l->exact) : json_null(), "seconds",
        rundir_real(tool_now() - l->started));
    l->window = (sums){0};
    l->ratio = 0;
    l->exact = 0;
    return rundir_record(l->dir, j, l->err);
}

/* Takes note of a described step. */
static dnr_status note(loop *l, const dnr_metrics *m)
{
    if (m->step <= l->seen)
        return DNR_OK;
    dnr_loader_stats stats;
    double now = tool_now();
    dnr_loader_get_stats(l->s->train_loader, &stats);
    sums one = {1,
                m->loss,
                m->top1,
                m->top5,
                (double)(m->samples - l->m.samples),
                now - l->last_time,
                stats.wait_s - l->last_wait};
    l->m = *m;
    l->seen = m->step;
    l->ratio = fmax(l->ratio, m->algbn_ratio);
    l->exact += m->algbn_exact;
    l->last_time = now;
    l->last_wait = stats.wait_s;
    add(&l->window, &one);
    fade(&l->recent, 0.97);
    if (!isfinite(l->recent.loss))
        l->recent = (sums){0};
    add(&l->recent, &one);
    if (screen_due(now))
        show_progress(l, now);
    return m->step % l->s->cfg.run.log_every == 0 ? write_record(l) : DNR_OK;
}

/* Waits until all steps are done and noted. */
static dnr_status catch_up(loop *l)
{
    dnr_metrics m;
    dnr_error *err = l->err;
    dnr_status st;
    TOOL_LIB(st, dnr_trainer_finish(l->s->trainer, &m));
    TOOL_TRY(st, note(l, &m));
out:
    return st;
}

/* ---------------------------------------------------------------- ends of epochs */

/* Counts the bad pictures, and lists those met since the last report among the records. The loader's log has named
 * them on the screen. */
static dnr_status report_bad(loop *l, dnr_loader *loader, int which)
{
    static const char *const names[] = {"data.train", "data.val"};
    dnr_loader_stats stats;
    if (!loader)
        return DNR_OK;
    dnr_loader_get_stats(loader, &stats);
    if (stats.bad <= l->bad[which])
        return DNR_OK;
    json_t *list = json_array();
    screen_print("%s: %lld bad picture%s so far, %s; listed in %s/metrics.jsonl", names[which],
                 (long long)stats.bad, stats.bad == 1 ? "" : "s",
                 which ? "not counted" : "replaced by others", l->dir->path);
    for (int64_t i = l->bad[which]; i < stats.bad; i++) {
        const dnr_bad_sample *b = &stats.bad_list[i];
        json_array_append_new(list,
                              json_pack("{s:o, s:o, s:I}", "name", rundir_text(b->name), "reason",
                                        rundir_text(b->reason), "times", (json_int_t)b->times));
    }
    l->bad[which] = stats.bad;
    return rundir_record(l->dir,
                         json_pack("{s:s, s:s, s:I, s:I, s:o}", "event", "bad_pictures", "source",
                                   names[which], "step", (json_int_t)l->seen, "count",
                                   (json_int_t)stats.bad, "new", list),
                         l->err);
}

static dnr_status write_eval(loop *l, const char *event, const dnr_eval_result *r, double seconds)
{
    double n = (double)r->images;
    return rundir_record(
        l->dir,
        json_pack("{s:s, s:I, s:o, s:I, s:o, s:o, s:o, s:I, s:I, s:I, s:o}", "event", event, "step",
                  (json_int_t)l->seen, "epoch", rundir_real(epoch_of(l, l->m.samples)), "samples",
                  (json_int_t)l->m.samples, "top1", rundir_real((double)r->correct1 / n), "top5",
                  rundir_real((double)r->correct5 / n), "loss", rundir_real(r->loss), "images",
                  (json_int_t)r->images, "correct1", (json_int_t)r->correct1, "correct5",
                  (json_int_t)r->correct5, "seconds", rundir_real(seconds)),
        l->err);
}

/* `of`: "" or " of averaged weights" */
static void show_eval(const loop *l, const char *of, const dnr_eval_result *r)
{
    const session *s = l->s;
    bool whole =
        l->seen < s->steps || !s->cfg.train.max_steps; /* else it may end within an epoch */
    screen_print("%s %lld/%lld: accuracy%s %.2f %% (top-5 %.2f %%), loss %.4f, on %lld pictures",
                 whole ? "epoch" : "step", (long long)(whole ? l->epochs : l->seen),
                 (long long)(whole ? s->cfg.train.epochs : s->steps), of,
                 100 * (double)r->correct1 / (double)r->images,
                 100 * (double)r->correct5 / (double)r->images, r->loss, (long long)r->images);
}

/* Evaluates the weights, and their averages where there are any: these then tell which step is the best. */
static dnr_status evaluate(loop *l)
{
    session *s = l->s;
    dnr_error *err = l->err;
    dnr_status st;
    double begun = tool_now(), seconds, ema_seconds = 0;
    TOOL_LIB(st, dnr_trainer_eval(s->trainer, s->val_loader, &l->last));
    l->eval_seconds += seconds = tool_now() - begun;
    show_eval(l, "", &l->last);
    const dnr_eval_result *judged = &l->last;
    if (s->cfg.train.ema > 0) {
        begun = tool_now();
        TOOL_LIB(st, dnr_trainer_eval_ema(s->trainer, s->val_loader, &l->last_ema));
        l->eval_seconds += ema_seconds = tool_now() - begun;
        show_eval(l, " of averaged weights", &l->last_ema);
        judged = &l->last_ema;
    }
    l->evals++;
    TOOL_TRY(st, write_eval(l, "eval", &l->last, seconds)); /* both or neither */
    if (judged == &l->last_ema)
        TOOL_TRY(st, write_eval(l, "eval_ema", &l->last_ema, ema_seconds));
    TOOL_TRY(st, report_bad(l, s->val_loader, 1));
    double top1 = (double)judged->correct1 / (double)judged->images;
    if (top1 > l->best) {
        l->best = top1;
        l->best_step = l->seen;
    }
    l->last_time = tool_now(); /* the time of an evaluation is not the next step's */
out:
    return st;
}

/* ---------------------------------------------------------------- checkpoints */

static json_t *sums_json(const sums *a)
{
    return json_pack("[o, o, o, o, o, o, o]", rundir_real(a->steps), rundir_real(a->loss),
                     rundir_real(a->top1), rundir_real(a->top5), rundir_real(a->samples),
                     rundir_real(a->seconds), rundir_real(a->waited));
}

static double real_at(const json_t *list, size_t i)
{
    const json_t *v = json_array_get(list, i);
    return json_is_null(v) ? NAN : json_number_value(v);
}

static sums sums_of(const json_t *j)
{
    return (sums){real_at(j, 0), real_at(j, 1), real_at(j, 2), real_at(j, 3),
                  real_at(j, 4), real_at(j, 5), real_at(j, 6)};
}

static json_t *eval_json(const dnr_eval_result *r)
{
    return json_pack("[o, o, o, o]", rundir_real((double)r->images),
                     rundir_real((double)r->correct1), rundir_real((double)r->correct5),
                     rundir_real(r->loss));
}

static dnr_eval_result eval_of(const json_t *j)
{
    return (dnr_eval_result){.images = (int64_t)real_at(j, 0),
                             .correct1 = (int64_t)real_at(j, 1),
                             .correct5 = (int64_t)real_at(j, 2),
                             .loss = real_at(j, 3)};
}

/* What the loop itself has to remember, so that records go on as if nothing had happened. */
static char *loop_note(const loop *l)
{
    json_t *j = json_pack(
        "{s:f, s:I, s:i, s:o, s:o, s:o, s:o, s:f, s:f, s:b}", "best", l->best, "best_step",
        (json_int_t)l->best_step, "evals", l->evals, "last", eval_json(&l->last), "last_ema",
        eval_json(&l->last_ema), "window", sums_json(&l->window), "recent", sums_json(&l->recent),
        "seconds", tool_now() - l->started, "eval_seconds", l->eval_seconds, "owed", (int)l->owed);
    char *text = j ? json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(j);
    return text;
}

static dnr_status take_up(loop *l, const resume *r)
{
    dnr_error *err = l->err;
    dnr_status st;
    json_t *j = r->loop ? json_loads(r->loop, 0, NULL) : NULL;
    TOOL_LIB(st, dnr_trainer_finish(l->s->trainer, &l->m));
    l->seen = l->saved = r->steps;
    l->epochs = r->samples / l->s->epoch_samples;
    if (j) { /* a checkpoint made by a program of one's own has none */
        l->best = json_real_value(json_object_get(j, "best"));
        l->best_step = json_integer_value(json_object_get(j, "best_step"));
        l->evals = (int)json_integer_value(json_object_get(j, "evals"));
        l->last = eval_of(json_object_get(j, "last"));
        l->last_ema = eval_of(json_object_get(j, "last_ema"));
        l->window = sums_of(json_object_get(j, "window"));
        l->recent = sums_of(json_object_get(j, "recent"));
        l->eval_seconds = json_real_value(json_object_get(j, "eval_seconds"));
        l->started -= json_real_value(json_object_get(j, "seconds"));
        l->owed = json_is_true(json_object_get(j, "owed"));
    }
    json_decref(j);
    if (!r->from) /* another rank's */
        goto out;
    TOOL_TRY(st, rundir_link(l->dir, l->seen, l->best_step, err));
    st = rundir_record(l->dir,
                       json_pack("{s:s, s:I, s:I, s:o}", "event", "resumed", "step",
                                 (json_int_t)l->seen, "samples", (json_int_t)l->m.samples,
                                 "checkpoint", rundir_text(dnr_checkpoint_folder(r->from))),
                       err);
out:
    return st;
}

static bool save_due(const loop *l, int64_t done)
{
    const cfg *c = &l->s->cfg;
    double epochs = (double)l->s->global_batch / (double)l->s->epoch_samples; /* of a step */
    double every = c->run.save_every, minutes = c->run.save_minutes;
    if (every > 0 &&
        floor((double)done * epochs / every) > floor((double)(done - 1) * epochs / every))
        return true;
    return minutes > 0 && tool_now() - l->saved_time >= 60 * minutes;
}

/* A checkpoint of the last step, unless there is one. Rank 0's task; the others go on to where they wait for it. */
static dnr_status save(loop *l)
{
    const cfg *c = &l->s->cfg;
    if (l->saved == l->seen)
        return DNR_OK;
    if (!session_speaks(l->s)) {
        l->saved = l->seen;
        return DNR_OK;
    }
    dnr_comm_stage(l->s->comm, RANKS_SLOW_S, "saving a checkpoint");
    char *cfg_note = resume_note_cfg(c), *data = resume_note_data(l->s), *mine = loop_note(l);
    const char *notes[] = {"cfg", cfg_note, "data", data, "loop", mine, NULL};
    rundir_save_opts o = {.step = l->seen, .best = l->best_step, .keep = c->run.keep};
    dnr_status st;
    if (cfg_note && data && mine) {
        st = rundir_save(l->dir, l->s->trainer, &o, notes, l->err);
    } else {
        tool_fail(l->err, DNR_EMEM, "checkpoint", "out of host memory");
        st = tool_remedy(l->err, "free some, and go on with --resume auto");
    }
    free(cfg_note);
    free(data);
    free(mine);
    if (st == DNR_OK)
        l->saved = l->seen;
    l->last_time = l->saved_time = tool_now();
    return st;
}

/* ---------------------------------------------------------------- the loop */

/* After `done` steps: what falls due then, at the end of an epoch, or of the run. */
static dnr_status after_step(loop *l, int64_t done)
{
    const cfg *c = &l->s->cfg;
    bool end = done == l->s->steps;
    int64_t before = l->epochs, epochs = done * l->s->global_batch / l->s->epoch_samples;
    int64_t ev = c->run.eval_every, best = l->best_step;
    dnr_status st = DNR_OK;
    epochs = epochs < c->train.epochs ? epochs : c->train.epochs;
    l->epochs = epochs;
    l->owed = true;
    if (end) {
        TOOL_TRY(st, catch_up(l));
        if (l->window.steps > 0)
            TOOL_TRY(st, write_record(l));
    }
    if (epochs > before || end)
        TOOL_TRY(st, report_bad(l, l->s->train_loader, 0));
    if (l->s->val && (end || (ev && epochs / ev > before / ev))) {
        TOOL_TRY(st, catch_up(l));
        TOOL_TRY(st, evaluate(l));
    }
    l->owed = false;
    if (end || l->best_step != best || save_due(l, done)) {
        TOOL_TRY(st, catch_up(l));
        TOOL_TRY(st, save(l));
    }
out:
    return st;
}

/* An evaluation that pictures or a signal ended is made after all, and saved with the weights that it was due for. */
static dnr_status pay(loop *l)
{
    dnr_status st;
    screen_print("the evaluation after step %lld is still due", (long long)l->seen);
    l->epochs = (l->seen - 1) * l->s->global_batch / l->s->epoch_samples;
    l->saved = -1;
    TOOL_TRY(st, after_step(l, l->seen));
    TOOL_TRY(st, save(l));
out:
    return st;
}

static void summary(const loop *l)
{
    const session *s = l->s;
    char time[32], eval_time[32], ema[64] = "";
    double seconds = tool_now() - l->started;
    screen_print("trained %lld steps in %s (%s of it evaluation)", (long long)l->seen,
                 tool_duration(seconds, time), tool_duration(l->eval_seconds, eval_time));
    if (l->evals && s->cfg.train.ema > 0)
        snprintf(ema, sizeof ema, ", of averaged weights %.2f %%",
                 100 * (double)l->last_ema.correct1 / (double)l->last_ema.images);
    if (l->evals)
        screen_print("accuracy %.2f %% (%lld of %lld)%s, best %.2f %% at step %lld",
                     100 * (double)l->last.correct1 / (double)l->last.images,
                     (long long)l->last.correct1, (long long)l->last.images, ema, 100 * l->best,
                     (long long)l->best_step);
    else
        screen_print("accuracy on training pictures %.2f %%; set data.val for one that counts",
                     100 * l->recent.top1 / l->recent.steps);
    screen_print("the run lies in %s; dnnrun eval %s%s", l->dir->path, l->dir->path,
                 s->val ? "" : " data.val=FOLDER");
}

/* Saves, and says how to go on. */
static dnr_status stop(loop *l)
{
    const char *signal = signals_seen() ? strsignal(signals_seen()) : "another rank was asked to";
    dnr_error *err = l->err;
    dnr_status st;
    TOOL_TRY(st, catch_up(l));
    TOOL_TRY(st, report_bad(l, l->s->train_loader, 0));
    TOOL_TRY(st, save(l));
    TOOL_TRY(st, rundir_record(l->dir,
                               json_pack("{s:s, s:I, s:I, s:s}", "event", "stopped", "step",
                                         (json_int_t)l->seen, "samples", (json_int_t)l->m.samples,
                                         "signal", signal),
                               err));
    TOOL_TRY(st, ranks_wait_for_0(l->s, err));
    screen_print(
        "stopped after step %lld of %lld (%s) and saved; go on with --out %s --resume auto",
        (long long)l->seen, (long long)l->s->steps, signal, l->dir->path);
    st = DNR_STOPPED;
out:
    return st;
}

/* Pictures that fail, or memory or files that they lack, end a run of one rank, but lose no step of it. (With gradients
 * that are not finite the trainer refuses to go on, and to be caught up with.) */
static void save_what_was_trained(loop *l, dnr_status st)
{
    dnr_error later = {0}, *first = l->err;
    const bool pictures = st == DNR_EDATA || st == DNR_EPEER; /* a stall of their threads */
    if ((!pictures && st != DNR_EMEM && st != DNR_EFAIL) || dnr_comm_launched(l->s->comm))
        return;
    l->err = &later;
    if (catch_up(l) == DNR_OK && l->seen > 0 && l->seen != l->saved && save(l) == DNR_OK)
        screen_print("saved after step %lld of %lld; once %s, go on with --out %s --resume auto",
                     (long long)l->seen, (long long)l->s->steps,
                     pictures ? "the pictures are mended" : "that is mended", l->dir->path);
    l->err = first;
}

/* A run of several ranks ends after a step that all agree on. */
static bool is_to_stop(loop *l, const dnr_metrics *m)
{
    return dnr_comm_launched(l->s->comm) ? m->stop : signals_seen() != 0;
}

/* Of the first steps that are as all others, into the run directory; rank 0 has one. */
static dnr_status begin_profile(loop *l, int64_t left)
{
    char path[CFG_TEXT + 16];
    dnr_error *err = l->err;
    dnr_status st = DNR_OK;
    if (!*l->dir->path)
        return DNR_OK;
    snprintf(path, sizeof path, "%s/trace.json", l->dir->path);
    if (left < l->s->profile)
        l->s->profile = left;
    TOOL_LIB(st, dnr_trainer_profile(l->s->trainer, l->s->profile, path));
    screen_print("profile %lld steps, to %s", (long long)l->s->profile, path);
out:
    return st;
}

dnr_status train_loop(session *s, rundir *dir, const resume *r, dnr_error *err)
{
    loop l = {.s = s, .dir = dir, .err = err, .best = -1, .best_step = -1, .saved = -1};
    dnr_metrics m = {0};
    dnr_status st = DNR_OK;
    signals_ask(s->trainer);
    l.started = l.last_time = l.saved_time = tool_now();
    if (r->goes_on)
        TOOL_TRY(st, take_up(&l, r));
    int64_t done = l.seen;
    if (l.owed)
        TOOL_TRY(st, pay(&l));
    else if (done >= s->steps)
        screen_print("the run was complete after step %lld: nothing to do", (long long)done);
    const int64_t warm =
        s->steps - done > s->profile + 2 ? done + 2 : done; /* steps before a profile */
    while (done < s->steps && !is_to_stop(&l, &m)) {
        if (s->profile && done == warm)
            TOOL_TRY(st, begin_profile(&l, s->steps - done));
        TOOL_LIB(st, dnr_trainer_step(s->trainer, s->train_loader, &m));
        done++;
        TOOL_TRY(st, note(&l, &m));
        TOOL_TRY(st, after_step(&l, done));
    }
    if (done < s->steps) {
        st = DNR_STOPPED;
    } else {
        TOOL_TRY(st, ranks_wait_for_0(s, err));
        summary(&l);
    }
out:
    if (st == DNR_STOPPED) /* between steps, or within an evaluation */
        st = stop(&l);
    save_what_was_trained(&l, st);
    signals_ask(NULL);
    return st;
}
