/* device.c: the CPU back end. Work runs at once, on the caller's thread and OpenMP's; so fences and marks
 * have nothing to do, and copies are memcpy. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const dnri_lowering *const tables[] = {dnri_cpu_engine, dnri_cpu_conv,     dnri_cpu_dense,
                                              dnri_cpu_norm,   dnri_cpu_relu,     dnri_cpu_pool,
                                              dnri_cpu_loss,   dnri_cpu_shortcut, NULL};

static void cpu_close(dnr_device *dev)
{
    dnri_choices_drop(dnri_cpu_of(dev)->choices);
    dnri_dnn_close(dnri_cpu_of(dev)->dnn);
    free(dev);
}

/* Planning itself takes some: oneDNN writes code. */
static dnr_status some_memory(void)
{
    size_t free, total;
    DNR_TRY(dnri_host_memory(&free, &total));
    return free ? DNR_OK
                : DNR_FAIL(DNR_EMEM, "free some, or raise the limit (ulimit -v, or the cgroup's)",
                           "no memory is left to this process (of %zu MiB)", total >> 20);
}

static dnr_status cpu_open(const char *arg, dnr_device **out)
{
    if (arg)
        return DNR_FAIL(DNR_EUSAGE,
                        "use device = cpu; OMP_NUM_THREADS sets how many cores it takes",
                        "the CPU takes no number, but device is \"cpu:%s\"", arg);
    dnri_cpu *dev = calloc(1, sizeof *dev);
    if (!dev)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_threads_start(&dev->base.spare, &dev->threads);
    if (st == DNR_OK)
        st = some_memory();
    if (st == DNR_OK)
        st = dnri_dnn_open(&dev->dnn);
    if (st != DNR_OK) {
        free(dev);
        return st;
    }
    char cpu[128], version[32];
    dnri_host_cpu_name(cpu, sizeof cpu);
    dnri_dnn_version(version, sizeof version);
    snprintf(dev->base.name, sizeof dev->base.name, "cpu");
    snprintf(dev->base.description, sizeof dev->base.description,
             "%s, %d thread%s, oneDNN %s, bf16 %s", cpu, dev->threads, dev->threads > 1 ? "s" : "",
             version, dnri_dnn_native_bf16() ? "native" : "not native");
    *out = &dev->base;
    return DNR_OK;
}

static dnr_status cpu_numerics(dnr_device *dev, dnr_precision *p, dnri_numerics *out)
{
    if (*p == DNR_PRECISION_AUTO)
        *p = DNR_PRECISION_FP32;
    if (*p == DNR_PRECISION_BF16 && !dnri_dnn_native_bf16())
        return DNR_FAIL(DNR_EUSAGE,
                        "use train.precision = fp32, or a CPU with avx512_bf16 or amx_bf16",
                        "this CPU has no native bf16 (%s)", dev->description);
    if (*p != DNR_PRECISION_FP32 && *p != DNR_PRECISION_BF16)
        return DNR_FAIL(DNR_EUSAGE, "use train.precision = fp32 or bf16, or device = cuda",
                        "the CPU back end does not compute in %s", dnr_precision_name(*p));
    *out = (dnri_numerics){.compute = *p == DNR_PRECISION_BF16 ? DNR_BF16 : DNR_F32,
                           .master = DNR_F32};
    return DNR_OK;
}

static dnr_status cpu_memory(dnr_device *dev, size_t *free, size_t *total)
{
    return dnri_host_memory(free, total);
}

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct fresh {
    char *p;
    size_t bytes;
    int slices;
} fresh;

/* Touches every slices-th huge page. */
static void touch(void *ctx, int slice, int64_t begin, int64_t end)
{
    const fresh *f = ctx;
    for (size_t at = (size_t)slice * HUGE_PAGE; at < f->bytes; at += (size_t)f->slices * HUGE_PAGE)
        memset(f->p + at, 0, f->bytes - at < HUGE_PAGE ? f->bytes - at : HUGE_PAGE);
}

static dnr_status cpu_alloc(dnr_device *dev, size_t bytes, void **out)
{
    /* huge pages save large tensors most of their TLB misses */
    size_t align = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : 256;
    size_t rounded = (bytes + align - 1) & ~(align - 1);
    *out = rounded < bytes ? NULL : aligned_alloc(align, rounded ? rounded : align);
    if (!*out)
        return DNR_FAIL(DNR_EMEM, "lower train.batch, or set memory.recompute = block",
                        "out of host memory: %zu MiB were asked for", bytes >> 20);
    if (align > 4096)
        madvise(*out, rounded, MADV_HUGEPAGE);
    /* A page lies at the memory node of the thread that touches it first. Tensors come to lie anywhere in this, so all
     * threads touch it in turn: each tensor is then spread over the nodes, and reading it uses all of them. */
    fresh f = {*out, bytes, dnri_slices_for(dev, (int64_t)(bytes / 4))};
    dnri_slices(f.slices, f.slices, touch, &f);
    dnri_cpu_of(dev)->allocs++;
    return DNR_OK;
}

static void cpu_free(dnr_device *dev, void *p)
{
    free(p);
}

static dnr_status cpu_copy(dnr_device *dev, dnr_lane lane, void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
    return DNR_OK;
}

static dnr_status cpu_fence(dnr_device *dev, dnr_lane from, dnr_lane to)
{
    return DNR_OK;
}

static dnr_status cpu_mark(dnr_device *dev, dnr_lane lane, int id)
{
    return DNR_OK;
}

static dnr_status cpu_reached(dnr_device *dev, int id, bool *done)
{
    *done = true;
    return DNR_OK;
}

static dnr_status cpu_sync(dnr_device *dev, dnr_lane lane)
{
    dnri_cpu_of(dev)->syncs++;
    return DNR_OK;
}

static bool cpu_supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnri_lowering *row = dnri_lower_find(tables, op->def);
    return row && (!row->supports || row->supports(dev, g, op));
}

static dnr_status cpu_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_lowering *row = dnri_lower_find(tables, op->def);
    if (!row)
        return DNR_FAIL(DNR_EUSAGE, "use another device", "the CPU back end has no %s (layer %s)",
                        op->def->name, op->name);
    return row->lower(dev, g, op, o, out);
}

static void cpu_counters(dnr_device *dev, int64_t *allocs, int64_t *syncs)
{
    *allocs = dnri_cpu_of(dev)->allocs;
    *syncs = dnri_cpu_of(dev)->syncs;
}

extern const dnri_backend dnri_backend_cpu;
const dnri_backend dnri_backend_cpu = {
    .abi = DNRI_BACKEND_ABI,
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .numerics = cpu_numerics,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .alloc_host = cpu_alloc,
    .free_host = cpu_free,
    .copy = cpu_copy,
    .fence = cpu_fence,
    .mark = cpu_mark,
    .reached = cpu_reached,
    .sync = cpu_sync,
    .supports = cpu_supports,
    .lower = cpu_lower,
    .counters = cpu_counters,
};
