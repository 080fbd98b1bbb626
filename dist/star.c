/* star.c: see star.h. Bootstrap first, then the side thread. */
#include "star.h"
#include "socket.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAGIC 0x646e7231u /* "dnr1" */
/* For a rank that ended with an error: this one may have the same to say, and where it waits for others it hears of it at
 * once. */
#define GRACE_S 2.0

enum { HELLO_CONTROL = 1, HELLO_DATA, WELCOME, REFUSED, BEAT, BYE, LOST };

/* All messages, on both connections of the bootstrap; machines of one kind, so as it lies in memory. */
typedef struct frame {
    uint32_t magic;
    int32_t kind, rank, world, status, pid;
    int32_t local_rank, local_world;
    int64_t point; /* common points reached */
    double allow;
    char host[64], job[128], build[64];
    char text[640], remedy[320];
} frame;

typedef struct peer {
    int control, data;   /* -1: none */
    frame in;            /* the message that is coming */
    size_t have;         /* bytes of it */
    frame is;            /* the last heartbeat, or the hello */
    double heard, moved; /* when; when it last came to a new common point */
    bool gone;           /* it said farewell */
} peer;

struct dnri_star {
    dnri_launch l;
    dnri_star_opts o;
    char build[64];
    peer *peer; /* [world]: in rank 0 all others are connected, elsewhere rank 0 */
    frame me;
    pthread_t thread;
    bool started;
    int wake; /* eventfd: the thread is to leave, or to look */
    _Atomic bool stop;
    _Atomic(const char *) doing;
    _Atomic int64_t point;
    pthread_mutex_t lock; /* of all below, and of me's text and allow */
    bool is_lost, told;
    double tell_at; /* when on_loss is due */
    dnr_error lost;
    double limit_at; /* when this rank counts as lost; 0: never */
    const char *limit_what;
    double allowed; /* the most that any rank is allowed now */
    int64_t furthest;
    double furthest_at;
};

static bool is_hub(const dnri_star *s)
{
    return s->l.rank == 0;
}

/* ---- bootstrap */

static frame hello(const dnri_star *s, int kind)
{
    frame f = {.magic = MAGIC,
               .kind = kind,
               .rank = s->l.rank,
               .world = s->l.world,
               .pid = (int32_t)getpid(),
               .local_rank = s->l.local_rank,
               .local_world = s->l.local_world};
    if (gethostname(f.host, sizeof f.host - 1) != 0)
        snprintf(f.host, sizeof f.host, "unknown");
    snprintf(f.job, sizeof f.job, "%s", s->l.job);
    snprintf(f.build, sizeof f.build, "%s", s->build);
    return f;
}

static void terminate(frame *f)
{
    f->host[sizeof f->host - 1] = f->job[sizeof f->job - 1] = f->build[sizeof f->build - 1] = 0;
    f->text[sizeof f->text - 1] = f->remedy[sizeof f->remedy - 1] = 0;
}

/* "1, 2, 5 and 3 more" of the ranks that are not there. */
static void list_missing(const dnri_star *s, char *buf, size_t size)
{
    size_t at = 0;
    int n = 0;
    buf[0] = 0;
    for (int r = 1; r < s->l.world; r++) {
        if (s->peer[r].control >= 0 && s->peer[r].data >= 0)
            continue;
        if (n++ < 8 && at < size)
            at += (size_t)snprintf(buf + at, size - at, "%s%d", n > 1 ? ", " : "", r);
    }
    if (n > 8 && at < size)
        snprintf(buf + at, size - at, " and %d more", n - 8);
}

/* Why this hello cannot be taken; NULL: it can. */
static const char *objection(const dnri_star *s, const frame *f, char *buf, size_t size)
{
    const peer *p = f->rank > 0 && f->rank < s->l.world ? &s->peer[f->rank] : NULL;
    if (f->world != s->l.world)
        snprintf(buf, size, "it was told of %d ranks, rank 0 of %d", f->world, s->l.world);
    else if (strcmp(f->job, s->l.job))
        snprintf(buf, size, "it belongs to job '%.40s', rank 0 to '%.40s'", f->job, s->l.job);
    else if (strcmp(f->build, s->build))
        snprintf(buf, size, "it runs dnnrun %.40s, rank 0 runs %.40s", f->build, s->build);
    else if (!p)
        snprintf(buf, size, "there is no such rank in a world of %d", s->l.world);
    else if ((f->kind == HELLO_CONTROL ? p->control : p->data) >= 0)
        snprintf(buf, size, "there is a rank %d already, on %.60s", f->rank, p->is.host);
    else
        return NULL;
    return buf;
}

static void refuse(int fd, const char *text, const char *remedy)
{
    frame f = {.magic = MAGIC, .kind = REFUSED, .status = DNR_EPEER};
    snprintf(f.text, sizeof f.text, "%s", text);
    snprintf(f.remedy, sizeof f.remedy, "%s", remedy);
    (void)dnri_send(fd, &f, sizeof f, dnri_clock() + 1);
}

#define MISMATCH                                                                                   \
    "start all ranks by one launcher, from one build; two runs need two ports (DNR_MASTER)"

/* Takes in one connection. Whoever does not speak as a rank is sent away without a word. */
static dnr_status admit(dnri_star *s, int fd)
{
    frame f;
    char why[200];
    if (dnri_recv(fd, &f, sizeof f, dnri_clock() + 2) != DNR_OK || f.magic != MAGIC ||
        (f.kind != HELLO_CONTROL && f.kind != HELLO_DATA)) {
        dnri_log(DNR_LOG_WARN, "something that is no rank of dnnrun came to rank 0's port");
        close(fd);
        return DNR_OK;
    }
    terminate(&f);
    if (objection(s, &f, why, sizeof why)) {
        char text[400];
        snprintf(text, sizeof text, "rank %d on %s does not fit: %s", f.rank, f.host, why);
        refuse(fd, text, MISMATCH);
        close(fd);
        return dnri_fail(DNR_EPEER, DNRI_HERE, MISMATCH, "%s", text);
    }
    peer *p = &s->peer[f.rank];
    if (f.kind == HELLO_DATA) {
        p->data = fd;
        return DNR_OK;
    }
    p->control = fd;
    p->is = f;
    return DNR_OK;
}

static void refuse_all(const dnri_star *s, const char *text, const char *remedy)
{
    for (int r = 1; r < s->l.world; r++)
        if (s->peer[r].control >= 0)
            refuse(s->peer[r].control, text, remedy);
}

static dnr_status gather_ranks(dnri_star *s, int listener)
{
    double begun = dnri_clock(), deadline = begun + s->o.timeout_s, said = begun;
    char missing[160];
    for (int left = 2 * (s->l.world - 1); left > 0;) {
        int fd = dnri_accept(listener, deadline < said + 5 ? deadline : said + 5);
        if (fd >= 0)
            DNR_TRY(admit(s, fd));
        left = 0;
        for (int r = 1; r < s->l.world; r++)
            left += (s->peer[r].control < 0) + (s->peer[r].data < 0);
        list_missing(s, missing, sizeof missing);
        if (left && dnri_clock() >= deadline) {
            dnr_status st = DNR_FAIL(
                DNR_EPEER,
                "see whether they were started and can reach rank 0's host (firewall, DNR_MASTER); "
                "dist.timeout is how long to wait",
                "not all of %d ranks came to rank 0 within %g s: missing %s", s->l.world,
                s->o.timeout_s, missing);
            return st;
        }
        if (left && dnri_clock() >= said + 5) {
            said = dnri_clock();
            dnri_log(DNR_LOG_INFO, "rank 0 waits for rank %s of %d", missing, s->l.world);
        }
    }
    return DNR_OK;
}

/* Ranks on one host, in the order of ranks, where the launcher does not say. */
static void place_locally(dnri_star *s)
{
    s->peer[0].is = s->me;
    for (int r = 0; r < s->l.world; r++) {
        int before = 0, all = 0;
        for (int k = 0; k < s->l.world; k++)
            if (!strcmp(s->peer[k].is.host, s->peer[r].is.host)) {
                all++;
                before += k < r;
            }
        if (s->peer[r].is.local_rank < 0)
            s->peer[r].is.local_rank = before;
        s->peer[r].is.local_world = all;
    }
    s->l.local_rank = s->peer[0].is.local_rank;
    s->l.local_world = s->peer[0].is.local_world;
}

/* Tells each rank where all are: a WELCOME of its own, then the hosts of all. */
static dnr_status welcome(dnri_star *s, double deadline)
{
    enum { HOST = sizeof s->me.host };
    size_t bytes = (size_t)s->l.world * HOST;
    char *hosts = malloc(bytes);
    dnr_status st = hosts ? DNR_OK : DNR_FAIL_NOMEM();
    for (int r = 0; hosts && r < s->l.world; r++)
        memcpy(hosts + (size_t)r * HOST, s->peer[r].is.host, HOST);
    for (int r = 1; st == DNR_OK && r < s->l.world; r++) {
        frame f = s->peer[r].is;
        f.kind = WELCOME;
        st = dnri_send(s->peer[r].control, &f, sizeof f, deadline);
        if (st == DNR_OK)
            st = dnri_send(s->peer[r].control, hosts, bytes, deadline);
        if (st != DNR_OK)
            dnri_fail_context("rank %d on %s", r, s->peer[r].is.host);
    }
    free(hosts);
    return st;
}

static dnr_status open_hub(dnri_star *s, const char *address)
{
    int listener;
    DNR_TRY(dnri_listen(address, &listener));
    dnr_status st = gather_ranks(s, listener);
    close(listener);
    if (st == DNR_OK) {
        place_locally(s);
        st = welcome(s, dnri_clock() + s->o.timeout_s);
    }
    if (st != DNR_OK) {
        dnr_error why = *dnr_last_error();
        refuse_all(s, why.what, why.remedy);
        return dnri_fail_as(&why);
    }
    return st;
}

static dnr_status connect_once(dnri_star *s, const char *address, int nth, double deadline,
                               int kind, int *fd)
{
    frame f = hello(s, kind);
    DNR_TRY(dnri_connect(address, nth, deadline, fd));
    dnr_status st = dnri_send(*fd, &f, sizeof f, deadline);
    if (st != DNR_OK) {
        close(*fd);
        *fd = -1;
    }
    return st;
}

/* Has rank 0 said something, or hung up, before it was asked everything? */
static bool has_spoken(int fd)
{
    struct pollfd w = {.fd = fd, .events = POLLIN};
    return fd >= 0 && poll(&w, 1, 0) > 0;
}

/* Rank 0 may start later than this one: again, until it answers. What it says on the first connection ends the search
 * for the second. */
static dnr_status connect_to_hub(dnri_star *s, const char *address, double deadline, int kind,
                                 int *fd)
{
    for (int nth = 0;; nth++) {
        double now = dnri_clock(), soon = now + 5 < deadline ? now + 5 : deadline;
        if (connect_once(s, address, nth, soon, kind, fd) == DNR_OK)
            return DNR_OK;
        if (has_spoken(s->peer[0].control))
            return DNR_OK;
        if (dnr_last_error()->status == DNR_EUSAGE && nth > 20) /* a name that does not resolve */
            return dnr_last_error()->status;
        if (dnri_clock() >= deadline)
            return DNR_FAIL(DNR_EPEER,
                            "see that rank 0 runs, and that its host and port (DNR_MASTER) can be "
                            "reached from here",
                            "rank %d found no rank 0 within %g s: %.300s", s->l.rank,
                            s->o.timeout_s, dnr_last_error()->what);
        usleep(nth < 20 ? 20000 : 200000);
    }
}

static dnr_status open_leaf(dnri_star *s, const char *address)
{
    enum { HOST = sizeof s->me.host };
    frame f;
    peer *hub = &s->peer[0];
    double deadline = dnri_clock() + s->o.timeout_s;
    DNR_TRY(connect_to_hub(s, address, deadline, HELLO_CONTROL, &hub->control));
    DNR_TRY(connect_to_hub(s, address, deadline, HELLO_DATA, &hub->data));
    /* rank 0 may have begun to wait later, and says who is missing */
    deadline = dnri_clock() + s->o.timeout_s + 2;
    if (dnri_recv(hub->control, &f, sizeof f, deadline) != DNR_OK)
        return DNR_FAIL(DNR_EPEER, "look at rank 0's output",
                        "rank 0 at %s did not let rank %d in: %.300s", address, s->l.rank,
                        dnr_last_error()->what);
    terminate(&f);
    if (f.magic != MAGIC || f.kind != WELCOME)
        return dnri_fail(DNR_EPEER, DNRI_HERE, f.kind == REFUSED ? f.remedy : MISMATCH, "%s",
                         f.kind == REFUSED ? f.text : "what answers there is no dnnrun");
    s->l.local_rank = f.local_rank;
    s->l.local_world = f.local_world;
    for (int r = 0; r < s->l.world; r++)
        DNR_TRY(dnri_recv(hub->control, s->peer[r].is.host, HOST, deadline));
    return DNR_OK;
}

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
    for (int r = 1; is_hub(s) && r < s->l.world; r++)
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

static void hang_up(peer *p)
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
    hang_up(p);
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
    terminate(&p->in);
    switch (p->in.kind) {
    case BEAT:
        if (p->in.point != p->is.point)
            p->moved = dnri_clock();
        if (is_hub(s)) /* what it is called stays as the hello said */
            memcpy(p->in.host, p->is.host, sizeof p->in.host);
        p->is = p->in;
        if (!is_hub(s))
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
        hang_up(p);
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
    if (is_hub(s)) {
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
            if (is_hub(s))
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

static dnr_status start(dnri_star *s)
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

/* ---- life */

static void release(dnri_star *s)
{
    for (int r = 0; s->peer && r < s->l.world; r++) {
        hang_up(&s->peer[r]);
        if (s->peer[r].data >= 0)
            close(s->peer[r].data);
    }
    if (s->wake >= 0)
        close(s->wake);
    pthread_mutex_destroy(&s->lock);
    free(s->peer);
    free(s);
}

static dnr_status open_star(dnri_star *s)
{
    char local[200];
    bool one_host = s->l.local_world == s->l.world && *s->l.job;
    if (s->l.world == 1) {
        s->peer[0].is = s->me;
        s->l.local_rank = s->l.local_rank < 0 ? 0 : s->l.local_rank;
        return DNR_OK;
    }
    if (!*s->l.master && !one_host)
        return DNR_FAIL(
            DNR_EUSAGE,
            "set DNR_MASTER=HOST:PORT in all ranks: rank 0's host and a free port there "
            "(mpirun -x DNR_MASTER=…)",
            "%s started %d ranks, but nothing says where rank 0 is", s->l.launcher, s->l.world);
    snprintf(local, sizeof local, "@dnnrun-%d-%s", (int)getuid(), s->l.job);
    const char *address = *s->l.master ? s->l.master : local;
    return is_hub(s) ? open_hub(s, address) : open_leaf(s, address);
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
    s->me = hello(s, BEAT);
    pthread_mutex_init(&s->lock, NULL);
    s->peer = calloc((size_t)l->world, sizeof *s->peer);
    for (int r = 0; s->peer && r < l->world; r++)
        s->peer[r].control = s->peer[r].data = -1;
    dnr_status st = s->peer ? open_star(s) : DNR_FAIL_NOMEM();
    if (st == DNR_OK && l->world > 1)
        st = start(s);
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

static void say_farewell(dnri_star *s, const dnr_error *why)
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
            say_farewell(s, why);
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
    return s->peer[rank].is.host;
}
