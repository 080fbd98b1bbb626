/* test_in_place.c: outputs over inputs that die: the same bits as with every tensor in a place of its own.
 *
 *     test_in_place [DEVICE PRECISION]        test_in_place cuda fp16 */
#include "trainrig.h"

#include "../runtime/plan_internal.h"
#include "../runtime/rng.h"

#include <stdlib.h>
#include <string.h>

/* ---- random graphs of the ops that may do so */

enum { LIVE = 6, OPS = 40, GRAPHS = 60, C = 16, KEPT = 8 };

typedef struct net {
    rig r;
    dnri_rng rng;
    dnr_desc desc, vector;
    dnr_tid live[LIVE], leaves[LIVE], vectors[6], kept[OPS + LIVE];
    int n_kept;
} net;

static int draw(net *n, int below)
{
    return (int)dnri_rng_below(&n->rng, (uint64_t)below);
}

static dnr_tid pick(net *n)
{
    return n->live[draw(n, LIVE)];
}

static void put(net *n, dnr_tid t)
{
    n->live[draw(n, LIVE)] = t;
    if (draw(n, KEPT) == 0)
        n->kept[n->n_kept++] = rig_keep(&n->r, t);
}

/* norm.apply, norm.eval or norm.train over vectors gamma, beta, residual?, mean, variance */
static void emit_norm(net *n)
{
    const dnri_op_def *defs[] = {&dnri_def_norm_apply, &dnri_def_norm_eval, &dnri_def_norm_train};
    const int kind = draw(n, 3);
    const dnri_norm_attr a = {DNRI_NORM_EPS, 0, draw(n, 2) == 0};
    const dnr_tid residual = draw(n, 2) ? pick(n) : DNRI_NONE;
    const dnr_tid in[] = {pick(n),  n->vectors[0], n->vectors[1],
                          residual, n->vectors[2], n->vectors[3]};
    dnr_tid out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    OK(dnri_emit(n->r.g, defs[kind], "n", &a, sizeof a, 6, in, kind == 2 ? 3 : 1, out));
    put(n, out[0]);
}

static void emit_norm_bwd(net *n)
{
    const bool relu = draw(n, 3) > 0, residual = relu && draw(n, 2);
    const dnri_norm_bwd_attr a = {relu, residual};
    const dnr_tid in[] = {pick(n),       relu ? pick(n) : DNRI_NONE,
                          pick(n),       draw(n, 2) ? pick(n) : DNRI_NONE,
                          n->vectors[0], n->vectors[1],
                          n->vectors[2], n->vectors[3]};
    dnr_tid out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    OK(dnri_emit(n->r.g, &dnri_def_norm_bwd, "b", &a, sizeof a, 8, in, 4, out));
    put(n, out[0]);
    n->kept[n->n_kept++] = rig_keep(&n->r, out[1]);
    if (residual)
        put(n, out[3]);
}

static void emit_simple(net *n)
{
    const dnri_op_def *defs[] = {&dnri_def_relu, &dnri_def_relu_bwd, &dnri_def_add};
    const int kind = draw(n, 3);
    dnr_tid out = DNRI_NONE;
    OK(dnri_emit(n->r.g, defs[kind], "s", NULL, 0, kind ? 2 : 1, (dnr_tid[]){pick(n), pick(n)}, 1,
                 &out));
    put(n, out);
}

/* The same graph for the same seed. */
static void build(net *n, void **state, dnr_device *dev, uint64_t seed, bool apart)
{
    const dnr_precision precision = tr_options(state).precision;
    *n = (net){.rng = DNRI_RNG(seed)};
    rig_open(&n->r, dev, precision, true);
    n->r.apart = apart;
    n->desc = dnri_desc4(n->r.num.compute, 2, 3, 1 + draw(n, 4), C);
    n->vector = dnri_desc1(n->r.num.master, C);
    for (int i = 0; i < LIVE; i++)
        n->live[i] = n->leaves[i] = rig_leaf(&n->r, "x", n->desc);
    for (int i = 0; i < 4; i++)
        n->vectors[i] = rig_leaf(&n->r, "v", n->vector);
    const int ops = 1 + draw(n, OPS / 2);
    for (int i = 0; i < ops; i++) {
        const int kind = draw(n, 4);
        kind < 2 ? emit_norm_bwd(n) : kind == 2 ? emit_norm(n) : emit_simple(n);
    }
    n->kept[n->n_kept++] = rig_keep(&n->r, n->live[0]);
    rig_plan(&n->r, false, false);
    rig_bind(&n->r);
}

static void run(net *n, uint64_t seed)
{
    double v[2 * 3 * 4 * C];
    for (int i = 0; i < LIVE + 4; i++) {
        const dnr_tid t = i < LIVE ? n->leaves[i] : n->vectors[i - LIVE];
        for (int64_t k = 0; k < rig_count(&n->r, t); k++)
            v[k] = i == LIVE + 3 ? 1 + 0.01 * (double)k : rig_normal(&seed);
        if (dnri_plan_address(n->r.plan, t)) /* some op reads it */
            rig_write(&n->r, t, v);
    }
    rig_run(&n->r);
}

static int places_taken(const dnri_plan *p)
{
    int taken = 0;
    for (dnr_tid t = 0; t < p->n_tensors; t++)
        taken += p->takes[t] >= 0;
    return taken;
}

/* Whatever overlaps in memory and in time is a tensor and the one that it was written over. */
static void check_map(const dnri_plan *p)
{
    for (int a = 0; a < p->n_tensors + p->n; a++)
        for (int b = 0; b < p->n_tensors + p->n; b++) {
            const dnri_span *x = &p->spans[a], *y = &p->spans[b];
            if (a == b || !x->size || !y->size || x->first > y->first || x->last < y->first ||
                x->offset + x->size <= y->offset || y->offset + y->size <= x->offset)
                continue;
            assert_true(a < p->n_tensors && b < p->n_tensors);
            assert_true(p->takes[b] == a || p->takes[a] == b);
            assert_int_equal(x->offset, y->offset);
            assert_int_equal(x->last, y->first);
            assert_false(dnri_graph_tensor(p->g, a)->keep || dnri_graph_tensor(p->g, b)->keep);
        }
    for (dnr_tid a = 0; a < p->n_tensors; a++) /* and is taken once */
        for (dnr_tid b = 0; b < a; b++)
            assert_true(p->takes[a] < 0 || p->takes[a] != p->takes[b]);
}

static void random_graphs(void **state)
{
    dnr_device *dev;
    int taken = 0;
    OK(tr_device(state, &dev));
    for (uint64_t seed = 0; seed < GRAPHS; seed++) {
        net a, b;
        build(&a, state, dev, seed, true);
        build(&b, state, dev, seed, false);
        assert_int_equal(places_taken(a.r.plan), 0);
        taken += places_taken(b.r.plan);
        assert_true(dnri_plan_arena(b.r.plan) <= dnri_plan_arena(a.r.plan));
        check_map(b.r.plan);
        run(&a, seed);
        run(&b, seed);
        for (int i = 0; i < a.n_kept; i++) {
            double x[2 * 3 * 4 * C], y[2 * 3 * 4 * C];
            const int64_t count = rig_count(&a.r, a.kept[i]);
            if (!dnri_plan_address(a.r.plan, a.kept[i])) /* an unused leaf */
                continue;
            rig_read(&a.r, a.kept[i], x);
            rig_read(&b.r, b.kept[i], y);
            assert_memory_equal(x, y, (size_t)count * sizeof *x);
        }
        rig_close(&a.r);
        rig_close(&b.r);
    }
    print_message("%d graphs: %d tensors written over others\n", GRAPHS, taken);
    assert_true(taken > 3 * GRAPHS);
    dnr_device_close(dev);
}

/* ---- networks under training */

static void *noise(int batch, int image)
{
    const size_t bytes = dnri_slot_bytes(batch, image, image);
    unsigned char *slot = calloc(1, bytes);
    dnri_rng r = DNRI_RNG(7);
    assert_non_null(slot);
    for (int i = 0; i < batch; i++)
        ((int32_t *)(void *)(slot + dnri_slot_labels()))[i] = i % TR_CLASSES;
    for (size_t i = dnri_slot_pixels(batch); i < bytes; i++)
        slot[i] = (unsigned char)dnri_rng_below(&r, 256);
    return slot;
}

static void networks(void **state)
{
    static const dnr_recompute modes[] = {DNR_RECOMPUTE_NONE, DNR_RECOMPUTE_CHEAP,
                                          DNR_RECOMPUTE_STAGE, DNR_RECOMPUTE_BLOCK};
    static const char *const names[] = {"resnet8", "resnet18", "resnet50"};
    for (int i = 0; i < 3; i++)
        for (int m = 0; m < 4; m++) {
            dnr_trainer_opts o = tr_options(state);
            if ((i == 1 && modes[m] != DNR_RECOMPUTE_NONE) ||
                (i == 2 && modes[m] != DNR_RECOMPUTE_BLOCK))
                continue; /* these are large */
            training t[2];
            double *w[2];
            int64_t n;
            o.model.name = names[i];
            o.model.stem = i == 2 ? "cifar" : NULL;
            o.image = i == 1 ? 32 : TR_IMAGE;
            o.batch = o.eval_batch = 4;
            o.recompute = modes[m];
            for (int k = 0; k < 2; k++) {
                t[k] = tr_open_with(state, &o, &(dnri_trainer_extra){.apart = k == 0});
                void *slot = noise((int)o.batch, o.image);
                dnr_metrics out;
                for (int step = 0; step < 2; step++)
                    OK(dnri_trainer_step_on(t[k].t, &slot, &out));
                free(slot);
                w[k] = tr_slab(&t[k], DNRI_MASTER, &n);
            }
            const dnri_plan *p = t[1].t->program[DNRI_LAST].plan;
            assert_int_equal(places_taken(t[0].t->program[DNRI_LAST].plan), 0);
            assert_true(places_taken(p) > 3);
            check_map(p);
            assert_memory_equal(w[0], w[1], (size_t)n * sizeof *w[0]);
            for (int k = 0; k < 2; k++) {
                free(w[k]);
                tr_close(&t[k]);
            }
        }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_graphs),
        cmocka_unit_test(networks),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
