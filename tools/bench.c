/* bench.c: times steps on one batch that lies in memory. */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------- the process */

/* Seconds since the process began; to a hundredth. */
static double process_age(void)
{
    char text[1024] = "";
    FILE *f = fopen("/proc/self/stat", "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    char *p = strrchr(text, ')'); /* the name before it may hold anything */
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    struct timespec now;
    if (!p || clock_gettime(CLOCK_BOOTTIME, &now) != 0)
        return NAN;
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec -
           strtod(p, NULL) / (double)sysconf(_SC_CLK_TCK);
}

static size_t resident(void)
{
    long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%*s %lld", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t peak_resident(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (size_t)u.ru_maxrss * 1024;
}

static bool on_cpu(const session *s)
{
    return !strncmp(dnr_device_name(s->dev), "cpu", 3);
}

/* ---------------------------------------------------------------- the batch */

/* Noise, the same bytes on any machine (splitmix64). */
static uint64_t noise(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static size_t pixels_of(const session *s)
{
    size_t side = (size_t)s->cfg.data.image;
    return (size_t)s->cfg.train.batch * side * side * 3;
}

static void fill(const session *s, dnr_batch *b)
{
    uint64_t state = (uint64_t)s->cfg.train.seed;
    for (int64_t i = 0; i < s->cfg.train.batch; i++)
        b->labels[i] = (int32_t)(noise(&state) % (uint64_t)s->cfg.model.classes);
    for (size_t i = 0; i < pixels_of(s); i++)
        b->pixels[i] = (uint8_t)(noise(&state) >> 56);
    b->count = s->cfg.train.batch;
}

/* For compare: the first weights, and the batch: labels int32, pixels uint8 [batch, image, image, RGB]. */
static dnr_status hand_over(const bench *b, const session *s, const dnr_batch *batch,
                            dnr_error *err)
{
    char path[CFG_TEXT];
    dnr_status st;
    snprintf(path, sizeof path, "%s/initial.safetensors", b->exchange);
    TOOL_LIB(st, dnr_trainer_save(s->trainer, path));
    snprintf(path, sizeof path, "%s/batch.bin", b->exchange);
    FILE *f = fopen(path, "w");
    size_t n = (size_t)s->cfg.train.batch;
    bool good = f && fwrite(batch->labels, sizeof *batch->labels, n, f) == n &&
                fwrite(batch->pixels, 1, pixels_of(s), f) == pixels_of(s);
    if (f && fclose(f) != 0)
        good = false;
    if (!good) {
        st = tool_fail(err, DNR_EDISK, "bench", "cannot write %.400s: %s", path, strerror(errno));
        tool_remedy(err, "free some space, or set TMPDIR to a folder that you may write to");
    }
out:
    return st;
}

/* ---------------------------------------------------------------- runs */

typedef struct runner {
    session *s;
    const bench *b;
    dnr_batch *batches; /* [accumulate], all of the same memory */
    float *logits;
    dnr_metrics m;
} runner;

/* Enqueues one run; with `wait` also waits for it. */
static dnr_status run(runner *r, bool wait)
{
    dnr_trainer *t = r->s->trainer;
    if (r->b->infer)
        return dnr_trainer_predict(t, r->batches, wait ? r->logits : NULL);
    dnr_status st = dnr_trainer_step_on(t, r->batches, r->s->cfg.train.accumulate, &r->m);
    return st == DNR_OK && wait ? dnr_trainer_finish(t, &r->m) : st;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dnr_status time_runs(bench *b, runner *r, dnr_error *err)
{
    dnr_status st = DNR_OK;
    for (int64_t i = 0; i < b->warmup; i++) {
        TOOL_LIB(st, run(r, true));
        if (i == 0)
            b->start_s = process_age();
        b->loss[i] = r->m.loss;
    }
    for (int64_t i = 0; i < b->runs; i++) {
        double begun = tool_now();
        TOOL_LIB(st, run(r, true));
        b->ms[i] = 1e3 * (tool_now() - begun);
    }
    double begun = tool_now();
    for (int64_t i = 0; i < b->runs; i++)
        TOOL_LIB(st, run(r, i == b->runs - 1));
    b->images_per_s = (double)b->runs *
                      (double)(b->infer ? r->s->cfg.train.batch : r->s->global_batch) /
                      (tool_now() - begun);
    qsort(b->ms, (size_t)b->runs, sizeof *b->ms, by_value);
out:
    return st;
}

/* The plan says it; the trainer's getter leaves the staging out. */
static dnr_status planned(bench *b, const session *s, dnr_error *err)
{
    char *text = NULL;
    size_t size = 0;
    dnr_status st = DNR_OK;
    json_t *plan = NULL;
    FILE *f = open_memstream(&text, &size);
    if (f) {
        st = dnr_trainer_explain(s->trainer, DNR_EXPLAIN_JSON, f);
        fclose(f);
        if (st != DNR_OK)
            tool_lib_error(err, NULL, NULL);
        else
            plan = json_loadb(text, size, 0, NULL);
    }
    const json_t *m = json_object_get(plan, "memory");
    b->arena = (size_t)json_integer_value(json_object_get(m, "arena"));
    b->store = (size_t)json_integer_value(json_object_get(m, "store"));
    b->staging = (size_t)json_integer_value(json_object_get(m, "staging"));
    json_decref(plan);
    free(text);
    return st;
}

static dnr_status no_memory(dnr_error *err)
{
    tool_fail(err, DNR_EMEM, "bench", "out of host memory");
    return tool_remedy(err, "lower --runs or --warmup, or free some memory");
}

static dnr_status measure_on(bench *b, session *s, dnr_batch *batch, dnr_error *err)
{
    dnr_status st;
    runner r = {.s = s, .b = b};
    int64_t n = s->cfg.train.accumulate;
    b->ms = calloc((size_t)b->runs, sizeof *b->ms);
    b->loss = calloc((size_t)b->warmup, sizeof *b->loss);
    r.batches = malloc((size_t)n * sizeof *r.batches);
    r.logits = malloc((size_t)s->cfg.train.batch * (size_t)s->cfg.model.classes * sizeof *r.logits);
    if (!b->ms || !b->loss || !r.batches || !r.logits) {
        st = no_memory(err);
        goto out;
    }
    fill(s, batch);
    for (int64_t i = 0; i < n; i++)
        r.batches[i] = *batch;
    if (b->exchange)
        TOOL_TRY(st, hand_over(b, s, batch, err));
    TOOL_TRY(st, time_runs(b, &r, err));
    TOOL_TRY(st, planned(b, s, err));
out:
    free(r.batches);
    free(r.logits);
    return st;
}

dnr_status bench_measure(bench *b, session *s, dnr_error *err)
{
    dnr_batch batch = {0};
    size_t free_before = 0, free_after = 0, total = 0, before;
    dnr_status st;
    /* Every block begins as the identity: a fresh ResNet-50 is so ill-conditioned that rounding alone moves the loss of
     * its second step by percents, in PyTorch too. */
    s->cfg.model.zero_init_residual = true;
    s->cfg.optim.schedule = 0; /* constant */
    s->cfg.optim.warmup = s->cfg.optim.warmup_factor = 0;
    /* first, so that what is taken after it is the model's */
    TOOL_LIB(st, dnr_device_open(s->cfg.device, &s->dev));
    TOOL_LIB(st, dnr_device_memory(s->dev, &free_before, &total));
    before = resident();
    TOOL_TRY(st, session_open(s, b->infer ? SESSION_INFER : 0, err));
    TOOL_LIB(st, dnr_batch_new(s->dev, s->cfg.train.batch, (int)s->cfg.data.image, &batch));
    TOOL_TRY(st, measure_on(b, s, &batch, err));
    TOOL_LIB(st, dnr_device_memory(s->dev, &free_after, &total));
    b->peak_rss = peak_resident();
    if (on_cpu(s)) {
        b->measured = b->peak_rss > before ? b->peak_rss - before : 0;
    } else {
        b->measured = free_before > free_after ? free_before - free_after : 0;
        b->used = total - free_after;
    }
out:
    if (s->dev)
        dnr_batch_free(s->dev, &batch);
    return st;
}

void bench_free(bench *b)
{
    free(b->ms);
    free(b->loss);
    *b = (bench){0};
}

double bench_percentile(const bench *b, double p)
{
    int64_t rank = (int64_t)ceil(p / 100 * (double)b->runs) - 1;
    return b->ms[rank < 0 ? 0 : rank];
}

double bench_spread(const bench *b)
{
    return (bench_percentile(b, 75) - bench_percentile(b, 25)) / bench_percentile(b, 50);
}
