/* profile.c: a Chrome trace. Launches run one by one rather than from the captured program, so that each can be
 * stamped; on a device whose runs end before they return, the host's clock stamps them. */
#include "profile.h"

#include "plan_internal.h"
#include "wholefile.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HOST = DNRI_LANES }; /* a row of the trace, beside the lanes */

/* A launch of the step at hand. */
typedef struct launch {
    const dnri_plan *plan;
    int op;
    double begin, end; /* host's clock, where that stamps */
} launch;

struct dnri_profile {
    dnr_device *dev;
    char *path;
    int64_t left, taken; /* steps */
    double origin;       /* the host's clock at stamp 0 */
    launch *launches;
    int n, room;
    json_t *events;
};

double dnri_profile_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

dnr_status dnri_profile_new(dnr_device *dev, int64_t steps, const char *path, dnri_profile **out)
{
    *out = NULL;
    if (steps < 1)
        return DNR_FAIL(DNR_EUSAGE, "profile one step or more", "a profile of %lld steps",
                        (long long)steps);
    dnri_profile *p = calloc(1, sizeof *p);
    if (!p)
        return DNR_FAIL_NOMEM();
    p->dev = dev;
    p->left = steps;
    p->path = strdup(path);
    p->events = json_array();
    dnr_status st = p->path && p->events ? DNR_OK : DNR_FAIL_NOMEM();
    if (st == DNR_OK)
        st = dev->be->sync(dev, DNRI_COMPUTE);
    if (st == DNR_OK && dev->be->stamp)
        st = dev->be->stamp(dev, DNRI_COMPUTE, 0);
    if (st == DNR_OK)
        st = dev->be->sync(dev, DNRI_COMPUTE);
    p->origin = dnri_profile_now();
    if (st == DNR_OK)
        *out = p;
    else
        dnri_profile_free(p);
    return st;
}

void dnri_profile_free(dnri_profile *p)
{
    if (!p)
        return;
    json_decref(p->events);
    free(p->launches);
    free(p->path);
    free(p);
}

/* One bar; times in microseconds since the profile began. Takes `args` over. */
static void add(dnri_profile *p, const char *name, const char *category, int row, double begin,
                double end, json_t *args)
{
    json_array_append_new(p->events, json_pack("{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:o}", "name",
                                               name, "cat", category, "ph", "X", "ts", begin, "dur",
                                               end - begin, "pid", 1, "tid", row, "args", args));
}

void dnri_profile_host(dnri_profile *p, const char *name, double begin)
{
    if (p)
        add(p, name, "host", HOST, (begin - p->origin) * 1e6,
            (dnri_profile_now() - p->origin) * 1e6,
            json_pack("{s:I}", "step", (json_int_t)p->taken));
}

static dnr_status push(dnri_profile *p, const dnri_plan *plan, int op, launch **out)
{
    if (p->n == p->room) {
        const int room = p->room ? 2 * p->room : 1024;
        launch *more = realloc(p->launches, (size_t)room * sizeof *more);
        if (!more)
            return DNR_FAIL_NOMEM();
        p->launches = more;
        p->room = room;
    }
    *out = &p->launches[p->n++];
    **out = (launch){.plan = plan, .op = op};
    return DNR_OK;
}

/* Stamps of launch i; 0 is the profile's beginning. */
static int stamp_of(int i, bool end)
{
    return 1 + 2 * i + end;
}

dnr_status dnri_profile_run(dnri_profile *p, dnri_plan *plan)
{
    const dnri_backend *be = p->dev->be;
    for (int i = 0; i < plan->n; i++) {
        const dnri_step *s = &plan->steps[i];
        const dnri_op *op = dnri_graph_op_c(plan->g, i);
        launch *l = NULL;
        if (!s->run)
            continue;
        DNR_TRY(push(p, plan, i, &l));
        if (be->stamp)
            DNR_TRY(be->stamp(p->dev, s->lane, stamp_of(p->n - 1, false)));
        l->begin = dnri_profile_now();
        if (s->run(s->ctx) != DNR_OK)
            return dnri_fail_context("%s of %s", op->def->name, op->name);
        l->end = dnri_profile_now();
        if (be->stamp)
            DNR_TRY(be->stamp(p->dev, s->lane, stamp_of(p->n - 1, true)));
    }
    return DNR_OK;
}

static dnr_status times_of(dnri_profile *p, int i, double *begin, double *end)
{
    const dnri_backend *be = p->dev->be;
    const launch *l = &p->launches[i];
    if (!be->stamp) {
        *begin = (l->begin - p->origin) * 1e6;
        *end = (l->end - p->origin) * 1e6;
        return DNR_OK;
    }
    DNR_TRY(be->stamp_us(p->dev, 0, stamp_of(i, false), begin));
    return be->stamp_us(p->dev, 0, stamp_of(i, true), end);
}

static void name_row(json_t *events, int row, const char *name)
{
    json_array_append_new(events, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", "thread_name",
                                            "ph", "M", "pid", 1, "tid", row, "args", "name", name));
}

static dnr_status write_trace(dnri_profile *p)
{
    static const char *const rows[] = {"compute", "copy", "comm", "host"};
    const char *how =
        p->dev->be->stamp
            ? "launches one by one with an event before and after each, not from the captured "
              "program: what lies between them is longer than in training"
            : "host's clock around each launch";
    for (int i = 0; i <= HOST; i++)
        name_row(p->events, i, rows[i]);
    json_t *root =
        json_pack("{s:O, s:s, s:{s:s, s:s, s:s, s:I}}", "traceEvents", p->events, "displayTimeUnit",
                  "ms", "otherData", "dnnrun", dnr_version(), "device",
                  dnr_device_description(p->dev), "times", how, "steps", (json_int_t)p->taken);
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    json_decref(root);
    if (!text)
        return DNR_FAIL_NOMEM();
    dnri_wholefile f;
    dnr_status st;
    DNR_GOTO(st, dnri_wholefile_open(&f, p->path));
    DNR_GOTO(st, dnri_wholefile_write(&f, text, strlen(text)));
    st = dnri_wholefile_commit(&f);
out:
    free(text);
    return st;
}

dnr_status dnri_profile_step(dnri_profile *p, bool *done)
{
    *done = false;
    for (int l = 0; l < DNRI_LANES; l++)
        DNR_TRY(p->dev->be->sync(p->dev, (dnr_lane)l));
    for (int i = 0; i < p->n; i++) {
        const dnri_plan *plan = p->launches[i].plan;
        const dnri_op *op = dnri_graph_op_c(plan->g, p->launches[i].op);
        const dnri_step *s = &plan->steps[p->launches[i].op];
        static const char *const phases[] = {"forward", "backward", "update"};
        char name[DNRI_NAME + 64];
        double begin, end;
        DNR_TRY(times_of(p, i, &begin, &end));
        snprintf(name, sizeof name, "%s %s", op->def->name, op->name);
        add(p, name, phases[op->phase], (int)s->lane, begin, end,
            json_pack("{s:I, s:s, s:s, s:b, s:f, s:f}", "step", (json_int_t)p->taken, "program",
                      plan->name, "implementation", s->impl, "recomputed", op->clone, "bytes",
                      dnri_op_bytes(plan, op), "flops", dnri_op_flops(plan, op)));
    }
    p->n = 0;
    p->taken++;
    *done = --p->left == 0;
    return *done ? write_trace(p) : DNR_OK;
}
