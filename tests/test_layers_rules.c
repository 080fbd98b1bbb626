/* test_layers_rules.c: what ops split into, fuse into and are recomputed as, against the plain forms;
 * rules of the gradient walk; errors. All on the reference device. */
#include "rig.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- split forms, fused forms and clones against the plain graph */

/* Fills the leaves with fixed values of their own. */
static void fill(rig *r, dnr_tid t, uint64_t seed, double shift)
{
    const int64_t n = rig_count(r, t);
    double *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = rig_normal(&seed) + shift;
    rig_write(r, t, v);
    free(v);
}

static double *take(rig *r, dnr_tid t)
{
    double *v = malloc((size_t)rig_count(r, t) * sizeof *v);
    rig_read(r, t, v);
    return v;
}

typedef struct outs {
    double *v[8];
    int64_t count[8];
    int n;
} outs;

/* Puts what `expand` emits in the place of the graph's only op. */
static void split_only_op(rig *r)
{
    const dnri_op op = *dnri_graph_op(r->g, 0);
    dnri_graph_replace_ops(r->g, NULL, 0);
    OK(op.def->expand(r->g, &op));
    assert_true(dnri_graph_ops(r->g) > 1);
}

static void run_norm(const dnri_op_def *def, bool relu, bool residual, bool split, outs *o)
{
    const dnr_desc d = dnri_desc4(DNR_F64, 2, 3, 4, 5), vector = dnri_desc1(DNR_F64, 5);
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, relu};
    const int n_out = def == &dnri_def_norm_train ? 3 : 1;
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_tid in[6], out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    for (int i = 0; i < 6; i++)
        in[i] = i == 3 && !residual ? DNRI_NONE : rig_leaf(&r, "in", i == 0 || i == 3 ? d : vector);
    OK(dnri_emit(r.g, def, "l", &a, sizeof a, 6, in, n_out, out));
    if (split)
        split_only_op(&r);
    for (int i = 0; i < n_out; i++)
        rig_keep(&r, out[i]);
    rig_plan(&r, true, false);
    rig_bind(&r);
    for (int i = 0; i < 6; i++)
        if (in[i] >= 0)
            fill(&r, in[i], (uint64_t)i, i == 5 ? 9 : 0);
    rig_run(&r);
    o->n = 0;
    for (int i = 0; i < n_out + 2; i++) {
        const dnr_tid t = i < n_out ? out[i] : in[4 + i - n_out];
        o->count[o->n] = rig_count(&r, t);
        o->v[o->n++] = take(&r, t);
    }
    rig_close(&r);
}

static void run_norm_bwd(bool relu, bool residual, bool dy2, bool split, outs *o)
{
    const dnr_desc d = dnri_desc4(DNR_F64, 2, 3, 4, 5), vector = dnri_desc1(DNR_F64, 5);
    const dnri_norm_bwd_attr a = {relu, residual};
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_tid in[8], out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    for (int i = 0; i < 8; i++)
        in[i] = (i == 1 && !relu) || (i == 3 && !dy2) ? DNRI_NONE
                                                      : rig_leaf(&r, "in", i < 4 ? d : vector);
    OK(dnri_emit(r.g, &dnri_def_norm_bwd, "l", &a, sizeof a, 8, in, 4, out));
    assert_int_equal(out[3] >= 0, residual);
    if (split)
        split_only_op(&r);
    for (int i = 0; i < 4; i++)
        rig_keep(&r, out[i]);
    rig_plan(&r, true, false);
    rig_bind(&r);
    for (int i = 0; i < 8; i++)
        if (in[i] >= 0)
            fill(&r, in[i], (uint64_t)i, 0);
    rig_run(&r);
    o->n = 0;
    for (int i = 0; i < 4; i++)
        if (out[i] >= 0) {
            o->count[o->n] = rig_count(&r, out[i]);
            o->v[o->n++] = take(&r, out[i]);
        }
    rig_close(&r);
}

static void compare_and_free(outs *a, outs *b)
{
    assert_int_equal(a->n, b->n);
    for (int i = 0; i < a->n; i++) {
        assert_int_equal(a->count[i], b->count[i]);
        const double error = rig_error(a->v[i], b->v[i], a->count[i]);
        if (!(error < 1e-14))
            fail_msg("output %d differs by %.2e", i, error);
        free(a->v[i]);
        free(b->v[i]);
    }
}

static void test_split_equals_fused(void **state)
{
    static const dnri_op_def *const defs[] = {&dnri_def_norm_train, &dnri_def_norm_apply,
                                              &dnri_def_norm_eval};
    outs a, b;
    for (int form = 1; form < 4; form++)
        for (size_t i = 0; i < 3; i++) {
            run_norm(defs[i], form & 1, form & 2, false, &a);
            run_norm(defs[i], form & 1, form & 2, true, &b);
            compare_and_free(&a, &b);
        }
    static const bool forms[][3] = {{true, false, false},
                                    {true, true, false},
                                    {true, false, true},
                                    {false, false, true},
                                    {true, true, true}};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        run_norm_bwd(forms[i][0], forms[i][1], forms[i][2], false, &a);
        run_norm_bwd(forms[i][0], forms[i][1], forms[i][2], true, &b);
        compare_and_free(&a, &b);
    }
}

static void test_plain_ops_do_not_split(void **state)
{
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 2, 2, 3));
    dnr_norm(r.g, "bn", x, DNRI_NONE, &(dnr_norm_opts){0});
    const dnri_op op = *dnri_graph_op(r.g, 0);
    assert_int_equal(op.def->expand(r.g, &op), DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "bn"));
    rig_close(&r);
}

static void test_recompute_clone(void **state)
{
    for (int form = 0; form < 4; form++) {
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        const dnr_desc d = dnri_desc4(DNR_F64, 2, 3, 4, 5);
        dnr_tid x = rig_leaf(&r, "x", d), res = form & 2 ? rig_leaf(&r, "res", d) : DNRI_NONE;
        dnr_tid y = dnr_norm(r.g, "bn", x, res, &(dnr_norm_opts){.relu = form & 1}), z = DNRI_NONE;
        const dnri_op from = *dnri_graph_op(r.g, 0);
        dnri_op clone = from;
        from.def->reclone(&from, &clone);
        assert_ptr_equal(clone.def, &dnri_def_norm_apply);
        assert_int_equal(clone.n_out, 1);
        OK(dnri_emit(r.g, clone.def, "bn", clone.attr, sizeof(dnri_norm_attr), clone.n_in, clone.in,
                     1, &z));
        rig_keep(&r, y);
        rig_keep(&r, z);
        rig_plan(&r, true, false);
        rig_bind(&r);
        OK(dnri_store_init(r.store, 1));
        fill(&r, x, 3, 1);
        if (res >= 0)
            fill(&r, res, 4, 0);
        rig_run(&r);
        double *a = take(&r, y), *b = take(&r, z);
        assert_memory_equal(a, b, (size_t)rig_count(&r, y) * sizeof *a);
        free(a);
        free(b);
        rig_close(&r);
    }
}

/* ---- rules of the gradient walk, and the gradient-add fusion, on a small residual network */

typedef struct network {
    rig r;
    dnr_tid x, labels;
} network;

/* `linear`: the first block has no last ReLU, so that the sum of its gradients has two readers: its norm
 * and its shortcut. */
static void network_open(network *t, bool linear, bool fused)
{
    dnr_graph *g;
    rig_open(&t->r, rig_ref, DNR_PRECISION_AUTO, true);
    g = t->r.g;
    dnri_tensor picture = {
        .name = "x", .desc = dnri_desc4(DNR_F64, 2, 6, 6, 3), .param = -1, .keep = true};
    t->x = dnri_graph_new_tensor(g, &picture); /* wants no gradient, as a picture */
    t->labels = rig_leaf(&t->r, "labels", dnri_desc4(DNR_I32, 2, 1, 1, 1));
    dnr_tid a = dnr_conv(g, "c0", t->x, &(dnr_conv_opts){4, 3, 1, 1});
    a = dnr_norm(g, "b0", a, DNRI_NONE, &(dnr_norm_opts){.relu = true});
    for (int i = 0; i < 2; i++) {
        char conv[8], norm[8];
        snprintf(conv, sizeof conv, "c%d", i + 1);
        snprintf(norm, sizeof norm, "b%d", i + 1);
        dnr_tid b = dnr_conv(g, conv, a, &(dnr_conv_opts){4, 3, 1, 1});
        a = dnr_norm(g, norm, b, a, &(dnr_norm_opts){.relu = i > 0 || !linear});
    }
    a = dnr_dense(g, "fc", dnr_global_avg_pool(g, "pool", a), 3);
    OK(dnri_model_loss(g, a, t->labels, 0.1, 0.5));
    OK(dnri_graph_backward(g));
    if (fused)
        OK(dnri_fuse_gradient_add(g));
}

static void network_grads(bool linear, bool fused, double **grad, int64_t *n)
{
    static const double labels[] = {2, 0};
    network t;
    network_open(&t, linear, fused);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_add), fused ? linear : 2);
    rig_plan(&t.r, true, false);
    rig_bind(&t.r);
    OK(dnri_store_init(t.r.store, 5));
    OK(dnri_store_write_state(t.r.store, &(dnri_state){.loss_scale = 1}));
    fill(&t.r, t.x, 1, 0);
    rig_write(&t.r, t.labels, labels);
    rig_run(&t.r);
    *n = dnri_params_flat(t.r.params);
    *grad = malloc((size_t)*n * sizeof **grad);
    OK(dnri_copy_now(rig_ref, *grad, dnri_store_ptr(t.r.store, DNRI_GRAD, -1),
                     (size_t)*n * sizeof **grad));
    rig_close(&t.r);
}

static void test_gradient_add_fusion(void **state)
{
    for (int linear = 0; linear < 2; linear++) {
        double *plain, *fused;
        int64_t n, m;
        network_grads(linear, false, &plain, &n);
        network_grads(linear, true, &fused, &m);
        assert_int_equal(n, m);
        assert_true(rig_error(fused, plain, n) < 1e-13);
        free(plain);
        free(fused);
    }
}

/* An add stays where its sum is kept, read elsewhere, or where dy2 is taken. */
static void test_fusion_limits(void **state)
{
    enum { SOLE, KEPT, READ, TAKEN, MODES };
    const dnr_desc d = dnri_desc4(DNR_F64, 2, 3, 3, 4), vector = dnri_desc1(DNR_F64, 4);
    for (int mode = 0; mode < MODES; mode++) {
        const dnri_norm_bwd_attr a = {false, false};
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        dnr_tid t[3], v[4], out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE}, z = DNRI_NONE;
        for (int i = 0; i < 3; i++)
            t[i] = rig_leaf(&r, "t", d);
        for (int i = 0; i < 4; i++)
            v[i] = rig_leaf(&r, "v", vector);
        const dnr_tid sum = dnri_add(r.g, "sum", t[0], t[1]);
        if (mode == KEPT)
            dnri_keep(r.g, sum);
        if (mode == READ)
            OK(dnri_emit(r.g, &dnri_def_relu, "l", NULL, 0, 1, &sum, 1, &z));
        const dnr_tid dy2 = mode == TAKEN ? t[2] : DNRI_NONE;
        const dnr_tid in[] = {t[2], DNRI_NONE, sum, dy2, v[0], v[1], v[2], v[3]};
        OK(dnri_emit(r.g, &dnri_def_norm_bwd, "l", &a, sizeof a, 8, in, 4, out));
        OK(dnri_fuse_gradient_add(r.g));
        const dnri_op *last = dnri_graph_op(r.g, dnri_graph_ops(r.g) - 1);
        assert_int_equal(rig_count_ops(r.g, &dnri_def_add), mode != SOLE);
        assert_int_equal(last->in[2], mode == SOLE ? t[0] : sum);
        assert_int_equal(last->in[3], mode == SOLE ? t[1] : dy2);
        rig_close(&r);
    }
}

static int position(const dnr_graph *g, const dnri_op_def *def, const char *name)
{
    for (int i = 0; i < dnri_graph_ops(g); i++)
        if (dnri_graph_op_c(g, i)->def == def && strcmp(dnri_graph_op_c(g, i)->name, name) == 0)
            return i;
    return -1;
}

static void test_gradient_order(void **state)
{
    network t;
    network_open(&t, false, false);
    const dnr_graph *g = t.r.g;
    assert_true(position(g, &dnri_def_conv_wgrad, "c1") >= 0);
    assert_true(position(g, &dnri_def_conv_wgrad, "c1") < position(g, &dnri_def_conv_dgrad, "c1"));
    assert_true(position(g, &dnri_def_conv_wgrad, "c0") >= 0);
    assert_int_equal(position(g, &dnri_def_conv_dgrad, "c0"), -1); /* nobody wants the picture's */
    rig_close(&t.r);
}

static void test_evaluation_graph(void **state)
{
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, false);
    dnr_tid x =
        rig_leaf(&r, "x", dnri_desc4(DNR_F64, 1, 1, 1, 3)); /* one value a channel will do */
    assert_true(dnr_norm(r.g, "bn", x, DNRI_NONE, &(dnr_norm_opts){0}) >= 0);
    assert_ptr_equal(dnri_graph_op(r.g, 0)->def, &dnri_def_norm_eval);
    rig_close(&r);
}

static void test_flops(void **state)
{
    network t;
    network_open(&t, false, false);
    static const dnri_op_def *const defs[] = {&dnri_def_conv, &dnri_def_conv_wgrad,
                                              &dnri_def_conv_dgrad};
    for (int i = 0; i < 3; i++) {
        const dnri_op *op = dnri_graph_op(t.r.g, position(t.r.g, defs[i], "c1"));
        assert_true(op->def->flops(t.r.g, op) == 2.0 * 2 * 6 * 6 * 4 * 9 * 4);
    }
    static const dnri_op_def *const dense[] = {&dnri_def_dense, &dnri_def_dense_wgrad,
                                               &dnri_def_dense_dgrad};
    for (int i = 0; i < 3; i++) {
        const dnri_op *op = dnri_graph_op(t.r.g, position(t.r.g, dense[i], "fc"));
        assert_true(op->def->flops(t.r.g, op) == 2.0 * 2 * 4 * 3);
    }
    rig_close(&t.r);
}

/* ---- what counts as correct */

static dnri_state count(int64_t n, int64_t k, const double *logits, const double *labels,
                        bool first)
{
    rig r;
    dnri_state s;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, n, 1, 1, k));
    dnr_tid l = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, n, 1, 1, 1));
    dnr_loss(r.g, x, l, DNRI_NONE, &(dnr_loss_opts){0, 1});
    rig_plan(&r, true, false);
    rig_bind(&r);
    OK(dnri_store_write_state(r.store, &(dnri_state){.loss_sum = 1,
                                                     .correct1 = 10,
                                                     .correct5 = 20,
                                                     .samples = 30,
                                                     .forwards = 40,
                                                     .loss_scale = 1}));
    rig_header(&r, 0, first);
    rig_write(&r, x, logits);
    rig_write(&r, l, labels);
    rig_run(&r);
    OK(dnri_store_read_state(r.store, &s));
    rig_close(&r);
    return s;
}

static void expect_counts(dnri_state s, int64_t correct1, int64_t correct5, int64_t samples)
{
    assert_int_equal(s.correct1, correct1);
    assert_int_equal(s.correct5, correct5);
    assert_int_equal(s.samples, samples);
    assert_int_equal(s.forwards, 41);
}

static void test_correct(void **state)
{
    static const double rank[] = {
        6, 5, 4, 3,   2, 1, /* label 0: first */
        6, 5, 4, 3,   2, 1, /* label 4: fifth */
        6, 5, 4, 3,   2, 1, /* label 5: sixth */
        6, 5, 4, 3,   2, 1, /* no label */
        2, 2, 2, 2,   2, 2, /* label 0: a tie goes to the lower index */
        2, 2, 2, 2,   2, 2, /* label 5 */
        9, 1, 1, NAN, 1, 1, /* label 0: spoilt */
    };
    expect_counts(count(7, 6, rank, (double[]){0, 4, 5, -1, 0, 1, 0}, true), 2, 4, 6);
    expect_counts(count(7, 6, rank, (double[]){0, 4, 5, -1, 0, 1, 0}, false), 12, 24, 36);
    /* of 3 classes, all are among the first five but for a NaN */
    expect_counts(count(2, 3, (double[]){1, 2, 3, NAN, 2, 3}, (double[]){0, 2}, true), 0, 1, 2);
}

/* ---- errors name the layer and the numbers */

static void expect_error(rig *r, dnr_tid got, const char *a, const char *b)
{
    assert_int_equal(got, DNRI_NONE);
    assert_int_equal(dnri_graph_status(r->g), DNR_EUSAGE); /* it sticks */
    const dnr_error *e = dnr_last_error();
    if (!strstr(e->what, a) || !strstr(e->what, b) || !e->remedy[0])
        fail_msg("\"%s\" (%s) should name %s and %s", e->what, e->remedy, a, b);
    rig_close(r);
}

static dnr_tid start(rig *r, int64_t n, int64_t h, int64_t w, int64_t c)
{
    rig_open(r, rig_ref, DNR_PRECISION_AUTO, true);
    return rig_leaf(r, "x", dnri_desc4(DNR_F64, n, h, w, c));
}

static void test_errors(void **state)
{
    rig r;
    dnr_tid x = start(&r, 2, 4, 4, 3), z;
    expect_error(&r, dnr_conv(r.g, "stem", x, &(dnr_conv_opts){8, 7, 2, 1}), "stem", "4 x 4");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_conv(r.g, "stem", x, &(dnr_conv_opts){0, 3, 1, 1}), "stem", "0 output");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_conv(r.g, "stem", x, &(dnr_conv_opts){8, 3, 0, 1}), "stem", "stride 0");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_conv(r.g, "stem", x, &(dnr_conv_opts){8, 3, 1, -1}), "stem", "pad -1");
    x = start(&r, 1, 1, 1, 3);
    expect_error(&r, dnr_norm(r.g, "bn", x, DNRI_NONE, &(dnr_norm_opts){0}), "bn", "one value");
    x = start(&r, 2, 2, 2, 3);
    z = rig_leaf(&r, "z", dnri_desc4(DNR_F64, 2, 2, 2, 4));
    expect_error(&r, dnr_norm(r.g, "bn", x, z, &(dnr_norm_opts){0}), "residual", "[2,2,2,4]");
    x = start(&r, 2, 40, 40, 3);
    expect_error(&r, dnr_max_pool(r.g, "pool", x, &(dnr_pool_opts){16, 1, 0}), "pool", "16");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_max_pool(r.g, "pool", x, &(dnr_pool_opts){3, 1, 2}), "pool", "pad 2");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_avg_pool(r.g, "pool", x, &(dnr_pool_opts){5, 1, 0}), "pool", "4 x 4");
    x = start(&r, 2, 2, 2, 3);
    expect_error(&r, dnr_dense(r.g, "fc", x, 10), "fc", "[2,2,2,3]");
    x = start(&r, 2, 1, 1, 3);
    expect_error(&r, dnr_dense(r.g, "fc", x, 0), "fc", "0 outputs");
    x = start(&r, 2, 4, 4, 3);
    expect_error(&r, dnr_shortcut_a(r.g, "down", x, 2, 2), "down", "3 to 2");
    x = start(&r, 2, 1, 1, 3);
    z = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, 3, 1, 1, 1));
    expect_error(&r, dnr_loss(r.g, x, z, DNRI_NONE, &(dnr_loss_opts){0, 1}), "labels", "[3,1,1,1]");
    x = start(&r, 2, 1, 1, 3);
    z = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, 2, 1, 1, 1));
    expect_error(&r, dnr_loss(r.g, x, z, DNRI_NONE, &(dnr_loss_opts){1, 1}), "loss", "smoothing 1");
    x = start(&r, 2, 4, 4, 3); /* later layers keep quiet about a failed one */
    dnr_tid y = dnr_conv(r.g, "first", x, &(dnr_conv_opts){0, 3, 1, 1});
    y = dnr_norm(r.g, "second", y, DNRI_NONE, &(dnr_norm_opts){0});
    expect_error(&r, dnr_dense(r.g, "third", dnr_global_avg_pool(r.g, "p", y), 10), "first", "0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_equals_fused),
        cmocka_unit_test(test_plain_ops_do_not_split),
        cmocka_unit_test(test_recompute_clone),
        cmocka_unit_test(test_gradient_add_fusion),
        cmocka_unit_test(test_fusion_limits),
        cmocka_unit_test(test_gradient_order),
        cmocka_unit_test(test_evaluation_graph),
        cmocka_unit_test(test_flops),
        cmocka_unit_test(test_correct),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, rig_open_ref, rig_close_ref);
}
