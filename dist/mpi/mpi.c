/* mpi.c: the module dnnrun-mpi.so: collectives of host memory by MPI, where mpirun or srun started the ranks and
 * dist.transport = mpi asks for it. Nothing waits inside MPI: requests are polled, and between polls it is asked who is
 * lost, which MPI itself cannot tell. */
#include "../../runtime/comm.h"
#include "../socket.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 256 }; /* sums under way */

typedef struct mpi {
    MPI_Comm comm;
    MPI_Comm group; /* of so many ranks; MPI_COMM_NULL: none yet */
    int group_size;
    MPI_Datatype bits16; /* MPI knows no 16-bit floats */
    MPI_Op add[2];       /* of fp16, bf16 */
    MPI_Request request[MOST];
    MPI_Status
        status[MOST]; /* unread: with MPICH gcc takes MPI_STATUSES_IGNORE for an array of none */
    int n;
} mpi;

static dnr_status fail(int code, const char *doing)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    (void)MPI_Error_string(code, text, &length);
    return DNR_FAIL(DNR_EPEER, "use dist.transport = tcp to see whether MPI itself is at fault",
                    "MPI: %s: %.300s", doing, text);
}

/* Polls until all requests are done, or a rank is lost, or nobody may wait any longer. */
static dnr_status finish(dnr_comm *c)
{
    mpi *m = c->state;
    double begun = dnri_clock();
    for (int done = 0; !done;) {
        int code = MPI_Testall(m->n, m->request, &done, m->status);
        if (code != MPI_SUCCESS)
            return fail(code, "waiting for other ranks");
        double waited = done ? 0 : dnri_clock() - begun;
        if (waited > 100e-6) { /* ranks may share a core */
            DNR_TRY(dnri_comm_check(c));
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        }
        if (waited > dnri_comm_patience(c))
            return DNR_FAIL(DNR_EPEER, "look at the output of the other ranks",
                            "MPI has not come to the end of %d sums for %.0f s", m->n, waited);
    }
    m->n = 0;
    return DNR_OK;
}

/* A free place for a request. */
static dnr_status place(dnr_comm *c, MPI_Request **out)
{
    mpi *m = c->state;
    if (m->n == MOST)
        DNR_TRY(finish(c));
    *out = &m->request[m->n++];
    **out = MPI_REQUEST_NULL;
    return DNR_OK;
}

/* Counts are ints in MPI: in pieces of a gigabyte. */
enum { PIECE = 1 << 30 };

static dnr_status mpi_broadcast(dnr_comm *c, void *data, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += PIECE) {
        MPI_Request *r;
        int some = (int)(bytes - at < PIECE ? bytes - at : PIECE);
        DNR_TRY(place(c, &r));
        int code = MPI_Ibcast((char *)data + at, some, MPI_BYTE, 0, ((mpi *)c->state)->comm, r);
        if (code != MPI_SUCCESS)
            return fail(code, "a broadcast");
    }
    return finish(c);
}

static dnr_status mpi_allgather(dnr_comm *c, const void *mine, size_t bytes, void *all)
{
    MPI_Request *r;
    if (bytes > PIECE)
        return DNR_FAIL(DNR_EUSAGE, "gather less at once", "gathering %zu bytes of each rank",
                        bytes);
    DNR_TRY(place(c, &r));
    int code = MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE,
                              ((mpi *)c->state)->comm, r);
    return code == MPI_SUCCESS ? finish(c) : fail(code, "a gathering");
}

static void add_f16(void *more, void *sum, int *n, MPI_Datatype *type)
{
    dnri_sum_add(DNRI_SUM_F16, sum, more, (size_t)*n);
}

static void add_bf16(void *more, void *sum, int *n, MPI_Datatype *type)
{
    dnri_sum_add(DNRI_SUM_BF16, sum, more, (size_t)*n);
}

/* The only call of MPI's that waits by itself, beside those that start and end it. */
static dnr_status mpi_prepare(dnr_comm *c, int group)
{
    mpi *m = c->state;
    if (group == m->group_size)
        return DNR_OK;
    if (m->group != MPI_COMM_NULL)
        (void)MPI_Comm_free(&m->group);
    dnri_comm_limit(c, c->timeout_s, "MPI_Comm_split");
    int code = MPI_Comm_split(m->comm, c->rank / group, c->rank, &m->group);
    dnri_comm_limit(c, 0, NULL);
    if (code != MPI_SUCCESS)
        return fail(code, "making groups of ranks");
    m->group_size = group;
    return DNR_OK;
}

static dnr_status mpi_begin_sum(dnr_comm *c, dnri_sum type, void *data, int64_t n, int group)
{
    const mpi *m = c->state;
    const MPI_Datatype types[] = {[DNRI_SUM_F32] = MPI_FLOAT,
                                  [DNRI_SUM_F64] = MPI_DOUBLE,
                                  [DNRI_SUM_I64] = MPI_INT64_T,
                                  [DNRI_SUM_F16] = m->bits16,
                                  [DNRI_SUM_BF16] = m->bits16};
    const MPI_Op add = type == DNRI_SUM_F16    ? m->add[0]
                       : type == DNRI_SUM_BF16 ? m->add[1]
                                               : MPI_SUM;
    const int64_t most = PIECE / (int64_t)dnri_sum_size(type);
    for (int64_t at = 0; at < n; at += most) {
        MPI_Request *r;
        DNR_TRY(place(c, &r));
        int code = MPI_Iallreduce(MPI_IN_PLACE, (char *)data + at * (int64_t)dnri_sum_size(type),
                                  (int)(n - at < most ? n - at : most), types[type], add,
                                  group ? m->group : m->comm, r);
        if (code != MPI_SUCCESS)
            return fail(code, "beginning a sum");
    }
    return DNR_OK;
}

/* MPI_Finalize waits for all ranks: not where one is lost. */
static void mpi_close(dnr_comm *c)
{
    mpi *m = c->state;
    if (dnri_comm_check(c) == DNR_OK && m->n == 0) {
        (void)MPI_Op_free(&m->add[0]);
        (void)MPI_Op_free(&m->add[1]);
        (void)MPI_Type_free(&m->bits16);
        if (m->group != MPI_COMM_NULL)
            (void)MPI_Comm_free(&m->group);
        (void)MPI_Comm_free(&m->comm);
        (void)MPI_Finalize();
    }
    free(m);
}

static const dnri_comm_ops mpi_ops = {
    .name = "mpi",
    .broadcast = mpi_broadcast,
    .allgather = mpi_allgather,
    .begin_sum = mpi_begin_sum,
    .end_sums = finish,
    .prepare = mpi_prepare,
    .close = mpi_close,
};

static dnr_status start(dnr_comm *c, mpi *m)
{
    int code, have, rank = -1, world = -1;
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &have);
    if (code != MPI_SUCCESS)
        return fail(code, "starting");
    (void)MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    code = MPI_Comm_dup(MPI_COMM_WORLD, &m->comm);
    if (code != MPI_SUCCESS)
        return fail(code, "making a communicator");
    if (MPI_Type_contiguous(2, MPI_BYTE, &m->bits16) != MPI_SUCCESS ||
        MPI_Type_commit(&m->bits16) != MPI_SUCCESS ||
        MPI_Op_create(add_f16, 1, &m->add[0]) != MPI_SUCCESS ||
        MPI_Op_create(add_bf16, 1, &m->add[1]) != MPI_SUCCESS)
        return fail(MPI_ERR_OTHER, "making sums of 16-bit floats");
    (void)MPI_Comm_rank(m->comm, &rank);
    (void)MPI_Comm_size(m->comm, &world);
    if (rank != c->rank || world != c->world)
        return DNR_FAIL(DNR_EPEER,
                        "start the ranks with the mpirun of the MPI that dnnrun was built with, or "
                        "use dist.transport = tcp",
                        "to MPI this is rank %d of %d, to the launcher rank %d of %d", rank, world,
                        c->rank, c->world);
    return DNR_OK;
}

extern const dnri_comm_module dnri_comm_mpi;
static dnr_status mpi_open(dnr_comm *c, const dnri_comm_ops **ops, void **state)
{
    mpi *m = calloc(1, sizeof *m);
    if (!m)
        return DNR_FAIL_NOMEM();
    m->group = MPI_COMM_NULL;
    dnr_status st = start(c, m);
    if (st != DNR_OK) {
        free(m);
        return st;
    }
    *ops = &mpi_ops;
    *state = m;
    return DNR_OK;
}

const dnri_comm_module dnri_comm_mpi = {.abi = DNRI_BACKEND_ABI, .open = mpi_open};
