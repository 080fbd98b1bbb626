/* bench_report.c: the figures of a benchmark: printed, as JSON, against earlier ones. */
#include "bench.h"
#include "rundir.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

static json_t *reals(const double *v, int64_t n)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, rundir_real(v[i]));
    return list;
}

/* What a peer must do alike. */
static json_t *settings(const session *s)
{
    const cfg *c = &s->cfg;
    static const char *const stems[] = {"auto", "imagenet", "cifar"};
    json_t *j =
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:s, s:s, s:s}", "model", c->model.name, "stem",
                  stems[c->model.stem], "classes", (json_int_t)c->model.classes, "image",
                  (json_int_t)c->data.image, "batch", (json_int_t)c->train.batch, "accumulate",
                  (json_int_t)c->train.accumulate, "precision",
                  dnr_precision_name(dnr_trainer_precision(s->trainer)), "device",
                  dnr_device_name(s->dev), "device_description", dnr_device_description(s->dev));
    json_t *o = json_pack(
        "{s:f, s:f, s:b, s:f, s:b, s:f, s:f, s:o, s:o}", "lr", s->lr, "momentum", c->optim.momentum,
        "nesterov", c->optim.nesterov, "weight_decay", c->optim.weight_decay, "decay_norm_bias",
        c->optim.decay_norm_bias, "clip_norm", c->train.clip_norm, "label_smoothing",
        c->train.label_smoothing, "mean", reals(c->data.mean.v, 3), "std", reals(c->data.std.v, 3));
    json_object_set_new(j, "optim", o);
    return j;
}

json_t *bench_json(const bench *b, const session *s)
{
    double mean = 0;
    for (int64_t i = 0; i < b->runs; i++)
        mean += b->ms[i] / (double)b->runs;
    json_t *j =
        json_pack("{s:s, s:s, s:o, s:I, s:I, s:f, s:f, s:o}", "bench", b->infer ? "infer" : "train",
                  "dnnrun", dnr_version(), "case", settings(s), "warmup", (json_int_t)b->warmup,
                  "runs", (json_int_t)b->runs, "images_per_s", b->images_per_s, "ms_per_run",
                  1e3 * (double)(b->infer ? s->cfg.train.batch : s->global_batch) / b->images_per_s,
                  "start_s", rundir_real(b->start_s));
    json_object_set_new(j, "latency_ms",
                        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "median",
                                  bench_percentile(b, 50), "p95", bench_percentile(b, 95), "p99",
                                  bench_percentile(b, 99), "mean", mean, "min", b->ms[0], "max",
                                  b->ms[b->runs - 1], "spread", bench_spread(b)));
    json_object_set_new(j, "memory",
                        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "planned",
                                  (json_int_t)(b->arena + b->store + b->staging), "arena",
                                  (json_int_t)b->arena, "store", (json_int_t)b->store, "staging",
                                  (json_int_t)b->staging, "measured", (json_int_t)b->measured,
                                  "process_peak", (json_int_t)b->peak_rss, "device_used",
                                  (json_int_t)b->used));
    if (!b->infer)
        json_object_set_new(j, "loss", reals(b->loss, b->warmup));
    return j;
}

void bench_print(const bench *b, const session *s)
{
    const cfg *c = &s->cfg;
    char planned[32], measured[32], peak[32], n[32], accumulate[32] = "";
    const char *one = b->infer ? "forward pass" : "training step";
    bool cpu = b->used == 0;
    if (c->train.accumulate > 1 && !b->infer)
        snprintf(accumulate, sizeof accumulate, " x %lld", (long long)c->train.accumulate);
    printf("dnnrun %s on %s: %s\n", dnr_version(), dnr_device_name(s->dev),
           dnr_device_description(s->dev));
    printf("%s of %s, %s, batch %lld%s of %lld x %lld pixels; %lld to warm up, %lld runs\n", one,
           c->model.name, dnr_precision_name(dnr_trainer_precision(s->trainer)),
           (long long)c->train.batch, accumulate, (long long)c->data.image,
           (long long)c->data.image, (long long)b->warmup, (long long)b->runs);
    printf("latency     %.3f ms median, %.3f p95, %.3f p99, spread %.1f %%; waits after each run\n",
           bench_percentile(b, 50), bench_percentile(b, 95), bench_percentile(b, 99),
           100 * bench_spread(b));
    printf("throughput  %s images/s, %.3f ms a run; waits once, at the end\n",
           tool_thousands((int64_t)b->images_per_s, n),
           1e3 * (double)(b->infer ? c->train.batch : s->global_batch) / b->images_per_s);
    printf("memory      %s planned, %s measured%s; the process's peak is %s\n",
           tool_bytes((double)(b->arena + b->store + b->staging), planned),
           tool_bytes((double)b->measured, measured), cpu ? "" : " on the device",
           tool_bytes((double)b->peak_rss, peak));
    printf("start       %.2f s from the start of the process to the end of the first run\n",
           b->start_s);
    if (!b->infer)
        printf("loss        %.4f at step 1, %.4f at step %lld, on the same batch each time\n",
               b->loss[0], b->loss[b->warmup - 1], (long long)b->warmup);
}

/* ---------------------------------------------------------------- baselines */

static double number_at(const json_t *j, const char *a, const char *b)
{
    const json_t *v = json_object_get(j, a);
    v = b ? json_object_get(v, b) : v;
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* The same command, model and machine? What differs goes to `what`. */
static bool same_case(const json_t *now, const json_t *then, char what[256])
{
    const json_t *a = json_object_get(now, "case"), *b = json_object_get(then, "case");
    const char *key;
    json_t *v;
    snprintf(what, 256, "bench");
    if (!json_equal(json_object_get(now, "bench"), json_object_get(then, "bench")))
        return false;
    json_object_foreach((json_t *)a, key, v)
    {
        char *x = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(12));
        char *y = json_dumps(json_object_get(b, key), JSON_ENCODE_ANY | JSON_REAL_PRECISION(12));
        bool same = x && y && !strcmp(x, y);
        if (!same)
            snprintf(what, 256, "%s is %.90s, not %.90s", key, x ? x : "?", y ? y : "missing");
        free(x);
        free(y);
        if (!same)
            return false;
    }
    return true;
}

dnr_status bench_baseline(const char *file, json_t **then, dnr_error *err)
{
    json_error_t e;
    if ((*then = json_load_file(file, 0, &e)))
        return DNR_OK;
    tool_fail(err, DNR_EUSAGE, "--baseline", "%.300s: %s", file, e.text);
    return tool_remedy(err, "make one with dnnrun bench … --json > %.200s", file);
}

dnr_status bench_against(const json_t *now, const json_t *then, const char *file, double tolerance,
                         dnr_error *err)
{
    static const struct {
        const char *name, *a, *b;
        bool more_is_better;
    } figures[] = {
        {"latency (median)", "latency_ms", "median", false},
        {"throughput", "images_per_s", NULL, true},
        {"planned memory", "memory", "planned", false},
    };
    char what[256], worse[256] = "";
    if (!same_case(now, then, what)) {
        tool_fail(err, DNR_EUSAGE, "--baseline", "%.300s is of another case: %s", file, what);
        return tool_remedy(err, "compare like with like, on the same machine, or make a new one "
                                "with --json");
    }
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
        double x = number_at(now, figures[i].a, figures[i].b),
               y = number_at(then, figures[i].a, figures[i].b);
        double loss = figures[i].more_is_better ? y / x - 1 : x / y - 1;
        if (!(loss <= tolerance)) { /* also where one of them is no number */
            size_t at = strlen(worse);
            snprintf(worse + at, sizeof worse - at, "%s%s %.6g, was %.6g (%+.1f %%)",
                     at ? "; " : "", figures[i].name, x, y, 100 * (x / y - 1));
        }
    }
    if (!*worse)
        return DNR_OK;
    tool_fail(err, DNR_EFAIL, "--baseline", "worse than %.200s by more than %g %%: %s", file,
              100 * tolerance, worse);
    return tool_remedy(err, "see that the machine is idle and run it again; dnnrun plan --measure "
                            "shows where the time goes");
}
