/* tune.c: which of cuDNN's plans a convolution takes: the first, or the fastest of the first few. Times what
 * competes with them, too. */
#include "convplan.h"
#include "../choices.h"
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CANDIDATES = DNRI_CANDIDATES, REPEATS = 3 };
/* What takes less, in microseconds, is timed so many times in one captured run: alone it would be lost in its launch. */
enum { BRIEF = 40, IN_A_ROW = 20 };

/* An engine that may sum in less than fp32 has to agree with one that does not as far as their rounded
 * results can: two roundings to fp16 differ by 4e-4 (random values, relative norm), to bf16 by 8 times that. */
static double tolerance(int64_t type)
{
    return type == DNR_BF16 ? 5e-3 : 6e-4;
}

/* The tuner's memory: x, w, y, what an epilogue adds, the output of a plan that is beyond doubt, partial sums, statistics, workspace. */
typedef struct bench {
    dnri_cuda *d;
    const dnri_conv_problem *p;
    char *x, *w, *y, *residual, *bias, *reference, *part, *sums, *workspace;
    size_t tensors; /* bytes of x … bias */
    char *output;   /* one of them */
    int64_t outputs;
    const dnri_conv_candidate *c;
    cudnnBackendDescriptor_t pack;
} bench;

static size_t up(int64_t elements, int64_t type)
{
    size_t bytes = (size_t)elements * dnri_dtype_size((dnr_dtype)type);
    return (bytes + 255) & ~(size_t)255;
}

/* Makes room; says so and leaves *fits false where the device has none. */
static dnr_status take_scratch(dnri_cuda *d, size_t bytes, bool *fits)
{
    *fits = bytes <= d->scratch_bytes;
    if (*fits)
        return DNR_OK;
    dnri_cuda_mfree(d, d->scratch);
    d->scratch = NULL;
    d->scratch_bytes = 0;
    dnr_status st = dnri_cuda_malloc(d, bytes, "timing convolutions", &d->scratch);
    if (st == DNR_OK) {
        d->scratch_bytes = bytes;
        *fits = true;
        return DNR_OK;
    }
    d->scratch = NULL;
    if (st != DNR_EMEM)
        return st;
    dnri_log(DNR_LOG_WARN,
             "no memory (%.0f MiB) to time convolutions: cuDNN's first choice is taken",
             (double)bytes / 1048576);
    return DNR_OK;
}

static dnr_status set_up(bench *b, size_t workspace, bool *fits)
{
    const dnri_conv_problem *p = b->p;
    int64_t nx = p->n * p->h * p->w * p->c, nw = p->k * p->kernel * p->kernel * p->c,
            ny = p->n * p->p * p->q * p->k;
    size_t x = up(nx, p->type), w = up(nw, p->type), y = up(ny, p->type);
    size_t part = K_DISTANCE_BLOCKS * 2 * sizeof(double);
    size_t sums = 2 * up(p->k, DNR_F32);
    size_t residual = p->residual ? y : 0, bias = p->kind == DNRI_FPROP_ACT ? up(p->k, p->type) : 0;
    size_t output = p->kind == DNRI_DGRAD ? x : p->kind == DNRI_WGRAD ? w : y;
    b->tensors = x + w + y + residual + bias;
    DNR_TRY(take_scratch(b->d, b->tensors + output + part + sums + workspace, fits));
    if (!*fits)
        return DNR_OK;
    b->x = b->d->scratch;
    b->w = b->x + x;
    b->y = b->w + w;
    b->residual = b->y + y;
    b->bias = b->residual + residual;
    b->reference = b->bias + bias;
    b->part = b->reference + output;
    b->sums = b->part + part;
    b->workspace = b->sums + sums;
    b->output = p->kind == DNRI_DGRAD ? b->x : p->kind == DNRI_WGRAD ? b->w : b->y;
    b->outputs = p->kind == DNRI_DGRAD ? nx : p->kind == DNRI_WGRAD ? nw : ny;
    /* random values: zeros would run faster than pictures do */
    k_noise(b->d->lane[DNRI_COMPUTE], (int)p->type, b->d->sms, b->x,
            (int64_t)(b->tensors / dnri_dtype_size((dnr_dtype)p->type)), 0.5f);
    DNRI_CUDA(cudaGetLastError(), "filling the tuner's memory");
    return DNR_OK;
}

static dnr_status clock_start(dnri_cuda *d)
{
    for (int i = 0; i < 2; i++)
        if (!d->clock[i])
            DNRI_CUDA(cudaEventCreate(&d->clock[i]), "making a clock");
    DNRI_CUDA(cudaEventRecord(d->clock[0], d->lane[DNRI_COMPUTE]), "timing a candidate");
    return DNR_OK;
}

static dnr_status clock_stop(dnri_cuda *d, float *us)
{
    float ms = 0;
    DNRI_CUDA(cudaEventRecord(d->clock[1], d->lane[DNRI_COMPUTE]), "timing a candidate");
    DNR_TRY(dnri_cuda_sync(d, DNRI_COMPUTE));
    DNRI_CUDA(cudaEventElapsedTime(&ms, d->clock[0], d->clock[1]), "timing a candidate");
    *us = ms * 1000;
    return DNR_OK;
}

typedef dnr_status (*work_fn)(void *ctx); /* enqueues */

static dnr_status once(dnri_cuda *d, work_fn work, void *ctx, float *us)
{
    DNR_TRY(clock_start(d));
    DNR_TRY(work(ctx));
    return clock_stop(d, us);
}

typedef struct captured {
    dnri_cuda *d;
    void *program;
} captured;

static dnr_status replay_program(void *ctx)
{
    const captured *r = ctx;
    return r->d->base.be->replay(&r->d->base, r->program);
}

static dnr_status in_a_row(dnri_cuda *d, work_fn work, void *ctx, float *us)
{
    const dnri_backend *be = d->base.be;
    captured r = {d, NULL};
    DNR_TRY(be->capture_begin(&d->base));
    dnr_status st = DNR_OK;
    for (int i = 0; i < IN_A_ROW && st == DNR_OK; i++)
        st = work(ctx);
    const dnr_status end = be->capture_end(&d->base, &r.program);
    st = st == DNR_OK ? end : st;
    for (int i = 0; i <= REPEATS && st == DNR_OK; i++) {
        float t;
        st = once(d, replay_program, &r, &t);
        if (st == DNR_OK && i > 0 && t / IN_A_ROW < *us)
            *us = t / IN_A_ROW;
    }
    if (r.program)
        be->capture_drop(&d->base, r.program);
    return st;
}

/* The shortest of a few runs of what has run before; fewer where it cannot be the best. */
static dnr_status shortest_of(dnri_cuda *d, work_fn work, void *ctx, float best, float *us)
{
    float t = 0;
    *us = FLT_MAX;
    for (int i = 0; i < REPEATS; i++) {
        DNR_TRY(once(d, work, ctx, &t));
        if (t < BRIEF)
            return in_a_row(d, work, ctx, us);
        *us = t < *us ? t : *us;
        if (t > 2 * best) /* no hope */
            break;
    }
    return DNR_OK;
}

static dnr_status convolve(void *ctx)
{
    const bench *b = ctx;
    DNRI_CUDNN(cudnnBackendExecute(b->d->cudnn, b->c->plan, b->pack), "timing a convolution");
    return DNR_OK;
}

/* dnri_cuda_time's work */
typedef struct outside {
    dnri_cuda *d;
    void (*work)(void *ctx, cudaStream_t s, void *memory);
    void *ctx;
} outside;

static dnr_status run_outside(void *ctx)
{
    const outside *o = ctx;
    o->work(o->ctx, o->d->lane[DNRI_COMPUTE], o->d->scratch);
    DNRI_CUDA(cudaGetLastError(), "timing a candidate");
    return DNR_OK;
}

dnr_status dnri_cuda_time(dnri_cuda *d, int type, size_t bytes,
                          void (*work)(void *ctx, cudaStream_t s, void *memory), void *ctx,
                          float *us)
{
    cudaStream_t s = d->lane[DNRI_COMPUTE];
    bool fits;
    *us = FLT_MAX;
    DNR_TRY(take_scratch(d, bytes, &fits));
    if (!fits)
        return DNR_OK;
    k_noise(s, type, d->sms, d->scratch, (int64_t)(bytes / dnri_dtype_size((dnr_dtype)type)), 0.5f);
    outside o = {d, work, ctx};
    DNR_TRY(run_outside(&o)); /* loads the kernels */
    return shortest_of(d, run_outside, &o, FLT_MAX, us);
}

/* Relative distance of the output from the reference. */
static dnr_status distance(const bench *b, double *error)
{
    double part[K_DISTANCE_BLOCKS][2], diff = 0, norm = 0;
    k_distance(b->d->lane[DNRI_COMPUTE], (int)b->p->type, b->output, b->reference, b->outputs,
               (double(*)[2])b->part);
    DNRI_CUDA(cudaGetLastError(), "comparing two convolutions");
    DNR_TRY(dnri_copy_now(&b->d->base, part, b->part, sizeof part));
    for (int i = 0; i < K_DISTANCE_BLOCKS; i++) {
        diff += part[i][0];
        norm += part[i][1];
    }
    *error = sqrt(diff / norm);
    return DNR_OK;
}

/* The first run loads the kernel and does not count. A plan in doubt is held against the reference. */
static dnr_status time_plan(bench *b, float best, float *us)
{
    double error = 0;
    float t = 0;
    DNR_TRY(once(b->d, convolve, b, &t));
    if (b->c->doubtful)
        DNR_TRY(distance(b, &error));
    if (!(error <= tolerance(b->p->type))) {
        dnri_log(DNR_LOG_INFO, "%s is left out: it is off by %.1e", b->c->impl, error);
        return DNR_OK;
    }
    return shortest_of(b->d, convolve, b, best, us);
}

static dnr_status with_pack(bench *b, const dnri_conv_candidate *c, float best, float *us)
{
    b->c = c;
    b->pack = NULL;
    dnri_conv_at at = {
        .x = b->x, .w = b->w, .y = b->y, .workspace = c->workspace ? b->workspace : NULL};
    if (b->p->kind == DNRI_FPROP_STATS) {
        at.sum = b->sums;
        at.sqsum = b->sums + up(b->p->k, DNR_F32);
    }
    if (b->p->kind == DNRI_FPROP_ACT) {
        at.bias = b->bias;
        at.residual = b->p->residual ? b->residual : NULL;
    }
    dnr_status st = dnri_cudnn_pack(&b->pack, &at);
    if (st == DNR_OK)
        st = time_plan(b, best, us);
    if (b->pack)
        (void)cudnnBackendDestroyDescriptor(b->pack);
    return st;
}

/* Times the candidates, those beyond doubt first: the output of one of them is the reference of the others. */
static dnr_status fastest(dnri_cuda *d, const dnri_conv_problem *p, dnri_conv_candidate *c, int n,
                          int *best, float *shortest)
{
    bench b = {.d = d, .p = p};
    size_t workspace = 0;
    bool fits;
    for (int i = 0; i < n; i++) {
        workspace = c[i].workspace > workspace ? c[i].workspace : workspace;
        c[i].us = FLT_MAX;
    }
    DNR_TRY(set_up(&b, workspace, &fits));
    if (!fits)
        return DNR_OK;
    for (int doubtful = 0; doubtful < 2; doubtful++) {
        for (int i = 0; i < n; i++) {
            float us = FLT_MAX;
            if (c[i].doubtful != doubtful)
                continue;
            if (with_pack(&b, &c[i], *shortest, &us) != DNR_OK) {
                if (!d->said_refused) /* an error of the device itself shows again soon */
                    dnri_log(DNR_LOG_WARN, "%s fails to run and is left out: %s", c[i].impl,
                             dnr_last_error()->what);
                d->said_refused = true;
            } else if (us < *shortest) {
                *shortest = us;
                *best = i;
            }
            c[i].us = us;
        }
        if (*shortest == FLT_MAX && dnri_conv_splits(p)) {
            *best = n;
            return DNR_OK;
        }
        if (*shortest == FLT_MAX)
            return DNR_FAIL(DNR_EDEVICE, "set cudnn.benchmark=false, or use another cuDNN",
                            "none of cuDNN's plans runs: %s", dnr_last_error()->what);
        if (!doubtful)
            DNRI_CUDA(cudaMemcpyAsync(b.reference, b.output,
                                      (size_t)b.outputs * dnri_dtype_size((dnr_dtype)p->type),
                                      cudaMemcpyDeviceToDevice, d->lane[DNRI_COMPUTE]),
                      "keeping a reference");
    }
    return DNR_OK;
}

/* The first candidate beyond doubt; n where there is none. */
static int first_sure(const dnri_conv_candidate *c, int n)
{
    int i = 0;
    while (i < n && c[i].doubtful)
        i++;
    return i;
}

/* ---------------------------------------------------------------- earlier choices */

/* "fprop fp16 n256 h56 …": all of a timed problem. */
static void key_of(const dnri_conv_problem *p, char key[192])
{
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad", "fprop+stats", "fprop+bias"};
    snprintf(key, 192,
             "%s%s%s %s%s n%lld h%lld w%lld c%lld p%lld q%lld k%lld kernel%lld stride%lld pad%lld "
             "cap%lld",
             kinds[p->kind], p->residual ? "+residual" : "", p->relu ? "+relu" : "",
             p->tf32 ? "tf32 " : "", dnri_dtype_name((dnr_dtype)p->type), (long long)p->n,
             (long long)p->h, (long long)p->w, (long long)p->c, (long long)p->p, (long long)p->q,
             (long long)p->k, (long long)p->kernel, (long long)p->stride, (long long)p->pad,
             (long long)p->workspace_cap);
}

/* "engine 67 us 405.9 verdict 0 knobs 2=4 13=0" */
dnr_status dnri_cudnn_remember(dnri_cuda *d, const dnri_conv_plan *plan)
{
    char key[192], text[128 + 44 * DNRI_KNOBS];
    const dnri_cudnn_config *c = &plan->config;
    if (!d->choices || !plan->plan || plan->us == FLT_MAX || c->engine < 0 || c->n < 0)
        return DNR_OK;
    key_of(&plan->problem, key);
    int len = snprintf(text, sizeof text, "engine %lld us %.3f verdict %d knobs",
                       (long long)c->engine, (double)plan->us, (int)plan->verdict);
    for (int i = 0; i < c->n; i++)
        len += snprintf(text + len, sizeof text - (size_t)len, " %lld=%lld", (long long)c->type[i],
                        (long long)c->value[i]);
    return dnri_choices_set(d->choices, key, text);
}

/* False where the text is not what dnri_cudnn_remember writes. */
static bool parse_choice(const char *text, dnri_conv_plan *plan, dnri_cudnn_config *c)
{
    long long engine, type, value;
    int verdict, end = 0;
    float us;
    *c = (dnri_cudnn_config){0};
    if (sscanf(text, "engine %lld us %f verdict %d knobs%n", &engine, &us, &verdict, &end) != 3 ||
        !end || engine < 0 || !(us > 0) || verdict < DNRI_UNJUDGED || verdict > DNRI_OWN)
        return false;
    for (text += end; *text; text += end) {
        end = 0;
        if (c->n == DNRI_KNOBS || sscanf(text, " %lld=%lld%n", &type, &value, &end) != 2 || !end)
            return false;
        c->type[c->n] = type;
        c->value[c->n++] = value;
    }
    c->engine = engine;
    plan->us = us;
    plan->verdict = verdict;
    return true;
}

static void take(dnri_conv_plan *plan, const dnri_conv_candidate *c)
{
    plan->plan = c->plan;
    plan->workspace = c->workspace;
    plan->config = c->config;
    memcpy(plan->impl, c->impl, sizeof plan->impl);
}

/* The plan that an earlier start timed; none where there was none, or cuDNN no longer makes it. */
static dnr_status recall(dnri_cuda *d, const dnri_cudnn_target *t, dnri_conv_plan *plan)
{
    char key[192];
    dnri_cudnn_config config;
    dnri_conv_candidate c = {0};
    key_of(&plan->problem, key);
    const char *text = d->choices ? dnri_choices_get(d->choices, key) : NULL;
    if (!text)
        return DNR_OK;
    if (parse_choice(text, plan, &config))
        DNR_TRY(dnri_cudnn_rebuild(plan->keep, t, &plan->problem, &config, &c));
    if (c.plan) {
        take(plan, &c);
        return DNR_OK;
    }
    dnri_log(DNR_LOG_INFO, "the choice kept for %s no longer serves: timed anew", key);
    plan->verdict = DNRI_UNJUDGED;
    return DNR_OK;
}

static void keep_tried(dnri_conv_plan *plan, const dnri_conv_candidate *c, int n)
{
    plan->n_tried = n;
    for (int i = 0; i < n; i++) {
        memcpy(plan->impls[i], c[i].impl, sizeof plan->impls[i]);
        plan->tried[i] = (dnr_tune_way){.us = c[i].us < FLT_MAX ? (double)c[i].us : -1,
                                        .workspace = c[i].workspace};
    }
}

static dnr_status choose(dnri_cuda *d, dnri_conv_plan *plan)
{
    dnri_conv_problem p = plan->problem;
    bool timed = p.benchmark && !p.deterministic;
    dnri_conv_candidate c[CANDIDATES];
    dnri_cudnn_target t = {.device = d->paper, .said_refused = &d->said_refused};
    int n = 0;
    timed = timed && !d->paper;
    if (!d->paper)
        DNR_TRY(dnri_cuda_cudnn(d, &t.handle));
    if (timed && p.benchmark != DNRI_ANEW)
        DNR_TRY(recall(d, &t, plan));
    if (plan->plan)
        return DNR_OK;
    DNR_TRY(dnri_cudnn_candidates(plan->keep, &t, &p, timed ? CANDIDATES : 1, c, &n));
    if (first_sure(c, n) == n) { /* all in doubt: ask again for others */
        p.benchmark = 0;
        DNR_TRY(dnri_cudnn_candidates(plan->keep, &t, &p, timed ? CANDIDATES : 1, c, &n));
    }
    plan->us = FLT_MAX;
    if (n == 0)
        return DNR_OK;
    int best = first_sure(c, n);
    if (timed)
        DNR_TRY(fastest(d, &p, c, n, &best, &plan->us));
    keep_tried(plan, c, timed ? n : 0);
    if (best == n)
        return DNR_OK;
    take(plan, &c[best]);
    return dnri_cudnn_remember(d, plan);
}

static void drop(dnri_conv_plan *plan)
{
    dnri_cudnn_keep_free(plan->keep);
    free(plan->pin);
    free(plan);
}

dnr_status dnri_cudnn_choose(dnri_cuda *d, const dnri_conv_problem *p, dnri_conv_plan **out)
{
    for (dnri_conv_plan *q = d->plans; q; q = q->next)
        if (!q->pin && memcmp(&q->problem, p, sizeof *p) == 0) {
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
