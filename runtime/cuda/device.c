/* device.c: the CUDA back end: opening a GPU, its memory, lanes (streams), marks (events) and capture. */
#include "device.h"
#include "../choices.h"
#include "convplan.h"
#include "kernels.h"
#include "product.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const lane_names[DNRI_LANES] = {"compute", "copy", "comm"};

/* The current device belongs to the calling thread. */
static dnr_status use(dnri_cuda *d)
{
    if (!d->paper)
        DNRI_CUDA(cudaSetDevice(d->index), "using %s", d->base.name);
    return DNR_OK;
}

/* ---------------------------------------------------------------- memory */

/* Tuning is over for now. */
static void drop_scratch(dnri_cuda *d)
{
    if (d->choices)
        dnri_choices_save(d->choices);
    if (d->scratch)
        dnri_cuda_mfree(d, d->scratch);
    d->scratch = NULL;
    d->scratch_bytes = 0;
}

dnr_status dnri_cuda_malloc(dnri_cuda *d, size_t bytes, const char *what, void **out)
{
    if (d->paper)
        return d->base.be->alloc(&d->base, bytes, out);
    DNR_TRY(use(d));
    d->allocs++;
    DNRI_CUDA(cudaMalloc(out, bytes ? bytes : 1), "allocating %.1f MiB for %s on %s",
              (double)bytes / 1048576, what, d->base.name);
    return DNR_OK;
}

void dnri_cuda_mfree(dnri_cuda *d, void *p)
{
    if (p && !d->paper && use(d) == DNR_OK)
        (void)cudaFree(p);
}

dnr_status dnri_cuda_sync(dnri_cuda *d, dnr_lane lane)
{
    DNR_TRY(use(d));
    d->syncs++;
    DNRI_CUDA(cudaStreamSynchronize(d->lane[lane]), "waiting for the %s lane of %s",
              lane_names[lane], d->base.name);
    return DNR_OK;
}

static dnr_status memory(dnr_device *dev, size_t *free_bytes, size_t *total)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    drop_scratch(d);
    DNRI_CUDA(cudaMemGetInfo(free_bytes, total), "asking %s for its free memory", d->base.name);
    return DNR_OK;
}

static dnr_status alloc(dnr_device *dev, size_t bytes, void **out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    drop_scratch(d);
    DNR_TRY(dnri_cuda_malloc(d, bytes, "the plan or the store", out));
    DNRI_CUDA(cudaMemsetAsync(*out, 0, bytes, d->lane[DNRI_COMPUTE]), "zeroing %zu bytes", bytes);
    return dnri_cuda_sync(d, DNRI_COMPUTE);
}

static void release(dnr_device *dev, void *p)
{
    dnri_cuda_mfree(dnri_cuda_of(dev), p);
}

static dnr_status alloc_host(dnr_device *dev, size_t bytes, void **out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    d->allocs++;
    DNRI_CUDA(cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocPortable),
              "pinning %.1f MiB of host memory (ulimit -l may bound it)", (double)bytes / 1048576);
    memset(*out, 0, bytes);
    return DNR_OK;
}

static void free_host(dnr_device *dev, void *p)
{
    if (p && use(dnri_cuda_of(dev)) == DNR_OK)
        (void)cudaFreeHost(p);
}

/* ---------------------------------------------------------------- lanes */

static dnr_status copy(dnr_device *dev, dnr_lane lane, void *dst, const void *src, size_t bytes)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    DNRI_CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, d->lane[lane]),
              "copying %zu bytes on the %s lane of %s", bytes, lane_names[lane], d->base.name);
    return DNR_OK;
}

/* One event serves all fences: a wait refers to the record before it. */
static dnr_status fence(dnr_device *dev, dnr_lane from, dnr_lane to)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    DNRI_CUDA(cudaEventRecord(d->fence, d->lane[from]), "fencing %s before %s", lane_names[from],
              lane_names[to]);
    DNRI_CUDA(cudaStreamWaitEvent(d->lane[to], d->fence, 0), "fencing %s before %s",
              lane_names[from], lane_names[to]);
    return DNR_OK;
}

static dnr_status mark(dnr_device *dev, dnr_lane lane, int id)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    DNRI_CUDA(cudaEventRecord(d->mark[id], d->lane[lane]), "marking the %s lane", lane_names[lane]);
    return DNR_OK;
}

static dnr_status reached(dnr_device *dev, int id, bool *done)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    cudaError_t e = cudaEventQuery(d->mark[id]);
    *done = e == cudaSuccess;
    if (e == cudaErrorNotReady)
        (void)cudaGetLastError(); /* it is recorded, though it is no failure */
    else
        DNRI_CUDA(e, "work enqueued on %s", d->base.name);
    return DNR_OK;
}

static dnr_status sync_lane(dnr_device *dev, dnr_lane lane)
{
    return dnri_cuda_sync(dnri_cuda_of(dev), lane);
}

/* ---------------------------------------------------------------- capture */

/* The other lanes join the capture by waiting for COMPUTE, and are joined to it at its end. */
static dnr_status capture_begin(dnr_device *dev)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    /* of this thread only: a loader's thread may pin memory meanwhile */
    DNRI_CUDA(cudaStreamBeginCapture(d->lane[DNRI_COMPUTE], cudaStreamCaptureModeThreadLocal),
              "beginning a capture");
    dnr_status st = DNR_OK;
    for (int l = 0; l < DNRI_LANES && st == DNR_OK; l++)
        if (l != DNRI_COMPUTE)
            st = fence(dev, DNRI_COMPUTE, (dnr_lane)l);
    if (st != DNR_OK) { /* leave no lane capturing */
        cudaGraph_t broken = NULL;
        (void)cudaStreamEndCapture(d->lane[DNRI_COMPUTE], &broken);
        if (broken)
            (void)cudaGraphDestroy(broken);
    }
    return st;
}

static dnr_status instantiate(dnri_cuda *d, cudaGraph_t graph, cudaGraphExec_t *exec)
{
    DNRI_CUDA(cudaGraphInstantiate(exec, graph, 0), "instantiating a captured program");
    cudaError_t e = cudaGraphUpload(*exec, d->lane[DNRI_COMPUTE]);
    if (e != cudaSuccess) {
        (void)cudaGraphExecDestroy(*exec);
        return dnri_cuda_fail(DNRI_HERE, e, "uploading a captured program");
    }
    return DNR_OK;
}

static dnr_status capture_end(dnr_device *dev, void **program)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    dnr_status st = use(d);
    *program = NULL;
    for (int l = 0; l < DNRI_LANES && st == DNR_OK; l++)
        if (l != DNRI_COMPUTE)
            st = fence(dev, (dnr_lane)l, DNRI_COMPUTE);
    /* the capture has to end, also one that a failure broke */
    cudaError_t e = cudaStreamEndCapture(d->lane[DNRI_COMPUTE], &graph);
    if (st == DNR_OK && e != cudaSuccess)
        st = dnri_cuda_fail(DNRI_HERE, e, "ending a capture");
    if (st == DNR_OK)
        st = instantiate(d, graph, &exec);
    if (graph)
        (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    *program = st == DNR_OK ? exec : NULL;
    return st;
}

static dnr_status replay(dnr_device *dev, void *program)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    DNRI_CUDA(cudaGraphLaunch(program, d->lane[DNRI_COMPUTE]), "replaying a program on %s",
              d->base.name);
    return DNR_OK;
}

static void capture_drop(dnr_device *dev, void *program)
{
    if (program && use(dnri_cuda_of(dev)) == DNR_OK)
        (void)cudaGraphExecDestroy(program);
}

/* ---------------------------------------------------------------- stamps */

static dnr_status stamp(dnr_device *dev, dnr_lane lane, int id)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    if (id >= d->n_stamps) {
        const int n = id + 1024;
        cudaEvent_t *more = realloc(d->stamps, (size_t)n * sizeof *more);
        if (!more)
            return DNR_FAIL_NOMEM();
        memset(more + d->n_stamps, 0, (size_t)(n - d->n_stamps) * sizeof *more);
        d->stamps = more;
        d->n_stamps = n;
    }
    if (!d->stamps[id])
        DNRI_CUDA(cudaEventCreate(&d->stamps[id]), "making a stamp");
    DNRI_CUDA(cudaEventRecord(d->stamps[id], d->lane[lane]), "stamping the %s lane",
              lane_names[lane]);
    return DNR_OK;
}

static dnr_status stamp_us(dnr_device *dev, int from, int to, double *us)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    float ms = 0;
    DNR_TRY(use(d));
    DNRI_CUDA(cudaEventElapsedTime(&ms, d->stamps[from], d->stamps[to]), "reading stamps");
    *us = (double)ms * 1000;
    return DNR_OK;
}

/* ---------------------------------------------------------------- libraries */

dnr_status dnri_cuda_cudnn(dnri_cuda *d, cudnnHandle_t *out)
{
    if (!d->cudnn) {
        DNR_TRY(use(d));
        DNRI_CUDNN(cudnnCreate(&d->cudnn), "starting cuDNN on %s", d->base.name);
        DNRI_CUDNN(cudnnSetStream(d->cudnn, d->lane[DNRI_COMPUTE]), "giving cuDNN its stream");
    }
    *out = d->cudnn;
    return DNR_OK;
}

dnr_status dnri_cuda_lt(dnri_cuda *d, cublasLtHandle_t *out)
{
    if (!d->lt) {
        DNR_TRY(use(d));
        DNRI_CUBLAS(cublasLtCreate(&d->lt), "starting cuBLASLt on %s", d->base.name);
    }
    *out = d->lt;
    return DNR_OK;
}

/* cuDNN ends the process when one of its files is missing, so look first: where the loader looks, and beside
 * libcudnn itself, which looks there, too. */
static dnr_status check_cudnn(void)
{
    const char *file = "libcudnn_graph.so." DNRI_STR(CUDNN_MAJOR);
    char beside[1024] = "";
    Dl_info info;
    if (dladdr((void *)(uintptr_t)cudnnGetVersion, &info) && strrchr(info.dli_fname, '/'))
        snprintf(beside, sizeof beside, "%.*s/%s",
                 (int)(strrchr(info.dli_fname, '/') - info.dli_fname), info.dli_fname, file);
    if (!dlopen(beside, RTLD_LAZY | RTLD_LOCAL) && !dlopen(file, RTLD_LAZY | RTLD_LOCAL))
        return DNR_FAIL(DNR_EDEVICE, "install all of cuDNN, let LD_LIBRARY_PATH name its folder",
                        "cuDNN is not whole: %s", dlerror());
    size_t version = cudnnGetVersion(), cudart = cudnnGetCudartVersion();
    if (version / 10000 != CUDNN_MAJOR)
        return DNR_FAIL(DNR_EDEVICE,
                        "let LD_LIBRARY_PATH find the cuDNN that dnnrun was built with",
                        "built with cuDNN %d, found %zu", CUDNN_VERSION, version);
    if (cudart / 1000 > CUDART_VERSION / 1000)
        return DNR_FAIL(DNR_EDEVICE, "install the cuDNN 9 made for this CUDA",
                        "this cuDNN is made for CUDA %zu, dnnrun is built with CUDA %d",
                        cudart / 1000, CUDART_VERSION / 1000);
    return DNR_OK;
}

/* ---------------------------------------------------------------- open, close */

static dnr_status parse(const char *arg, int *index)
{
    char *end;
    *index = 0;
    if (!arg)
        return DNR_OK;
    long n = strtol(arg, &end, 10);
    if (end == arg || *end || n < 0 || n > 1023)
        return DNR_FAIL(DNR_EUSAGE, "use cuda or cuda:0, cuda:1 …", "cuda:%s names no device", arg);
    *index = (int)n;
    return DNR_OK;
}

static dnr_status describe(dnri_cuda *d)
{
    struct cudaDeviceProp p;
    int driver = 0;
    size_t cudnn = cudnnGetVersion(), lt = cublasLtGetVersion();
    DNRI_CUDA(cudaGetDeviceProperties(&p, d->index), "asking %s what it is", d->base.name);
    DNRI_CUDA(cudaDriverGetVersion(&driver), "asking for the driver's version");
    d->sms = p.multiProcessorCount;
    d->cc = p.major * 10 + p.minor;
    d->k = (k_device){.sms = d->sms, .shared = p.sharedMemPerBlockOptin};
    snprintf(d->base.description, sizeof d->base.description,
             "%.100s, %.0f GiB, sm_%d; driver for CUDA %d.%d, CUDA %d.%d, cuDNN %zu.%zu.%zu, "
             "cuBLASLt %zu.%zu",
             p.name, (double)p.totalGlobalMem / (1 << 30), d->cc, driver / 1000, driver % 1000 / 10,
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, cudnn / 10000, cudnn / 100 % 100,
             cudnn % 100, lt / 10000, lt / 100 % 100);
    DNRI_CUDA(cudaDeviceGetPCIBusId(d->base.unit, sizeof d->base.unit, d->index),
              "asking %s for its PCI address", d->base.name);
    cudaError_t e = k_usable();
    if (e != cudaSuccess)
        return dnri_cuda_fail(DNRI_HERE, e, "looking for kernels for %s, sm_%d", p.name, d->cc);
    return DNR_OK;
}

static void close_device(dnr_device *dev)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    if (!d)
        return;
    if (use(d) == DNR_OK) {
        (void)cudaDeviceSynchronize();
        drop_scratch(d);
        dnri_cudnn_drop_plans(d);
        dnri_product_drop_all(d);
        if (d->cudnn)
            cudnnDestroy(d->cudnn);
        if (d->lt)
            cublasLtDestroy(d->lt);
        dnri_cuda_mfree(d, d->k.gates);
        for (int i = 0; i < DNRI_MARKS; i++)
            if (d->mark[i])
                (void)cudaEventDestroy(d->mark[i]);
        for (int i = 0; i < 2; i++)
            if (d->clock[i])
                (void)cudaEventDestroy(d->clock[i]);
        for (int i = 0; i < d->n_stamps; i++)
            if (d->stamps[i])
                (void)cudaEventDestroy(d->stamps[i]);
        if (d->fence)
            (void)cudaEventDestroy(d->fence);
        for (int l = 0; l < DNRI_LANES; l++)
            if (d->lane[l])
                (void)cudaStreamDestroy(d->lane[l]);
    }
    free(d->stamps);
    free(d);
}

static dnr_status set_up(dnri_cuda *d)
{
    int count = 0;
    DNRI_CUDA(cudaGetDeviceCount(&count), "looking for CUDA devices");
    if (d->index >= count)
        return DNR_FAIL(DNR_EDEVICE, "use a number that nvidia-smi -L lists, counted from 0",
                        "there is no cuda:%d: %d device%s found", d->index, count,
                        count == 1 ? "" : "s");
    DNR_TRY(check_cudnn());
    DNR_TRY(use(d));
    DNR_TRY(describe(d));
    void *gates;
    DNR_TRY(dnri_cuda_malloc(d, (size_t)d->sms * K_GATE_BYTES, "gates between blocks", &gates));
    d->k.gates = gates;
    int low, high;
    DNRI_CUDA(cudaDeviceGetStreamPriorityRange(&low, &high), "asking for priorities");
    for (int l = 0; l < DNRI_LANES; l++) /* communication overtakes the backward pass */
        DNRI_CUDA(cudaStreamCreateWithPriority(&d->lane[l], cudaStreamNonBlocking,
                                               l == DNRI_COMM ? high : low),
                  "making the %s lane", lane_names[l]);
    DNRI_CUDA(cudaMemsetAsync(gates, 0, (size_t)d->sms * K_GATE_BYTES, d->lane[DNRI_COMPUTE]),
              "zeroing the gates"); /* on the lane that uses them */
    for (int i = 0; i < DNRI_MARKS; i++)
        DNRI_CUDA(cudaEventCreateWithFlags(&d->mark[i], cudaEventDisableTiming), "making a mark");
    DNRI_CUDA(cudaEventCreateWithFlags(&d->fence, cudaEventDisableTiming), "making a fence");
    return DNR_OK;
}

static dnr_status open_device(const char *arg, dnr_device **out)
{
    int index;
    *out = NULL;
    DNR_TRY(parse(arg, &index));
    dnri_cuda *d = calloc(1, sizeof *d);
    if (!d)
        return DNR_FAIL_NOMEM();
    d->index = index;
    snprintf(d->base.name, sizeof d->base.name, "cuda:%d", index);
    dnr_status st = set_up(d);
    if (st != DNR_OK) {
        dnr_error why = *dnr_last_error();
        close_device(&d->base);
        return dnri_fail_as(&why);
    }
    *out = &d->base;
    return DNR_OK;
}

static dnr_status numerics(dnr_device *dev, dnr_precision *p, dnri_numerics *out)
{
    const dnri_cuda *d = dnri_cuda_of(dev);
    if (*p == DNR_PRECISION_AUTO)
        *p = DNR_PRECISION_FP16;
    *out = (dnri_numerics){.compute = DNR_F32, .master = DNR_F32};
    switch (*p) {
    case DNR_PRECISION_FP32:
        return DNR_OK;
    case DNR_PRECISION_FP16:
        out->compute = DNR_F16;
        out->scaled = true;
        return DNR_OK;
    case DNR_PRECISION_TF32:
        out->tf32 = true;
        break;
    case DNR_PRECISION_BF16:
        out->compute = DNR_BF16;
        break;
    default:
        return DNR_FAIL(DNR_EUSAGE, "use fp16, bf16, tf32 or fp32 on CUDA",
                        "%s does not compute in %s", d->base.name, dnr_precision_name(*p));
    }
    if (d->cc < 80)
        return DNR_FAIL(DNR_EDEVICE, "use fp16 or fp32", "%s (sm_%d) has no %s; sm_80 brought it",
                        d->base.name, d->cc, dnr_precision_name(*p));
    return DNR_OK;
}

static void *queue(dnr_device *dev, dnr_lane lane)
{
    return dnri_cuda_of(dev)->lane[lane];
}

static void counters(dnr_device *dev, int64_t *allocs, int64_t *syncs)
{
    const dnri_cuda *d = dnri_cuda_of(dev);
    *allocs = d->allocs;
    *syncs = d->syncs;
}

/* ---------------------------------------------------------------- lowering */

static const dnri_lowering *const tables[] = {
    dnri_cuda_engine,
    dnri_cuda_conv,
    dnri_cuda_norm,
    dnri_cuda_pool,
    dnri_cuda_norm_pool,
    dnri_cuda_algbn,
    dnri_cuda_algbn_fwd,
    dnri_cuda_packed_conv,
    dnri_cuda_dense,
    dnri_cuda_loss,
    dnri_cuda_shortcut,
    dnri_cuda_conv_act,
    NULL,
};

static bool supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnri_lowering *row = dnri_lower_find(tables, op->def);
    return row && dnri_cuda_types(dev, g, op) && (!row->supports || row->supports(dev, g, op));
}

static bool pays(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    dnri_cuda_of(dev)->choices = dev->choices;
    return op->def != dnri_cuda_conv_pays.def || dnri_cuda_conv_pays.pays(dev, g, op);
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_lowering *row = dnri_lower_find(tables, op->def);
    if (!row || !dnri_cuda_types(dev, g, op))
        return DNR_FAIL(DNR_EUSAGE, "use another train.precision or device",
                        "the CUDA back end has no %s of these types", op->def->name);
    dnri_cuda *d = dnri_cuda_of(dev);
    DNR_TRY(use(d));
    d->choices = dev->choices;
    return row->lower(dev, g, op, o, out);
}

const dnri_backend dnri_backend_cuda = {
    .abi = DNRI_BACKEND_ABI,
    .name = "cuda",
    .open = open_device,
    .close = close_device,
    .numerics = numerics,
    .memory = memory,
    .alloc = alloc,
    .free = release,
    .alloc_host = alloc_host,
    .free_host = free_host,
    .copy = copy,
    .fence = fence,
    .mark = mark,
    .reached = reached,
    .sync = sync_lane,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .replay = replay,
    .capture_drop = capture_drop,
    .supports = supports,
    .pays = pays,
    .lower = lower,
    .queue = queue,
    .counters = counters,
    .stamp = stamp,
    .stamp_us = stamp_us,
};
