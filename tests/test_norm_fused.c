/* test_norm_fused.c: a norm that takes statistics from a convolution or leaves a mask, on one device against the
 * reference device. Skipped where the device has neither.
 *
 *     test_norm_fused DEVICE PRECISION        test_norm_fused cuda fp16 */
#include "probe.h"
#include "../runtime/engine_ops.h"

#include <string.h>

/* The recompute clone gives the bits that norm.train gave. */
static int check_clone(const probe *p, double *got[MAX_OUTS])
{
    const size_t n = (size_t)rig_count(&p->r[REF], p->out[0].tid[REF]);
    if (memcmp(got[0], got[1], n * sizeof *got[0]) == 0)
        return 0;
    print_error("norm.apply differs from norm.train in its bits\n");
    return 1;
}

/* ---- convolution with statistics, and the norm that takes them */

static bool device_has_stats(const shape *c)
{
    const dnri_conv_attr a = {c->kernel, c->stride, c->pad, c->h, c->w};
    dnr_tid out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    rig r;
    rig_open(&r, probe_device, probe_precision, true);
    const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(r.num.compute, c->n, c->h, c->w, c->c));
    const dnr_tid w =
        rig_leaf(&r, "w", dnri_desc4(r.num.compute, c->k, c->kernel, c->kernel, c->c));
    OK(dnri_emit(r.g, &dnri_def_conv_stats, "l", &a, sizeof a, 2, (dnr_tid[]){x, w}, 3, out));
    const bool has = dnri_device_supports(probe_device, r.g, dnri_graph_op_c(r.g, 0));
    rig_close(&r);
    return has;
}

/* Channels of y have r = |mean|/std of about c->shift (root mean square). Bounds: y's rounding is r times larger
 * beside its std, and the variance loses 3e-6 · r² by cancellation. */
static void build_stats(probe *p, const shape *c)
{
    const dnri_conv_attr a = {c->kernel, c->stride, c->pad, c->h, c->w};
    const dnri_norm_attr b = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, c->relu};
    const dnr_tid x =
        probe_leaf(p, "x", dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c), 1, c->shift);
    const dnr_tid w = probe_tensor(p, "w", c->k, c->kernel, c->kernel, c->c);
    dnr_tid conv[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE}, train[3], apply = DNRI_NONE;
    train[0] = train[1] = train[2] = DNRI_NONE;
    probe_emit(p, &dnri_def_conv_stats, &a, sizeof a, 2, (dnr_tid[]){x, w}, 3, conv);
    dnr_tid in[] = {conv[0],
                    probe_vector(p, "gamma", c->k, 0.5, 1),
                    probe_vector(p, "beta", c->k, 0.5, 0),
                    DNRI_NONE,
                    probe_vector(p, "running_mean", c->k, 1, 0),
                    probe_vector(p, "running_var", c->k, 0.1, 1),
                    conv[1],
                    conv[2]};
    const dnr_tid running[] = {in[4], in[5]};
    probe_emit(p, &dnri_def_norm_train, &b, sizeof b, 8, in, 3, train);
    in[4] = train[1];
    in[5] = train[2];
    probe_emit(p, &dnri_def_norm_apply, &b, sizeof b, 6, in, 1, &apply);
    const double spread = 1 + 3 * c->shift * c->shift * probe_bound(SUM) / probe_bound(POINT);
    probe_result(p, "norm.train sums", "y", train[0], POINT, 0.5 + c->shift / 2 + spread);
    probe_result(p, "norm.apply sums", "y", apply, POINT, 0.5 + c->shift / 2 + spread);
    probe_result(p, "conv.stats", "y", conv[0], PRODUCT, 1);
    probe_result(p, "conv.stats", "sum", conv[1], POINT, 1);
    probe_result(p, "conv.stats", "sqsum", conv[2], POINT, 1);
    probe_result(p, "norm.train sums", "mean", train[1], POINT, 1);
    probe_result(p, "norm.train sums", "invstd", train[2], POINT, spread);
    probe_result(p, "norm.train sums", "running_mean", running[0], POINT, 1);
    probe_result(p, "norm.train sums", "running_var", running[1], POINT, spread);
}

static void test_stats(void **state)
{
    static const shape cases[] = {
        {NHWC(8, 14, 14, 64), .k = 64, WINDOW(3, 1, 1)},
        {NHWC(8, 14, 14, 64), .k = 128, WINDOW(3, 2, 1)},
        {NHWC(4, 28, 28, 64), .k = 256, WINDOW(1, 1, 0)},
        {NHWC(4, 28, 28, 256), .k = 64, WINDOW(1, 1, 0)},
        {NHWC(4, 14, 14, 128), .k = 256, WINDOW(1, 2, 0)},
        {NHWC(5, 7, 7, 8), .k = 24, WINDOW(3, 1, 1)},
        {NHWC(3, 9, 11, 16), .k = 8, WINDOW(5, 3, 2)},
        {NHWC(8, 28, 28, 64), .k = 256, WINDOW(1, 1, 0), .shift = 1},
        {NHWC(8, 28, 28, 64), .k = 256, WINDOW(1, 1, 0), .shift = 4},
        {NHWC(8, 28, 28, 64), .k = 256, WINDOW(1, 1, 0), .shift = 30},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++) {
        shape c = cases[i];
        if (!device_has_stats(&c))
            continue;
        tried++;
        bad += probe_run(build_stats, check_clone, &c);
        c.relu = true;
        bad += probe_run(build_stats, check_clone, &c);
    }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

/* ---- the stem over packed pictures with statistics, and the norm and pool that take them */

static dnri_packed_conv_attr stem_attr(const shape *c)
{
    return (dnri_packed_conv_attr){{7, 2, 3, c->h, c->w}, DNRI_QUADS};
}

static bool device_has_stem(const shape *c, bool wgrad)
{
    const dnri_packed_conv_attr a = stem_attr(c);
    dnr_tid out[3] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    rig r;
    rig_open(&r, probe_device, probe_precision, true);
    const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(r.num.compute, c->n, c->h, c->w, 4));
    const dnr_tid w = rig_leaf(&r, "w", dnri_desc4(r.num.compute, c->k, 7, 7, 3));
    const dnr_tid dy =
        rig_leaf(&r, "dy", dnri_desc4(r.num.compute, c->n, c->h / 2, c->w / 2, c->k));
    if (wgrad)
        OK(dnri_emit(r.g, &dnri_def_packed_conv_wgrad, "l", &a, sizeof a, 2, (dnr_tid[]){x, dy}, 1,
                     out));
    else
        OK(dnri_emit(r.g, &dnri_def_packed_conv, "l", &a, sizeof a, 2, (dnr_tid[]){x, w}, 3, out));
    const bool has = dnri_device_supports(probe_device, r.g, dnri_graph_op_c(r.g, 0));
    rig_close(&r);
    return has;
}

/* Pictures with a fourth channel of zeros; weights as they are, or packed. */
static void build_stem(probe *p, const shape *c)
{
    const dnri_packed_conv_attr a = stem_attr(c);
    const dnri_norm_pool_attr b = {.norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true},
                                   .pool = {3, 2, 1, c->h / 2, c->w / 2, true}};
    const dnr_tid x =
        probe_leaf(p, "x", dnri_desc4(probe_compute(p), c->n, c->h, c->w, 4), 1, c->shift);
    const dnr_tid w = probe_tensor(p, "w", c->k, 7, 7, c->special ? 4 : 3);
    dnr_tid conv[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE}, apply[] = {DNRI_NONE, DNRI_NONE};
    dnr_tid train[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    double *v = probe_values(p, x), *u = probe_values(p, w);
    for (int64_t i = 3; v && i < c->n * c->h * c->w * 4; i += 4)
        v[i] = 0;
    for (int64_t i = 3; u && c->special && i < c->k * 49 * 4; i += 4)
        u[i] = 0;
    probe_emit(p, &dnri_def_packed_conv, &a, sizeof a, 2, (dnr_tid[]){x, w}, 3, conv);
    dnr_tid in[] = {conv[0],
                    probe_vector(p, "gamma", c->k, 0.5, 1),
                    probe_vector(p, "beta", c->k, 0.5, 0),
                    probe_vector(p, "running_mean", c->k, 1, 0),
                    probe_vector(p, "running_var", c->k, 0.1, 1),
                    conv[1],
                    conv[2]};
    const dnr_tid running[] = {in[3], in[4]};
    probe_emit(p, &dnri_def_norm_pool_train, &b, sizeof b, 7, in, 4, train);
    in[3] = train[2];
    in[4] = train[3];
    probe_emit(p, &dnri_def_norm_pool_apply, &b, sizeof b, 5, in, 2, apply);
    probe_result(p, "norm_pool sums", "y", train[0], POINT, 2 + c->shift);
    probe_result(p, "norm_pool.apply", "y", apply[0], POINT, 2 + c->shift);
    probe_result(p, "conv_packed", "y", conv[0], PRODUCT, 1);
    probe_result(p, "conv_packed", "sum", conv[1], POINT, 1);
    probe_result(p, "conv_packed", "sqsum", conv[2], POINT, 1);
    probe_result(p, "norm_pool sums", "mean", train[2], POINT, 1);
    probe_result(p, "norm_pool sums", "invstd", train[3], POINT, 1);
    probe_result(p, "norm_pool sums", "running_mean", running[0], POINT, 1);
    probe_result(p, "norm_pool sums", "running_var", running[1], POINT, 1);
}

/* dw is not rounded to the compute type; tensor cores round towards zero as they add. */
static void build_stem_wgrad(probe *p, const shape *c)
{
    const dnri_packed_conv_attr a = stem_attr(c);
    const dnr_tid x =
        probe_leaf(p, "x", dnri_desc4(probe_compute(p), c->n, c->h, c->w, 4), 1, c->shift);
    const dnr_tid dy = probe_tensor(p, "dy", c->n, c->h / 2, c->w / 2, c->k);
    dnr_tid dw = DNRI_NONE;
    double *v = probe_values(p, x);
    for (int64_t i = 3; v && i < c->n * c->h * c->w * 4; i += 4)
        v[i] = 0;
    probe_emit(p, &dnri_def_packed_conv_wgrad, &a, sizeof a, 2, (dnr_tid[]){x, dy}, 1, &dw);
    probe_result(p, "conv_packed", "dw", dw, SUM, 5);
}

/* ResNet's, and rows and columns that fill no tile; as many rows as keep blocks busy for several steps each. */
static void test_stem(void **state)
{
    static const shape cases[] = {
        {NHWC(2, 224, 224, 3), .k = 64, .shift = 1},
        {NHWC(24, 192, 160, 3), .k = 64},
        {NHWC(2, 224, 224, 3), .k = 64, .special = true},
        {NHWC(3, 36, 42, 3), .k = 64, .special = true},
        {NHWC(5, 10, 34, 3), .k = 64},
        {NHWC(2, 4, 4, 3), .k = 64},
        {NHWC(1, 448, 452, 3), .k = 64, .shift = 1},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int wgrad = 0; wgrad < 2; wgrad++)
            if (device_has_stem(&cases[i], wgrad)) {
                tried++;
                bad += wgrad ? probe_run(build_stem_wgrad, NULL, &cases[i])
                             : probe_run(build_stem, check_clone, &cases[i]);
            }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

/* ---- masks */

/* The mask that norm.train leaves, and norm.bwd by it. */
static void build_mask(probe *p, const shape *c)
{
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true};
    const dnri_norm_bwd_attr b = {true, true};
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c);
    const dnr_tid in[] = {
        probe_leaf(p, "x", d, 1.5, 0.5 + c->shift),  probe_vector(p, "gamma", c->c, 0.5, 1),
        probe_vector(p, "beta", c->c, 0.5, 0),       probe_leaf(p, "residual", d, 1, 0),
        probe_vector(p, "running_mean", c->c, 1, 0), probe_vector(p, "running_var", c->c, 0.1, 1)};
    const dnr_tid dy = probe_leaf(p, "dy", d, 1, 0);
    const dnr_tid dy2 = c->dy2 ? probe_leaf(p, "dy2", d, 1, 0.1) : DNRI_NONE;
    dnr_tid train[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    probe_emit(p, &dnri_def_norm_train, &a, sizeof a, 6, in, 4, train);
    const dnr_tid bwd[] = {in[0], train[3], dy, dy2, in[1], in[2], train[1], train[2]};
    probe_emit(p, &dnri_def_norm_bwd, &b, sizeof b, 8, bwd, 4, out);
    probe_result(p, "norm.train", "mask", train[3], EXACT, 1);
    probe_result(p, "norm.train", "y", train[0], POINT, 1);
    probe_result(p, "norm.bwd mask", "dx", out[0], POINT, 2);
    probe_result(p, "norm.bwd mask", "dgamma", out[1], POINT, 1);
    probe_result(p, "norm.bwd mask", "dbeta", out[2], POINT, 1);
    probe_result(p, "norm.bwd mask", "dresidual", out[3], c->dy2 ? POINT : EXACT, 1);
}

static bool device_has_masks(const shape *c)
{
    const dnri_norm_attr a = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true};
    dnr_tid in[6], out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    rig r;
    rig_open(&r, probe_device, probe_precision, true);
    const dnr_desc d = dnri_desc4(r.num.compute, c->n, c->h, c->w, c->c);
    for (int i = 0; i < 6; i++)
        in[i] = rig_leaf(&r, "in", i == 0 || i == 3 ? d : dnri_desc1(r.num.master, c->c));
    OK(dnri_emit(r.g, &dnri_def_norm_train, "l", &a, sizeof a, 6, in, 4, out));
    const bool has = dnri_device_supports(probe_device, r.g, dnri_graph_op_c(r.g, 0));
    rig_close(&r);
    return has;
}

static void test_mask(void **state)
{
    static const shape cases[] = {
        {NHWC(1, 8, 8, 16)}, {NHWC(4, 5, 5, 64)},   {NHWC(8, 2, 2, 24)},    {NHWC(2, 9, 9, 256)},
        {NHWC(3, 5, 7, 8)},  {NHWC(2, 7, 7, 2048)}, {NHWC(16, 28, 28, 64)},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++) {
        shape c = cases[i];
        if (!device_has_masks(&c))
            continue;
        tried++;
        bad += probe_run(build_mask, NULL, &c);
        c.dy2 = true;
        bad += probe_run(build_mask, NULL, &c);
    }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_stem),
        cmocka_unit_test(test_mask),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
