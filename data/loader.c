/* loader.c: batches in order, decoded ahead by threads into a ring of slots. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "loader.h"

#define CACHE_BUDGET ((int64_t)256 << 20) /* bytes of decoded pictures kept */
#define HELD         2 /* slots that the caller may hold besides the prefetched ones */
#define THREADS_MAX  256

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Waits for an event until `deadline`; false when that has passed. Called with the lock. */
static bool wait_until(dnr_loader *l, double deadline)
{
    struct timespec t = {(time_t)deadline, 0};
    t.tv_nsec = (long)((deadline - (double)t.tv_sec) * 1e9);
    return pthread_cond_timedwait(&l->event, &l->lock, &t) != ETIMEDOUT;
}

/* How many threads decode where nobody says so: one a CPU, or what a device that computes on CPUs leaves. */
static int default_threads(const dnr_device *dev)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    n = dev && dev->spare.threads ? dev->spare.threads : n;
    return n < 1 ? 1 : n > 16 ? 16 : n;
}

/* Fills in defaults and refuses what makes no sense. */
static dnr_status settle(dnr_loader_opts *o, int64_t count, const dnr_device *dev)
{
    o->world = o->world ? o->world : 1;
    o->resize = o->resize ? o->resize : o->image;
    o->max_pixels = o->max_pixels ? o->max_pixels : 178956970;
    o->threads = o->threads ? o->threads : default_threads(dev);
    o->prefetch = o->prefetch ? o->prefetch : 3;
    o->timeout_s = o->timeout_s > 0 ? o->timeout_s : 300;
    if (o->area_min == 0 && o->area_max == 0) {
        o->area_min = 0.08;
        o->area_max = 1;
    }
    if (o->aspect_min == 0 && o->aspect_max == 0) {
        o->aspect_min = 3. / 4;
        o->aspect_max = 4. / 3;
    }
    if (o->batch < 1 || o->batch > 1 << 24 || o->image < 1 || o->image > 16384)
        return DNR_FAIL(DNR_EUSAGE, "use a batch of 1 or more and pictures of 1 … 16384 pixels",
                        "batch %lld, image %d", (long long)o->batch, o->image);
    if (o->world < 1 || o->rank < 0 || o->rank >= o->world)
        return DNR_FAIL(DNR_EUSAGE, "use a rank of 0 … world − 1", "rank %d of %d", o->rank,
                        o->world);
    if (o->start < 0 || (!o->train && o->start > count))
        return DNR_FAIL(DNR_EUSAGE, "start a validation pass within the data set",
                        "start at position %lld of %lld", (long long)o->start, (long long)count);
    if (o->threads < 1 || o->threads > THREADS_MAX || o->prefetch < 1 || o->prefetch > 1024)
        return DNR_FAIL(DNR_EUSAGE, "use 1 … 256 threads and 1 … 1024 batches of prefetch",
                        "threads %d, prefetch %d", o->threads, o->prefetch);
    if (!o->train && o->crop != DNR_CROP_CENTER)
        return DNR_FAIL(DNR_EUSAGE, "use DNR_CROP_CENTER for validation",
                        "a random crop without training");
    if (o->pad < 0 || o->pad > 16384 || o->resize < 1 || o->resize > 65535 ||
        o->resize < o->image - (o->crop == DNR_CROP_PAD ? 2 * o->pad : 0))
        return DNR_FAIL(DNR_EUSAGE, "raise data.resize, or lower data.image",
                        "resize %d and pad %d leave less than image %d", o->resize, o->pad,
                        o->image);
    if (!(o->area_min > 0 && o->area_min <= o->area_max && o->area_max <= 1) ||
        !(o->aspect_min > 0 && o->aspect_min <= o->aspect_max))
        return DNR_FAIL(DNR_EUSAGE, "use 0 < min ≤ max, and an area of at most 1",
                        "area %g … %g, aspect %g … %g", o->area_min, o->area_max, o->aspect_min,
                        o->aspect_max);
    return DNR_OK;
}

static dnr_status make_slots(dnr_loader *l)
{
    size_t bytes = dnri_slot_bytes(l->o.batch, l->o.image, l->o.image), batch = (size_t)l->o.batch;
    l->slots = l->o.prefetch + HELD;
    if (!(l->slot = calloc((size_t)l->slots, sizeof *l->slot)))
        return DNR_FAIL_NOMEM();
    for (int i = 0; i < l->slots; i++) {
        dnri_slot *s = &l->slot[i];
        void *p = NULL;
        if (l->dev)
            DNR_TRY(l->dev->be->alloc_host(l->dev, bytes, &p));
        else if (!posix_memalign(&p, 256, bytes))
            memset(p, 0, bytes);
        s->memory = p;
        s->epoch = malloc(batch * 2 * sizeof *s->epoch);
        if (!s->memory || !s->epoch)
            return DNR_FAIL(DNR_EMEM, "lower data.prefetch or train.batch",
                            "no memory for %d batches of %zu MiB", l->slots, bytes >> 20);
        s->sample = s->epoch + batch;
    }
    return DNR_OK;
}

/* Everything but the threads. */
static void release(dnr_loader *l)
{
    for (int i = 0; l->slot && i < l->slots; i++) {
        if (l->dev && l->slot[i].memory)
            l->dev->be->free_host(l->dev, l->slot[i].memory);
        else
            free(l->slot[i].memory);
        free(l->slot[i].epoch);
    }
    for (int i = 0; l->worker && i < l->o.threads; i++) {
        free(l->worker[i].bytes.data);
        free(l->worker[i].picture.rgb);
        dnri_scratch_free(&l->worker[i].scratch);
    }
    free(l->slot);
    free(l->worker);
    dnri_cache_close(l->cache);
    dnri_order_close(&l->order);
    dnri_badlist_free(&l->bad);
    pthread_cond_destroy(&l->work);
    pthread_cond_destroy(&l->event);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

/* The workers leave signals to the program's own threads. */
static dnr_status start(dnr_loader *l)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = 0;
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < l->o.threads && !error; i++) {
        l->worker[i].l = l;
        error = pthread_create(&l->worker[i].thread, NULL, dnri_worker_main, &l->worker[i]);
        l->alive += !error;
    }
    pthread_mutex_unlock(&l->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return DNR_FAIL(DNR_EFAIL,
                        "lower data.threads, or raise the limit on processes (ulimit -u) or "
                        "addresses (ulimit -v)",
                        "cannot start thread %d of %d: %s", l->alive + 1, l->o.threads,
                        strerror(error));
    return DNR_OK;
}

dnr_status dnr_loader_open(dnr_source *src, dnr_device *dev, const dnr_loader_opts *opts,
                           dnr_loader **out)
{
    dnr_loader_opts o = *opts;
    DNR_TRY(settle(&o, src->count, dev));
    dnr_loader *l = calloc(1, sizeof *l);
    if (!l)
        return DNR_FAIL_NOMEM();
    l->src = src;
    l->dev = dev;
    l->o = o;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->work, NULL);
    pthread_cond_init(&l->event, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int64_t left = src->count - o.start, global = o.batch * o.world;
    l->rounds = o.train ? INT64_MAX : (left + global - 1) / global;
    int64_t share =
        o.batch / (4 * o.threads); /* small enough to keep all threads busy to the end */
    l->chunk = share < 1 ? 1 : share > 32 ? 32 : share;
    dnr_status st;
    DNR_GOTO(st, dnri_order_open(src->count, o.seed, o.train && o.shuffle, &l->order));
    DNR_GOTO(st, dnri_cache_open(src, CACHE_BUDGET, &l->cache));
    DNR_GOTO(st, make_slots(l));
    if (!(l->worker = calloc((size_t)o.threads, sizeof *l->worker))) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    DNR_GOTO(st, start(l));
    *out = l;
    return DNR_OK;
out:;
    dnr_error e = *dnr_last_error();
    dnr_loader_close(l);
    return dnri_fail_as(&e);
}

void dnr_loader_close(dnr_loader *l)
{
    if (!l)
        return;
    int started = 0;
    double deadline = now() + l->o.timeout_s;
    pthread_mutex_lock(&l->lock);
    started = l->alive;
    l->stop = true;
    pthread_cond_broadcast(&l->work);
    while (l->alive && wait_until(l, deadline))
        ;
    int stuck = l->alive;
    pthread_mutex_unlock(&l->lock);
    if (stuck) { /* in a read that does not return: its memory is left to it */
        dnri_log(DNR_LOG_WARN, "%d loader threads did not end within %g s and are left behind",
                 stuck, l->o.timeout_s);
        for (int i = 0; i < started; i++)
            pthread_detach(l->worker[i].thread);
        return;
    }
    for (int i = 0; i < started; i++)
        pthread_join(l->worker[i].thread, NULL);
    release(l);
}

/* What the loader is stuck at, for the error. Called with the lock. */
static dnr_status stalled(dnr_loader *l)
{
    const dnri_slot *s = NULL;
    for (int i = 0; i < l->slots; i++)
        if (l->slot[i].state == SLOT_FILLING && l->slot[i].batch == l->delivered)
            s = &l->slot[i];
    const char *stage = "starting", *name = "", *root = "";
    for (int i = 0; i < l->o.threads; i++) {
        int at = l->worker[i].stage;
        if (at != STAGE_IDLE) {
            stage = dnri_stage_name((dnri_stage)at);
            root = l->src->root;
            name = l->src->ops->name(l->src, l->worker[i].sample);
        }
    }
    return DNR_FAIL(DNR_EPEER,
                    "see whether the disk answers; if it is only slow, raise data.threads or "
                    "the timeout",
                    "no batch within %g s: %lld of %lld pictures of batch %lld are ready; %s %s%s",
                    l->o.timeout_s, (long long)(s ? s->done : 0), (long long)l->o.batch,
                    (long long)l->delivered, stage, root, name);
}

/* The next batch's slot when it is ready; NULL with DNR_OK at the end of a pass. Called with the lock. */
static dnr_status take(dnr_loader *l, dnri_slot **out)
{
    double deadline = now() + l->o.timeout_s;
    for (;;) {
        if (l->failed)
            return dnri_fail_as(&l->error);
        if (l->delivered == l->rounds)
            return DNR_OK;
        int taken = 0;
        for (int i = 0; i < l->slots; i++) {
            dnri_slot *s = &l->slot[i];
            if (s->state == SLOT_READY && s->batch == l->delivered) {
                s->state = SLOT_TAKEN;
                l->delivered++;
                *out = s;
                return DNR_OK;
            }
            taken += s->state == SLOT_TAKEN;
        }
        if (taken == l->slots)
            return DNR_FAIL(DNR_EUSAGE, "call dnr_loader_release for each batch",
                            "all %d slots are held", taken);
        if (!wait_until(l, deadline))
            return stalled(l);
    }
}

dnr_status dnr_loader_next(dnr_loader *l, dnr_batch *out, bool *more)
{
    double t = now();
    dnri_slot *s = NULL;
    pthread_mutex_lock(&l->lock);
    dnr_status st = take(l, &s);
    pthread_mutex_unlock(&l->lock);
    l->wait_s += now() - t;
    if (more)
        *more = s != NULL;
    if (st != DNR_OK || !s) {
        *out = (dnr_batch){0};
        return st;
    }
    *out = (dnr_batch){.slot = s->memory,
                       .labels = (int32_t *)(s->memory + dnri_slot_labels()),
                       .pixels = s->memory + dnri_slot_pixels(l->o.batch),
                       .position = s->position,
                       .index = (int)(s - l->slot),
                       .bytes = dnri_slot_bytes(l->o.batch, l->o.image, l->o.image)};
    for (int64_t k = 0; k < l->o.batch; k++)
        out->count += out->labels[k] >= 0;
    return DNR_OK;
}

void dnr_loader_release(dnr_loader *l, const dnr_batch *b)
{
    pthread_mutex_lock(&l->lock);
    if (b->index >= 0 && b->index < l->slots && l->slot[b->index].state == SLOT_TAKEN)
        l->slot[b->index].state = SLOT_FREE;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
}

dnr_status dnr_loader_rewind(dnr_loader *l)
{
    double deadline = now() + l->o.timeout_s;
    dnr_status st = DNR_OK;
    pthread_mutex_lock(&l->lock);
    if (l->delivered == 0 && !l->busy &&
        !l->failed) { /* at the start already: keep what is ready */
        pthread_mutex_unlock(&l->lock);
        return DNR_OK;
    }
    l->drain = true;
    for (int i = 0; i < l->slots && st == DNR_OK; i++)
        if (l->slot[i].state == SLOT_TAKEN)
            st = DNR_FAIL(DNR_EUSAGE, "release all batches before the rewind", "batch %lld is held",
                          (long long)l->slot[i].batch);
    while (st == DNR_OK && l->busy && !l->failed)
        if (!wait_until(l, deadline))
            st = stalled(l);
    if (st == DNR_OK && l->failed)
        st = dnri_fail_as(&l->error);
    for (int i = 0; i < l->slots && st == DNR_OK; i++)
        l->slot[i].state = SLOT_FREE;
    if (st == DNR_OK)
        l->begun = l->delivered = 0;
    l->drain = false;
    pthread_cond_broadcast(&l->work);
    pthread_mutex_unlock(&l->lock);
    return st;
}

void dnr_loader_get_stats(dnr_loader *l, dnr_loader_stats *out)
{
    pthread_mutex_lock(&l->lock);
    out->wait_s = l->wait_s;
    out->bad_list = dnri_badlist_report(&l->bad, l->src);
    out->bad = out->bad_list ? l->bad.n : 0;
    pthread_mutex_unlock(&l->lock);
}

const dnr_loader_opts *dnr_loader_get_opts(const dnr_loader *l)
{
    return &l->o;
}

dnr_status dnr_loader_open_at(const dnr_loader *l, int64_t position, dnr_loader **out)
{
    dnr_loader_opts o = l->o;
    o.start = position - o.rank * o.batch;
    return dnr_loader_open(l->src, l->dev, &o, out);
}

const char *dnr_loader_sample_name(const dnr_loader *l, const dnr_batch *b, int64_t i)
{
    int64_t sample = i >= 0 && i < l->o.batch ? l->slot[b->index].sample[i] : -1;
    return sample >= 0 ? l->src->ops->name(l->src, sample) : NULL;
}
