/* test_layers.c: every op of the layers on one device against the reference device, over many shapes.
 *
 *     test_layers DEVICE PRECISION        test_layers cpu bf16
 *
 * Exit code 77: this machine has no such device or precision. */
#include "probe.h"

#include <math.h>
#include <string.h>

/* ---- convolution and dense */

static void build_conv(probe *p, const shape *c)
{
    const dnri_conv_attr a = {c->kernel, c->stride, c->pad, c->h, c->w};
    const int64_t P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    const int64_t Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    const dnr_tid w = probe_tensor(p, "w", c->k, c->kernel, c->kernel, c->c);
    const dnr_tid dy = probe_tensor(p, "dy", c->n, P, Q, c->k);
    dnr_tid y = DNRI_NONE, dx = DNRI_NONE, dw = DNRI_NONE;
    probe_emit(p, &dnri_def_conv, &a, sizeof a, 2, (dnr_tid[]){x, w}, 1, &y);
    probe_emit(p, &dnri_def_conv_wgrad, &a, sizeof a, 2, (dnr_tid[]){x, dy}, 1, &dw);
    probe_emit(p, &dnri_def_conv_dgrad, &a, sizeof a, 2, (dnr_tid[]){dy, w}, 1, &dx);
    probe_result(p, "conv.fprop", "y", y, PRODUCT, 1);
    probe_result(p, "conv.wgrad", "dw", dw, WGRAD, 1);
    probe_result(p, "conv.dgrad", "dx", dx, PRODUCT, 1);
}

static void test_conv(void **state)
{
    static const shape cases[] = {
        {NHWC(2, 8, 8, 16), .k = 32, WINDOW(3, 1, 1)},
        {NHWC(2, 9, 7, 16), .k = 8, WINDOW(3, 2, 1)},
        {NHWC(1, 7, 7, 3), .k = 5, WINDOW(3, 1, 1)},
        {NHWC(2, 8, 8, 8), .k = 16, WINDOW(1, 1, 0)},
        {NHWC(2, 9, 9, 8), .k = 16, WINDOW(1, 2, 0)},
        {NHWC(1, 10, 10, 5), .k = 17, WINDOW(5, 1, 2)},
        {NHWC(2, 15, 13, 3), .k = 8, WINDOW(7, 2, 3)},
        {NHWC(2, 32, 32, 3), .k = 64, WINDOW(7, 2, 3)},
        {NHWC(1, 9, 11, 4), .k = 4, WINDOW(2, 2, 0)},
        {NHWC(1, 6, 6, 8), .k = 8, WINDOW(2, 1, 1)},
        {NHWC(1, 11, 11, 8), .k = 8, WINDOW(3, 3, 0)},
        {NHWC(1, 5, 5, 17), .k = 3, WINDOW(3, 1, 0)},
        {NHWC(2, 4, 4, 64), .k = 64, WINDOW(3, 1, 1)},
        {NHWC(1, 1, 1, 16), .k = 16, WINDOW(1, 1, 0)},
        {NHWC(1, 3, 3, 16), .k = 16, WINDOW(3, 1, 1)},
        {NHWC(1, 13, 13, 8), .k = 8, WINDOW(5, 3, 2)},
        {NHWC(2, 7, 7, 64), .k = 128, WINDOW(1, 1, 0)},
        {NHWC(2, 14, 14, 32), .k = 32, WINDOW(3, 2, 1)},
        {NHWC(1, 8, 8, 8), .k = 8, WINDOW(3, 2, 0)},
        {NHWC(1, 12, 12, 6), .k = 10, WINDOW(7, 3, 0)},
        {NHWC(5, 3, 9, 1), .k = 1, WINDOW(3, 1, 1)},
        {NHWC(2, 10, 10, 16), .k = 24, WINDOW(1, 3, 0)},
        {NHWC(3, 8, 8, 256), .k = 64, WINDOW(1, 1, 0)},
        {NHWC(2, 6, 6, 8), .k = 8, WINDOW(3, 1, 2)},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        bad += probe_run(build_conv, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

/* Gradients that stay in the compute type, until two layers' are cast at once. */
static void build_widen(probe *p, const shape *c)
{
    const dnri_conv_attr a = {c->kernel, c->stride, c->pad, c->h, c->w};
    const int64_t P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    const int64_t Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    const dnr_tid dy = probe_tensor(p, "dy", c->n, P, Q, c->k);
    dnri_tensor narrow = {.name = "narrow",
                          .desc = dnri_desc4(probe_compute(p), c->k, c->kernel, c->kernel, c->c),
                          .param = -1};
    dnr_tid in[3] = {dnri_graph_new_tensor(probe_graph(p), &narrow),
                     probe_tensor(p, "a", 3, 1, 5, 7), probe_tensor(p, "b", 64, 3, 3, 64)};
    dnr_tid out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    probe_emit(p, &dnri_def_conv_wgrad, &a, sizeof a, 2, (dnr_tid[]){x, dy}, 1, in);
    probe_emit(p, &dnri_def_grad_widen, NULL, 0, 3, in, 3, out);
    probe_result(p, "grad.widen", "conv.wgrad", out[0], WGRAD, 1);
    probe_result(p, "grad.widen", "a", out[1], EXACT, 1);
    probe_result(p, "grad.widen", "b", out[2], EXACT, 1);
}

static void test_widen(void **state)
{
    static const shape cases[] = {
        {NHWC(2, 8, 8, 16), .k = 32, WINDOW(3, 1, 1)},
        {NHWC(1, 7, 7, 3), .k = 5, WINDOW(3, 1, 1)}, /* plain loops */
        {NHWC(2, 7, 7, 64), .k = 128, WINDOW(1, 1, 0)},
        {NHWC(5, 3, 9, 1), .k = 1, WINDOW(3, 1, 1)},
    };
    rig r;
    dnr_tid y = DNRI_NONE;
    int bad = 0;
    rig_open(&r, probe_device, probe_precision, false);
    const dnr_tid t = rig_leaf(&r, "t", dnri_desc4(r.num.compute, 1, 1, 1, 8));
    OK(dnri_emit(r.g, &dnri_def_grad_widen, "l", NULL, 0, 1, &t, 1, &y));
    const bool has = dnri_device_supports(probe_device, r.g, dnri_graph_op_c(r.g, 0));
    rig_close(&r);
    assert_int_equal(has, strcmp(probe_device->be->name, "cuda") == 0 &&
                              dnri_dtype_size(r.num.compute) == 2);
    for (size_t i = 0; has && i < COUNT(cases); i++)
        bad += probe_run(build_widen, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

/* The bias is a value that the compute type holds, so that either form of it serves. */
static void build_conv_act(probe *p, const shape *c)
{
    const dnri_conv_act_attr a = {{c->kernel, c->stride, c->pad, c->h, c->w}, c->relu};
    const int64_t P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    const int64_t Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    const dnr_tid w = probe_tensor(p, "w", c->k, c->kernel, c->kernel, c->c);
    const dnr_tid bias = probe_vector(p, "bias", c->k, 3, 1);
    const dnr_tid low = probe_leaf(p, "low", dnri_desc1(probe_compute(p), c->k), 1, 0);
    const dnr_tid residual =
        c->residual ? probe_tensor(p, "residual", c->n, P, Q, c->k) : DNRI_NONE;
    dnr_tid y = DNRI_NONE;
    if (probe_values(p, low))
        memcpy(probe_values(p, low), probe_values(p, bias), (size_t)c->k * sizeof(double));
    probe_emit(p, &dnri_def_conv_act, &a, sizeof a, 5, (dnr_tid[]){x, w, bias, residual, low}, 1,
               &y);
    /* without an engine for it the convolution is rounded, too */
    probe_result(p, "conv.act", "y", y, PRODUCT, 2);
}

/* Smaller ones in every form; the others are large enough to be timed, where that is asked for. */
static void test_conv_act(void **state)
{
    static const shape cases[] = {
        {NHWC(2, 8, 8, 16), .k = 32, WINDOW(3, 1, 1)},
        {NHWC(2, 9, 7, 16), .k = 8, WINDOW(3, 2, 1)},
        {NHWC(1, 7, 7, 3), .k = 5, WINDOW(3, 1, 1)},
        {NHWC(2, 8, 8, 8), .k = 16, WINDOW(1, 1, 0)},
        {NHWC(2, 9, 9, 8), .k = 16, WINDOW(1, 2, 0)},
        {NHWC(1, 5, 5, 17), .k = 3, WINDOW(3, 1, 0)},
        {NHWC(2, 15, 13, 3), .k = 8, WINDOW(7, 2, 3)},
        {NHWC(2, 7, 7, 64), .k = 128, WINDOW(1, 1, 0)},
        {NHWC(2, 4, 4, 64), .k = 64, WINDOW(3, 1, 1)},
        {NHWC(1, 1, 1, 16), .k = 16, WINDOW(1, 1, 0)},
        {NHWC(3, 6, 10, 128), .k = 32, WINDOW(1, 1, 0)},
        {NHWC(1, 6, 6, 5), .k = 7, WINDOW(1, 1, 0)},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int form = 0; form < 4; form++) {
            shape c = cases[i];
            c.relu = form & 1;
            c.residual = form & 2;
            bad += probe_run(build_conv_act, NULL, &c);
        }
    assert_int_equal(bad, 0);
}

/* c->special: a packing; shift: how far before the kernel it begins. */
static void build_fold(probe *p, const shape *c)
{
    const dnri_fold_attr a = {DNRI_NORM_EPS, c->special ? c->k % 2 ? DNRI_BLOCKS : DNRI_QUADS : 0,
                              c->pad % 2};
    const dnr_desc w = dnri_desc4(probe_master(p), c->k, c->kernel, c->kernel, c->c);
    const dnr_tid in[] = {probe_leaf(p, "w", w, 1, 0), probe_vector(p, "gamma", c->k, 0.5, 0.5),
                          probe_vector(p, "beta", c->k, 0.5, 0),
                          probe_vector(p, "mean", c->k, 1, 1),
                          probe_vector(p, "var", c->k, 0.1, 1)};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    probe_emit(p, &dnri_def_fold, &a, sizeof a, 5, in, 3, out);
    probe_result(p, "fold", "w", out[0], POINT, 1);
    probe_result(p, "fold", "bias", out[1], SUM, 1);
    probe_result(p, "fold", "low", out[2], POINT, 1);
}

static void test_fold(void **state)
{
    static const shape cases[] = {
        {NHWC(1, 1, 1, 16), .k = 32, WINDOW(3, 1, 1)},
        {NHWC(1, 1, 1, 3), .k = 64, WINDOW(7, 2, 3)},
        {NHWC(1, 1, 1, 5), .k = 7, WINDOW(1, 1, 0)},
        {NHWC(1, 1, 1, 512), .k = 2, WINDOW(3, 1, 1)},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        bad += probe_run(build_fold, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

static void build_dense(probe *p, const shape *c)
{
    const dnr_tid x = probe_tensor(p, "x", c->n, 1, 1, c->c),
                  w = probe_tensor(p, "w", c->k, 1, 1, c->c);
    const dnr_tid b = probe_tensor(p, "b", 1, 1, 1, c->k),
                  dy = probe_tensor(p, "dy", c->n, 1, 1, c->k);
    dnr_tid y = DNRI_NONE, dx = DNRI_NONE, dw[2] = {DNRI_NONE, DNRI_NONE};
    probe_emit(p, &dnri_def_dense, NULL, 0, 3, (dnr_tid[]){x, w, b}, 1, &y);
    probe_emit(p, &dnri_def_dense_wgrad, NULL, 0, 2, (dnr_tid[]){x, dy}, 2, dw);
    probe_emit(p, &dnri_def_dense_dgrad, NULL, 0, 2, (dnr_tid[]){dy, w}, 1, &dx);
    probe_result(p, "dense.fprop", "y", y, PRODUCT, 1);
    probe_result(p, "dense.wgrad", "dw", dw[0], WGRAD, 1);
    probe_result(p, "dense.wgrad", "db", dw[1], SUM, 1);
    probe_result(p, "dense.dgrad", "dx", dx, PRODUCT, 1);
}

static void test_dense(void **state)
{
    static const shape cases[] = {
        {.n = 4, .c = 64, .k = 10},   {.n = 1, .c = 5, .k = 3}, {.n = 3, .c = 17, .k = 1000},
        {.n = 32, .c = 512, .k = 10}, {.n = 2, .c = 3, .k = 1}, {.n = 8, .c = 16, .k = 8},
        {.n = 5, .c = 1, .k = 7},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        bad += probe_run(build_dense, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

/* ---- batch norm */

static const shape norm_shapes[] = {
    {NHWC(2, 7, 5, 3)},    {NHWC(3, 4, 4, 5)},    {NHWC(2, 6, 6, 17)},
    {NHWC(1, 8, 8, 16)},   {NHWC(4, 5, 5, 64)},   {NHWC(8, 2, 2, 24)},
    {NHWC(2, 1, 1, 32)},   {NHWC(2, 9, 9, 256)},  {NHWC(2, 8, 8, 8), .shift = 30},
    {NHWC(2, 3, 3, 1080)}, {NHWC(3, 2, 5, 4168)},
};

static void build_norm(probe *p, const shape *c)
{
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, c->relu};
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c);
    dnr_tid in[] = {probe_leaf(p, "x", d, 1.5, 0.5 + c->shift),
                    probe_vector(p, "gamma", c->c, 0.5, 1),
                    probe_vector(p, "beta", c->c, 0.5, 0),
                    c->residual ? probe_leaf(p, "residual", d, 1, 0) : DNRI_NONE,
                    probe_vector(p, "running_mean", c->c, 1, 0),
                    probe_vector(p, "running_var", c->c, 0.1, 1)};
    const dnr_tid running[] = {in[4], in[5]};
    dnr_tid train[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE}, apply = DNRI_NONE, eval = DNRI_NONE;
    probe_emit(p, &dnri_def_norm_train, &a, sizeof a, 6, in, 3, train);
    /* in fp32 what the rounding of the mean leaves shows where it is far larger than the spread */
    const bool ill = c->shift > 0 || c->n * c->h * c->w < 8;
    const double loose = probe_bound(POINT) < 1e-6 && ill ? 10 : probe_split(p);
    in[4] = train[1];
    in[5] = train[2];
    probe_emit(p, &dnri_def_norm_apply, &a, sizeof a, 6, in, 1, &apply);
    in[4] = probe_vector(p, "eval_mean", c->c, 0.5, 0.5 + c->shift);
    in[5] = probe_vector(p, "eval_var", c->c, 0.2, 2);
    probe_emit(p, &dnri_def_norm_eval, &a, sizeof a, 6, in, 1, &eval);
    probe_result(p, "norm.train", "y", train[0], POINT, loose);
    probe_result(p, "norm.apply", "y", apply, POINT, loose);
    probe_result(p, "norm.eval", "y", eval, POINT, loose);
    probe_result(p, "norm.train", "mean", train[1], SUM, 1);
    probe_result(p, "norm.train", "invstd", train[2], SUM, 1);
    probe_result(p, "norm.train", "running_mean", running[0], SUM, 1);
    probe_result(p, "norm.train", "running_var", running[1], SUM, 1);
}

/* The recompute clone gives the bits that norm.train gave. */
static int check_clone(const probe *p, double *got[MAX_OUTS])
{
    const size_t n = (size_t)rig_count(&p->r[REF], p->out[0].tid[REF]);
    if (memcmp(got[0], got[1], n * sizeof *got[0]) == 0)
        return 0;
    print_error("norm.apply differs from norm.train in its bits\n");
    return 1;
}

static void test_norm(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(norm_shapes); i++)
        for (int form = 0; form < 4; form++) {
            shape c = norm_shapes[i];
            c.relu = form & 1;
            c.residual = form & 2;
            bad += probe_run(build_norm, check_clone, &c);
        }
    assert_int_equal(bad, 0);
}

/* y > 0 is the mask; without a residual it must be the one that x gives. */
static void set_mask(probe *p, double *y, const shape *c, dnr_tid x, const dnr_tid v[4])
{
    const double *at_x = probe_values(p, x), *gamma = probe_values(p, v[0]),
                 *beta = probe_values(p, v[1]);
    const double *mean = probe_values(p, v[2]), *invstd = probe_values(p, v[3]);
    for (int64_t i = 0; i < c->n * c->h * c->w * c->c; i++) {
        const int64_t k = i % c->c;
        if (!c->residual)
            y[i] = gamma[k] * (at_x[i] - mean[k]) * invstd[k] + beta[k];
        y[i] = y[i] > 0 ? y[i] : 0;
    }
}

static void build_norm_bwd(probe *p, const shape *c)
{
    const dnri_norm_bwd_attr a = {c->relu, c->relu && c->residual};
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c);
    dnr_tid out[4] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE}, y = DNRI_NONE;
    const dnr_tid x = probe_leaf(p, "x", d, 1.5, 0.5 + c->shift);
    const dnr_tid dy = probe_leaf(p, "dy", d, 1, 0);
    const dnr_tid dy2 = c->dy2 ? probe_leaf(p, "dy2", d, 1, 0.1) : DNRI_NONE;
    const dnr_tid v[] = {probe_vector(p, "gamma", c->c, 0.5, 1),
                         probe_vector(p, "beta", c->c, 0.5, 0),
                         probe_vector(p, "mean", c->c, 0.1, 0.5 + c->shift),
                         probe_vector(p, "invstd", c->c, 0.1, 0.7)};
    if (c->relu) {
        y = probe_leaf(p, "y", d, 1, 0);
        if (probe_values(p, y)) {
            set_mask(p, probe_values(p, y), c, x, v);
            rig_round(p->r[DEVICE].num.compute, probe_values(p, y), dnri_count(&d));
        }
    }
    const dnr_tid in[] = {x, y, dy, dy2, v[0], v[1], v[2], v[3]};
    probe_emit(p, &dnri_def_norm_bwd, &a, sizeof a, 8, in, 4, out);
    const double loose = c->dy2 ? probe_split(p) : 1;
    probe_result(p, "norm.bwd", "dx", out[0], POINT, loose);
    probe_result(p, "norm.bwd", "dgamma", out[1], loose > 1 ? POINT : SUM, 1);
    probe_result(p, "norm.bwd", "dbeta", out[2], loose > 1 ? POINT : SUM, 1);
    if (a.residual)
        probe_result(p, "norm.bwd", "dresidual", out[3], c->dy2 ? POINT : EXACT, 1);
}

static void test_norm_bwd(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(norm_shapes); i++)
        for (int form = 0; form < 8; form++) {
            shape c = norm_shapes[i];
            c.relu = form & 1;
            c.residual = form & 2;
            c.dy2 = form & 4;
            if (!c.residual || c.relu)
                bad += probe_run(build_norm_bwd, NULL, &c);
        }
    assert_int_equal(bad, 0);
}

/* Of which a GPU holds all, some, and too little in shared memory to do the whole in one launch. (More pieces of the
 * channels than multiprocessors, as above, are several launches too.) The first goes past a CPU's caches in bf16. */
static void test_large_norms(void **state)
{
    static const shape cases[] = {
        {NHWC(8, 28, 38, 512)}, {NHWC(4, 40, 64, 536), .shift = 5}, {NHWC(4, 64, 64, 536)}};
    const size_t n = strcmp(probe_device->be->name, "cuda") == 0 ? COUNT(cases) : 1;
    int bad = 0;
    for (size_t i = 0; i < n; i++)
        for (int form = 0; form < 2; form++) {
            shape c = cases[i];
            c.relu = c.residual = c.dy2 = form;
            bad += probe_run(build_norm, check_clone, &c);
            bad += probe_run(build_norm_bwd, NULL, &c);
        }
    assert_int_equal(bad, 0);
}

static void build_point(probe *p, const shape *c)
{
    const dnr_tid a = probe_tensor(p, "a", c->n, c->h, c->w, c->c);
    const dnr_tid b = probe_tensor(p, "b", c->n, c->h, c->w, c->c);
    dnr_tid sum = DNRI_NONE, y = DNRI_NONE, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_add, NULL, 0, 2, (dnr_tid[]){a, b}, 1, &sum);
    probe_emit(p, &dnri_def_relu, NULL, 0, 1, &a, 1, &y);
    probe_emit(p, &dnri_def_relu_bwd, NULL, 0, 2, (dnr_tid[]){y, b}, 1, &dx);
    probe_result(p, "add", "sum", sum, POINT, 1);
    probe_result(p, "relu", "y", y, EXACT, 1);
    probe_result(p, "relu.bwd", "dx", dx, EXACT, 1);
}

static void test_point(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(norm_shapes); i++)
        bad += probe_run(build_point, NULL, &norm_shapes[i]);
    assert_int_equal(bad, 0);
}

/* ---- pools and the shortcut */

static const shape pool_shapes[] = {
    {NHWC(2, 8, 8, 16), WINDOW(3, 2, 1)},   {NHWC(1, 7, 9, 3), WINDOW(3, 2, 1)},
    {NHWC(2, 6, 6, 17), WINDOW(2, 2, 0)},   {NHWC(1, 5, 5, 5), WINDOW(2, 1, 1)},
    {NHWC(3, 7, 7, 8), WINDOW(5, 3, 2)},    {NHWC(1, 9, 4, 24), WINDOW(3, 1, 1)},
    {NHWC(1, 15, 15, 2), WINDOW(15, 1, 0)}, {NHWC(2, 4, 4, 64), WINDOW(1, 2, 0)},
    {NHWC(2, 12, 11, 64), WINDOW(3, 3, 0)},
};

/* Rounded down to whole numbers there are ties. */
static dnr_tid tied(probe *p, dnr_tid t, int64_t n)
{
    double *v = probe_values(p, t);
    for (int64_t i = 0; v && i < n; i++)
        v[i] = floor(v[i]);
    return t;
}

static void pool_shape(const shape *c, int64_t *P, int64_t *Q)
{
    *P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    *Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
}

static void build_max_pool(probe *p, const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, false};
    int64_t P, Q;
    pool_shape(c, &P, &Q);
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    const dnr_tid dy = probe_tensor(p, "dy", c->n, P, Q, c->c);
    dnr_tid out[2] = {DNRI_NONE, DNRI_NONE}, dx = DNRI_NONE;
    tied(p, x, c->special ? c->n * c->h * c->w * c->c : 0);
    probe_emit(p, &dnri_def_max_pool, &a, sizeof a, 1, &x, 2, out);
    probe_emit(p, &dnri_def_max_pool_bwd, &a, sizeof a, 2, (dnr_tid[]){dy, out[1]}, 1, &dx);
    probe_result(p, "max_pool", "y", out[0], EXACT, 1);
    probe_result(p, "max_pool", "index", out[1], EXACT, 1);
    probe_result(p, "max_pool.bwd", "dx", dx, POINT, 1);
}

/* A NaN among the values too: it wins. */
static void build_max_pool_act(probe *p, const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, true};
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    const dnr_tid bias = probe_vector(p, "bias", c->c, 1, -1);
    double *v = probe_values(p, x);
    dnr_tid y = DNRI_NONE;
    if (v && c->special)
        v[c->h * c->w * c->c / 2] = NAN;
    probe_emit(p, &dnri_def_max_pool_act, &a, sizeof a, 2, (dnr_tid[]){x, bias}, 1, &y);
    probe_result(p, "max_pool.act", "y", y, POINT, 1);
}

/* Not every device has it, and nobody splits it: a rewrite asks before. */
static bool has_max_pool_act(const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, true};
    rig r;
    dnr_tid y = DNRI_NONE;
    rig_open(&r, probe_device, probe_precision, false);
    const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(r.num.compute, c->n, c->h, c->w, c->c));
    const dnr_tid bias = rig_leaf(&r, "bias", dnri_desc1(r.num.master, c->c));
    OK(dnri_emit(r.g, &dnri_def_max_pool_act, "l", &a, sizeof a, 2, (dnr_tid[]){x, bias}, 1, &y));
    const bool has = dnri_device_supports(probe_device, r.g, dnri_graph_op_c(r.g, 0));
    rig_close(&r);
    return has;
}

/* Which of several NaNs wins is left open: only y counts. */
static void build_nan_pool(probe *p, const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, false};
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c);
    double *v = probe_values(p, x);
    dnr_tid out[2] = {DNRI_NONE, DNRI_NONE};
    for (int64_t i = 0; v && i < c->n * c->h * c->w * c->c; i += 7)
        v[i] = NAN;
    probe_emit(p, &dnri_def_max_pool, &a, sizeof a, 1, &x, 2, out);
    probe_result(p, "max_pool", "NaN", out[0], EXACT, 1);
}

static void build_avg_pool(probe *p, const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, false};
    int64_t P, Q;
    pool_shape(c, &P, &Q);
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c),
                  dy = probe_tensor(p, "dy", c->n, P, Q, c->c);
    dnr_tid y = DNRI_NONE, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_avg_pool, &a, sizeof a, 1, &x, 1, &y);
    probe_emit(p, &dnri_def_avg_pool_bwd, &a, sizeof a, 1, &dy, 1, &dx);
    probe_result(p, "avg_pool", "y", y, POINT, 1);
    probe_result(p, "avg_pool.bwd", "dx", dx, POINT, 1);
}

static void build_global_pool(probe *p, const shape *c)
{
    const dnri_pool_attr a = {.h = c->h, .w = c->w};
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c),
                  dy = probe_tensor(p, "dy", c->n, 1, 1, c->c);
    dnr_tid y = DNRI_NONE, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_global_pool, &a, sizeof a, 1, &x, 1, &y);
    probe_emit(p, &dnri_def_global_pool_bwd, &a, sizeof a, 1, &dy, 1, &dx);
    probe_result(p, "global_pool", "y", y, POINT, 1);
    probe_result(p, "global_pool.bwd", "dx", dx, POINT, 1);
}

static void test_pools(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(pool_shapes); i++) {
        shape c = pool_shapes[i];
        bad += probe_run(build_max_pool, NULL, &c);
        bad += probe_run(build_nan_pool, NULL, &c);
        bad += probe_run(build_avg_pool, NULL, &c);
        bad += probe_run(build_global_pool, NULL, &c);
        if (has_max_pool_act(&c))
            bad += probe_run(build_max_pool_act, NULL, &c);
        c.special = true;
        bad += probe_run(build_max_pool, NULL, &c);
        if (has_max_pool_act(&c))
            bad += probe_run(build_max_pool_act, NULL, &c);
    }
    bad += probe_run(build_global_pool, NULL, &(shape){NHWC(3, 1, 1, 5)});
    bad += probe_run(build_max_pool, NULL, &(shape){NHWC(2, 128, 130, 128), WINDOW(3, 2, 1)});
    assert_int_equal(bad, 0);
}

static void build_shortcut(probe *p, const shape *c)
{
    const dnri_shortcut_attr a = {(int32_t)c->k, c->stride, c->h, c->w, c->c};
    const int64_t P = (c->h - 1) / c->stride + 1, Q = (c->w - 1) / c->stride + 1;
    const dnr_tid x = probe_tensor(p, "x", c->n, c->h, c->w, c->c),
                  dy = probe_tensor(p, "dy", c->n, P, Q, c->k);
    dnr_tid y = DNRI_NONE, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_shortcut, &a, sizeof a, 1, &x, 1, &y);
    probe_emit(p, &dnri_def_shortcut_bwd, &a, sizeof a, 1, &dy, 1, &dx);
    probe_result(p, "shortcut", "y", y, EXACT, 1);
    probe_result(p, "shortcut.bwd", "dx", dx, EXACT, 1);
}

static void test_shortcut(void **state)
{
    static const shape cases[] = {
        {NHWC(2, 8, 8, 16), .k = 32, .stride = 2}, {NHWC(1, 7, 5, 3), .k = 8, .stride = 2},
        {NHWC(3, 4, 4, 5), .k = 5, .stride = 1},   {NHWC(1, 9, 9, 17), .k = 40, .stride = 3},
        {NHWC(2, 6, 6, 8), .k = 16, .stride = 1},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        bad += probe_run(build_shortcut, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

/* ---- loss */

static void build_loss(probe *p, const shape *c)
{
    const dnri_loss_attr a = {c->smoothing, 1.0 / (double)c->n, true};
    const dnr_tid logits =
        probe_leaf(p, "logits", dnri_desc4(probe_compute(p), c->n, 1, 1, c->k), 3, c->shift);
    const dnr_tid labels = probe_leaf(p, "labels", dnri_desc4(DNR_I32, c->n, 1, 1, 1), 1, 0);
    double *v = probe_values(p, labels);
    for (int64_t i = 0; v && i < c->n; i++)
        v[i] = i % 4 == 2 ? -1 : (double)(i * 7 % c->k);
    if (c->special) {
        tied(p, logits, c->n * c->k);
        if (probe_values(p, logits))
            probe_values(p, logits)[c->k + 1] = NAN; /* of sample 1 */
    }
    const dnr_tid soft =
        c->soft ? probe_leaf(p, "soft", dnri_desc4(probe_master(p), c->n, 1, 1, c->k), 0.1, 0.2)
                : DNRI_NONE;
    const dnr_tid s = dnri_slab_tensor(probe_graph(p), DNRI_STATE);
    const dnr_tid header = dnri_slab_tensor(probe_graph(p), DNRI_HEADER);
    dnr_tid out[] = {DNRI_NONE, s}, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_loss, &a, sizeof a, 4, (dnr_tid[]){logits, labels, soft, header}, 2,
               out);
    probe_emit(p, &dnri_def_loss_bwd, &a, sizeof a, 4, (dnr_tid[]){logits, labels, soft, s}, 1,
               &dx);
    p->state = (dnri_state){.loss_sum = 3,
                            .correct1 = 1,
                            .correct5 = 2,
                            .samples = 4,
                            .forwards = 5,
                            .loss_scale = 1024};
    p->first = !c->later;
    probe_result(p, "loss.fprop", "loss", out[0], SUM, 1);
    probe_result(p, "loss.bwd", "dlogits", dx, POINT, 1);
}

static void test_loss(void **state)
{
    static const shape cases[] = {
        {.n = 4, .k = 10},
        {.n = 5, .k = 1000, .smoothing = 0.1},
        {.n = 37, .k = 10, .smoothing = 0.1, .later = true},
        {.n = 6, .k = 3, .smoothing = 0.1},
        {.n = 6, .k = 5},
        {.n = 1, .k = 7},
        {.n = 4, .k = 1, .smoothing = 0.1},
        {.n = 8, .k = 10, .soft = true},
        {.n = 9, .k = 17, .soft = true, .smoothing = 0.1},
        {.n = 8, .k = 10, .special = true},
        {.n = 8, .k = 4, .special = true},
        {.n = 8, .k = 10, .shift = 200}, /* no overflow in exp */
        {.n = 300, .k = 33, .smoothing = 0.1},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        bad += probe_run(build_loss, NULL, &cases[i]);
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conv),     cmocka_unit_test(test_dense),
        cmocka_unit_test(test_norm),     cmocka_unit_test(test_conv_act),
        cmocka_unit_test(test_widen),    cmocka_unit_test(test_fold),
        cmocka_unit_test(test_norm_bwd), cmocka_unit_test(test_large_norms),
        cmocka_unit_test(test_point),    cmocka_unit_test(test_pools),
        cmocka_unit_test(test_shortcut), cmocka_unit_test(test_loss),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
