/* nccl.c: the module dnnrun-nccl.so: sums over ranks in GPU memory, on the comm lane, by NCCL. It starts over the host's
 * communicator, which carries NCCL's id and watches who is lost. */
#include "../../runtime/comm.h"
#include "../../runtime/reduce.h"
#include "../../runtime/status.h"
#include "../host.h"
#include "../socket.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct nccl {
    dnr_comm *c;
    int index; /* of the GPU */
    ncclComm_t comm;
    ncclComm_t group; /* of so many ranks; NULL: none yet */
    int group_size;
} nccl;

static dnr_status fail(ncclResult_t r, const nccl *n, const char *doing)
{
    const char *detail = n && n->comm ? ncclGetLastError(n->comm) : ncclGetLastError(NULL);
    return DNR_FAIL(
        r == ncclRemoteError || r == ncclSystemError ? DNR_EPEER : DNR_EDEVICE,
        "set NCCL_DEBUG=WARN to see more; NCCL_SOCKET_IFNAME names the interface to use",
        "NCCL: %s: %s%s%.200s", doing, ncclGetErrorString(r), detail && *detail ? ": " : "",
        detail ? detail : "");
}

/* ---- opening: NCCL waits for the other ranks without end, so a thread does that, which may be left behind */

typedef struct start {
    int world, rank, index;
    ncclUniqueId id;
    ncclComm_t comm;
    ncclResult_t result;
    _Atomic bool done;
} start;

static void *start_main(void *arg)
{
    start *s = arg;
    s->result = cudaSetDevice(s->index) == cudaSuccess
                    ? ncclCommInitRank(&s->comm, s->world, s->id, s->rank)
                    : ncclUnhandledCudaError;
    s->done = true;
    return NULL;
}

/* Waits for the thread, at most the communicator's timeout, or until a rank is lost. */
static dnr_status await(nccl *n, const start *s)
{
    const double end = dnri_clock() + n->c->timeout_s;
    while (!s->done) {
        DNR_TRY(dnri_comm_check(n->c));
        if (dnri_clock() > end)
            return DNR_FAIL(
                DNR_EPEER,
                "set NCCL_DEBUG=INFO to see what it waits for; NCCL_SOCKET_IFNAME names the "
                "interface to use; see that a firewall lets ranks connect",
                "NCCL did not connect the %d ranks within %g s", n->c->world, n->c->timeout_s);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    n->comm = s->comm;
    return s->result == ncclSuccess ? DNR_OK : fail(s->result, NULL, "connecting the ranks");
}

static dnr_status connect_ranks(nccl *n)
{
    start *s = calloc(1, sizeof *s); /* the thread's, should it be left behind */
    pthread_t thread;
    if (!s)
        return DNR_FAIL_NOMEM();
    s->world = n->c->world;
    s->rank = n->c->rank;
    s->index = n->index;
    ncclResult_t r = n->c->rank == 0 ? ncclGetUniqueId(&s->id) : ncclSuccess;
    if (r != ncclSuccess) {
        free(s);
        return fail(r, NULL, "asking for an id");
    }
    dnr_status st = dnri_comm_broadcast(n->c, "sharing NCCL's id", &s->id, sizeof s->id);
    if (st != DNR_OK) {
        free(s);
        return st;
    }
    int error = pthread_create(&thread, NULL, start_main, s);
    if (error) {
        free(s);
        return DNR_FAIL(DNR_EFAIL, "raise ulimit -u", "cannot start a thread: %s", strerror(error));
    }
    st = await(n, s);
    if (!s->done) {
        pthread_detach(thread);
        return st;
    }
    pthread_join(thread, NULL);
    free(s);
    return st;
}

static dnr_status nccl_open(dnr_comm *c, dnr_device *dev, void **state)
{
    int version = 0;
    *state = NULL;
    nccl *n = calloc(1, sizeof *n);
    if (!n)
        return DNR_FAIL_NOMEM();
    n->c = c;
    n->index = (int)strtol(strchr(dev->name, ':') ? strchr(dev->name, ':') + 1 : "0", NULL, 10);
    dnr_status st = connect_ranks(n);
    if (st != DNR_OK) {
        free(n);
        return st;
    }
    (void)ncclGetVersion(&version);
    size_t at = strlen(c->about);
    snprintf(c->about + at, sizeof c->about - at, "; NCCL %d.%d.%d sums on the GPU",
             version / 10000, version / 100 % 100, version % 100);
    *state = n;
    return DNR_OK;
}

/* NCCL's own threads notice what the star cannot: a broken link between GPUs. */
static dnr_status nccl_check(void *state)
{
    nccl *n = state;
    ncclResult_t later = ncclSuccess, r = ncclCommGetAsyncError(n->comm, &later);
    r = r == ncclSuccess ? later : r;
    if (r == ncclSuccess && n->group) {
        r = ncclCommGetAsyncError(n->group, &later);
        r = r == ncclSuccess ? later : r;
    }
    return r == ncclSuccess || r == ncclInProgress ? DNR_OK : fail(r, n, "a sum over ranks");
}

/* A communicator is not taken down under work that will never end: the process ends instead. */
static void nccl_close(void *state)
{
    nccl *n = state;
    if (dnri_comm_check(n->c) == DNR_OK && cudaSetDevice(n->index) == cudaSuccess) {
        if (n->group)
            (void)ncclCommDestroy(n->group);
        (void)ncclCommDestroy(n->comm);
    }
    free(n);
}

/* ---- steps */

/* Groups of ranks, once; a plan made before might still use those of another size. */
static dnr_status prepare(nccl *n, int group)
{
    if (group == n->group_size)
        return DNR_OK;
    if (n->group)
        return DNR_FAIL(DNR_EUSAGE, "close the communicator and open another",
                        "groups of %d ranks, where there were groups of %d", group, n->group_size);
    dnri_comm_limit(n->c, n->c->timeout_s, "ncclCommSplit");
    ncclResult_t r = ncclCommSplit(n->comm, n->c->rank / group, n->c->rank, &n->group, NULL);
    dnri_comm_limit(n->c, 0, NULL);
    if (r != ncclSuccess)
        return fail(r, n, "making groups of ranks");
    n->group_size = group;
    return DNR_OK;
}

typedef struct nccl_step {
    dnri_reduce_step r; /* first */
    nccl *n;
    ncclDataType_t type;
} nccl_step;

static dnr_status run_reduce(void *ctx)
{
    const nccl_step *s = ctx;
    void *queue;
    DNR_TRY(dnri_reduce_queue(&s->r, &queue));
    ncclResult_t r = ncclAllReduce(s->r.data, s->r.data, (size_t)s->r.a.count, s->type, ncclSum,
                                   s->r.a.group ? s->n->group : s->n->comm, queue);
    return r == ncclSuccess ? DNR_OK : fail(r, s->n, "beginning a sum over ranks");
}

static dnr_status nccl_lower(void *state, dnr_device *dev, const dnri_op *op, dnri_step *out)
{
    static const ncclDataType_t types[] = {[DNRI_SUM_F32] = ncclFloat32,
                                           [DNRI_SUM_F64] = ncclFloat64,
                                           [DNRI_SUM_I64] = ncclInt64,
                                           [DNRI_SUM_F16] = ncclFloat16,
                                           [DNRI_SUM_BF16] = ncclBfloat16};
    nccl_step *s = dnri_reduce_step_new(op, sizeof *s, "nccl", run_reduce, dnri_reduce_wait, out);
    if (!s)
        return DNR_EMEM;
    s->n = state;
    s->r.dev = dev;
    s->type = types[s->r.a.sum];
    dnr_status st = s->r.a.group ? prepare(state, (int)s->r.a.group) : DNR_OK;
    if (st != DNR_OK)
        out->drop(out->ctx);
    return st;
}

extern const dnri_comm_device dnri_comm_nccl;
const dnri_comm_device dnri_comm_nccl = {
    .abi = DNRI_BACKEND_ABI,
    .name = "NCCL",
    .open = nccl_open,
    .lower = nccl_lower,
    .check = nccl_check,
    .close = nccl_close,
};
