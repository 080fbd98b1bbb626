/* test_sync_norm.c: the ops of batch norm over several ranks, on one device against the reference device. Other ranks' part of
 * the sums comes from the test.
 *
 *     test_sync_norm DEVICE PRECISION        test_sync_norm cuda fp16 */
#include "probe.h"

#include <math.h>

enum { RANKS = 3 };

static dnr_tid tensor(probe *p, const char *name, const shape *c, double scale, double shift)
{
    return probe_leaf(p, name, dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c), scale, shift);
}

/* This rank's sums. */
static void build_sums(probe *p, const shape *c)
{
    const dnr_tid x = tensor(p, "x", c, 1, c->shift);
    dnr_tid sums[] = {DNRI_NONE, DNRI_NONE};
    probe_emit(p, &dnri_def_norm_sums, NULL, 0, 1, &x, 2, sums);
    probe_result(p, "norm.sums", "sum", sums[0], SUM, 2);
    probe_result(p, "norm.sums", "sqsum", sums[1], SUM, 2);
}

/* The norm by the sums of all: of RANKS ranks whose batches have the means and spreads given here. */
static void build_norm(probe *p, const shape *c)
{
    const dnri_norm_sync_attr a = {{DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, c->relu}, RANKS};
    const double m = (double)(c->n * c->h * c->w * RANKS);
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE};
    const dnr_tid in[] = {tensor(p, "x", c, 1.5, c->shift),
                          probe_vector(p, "gamma", c->c, 0.5, 1),
                          probe_vector(p, "beta", c->c, 0.5, 0),
                          c->residual ? tensor(p, "residual", c, 1, 0) : DNRI_NONE,
                          probe_vector(p, "running_mean", c->c, 1, 0),
                          probe_vector(p, "running_var", c->c, 0.1, 1),
                          probe_vector(p, "sum", c->c, m / 10, m * c->shift),
                          probe_vector(p, "sqsum", c->c, 0, m)};
    double *sum = probe_values(p, in[6]), *sqsum = probe_values(p, in[7]);
    for (int64_t i = 0; sum && i < c->c; i++) { /* spreads of 0.5 to 1.5 */
        const double mean = sum[i] / m, spread = 0.5 + (double)(i % 11) / 10;
        sqsum[i] = m * (mean * mean + spread * spread);
    }
    probe_emit(p, &dnri_def_norm_sync, &a, sizeof a, 8, in, 3, out);
    probe_result(p, "norm.sync", "y", out[0], POINT, 2);
    probe_result(p, "norm.sync", "mean", out[1], SUM, 1);
    probe_result(p, "norm.sync", "invstd", out[2], SUM, 1 + 2 * c->shift * c->shift);
    probe_result(p, "norm.sync", "running_mean", in[4], SUM, 1);
    probe_result(p, "norm.sync", "running_var", in[5], SUM, 1 + 2 * c->shift * c->shift);
}

/* Backward: this rank's sums, and dx by those of all. */
static void build_bwd(probe *p, const shape *c)
{
    const dnri_norm_bwd_attr b = {c->relu, c->relu && c->residual};
    const dnri_norm_dx_attr d = {c->relu && !b.residual, RANKS};
    const double m = (double)(c->n * c->h * c->w * RANKS);
    const dnri_norm_attr n = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, c->relu};
    const dnr_tid x = tensor(p, "x", c, 1.5, 0.5), dy = tensor(p, "dy", c, 1, 0);
    const dnr_tid dy2 = c->dy2 ? tensor(p, "dy2", c, 1, 0.1) : DNRI_NONE;
    const dnr_tid gamma = probe_vector(p, "gamma", c->c, 0.5, 1);
    const dnr_tid beta = probe_vector(p, "beta", c->c, 0.5, 0);
    const dnr_tid mean = probe_vector(p, "mean", c->c, 0.3, 0.5);
    const dnr_tid invstd = probe_vector(p, "invstd", c->c, 0.05, 0.7);
    dnr_tid y = DNRI_NONE;
    const dnr_tid forward[] = {
        x, gamma, beta, b.residual ? tensor(p, "residual", c, 1, 0) : DNRI_NONE, mean, invstd};
    if (c->relu)
        probe_emit(p, &dnri_def_norm_apply, &n, sizeof n, 6, forward, 1, &y);
    const dnr_tid in[] = {x, y, dy, dy2, gamma, beta, mean, invstd};
    dnr_tid sums[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE}, dx = DNRI_NONE;
    probe_emit(p, &dnri_def_norm_bwd_sums, &b, sizeof b, 8, in, 5, sums);
    const dnr_tid all[] = {x,
                           d.relu ? y : DNRI_NONE,
                           b.residual ? sums[4] : dy,
                           b.residual ? DNRI_NONE : dy2,
                           gamma,
                           mean,
                           invstd,
                           probe_vector(p, "sum", c->c, m / 10, 0),
                           probe_vector(p, "dot", c->c, m / 10, 0)};
    probe_emit(p, &dnri_def_norm_bwd_dx, &d, sizeof d, 9, all, 1, &dx);
    probe_result(p, "norm.bwd.sums", "dgamma", sums[0], POINT, 1);
    probe_result(p, "norm.bwd.sums", "dbeta", sums[1], POINT, 1);
    probe_result(p, "norm.bwd.sums", "sum", sums[2], POINT, 1);
    probe_result(p, "norm.bwd.sums", "dot", sums[3], POINT, 1);
    if (b.residual)
        probe_result(p, "norm.bwd.sums", "dresidual", sums[4], c->dy2 ? POINT : EXACT, 1);
    probe_result(p, "norm.bwd.dx", "dx", dx, POINT, 2);
}

static void over_shapes(probe_build build)
{
    static const shape cases[] = {
        {NHWC(4, 14, 14, 64)}, {NHWC(8, 7, 7, 256)},  {NHWC(1, 2, 3, 8)},
        {NHWC(3, 9, 11, 10)},  {NHWC(2, 5, 5, 1030)}, {NHWC(16, 28, 28, 32), .shift = 3},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int form = 0; form < 8; form++) {
            shape c = cases[i];
            c.relu = form & 1;
            c.residual = form & 2;
            c.dy2 = form & 4;
            if ((build == build_sums && form) || (build == build_norm && c.dy2))
                continue;
            bad += probe_run(build, NULL, &c);
        }
    assert_int_equal(bad, 0);
}

static void test_sums(void **state)
{
    over_shapes(build_sums);
}

static void test_norm(void **state)
{
    over_shapes(build_norm);
}

static void test_bwd(void **state)
{
    over_shapes(build_bwd);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_bwd),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
