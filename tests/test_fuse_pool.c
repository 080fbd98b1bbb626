/* test_fuse_pool.c: norm_pool.*, what it is made of, splits into and is recomputed as, against the plain
 * graph of norm, ReLU and max pool. On the reference device. */
#include "rig.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 2, SIDE = 8, C = 5, PIXELS = N * SIDE * SIDE * 3 };
typedef enum form { PLAIN, FUSED, SPLIT, FORMS } form;

typedef struct stem {
    rig r;
    dnr_tid x, labels, pre, y; /* picture, what the norm reads, what the pool gives */
} stem;

/* A stem and, behind the pool, two readers, whose gradients add up. */
static void stem_open(stem *t, const dnr_norm_opts *norm, bool residual)
{
    rig_open(&t->r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_graph *g = t->r.g;
    dnri_tensor picture = {
        .name = "x", .desc = dnri_desc4(DNR_F64, N, SIDE, SIDE, 3), .param = -1, .keep = true};
    t->x = dnri_graph_new_tensor(g, &picture);
    t->labels = rig_leaf(&t->r, "labels", dnri_desc4(DNR_I32, N, 1, 1, 1));
    t->pre = dnr_conv(g, "conv1", t->x, &(dnr_conv_opts){C, 3, 1, 1});
    dnr_tid a = dnr_norm(g, "bn1", t->pre, residual ? t->pre : DNRI_NONE, norm);
    t->y = dnr_max_pool(g, "maxpool", a, &(dnr_pool_opts){3, 2, 1});
    a = dnr_conv(g, "conv2", t->y, &(dnr_conv_opts){C, 3, 1, 1});
    a = dnr_norm(g, "bn2", a, t->y, &(dnr_norm_opts){.relu = true});
    a = dnr_dense(g, "fc", dnr_global_avg_pool(g, "avgpool", a), 3);
    OK(dnri_model_loss(g, a, t->labels, 0.1, 0.5));
    OK(dnri_graph_backward(g));
}

/* Puts what each norm_pool op splits into in its place. */
static void split_all(dnr_graph *g)
{
    const int n = dnri_graph_ops(g);
    int left = 0;
    dnri_op *whole = malloc((size_t)n * sizeof *whole), *out = malloc((size_t)n * 4 * sizeof *out);
    for (int i = 0; i < n; i++)
        whole[i] = *dnri_graph_op(g, i);
    for (int i = 0; i < n; i++) {
        dnri_graph_replace_ops(g, NULL, 0);
        if (strncmp(whole[i].def->name, "norm_pool.", 10) != 0)
            out[left++] = whole[i];
        else
            OK(whole[i].def->expand(g, &whole[i]));
        for (int k = 0; k < dnri_graph_ops(g); k++) {
            out[left] = *dnri_graph_op(g, k);
            out[left++].phase = whole[i].phase;
        }
    }
    free(whole);
    dnri_graph_replace_ops(g, out, left);
}

typedef struct result {
    double *y, *grad, *buffer;
    int64_t n_y, n_grad, n_buffer;
} result;

static double *read_slab(rig *r, dnri_role role, int64_t n)
{
    double *v = malloc((size_t)n * sizeof *v);
    OK(dnri_copy_now(rig_ref, v, dnri_store_ptr(r->store, role, -1), (size_t)n * sizeof *v));
    return v;
}

/* Weights of the norm: one channel of each sign, one that is 0, one whose y is 0 throughout. */
static void odd_weights(rig *r)
{
    static const double gamma[C] = {1.5, -0.7, 0, 0.3, 1}, beta[C] = {0.2, 0.1, 0.4, -9, -0.1};
    OK(dnri_store_write(r->store, DNRI_MASTER, dnri_params_find(r->params, "bn1.weight"), gamma));
    OK(dnri_store_write(r->store, DNRI_MASTER, dnri_params_find(r->params, "bn1.bias"), beta));
}

/* `sums`: the norm takes them from its convolution. */
static result run(form f, bool add, bool sums)
{
    static const double labels[N] = {2, 0};
    double x[PIXELS];
    uint64_t seed = 3;
    stem t;
    stem_open(&t, &(dnr_norm_opts){.relu = true}, false);
    if (f != PLAIN)
        OK(dnri_fuse_norm_pool(t.r.g));
    if (add)
        OK(dnri_fuse_gradient_add(t.r.g));
    if (sums)
        OK(dnri_fuse_statistics(t.r.g, rig_ref));
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_conv_stats), sums ? 2 : 0);
    const bool fused = f != PLAIN;
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_norm_pool_train), fused);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_norm_pool_bwd), fused);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_max_pool), !fused);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_max_pool_bwd), !fused);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_norm_bwd), fused ? 1 : 2);
    assert_int_equal(rig_count_ops(t.r.g, &dnri_def_add), !add || !fused);
    if (f == SPLIT) {
        split_all(t.r.g);
        assert_int_equal(rig_count_ops(t.r.g, &dnri_def_norm_pool_train), 0);
        assert_int_equal(rig_count_ops(t.r.g, &dnri_def_norm_train), 2);
        assert_int_equal(rig_count_ops(t.r.g, &dnri_def_max_pool_bwd), 1);
    }
    rig_keep(&t.r, t.y);
    rig_plan(&t.r, true, false);
    rig_bind(&t.r);
    OK(dnri_store_init(t.r.store, 5));
    OK(dnri_store_write_state(t.r.store, &(dnri_state){.loss_scale = 1}));
    odd_weights(&t.r);
    for (int i = 0; i < PIXELS; i++)
        x[i] = floor(2 * rig_normal(&seed)) / 2; /* so that some windows tie */
    rig_write(&t.r, t.x, x);
    rig_write(&t.r, t.labels, labels);
    rig_run(&t.r);
    result o = {
        .n_y = rig_count(&t.r, t.y), .n_grad = dnri_params_flat(t.r.params), .n_buffer = 2 * C};
    o.y = malloc((size_t)o.n_y * sizeof *o.y);
    rig_read(&t.r, t.y, o.y);
    o.grad = read_slab(&t.r, DNRI_GRAD, o.n_grad);
    o.buffer = malloc((size_t)o.n_buffer * sizeof *o.buffer);
    OK(dnri_store_read(t.r.store, DNRI_BUFFER, dnri_params_find(t.r.params, "bn1.running_mean"),
                       o.buffer));
    OK(dnri_store_read(t.r.store, DNRI_BUFFER, dnri_params_find(t.r.params, "bn1.running_var"),
                       o.buffer + C));
    rig_close(&t.r);
    return o;
}

static void result_free(result *o)
{
    free(o->y);
    free(o->grad);
    free(o->buffer);
}

static void test_equals_plain(void **state)
{
    result plain = run(PLAIN, false, false);
    double zeros = 0, norm = 0;
    for (int64_t i = 0; i < plain.n_y; i++)
        zeros += plain.y[i] == 0;
    for (int64_t i = 0; i < plain.n_grad; i++)
        norm += plain.grad[i] * plain.grad[i];
    assert_true(zeros > 0 && norm > 0);
    for (int f = PLAIN; f < FORMS; f++)
        for (int i = 0; i < 4; i++) {
            const bool sums = i & 2; /* the variance is then a difference */
            const double loose = sums ? 100 : 1;
            result o = run((form)f, i & 1, sums);
            assert_true(rig_error(o.y, plain.y, plain.n_y) < loose * 1e-14);
            assert_true(rig_error(o.buffer, plain.buffer, plain.n_buffer) < loose * 1e-14);
            assert_true(rig_error(o.grad, plain.grad, plain.n_grad) < loose * 1e-13);
            result_free(&o);
        }
    result_free(&plain);
}

/* The rewrite leaves alone what it must. */
static void test_limits(void **state)
{
    enum { NO_RELU, RESIDUAL, KEPT, READ, DY2, MODES };
    for (int mode = 0; mode < MODES; mode++) {
        stem t;
        stem_open(&t, &(dnr_norm_opts){.relu = mode != NO_RELU}, mode == RESIDUAL);
        dnr_graph *g = t.r.g;
        dnr_tid between = DNRI_NONE, z = DNRI_NONE;
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            dnri_op *op = dnri_graph_op(g, i);
            if (op->def == &dnri_def_max_pool)
                between = op->in[0];
            if (op->def == &dnri_def_norm_bwd && strcmp(op->name, "bn1") == 0 && mode == DY2)
                op->in[3] = op->in[2];
        }
        if (mode == KEPT)
            dnri_keep(g, between);
        if (mode == READ)
            OK(dnri_emit(g, &dnri_def_relu, "l", NULL, 0, 1, &between, 1, &z));
        const int n = dnri_graph_ops(g);
        OK(dnri_fuse_norm_pool(g));
        assert_int_equal(dnri_graph_ops(g), n);
        assert_int_equal(rig_count_ops(g, &dnri_def_max_pool), 1);
        rig_close(&t.r);
    }
}

/* y of the norm was alive up to its backward op; that of the pool is, a quarter of it. */
static void test_saves_memory(void **state)
{
    size_t bytes[2];
    for (int fused = 0; fused < 2; fused++) {
        stem t;
        stem_open(&t, &(dnr_norm_opts){.relu = true}, false);
        if (fused)
            OK(dnri_fuse_norm_pool(t.r.g));
        rig_plan(&t.r, true, false);
        bytes[fused] = dnri_plan_activations(t.r.plan);
        rig_close(&t.r);
    }
    assert_true(bytes[1] + N * SIDE * SIDE * C * sizeof(double) * 3 / 4 <= bytes[0]);
}

static void test_clone(void **state)
{
    const dnr_desc d = dnri_desc4(DNR_F64, N, SIDE, SIDE, C), v = dnri_desc1(DNR_F64, C);
    const dnri_norm_pool_attr a = {.norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true},
                                   .pool = {3, 2, 1, SIDE, SIDE, true}};
    double x[N * SIDE * SIDE * C], y[2][N * SIDE * SIDE / 4 * C], index[2][N * SIDE * SIDE / 4 * C];
    const double weight[C] = {1, -1, 2, 0.5, 0}, bias[C] = {0.1, 0.2, -0.3, 0.4, 0.5};
    uint64_t seed = 9;
    rig r;
    dnr_tid in[5], out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnr_tid again[2] = {DNRI_NONE, DNRI_NONE};
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    for (int i = 0; i < 5; i++)
        in[i] = rig_leaf(&r, "in", i == 0 ? d : v);
    OK(dnri_emit(r.g, &dnri_def_norm_pool_train, "l", &a, sizeof a, 5, in, 4, out));
    const dnri_op from = *dnri_graph_op(r.g, 0);
    dnri_op clone = from;
    clone.n_in = 7; /* had it read sums, its copy would not */
    from.def->reclone(&from, &clone);
    assert_int_equal(clone.n_in, 5);
    assert_ptr_equal(clone.def, &dnri_def_norm_pool_apply);
    assert_int_equal(clone.n_out, 2);
    OK(dnri_emit(r.g, clone.def, "l", &a, sizeof a, 5, clone.in, 2, again));
    for (int i = 0; i < 2; i++) {
        rig_keep(&r, out[i]);
        rig_keep(&r, again[i]);
    }
    rig_plan(&r, true, false);
    rig_bind(&r);
    for (int i = 0; i < N * SIDE * SIDE * C; i++)
        x[i] = rig_normal(&seed);
    rig_write(&r, in[0], x);
    rig_write(&r, in[1], weight);
    rig_write(&r, in[2], bias);
    rig_run(&r);
    rig_read(&r, out[0], y[0]);
    rig_read(&r, again[0], y[1]);
    rig_read(&r, out[1], index[0]);
    rig_read(&r, again[1], index[1]);
    assert_memory_equal(y[0], y[1], sizeof y[0]);
    assert_memory_equal(index[0], index[1], sizeof index[0]);
    bool none = false, some = false;
    for (int i = 0; i < N * SIDE * SIDE / 4 * C; i++) {
        none |= index[0][i] == 255 && y[0][i] == 0;
        some |= index[0][i] < 9 && y[0][i] > 0;
        assert_true((index[0][i] == 255) == (y[0][i] == 0));
    }
    assert_true(none && some);
    rig_close(&r);
}

static void test_errors(void **state)
{
    dnri_norm_pool_attr a = {.norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, false},
                             .pool = {3, 2, 1, SIDE, SIDE, true}};
    for (int wrong = 0; wrong < 3; wrong++) {
        rig r;
        dnr_tid in[5], out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        for (int i = 0; i < 5; i++)
            in[i] = rig_leaf(&r, "in",
                             i ? dnri_desc1(DNR_F64, wrong == 2 && i == 2 ? C + 1 : C)
                               : dnri_desc4(DNR_F64, N, SIDE, SIDE + (wrong == 1), C));
        a.norm.relu = wrong != 0;
        assert_int_equal(
            dnri_emit(r.g, &dnri_def_norm_pool_train, "stem", &a, sizeof a, 5, in, 4, out),
            DNR_EUSAGE);
        assert_non_null(strstr(dnr_last_error()->what, "stem"));
        rig_close(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_plain), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_saves_memory), cmocka_unit_test(test_clone),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, rig_open_ref, rig_close_ref);
}
