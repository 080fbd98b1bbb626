/* measure.c: how long a sum over ranks takes, for `dnnrun bench allreduce`. */
#include "../runtime/comm.h"
#include "../runtime/reduce.h"
#include "socket.h"

#include <stdlib.h>
#include <string.h>

/* All ranks add ones: each element must then be the number of ranks. */
static dnr_status check_sum(dnr_comm *c, dnr_device *dev, const dnri_step *s, void *data,
                            float *host, size_t bytes)
{
    int64_t n = (int64_t)(bytes / sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = 1;
    DNR_TRY(dnri_copy_now(dev, data, host, bytes));
    DNR_TRY(s->run(s->ctx));
    DNR_TRY(dnri_copy_now(dev, host, data, bytes));
    for (int64_t i = 0; i < n; i++)
        if (host[i] != (float)c->world)
            return DNR_FAIL(DNR_EFAIL, "run it on fewer ranks to find the link or GPU that fails",
                            "a sum of ones over %d ranks gives %g (element %lld of %lld)", c->world,
                            (double)host[i], (long long)i, (long long)n);
    memset(host, 0, bytes); /* so that many sums in place stay finite */
    return dnri_copy_now(dev, data, host, bytes);
}

static dnr_status time_sums(dnr_comm *c, dnr_device *dev, const dnri_step *s, int times,
                            double *seconds)
{
    double together = 0, *all = calloc((size_t)c->world, sizeof *all);
    if (!all)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_comm_sum(c, "beginning together", DNRI_SUM_F64, &together, 1);
    double begun = dnri_clock();
    for (int i = 0; st == DNR_OK && i < times; i++)
        st = s->run(s->ctx);
    if (st == DNR_OK)
        st = dev->be->sync(dev, DNRI_COMPUTE);
    double took = (dnri_clock() - begun) / times;
    if (st == DNR_OK)
        st = dnri_comm_allgather(c, "comparing times", &took, sizeof took, all);
    *seconds = 0;
    for (int r = 0; st == DNR_OK && r < c->world; r++)
        *seconds = all[r] > *seconds ? all[r] : *seconds;
    free(all);
    return st;
}

static dnr_status measure(dnr_comm *c, dnr_device *dev, const dnri_step *s, void *data,
                          size_t bytes, int times, double *seconds)
{
    float *host = malloc(bytes);
    if (!host)
        return DNR_FAIL_NOMEM();
    dnr_status st = s->bind(s->ctx, &(dnri_binding){.in = {data}, .out = {data}});
    if (st == DNR_OK)
        st = check_sum(c, dev, s, data, host, bytes);
    if (st == DNR_OK)
        st = time_sums(c, dev, s, times, seconds);
    free(host);
    return st;
}

dnr_status dnr_comm_measure(dnr_comm *c, dnr_device *dev, size_t bytes, int times, double *seconds)
{
    if (dnri_comm_alone(c))
        return DNR_FAIL(DNR_EUSAGE, "start several, for example by mpirun -n 2",
                        "a process that is alone has nobody to add up with");
    if (bytes < 4 || bytes % 4 || times < 1)
        return DNR_FAIL(DNR_EUSAGE, "use a multiple of 4 bytes, and at least one time",
                        "%zu bytes, %d times", bytes, times);
    dnri_op op = {.def = &dnri_def_reduce, .n_in = 1, .n_out = 1};
    dnri_reduce_attr a = {
        .count = (int64_t)(bytes / 4), .sum = DNRI_SUM_F32, .bucket = -1, .wait = 2};
    memcpy(op.attr, &a, sizeof a);
    dnri_step s;
    void *data = NULL;
    DNR_TRY(dnri_comm_attach(c, dev));
    dnri_comm_stage(c, 0, "measuring sums of %zu bytes", bytes);
    DNR_TRY(dev->be->alloc(dev, bytes, &data));
    dnr_status st = dnri_comm_lower(c, dev, &op, &s);
    if (st == DNR_OK) {
        st = measure(c, dev, &s, data, bytes, times, seconds);
        s.drop(s.ctx);
    }
    dev->be->free(dev, data);
    return st;
}
