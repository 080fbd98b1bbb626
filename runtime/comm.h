/* comm.h: the seam to who shares the work. A communicator joins the processes ("ranks") of one run; dist/ implements it.
 *
 * The runtime asks of it what is in dnri_comm_ops, for host memory, and dnri_comm_device, for the memory of a GPU; who is
 * lost, and where everybody stands, is watched beside it by the star (dist/star.h), whatever carries the data. All
 * functions but those of dnri_comm_stage are collective: all ranks call the same ones in the same order. Every wait is
 * bounded; a lost rank makes them fail with DNR_EPEER, naming it. */
#ifndef DNR_COMM_H
#define DNR_COMM_H

#include "backend.h"

/* Element types that can be summed over ranks. */
typedef enum dnri_sum {
    DNRI_SUM_F32,
    DNRI_SUM_F64,
    DNRI_SUM_I64,
    DNRI_SUM_F16,
    DNRI_SUM_BF16
} dnri_sum;
size_t dnri_sum_size(dnri_sum t);
dnri_sum dnri_sum_of(dnr_dtype t); /* of a float type */
/* sum += more, n elements; the 16-bit types are rounded to nearest even at each addition. */
void dnri_sum_add(dnri_sum t, void *sum, const void *more, size_t n);

typedef struct dnri_comm_ops {
    const char *name; /* "tcp", "mpi" */
    /* From rank 0 to all. */
    dnr_status (*broadcast)(dnr_comm *c, void *data, size_t bytes);
    /* Of all to all, in the order of ranks. */
    dnr_status (*allgather)(dnr_comm *c, const void *mine, size_t bytes, void *all);
    /* Sums over ranks, in place, to the same bits everywhere: begin_sum returns at once, end_sums when all that were
     * begun are done. For steps: nothing allocates. `group`: over each so many ranks, the first ones, the next ones …;
     * 0: over all. */
    dnr_status (*begin_sum)(dnr_comm *c, dnri_sum type, void *data, int64_t n, int group);
    dnr_status (*end_sums)(dnr_comm *c);
    /* Before the first sum of such a group; NULL: nothing is to be done. */
    dnr_status (*prepare)(dnr_comm *c, int group);
    void (*close)(dnr_comm *c); /* frees c->state */
} dnri_comm_ops;

/* What a module of collectives exports: dnri_comm_<name>. */
typedef struct dnri_comm_module {
    int abi; /* DNRI_BACKEND_ABI */
    /* Collective; c has a star already. */
    dnr_status (*open)(dnr_comm *c, const dnri_comm_ops **ops, void **state);
} dnri_comm_module;

/* Reductions of a device's own memory. */
typedef struct dnri_comm_device {
    int abi; /* DNRI_BACKEND_ABI */
    const char *name;
    /* Collective. */
    dnr_status (*open)(dnr_comm *c, dnr_device *dev, void **state);
    /* Lowers a reduce or reduce.wait (reduce.h). */
    dnr_status (*lower)(void *state, dnr_device *dev, const dnri_op *op, dnri_step *out);
    dnr_status (*check)(void *state); /* has a reduction failed? Never waits. */
    void (*close)(void *state);
} dnri_comm_device;

struct dnri_star;

struct dnr_comm {
    const dnri_comm_ops *ops; /* NULL: this process is alone */
    void *state;
    const dnri_comm_device *on; /* NULL: the device's memory is the host's */
    void *on_state;
    int rank, world;
    int local_rank, local_world; /* on this host */
    double timeout_s;
    struct dnri_star *star;
    char about[256]; /* one line: ranks, hosts, transport, interface */
};

/* Was this process started on its own? Then nothing of dist/ runs. A launched world of one rank is not alone: its
 * reductions run, as those of many would. */
static inline bool dnri_comm_alone(const dnr_comm *c)
{
    return !c || !c->ops;
}
static inline int dnri_comm_world(const dnr_comm *c)
{
    return c ? c->world : 1;
}

/* Makes ready to reduce what lies in dev's memory. Refuses two ranks on one device. */
dnr_status dnri_comm_attach(dnr_comm *c, dnr_device *dev);

/* Collectives of the host; `what` (static text) is what they are for, in messages. Nothing to do where alone. */
dnr_status dnri_comm_broadcast(dnr_comm *c, const char *what, void *data, size_t bytes);
dnr_status dnri_comm_allgather(dnr_comm *c, const char *what, const void *mine, size_t bytes,
                               void *all);
dnr_status dnri_comm_sum(dnr_comm *c, const char *what, dnri_sum type, void *data, int64_t n);

/* Where this rank stands, for the others' messages. They may wait for it for timeout_s, or allow_s where that is more. */
void dnri_comm_stage(dnr_comm *c, double allow_s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* This rank is lost if this is not called again within `seconds`, 0: no limit: for calls of libraries that may hang. `what`:
 * static text. */
void dnri_comm_limit(dnr_comm *c, double seconds, const char *what);
/* It has come to the next point at which ranks meet. */
void dnri_comm_advance(dnr_comm *c);
/* DNR_OK, or who is lost, or what became of the reductions. Never waits. */
dnr_status dnri_comm_check(dnr_comm *c);
/* Longest time that a wait for other ranks may take now. */
double dnri_comm_patience(const dnr_comm *c);
const char *dnri_comm_host(const dnr_comm *c, int rank);

/* Does this op belong to the communicator, not to the back end? */
bool dnri_comm_owns(const dnri_op *op);
dnr_status dnri_comm_lower(dnr_comm *c, dnr_device *dev, const dnri_op *op, dnri_step *out);

#endif
