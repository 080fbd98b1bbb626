/* backend.h: the seam to where work runs. A back end is a module (shared object) loaded at run time
 * that exports one symbol, dnri_backend_<name>. The engine calls nothing else of it.
 *
 * Lanes are queues of work in order. The CPU and ref back ends run each call at once, on the
 * caller's thread; their fences and marks are always reached. */
#ifndef DNR_BACKEND_H
#define DNR_BACKEND_H

#include <sched.h>

#include "graph.h"

#define DNRI_BACKEND_ABI 4

typedef enum dnr_lane { DNRI_COMPUTE, DNRI_COPY, DNRI_COMM, DNRI_LANES } dnr_lane;
#define DNRI_MARKS 8

/* Addresses of one op, fixed for the life of a plan. Absent tensors are NULL. */
typedef struct dnri_binding {
    void *in[DNRI_MAX_IN], *out[DNRI_MAX_OUT];
    void *workspace; /* of the size that the step asked for; 256-byte aligned, contents undefined */
} dnri_binding;

/* One lowered op: bound once, then run any number of times. */
typedef struct dnri_step {
    dnr_status (*bind)(void *ctx, const dnri_binding *b);
    dnr_status (*run)(
        void *ctx); /* enqueues on its lane: no allocation, synchronisation or host branch */
    void (*drop)(void *ctx); /* frees ctx; may be NULL when ctx is */
    void *ctx;
    size_t workspace; /* bytes */
    dnr_lane lane;
    int launches; /* kernels or primitives started by run */
    bool
        in_place; /* outputs may lie where def->takes says: no pass of the step reads an element of such an
                      input after the output's was written there */
    char impl[64]; /* implementation chosen, for `dnnrun plan`: "cudnn engine 58",
                      "brgconv:avx512_core" */
} dnri_step;

typedef struct dnri_lower_opts {
    bool deterministic;
    bool benchmark;       /* time candidates */
    size_t workspace_cap; /* bytes for one step */
    bool apart;           /* no output lies over an input: for tests */
    const char *pins;     /* dnr_trainer_opts.pins; may be NULL: pins.h */
    dnr_tune_fn tried;    /* told of each contest, which is held anew; NULL: nobody */
    void *tried_user;
    dnr_lane
        lane; /* where the step may run beside others, if the back end can: its own `lane` says */
    dnr_comm *comm; /* for reduce (reduce.h); NULL: there is none */
    size_t
        bucket_bytes; /* in which pieces gradients are, or would be, summed over ranks; 0: the default */
} dnri_lower_opts;

/* What a device that computes on the host's CPUs leaves to the host's other threads. */
typedef struct dnri_spare {
    int threads;    /* so many do not get in its way; 0: it takes none of the host's CPUs */
    cpu_set_t cpus; /* theirs; none: wherever the thread that made them may run */
} dnri_spare;

struct dnri_choices;

/* What every device begins with. */
struct dnr_device {
    const struct dnri_backend *be;
    char name[32];
    char description[256];
    dnri_spare spare;
    char unit
        [64]; /* what it is of its host's, such as a PCI address: no two ranks may share it; "": they may */
    struct dnri_choices *
        choices; /* made by timing, here or before (choices.h), opened by the engine and kept by it; NULL: none are */
};

typedef struct dnri_backend {
    int abi; /* DNRI_BACKEND_ABI */
    const char *name;

    /* `arg`: what follows the colon of "cuda:1", or NULL. DNR_EDEVICE with the reason when it
     * cannot be used. */
    dnr_status (*open)(const char *arg, dnr_device **out);
    void (*close)(dnr_device *dev);
    /* Resolves AUTO and checks that this device can do `p`. */
    dnr_status (*numerics)(dnr_device *dev, dnr_precision *p, dnri_numerics *out);
    /* Free and total bytes for plans. */
    dnr_status (*memory)(dnr_device *dev, size_t *free, size_t *total);

    /* Device memory, zeroed, 256-byte aligned. */
    dnr_status (*alloc)(dnr_device *dev, size_t bytes, void **out);
    void (*free)(dnr_device *dev, void *p);
    /* Host memory that copies fast (pinned), zeroed. */
    dnr_status (*alloc_host)(dnr_device *dev, size_t bytes, void **out);
    void (*free_host)(dnr_device *dev, void *p);

    /* Enqueues a copy between any two addresses of host (pinned, or pageable for set-up) and
     * device. */
    dnr_status (*copy)(dnr_device *dev, dnr_lane lane, void *dst, const void *src, size_t bytes);
    /* What is enqueued on `to` from now on starts after what is on `from` now. */
    dnr_status (*fence)(dnr_device *dev, dnr_lane from, dnr_lane to);
    /* mark: remembers what is on the lane now under `id` (< DNRI_MARKS). reached: is all of it
     * done? Never waits. An asynchronous device error surfaces here. */
    dnr_status (*mark)(dnr_device *dev, dnr_lane lane, int id);
    dnr_status (*reached)(dnr_device *dev, int id, bool *done);
    /* Waits for a lane; for set-up, never inside a step. */
    dnr_status (*sync)(dnr_device *dev, dnr_lane lane);

    /* Capture of all lanes, begun and ended on COMPUTE; NULL where a program is run step by step.
     */
    dnr_status (*capture_begin)(dnr_device *dev);
    dnr_status (*capture_end)(dnr_device *dev, void **program);
    dnr_status (*replay)(dnr_device *dev, void *program);
    void (*capture_drop)(dnr_device *dev, void *program);

    bool (*supports)(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
    /* Of a fused op that it supports: is it faster than what it was made of? NULL: always. */
    bool (*pays)(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
    dnr_status (*lower)(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out);
    /* What communication libraries take for a lane (CUDA: its stream). NULL: work runs at once, in host memory. */
    void *(*queue)(dnr_device *dev, dnr_lane lane);
    /* Allocations and synchronisations made through this device so far (a step must add none). */
    void (*counters)(dnr_device *dev, int64_t *allocs, int64_t *syncs);

    /* For profiles, never in a capture. stamp: notes under `id` (small numbers from 0) the time at which what is on the
     * lane now is done; the first use of an id allocates. stamp_us: microseconds between two that were
     * reached. NULL where runs end before they return, so that the host's clock will do. */
    dnr_status (*stamp)(dnr_device *dev, dnr_lane lane, int id);
    dnr_status (*stamp_us)(dnr_device *dev, int from, int to, double *us);
} dnri_backend;

/* A back end's lowering table, searched by dnri_lower_find; each layer's file fills one row per op.
 */
typedef struct dnri_lowering {
    const dnri_op_def *def;
    bool (*supports)(dnr_device *dev, const dnr_graph *g, const dnri_op *op); /* NULL: always */
    dnr_status (*lower)(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out);
} dnri_lowering;

/* What the engine asks of a back end, unless extend.h has added or replaced the op. */
bool dnri_device_supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
/* Supports it, and it pays. */
bool dnri_device_prefers(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
dnr_status dnri_device_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out);

/* The CPUs that this thread might use before the first module was loaded: OpenMP, which comes with one, may bind it. */
const cpu_set_t *dnri_process_cpus(void);

const dnri_lowering *dnri_lower_find(const dnri_lowering *const tables[], const dnri_op_def *def);

/* A symbol of the module dnnrun-NAME.so beside libdnnrun, loaded for good. DNR_EDEVICE with the reason, and `remedy`
 * where there is no such module. */
dnr_status dnri_module_symbol(const char *name, const char *symbol, const char *remedy,
                              const void **out);

/* Bounded wait for a mark: polls, and after `timeout_s` fails with DNR_EPEER naming `what`. */
dnr_status dnri_wait(dnr_device *dev, int mark, double timeout_s, const char *what);
/* Set-up copies: enqueue and wait. */
dnr_status dnri_copy_now(dnr_device *dev, void *dst, const void *src, size_t bytes);

#endif
