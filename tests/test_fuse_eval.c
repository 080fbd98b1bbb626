/* test_fuse_eval.c: evaluation with norms folded into convolutions against the plain graph.
 *
 *     test_fuse_eval                      on the reference device, where they are equal; and the rules
 *     test_fuse_eval DEVICE PRECISION     a device's against the reference device's, beside the device's plain one
 *
 * Exit code 77: this machine has no such device or precision. */
#include "probe.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"
#include "../runtime/slot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, CLASSES = 5 };

/* A model that evaluates pictures of `side`, as the trainer builds it. */
typedef struct net {
    rig r;
    dnr_tid logits;
    int side;
    void *slot;
} net;

/* ref without QUADS, so that the stem takes BLOCKS */
static bool blocks_alone(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return (op->def != &dnri_def_packed_conv ||
            ((const dnri_packed_conv_attr *)op->attr)->packing == DNRI_BLOCKS) &&
           rig_ref->be->supports(rig_ref, g, op);
}

/* `timed`: on ref, which times nothing, it decides about the stem's packing. */
static void net_open(net *t, dnr_device *dev, const char *name, int side, dnr_fusion fusion,
                     bool timed)
{
    dnri_backend backend = *rig_ref->be;
    dnr_device blocks = *rig_ref;
    backend.supports = blocks_alone;
    blocks.be = &backend;
    const dnr_model_opts o = {.name = name, .classes = CLASSES};
    const dnri_ingest_attr in = {BATCH, side, side, {0.017, 0.018, 0.017}, {-2.1, -2.0, -1.8}};
    dnri_model_fn model;
    dnr_tid x, labels;
    *t = (net){.side = side};
    rig_open(&t->r, dev, dev == rig_ref ? DNR_PRECISION_AUTO : probe_precision, false);
    t->r.timed = timed;
    OK(dnri_model_find(name, &model));
    OK(dnri_ingest(t->r.g, &in, &x, &labels));
    t->logits = model(t->r.g, x, &o);
    rig_keep(&t->r, t->logits);
    OK(dnri_model_loss(t->r.g, t->logits, labels, 0, 1));
    OK(dnri_model_fuse_eval(t->r.g, dev == rig_ref && !timed ? &blocks : dev, fusion));
}

/* Other weights in the stem, and running statistics and norms far from their first values, of either sign. */
static void set_weights(rig *r, uint64_t seed)
{
    for (int i = 0; i < dnri_params_count(r->params); i++) {
        const dnri_param *p = dnri_params_at(r->params, i);
        if (p->kind != DNRI_RUNNING && p->kind != DNRI_NORM_W && p->kind != DNRI_NORM_B &&
            strcmp(p->name, "conv1.weight") != 0)
            continue;
        double *v = malloc((size_t)p->count * sizeof *v);
        const bool var = strstr(p->name, "running_var") != NULL;
        for (int64_t k = 0; k < p->count; k++) {
            const double x = rig_normal(&seed);
            v[k] = var ? 0.1 + x * x : p->kind == DNRI_NORM_W ? 0.3 + x / 2 : x / 4;
        }
        OK(dnri_store_write(r->store, p->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER, i, v));
        free(v);
    }
}

static void net_start(net *t)
{
    rig *r = &t->r;
    const size_t bytes = dnri_slot_bytes(BATCH, t->side, t->side);
    rig_plan(r, false, false);
    unsigned char *slot = calloc(1, bytes);
    const dnri_header head = {.first = 1};
    memcpy(slot, &head, sizeof head);
    for (size_t i = dnri_slot_pixels(BATCH); i < bytes; i++)
        slot[i] = (unsigned char)(i * 131 + i / 256 * 7);
    OK(r->dev->be->alloc(r->dev, bytes, &t->slot));
    OK(dnri_copy_now(r->dev, t->slot, slot, bytes));
    OK(dnri_copy_now(r->dev, dnri_store_ptr(r->store, DNRI_CELL, -1), &t->slot, sizeof t->slot));
    free(slot);
    rig_bind(r);
    OK(dnri_store_init(r->store, 7));
}

static void net_logits(net *t, uint64_t seed, double out[BATCH * CLASSES])
{
    set_weights(&t->r, seed);
    OK(dnri_plan_prepare(t->r.plan));
    rig_run(&t->r);
    rig_read(&t->r, t->logits, out);
}

static void net_close(net *t)
{
    if (t->slot)
        t->r.dev->be->free(t->r.dev, t->slot);
    rig_close(&t->r);
}

/* To the rounding of fp64, in both packings of the stem. Twice, with other weights: what was prepared
 * for the first must be gone. */
static void test_equals_plain(void **state)
{
    static const struct {
        const char *name;
        int side;
    } cases[] = {{"resnet8", 16}, {"resnet18", 32}, {"resnet50", 32}, {"resnet18", 33}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        net plain;
        net_open(&plain, rig_ref, cases[i].name, cases[i].side, DNR_FUSION_OFF, true);
        net_start(&plain);
        for (int timed = 0; timed < 2; timed++) {
            net folded;
            net_open(&folded, rig_ref, cases[i].name, cases[i].side, DNR_FUSION_AUTO, timed);
            net_start(&folded);
            for (uint64_t seed = 1; seed < 3; seed++) {
                double a[BATCH * CLASSES], b[BATCH * CLASSES];
                net_logits(&plain, seed, a);
                net_logits(&folded, seed, b);
                const double error = rig_error(b, a, BATCH * CLASSES);
                print_message("%s, %d pixels: folded and plain differ by %.1e\n", cases[i].name,
                              cases[i].side, error);
                assert_true(error > 0 && error < 1e-9);
            }
            net_close(&folded);
        }
        net_close(&plain);
    }
}

/* A pass leaves what was prepared as it was: the second one gives the same bits. */
static void test_prepared_once(void **state)
{
    net t;
    double first[BATCH * CLASSES], second[BATCH * CLASSES];
    net_open(&t, rig_ref, "resnet50", 32, DNR_FUSION_AUTO, true);
    net_start(&t);
    net_logits(&t, 3, first);
    rig_run(&t.r);
    rig_read(&t.r, t.logits, second);
    assert_memory_equal(first, second, sizeof first);
    OK(dnri_plan_forward(t.r.plan));
    rig_read(&t.r, t.logits, second);
    assert_memory_equal(first, second, sizeof first);
    net_close(&t);
}

/* No norm is left, folds come first and only they are prepared; a forward pass counts the work of its convolutions. */
static void test_graph(void **state)
{
    for (int off = 0; off < 2; off++) {
        net t;
        net_open(&t, rig_ref, "resnet50", 64, off ? DNR_FUSION_OFF : DNR_FUSION_D1, true);
        const dnr_graph *g = t.r.g;
        double flops = 0;
        assert_int_equal(rig_count_ops(g, &dnri_def_norm_eval), off ? 53 : 0);
        assert_int_equal(rig_count_ops(g, &dnri_def_fold), off ? 0 : 53);
        assert_int_equal(rig_count_ops(g, &dnri_def_conv_act), off ? 0 : 52);
        assert_int_equal(rig_count_ops(g, &dnri_def_packed_conv), !off);
        assert_int_equal(rig_count_ops(g, &dnri_def_max_pool_act), !off);
        assert_int_equal(rig_count_ops(g, &dnri_def_conv), off ? 53 : 0);
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            const dnri_op *op = dnri_graph_op_c(g, i);
            assert_int_equal(op->phase, op->def == &dnri_def_fold ? DNRI_PREPARE : DNRI_FORWARD);
            assert_true(i >= (off ? 0 : 53) || op->phase == DNRI_PREPARE);
            flops += op->def->flops ? op->def->flops(g, op) : 0;
        }
        assert_true(flops > 2 * BATCH * 4.0e9 * 64 * 64 / 224 / 224);
        assert_true(flops < 2 * BATCH * 4.2e9 * 64 * 64 / 224 / 224);
        net_close(&t);
    }
}

/* What must stay as it is. */
static void test_limits(void **state)
{
    enum { FOLDED, KEPT, READ, LEAF, RESIDUAL, MODES };
    for (int mode = 0; mode < MODES; mode++) {
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
        const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 6, 6, 4));
        dnr_tid y = dnr_conv(r.g, "c", x, &(dnr_conv_opts){4, 3, 1, 1});
        if (mode == LEAF)
            dnri_graph_op(r.g, 0)->in[1] = rig_leaf(&r, "w", dnri_desc4(DNR_F64, 4, 3, 3, 4));
        dnr_norm(r.g, "b", mode == RESIDUAL ? x : y, mode == RESIDUAL ? y : DNRI_NONE,
                 &(dnr_norm_opts){.relu = true});
        if (mode == KEPT)
            dnri_keep(r.g, y);
        if (mode == READ)
            dnri_add(r.g, "a", y, x);
        OK(dnri_fuse_norm_eval(r.g, rig_ref));
        assert_int_equal(rig_count_ops(r.g, &dnri_def_conv_act), mode == FOLDED);
        assert_int_equal(rig_count_ops(r.g, &dnri_def_norm_eval), mode != FOLDED);
        rig_close(&r);
    }
}

/* The pool keeps its index where that is read, and its ReLU where y is. */
static void test_pool_limits(void **state)
{
    enum { JOINED, LINEAR, JOIN, INDEX, Y, MODES };
    for (int mode = 0; mode < MODES; mode++) {
        rig r;
        dnr_tid z = DNRI_NONE, labels, x;
        const dnri_ingest_attr in = {BATCH, 8, 8, {1, 1, 1}, {0, 0, 0}};
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
        OK(dnri_ingest(r.g, &in, &x, &labels));
        const dnr_tid res = rig_leaf(&r, "res", dnri_desc4(DNR_F64, BATCH, 8, 8, 4));
        dnr_tid y = dnr_conv(r.g, "c", x, &(dnr_conv_opts){4, 3, 1, 1});
        y = dnr_norm(r.g, "b", y, mode == JOIN ? res : DNRI_NONE,
                     &(dnr_norm_opts){.relu = mode != LINEAR});
        dnr_max_pool(r.g, "p", y, &(dnr_pool_opts){3, 2, 1});
        const dnr_tid index = dnri_graph_op_c(r.g, 3)->out[1];
        if (mode == INDEX)
            dnri_keep(r.g, index);
        if (mode == Y)
            OK(dnri_emit(r.g, &dnri_def_relu, "l", NULL, 0, 1, &y, 1, &z));
        OK(dnri_model_fuse_eval(r.g, rig_ref, DNR_FUSION_AUTO));
        assert_int_equal(rig_count_ops(r.g, &dnri_def_max_pool_act), mode == JOINED);
        assert_int_equal(rig_count_ops(r.g, &dnri_def_conv_act), mode != JOINED);
        rig_close(&r);
    }
}

/* A device without the ops gets the plain graph. */
static bool none(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return op->def != &dnri_def_fold;
}

static void test_lacking(void **state)
{
    dnri_backend poor = *rig_ref->be;
    dnr_device dev = *rig_ref;
    rig r;
    poor.supports = none;
    dev.be = &poor;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
    const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 6, 6, 4));
    dnr_norm(r.g, "b", dnr_conv(r.g, "c", x, &(dnr_conv_opts){4, 3, 1, 1}), DNRI_NONE,
             &(dnr_norm_opts){.relu = true});
    OK(dnri_model_fuse_eval(r.g, &dev, DNR_FUSION_AUTO));
    assert_int_equal(rig_count_ops(r.g, &dnri_def_norm_eval), 1);
    rig_close(&r);
}

/* Ops of phase PREPARE stand first. */
static void test_order(void **state)
{
    const dnri_lower_opts o = {.workspace_cap = 1 << 20};
    dnri_plan *plan;
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
    const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 6, 6, 4));
    dnr_tid y = DNRI_NONE, z = DNRI_NONE;
    OK(dnri_emit(r.g, &dnri_def_relu, "first", NULL, 0, 1, &x, 1, &y));
    dnri_graph_phase(r.g, DNRI_PREPARE);
    OK(dnri_emit(r.g, &dnri_def_relu, "late", NULL, 0, 1, &x, 1, &z));
    dnr_graph *g = r.g;
    r.g = NULL; /* the plan's, even where it fails */
    assert_int_equal(dnri_plan_build(g, rig_ref, "test", &o, &plan), DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "late"));
    rig_close(&r);
}

static void test_errors(void **state)
{
    for (int wrong = 0; wrong < 4; wrong++) {
        const dnri_conv_act_attr a = {{3, 1, 1, 6, 6}, true};
        const dnri_fold_attr f = {.eps = 1e-5, .packing = wrong == 2 ? DNRI_QUADS : 0};
        rig r;
        dnr_tid y = DNRI_NONE, out[2] = {DNRI_NONE, DNRI_NONE};
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
        const dnr_desc d = dnri_desc4(DNR_F64, 2, 6, 6, 4), v = dnri_desc1(DNR_F64, 4);
        const dnr_tid x = rig_leaf(&r, "x", d),
                      w = rig_leaf(&r, "w", dnri_desc4(DNR_F64, 4, 3, 3, 4));
        const dnr_tid b = rig_leaf(&r, "b", wrong == 0 || wrong == 3 ? dnri_desc1(DNR_F64, 5) : v);
        const dnr_tid res = rig_leaf(&r, "res", wrong == 1 ? dnri_desc4(DNR_F64, 2, 6, 5, 4) : d);
        const dnr_tid g = rig_leaf(&r, "g", v);
        if (wrong < 2)
            assert_int_equal(dnri_emit(r.g, &dnri_def_conv_act, "l", &a, sizeof a, 5,
                                       (dnr_tid[]){x, w, b, res, DNRI_NONE}, 1, &y),
                             DNR_EUSAGE);
        else
            assert_int_equal(dnri_emit(r.g, &dnri_def_fold, "l", &f, sizeof f, 5,
                                       (dnr_tid[]){w, g, g, b, g}, 2, out),
                             DNR_EUSAGE);
        assert_true(dnr_last_error()->remedy[0]);
        rig_close(&r);
    }
}

/* ---- on a device */

/* The error of folded and of plain logits, root mean square over draws of weights. In 16 bits folding rounds each weight
 * once, as the plain graph does, and what a convolution gives once rather than twice; in fp32 the plain graph does not
 * round weights, and about as much is left. At most twice the plain graph's error. */
static void test_device(void **state)
{
    static const struct {
        const char *name;
        int side;
    } cases[] = {{"resnet8", 16}, {"resnet18", 32}, {"resnet50", 32}, {"resnet18", 33}};
    enum { DRAWS = 6, N = BATCH * CLASSES };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double want[DRAWS][N], got[N];
        net truth;
        net_open(&truth, rig_ref, cases[i].name, cases[i].side, DNR_FUSION_OFF, false);
        net_start(&truth);
        for (uint64_t d = 0; d < DRAWS; d++)
            net_logits(&truth, d, want[d]);
        net_close(&truth);
        for (int timed = 0; timed < 2; timed++) {
            double error[2] = {0, 0};
            for (int folded = 0; folded < 2; folded++) {
                net t;
                net_open(&t, probe_device, cases[i].name, cases[i].side,
                         folded ? DNR_FUSION_AUTO : DNR_FUSION_OFF, timed);
                assert_true(!folded == (rig_count_ops(t.r.g, &dnri_def_fold) == 0));
                assert_true(!folded || rig_count_ops(t.r.g, &dnri_def_norm_eval) == 0);
                net_start(&t);
                for (uint64_t d = 0; d < DRAWS; d++) {
                    net_logits(&t, d, got);
                    error[folded] += pow(rig_error(got, want[d], N), 2) / DRAWS;
                }
                net_close(&t);
            }
            print_message("%s, %d pixels%s: folded is off by %.1e, plain by %.1e\n", cases[i].name,
                          cases[i].side, timed ? ", timed" : "", sqrt(error[1]), sqrt(error[0]));
            assert_true(error[1] > 0 && sqrt(error[1]) <= 2 * sqrt(error[0]));
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest rules[] = {
        cmocka_unit_test(test_equals_plain), cmocka_unit_test(test_prepared_once),
        cmocka_unit_test(test_graph),        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_pool_limits),  cmocka_unit_test(test_lacking),
        cmocka_unit_test(test_order),        cmocka_unit_test(test_errors),
    };
    const struct CMUnitTest device[] = {cmocka_unit_test(test_device)};
    if (argc == 1)
        return cmocka_run_group_tests(rules, rig_open_ref, rig_close_ref);
    const int rc = probe_open(argc, argv);
    if (rc)
        return rc;
    rig_ref = probe_ref;
    const int failed = cmocka_run_group_tests(device, NULL, NULL);
    probe_close();
    return failed ? 1 : 0;
}
