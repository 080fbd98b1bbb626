/* star_meet.c: how the ranks of a star come together: see star.h. */
#include "star_internal.h"
#include "socket.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

frame dnri_star_hello(const dnri_star *s, int kind)
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

void dnri_star_terminate(frame *f)
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
    dnri_star_terminate(&f);
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
        if (left && dnri_clock() >= deadline)
            return DNR_FAIL(
                DNR_EPEER,
                "see whether they were started and can reach rank 0's host (firewall, DNR_MASTER); "
                "dist.timeout is how long to wait",
                "not all of %d ranks came to rank 0 within %g s: missing %s", s->l.world,
                s->o.timeout_s, missing);
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

/* Two connections a rank, beside all else that is open: the usual 1024 files end at 384 ranks. */
static dnr_status allow_files(int world)
{
    struct rlimit r;
    const rlim_t need = 2 * (rlim_t)world + 256;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur >= need)
        return DNR_OK;
    const rlim_t most = r.rlim_max;
    r.rlim_cur = need;
    return need <= most && setrlimit(RLIMIT_NOFILE, &r) == 0
               ? DNR_OK
               : DNR_FAIL(DNR_EUSAGE, "raise ulimit -n on rank 0's host",
                          "rank 0 of %d ranks needs %llu open files, and may have %llu", world,
                          (unsigned long long)need, (unsigned long long)most);
}

static dnr_status open_hub(dnri_star *s, const char *address)
{
    int listener;
    DNR_TRY(allow_files(s->l.world));
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
    frame f = dnri_star_hello(s, kind);
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
    dnri_star_terminate(&f);
    if (f.magic != MAGIC || f.kind != WELCOME)
        return dnri_fail(DNR_EPEER, DNRI_HERE, f.kind == REFUSED ? f.remedy : MISMATCH, "%s",
                         f.kind == REFUSED ? f.text : "what answers there is no dnnrun");
    s->l.local_rank = f.local_rank;
    s->l.local_world = f.local_world;
    for (int r = 0; r < s->l.world; r++)
        DNR_TRY(dnri_recv(hub->control, s->peer[r].is.host, HOST, deadline));
    return DNR_OK;
}

dnr_status dnri_star_meet(dnri_star *s)
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
    return dnri_star_is_hub(s) ? open_hub(s, address) : open_leaf(s, address);
}
