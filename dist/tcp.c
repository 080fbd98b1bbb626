/* tcp.c: see tcp.h. A thread moves the data, so that a step goes on while its sums travel. */
#include "tcp.h"
#include "socket.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { QUEUE = 256, CHUNK = 1 << 18 };

typedef enum job_kind { JOB_BROADCAST, JOB_GATHER, JOB_SUM } job_kind;

/* What a rank announces before each collective; rank 0 compares. */
typedef struct announcement {
    int64_t number, kind, type, bytes, group;
} announcement;

typedef struct job {
    announcement a;
    void *data;       /* of all, for a gather */
    const void *mine; /* a gather's part of this rank */
} job;

typedef struct tcp {
    dnr_comm *c;
    pthread_t thread;
    char *
        chunk; /* in rank 0: what came of another rank, and behind it the sum of a group that is not its own */
    pthread_mutex_t lock;
    pthread_cond_t event; /* a job was added or done, or the thread is to leave */
    job queue[QUEUE];
    int64_t added, done;
    bool stop, failed;
    dnr_error error;
} tcp;

/* ---- the work of one rank */

static dnr_status may_go_on(void *user, double idle_s)
{
    tcp *t = user;
    pthread_mutex_lock(&t->lock);
    bool stop = t->stop;
    pthread_mutex_unlock(&t->lock);
    if (stop)
        return DNR_FAIL(DNR_EPEER, "none is needed", "the communicator was closed");
    if (idle_s > dnri_star_patience(t->c->star))
        return DNR_FAIL(DNR_EPEER, "look at the output of the other ranks",
                        "a connection between ranks has been idle for %.0f s", idle_s);
    return dnri_star_check(t->c->star);
}

static dnr_status move(tcp *t, int rank, const void *out, void *in, size_t bytes)
{
    dnr_status st = dnri_transfer(dnri_star_data(t->c->star, rank), out, in, bytes, may_go_on, t);
    return st == DNR_OK ? st : dnri_star_verdict(t->c->star, rank);
}

static dnr_status put(tcp *t, int rank, const void *data, size_t bytes)
{
    return move(t, rank, data, NULL, bytes);
}

static dnr_status get(tcp *t, int rank, void *data, size_t bytes)
{
    return move(t, rank, NULL, data, bytes);
}

static const char *const kind_names[] = {"a broadcast", "a gathering", "a sum"};

/* Another rank that does something else would hang, or take what is not its own. */
static dnr_status compare(const tcp *t, int rank, const announcement *mine, const announcement *its)
{
    if (memcmp(mine, its, sizeof *mine) == 0)
        return DNR_OK;
    bool sane = its->kind >= 0 && its->kind <= JOB_SUM;
    return DNR_FAIL(
        DNR_EPEER, "start all ranks from one build and one cfg",
        "rank %d on %s is at %s of %lld bytes (number %lld, type %lld), rank 0 at %s of "
        "%lld bytes (number %lld, type %lld)",
        rank, dnri_star_host(t->c->star, rank), sane ? kind_names[its->kind] : "something unknown",
        (long long)its->bytes, (long long)its->number, (long long)its->type, kind_names[mine->kind],
        (long long)mine->bytes, (long long)mine->number, (long long)mine->type);
}

/* The chunk of each rank of a group, added up in their order, back to each. `sum`: rank 0's own, or room. */
static dnr_status sum_of_group(tcp *t, const job *j, int first, int end, char *sum, size_t bytes)
{
    const dnri_sum type = (dnri_sum)j->a.type;
    if (first > 0)
        DNR_TRY(get(t, first, sum, bytes));
    for (int r = first + 1; r < end; r++) {
        DNR_TRY(get(t, r, t->chunk, bytes));
        dnri_sum_add(type, sum, t->chunk, bytes / dnri_sum_size(type));
    }
    for (int r = first > 0 ? first : 1; r < end; r++)
        DNR_TRY(put(t, r, sum, bytes));
    return DNR_OK;
}

static dnr_status sum_in_hub(tcp *t, const job *j)
{
    size_t bytes = (size_t)j->a.bytes;
    const int group = j->a.group ? (int)j->a.group : t->c->world;
    for (size_t at = 0; at < bytes; at += CHUNK)
        for (int first = 0; first < t->c->world; first += group)
            DNR_TRY(sum_of_group(t, j, first, first + group,
                                 first ? t->chunk + CHUNK : (char *)j->data + at,
                                 bytes - at < CHUNK ? bytes - at : CHUNK));
    return DNR_OK;
}

/* Rank 0 sends a chunk's sum when it has the chunk of all, while further ones are on their way to it. */
static dnr_status sum_in_leaf(tcp *t, const job *j)
{
    return move(t, 0, j->data, j->data, (size_t)j->a.bytes);
}

static dnr_status work_in_hub(tcp *t, const job *j)
{
    size_t bytes = (size_t)j->a.bytes;
    announcement its;
    for (int r = 1; r < t->c->world; r++) {
        DNR_TRY(get(t, r, &its, sizeof its));
        DNR_TRY(compare(t, r, &j->a, &its));
    }
    switch ((job_kind)j->a.kind) {
    case JOB_SUM:
        return sum_in_hub(t, j);
    case JOB_GATHER:
        memmove(j->data, j->mine, bytes);
        for (int r = 1; r < t->c->world; r++)
            DNR_TRY(get(t, r, (char *)j->data + (size_t)r * bytes, bytes));
        bytes *= (size_t)t->c->world;
        break;
    case JOB_BROADCAST:
        break;
    }
    for (int r = 1; r < t->c->world; r++)
        DNR_TRY(put(t, r, j->data, bytes));
    return DNR_OK;
}

static dnr_status work_in_leaf(tcp *t, const job *j)
{
    size_t bytes = (size_t)j->a.bytes;
    DNR_TRY(put(t, 0, &j->a, sizeof j->a));
    switch ((job_kind)j->a.kind) {
    case JOB_SUM:
        return sum_in_leaf(t, j);
    case JOB_GATHER:
        DNR_TRY(put(t, 0, j->mine, bytes));
        bytes *= (size_t)t->c->world;
        break;
    case JOB_BROADCAST:
        break;
    }
    return get(t, 0, j->data, bytes);
}

static dnr_status work(tcp *t, const job *j)
{
    if (t->c->world == 1) {
        if (j->a.kind == JOB_GATHER)
            memmove(j->data, j->mine, (size_t)j->a.bytes);
        return DNR_OK;
    }
    return t->c->rank == 0 ? work_in_hub(t, j) : work_in_leaf(t, j);
}

static void *worker(void *arg)
{
    tcp *t = arg;
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        if (t->done == t->added || t->failed) {
            pthread_cond_wait(&t->event, &t->lock);
            continue;
        }
        job j = t->queue[t->done % QUEUE];
        pthread_mutex_unlock(&t->lock);
        dnr_status st = work(t, &j);
        pthread_mutex_lock(&t->lock);
        if (st == DNR_OK) {
            t->done++;
        } else {
            t->failed = true;
            t->error = *dnr_last_error();
        }
        pthread_cond_broadcast(&t->event);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* ---- what the rank's own thread does */

/* Called with the lock. */
static void sleep_until_event(tcp *t)
{
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += 100000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    (void)pthread_cond_timedwait(&t->event, &t->lock, &end);
}

/* Called with the lock. */
static bool waits(const tcp *t, int64_t left)
{
    return t->added - t->done > left && !t->failed;
}

/* Waits until all but `left` jobs are done. The thread's own transfers are bounded, and so is this. A job that is done is
 * no worse for a rank that was lost since: that one may end with an error which this one has yet to find itself. */
static dnr_status wait_for(tcp *t, int64_t left)
{
    dnr_status st = DNR_OK;
    pthread_mutex_lock(&t->lock);
    while (st == DNR_OK && waits(t, left)) {
        sleep_until_event(t);
        pthread_mutex_unlock(&t->lock);
        st = dnri_star_check(t->c->star);
        pthread_mutex_lock(&t->lock);
    }
    if (!waits(t, left))
        st = t->failed ? dnri_fail_as(&t->error) : DNR_OK;
    pthread_mutex_unlock(&t->lock);
    return st;
}

static dnr_status begin(tcp *t, job_kind kind, dnri_sum type, int group, const void *mine,
                        void *data, size_t bytes)
{
    DNR_TRY(wait_for(t, QUEUE - 1));
    pthread_mutex_lock(&t->lock);
    t->queue[t->added % QUEUE] = (job){
        .a = {.number = t->added,
              .kind = kind,
              .type = type,
              .bytes = (int64_t)bytes,
              .group = group},
        .data = data,
        .mine = mine,
    };
    t->added++;
    pthread_cond_broadcast(&t->event);
    pthread_mutex_unlock(&t->lock);
    return DNR_OK;
}

static dnr_status tcp_broadcast(dnr_comm *c, void *data, size_t bytes)
{
    DNR_TRY(begin(c->state, JOB_BROADCAST, DNRI_SUM_F32, 0, NULL, data, bytes));
    return wait_for(c->state, 0);
}

static dnr_status tcp_allgather(dnr_comm *c, const void *mine, size_t bytes, void *all)
{
    DNR_TRY(begin(c->state, JOB_GATHER, DNRI_SUM_F32, 0, mine, all, bytes));
    return wait_for(c->state, 0);
}

static dnr_status tcp_begin_sum(dnr_comm *c, dnri_sum type, void *data, int64_t n, int group)
{
    return begin(c->state, JOB_SUM, type, group, NULL, data, (size_t)n * dnri_sum_size(type));
}

static dnr_status tcp_end_sums(dnr_comm *c)
{
    return wait_for(c->state, 0);
}

static void tcp_close(dnr_comm *c)
{
    tcp *t = c->state;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->event);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->event);
    pthread_mutex_destroy(&t->lock);
    free(t->chunk);
    free(t);
}

static const dnri_comm_ops tcp_ops = {
    .name = "tcp",
    .broadcast = tcp_broadcast,
    .allgather = tcp_allgather,
    .begin_sum = tcp_begin_sum,
    .end_sums = tcp_end_sums,
    .close = tcp_close,
};

dnr_status dnri_tcp_open(dnr_comm *c)
{
    tcp *t = calloc(1, sizeof *t);
    char *chunk = malloc((size_t)2 * CHUNK);
    if (!t || !chunk) {
        free(t);
        free(chunk);
        return DNR_FAIL_NOMEM();
    }
    t->c = c;
    t->chunk = chunk;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->event, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&t->thread, NULL, worker, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(chunk);
        free(t);
        return DNR_FAIL(DNR_EFAIL, "raise ulimit -u",
                        "cannot start the thread that moves data between ranks: %s",
                        strerror(error));
    }
    c->state = t;
    c->ops = &tcp_ops;
    return DNR_OK;
}
