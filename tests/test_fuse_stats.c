/* test_fuse_stats.c: statistics out of convolutions, and masks in the place of y, against the plain graph. On the
 * reference device. */
#include "rig.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"
#include "../runtime/reduce.h"
#include "../runtime/rewrite.h"

#include <stdlib.h>
#include <string.h>

/* A model under training: forward, backward and rewrites. */
typedef struct net {
    rig r;
    dnr_tid x, labels;
} net;

enum { BATCH = 2, CLASSES = 3 };

static void net_open(net *t, const char *name, int side, dnr_fusion fusion, dnr_recompute recompute)
{
    const dnr_model_opts o = {.name = name, .classes = CLASSES};
    dnri_tensor picture = {
        .name = "x", .desc = dnri_desc4(DNR_F64, BATCH, side, side, 3), .param = -1, .keep = true};
    dnri_model_fn model;
    rig_open(&t->r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_graph *g = t->r.g;
    t->x = dnri_graph_new_tensor(g, &picture);
    t->labels = rig_leaf(&t->r, "labels", dnri_desc4(DNR_I32, BATCH, 1, 1, 1));
    OK(dnri_model_find(name, &model));
    OK(dnri_model_loss(g, model(g, t->x, &o), t->labels, 0.1, 1.0 / BATCH));
    OK(dnri_graph_backward(g));
    OK(dnri_model_fuse(g, rig_ref, &(dnri_fuse_opts){fusion, recompute, 1, 0}));
    OK(dnri_rewrite_recompute(g, recompute));
}

/* One pass: the gradients of all parameters, then the running statistics. */
static double *net_run(net *t, int64_t *n)
{
    static const double labels[BATCH] = {2, 0};
    uint64_t seed = 1;
    rig *r = &t->r;
    rig_plan(r, true, false);
    rig_bind(r);
    OK(dnri_store_init(r->store, 5));
    OK(dnri_store_write_state(r->store, &(dnri_state){.loss_scale = 1}));
    const int64_t pixels = rig_count(r, t->x);
    const int64_t flat = dnri_params_flat(r->params), buffers = dnri_params_buffers(r->params);
    double *x = malloc((size_t)pixels * sizeof *x), *out;
    for (int64_t i = 0; i < pixels; i++)
        x[i] = rig_normal(&seed);
    rig_write(r, t->x, x);
    rig_write(r, t->labels, labels);
    rig_run(r);
    free(x);
    *n = flat + buffers;
    out = malloc((size_t)*n * sizeof *out);
    OK(dnri_copy_now(rig_ref, out, dnri_store_ptr(r->store, DNRI_GRAD, -1),
                     (size_t)flat * sizeof *out));
    OK(dnri_copy_now(rig_ref, out + flat, dnri_store_ptr(r->store, DNRI_BUFFER, -1),
                     (size_t)buffers * sizeof *out));
    rig_close(r);
    return out;
}

static double *results(const char *name, int side, dnr_fusion fusion, dnr_recompute recompute,
                       int64_t *n)
{
    net t;
    net_open(&t, name, side, fusion, recompute);
    return net_run(&t, n);
}

/* Sums are statistics, to the rounding of fp64. */
static void test_equal(void **state)
{
    static const struct {
        const char *name;
        int side;
    } cases[] = {{"resnet8", 16}, {"resnet50", 64}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t n, m;
        double *plain =
            results(cases[i].name, cases[i].side, DNR_FUSION_OFF, DNR_RECOMPUTE_NONE, &n);
        double *fused =
            results(cases[i].name, cases[i].side, DNR_FUSION_D1, DNR_RECOMPUTE_NONE, &m);
        assert_int_equal(n, m);
        const double error = rig_error(fused, plain, n);
        print_message("%s: fused and plain differ by %.1e\n", cases[i].name, error);
        assert_true(error > 0 && error < 1e-9);
        free(plain);
        free(fused);
    }
}

/* Recomputing changes no bit, and moves running statistics once. */
static void test_recompute(void **state)
{
    static const dnr_recompute modes[] = {DNR_RECOMPUTE_BLOCK, DNR_RECOMPUTE_STAGE};
    int64_t n, m;
    double *kept = results("resnet8", 16, DNR_FUSION_D1, DNR_RECOMPUTE_NONE, &n);
    for (int i = 0; i < 2; i++) {
        double *remade = results("resnet8", 16, DNR_FUSION_D1, modes[i], &m);
        assert_int_equal(n, m);
        assert_memory_equal(kept, remade, (size_t)n * sizeof *kept);
        free(remade);
    }
    free(kept);
}

/* Which convolutions of a model: all that a norm.train reads, clones too; `auto` is `d1`. */
static void test_graph(void **state)
{
    static const dnr_fusion fusions[] = {DNR_FUSION_OFF, DNR_FUSION_D1, DNR_FUSION_AUTO};
    for (int i = 0; i < 3; i++) {
        const bool fused = fusions[i] != DNR_FUSION_OFF;
        int clones = 0;
        net t;
        net_open(&t, "resnet50", 32, fusions[i], DNR_RECOMPUTE_BLOCK);
        const dnr_graph *g = t.r.g;
        for (int k = 0; k < dnri_graph_ops(g); k++) {
            const dnri_op *op = dnri_graph_op_c(g, k);
            clones += op->clone && op->def == &dnri_def_conv_stats;
            if (op->def == &dnri_def_norm_train)
                assert_int_equal(op->n_in, fused ? 8 : 6);
            if (op->def == &dnri_def_norm_pool_train)
                assert_int_equal(op->n_in, 7);
            if (op->def == &dnri_def_conv_stats) {
                const double outputs = (double)dnri_count(dnri_desc(g, op->out[0]));
                const dnr_desc *w = dnri_desc(g, op->in[1]);
                assert_true(op->def->flops(g, op) ==
                            2 * outputs * (double)(w->dim[1] * w->dim[2] * w->dim[3]));
            }
        }
        assert_int_equal(rig_count_ops(g, &dnri_def_conv_stats) - clones, fused ? 53 : 0);
        assert_true(fused ? clones > 0 : clones == 0);
        assert_int_equal(rig_count_ops(g, &dnri_def_norm_pool_train), fused);
        assert_true(fused == (rig_count_ops(g, &dnri_def_conv) == 0));
        rig_close(&t.r);
    }
}

/* A convolution stays plain where something else reads y too, where y is a norm's residual, and on a device that
 * lacks the pair. */
static void test_limits(void **state)
{
    enum { SOLE, READ, RESIDUAL, LACKING, MODES };
    dnr_device *cpu;
    OK(dnr_device_open("cpu", &cpu));
    for (int mode = 0; mode < MODES; mode++) {
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 3, 3, 4));
        const dnr_tid y = dnr_conv(r.g, "c", x, &(dnr_conv_opts){4, 3, 1, 1});
        dnr_norm(r.g, "b", mode == RESIDUAL ? x : y, mode == RESIDUAL ? y : DNRI_NONE,
                 &(dnr_norm_opts){.relu = true});
        if (mode == READ)
            dnri_add(r.g, "a", y, x);
        OK(dnri_fuse_statistics(r.g, mode == LACKING ? cpu : rig_ref));
        assert_int_equal(rig_count_ops(r.g, &dnri_def_conv_stats), mode == SOLE);
        assert_int_equal(dnri_graph_op_c(r.g, 1)->n_in, mode == SOLE ? 8 : 6);
        rig_close(&r);
    }
    dnr_device_close(cpu);
}

/* Each norm.bwd behind a residual reads a mask, in runs that keep activations. */
static void test_masks(void **state)
{
    for (int off = 0; off < 2; off++)
        for (int block = 0; block < 2; block++) {
            int joins = 0, masks = 0, made = 0;
            net t;
            net_open(&t, "resnet50", 32, off ? DNR_FUSION_OFF : DNR_FUSION_D1,
                     block ? DNR_RECOMPUTE_BLOCK : DNR_RECOMPUTE_NONE);
            const dnr_graph *g = t.r.g;
            for (int i = 0; i < dnri_graph_ops(g); i++) {
                const dnri_op *op = dnri_graph_op_c(g, i);
                made += op->def == &dnri_def_norm_train && op->n_out == 4;
                if (op->def == &dnri_def_norm_bwd &&
                    ((const dnri_norm_bwd_attr *)op->attr)->residual) {
                    joins++;
                    masks += dnri_desc(g, op->in[1])->dtype == DNR_U8;
                }
            }
            assert_int_equal(joins, 16);
            assert_int_equal(masks, off || block ? 0 : 16);
            assert_int_equal(made, masks);
            rig_close(&t.r);
        }
}

/* No mask without a ReLU or a residual, of other than 8·n channels, or on a device that lacks it. */
static void test_mask_limits(void **state)
{
    enum { SOLE, LINEAR, ALONE, ODD, LACKING, MODES };
    dnr_device *cpu;
    OK(dnr_device_open("cpu", &cpu));
    for (int mode = 0; mode < MODES; mode++) {
        const dnr_norm_opts o = {.relu = mode != LINEAR};
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        const dnr_desc d = dnri_desc4(DNR_F64, 2, 3, 3, mode == ODD ? 12 : 16);
        const dnr_tid x = rig_leaf(&r, "x", d), res = rig_leaf(&r, "res", d);
        const dnr_tid labels = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, 2, 1, 1, 1));
        dnr_tid y = dnr_norm(r.g, "b", x, mode == ALONE ? DNRI_NONE : res, &o);
        y = dnr_dense(r.g, "fc", dnr_global_avg_pool(r.g, "p", y), 3);
        OK(dnri_model_loss(r.g, y, labels, 0, 1));
        OK(dnri_graph_backward(r.g));
        OK(dnri_fuse_masks(r.g, mode == LACKING ? cpu : rig_ref));
        assert_int_equal(dnri_graph_op_c(r.g, 0)->n_out, mode == SOLE ? 4 : 3);
        rig_close(&r);
    }
    dnr_device_close(cpu);
}

/* All weight gradients of plain convolutions are cast together, those of a bucket behind the last of them, in as few
 * ops as take them; a device without the cast keeps them as they were. */
static void test_widen(void **state)
{
    static const struct {
        size_t bucket;
        int ops;
    } cases[] = {{0, 8}, {1, 53}, {(size_t)1 << 40, 4}};
    dnr_device *cpu;
    OK(dnr_device_open("cpu", &cpu));
    for (int lacking = 0; lacking < 2; lacking++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            const dnr_model_opts o = {.name = "resnet50", .classes = CLASSES};
            int narrow = 0, wide = 0, cast = 0, ops = 0, n;
            dnri_bucket *bucket;
            dnri_model_fn model;
            rig r;
            rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
            const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 32, 32, 3));
            const dnr_tid labels = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, 2, 1, 1, 1));
            OK(dnri_model_find(o.name, &model));
            OK(dnri_model_loss(r.g, model(r.g, x, &o), labels, 0, 1));
            OK(dnri_graph_backward(r.g));
            OK(dnri_fuse_widen(r.g, lacking ? cpu : rig_ref, cases[i].bucket));
            OK(dnri_graph_buckets(r.g, cases[i].bucket, &bucket, &n));
            for (int k = 0; k < dnri_graph_ops(r.g); k++) {
                const dnri_op *op = dnri_graph_op_c(r.g, k);
                if (op->def == &dnri_def_conv_wgrad) {
                    const bool kept = dnri_graph_tensor(r.g, op->out[0])->home == DNRI_ARENA;
                    narrow += kept;
                    wide += !kept;
                }
                if (op->def != &dnri_def_grad_widen)
                    continue;
                ops++;
                cast += op->n_in;
                int first = -1;
                for (int m = 0; m < op->n_in; m++) {
                    const dnri_tensor *t = dnri_graph_tensor(r.g, op->out[m]);
                    const int64_t at = dnri_params_at(r.params, t->param)->offset;
                    int b = 0;
                    while (at >= bucket[b].offset + bucket[b].count)
                        b++;
                    assert_true(first < 0 || first == b);
                    first = b;
                    assert_int_equal(dnri_graph_writer(r.g, op->in[m]) < k, 1);
                }
            }
            print_message("%zu bytes a bucket%s: %d ops cast %d gradients\n", cases[i].bucket,
                          lacking ? ", no cast" : "", ops, cast);
            assert_int_equal(narrow, lacking ? 0 : 53);
            assert_int_equal(wide, lacking ? 53 : 0);
            assert_int_equal(cast, narrow);
            if (!lacking)
                assert_int_equal(ops, cases[i].ops);
            free(bucket);
            rig_close(&r);
        }
    dnr_device_close(cpu);
}

/* norm.train with sums splits into one with sums; its sums have a value for each channel. */
static void test_norm_with_sums(void **state)
{
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true};
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_tid in[8], out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    in[0] = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 3, 3, 4));
    for (int i = 1; i < 8; i++)
        in[i] = i == 3 ? DNRI_NONE : rig_leaf(&r, "v", dnri_desc1(DNR_F64, 4));
    OK(dnri_emit(r.g, &dnri_def_norm_train, "b", &a, sizeof a, 8, in, 3, out));
    const dnri_op op = *dnri_graph_op(r.g, 0);
    dnri_graph_replace_ops(r.g, NULL, 0);
    OK(op.def->expand(r.g, &op));
    const dnri_op *part = dnri_graph_op_c(r.g, 0);
    assert_ptr_equal(part->def, &dnri_def_norm_train);
    assert_true(part->n_in == 8 && part->in[6] == in[6] && part->in[7] == in[7]);
    in[7] = rig_leaf(&r, "v", dnri_desc1(DNR_F64, 5));
    assert_int_equal(dnri_emit(r.g, &dnri_def_norm_train, "b2", &a, sizeof a, 8, in, 3,
                               (dnr_tid[]){DNRI_NONE, DNRI_NONE, DNRI_NONE}),
                     DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "sum of squares"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal),          cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_graph),          cmocka_unit_test(test_limits),
        cmocka_unit_test(test_norm_with_sums), cmocka_unit_test(test_masks),
        cmocka_unit_test(test_mask_limits),    cmocka_unit_test(test_widen),
    };
    return cmocka_run_group_tests(tests, rig_open_ref, rig_close_ref);
}
