/* test_norm_pool.c: norm_pool.* on one device against the reference device; whole, or as the device splits it.
 *
 *     test_norm_pool DEVICE PRECISION
 *
 * Exit code 77: this machine has no such device or precision. */
#include "probe.h"

#include <math.h>
#include <string.h>

enum { X, GAMMA, BETA }; /* leaves */
enum { Y, INDEX, Y_AGAIN, INDEX_AGAIN, MEAN, INVSTD };

/* The stem's windows, which devices may have kernels for, and others. */
static const shape shapes[] = {
    {NHWC(2, 8, 8, 16), WINDOW(3, 2, 1)},   {NHWC(3, 12, 4, 64), WINDOW(3, 2, 1)},
    {NHWC(1, 2, 2, 8), WINDOW(3, 2, 1)},    {NHWC(2, 6, 10, 24), WINDOW(3, 2, 1)},
    {NHWC(1, 30, 18, 8), WINDOW(3, 2, 1)},  {NHWC(1, 4, 6, 264), WINDOW(3, 2, 1)},
    {NHWC(1, 4, 4, 4104), WINDOW(3, 2, 1)}, {NHWC(2, 7, 9, 16), WINDOW(3, 2, 1)},
    {NHWC(2, 6, 6, 5), WINDOW(3, 2, 1)},    {NHWC(2, 6, 6, 16), WINDOW(2, 2, 0)},
    {NHWC(1, 9, 9, 8), WINDOW(3, 1, 1)},
};

/* Rounded down to halves there are ties. */
static dnr_tid tied(probe *p, dnr_tid t)
{
    double *v = probe_values(p, t);
    const int64_t n = v ? rig_count(&p->r[REF], t) : 0;
    for (int64_t i = 0; i < n; i++)
        v[i] = floor(2 * v[i]) / 2;
    return t;
}

/* Of both signs, and 0. */
static dnr_tid odd_gamma(probe *p, int64_t c)
{
    const dnr_tid t = probe_vector(p, "gamma", c, 0.5, 1);
    double *v = probe_values(p, t);
    for (int64_t i = 0; v && i < c; i++)
        v[i] = i % 4 == 1 ? -v[i] : i % 7 == 6 ? 0 : v[i];
    return t;
}

static void build_forward(probe *p, const shape *c)
{
    const dnri_norm_pool_attr a = {.norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true},
                                   .pool = {c->kernel, c->stride, c->pad, c->h, c->w, true}};
    dnr_tid in[] = {
        probe_leaf(p, "x", dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c), 1.5, 0.5),
        odd_gamma(p, c->c), probe_vector(p, "beta", c->c, 0.5, 0),
        probe_vector(p, "running_mean", c->c, 1, 0), probe_vector(p, "running_var", c->c, 0.1, 1)};
    const dnr_tid running[] = {in[3], in[4]};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnr_tid apply[] = {DNRI_NONE, DNRI_NONE};
    if (c->special)
        tied(p, in[X]);
    probe_emit(p, &dnri_def_norm_pool_train, &a, sizeof a, 5, in, 4, out);
    in[3] = out[2];
    in[4] = out[3];
    probe_emit(p, &dnri_def_norm_pool_apply, &a, sizeof a, 5, in, 2, apply);
    /* with few rows a value can equal the mean, and what the rounding of that leaves shows */
    const double loose = probe_bound(POINT) < 1e-6 && c->n * c->h * c->w < 50 ? 10 : 1;
    const double any =
        1e12; /* an index is judged by check_index: split devices round before the pool */
    probe_result(p, "norm_pool.train", "y", out[0], POINT, loose);
    probe_result(p, "norm_pool.train", "index", out[1], POINT, any);
    probe_result(p, "norm_pool.apply", "y", apply[0], POINT, loose);
    probe_result(p, "norm_pool.apply", "index", apply[1], POINT, any);
    probe_result(p, "norm_pool.train", "mean", out[2], SUM, 1);
    probe_result(p, "norm_pool.train", "invstd", out[3], SUM, 1);
    probe_result(p, "norm_pool.train", "running_mean", running[0], SUM, 1);
    probe_result(p, "norm_pool.train", "running_var", running[1], SUM, 1);
}

static const shape *current;

/* Is `index` right for window i of channel c, whose maximum is y? It names none just where y is 0; else a pixel that
 * gives y, and none of equal x before it. */
static bool index_is_right(const probe *p, double *got[MAX_OUTS], int64_t i, int64_t c, double y,
                           int index)
{
    const shape *s = current;
    const int64_t P = (s->h + 2 * s->pad - s->kernel) / s->stride + 1;
    const int64_t Q = (s->w + 2 * s->pad - s->kernel) / s->stride + 1;
    const int64_t h0 = i / Q % P * s->stride - s->pad, w0 = i % Q * s->stride - s->pad;
    const double *x = p->leaf[X].v;
    double named = NAN;
    if (index == 255 || !(y > 0))
        return index == 255 && !(y > 0);
    for (int t = index; t >= 0; t--) {
        const int64_t h = h0 + t / s->kernel, w = w0 + t % s->kernel;
        if (h < 0 || h >= s->h || w < 0 || w >= s->w)
            continue;
        const double v = x[((i / Q / P * s->h + h) * s->w + w) * s->c + c];
        if (t < index && (v == named || p->leaf[GAMMA].v[c] == 0))
            return false;
        named = t == index ? v : named;
    }
    const double z =
        p->leaf[GAMMA].v[c] * (named - got[MEAN][c]) * got[INVSTD][c] + p->leaf[BETA].v[c];
    return fabs(z - y) <= 16 * probe_bound(POINT) * (fabs(y) + 1);
}

static int check_index(const probe *p, double *got[MAX_OUTS])
{
    const int64_t n = rig_count(&p->r[REF], p->out[Y].tid[REF]), c = current->c;
    if (memcmp(got[Y], got[Y_AGAIN], (size_t)n * sizeof(double)) ||
        memcmp(got[INDEX], got[INDEX_AGAIN], (size_t)n * sizeof(double))) {
        print_error("norm_pool.apply differs from norm_pool.train in its bits\n");
        return 1;
    }
    for (int64_t i = 0; i < n; i++)
        if (!index_is_right(p, got, i / c, i % c, got[Y][i], (int)got[INDEX][i])) {
            print_error("index %d of window %d, channel %d, whose maximum is %g\n",
                        (int)got[INDEX][i], (int)(i / c), (int)(i % c), got[Y][i]);
            return 1;
        }
    return 0;
}

static void test_forward(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (int special = 0; special < 2; special++) {
            shape c = shapes[i];
            c.special = special;
            current = &c;
            bad += probe_run(build_forward, check_index, &c);
        }
    assert_int_equal(bad, 0);
}

/* A NaN spoils its channel's statistics, so only norm_pool.apply shows what becomes of a single one. */
static void build_nan(probe *p, const shape *c)
{
    const dnri_norm_pool_attr a = {.norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true},
                                   .pool = {c->kernel, c->stride, c->pad, c->h, c->w, true}};
    const dnr_tid in[] = {probe_tensor(p, "x", c->n, c->h, c->w, c->c), odd_gamma(p, c->c),
                          probe_vector(p, "beta", c->c, 0.5, 0),
                          probe_vector(p, "mean", c->c, 0.1, 0),
                          probe_vector(p, "invstd", c->c, 0.1, 1)};
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE};
    double *v = probe_values(p, in[X]);
    for (int64_t i = 0; v && i < c->n * c->h * c->w * c->c; i += 13)
        v[i] = NAN;
    probe_emit(p, &dnri_def_norm_pool_apply, &a, sizeof a, 5, in, 2, out);
    probe_result(p, "norm_pool.apply", "NaN", out[0], POINT, 1);
    probe_result(p, "norm_pool.apply", "index", out[1], POINT, 1e12);
}

static int check_nan(const probe *p, double *got[MAX_OUTS])
{
    int bad = 0, spoilt = 0;
    for (int64_t i = 0; i < rig_count(&p->r[REF], p->out[Y].tid[REF]); i++) {
        bad += isnan(got[Y][i]) && got[INDEX][i] != 255;
        spoilt += isnan(got[Y][i]);
    }
    return bad || !spoilt;
}

static void test_nan(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(shapes); i++)
        bad += probe_run(build_nan, check_nan, &shapes[i]);
    assert_int_equal(bad, 0);
}

/* Weights for norm_pool.bwd, whose dgamma may come of y: as above; beta so large beside gamma that y tells little of x;
 * gamma so small that it tells nothing. */
enum { ODD, FAR, HIDDEN, WEIGHTS };

static void weights_of(probe *p, const shape *c, dnr_tid *gamma, dnr_tid *beta)
{
    *gamma = odd_gamma(p, c->c);
    *beta = probe_vector(p, "beta", c->c, 0.5, 0);
    double *g = probe_values(p, *gamma), *b = probe_values(p, *beta);
    for (int64_t i = 0; g && i < c->c; i++) {
        if (c->k == FAR)
            b[i] = (i % 2 ? 3.9 : 16) * fabs(g[i]);
        if (c->k == HIDDEN && i % 3 != 1) {
            g[i] *= i % 3 ? 0 : 0x1p-13; /* y is beta, or nearly */
            b[i] = fabs(b[i]);
        }
    }
}

/* y and index of windows of x, in fp64: the y of a device would name the winners of its own roundings. */
static void pool_of(const shape *c, const double *x, const double *const w[4], double *y,
                    double *index)
{
    const int64_t P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    const int64_t Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
    for (int64_t i = 0; i < c->n * P * Q * c->c; i++) {
        const int64_t k = i % c->c, pq = i / c->c, n = pq / Q / P;
        double best = -INFINITY;
        for (int t = 0; t < c->kernel * c->kernel; t++) {
            const int64_t h = pq / Q % P * c->stride - c->pad + t / c->kernel;
            const int64_t v = pq % Q * c->stride - c->pad + t % c->kernel;
            if (h < 0 || h >= c->h || v < 0 || v >= c->w)
                continue;
            const double at = x[((n * c->h + h) * c->w + v) * c->c + k];
            const double z = w[GAMMA - 1][k] * (at - w[2][k]) * w[3][k] + w[BETA - 1][k];
            if (z > best) {
                best = z;
                index[i] = t;
            }
        }
        y[i] = best > 0 ? best : 0;
    }
}

static void build_bwd(probe *p, const shape *c)
{
    const dnri_pool_attr a = {c->kernel, c->stride, c->pad, c->h, c->w, true};
    const int64_t P = (c->h + 2 * c->pad - c->kernel) / c->stride + 1;
    const int64_t Q = (c->w + 2 * c->pad - c->kernel) / c->stride + 1;
    const dnr_desc windows = dnri_desc4(DNR_U8, c->n, P, Q, c->c);
    dnr_tid in[9] = {
        probe_leaf(p, "x", dnri_desc4(probe_compute(p), c->n, c->h, c->w, c->c), 1.5, 0.5),
        probe_leaf(p, "index", windows, 1, 0),
        probe_tensor(p, "dy", c->n, P, Q, c->c),
        c->dy2 ? probe_tensor(p, "dy2", c->n, P, Q, c->c) : DNRI_NONE,
    };
    weights_of(p, c, &in[4], &in[5]);
    in[6] = probe_vector(p, "mean", c->c, 0.1, 0.5);
    in[7] = probe_vector(p, "invstd", c->c, 0.1, 0.7);
    in[8] = probe_tensor(p, "y", c->n, P, Q, c->c);
    double *x = probe_values(p, in[0]), *index = probe_values(p, in[1]);
    double *y = probe_values(p, in[8]);
    if (x) {
        const double *const w[4] = {probe_values(p, in[4]), probe_values(p, in[5]),
                                    probe_values(p, in[6]), probe_values(p, in[7])};
        pool_of(c, x, w, y, index);
        rig_round(p->r[DEVICE].num.compute, y, dnri_count(&windows));
        for (int64_t i = 0; i < dnri_count(&windows); i++)
            index[i] = y[i] > 0 ? index[i] : 255;
    }
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE}, read = DNRI_NONE;
    /* Split, nothing else reads y, and what nobody reads has no place. */
    probe_emit(p, &dnri_def_relu, NULL, 0, 1, &in[8], 1, &read);
    probe_emit(p, &dnri_def_norm_pool_bwd, &a, sizeof a, 9, in, 3, out);
    /* Split, dy + dy2 and what the pool passes on are rounded, too. Whole, dgamma may come of y, which errs by one rounding:
     * beside gamma by at most 5, with |beta| up to 4 times it. That reaches dx where a channel has few rows. */
    const bool split = probe_split(p) > 1;
    probe_result(p, "norm_pool.bwd", "dx", out[0], POINT,
                 c->n * c->h * c->w < 50 ? 5
                 : split                 ? 3
                                         : 1);
    probe_result(p, "norm_pool.bwd", "dgamma", out[1], POINT, split ? 2 : 5);
    probe_result(p, "norm_pool.bwd", "dbeta", out[2], split ? POINT : SUM, split ? 2 : 1);
}

static void test_bwd(void **state)
{
    int bad = 0;
    for (size_t i = 0; i < COUNT(shapes); i++)
        for (int k = 0; k < 2 * WEIGHTS; k++) {
            shape c = shapes[i];
            c.dy2 = k % 2;
            c.k = k / 2;
            bad += probe_run(build_bwd, NULL, &c);
        }
    assert_int_equal(bad, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_bwd),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
