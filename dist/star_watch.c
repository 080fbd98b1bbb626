/* star_watch.c: the side thread of a star: heartbeats, who is lost, farewells. See star.h. */
#include "star_internal.h"
#include "socket.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

/* For a rank that ended with an error: this one may have the same to say, and where it waits for others it hears of it at
 * once. */
#define GRACE_S 5.0

/* ---- losses */

static void describe(const frame *f, char *buf, size_t size)
{
    snprintf(buf, size, "rank %d on %s (process %d)", f->rank, f->host, f->pid);
}

/* What a rank was doing when it was last heard. */
static const char *stage_of(const frame *f)
{
    return *f->text ? f->text : "starting";
}

static void send_frame(peer *p, const frame *f)
{
    if (p->control < 0)
        return;
    /* a message that does not fit into the socket's buffer goes to one that is stuck */
    ssize_t n = send(p->control, f, sizeof *f, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0 && n < (ssize_t)sizeof *f)
        (void)dnri_send(p->control, (const char *)f + n, sizeof *f - (size_t)n, dnri_clock() + 1);
}

/* Called with the lock. The first loss counts: what follows it is its consequence. */
static void declare(dnri_star *s, const dnr_error *why, double grace)
{
    if (s->is_lost)
        return;
    s->is_lost = true;
    s->lost = *why;
    s->tell_at = dnri_clock() + grace;
    frame f = {.magic = MAGIC, .kind = LOST, .status = why->status};
    snprintf(f.text, sizeof f.text, "%s", why->what);
    snprintf(f.remedy, sizeof f.remedy, "%s", why->remedy);
    for (int r = 1; dnri_star_is_hub(s) && r < s->l.world; r++)
        send_frame(&s->peer[r], &f);
}

/* Called with the lock. */
static void lose(dnri_star *s, const frame *who, double grace, const char *remedy, const char *how)
{
    char name[160];
    dnr_error e = {.status = DNR_EPEER};
    describe(who, name, sizeof name);
    snprintf(e.where, sizeof e.where, "%s", DNRI_HERE);
    snprintf(e.what, sizeof e.what, "%s %s; it was at: %s", name, how, stage_of(who));
    snprintf(e.remedy, sizeof e.remedy, "%s", remedy);
    declare(s, &e, grace);
}

#define DEAD                                                                                       \
    "look at that rank's own output, and at its host's kernel log (dmesg) for the out-of-memory "  \
    "killer; then go on with --resume auto"
#define STUCK                                                                                      \
    "see what that process does (ps, gdb -p) or whether its host can be reached; raise "           \
    "dist.timeout if it is only slow; then go on with --resume auto"

void dnri_star_hang_up(peer *p)
{
    if (p->control >= 0)
        close(p->control);
    p->control = -1;
}

/* The one that says farewell waits for its connection to end. */
static void take_bye(dnri_star *s, peer *p)
{
    char how[300];
    p->gone = true;
    dnri_star_hang_up(p);
    if (p->in.status == DNR_OK || p->in.status == DNR_STOPPED)
        return;
    snprintf(how, sizeof how, "ended with an error (%.230s)", p->in.text);
    lose(s, &p->is, GRACE_S, "see that rank's own message; then go on with --resume auto", how);
}

static void take_lost(dnri_star *s, const frame *f)
{
    dnr_error e = {.status = DNR_EPEER};
    snprintf(e.where, sizeof e.where, "%s", DNRI_HERE);
    snprintf(e.what, sizeof e.what, "%s", f->text);
    snprintf(e.remedy, sizeof e.remedy, "%s", f->remedy);
    declare(s, &e, 0);
}

/* One whole message has come. Called with the lock. */
static void take(dnri_star *s, peer *p)
{
    dnri_star_terminate(&p->in);
    switch (p->in.kind) {
    case BEAT:
        if (p->in.point != p->is.point)
            p->moved = dnri_clock();
        if (dnri_star_is_hub(s)) /* what it is called stays as the hello said */
            memcpy(p->in.host, p->is.host, sizeof p->in.host);
        p->is = p->in;
        if (!dnri_star_is_hub(s))
            s->allowed = p->in.allow;
        break;
    case BYE:
        take_bye(s, p);
        break;
    case LOST:
        take_lost(s, &p->in);
        break;
    default:
        break;
    }
}

/* Reads what has come from a rank. Called with the lock. */
static void listen_to(dnri_star *s, peer *p)
{
    while (p->control >= 0) {
        ssize_t n = recv(p->control, (char *)&p->in + p->have, sizeof p->in - p->have, 0);
        if (n > 0) {
            p->heard = dnri_clock();
            p->have += (size_t)n;
            if (p->have == sizeof p->in) {
                p->have = 0;
                take(s, p);
            }
            continue;
        }
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (!p->gone)
            lose(s, &p->is, 0, DEAD, "is lost: its connection ended");
        dnri_star_hang_up(p);
    }
}

/* ---- the side thread */

static void beat(dnri_star *s)
{
    frame f = s->me;
    const char *doing = s->doing;
    if (doing) {
        size_t n = strlen(f.text);
        snprintf(f.text + n, sizeof f.text - n, "%s%s", n ? ", " : "", doing);
    }
    f.kind = BEAT;
    f.point = s->point;
    if (dnri_star_is_hub(s)) {
        s->peer[0].is = f;
        s->allowed = f.allow;
        for (int r = 1; r < s->l.world; r++)
            if (!s->peer[r].gone && s->peer[r].is.allow > s->allowed)
                s->allowed = s->peer[r].is.allow;
        f.allow = s->allowed; /* for their patience */
    }
    for (int r = 0; r < s->l.world; r++)
        if (r != s->l.rank)
            send_frame(&s->peer[r], &f);
}

/* A rank that has been silent. Called with the lock. */
static void look_for_silence(dnri_star *s, double now)
{
    char how[200];
    double limit = 0.8 * s->o.timeout_s;
    for (int r = 0; r < s->l.world; r++) {
        peer *p = &s->peer[r];
        if (p->control < 0 || p->gone || now - p->heard < limit)
            continue;
        snprintf(how, sizeof how, "is lost: nothing was heard of it for %.0f s", now - p->heard);
        lose(s, &p->is, 0, STUCK, how);
    }
}

/* A rank that beats, but does not come to where others have been waiting. Rank 0 sees them all. */
static void look_for_stragglers(dnri_star *s, double now)
{
    int64_t furthest = s->point;
    for (int r = 1; r < s->l.world; r++)
        if (s->peer[r].is.point > furthest)
            furthest = s->peer[r].is.point;
    if (furthest > s->furthest) {
        s->furthest = furthest;
        s->furthest_at = now;
    }
    for (int r = 0; r < s->l.world; r++) {
        const frame *f = &s->peer[r].is;
        double limit = f->allow > s->o.timeout_s ? f->allow : s->o.timeout_s;
        double since = s->peer[r].moved > s->furthest_at ? s->peer[r].moved : s->furthest_at;
        int64_t point = r ? f->point : (int64_t)s->point;
        if (s->peer[r].gone || point >= s->furthest || now - since < 0.9 * limit)
            continue;
        char how[200];
        snprintf(how, sizeof how, "has kept the others waiting for %.0f s", now - since);
        lose(s, f, 0, STUCK, how);
    }
}

/* This rank itself hangs in a library. Called with the lock. */
static void look_at_limit(dnri_star *s, double now)
{
    char how[200];
    if (s->limit_at <= 0 || now < s->limit_at)
        return;
    frame f = s->me;
    snprintf(how, sizeof how, "hangs in %s", s->limit_what);
    lose(s, &f, 0, STUCK, how);
}

static int watch(dnri_star *s, struct pollfd *w)
{
    int n = 0;
    w[n++] = (struct pollfd){.fd = s->wake, .events = POLLIN};
    for (int r = 0; r < s->l.world; r++)
        if (s->peer[r].control >= 0)
            w[n++] = (struct pollfd){.fd = s->peer[r].control, .events = POLLIN};
    return n;
}

static void *side_thread(void *arg)
{
    dnri_star *s = arg;
    double period = s->o.timeout_s / 10 < 0.5 ? s->o.timeout_s / 10 : 0.5, next = 0;
    struct pollfd *w = calloc((size_t)s->l.world + 1, sizeof *w);
    while (w && !s->stop) {
        pthread_mutex_lock(&s->lock);
        int n = watch(s, w);
        pthread_mutex_unlock(&s->lock);
        (void)poll(w, (nfds_t)n, (int)(period * 500) + 1);
        uint64_t count;
        if (w[0].revents && read(s->wake, &count, sizeof count) < 0)
            continue;
        pthread_mutex_lock(&s->lock);
        for (int r = 0; r < s->l.world; r++) /* first: it may tell more than a silence */
            if (s->peer[r].control >= 0)
                listen_to(s, &s->peer[r]);
        double now = dnri_clock();
        if (now >= next && !s->is_lost) {
            next = now + period;
            beat(s);
            look_for_silence(s, now);
            look_at_limit(s, now);
            if (dnri_star_is_hub(s))
                look_for_stragglers(s, now);
        }
        bool tell = s->is_lost && !s->told && now >= s->tell_at && !s->stop;
        s->told |= tell;
        pthread_mutex_unlock(&s->lock);
        if (tell && s->o.on_loss)
            s->o.on_loss(s->o.user, &s->lost);
    }
    free(w);
    return NULL;
}

dnr_status dnri_star_watch(dnri_star *s)
{
    sigset_t all, before;
    double now = dnri_clock();
    s->furthest_at = now;
    for (int r = 0; r < s->l.world; r++) {
        s->peer[r].is.rank = r;
        s->peer[r].heard = s->peer[r].moved = now;
    }
    s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = s->wake < 0 ? errno : pthread_create(&s->thread, NULL, side_thread, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    s->started = error == 0;
    return error ? DNR_FAIL(DNR_EFAIL, "raise ulimit -u or -n",
                            "cannot start the thread that watches the ranks: %s", strerror(error))
                 : DNR_OK;
}

/* ---- leaving */

/* A connection closed with messages unread would be reset, and the farewell be lost with it. */
static void wait_for_end(peer *p, double deadline)
{
    frame rest;
    while (p->control >= 0 && dnri_clock() < deadline) {
        ssize_t n = recv(p->control, &rest, sizeof rest, 0);
        struct pollfd w = {.fd = p->control, .events = POLLIN};
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return;
        if (n < 0)
            (void)poll(&w, 1, 20);
    }
}

void dnri_star_farewell(dnri_star *s, const dnr_error *why)
{
    frame f = s->me;
    f.kind = BYE;
    f.status = why ? (int32_t)why->status : DNR_OK;
    snprintf(f.text, sizeof f.text, "%s", why ? why->what : "");
    for (int r = 0; r < s->l.world; r++)
        if (s->peer[r].control >= 0) {
            send_frame(&s->peer[r], &f);
            (void)shutdown(s->peer[r].control, SHUT_WR);
        }
    double deadline = dnri_clock() + 1;
    for (int r = 0; r < s->l.world; r++)
        wait_for_end(&s->peer[r], deadline);
}
