/* standin.c: the stand-in (../standin.h) on a GPU: a sum is a wait on its lane, captured with the rest of the step. It takes
 * no multiprocessors and no bandwidth, which NCCL's kernels do. */
#include "../host.h"
#include "../standin.h"

#include <cuda_runtime_api.h>
#include <time.h>

typedef struct wait_step {
    dnri_reduce_step r; /* first */
    struct timespec takes;
} wait_step;

static void CUDART_CB pass_time(void *takes)
{
    (void)nanosleep(takes, NULL);
}

static dnr_status run_reduce(void *ctx)
{
    wait_step *s = ctx;
    void *queue;
    DNR_TRY(dnri_reduce_queue(&s->r, &queue));
    cudaError_t e = cudaLaunchHostFunc(queue, pass_time, &s->takes);
    return e == cudaSuccess ? DNR_OK
                            : DNR_FAIL(DNR_EDEVICE, "leave dist.standin out",
                                       "beginning a stand-in's wait: %s", cudaGetErrorString(e));
}

static dnr_status standin_open(dnr_comm *c, dnr_device *dev, void **state)
{
    *state = c->state;
    return DNR_OK;
}

static dnr_status standin_lower(void *state, dnr_device *dev, const dnri_op *op, dnri_step *out)
{
    wait_step *s =
        dnri_reduce_step_new(op, sizeof *s, "standin", run_reduce, dnri_reduce_wait, out);
    if (!s)
        return DNR_EMEM;
    double takes =
        dnri_standin_takes(state, s->r.a.count * (int64_t)dnri_sum_size((dnri_sum)s->r.a.sum));
    s->r.dev = dev;
    s->takes.tv_sec = (time_t)takes;
    s->takes.tv_nsec = (long)(1e9 * (takes - (double)s->takes.tv_sec));
    return DNR_OK;
}

static dnr_status standin_check(void *state)
{
    return DNR_OK;
}

static void standin_close(void *state)
{
}

extern const dnri_comm_device dnri_comm_standin;
const dnri_comm_device dnri_comm_standin = {
    .abi = DNRI_BACKEND_ABI,
    .name = "a stand-in",
    .open = standin_open,
    .lower = standin_lower,
    .check = standin_check,
    .close = standin_close,
};
