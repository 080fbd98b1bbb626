/* cpu.h: what the CPU back end's files share: the device, slices of work, steps of our own kernels. */
#ifndef DNR_CPU_H
#define DNR_CPU_H

#include "../backend.h"
#include "onednn.h"

typedef struct dnri_choice dnri_choice;

typedef struct dnri_cpu {
    struct dnr_device base;
    dnri_dnn *dnn;
    int threads;
    dnri_choice *choices;  /* of implementations, by shape: tune.c */
    double timed, tell_at; /* seconds that these took; when to say so */
    _Atomic int64_t allocs, syncs;
} dnri_cpu;

static inline dnri_cpu *dnri_cpu_of(dnr_device *dev)
{
    return (dnri_cpu *)dev; /* base comes first */
}

/* ---- threads.c */

typedef void (*dnri_slice_fn)(void *ctx, int slice, int64_t begin, int64_t end);

/* Calls fn on slices [n·s/slices, n·(s+1)/slices) of 0…n, in parallel. The cut depends on n and `slices`
 * alone, so sums taken by slice and added in their order have the same bits every time. */
void dnri_slices(int slices, int64_t n, dnri_slice_fn fn, void *ctx);
/* How many slices are worth it for a kernel that touches `elements`: 1 up to one for each thread. */
int dnri_slices_for(dnr_device *dev, int64_t elements);
/* How many threads oneDNN's calls from this thread use from now on; returns what they used before. */
int dnri_threads_use(int n);
/* The threads that parallel regions use, bound to CPUs where that is safe; what they leave to others. Call once, at
 * open. */
dnr_status dnri_threads_start(dnri_spare *spare, int *threads);

/* ---- host.c: the machine */

void dnri_host_cpu_name(char *buf, size_t size);
/* Memory that a process may still take, and all there is; a cgroup's limit counts. */
dnr_status dnri_host_memory(size_t *free, size_t *total);
/* CPUs' worth of time that a cgroup allows, rounded up; 0: no limit. */
int dnri_host_cpu_quota(void);

/* ---- step.c */

/* Makes `out` a step that calls run(ctx). ctx is zeroed, of `size` bytes, and begins with a dnri_binding, which
 * bind fills. NULL: out of memory (the failure is recorded). */
void *dnri_cpu_step(dnri_step *out, size_t size, dnr_status (*run)(void *ctx), int launches);
/* Makes `out` a step that runs a oneDNN op, which it takes over. Which tensors of the binding the op's
 * src, weights, bias and dst are: >= 0 an input, < 0 output ~i, DNRI_DNN_ABSENT none. */
#define DNRI_DNN_ABSENT 100
/* Where the tensors that `slot` names lie; NULL for one that is absent. */
void dnri_dnn_tensors(const dnri_binding *b, const int slot[4], void *at[4]);
/* As a dnri_way_fn for d->candidate. */
dnr_status dnri_cpu_dnn_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                             dnri_step *out);

/* Threads worth using for an op of so many operations (multiplications and additions): all or one. */
int dnri_threads_for(dnr_device *dev, double flops);

/* ---- tune.c */

/* What an op's speed depends on. Ops of one key share one choice; unused places are 0. */
typedef struct dnri_tune_key {
    int64_t v[20];
} dnri_tune_key;
/* Makes the step of a way to run an op. Ways are numbered from 0; way 0 exists. out->run stays NULL for one that is
 * not worth a try, and out->impl empty too for one beyond the last. */
typedef dnr_status (*dnri_way_fn)(dnr_device *dev, const void *what, int way, dnri_step *out);
/* Makes the fastest of the ways 0, 1, … and −1 … −extra whose workspace is within o->workspace_cap, by timing them once on
 * memory of its own. */
dnr_status dnri_cpu_fastest(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_tune_key *key, dnri_way_fn make, const void *what, int extra,
                            const dnri_lower_opts *o, dnri_step *out);
void dnri_choices_drop(dnri_choice *c);

/* ---- lowering tables: engine.c and layers/cpu */

extern const dnri_lowering dnri_cpu_engine[], dnri_cpu_conv[], dnri_cpu_dense[], dnri_cpu_norm[],
    dnri_cpu_relu[], dnri_cpu_pool[], dnri_cpu_loss[], dnri_cpu_shortcut[];

#endif
