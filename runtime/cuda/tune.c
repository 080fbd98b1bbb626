/* tune.c: which of cuDNN's plans a convolution takes: the first, or the fastest of the first few. */
#include "cudnn.h"
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CANDIDATES = 8, REPEATS = 3 };

typedef struct bench {
    size_t x, w,
        y; /* bytes of each, a multiple of 256; they lie in the scratch memory in this order */
    cudnnBackendDescriptor_t plan, pack;
} bench;

static size_t up(int64_t elements, int64_t type)
{
    size_t bytes = (size_t)elements * dnri_dtype_size((dnr_dtype)type);
    return (bytes + 255) & ~(size_t)255;
}

/* Makes room for the tensors and the largest workspace; says so and leaves *fits false where the device has none. */
static dnr_status take_scratch(dnri_cuda *d, size_t bytes, bool *fits)
{
    *fits = bytes <= d->scratch_bytes;
    if (*fits)
        return DNR_OK;
    dnri_cuda_mfree(d, d->scratch);
    d->scratch = NULL;
    d->scratch_bytes = 0;
    if (dnri_cuda_malloc(d, bytes, "timing convolutions", &d->scratch) == DNR_OK) {
        d->scratch_bytes = bytes;
        *fits = true;
        return DNR_OK;
    }
    if (dnr_last_error()->status != DNR_EMEM)
        return dnr_last_error()->status;
    d->scratch = NULL;
    dnri_log(DNR_LOG_WARN,
             "no memory (%.0f MiB) to time convolutions: cuDNN's first choice is taken",
             (double)bytes / 1048576);
    return DNR_OK;
}

static dnr_status time_once(dnri_cuda *d, const bench *b, float *us)
{
    cudaStream_t s = d->lane[DNRI_COMPUTE];
    float ms = 0;
    DNRI_CUDA(cudaEventRecord(d->clock[0], s), "timing a convolution");
    DNRI_CUDNN(cudnnBackendExecute(d->cudnn, b->plan, b->pack), "timing a convolution");
    DNRI_CUDA(cudaEventRecord(d->clock[1], s), "timing a convolution");
    DNR_TRY(dnri_cuda_sync(d, DNRI_COMPUTE));
    DNRI_CUDA(cudaEventElapsedTime(&ms, d->clock[0], d->clock[1]), "timing a convolution");
    *us = ms * 1000;
    return DNR_OK;
}

/* The shortest of a few runs; the first one loads the kernel and does not count. */
static dnr_status time_plan(dnri_cuda *d, const bench *b, float best, float *us)
{
    *us = FLT_MAX;
    for (int i = 0; i <= REPEATS; i++) {
        float t = 0;
        DNR_TRY(time_once(d, b, &t));
        if (i > 0 && t < *us)
            *us = t;
        if (i == 1 && t > 2 * best) /* no hope */
            break;
    }
    return DNR_OK;
}

static dnr_status time_candidates(dnri_cuda *d, const dnri_conv_problem *p,
                                  const dnri_conv_candidate *c, int n, int *best)
{
    bench b = {.x = up(p->n * p->h * p->w * p->c, p->type),
               .w = up(p->k * p->kernel * p->kernel * p->c, p->type),
               .y = up(p->n * p->p * p->q * p->k, p->type)};
    size_t tensors = b.x + b.w + b.y, workspace = 0;
    bool fits;
    *best = 0;
    for (int i = 0; i < n; i++)
        workspace = c[i].workspace > workspace ? c[i].workspace : workspace;
    DNR_TRY(take_scratch(d, tensors + workspace, &fits));
    if (!fits)
        return DNR_OK;
    for (int i = 0; i < 2; i++)
        if (!d->clock[i])
            DNRI_CUDA(cudaEventCreate(&d->clock[i]), "making a clock");
    /* random values: zeros would run faster than pictures do */
    char *x = d->scratch, *w = x + b.x, *y = w + b.w, *ws = y + b.y;
    size_t size = dnri_dtype_size((dnr_dtype)p->type);
    k_noise(d->lane[DNRI_COMPUTE], (int)p->type, d->sms, x, (int64_t)(tensors / size), 0.5f);
    DNRI_CUDA(cudaGetLastError(), "filling the tuner's memory");
    float fastest = FLT_MAX;
    for (int i = 0; i < n; i++) {
        float us = FLT_MAX;
        b.plan = c[i].plan;
        b.pack = NULL;
        dnr_status st = dnri_cudnn_pack(&b.pack, x, w, y, c[i].workspace ? ws : NULL);
        if (st == DNR_OK)
            st = time_plan(d, &b, fastest, &us);
        if (b.pack)
            (void)cudnnBackendDestroyDescriptor(b.pack);
        if (st !=
            DNR_OK) { /* not fit to run here; an error that persists shows with the next one */
            if (!d->said_refused)
                dnri_log(DNR_LOG_WARN, "%s fails to run and is left out: %s", c[i].impl,
                         dnr_last_error()->what);
            d->said_refused = true;
            continue;
        }
        if (us < fastest) {
            fastest = us;
            *best = i;
        }
    }
    if (fastest == FLT_MAX)
        return DNR_FAIL(DNR_EDEVICE, "set cudnn.benchmark=false, or use another cuDNN",
                        "none of cuDNN's %d plans runs: %s", n, dnr_last_error()->what);
    return DNR_OK;
}

static dnr_status choose(dnri_cuda *d, dnri_conv_plan *plan)
{
    const dnri_conv_problem *p = &plan->problem;
    bool timed = p->benchmark && !p->deterministic;
    dnri_conv_candidate c[CANDIDATES];
    dnri_cudnn_target t = {.said_refused = &d->said_refused};
    int n = 0, best = 0;
    DNR_TRY(dnri_cuda_cudnn(d, &t.handle));
    DNR_TRY(dnri_cudnn_candidates(plan->keep, &t, p, timed ? CANDIDATES : 1, c, &n));
    if (n > 1)
        DNR_TRY(time_candidates(d, p, c, n, &best));
    if (n == 0)
        return DNR_OK;
    plan->plan = c[best].plan;
    plan->workspace = c[best].workspace;
    memcpy(plan->impl, c[best].impl, sizeof plan->impl);
    return DNR_OK;
}

static void drop(dnri_conv_plan *plan)
{
    dnri_cudnn_keep_free(plan->keep);
    free(plan);
}

dnr_status dnri_cudnn_choose(dnri_cuda *d, const dnri_conv_problem *p, const dnri_conv_plan **out)
{
    for (dnri_conv_plan *q = d->plans; q; q = q->next)
        if (memcmp(&q->problem, p, sizeof *p) == 0) {
            *out = q;
            return DNR_OK;
        }
    dnri_conv_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return DNR_FAIL_NOMEM();
    plan->problem = *p;
    plan->keep = dnri_cudnn_keep_new();
    dnr_status st = plan->keep ? choose(d, plan) : DNR_FAIL_NOMEM();
    if (st != DNR_OK) {
        drop(plan);
        return st;
    }
    plan->next = d->plans;
    *out = d->plans = plan;
    return DNR_OK;
}

void dnri_cudnn_drop_plans(dnri_cuda *d)
{
    while (d->plans) {
        dnri_conv_plan *next = d->plans->next;
        drop(d->plans);
        d->plans = next;
    }
}
