/* measure.c: how long each launch of a program takes on the device, for `dnnrun plan --measure`. */
#include "plan_internal.h"
#include "rng.h"
#include "slot.h"
#include "trainer.h"

#include <stdlib.h>
#include <time.h>

#define LEAST_S 4e-3 /* an op is repeated until its runs take this long together */
#define MOST    1000
#define LARGE   ((size_t)1 << 28) /* bytes that no cache holds */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static dnr_status repeat(const dnri_step *s, int n)
{
    for (int i = 0; i < n; i++)
        DNR_TRY(s->run(s->ctx));
    return DNR_OK;
}

/* Seconds of n runs. Captured where the device can, so that the host's launches do not count. */
static dnr_status time_runs(dnr_device *dev, const dnri_step *s, int n, double *seconds)
{
    const dnri_backend *be = dev->be;
    void *program = NULL;
    if (be->capture_begin) {
        DNR_TRY(be->capture_begin(dev));
        dnr_status st = repeat(s, n), end = be->capture_end(dev, &program);
        DNR_TRY(st);
        DNR_TRY(end);
    }
    dnr_status st = be->sync(dev, DNRI_COMPUTE);
    double start = now();
    if (st == DNR_OK)
        st = program ? be->replay(dev, program) : repeat(s, n);
    if (st == DNR_OK)
        st = be->sync(dev, DNRI_COMPUTE);
    *seconds = now() - start;
    if (program)
        be->capture_drop(dev, program);
    return st;
}

static dnr_status measure_step(dnr_device *dev, const dnri_step *s, double *us)
{
    double seconds = 0;
    int n = 1;
    for (;;) {
        DNR_TRY(time_runs(dev, s, n, &seconds));
        if (seconds >= LEAST_S || n >= MOST)
            break;
        double want = 1.5 * LEAST_S * n / (seconds > 1e-7 ? seconds : 1e-7);
        n = want > MOST ? MOST : (int)want > n ? (int)want : n + 1;
    }
    *us = seconds / n * 1e6;
    return DNR_OK;
}

/* A copy within the arena, as a step. */
typedef struct copying {
    dnr_device *dev;
    char *base;
    size_t half;
} copying;

static dnr_status run_copy(void *ctx)
{
    const copying *c = ctx;
    return c->dev->be->copy(c->dev, DNRI_COMPUTE, c->base + c->half, c->base, c->half);
}

static dnr_status measure_copy(dnri_plan *p)
{
    copying c = {p->dev, p->base, p->arena / 2 & ~(size_t)255};
    const dnri_step s = {.run = run_copy, .ctx = &c};
    double us;
    c.half = c.half < LARGE ? c.half : LARGE;
    DNR_TRY(measure_step(p->dev, &s, &us));
    p->copy_rate = us > 0 ? 2 * (double)c.half / (us * 1e-6) : 0;
    return DNR_OK;
}

/* Launches by themselves leave gradients that may be no numbers, and the optimizer does nothing with such. */
static dnr_status clear_gradients(dnri_plan *p)
{
    static const dnri_role roles[] = {DNRI_GRAD, DNRI_GSUM};
    dnr_status st = DNR_OK;
    for (size_t i = 0; st == DNR_OK && i < sizeof roles / sizeof *roles; i++) {
        const size_t bytes = dnri_store_bytes(p->store, roles[i]);
        void *zeros = calloc(1, bytes ? bytes : 1);
        if (!zeros)
            return DNR_FAIL_NOMEM();
        if (bytes)
            st = dnri_copy_now(p->dev, dnri_store_ptr(p->store, roles[i], -1), zeros, bytes);
        free(zeros);
    }
    return st;
}

static dnr_status measure_plan(dnri_plan *p)
{
    bool clear = false;
    if (!p->us && !(p->us = calloc((size_t)p->n + 1, sizeof *p->us)))
        return DNR_FAIL_NOMEM();
    DNR_TRY(dnri_plan_prepare(p));
    DNR_TRY(dnri_plan_run(p)); /* fills the tensors with values of the right size */
    for (int i = 0; i < p->n; i++) {
        if (!clear && dnri_graph_op_c(p->g, i)->phase == DNRI_UPDATE) {
            DNR_TRY(clear_gradients(p));
            clear = true;
        }
        if (p->steps[i].run && measure_step(p->dev, &p->steps[i], &p->us[i]) != DNR_OK)
            return dnri_fail_context("timing %s", dnri_graph_op_c(p->g, i)->name);
    }
    DNR_TRY(measure_copy(p));
    p->flop_rate = 0;
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const double bytes = dnri_op_bytes(p, op), flops = dnri_op_flops(p, op);
        const double s = p->us[i] * 1e-6;
        if (s > 0 && flops >= 4 * bytes && flops / s > p->flop_rate) /* products alone */
            p->flop_rate = flops / s;
        if (s > 0 && bytes >= (double)LARGE && bytes / s > p->copy_rate)
            p->copy_rate = bytes / s;
    }
    return DNR_OK;
}

/* A batch of noise with labels in range: constant pictures would run faster than real ones. */
static dnr_status stage_noise(dnr_trainer *t, int64_t batch, int image)
{
    size_t bytes = dnri_slot_bytes(batch, image, image);
    char *slot = calloc(1, bytes);
    if (!slot)
        return DNR_FAIL_NOMEM();
    dnri_rng r = DNRI_RNG(t->o.seed, (uint64_t)batch);
    int32_t *labels = (int32_t *)(void *)(slot + dnri_slot_labels());
    for (int64_t i = 0; i < batch; i++)
        labels[i] = (int32_t)dnri_rng_below(&r, (uint64_t)t->o.model.classes);
    ((dnri_header *)(void *)slot)->first = 1;
    for (size_t i = dnri_slot_pixels(batch); i + 8 <= bytes; i += 8)
        *(uint64_t *)(void *)(slot + i) = dnri_rng_next(&r);
    dnr_status st = dnri_copy_now(t->dev, t->staging[0], slot, bytes);
    free(slot);
    return st;
}

dnr_status dnr_trainer_measure(dnr_trainer *t)
{
    DNR_TRY(dnri_copy_now(t->dev, dnri_store_ptr(t->store, DNRI_CELL, -1), &t->pinned->cell[0],
                          sizeof(void *)));
    for (int i = 0; i < DNRI_PROGRAMS; i++) {
        bool eval = i == DNRI_EVAL;
        if (!t->program[i].plan)
            continue;
        DNR_TRY(stage_noise(t, eval ? t->o.eval_batch : t->o.batch,
                            eval ? t->o.eval_image : t->o.image));
        DNR_TRY(measure_plan(t->program[i].plan));
    }
    return dnri_store_init(t->store, t->o.seed);
}
