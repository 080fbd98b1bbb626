/* tune.c: times the ways to run an op, and remembers the fastest for others of the same shape. */
#include "cpu.h"
#include "../choices.h"
#include "../pins.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    RUNS = 3,
    TRIED = 12,
    SLOW_S = 5
}; /* of one way, the first also loads code and touches memory; ways remembered; seconds worth a remark */

struct dnri_choice {
    dnri_tune_key key;
    int way;
    /* what was timed, for dnr_tune */
    int n, chosen;
    dnr_tune_way tried[TRIED];
    char impls[TRIED][64];
    dnri_choice *next;
};

static const double HOPELESS = 1.5; /* times the best so far: not run again */
static const double BETTER = 0.97;  /* what a later way must save to be taken */

void dnri_choices_drop(dnri_choice *c)
{
    while (c) {
        dnri_choice *next = c->next;
        free(c);
        c = next;
    }
}

static dnri_choice *find(const dnri_cpu *dev, const dnri_tune_key *key)
{
    dnri_choice *c = dev->choices;
    while (c && memcmp(&c->key, key, sizeof *key))
        c = c->next;
    return c;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Straight from the system and back to it: the heap would keep some. Every element is about 0.01, in fp32 and in
 * bf16. */
static dnr_status take(size_t bytes, void **out)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return DNR_FAIL_NOMEM();
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0x3c, bytes);
    *out = p;
    return DNR_OK;
}

static void give_back(void *p, size_t bytes)
{
    if (p)
        munmap(p, bytes);
}

static size_t bytes_of(const dnr_graph *g, dnr_tid t)
{
    return t < 0 ? 0 : dnri_bytes(dnri_desc(g, t));
}

static dnr_status take_tensors(const dnr_graph *g, const dnri_op *op, dnri_binding *b)
{
    for (int i = 0; i < op->n_in; i++)
        if (op->in[i] >= 0)
            DNR_TRY(take(bytes_of(g, op->in[i]), &b->in[i]));
    for (int i = 0; i < op->n_out; i++)
        if (op->out[i] >= 0)
            DNR_TRY(take(bytes_of(g, op->out[i]), &b->out[i]));
    return DNR_OK;
}

static void give_tensors_back(const dnr_graph *g, const dnri_op *op, dnri_binding *b)
{
    for (int i = 0; i < op->n_in; i++)
        give_back(b->in[i], bytes_of(g, op->in[i]));
    for (int i = 0; i < op->n_out; i++)
        give_back(b->out[i], bytes_of(g, op->out[i]));
}

/* Seconds that the step takes; `best` is what others took. */
static dnr_status time_step(const dnri_step *s, dnri_binding b, double best, double *seconds)
{
    dnr_status st = DNR_OK;
    b.workspace = NULL;
    if (s->workspace)
        DNR_TRY(take(s->workspace, &b.workspace));
    DNR_GOTO(st, s->bind(s->ctx, &b));
    for (int i = 0; i < RUNS; i++) {
        double start = now();
        DNR_GOTO(st, s->run(s->ctx));
        double t = now() - start;
        if (i == 0 || t < *seconds)
            *seconds = t;
        if (best > 0 && t > HOPELESS * best)
            break;
    }
out:
    give_back(b.workspace, s->workspace);
    return st;
}

static void note(dnri_choice *c, const dnri_step *s, double seconds)
{
    if (c->n == TRIED)
        return;
    snprintf(c->impls[c->n], sizeof c->impls[0], "%s", s->impl);
    c->tried[c->n++] =
        (dnr_tune_way){.us = seconds > 0 ? seconds * 1e6 : -1, .workspace = s->workspace};
}

/* Sets c->way to the fastest of 0, 1, … and −1 … −extra. */
static dnr_status contest(dnr_device *dev, dnri_way_fn make, const void *what, int extra,
                          size_t cap, const dnri_binding *b, dnri_choice *c)
{
    double best = 0;
    bool more = true;
    for (int w = 0; w >= -extra; w = more ? w + 1 : w > 0 ? -1 : w - 1) {
        dnri_step s = {0};
        double t = 0;
        DNR_TRY(make(dev, what, w, &s));
        if (!s.run) {
            more = more && s.impl[0];
            continue;
        }
        dnr_status st = DNR_OK;
        if (s.workspace <= cap)
            st = time_step(&s, *b, best, &t);
        s.drop(s.ctx);
        DNR_TRY(st);
        if (s.workspace <= cap && (best == 0 || t < BETTER * best)) {
            best = t;
            c->way = w;
            c->chosen = c->n;
        }
        note(c, &s, t);
    }
    return DNR_OK;
}

/* The key as the device's choices have it. */
static void text_of(const dnri_tune_key *key, char text[512])
{
    int at = snprintf(text, 512, "way of");
    for (size_t i = 0; i < sizeof key->v / sizeof key->v[0]; i++)
        at += snprintf(text + at, 512 - (size_t)at, " %lld", (long long)key->v[i]);
}

/* What another rank's device timed: c->way; false where it did not. Only a way that can be made counts. */
static bool recall(dnr_device *dev, dnri_way_fn make, const void *what, size_t cap, dnri_choice *c)
{
    char key[512];
    dnri_step s = {0};
    text_of(&c->key, key);
    const char *text = dev->choices ? dnri_choices_get(dev->choices, key) : NULL;
    if (!text || sscanf(text, "%d", &c->way) != 1 || make(dev, what, c->way, &s) != DNR_OK ||
        !s.run)
        return false;
    s.drop(s.ctx);
    return s.workspace <= cap;
}

static dnr_status remember(dnr_device *dev, const dnri_choice *c)
{
    char key[512], way[16];
    if (!dev->choices)
        return DNR_OK;
    text_of(&c->key, key);
    snprintf(way, sizeof way, "%d", c->way);
    return dnri_choices_set(dev->choices, key, way);
}

/* With large pictures or batches it takes minutes before the first step: the user should know of what. */
static void tell_of_time(dnri_cpu *dev, double seconds)
{
    dev->timed += seconds;
    if (dev->timed < SLOW_S || dev->timed < dev->tell_at)
        return;
    dnri_log(
        DNR_LOG_INFO,
        "timing what runs each convolution fastest, for %.0f s so far; cudnn.benchmark = false "
        "does without",
        dev->timed);
    dev->tell_at = 2 * dev->timed;
}

/* Times the ways on memory of its own. */
static dnr_status choose(dnr_device *dev, const dnr_graph *g, const dnri_op *op, dnri_way_fn make,
                         const void *what, int extra, size_t cap, dnri_choice *c)
{
    dnri_binding b = {0};
    double begun = now();
    dnr_status st = take_tensors(g, op, &b);
    if (st == DNR_OK)
        st = contest(dev, make, what, extra, cap, &b, c);
    give_tensors_back(g, op, &b);
    tell_of_time(dnri_cpu_of(dev), now() - begun);
    for (int i = 0; i < c->n; i++)
        c->tried[i].implementation = c->impls[i];
    return st == DNR_OK ? remember(dev, c) : st;
}

dnr_status dnri_cpu_fastest(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_tune_key *key, dnri_way_fn make, const void *what, int extra,
                            const dnri_lower_opts *o, dnri_step *out)
{
    dnri_choice *c = find(dnri_cpu_of(dev), key);
    if (!c) {
        c = calloc(1, sizeof *c);
        if (!c)
            return DNR_FAIL_NOMEM();
        c->key = *key;
        c->chosen = -1;
        dnr_status st = recall(dev, make, what, o->workspace_cap, c)
                            ? DNR_OK
                            : choose(dev, g, op, make, what, extra, o->workspace_cap, c);
        if (st != DNR_OK) {
            free(c);
            return st;
        }
        c->next = dnri_cpu_of(dev)->choices;
        dnri_cpu_of(dev)->choices = c;
    }
    dnri_tell_tried(o, g, op, c->tried, c->n, c->chosen < c->n ? c->chosen : -1, NULL);
    return make(dev, what, c->way, out);
}
