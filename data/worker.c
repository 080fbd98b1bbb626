/* worker.c: the loader's threads. Each claims a few samples of the oldest unfinished batch, brings them to
 * pixels without holding the lock, and reports. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "loader.h"

#define ATTEMPTS     64 /* substitutes tried for one bad sample */
#define LOW_PRIORITY 10 /* as of nice(1) */
#define NAMED        10 /* bad samples named in the log; the rest are in the statistics */
#define KEEP         ((size_t)32 << 20) /* bytes of a picture's memory kept for the next one */

const char *dnri_stage_name(dnri_stage s)
{
    static const char *const name[] = {"waiting for work", "reading", "decoding", "augmenting"};
    return name[s];
}

/* The decoded picture of a sample, from the cache or anew. */
static dnr_status fetch(dnri_worker *w, int64_t sample, const dnri_picture **out)
{
    dnr_loader *l = w->l;
    if ((*out = dnri_cache_get(l->cache, sample)))
        return DNR_OK;
    *out = &w->picture;
    w->sample = sample;
    w->stage = STAGE_READ;
    if (l->src->ops->render)
        return l->src->ops->render(l->src, sample, &w->picture);
    DNR_TRY(l->src->ops->read(l->src, sample, &w->bytes));
    w->stage = STAGE_DECODE;
    DNR_TRY(dnri_decode(w->bytes.data, w->bytes.size, l->o.max_pixels, &w->picture));
    dnri_cache_put(l->cache, sample, &w->picture);
    return DNR_OK;
}

/* The last failure was sample's: counts it, or stops the run. */
static dnr_status note_bad(dnr_loader *l, int64_t sample)
{
    const dnr_error *e = dnr_last_error();
    const char *name = l->src->ops->name(l->src, sample);
    if (e->status != DNR_EDATA || l->o.on_error == DNR_ON_ERROR_STOP)
        return dnri_fail_context("%s%s", l->src->root, name);
    char reason[sizeof e->what];
    snprintf(reason, sizeof reason, "%s", e->what);
    bool fresh;
    pthread_mutex_lock(&l->lock);
    dnr_status st = dnri_badlist_add(&l->bad, sample, reason, &fresh);
    int64_t n = l->bad.n;
    pthread_mutex_unlock(&l->lock);
    if (st != DNR_OK || !fresh)
        return st;
    if (n <= NAMED)
        dnri_log(DNR_LOG_WARN, "%s%s: %s: %s%s", l->src->root, name, reason,
                 l->o.train ? "another picture takes its place" : "left out",
                 n == NAMED ? " (further ones are only counted)" : "");
    if (l->o.max_bad >= 0 && n > l->o.max_bad)
        return DNR_FAIL(DNR_EDATA, "look at the pictures named in the log, or raise data.max_bad",
                        "%lld bad pictures, more than data.max_bad = %lld; the last is %s%s: %s",
                        (long long)n, (long long)l->o.max_bad, l->src->root, name, reason);
    return DNR_OK;
}

/* Brings sample k of a slot to its place there. */
static dnr_status produce(dnri_worker *w, dnri_slot *s, int64_t k)
{
    dnr_loader *l = w->l;
    int64_t batch = l->o.batch, epoch = s->epoch[k], wanted = s->sample[k], sample = wanted;
    size_t bytes = (size_t)l->o.image * (size_t)l->o.image * 3;
    int32_t *label = (int32_t *)(s->memory + dnri_slot_labels()) + k;
    uint8_t *pixels = s->memory + dnri_slot_pixels(batch) + (size_t)k * bytes;
    for (int attempt = 0; sample >= 0; attempt++) {
        const dnri_picture *p;
        if (fetch(w, sample, &p) == DNR_OK) {
            w->stage = STAGE_AUGMENT;
            dnri_view v = dnri_augment(&l->o, p->w, p->h, epoch, wanted);
            *label = l->src->ops->label(l->src, sample);
            dnr_status st = dnri_resize(p, &v, l->o.image, &w->scratch, pixels);
            if (w->picture.cap > KEEP) {
                free(w->picture.rgb);
                w->picture = (dnri_picture){0};
            }
            return st;
        }
        DNR_TRY(note_bad(l, sample));
        if (!l->o.train) /* not counted, and nothing takes its place */
            break;
        if (attempt == ATTEMPTS)
            return DNR_FAIL(DNR_EDATA, "look at the pictures named in the log",
                            "%d pictures in a row are bad", ATTEMPTS + 1);
        sample = dnri_order_substitute(&l->order, epoch, wanted, attempt);
    }
    *label = -1;
    memset(pixels, 0, bytes);
    return DNR_OK;
}

/* Gives the next batch to a free slot. Called with the lock. */
static dnri_slot *begin(dnr_loader *l)
{
    if (!l->o.train && l->begun == l->rounds)
        return NULL;
    for (int i = 0; i < l->slots; i++) {
        dnri_slot *s = &l->slot[i];
        if (s->state != SLOT_FREE)
            continue;
        s->state = SLOT_FILLING;
        s->batch = l->begun++;
        s->position = l->o.start + (s->batch * l->o.world + l->o.rank) * l->o.batch;
        s->claimed = s->done = 0;
        for (int64_t k = 0; k < l->o.batch; k++) {
            int64_t p = s->position + k;
            if (l->o.train || p < l->src->count)
                dnri_order_at(&l->order, p, &s->epoch[k], &s->sample[k]);
            else
                s->epoch[k] = s->sample[k] = -1;
        }
        return s;
    }
    return NULL;
}

/* Samples from … to − 1 of a slot for one worker; NULL: nothing to do now. Called with the lock. */
static dnri_slot *claim(dnr_loader *l, int64_t *from, int64_t *to)
{
    if (l->drain || l->failed)
        return NULL;
    dnri_slot *oldest = NULL;
    for (int i = 0; i < l->slots; i++) {
        dnri_slot *s = &l->slot[i];
        if (s->state == SLOT_FILLING && s->claimed < l->o.batch &&
            (!oldest || s->batch < oldest->batch))
            oldest = s;
    }
    if (!oldest && !(oldest = begin(l)))
        return NULL;
    *from = oldest->claimed;
    *to = *from + l->chunk < l->o.batch ? *from + l->chunk : l->o.batch;
    oldest->claimed = *to;
    return oldest;
}

void *dnri_worker_main(void *arg)
{
    dnri_worker *w = arg;
    dnr_loader *l = w->l;
    const dnri_spare *spare = l->dev ? &l->dev->spare : NULL;
    pthread_setname_np(pthread_self(), "dnnrun-loader");
    if (spare && spare->threads) {
        /* Where the same cores compute, they come first: a step waits for its slowest thread, a batch decoded ahead
         * can wait. On Linux both are the thread's own, and both are wishes. */
        (void)setpriority(PRIO_PROCESS, 0, LOW_PRIORITY);
        if (CPU_COUNT(&spare->cpus))
            (void)sched_setaffinity(0, sizeof spare->cpus, &spare->cpus);
    }
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        int64_t from, to;
        dnri_slot *s = claim(l, &from, &to);
        if (!s) {
            pthread_cond_wait(&l->work, &l->lock);
            continue;
        }
        l->busy++;
        pthread_mutex_unlock(&l->lock);
        dnr_status st = DNR_OK;
        for (int64_t k = from; k < to && st == DNR_OK && !l->stop; k++)
            st = produce(w, s, k);
        w->stage = STAGE_IDLE;
        pthread_mutex_lock(&l->lock);
        l->busy--;
        s->done += to - from;
        if (st != DNR_OK && !l->failed) {
            l->failed = true;
            l->error = *dnr_last_error();
        } else if (s->done == l->o.batch && !l->failed)
            s->state = SLOT_READY;
        pthread_cond_broadcast(&l->event);
    }
    l->alive--;
    pthread_cond_broadcast(&l->event);
    pthread_mutex_unlock(&l->lock);
    return NULL;
}
