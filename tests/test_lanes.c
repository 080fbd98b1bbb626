/* test_lanes.c: programs on several lanes, on a device that runs each lane as early, as late or as much at random as the
 * waits between lanes allow: the same bits as on one lane. A tensor whose place is taken too early, or a wait that is
 * missing, shows. */
#include "trainrig.h"

#include "../runtime/plan_internal.h"
#include "../runtime/rng.h"

#include <stdlib.h>
#include <string.h>

enum { EARLY, LATE, RANDOM, ORDERS }; /* what is beside COMPUTE, where there is a choice */
enum { MOST = 4096 };

/* What is enqueued on a lane: a step, and how much of each lane is to be done before it. */
typedef struct entry {
    const dnri_step *step;
    int after[DNRI_LANES];
} entry;

/* The reference device but for its lanes. */
typedef struct lanes {
    dnr_device base;
    int64_t counters[2]; /* the reference device's own, which its functions expect here */
    dnri_backend backend;
    dnr_device *ref;
    dnri_rng rng;
    int order, beside; /* steps run beside COMPUTE so far */
    int moved;         /* of them, after something that stands behind them in the program */
    entry queue[DNRI_LANES][MOST];
    int n[DNRI_LANES], done[DNRI_LANES];
    int known[DNRI_LANES][DNRI_LANES]; /* what comes on the first waits for so many of the second */
} lanes;

static lanes dev;

/* ---- running what was enqueued */

static bool ready(int l)
{
    bool yes = dev.done[l] < dev.n[l];
    for (int m = 0; yes && m < DNRI_LANES; m++)
        yes = dev.done[m] >= dev.queue[l][dev.done[l]].after[m];
    return yes;
}

static dnr_status run_next(int l)
{
    const entry *e = &dev.queue[l][dev.done[l]++];
    if (l >= DNRI_BESIDE) {
        dev.beside++;
        dev.moved += dev.done[DNRI_COMPUTE] > e->after[DNRI_COMPUTE];
    }
    return e->step->run(e->step->ctx);
}

/* The lane to go on with so that `l` comes further. */
static int next_lane(int l)
{
    const int start = dev.order == RANDOM ? (int)dnri_rng_below(&dev.rng, DNRI_LANES) : DNRI_BESIDE;
    for (int k = 0; dev.order != LATE && k < DNRI_LANES; k++) {
        const int m = (start + k) % DNRI_LANES;
        if (ready(m) && (dev.order == RANDOM || m != DNRI_COMPUTE))
            return m;
    }
    for (int k = 0; !ready(l); k++) { /* what it waits for; that of another may be waiting itself */
        const entry *e = &dev.queue[l][dev.done[l]];
        int m = 0;
        while (dev.done[m] >= e->after[m])
            m++;
        assert_true(k < DNRI_LANES);
        l = m;
    }
    return l;
}

static dnr_status drain(dnr_lane lane)
{
    while (dev.done[lane] < dev.n[lane])
        DNR_TRY(run_next(next_lane((int)lane)));
    if (lane == DNRI_COMPUTE) { /* it has waited for all others by the end of each program */
        for (int l = 0; l < DNRI_LANES; l++)
            assert_int_equal(dev.done[l], dev.n[l]);
        memset(dev.n, 0, sizeof dev.n);
        memset(dev.done, 0, sizeof dev.done);
        memset(dev.known, 0, sizeof dev.known);
    }
    return DNR_OK;
}

/* ---- the back end */

typedef struct step {
    dnri_step inner;
    dnr_lane lane;
} step;

static dnr_status step_bind(void *ctx, const dnri_binding *b)
{
    const step *s = ctx;
    return s->inner.bind(s->inner.ctx, b);
}

static dnr_status step_run(void *ctx)
{
    const step *s = ctx;
    entry *e = &dev.queue[s->lane][dev.n[s->lane]++];
    assert_true(dev.n[s->lane] < MOST);
    e->step = &s->inner;
    memcpy(e->after, dev.known[s->lane], sizeof e->after);
    return DNR_OK;
}

static void step_drop(void *ctx)
{
    const step *s = ctx;
    s->inner.drop(s->inner.ctx);
    free(ctx);
}

static dnr_status lower(dnr_device *d, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    OK(dev.ref->be->lower(dev.ref, g, op, o, &s->inner));
    s->lane = o->lane;
    *out = s->inner;
    out->bind = step_bind;
    out->run = step_run;
    out->drop = step_drop;
    out->ctx = s;
    out->lane = o->lane;
    return DNR_OK;
}

static dnr_status copy(dnr_device *d, dnr_lane lane, void *dst, const void *src, size_t bytes)
{
    DNR_TRY(drain(lane));
    memmove(dst, src, bytes);
    return DNR_OK;
}

static dnr_status fence(dnr_device *d, dnr_lane from, dnr_lane to)
{
    for (int l = 0; l < DNRI_LANES; l++)
        if (dev.known[to][l] < dev.known[from][l])
            dev.known[to][l] = dev.known[from][l];
    dev.known[to][from] = dev.n[from];
    return DNR_OK;
}

static dnr_status mark(dnr_device *d, dnr_lane lane, int id)
{
    return drain(lane);
}

static dnr_status sync(dnr_device *d, dnr_lane lane)
{
    return drain(lane);
}

/* ---- networks under training */

/* The weights after two steps; `order` < 0: on the reference device itself. */
static double *train(const dnr_trainer_opts *o, int order, uint64_t seed, int64_t *n)
{
    training r = {.dev = order < 0 ? rig_ref : &dev.base};
    dev.order = order;
    dev.beside = dev.moved = 0;
    dev.rng = DNRI_RNG(seed);
    OK(dnri_trainer_create(r.dev, o, NULL, &r.t));
    const dnr_metrics m = tr_train(&r, 0, 2);
    assert_int_equal(m.step, 2);
    double *w = tr_slab(&r, DNRI_MASTER, n);
    dnr_trainer_destroy(r.t);
    return w;
}

static void test_same_bits(void **state)
{
    static const struct {
        const char *name;
        dnr_fusion fusion;
        dnr_recompute recompute;
        int accumulate, lanes, seeds;
    } cases[] = {
        {"resnet8", DNR_FUSION_D1, DNR_RECOMPUTE_NONE, 1, 2, 3},
        {"resnet8", DNR_FUSION_D1, DNR_RECOMPUTE_NONE, 1, 4, 3},
        {"resnet8", DNR_FUSION_OFF, DNR_RECOMPUTE_CHEAP, 2, 2, 2},
        {"resnet20", DNR_FUSION_D1, DNR_RECOMPUTE_BLOCK, 1, 3, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dnr_trainer_opts o = tr_options(state);
        int64_t n, m;
        o.model.name = cases[i].name;
        o.model.stem = "cifar";
        o.fusion = cases[i].fusion;
        o.recompute = cases[i].recompute;
        o.accumulate = cases[i].accumulate;
        o.batch = o.eval_batch = 4;
        double *plain = train(&o, -1, 0, &n);
        o.lanes = 1;
        double *one = train(&o, RANDOM, 0, &m);
        assert_int_equal(dev.beside, 0);
        assert_memory_equal(plain, one, (size_t)n * sizeof *plain);
        free(one);
        o.lanes = cases[i].lanes;
        for (int order = 0; order < ORDERS; order++)
            for (int seed = 0; seed < (order == RANDOM ? cases[i].seeds : 1); seed++) {
                double *w = train(&o, order, (uint64_t)seed, &m);
                assert_int_equal(m, n);
                assert_memory_equal(plain, w, (size_t)n * sizeof *plain);
                free(w);
                assert_true(dev.beside > 0);
                assert_true(order == EARLY ? dev.moved == 0 : dev.moved > 0);
                print_message("%s, %d lanes, order %d: %d steps beside, %d of them later\n",
                              o.model.name, o.lanes, order, dev.beside, dev.moved);
            }
        free(plain);
    }
}

static int open_lanes(void **state)
{
    if (rig_open_ref(state))
        return 1;
    dev.ref = rig_ref;
    dev.base = *rig_ref;
    dev.backend = *rig_ref->be;
    dev.backend.lower = lower;
    dev.backend.copy = copy;
    dev.backend.fence = fence;
    dev.backend.mark = mark;
    dev.backend.sync = sync;
    dev.base.be = &dev.backend;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, open_lanes, rig_close_ref);
}
