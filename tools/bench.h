/* bench.h: what `dnnrun bench` measures, and what it makes of it. */
#ifndef BENCH_H
#define BENCH_H

#include "session.h"

struct json_t;

typedef struct bench {
    bool infer;
    int64_t warmup, runs;
    const char *exchange; /* NULL, or where bench_compare.c wants the first weights and the batch */

    double *ms; /* [runs], rising: from the call to the end of the work, one run after the other */
    double *loss;                 /* [warmup] of a training's first steps */
    double images_per_s;          /* over `runs` runs, enqueued without waiting in between */
    double start_s;               /* from the start of the process to the end of the first run */
    size_t arena, store, staging; /* planned bytes */
    size_t
        measured; /* device memory taken, as the driver tells; on the CPU growth of the process's peak */
    size_t peak_rss; /* of the process */
    size_t used;     /* of a GPU, by all there is on it; 0 on the CPU */
} bench;

/* Opens the session for what s->cfg describes, at a constant learning rate, and measures. */
dnr_status bench_measure(bench *b, session *s, dnr_error *err);
void bench_free(bench *b);
double bench_percentile(const bench *b, double p); /* milliseconds; nearest rank */
double bench_spread(const bench *b);               /* interquartile range over the median */

struct json_t *bench_json(const bench *b, const session *s);
void bench_print(const bench *b, const session *s);
/* Figures from a file of --json; the caller's to release. */
dnr_status bench_baseline(const char *file, struct json_t **then, dnr_error *err);
/* Fails where the figures of `now` are worse than those `then`, from `file`, by more than `tolerance`. */
dnr_status bench_against(const struct json_t *now, const struct json_t *then, const char *file,
                         double tolerance, dnr_error *err);

/* dnnrun bench allreduce */
dnr_status bench_allreduce(const tool_args *a, dnr_error *err);
/* dnnrun bench compare */
dnr_status bench_compare(const tool_args *a, dnr_error *err);

#endif
