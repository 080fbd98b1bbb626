/* test_algbn.c: the ops of algebraic batch norm on one device against the reference device, and what the rewrite makes
 * of a convolution and its norm against the plain ops in fp64. Skipped where the device lacks the ops.
 *
 *     test_algbn DEVICE PRECISION        test_algbn cuda fp16 */
#include "probe.h"

#include "../layers/fuse.h"

#include <math.h>

static bool device_has(rig *r)
{
    bool has = true;
    for (int i = 0; i < dnri_graph_ops(r->g); i++)
        has &= dnri_device_supports(probe_device, r->g, dnri_graph_op_c(r->g, i));
    return has;
}

/* ---- norm.dz */

enum { SIGN_Y, SIGN_MASK, SIGN_NONE, SIGNS };

/* c->kernel: where the sign comes from; c->stride 2: dy2 is of every second pixel. */
static dnr_desc dy2_of(const shape *c, dnr_dtype t)
{
    const int64_t s = c->stride;
    return dnri_desc4(t, c->n, (c->h + s - 1) / s, (c->w + s - 1) / s, c->c);
}

static void build_dz(probe *p, const shape *c)
{
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c);
    dnr_tid in[] = {DNRI_NONE, probe_leaf(p, "dy", d, 1, c->shift),
                    c->dy2 ? probe_leaf(p, "dy2", dy2_of(c, d.dtype), 1, 0.1) : DNRI_NONE};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE};
    if (c->kernel == SIGN_Y)
        in[0] = probe_leaf(p, "y", d, 1, 0);
    if (c->kernel == SIGN_MASK)
        in[0] = probe_leaf(p, "mask", dnri_desc4(DNR_U8, c->n, c->h, c->w, c->c / 8), 1, 0);
    double *v = probe_values(p, in[0]);
    for (int64_t i = 0; v && c->kernel == SIGN_MASK && i < c->n * c->h * c->w * c->c / 8; i++)
        v[i] = (double)((uint64_t)(fabs(v[i]) * 1e6) & 255);
    for (int64_t i = 0; v && c->kernel == SIGN_Y && i < c->n * c->h * c->w * c->c; i++)
        v[i] = v[i] < 0 ? 0 : v[i]; /* as a ReLU leaves it */
    probe_emit(p, &dnri_def_norm_dz, NULL, 0, 3, in, 2, out);
    probe_result(p, "norm.dz", "dz", out[0], c->dy2 ? POINT : EXACT, 1);
    probe_result(p, "norm.dz", "sum", out[1], c->dy2 ? POINT : SUM, 1);
}

static bool has_dz(const shape *c)
{
    rig r;
    rig_open(&r, probe_device, probe_precision, true);
    const dnr_desc d = dnri_desc4(r.num.compute, c->n, c->h, c->w, c->c);
    const dnr_tid y = c->kernel == SIGN_MASK
                          ? rig_leaf(&r, "y", dnri_desc4(DNR_U8, c->n, c->h, c->w, c->c / 8))
                          : rig_leaf(&r, "y", d);
    const dnr_tid in[] = {c->kernel == SIGN_NONE ? DNRI_NONE : y, rig_leaf(&r, "dy", d),
                          c->dy2 ? rig_leaf(&r, "dy2", dy2_of(c, d.dtype)) : DNRI_NONE};
    OK(dnri_emit(r.g, &dnri_def_norm_dz, "l", NULL, 0, 3, in, 2,
                 (dnr_tid[]){DNRI_NONE, DNRI_NONE}));
    const bool has = device_has(&r);
    rig_close(&r);
    return has;
}

static void test_dz(void **state)
{
    static const shape cases[] = {
        {NHWC(4, 5, 5, 64)},    {NHWC(2, 9, 9, 256)}, {NHWC(3, 5, 7, 8)},
        {NHWC(2, 7, 7, 2048)},  {NHWC(1, 1, 3, 128)}, {NHWC(16, 28, 28, 512)},
        {NHWC(3, 13, 11, 256)}, {NHWC(1, 8, 8, 24)},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int form = 0; form < 3 * SIGNS; form++) {
            shape c = cases[i];
            c.kernel = form / 3;
            c.dy2 = form % 3;
            c.stride = form % 3 == 2 ? 2 : 1;
            if ((c.kernel == SIGN_NONE && !c.dy2) || !has_dz(&c))
                continue;
            tried++;
            bad += probe_run(build_dz, NULL, &c);
        }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

/* ---- gram, algbn.coef, algbn.dgrad */

/* Relative to its norm, a sum of products of 16-bit numbers that a tensor core adds 1,568 at a time, is good to 1e-5;
 * 3 times the usual bound of a sum otherwise. */
static double gram_loose(void)
{
    return probe_bound(POINT) > 1e-4 ? 1e-5 / probe_bound(SUM) : 3;
}

/* Of two matrices twice as many rows. */
static double product_loose(void)
{
    return probe_bound(POINT) > 1e-4 ? 2 * gram_loose() : gram_loose();
}

typedef struct leaves {
    dnr_tid a, dz, w, gamma, mean, invstd, sum_dz;
} leaves;

static leaves make_leaves(probe *p, const shape *c)
{
    const dnr_desc a = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c);
    const dnr_desc dz = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->k);
    const double rows = (double)(c->n * c->h * c->w);
    return (leaves){
        .a = probe_leaf(p, "a", a, 1, 0.5 + c->shift),
        .dz = probe_leaf(p, "dz", dz, 1, c->smoothing),
        .w = probe_leaf(p, "w", dnri_desc4(probe_compute(p), c->k, 1, 1, c->c), 0.1, 0),
        .gamma = probe_vector(p, "gamma", c->k, 0.5, 1),
        .mean = probe_vector(p, "mean", c->k, 0.3, 0),
        .invstd = probe_vector(p, "invstd", c->k, 0.1, 0.7),
        .sum_dz = probe_vector(p, "sum_dz", c->k, sqrt(rows), c->smoothing * rows),
    };
}

static void build_ops(probe *p, const shape *c)
{
    const dnri_algbn_attr attr = {.rows = c->n * c->h * c->w, .first = true};
    const leaves l = make_leaves(p, c);
    dnr_graph *g = probe_graph(p);
    dnr_tid gram[] = {DNRI_NONE, DNRI_NONE}, product = DNRI_NONE, da = DNRI_NONE;
    dnr_tid coef[] = {DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      dnri_slab_tensor(g, DNRI_STATE)};
    probe_emit(p, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){l.a, DNRI_NONE}, 2, gram);
    probe_emit(p, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){l.a, l.dz}, 1, &product);
    const dnr_tid in[] = {product,  gram[0],  gram[1],
                          l.sum_dz, l.w,      l.gamma,
                          l.mean,   l.invstd, dnri_slab_tensor(g, DNRI_HEADER)};
    probe_emit(p, &dnri_def_algbn_coef, &attr, sizeof attr, 9, in, 7, coef);
    p->state.algbn_ratio = 1e6f; /* begins anew */
    probe_emit(p, &dnri_def_algbn_dgrad, NULL, 0, 5,
               (dnr_tid[]){l.dz, l.a, coef[3], coef[4], coef[5]}, 1, &da);
    probe_result(p, "gram", "gram", gram[0], SUM, gram_loose());
    probe_result(p, "gram", "sum", gram[1], SUM, 1);
    probe_result(p, "gram", "product", product, SUM, product_loose());
    probe_result(p, "algbn.coef", "dw", coef[0], WGRAD, 1);
    probe_result(p, "algbn.coef", "dgamma", coef[1], WGRAD, 1);
    probe_result(p, "algbn.coef", "dbeta", coef[2], EXACT, 1);
    probe_result(p, "algbn.coef", "wa", coef[3], POINT, 1);
    probe_result(p, "algbn.coef", "m", coef[4], PRODUCT, 1);
    /* da may be rounded twice, and is sums of rounded wa and m */
    probe_result(p, "algbn.dgrad", "da", da, PRODUCT, 2);
}

static bool has_ops(const shape *c)
{
    probe p = {.side = DEVICE};
    rig_open(&p.r[DEVICE], probe_device, probe_precision, true);
    build_ops(&p, c);
    const bool has = device_has(&p.r[DEVICE]);
    rig_close(&p.r[DEVICE]);
    return has;
}

/* smoothing: mean of dz. */
static const shape op_cases[] = {
    {NHWC(2, 8, 8, 16), .k = 64},     {NHWC(4, 28, 28, 64), .k = 256},
    {NHWC(3, 5, 7, 16), .k = 64},     {NHWC(4, 14, 14, 256), .k = 1024},
    {NHWC(4, 7, 7, 512), .k = 2048},  {NHWC(5, 13, 11, 256), .k = 512},
    {NHWC(9, 29, 27, 128), .k = 512}, {NHWC(16, 28, 28, 128), .k = 512},
    {NHWC(3, 33, 31, 64), .k = 256},  {NHWC(1, 3, 3, 8), .k = 16},
    {NHWC(16, 56, 56, 64), .k = 256}, {NHWC(4, 28, 28, 64), .k = 256, .shift = 3},
};

static void test_ops(void **state)
{
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(op_cases); i++) {
        if (!has_ops(&op_cases[i]))
            continue;
        tried++;
        bad += probe_run(build_ops, NULL, &op_cases[i]);
    }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

/* ---- a convolution and its norm, plain on the reference */

enum { REWRITTEN = 7 }; /* ops of the layer; 5 as it was emitted */

/* conv.fprop and norm.train, their backward ops, the gradient by a mask or y where c->relu and c->residual say so;
 * on the device rewritten. c->shift is about |mean|/std of x; c->smoothing the mean of dy. */
static void build_layer(probe *p, const shape *c)
{
    const dnri_conv_attr conv = {1, c->stride, 0, c->h, c->w};
    const int64_t P = (c->h - 1) / c->stride + 1, Q = (c->w - 1) / c->stride + 1;
    const dnri_norm_attr norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, false};
    const dnri_norm_bwd_attr bwd = {c->relu, c->relu && c->residual};
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, P, Q, c->k);
    dnr_graph *g = probe_graph(p);
    const dnr_tid a = probe_leaf(p, "a", dnri_desc4(d.dtype, c->n, c->h, c->w, c->c), 1, c->shift);
    const dnr_tid w = probe_leaf(p, "w", dnri_desc4(d.dtype, c->k, 1, 1, c->c), 0.1, 0);
    const dnr_tid gamma = probe_vector(p, "gamma", c->k, 0.5, 1);
    const dnr_tid beta = probe_vector(p, "beta", c->k, 0.5, 0);
    const dnr_tid running[] = {probe_vector(p, "running_mean", c->k, 1, 0),
                               probe_vector(p, "running_var", c->k, 0.1, 1)};
    const dnr_tid y = c->relu ? probe_leaf(p, "y", d, 1, 0) : DNRI_NONE;
    const dnr_tid dy = probe_leaf(p, "dy", d, 1, c->smoothing);
    const dnr_tid dy2 = c->dy2 ? probe_leaf(p, "dy2", d, 1, 0.1) : DNRI_NONE;
    double *v = probe_values(p, gamma);
    if (v && c->special)
        for (int64_t k = 0; k < c->k; k += 3)
            v[k] = 0;
    dnr_tid x = DNRI_NONE, train[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE}, dw = DNRI_NONE, da = DNRI_NONE;
    probe_emit(p, &dnri_def_conv, &conv, sizeof conv, 2, (dnr_tid[]){a, w}, 1, &x);
    probe_emit(p, &dnri_def_norm_train, &norm, sizeof norm, 6,
               (dnr_tid[]){x, gamma, beta, DNRI_NONE, running[0], running[1]}, 3, train);
    const dnr_tid in[] = {x, y, dy, dy2, gamma, beta, train[1], train[2]};
    probe_emit(p, &dnri_def_norm_bwd, &bwd, sizeof bwd, 8, in, bwd.residual ? 4 : 3, out);
    probe_emit(p, &dnri_def_conv_wgrad, &conv, sizeof conv, 2, (dnr_tid[]){a, out[0]}, 1, &dw);
    probe_emit(p, &dnri_def_conv_dgrad, &conv, sizeof conv, 2, (dnr_tid[]){out[0], w}, 1, &da);
    if (p->side == DEVICE)
        OK(dnri_fuse_algbn(g, probe_device, 0));
    /* the rounding of x shows r times larger beside its std; sums good to e cost e · r² (algbn in layers.h) */
    const double r2 = c->shift * c->shift, m2 = c->smoothing * c->smoothing;
    const double spread = 1 + c->shift / 2 + 3 * (r2 + m2) * probe_bound(SUM) / probe_bound(WGRAD);
    /* dz is stored in the compute type: what that costs grows with its mean */
    const double stored = sqrt(1 + m2);
    const double flips = probe_bound(POINT) > 1e-4 ? 1 : 2; /* fp32: more roundings than one */
    probe_result(p, "algebraic", "dw", dw, WGRAD, flips * spread * stored);
    probe_result(p, "algebraic", "dgamma", out[1], WGRAD, flips * spread * stored);
    probe_result(p, "algebraic", "dbeta", out[2], c->dy2 ? POINT : SUM, 1);
    probe_result(p, "algebraic", "da", da, PRODUCT, 2 * flips * (1 + c->shift / 4));
    if (bwd.residual)
        probe_result(p, "algebraic", "dresidual", out[3], c->dy2 ? POINT : EXACT, 1);
}

static bool rewrites(const shape *c)
{
    probe p = {.side = DEVICE};
    rig_open(&p.r[DEVICE], probe_device, probe_precision, true);
    build_layer(&p, c);
    const bool has = dnri_graph_ops(p.r[DEVICE].g) >= REWRITTEN;
    rig_close(&p.r[DEVICE]);
    return has;
}

static void test_layer(void **state)
{
    static const shape cases[] = {
        {NHWC(4, 28, 28, 64), .k = 256, .stride = 1},
        {NHWC(3, 9, 11, 16), .k = 64, .stride = 1},
        {NHWC(4, 14, 14, 256), .k = 512, .stride = 2},
        {NHWC(3, 15, 13, 64), .k = 128, .stride = 2},
        {NHWC(4, 14, 14, 256), .k = 1024, .stride = 1},
        {NHWC(8, 7, 7, 512), .k = 2048, .stride = 1},
        {NHWC(4, 28, 28, 64), .k = 256, .stride = 1, .special = true},
        {NHWC(8, 28, 28, 64), .k = 256, .stride = 1, .shift = 4},
        {NHWC(8, 28, 28, 64), .k = 256, .stride = 1, .shift = 30},
        {NHWC(8, 28, 28, 64), .k = 256, .stride = 1, .smoothing = 3},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int form = 0; form < 4; form++) {
            shape c = cases[i];
            c.relu = c.residual = form < 3;
            c.dy2 = form > 0;
            if (form == 2)
                c.residual = false;
            if (!rewrites(&c))
                continue;
            tried++;
            bad += probe_run(build_layer, NULL, &c);
        }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

/* ---- forward: the same layer through its Gram matrix, plain on the reference */

/* c->special: residuals so far from 0 that rounding turns no sign, and the mask; of channels whose gamma and beta are 0,
 * half are 0 themselves. */
static bool is_dead(const shape *c, int64_t k)
{
    return c->special && k % 3 == 0;
}

static dnr_tid far_residual(probe *p, const shape *c, dnr_desc d)
{
    const dnr_tid t = probe_leaf(p, "residual", d, 1, 0);
    double *v = probe_values(p, t);
    for (int64_t i = 0; v && c->special && i < dnri_count(&d); i++)
        v[i] = v[i] >= 0 ? 128 : is_dead(c, i % c->k) ? 0 : -128;
    return t;
}

static dnr_tid live_vector(probe *p, const char *name, const shape *c, double shift)
{
    const dnr_tid t = probe_vector(p, name, c->k, 0.5, shift);
    double *v = probe_values(p, t);
    for (int64_t k = 0; v && k < c->k; k++)
        v[k] = is_dead(c, k) ? 0 : v[k];
    return t;
}

enum { SURE, FIRST, TIMED, WAYS }; /* c->kernel: what the device may choose from */

static void build_forward(probe *p, const shape *c)
{
    const dnri_conv_attr conv = {1, 1, 0, c->h, c->w};
    const dnri_norm_attr norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, c->relu};
    const dnri_algbn_stats_attr stats = {c->n * c->h * c->w, DNRI_NORM_EPS, DNRI_NORM_MOMENTUM,
                                         true};
    const dnri_algbn_attr attr = {.rows = stats.rows};
    const dnri_algbn_join_attr join = {c->relu};
    const dnr_desc d = dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->k);
    const bool low = probe_compute(p) != probe_master(p);
    dnr_graph *g = probe_graph(p);
    const dnr_tid a = probe_leaf(p, "a", dnri_desc4(d.dtype, c->n, c->h, c->w, c->c), 1, c->shift);
    const dnr_tid w = probe_leaf(p, "w", dnri_desc4(d.dtype, c->k, 1, 1, c->c), 0.1, 0);
    const dnr_tid gamma = live_vector(p, "gamma", c, 1);
    const dnr_tid beta = live_vector(p, "beta", c, 0);
    const dnr_tid residual = c->residual ? far_residual(p, c, d) : DNRI_NONE;
    const dnr_tid mean = probe_vector(p, "running_mean", c->k, 1, 0);
    const dnr_tid var = probe_vector(p, "running_var", c->k, 0.1, 1);
    dnr_tid x = DNRI_NONE,
            y[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE}; /* as of norm.train */
    if (p->side == REF) {
        probe_emit(p, &dnri_def_conv, &conv, sizeof conv, 2, (dnr_tid[]){a, w}, 1, &x);
        probe_emit(p, &dnri_def_norm_train, &norm, sizeof norm, 6,
                   (dnr_tid[]){x, gamma, beta, residual, mean, var}, c->special ? 4 : 3, y);
    } else {
        dnr_tid gram[] = {DNRI_NONE, DNRI_NONE}, fold[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
        dnr_tid s[] = {DNRI_NONE, DNRI_NONE, dnri_slab_tensor(g, DNRI_STATE)}, out[2] = {-1, -1};
        probe_emit(p, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, DNRI_NONE}, 2, gram);
        probe_emit(p, &dnri_def_algbn_stats, &stats, sizeof stats, 7,
                   (dnr_tid[]){gram[0], gram[1], a, w, mean, var, dnri_slab_tensor(g, DNRI_HEADER)},
                   3, s);
        probe_emit(p, &dnri_def_algbn_fold, &attr, sizeof attr, 5,
                   (dnr_tid[]){w, gram[1], gamma, beta, s[1]}, low ? 3 : 2, fold);
        probe_emit(p, &dnri_def_algbn_join, &join, sizeof join, 5,
                   (dnr_tid[]){a, fold[0], fold[1], residual, fold[2]}, c->special ? 2 : 1, out);
        p->r[DEVICE].first = c->kernel == FIRST;
        p->r[DEVICE].timed = c->kernel == TIMED;
        y[0] = out[0];
        y[1] = s[0];
        y[2] = s[1];
        y[3] = out[1];
    }
    /* A channel's variance from a Gram matrix good to e is good to (1 + r²)·e, invstd to half of that. Here |mean|/std is
     * `shift` times a normal number, so 1 + r² is sqrt(1 + 2·shift² + 3·shift⁴) as a root mean square. Beyond the guard, which
     * sees `shift` itself, all variances are as good as a sum. */
    const double r = c->shift < DNRI_ALGBN_GUARD ? c->shift : 0, r2 = r * r;
    const double loose = 1 + gram_loose() / 2 * sqrt(1 + 2 * r2 + 3 * r2 * r2);
    /* y is rounded, and made of rounded weights; what their sums lose shows beside `shift`, as does the rounding of the shift
     * itself where `low` may be taken */
    const double sums = low ? 1e-5 : probe_bound(SUM);
    const double lost = low && c->kernel != SURE ? 1 : sums / probe_bound(POINT);
    probe_result(p, "forward", "y", y[0], POINT,
                 2 + lost * c->shift + 2 * loose * probe_bound(SUM) / probe_bound(POINT));
    probe_result(p, "forward", "mean", y[1], SUM, gram_loose());
    probe_result(p, "forward", "invstd", y[2], SUM, loose);
    probe_result(p, "forward", "running_mean", mean, SUM, gram_loose());
    probe_result(p, "forward", "running_var", var, SUM, 2 * loose);
    if (c->special)
        probe_result(p, "forward", "mask", y[3], EXACT, 1);
}

static bool has_forward(const shape *c)
{
    probe p = {.side = DEVICE};
    rig_open(&p.r[DEVICE], probe_device, probe_precision, true);
    build_forward(&p, c);
    const bool has = device_has(&p.r[DEVICE]);
    rig_close(&p.r[DEVICE]);
    return has;
}

/* A shift of 1000 has channels whose mean is near 0, since what means of a give it cancels. */
static void test_forward(void **state)
{
    static const shape cases[] = {
        {NHWC(4, 28, 28, 64), .k = 256},
        {NHWC(3, 9, 11, 16), .k = 64},
        {NHWC(4, 14, 14, 256), .k = 1024},
        {NHWC(8, 7, 7, 512), .k = 2048},
        {NHWC(5, 13, 11, 256), .k = 512},
        {NHWC(8, 28, 28, 64), .k = 256, .shift = 4},
        {NHWC(8, 28, 28, 64), .k = 256, .shift = 30},
        {NHWC(8, 28, 28, 64), .k = 256, .shift = 1000},
    };
    int bad = 0, tried = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int form = 0; form < 4 * WAYS; form++) {
            shape c = cases[i];
            c.kernel = form / 4;
            c.relu = form % 4 < 3;
            c.residual = form % 4 > 0 && form % 4 < 3;
            c.special = form % 4 == 2;
            if (!has_forward(&c))
                continue;
            tried++;
            bad += probe_run(build_forward, NULL, &c);
        }
    assert_int_equal(bad, 0);
    if (!tried)
        skip();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dz),
        cmocka_unit_test(test_ops),
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_forward),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
