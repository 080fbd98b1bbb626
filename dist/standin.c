/* standin.c: see standin.h. */
#include "standin.h"
#include "socket.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double dnri_standin_takes(const dnri_standin *s, int64_t bytes)
{
    return s->latency + (double)bytes * 2 * (s->ranks - 1) / s->ranks / s->bandwidth;
}

static dnr_status broadcast(dnr_comm *c, void *data, size_t bytes)
{
    return DNR_OK;
}

static dnr_status allgather(dnr_comm *c, const void *mine, size_t bytes, void *all)
{
    memmove(all, mine, bytes);
    return DNR_OK;
}

static dnr_status begin_sum(dnr_comm *c, dnri_sum type, void *data, int64_t n, int group)
{
    dnri_standin *s = c->state;
    const int64_t bytes = n * (int64_t)dnri_sum_size(type);
    const double now = dnri_clock();
    s->free_at = (now > s->free_at ? now : s->free_at) + dnri_standin_takes(s, bytes);
    if (s->n < DNRI_STANDIN_NOTES) {
        s->note[s->n].bytes = bytes;
        s->note[s->n].begun = now;
        s->note[s->n].done = s->free_at;
    }
    s->n++;
    return DNR_OK;
}

static dnr_status end_sums(dnr_comm *c)
{
    dnri_standin *s = c->state;
    s->waits++;
    for (double left; (left = s->free_at - dnri_clock()) > 0;)
        (void)nanosleep(&(struct timespec){.tv_sec = (time_t)left,
                                           .tv_nsec = (long)(1e9 * (left - (double)(time_t)left))},
                        NULL);
    return DNR_OK;
}

static void drop(dnr_comm *c)
{
    free(c->state);
}

static const dnri_comm_ops ops = {
    .name = "standin",
    .broadcast = broadcast,
    .allgather = allgather,
    .begin_sum = begin_sum,
    .end_sums = end_sums,
    .close = drop,
};

dnr_status dnri_standin_open(dnr_comm *c, const char *spec)
{
    int ranks, end = 0;
    double rate, us;
    if (sscanf(spec, "%d:%lf:%lf%n", &ranks, &rate, &us, &end) != 3 || spec[end] || ranks < 1 ||
        !(rate > 0) || !(us >= 0 && us < 1e6))
        return DNR_FAIL(DNR_EUSAGE, "for example 8:340:20: ranks, GB/s, microseconds of each sum",
                        "the stand-in \"%.60s\" makes no sense", spec);
    if (c->world > 1)
        return DNR_FAIL(DNR_EUSAGE, "start one rank alone: DNR_RANK=0 DNR_WORLD_SIZE=1",
                        "a stand-in for %d ranks is for one, and there are %d", ranks, c->world);
    dnri_standin *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->ranks = ranks;
    s->bandwidth = rate * 1e9;
    s->latency = us * 1e-6;
    c->state = s;
    c->ops = &ops;
    return DNR_OK;
}
