/* star.c: see star.h. How ranks meet is in star_meet.c, what the side thread does in star_watch.c. */
#include "star_internal.h"
#include "socket.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- life */

static void release(dnri_star *s)
{
    for (int r = 0; s->peer && r < s->l.world; r++) {
        dnri_star_hang_up(&s->peer[r]);
        if (s->peer[r].data >= 0)
            close(s->peer[r].data);
    }
    if (s->wake >= 0)
        close(s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s->peer);
    free(s);
}

dnr_status dnri_star_open(dnri_launch *l, const dnri_star_opts *o, dnri_star **out)
{
    *out = NULL;
    dnri_star *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->l = *l;
    s->o = *o;
    s->wake = -1;
    snprintf(s->build, sizeof s->build, "%s", o->build);
    s->o.build = s->build;
    s->me = dnri_star_hello(s, BEAT);
    pthread_mutex_init(&s->lock, NULL);
    s->peer = calloc((size_t)l->world, sizeof *s->peer);
    for (int r = 0; s->peer && r < l->world; r++)
        s->peer[r].control = s->peer[r].data = -1;
    dnr_status st = s->peer ? dnri_star_meet(s) : DNR_FAIL_NOMEM();
    for (int r = 0; st == DNR_OK && r < l->world; r++)
        memcpy(s->peer[r].host, s->peer[r].is.host, HOST);
    if (st == DNR_OK && l->world > 1)
        st = dnri_star_watch(s);
    if (st != DNR_OK) {
        dnr_error why = *dnr_last_error();
        release(s);
        return dnri_fail_as(&why);
    }
    l->local_rank = s->l.local_rank;
    l->local_world = s->l.local_world;
    *out = s;
    return DNR_OK;
}

void dnri_star_close(dnri_star *s, const dnr_error *why)
{
    if (!s)
        return;
    if (s->started) {
        s->stop = true;
        uint64_t one = 1;
        if (write(s->wake, &one, sizeof one) < 0)
            dnri_log(DNR_LOG_WARN, "the thread that watches the ranks ends late");
        pthread_join(s->thread, NULL);
        if (!s->is_lost)
            dnri_star_farewell(s, why);
    }
    release(s);
}

/* ---- what others ask */

void dnri_star_stage(dnri_star *s, double allow_s, const char *text)
{
    pthread_mutex_lock(&s->lock);
    s->me.allow = allow_s;
    snprintf(s->me.text, sizeof s->me.text, "%s", text);
    pthread_mutex_unlock(&s->lock);
    s->doing = NULL;
}

void dnri_star_doing(dnri_star *s, const char *what)
{
    s->doing = what;
}

void dnri_star_limit(dnri_star *s, double seconds, const char *what)
{
    pthread_mutex_lock(&s->lock);
    s->limit_at = seconds > 0 ? dnri_clock() + seconds : 0;
    s->limit_what = what;
    pthread_mutex_unlock(&s->lock);
}

void dnri_star_advance(dnri_star *s)
{
    s->point++;
}

dnr_status dnri_star_check(dnri_star *s)
{
    pthread_mutex_lock(&s->lock);
    bool lost = s->is_lost;
    pthread_mutex_unlock(&s->lock);
    return lost ? dnri_fail_as(&s->lost) : DNR_OK; /* it does not change any more */
}

dnr_status dnri_star_verdict(dnri_star *s, int rank)
{
    dnr_error own = *dnr_last_error();
    for (double end = dnri_clock() + 2; dnri_clock() < end; usleep(5000))
        DNR_TRY(dnri_star_check(s));
    dnri_fail_as(&own);
    return dnri_fail_context("rank %d on %s", rank, dnri_star_host(s, rank));
}

double dnri_star_patience(dnri_star *s)
{
    pthread_mutex_lock(&s->lock);
    double allowed = s->allowed;
    pthread_mutex_unlock(&s->lock);
    return (allowed > s->o.timeout_s ? allowed : s->o.timeout_s) + s->o.timeout_s;
}

int dnri_star_data(const dnri_star *s, int rank)
{
    return s->peer[rank].data;
}

const char *dnri_star_host(const dnri_star *s, int rank)
{
    return s->peer[rank].host;
}
