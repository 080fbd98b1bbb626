/* comm.c: opens and closes communicators, and what all of them share. */
#include "../runtime/comm.h"
#include "../runtime/reduce.h"
#include "host.h"
#include "launch.h"
#include "star.h"
#include "tcp.h"
#include "socket.h"
#include "standin.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- life */

static int count_hosts(const dnr_comm *c)
{
    int n = 0;
    for (int r = 0; r < c->world; r++) {
        bool seen = false;
        for (int k = 0; k < r && !seen; k++)
            seen = !strcmp(dnri_star_host(c->star, k), dnri_star_host(c->star, r));
        n += !seen;
    }
    return n;
}

static void describe(dnr_comm *c, const char *launcher)
{
    char name[100] = "";
    int hosts = count_hosts(c);
    if (c->world > 1)
        dnri_socket_name(dnri_star_data(c->star, c->rank ? 0 : 1), name, sizeof name);
    snprintf(c->about, sizeof c->about, "%d rank%s on %d host%s, started by %s, %s%s%s", c->world,
             c->world == 1 ? "" : "s", hosts, hosts == 1 ? "" : "s", launcher, c->ops->name,
             *name ? " over " : "", name);
}

static dnr_status open_module(dnr_comm *c, const char *name)
{
    char symbol[64];
    const void *found;
    snprintf(symbol, sizeof symbol, "dnri_comm_%s", name);
    DNR_TRY(dnri_module_symbol(name, symbol,
                               "install it (libopenmpi-dev) and build with -DDNR_MPI=ON, or use "
                               "dist.transport = tcp",
                               &found));
    const dnri_comm_module *module = found;
    if (module->abi != DNRI_BACKEND_ABI)
        return DNR_FAIL(DNR_EDEVICE, "install library and modules of one version",
                        "dnnrun-%s.so is of another version of dnnrun", name);
    dnri_star_stage(c->star, 0, "starting MPI");
    dnri_star_limit(c->star, c->timeout_s, "MPI_Init");
    DNR_TRY(module->open(c, &c->ops, &c->state));
    dnri_star_limit(c->star, 0, NULL);
    return DNR_OK;
}

static dnr_status open_launched(dnr_comm *c, dnri_launch *l, const dnr_comm_opts *o)
{
    const char *transport = o->transport ? o->transport : "tcp";
    char build[64];
    dnri_star_opts so = {
        .timeout_s = c->timeout_s, .build = build, .on_loss = o->on_loss, .user = o->user};
    static const char standin[] = "standin:";
    bool tcp = strcmp(transport, "tcp") == 0;
    bool stands_in = strncmp(transport, standin, sizeof standin - 1) == 0;
    if (!tcp && !stands_in && strcmp(transport, "mpi") != 0)
        return DNR_FAIL(DNR_EUSAGE, "use tcp, mpi or standin:RANKS:GB/S:MICROSECONDS",
                        "there is no transport \"%.40s\"", transport);
    snprintf(build, sizeof build, "%s with dist.transport = %s", DNR_VERSION, transport);
    c->rank = l->rank;
    c->world = l->world;
    DNR_TRY(dnri_star_open(l, &so, &c->star));
    c->local_rank = l->local_rank;
    c->local_world = l->local_world;
    DNR_TRY(tcp         ? dnri_tcp_open(c)
            : stands_in ? dnri_standin_open(c, transport + sizeof standin - 1)
                        : open_module(c, transport));
    describe(c, l->launcher);
    return DNR_OK;
}

dnr_status dnr_comm_open(const dnr_comm_opts *opts, dnr_comm **out)
{
    dnr_comm_opts o = opts ? *opts : (dnr_comm_opts){0};
    dnri_launch l;
    *out = NULL;
    DNR_TRY(dnri_launch_read(&l));
    dnr_comm *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    c->world = c->local_world = 1;
    c->timeout_s = o.timeout_s > 0 ? o.timeout_s : 60;
    dnr_status st = l.launcher ? open_launched(c, &l, &o) : DNR_OK;
    if (st != DNR_OK) {
        dnr_error why = *dnr_last_error();
        dnr_comm_close(c, &why);
        return dnri_fail_as(&why);
    }
    *out = c;
    return DNR_OK;
}

void dnr_comm_close(dnr_comm *c, const dnr_error *why)
{
    if (!c)
        return;
    if (c->on)
        c->on->close(c->on_state);
    if (c->ops)
        c->ops->close(c);
    dnri_star_close(c->star, why);
    free(c);
}

int dnr_comm_rank(const dnr_comm *c)
{
    return c->rank;
}

int dnr_comm_world(const dnr_comm *c)
{
    return c->world;
}

int dnr_comm_local_rank(const dnr_comm *c)
{
    return c->local_rank;
}

int dnr_comm_local_world(const dnr_comm *c)
{
    return c->local_world;
}

bool dnr_comm_launched(const dnr_comm *c)
{
    return c->ops != NULL;
}

const char *dnr_comm_description(const dnr_comm *c)
{
    return c->about;
}

dnr_status dnr_launched(int *rank, int *world)
{
    dnri_launch l;
    DNR_TRY(dnri_launch_read(&l));
    *rank = l.rank;
    *world = l.world;
    return DNR_OK;
}

/* ---- collectives */

static void enter(dnr_comm *c, const char *what)
{
    dnri_star_doing(c->star, what);
    dnri_star_advance(c->star);
}

static dnr_status leave(dnr_comm *c, const char *what, dnr_status st)
{
    if (st != DNR_OK)
        return dnri_fail_context("%s", what);
    dnri_star_doing(c->star, NULL);
    return st;
}

dnr_status dnri_comm_broadcast(dnr_comm *c, const char *what, void *data, size_t bytes)
{
    if (dnri_comm_alone(c))
        return DNR_OK;
    enter(c, what);
    return leave(c, what, c->ops->broadcast(c, data, bytes));
}

dnr_status dnri_comm_allgather(dnr_comm *c, const char *what, const void *mine, size_t bytes,
                               void *all)
{
    if (dnri_comm_alone(c)) {
        memmove(all, mine, bytes);
        return DNR_OK;
    }
    enter(c, what);
    return leave(c, what, c->ops->allgather(c, mine, bytes, all));
}

dnr_status dnri_comm_sum(dnr_comm *c, const char *what, dnri_sum type, void *data, int64_t n)
{
    if (dnri_comm_alone(c))
        return DNR_OK;
    enter(c, what);
    dnr_status st = c->ops->begin_sum(c, type, data, n, 0);
    return leave(c, what, st == DNR_OK ? c->ops->end_sums(c) : st);
}

void dnri_comm_stage(dnr_comm *c, double allow_s, const char *fmt, ...)
{
    char text[128];
    va_list ap;
    if (dnri_comm_alone(c))
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    dnri_star_stage(c->star, allow_s, text);
}

void dnr_comm_stage(dnr_comm *c, double allow_s, const char *text)
{
    dnri_comm_stage(c, allow_s, "%s", text);
}

void dnri_comm_limit(dnr_comm *c, double seconds, const char *what)
{
    dnri_star_limit(c->star, seconds, what);
}

void dnri_comm_advance(dnr_comm *c)
{
    if (!dnri_comm_alone(c))
        dnri_star_advance(c->star);
}

dnr_status dnri_comm_check(dnr_comm *c)
{
    if (dnri_comm_alone(c))
        return DNR_OK;
    DNR_TRY(dnri_star_check(c->star));
    return c->on ? c->on->check(c->on_state) : DNR_OK;
}

double dnri_comm_patience(const dnr_comm *c)
{
    return dnri_star_patience(c->star);
}

const char *dnri_comm_host(const dnr_comm *c, int rank)
{
    return dnri_comm_alone(c) ? "this host" : dnri_star_host(c->star, rank);
}

dnr_status dnr_comm_broadcast(dnr_comm *c, void *data, size_t bytes)
{
    return dnri_comm_broadcast(c, "a broadcast", data, bytes);
}

dnr_status dnr_comm_sum(dnr_comm *c, double *data, int64_t n)
{
    return dnri_comm_sum(c, "a sum", DNRI_SUM_F64, data, n);
}

/* ---- comparison */

enum { SAYS = 400 };

/* The first line in which two texts differ, into buffers of `size` bytes. */
static void first_difference(const char *a, const char *b, char *in_a, char *in_b, size_t size)
{
    while (*a && *b) {
        size_t n = strcspn(a, "\n"), m = strcspn(b, "\n");
        if (n != m || memcmp(a, b, n))
            break;
        a += n + (a[n] == '\n');
        b += m + (b[m] == '\n');
    }
    snprintf(in_a, size, "%.*s", (int)strcspn(a, "\n"), a);
    snprintf(in_b, size, "%.*s", (int)strcspn(b, "\n"), b);
}

/* Rank 0's values arrive one after the other, each behind its length. */
static dnr_status compare_one(dnr_comm *c, const dnr_fact *fact, char says[SAYS])
{
    int64_t length = (int64_t)strlen(fact->value);
    DNR_TRY(dnri_comm_broadcast(c, "comparing ranks", &length, sizeof length));
    char *theirs = calloc(1, (size_t)length + 1);
    if (!theirs)
        return DNR_FAIL_NOMEM();
    if (c->rank == 0)
        memcpy(theirs, fact->value, (size_t)length);
    dnr_status st = dnri_comm_broadcast(c, "comparing ranks", theirs, (size_t)length);
    if (st == DNR_OK && !*says && strcmp(theirs, fact->value)) {
        char mine[120], its[120];
        first_difference(fact->value, theirs, mine, its, sizeof mine);
        snprintf(says, SAYS, "%s: '%s', rank 0 has '%s'", fact->name, mine, its);
    }
    free(theirs);
    return st;
}

dnr_status dnr_comm_compare(dnr_comm *c, const dnr_fact *facts, int n)
{
    char mine[SAYS] = "";
    if (dnri_comm_alone(c))
        return DNR_OK;
    for (int i = 0; i < n; i++)
        DNR_TRY(compare_one(c, &facts[i], mine));
    char *all = calloc((size_t)c->world, SAYS);
    if (!all)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_comm_allgather(c, "comparing ranks", mine, SAYS, all);
    int differ = 0, first = -1;
    for (int r = 0; st == DNR_OK && r < c->world; r++)
        if (all[(size_t)r * SAYS]) {
            differ++;
            first = first < 0 ? r : first;
        }
    if (differ)
        st = DNR_FAIL(DNR_EPEER, "start all ranks from one build with one cfg and the same data",
                      "rank %d on %s differs in %.399s%s", first, dnri_star_host(c->star, first),
                      all + (size_t)first * SAYS, differ > 1 ? "; other ranks differ, too" : "");
    free(all);
    return st;
}

/* ---- lowering */

bool dnri_comm_owns(const dnri_op *op)
{
    return op->def == &dnri_def_reduce || op->def == &dnri_def_reduce_wait;
}

dnr_status dnri_comm_lower(dnr_comm *c, dnr_device *dev, const dnri_op *op, dnri_step *out)
{
    return c->on ? c->on->lower(c->on_state, dev, op, out) : dnri_host_lower(c, op, out);
}
