/* bench_algbn.c: the ops of algebraic batch norm at ResNet-50's shapes: time, floor, and error against fp64 on samples;
 * beside them the ops that they replace.
 *
 *     bench_algbn [PRECISION [BATCH]]        bench_algbn fp16 256
 *
 * Each op runs often enough in one captured program that starting it does not count, over copies of its tensors that
 * together are larger than the L2 cache. */
#include "../rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COPY_RATE  4.16e12 /* bytes/s of an ideal copy on an H200 */
#define HALF_RATE  727e12  /* FLOP/s of its fp16 and bf16 products */
#define COLD_BYTES 300e6
#define PERIOD     4194301 /* values of a large tensor repeat after this prime */
enum { OPS = 8, LEAVES = 8, SAMPLES = 48 };

/* h: of the convolution's output. join: with ReLU and residual; else the norm of a projection shortcut. */
static const struct layer {
    const char *name;
    int64_t h, c, k;
    int stride, times;
    bool join;
} layers[] = {
    {"l1.conv3", 56, 64, 256, 1, 3, true},       {"l2.conv3", 28, 128, 512, 1, 4, true},
    {"l3.conv3", 14, 256, 1024, 1, 6, true},     {"l4.conv3", 7, 512, 2048, 1, 3, true},
    {"l1.shortcut", 56, 64, 256, 1, 1, false},   {"l2.shortcut", 28, 256, 512, 2, 1, false},
    {"l3.shortcut", 14, 512, 1024, 2, 1, false}, {"l4.shortcut", 7, 1024, 2048, 2, 1, false},
};

static dnr_device *device;
static dnr_precision precision;
static int64_t batch = 256;
static int failures;

/* ---- values */

/* A leaf's i-th value is scale · base[(i + salt) mod PERIOD] + shift, rounded. */
typedef struct values {
    double scale, shift;
    int64_t salt;
    double *at; /* one period of them */
} values;

static double *base;

static void make_base(void)
{
    uint64_t seed = 1;
    base = malloc(PERIOD * sizeof *base);
    assert_non_null(base);
    for (int64_t i = 0; i < PERIOD; i++)
        base[i] = rig_normal(&seed);
}

static double value(const values *v, int64_t i)
{
    return v->at[i % PERIOD];
}

/* Fills a leaf of a bound plan. A mask's bytes are random as well. */
static void fill(rig *r, dnr_tid t, values *v)
{
    const dnr_desc *d = dnri_desc(r->g, t);
    const int64_t n = dnri_count(d);
    const size_t size = dnri_dtype_size(d->dtype);
    char *narrow = malloc(PERIOD * size), *to = dnri_plan_address(r->plan, t);
    v->at = malloc(PERIOD * sizeof *v->at);
    assert_true(narrow && to && v->at);
    for (int64_t i = 0; i < PERIOD; i++) {
        const double x = base[(i + v->salt) % PERIOD];
        v->at[i] =
            d->dtype == DNR_U8 ? (double)((int64_t)(fabs(x) * 1e6) & 255) : v->scale * x + v->shift;
    }
    if (d->dtype == DNR_U8) {
        for (int64_t i = 0; i < PERIOD; i++)
            narrow[i] = (char)(unsigned char)v->at[i];
    } else {
        dnri_from_double(d->dtype, v->at, narrow, PERIOD);
        dnri_to_double(d->dtype, narrow, v->at, PERIOD);
    }
    for (int64_t i = 0; i < n; i += PERIOD)
        OK(dnri_copy_now(device, to + (size_t)i * size, narrow,
                         (size_t)(n - i < PERIOD ? n - i : PERIOD) * size));
    free(narrow);
}

/* ---- a bench: copies of one op, or of a few in a row */

typedef struct bench {
    rig r;
    const struct layer *l;
    int64_t m; /* rows */
    int copy, copies;
    int n_leaves; /* of a copy */
    dnr_tid leaf[LEAVES][64];
    values v[LEAVES];
    dnr_tid out[OPS][64]; /* of the op, of each copy */
    double bytes, flops;  /* of an op: what it cannot do without */
} bench;

static dnr_tid leaf(bench *b, dnr_desc d, double scale, double shift)
{
    const int i = b->n_leaves++;
    assert_true(i < LEAVES);
    b->v[i].scale = scale;
    b->v[i].shift = shift;
    b->v[i].salt = 104729 * (i + 1);
    return b->leaf[i][b->copy] = rig_leaf(&b->r, "leaf", d);
}

static dnr_desc image(const bench *b, int64_t c)
{
    return dnri_desc4(b->r.num.compute, batch, b->l->h, b->l->h, c);
}

static void emit(bench *b, const dnri_op_def *def, const void *attr, size_t size, int n_in,
                 const dnr_tid *in, int n_out)
{
    dnr_tid out[OPS];
    for (int i = 0; i < n_out; i++)
        out[i] = DNRI_NONE;
    OK(dnri_emit(b->r.g, def, "l", attr, size, n_in, in, n_out, out));
    for (int i = 0; i < n_out; i++)
        b->out[i][b->copy] = out[i] >= 0 ? rig_keep(&b->r, out[i]) : out[i];
}

static double size_of(const bench *b)
{
    return (double)dnri_dtype_size(b->r.num.compute);
}

static void build_dz(bench *b)
{
    const dnr_desc d = image(b, b->l->k);
    dnr_desc mask = d;
    mask.dtype = DNR_U8;
    mask.dim[3] /= 8;
    const bool bits = size_of(b) == 2;
    const dnr_tid in[] = {leaf(b, bits ? mask : d, 1, 0), leaf(b, d, 1, 0), leaf(b, d, 1, 0.1)};
    emit(b, &dnri_def_norm_dz, NULL, 0, 3, in, 2);
    b->bytes = (double)(b->m * b->l->k) * (3 * size_of(b) + (bits ? 0.125 : size_of(b)));
}

static void build_gram(bench *b)
{
    const dnr_tid in[] = {leaf(b, image(b, b->l->c), 0.6, 0.5), DNRI_NONE};
    emit(b, &dnri_def_gram, NULL, 0, 2, in, 2);
    b->bytes = (double)(b->m * b->l->c) * size_of(b);
    b->flops = 2.0 * (double)(b->m * b->l->c * b->l->c);
}

static void build_product(bench *b)
{
    const dnr_tid in[] = {leaf(b, image(b, b->l->c), 0.6, 0.5), leaf(b, image(b, b->l->k), 1, 0)};
    emit(b, &dnri_def_gram, NULL, 0, 2, in, 1);
    b->bytes = (double)(b->m * (b->l->c + b->l->k)) * size_of(b);
    b->flops = 2.0 * (double)(b->m * b->l->c * b->l->k);
}

static void build_coef(bench *b)
{
    const int64_t c = b->l->c, k = b->l->k;
    const double m = (double)b->m;
    const dnr_dtype t = b->r.num.master;
    const dnri_algbn_attr attr = {.rows = b->m, .first = true};
    const dnr_tid in[] = {
        leaf(b, dnri_desc4(t, k, 1, 1, c), sqrt(m), 0),
        leaf(b, dnri_desc4(t, c, 1, 1, c), sqrt(m), m / 4),
        leaf(b, dnri_desc1(t, c), sqrt(m), m / 2),
        leaf(b, dnri_desc1(t, k), sqrt(m), 0),
        leaf(b, dnri_desc4(b->r.num.compute, k, 1, 1, c), sqrt(2 / (double)k), 0),
        leaf(b, dnri_desc1(t, k), 0.2, 1),
        leaf(b, dnri_desc1(t, k), 0.3, 0),
        leaf(b, dnri_desc1(t, k), 0.1, 1),
        dnri_slab_tensor(b->r.g, DNRI_HEADER),
    };
    dnr_tid out[7] = {DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      DNRI_NONE,
                      dnri_slab_tensor(b->r.g, DNRI_STATE)};
    OK(dnri_emit(b->r.g, &dnri_def_algbn_coef, "l", &attr, sizeof attr, 9, in, 7, out));
    for (int i = 0; i < 6; i++)
        b->out[i][b->copy] = rig_keep(&b->r, out[i]);
    b->bytes = (double)(k * c) * (8 + 2 * size_of(b)) + (double)(c * c) * (4 + size_of(b));
    b->flops = 4.0 * (double)(k * c * c);
}

static void build_dgrad(bench *b)
{
    const int64_t c = b->l->c, k = b->l->k;
    const dnr_dtype t = b->r.num.compute;
    const dnr_tid in[] = {leaf(b, image(b, k), 1, 0), leaf(b, image(b, c), 0.6, 0.5),
                          leaf(b, dnri_desc4(t, k, 1, 1, c), sqrt(2 / (double)k), 0),
                          leaf(b, dnri_desc4(t, c, 1, 1, c), 0.01, 0),
                          leaf(b, dnri_desc1(t, 2 * c), 0.1, 0)};
    emit(b, &dnri_def_algbn_dgrad, NULL, 0, 5, in, 1);
    b->bytes = (double)(b->m * (2 * c + k)) * size_of(b);
    b->flops = 2.0 * (double)(b->m * c * (c + k));
}

/* Values that leave no channel beyond the guard. */
static void build_stats(bench *b)
{
    const int64_t c = b->l->c, k = b->l->k;
    const double m = (double)b->m;
    const dnr_dtype t = b->r.num.master;
    const dnri_algbn_stats_attr attr = {b->m, DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, true};
    const dnr_tid in[] = {
        leaf(b, dnri_desc4(t, c, 1, 1, c), sqrt(m), 0),
        leaf(b, dnri_desc1(t, c), sqrt(m), 0),
        leaf(b, image(b, c), 1, 0),
        leaf(b, dnri_desc4(b->r.num.compute, k, 1, 1, c), 0.1, 0),
        leaf(b, dnri_desc1(t, k), 0.1, 0),
        leaf(b, dnri_desc1(t, k), 0.1, 1),
        dnri_slab_tensor(b->r.g, DNRI_HEADER),
    };
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, dnri_slab_tensor(b->r.g, DNRI_STATE)};
    OK(dnri_emit(b->r.g, &dnri_def_algbn_stats, "l", &attr, sizeof attr, 7, in, 3, out));
    b->bytes = (double)(c * c) * 4 + (double)(k * c) * size_of(b);
    b->flops = 2.0 * (double)(k * c * c);
}

static void build_join(bench *b)
{
    const int64_t c = b->l->c, k = b->l->k;
    const bool mask = b->l->join && size_of(b) == 2;
    const dnri_algbn_join_attr attr = {b->l->join};
    dnr_tid in[] = {leaf(b, image(b, c), 1, 0.5),
                    leaf(b, dnri_desc4(b->r.num.compute, k, 1, 1, c), 0.1, 0),
                    leaf(b, dnri_desc1(b->r.num.master, k), 0.3, 0), DNRI_NONE, DNRI_NONE};
    if (b->l->join)
        in[3] = leaf(b, image(b, k), 1, 0);
    if (size_of(b) == 2) { /* the shift again */
        in[4] = leaf(b, dnri_desc1(b->r.num.compute, k), 0.3, 0);
        b->v[b->n_leaves - 1].salt = b->v[2].salt;
    }
    emit(b, &dnri_def_algbn_join, &attr, sizeof attr, 5, in, mask ? 2 : 1);
    b->bytes = (double)(b->m * (c + (b->l->join ? 2 : 1) * k)) * size_of(b) +
               (mask ? (double)(b->m * k) / 8 : 0);
    b->flops = 2.0 * (double)(b->m * c * k);
}

static void build_norm_bwd(bench *b)
{
    const bool join = b->l->join, bits = size_of(b) == 2;
    const dnri_norm_bwd_attr attr = {join, join};
    const dnr_desc d = image(b, b->l->k), v = dnri_desc1(b->r.num.master, b->l->k);
    dnr_desc mask = d;
    mask.dtype = DNR_U8;
    mask.dim[3] /= 8;
    dnr_tid in[] = {leaf(b, d, 1, 0),   DNRI_NONE,          leaf(b, d, 1, 0),   DNRI_NONE,
                    leaf(b, v, 0.2, 1), leaf(b, v, 0.3, 0), leaf(b, v, 0.3, 0), leaf(b, v, 0.1, 1)};
    if (join) {
        const dnr_tid more[] = {rig_leaf(&b->r, "y", bits ? mask : d), rig_leaf(&b->r, "dy2", d)};
        in[1] = more[0];
        in[3] = more[1];
    }
    emit(b, &dnri_def_norm_bwd, &attr, sizeof attr, 8, in, join ? 4 : 3);
    /* two passes: x, dy (dy2, mask -> dz), then x, dz -> dx */
    b->bytes = (double)(b->m * b->l->k) *
               (join ? 7 * size_of(b) + (bits ? 0.125 : size_of(b)) : 5 * size_of(b));
}

static void build_conv(bench *b, bool wgrad)
{
    const int64_t c = b->l->c, k = b->l->k, side = b->l->h * b->l->stride;
    const dnr_dtype t = b->r.num.compute;
    const dnri_conv_attr attr = {1, b->l->stride, 0, side, side};
    const dnr_tid dy = leaf(b, image(b, k), 1, 0);
    if (wgrad) {
        const dnr_tid in[] = {leaf(b, dnri_desc4(t, batch, side, side, c), 0.6, 0.5), dy};
        emit(b, &dnri_def_conv_wgrad, &attr, sizeof attr, 2, in, 1);
    } else {
        const dnr_tid in[] = {dy, leaf(b, dnri_desc4(t, k, 1, 1, c), 0.1, 0)};
        emit(b, &dnri_def_conv_dgrad, &attr, sizeof attr, 2, in, 1);
    }
    b->bytes = (double)(b->m * (c + k)) * size_of(b);
    b->flops = 2.0 * (double)(b->m * c * k);
}

static void build_wgrad(bench *b)
{
    build_conv(b, true);
}

static void build_conv_dgrad(bench *b)
{
    build_conv(b, false);
}

/* ---- checks, on samples */

static double *read_out(bench *b, int i)
{
    double *v = malloc((size_t)rig_count(&b->r, b->out[i][0]) * sizeof *v);
    assert_non_null(v);
    rig_read(&b->r, b->out[i][0], v);
    return v;
}

static void judge(const bench *b, const char *what, const double *got, const double *want,
                  int64_t n, double bound)
{
    const double e = rig_error(got, want, n);
    const bool good = e <= bound;
    failures += !good;
    printf("    %-10s error %.1e, bound %.1e%s\n", what, e, bound, good ? "" : "   FAILED");
}

/* One rounding to the compute type. */
static double rounding(void)
{
    return precision == DNR_PRECISION_FP16   ? 4.9e-4
           : precision == DNR_PRECISION_BF16 ? 3.9e-3
                                             : 1e-6;
}

#define SUMS 1e-5 /* of products in fp32 */

static void check_dz(bench *b)
{
    const int64_t k = b->l->k;
    const bool bits = size_of(b) == 2;
    double *dz = read_out(b, 0), *sum = read_out(b, 1), *want = calloc((size_t)k, sizeof *want);
    int64_t wrong = 0;
    assert_non_null(want);
    for (int64_t i = 0; i < b->m * k; i++) {
        const bool passes =
            bits ? (int)value(&b->v[0], i / 8) >> i % 8 & 1 : value(&b->v[0], i) > 0;
        const double z = passes ? value(&b->v[1], i) + value(&b->v[2], i) : 0;
        wrong += !(fabs(dz[i] - z) <= rounding() * fabs(z) + 1e-7);
        want[i % k] += dz[i];
    }
    failures += wrong > 0;
    printf("    %-10s %lld of %lld elements off%s\n", "dz", (long long)wrong, (long long)(b->m * k),
           wrong ? "   FAILED" : "");
    judge(b, "sum", sum, want, k, 3e-6);
    free(dz);
    free(sum);
    free(want);
}

/* p = bᵀ·a in some places: of the diagonal, too, where b is a */
static void check_product(bench *b)
{
    const int64_t c = b->l->c;
    const values *va = &b->v[0], *vb = b->n_leaves > 1 ? &b->v[1] : va;
    const int64_t k = b->n_leaves > 1 ? b->l->k : c;
    double *p = read_out(b, 0), got[SAMPLES], want[SAMPLES] = {0};
    for (int s = 0; s < SAMPLES; s++) {
        const int64_t i = s * 7919 % k, j = s % 3 || vb != va ? s * 104729 % c : i;
        for (int64_t r = 0; r < b->m; r++)
            want[s] += value(vb, r * k + i) * value(va, r * c + j);
        got[s] = p[i * c + j];
    }
    judge(b, vb == va ? "gram" : "product", got, want, SAMPLES, vb == va ? SUMS : 2 * SUMS);
    if (vb == va) { /* Σ a beside it */
        double *sum = read_out(b, 1);
        for (int s = 0; s < SAMPLES; s++) {
            want[s] = 0;
            for (int64_t r = 0; r < b->m; r++)
                want[s] += value(va, r * c + s);
        }
        judge(b, "sum", sum, want, SAMPLES < c ? SAMPLES : c, 3e-6);
        free(sum);
    }
    free(p);
}

/* Some rows of dw and m; all of the vectors. Σ over K of what m and c need is made for all rows first. */
static void check_coef(bench *b)
{
    enum { P, GRAM, SUM_A, SUM_DZ, W, GAMMA, MEAN, INVSTD };
    const int64_t c = b->l->c, k = b->l->k;
    const values *v = b->v;
    double *dw = read_out(b, 0), *dgamma = read_out(b, 1), *wa = read_out(b, 3),
           *m = read_out(b, 4), *half = read_out(b, 5);
    double *want = calloc((size_t)(SAMPLES * c + 2 * k + 2 * c), sizeof *want);
    double *B = want + SAMPLES * c, *want_dgamma = B + k, *want_c = want_dgamma + k,
           *got_c = want_c + c;
    assert_non_null(want);
    for (int64_t i = 0; i < k; i++) {
        double dot = 0;
        for (int64_t j = 0; j < c; j++)
            dot += value(&v[P], i * c + j) * value(&v[W], i * c + j);
        const double invstd = value(&v[INVSTD], i), sum = value(&v[SUM_DZ], i);
        want_dgamma[i] = invstd * (dot - value(&v[MEAN], i) * sum);
        B[i] = -value(&v[GAMMA], i) * invstd * invstd * want_dgamma[i] / (double)b->m;
        for (int64_t j = 0; j < c; j++)
            want_c[j] -= sum * wa[i * c + j] / (double)b->m;
    }
    judge(b, "dgamma", dgamma, want_dgamma, k, 1e-5);
    for (int64_t i = 0; i < c; i++)
        for (int64_t j = 0; j < c; j++)
            want_c[j] -= value(&v[SUM_A], i) * m[i * c + j] / (double)b->m;
    for (int64_t j = 0; j < c; j++)
        got_c[j] = half[j] + half[c + j];
    judge(b, "c", got_c, want_c, c, size_of(b) == 2 ? 5e-5 : 1e-6);
    for (int64_t s = 0; s < SAMPLES; s++) { /* rows of dw, spread over K */
        const int64_t i = s * k / SAMPLES;
        const double A = value(&v[GAMMA], i) * value(&v[INVSTD], i);
        const double C0 = -A * value(&v[SUM_DZ], i) / (double)b->m - B[i] * value(&v[MEAN], i);
        for (int64_t j = 0; j < c; j++) {
            double wg = 0;
            for (int64_t l = 0; l < c; l++)
                wg += value(&v[W], i * c + l) * value(&v[GRAM], l * c + j);
            want[s * c + j] = A * value(&v[P], i * c + j) + B[i] * wg + C0 * value(&v[SUM_A], j);
            dw[s * c + j] = dw[i * c + j]; /* i >= s */
        }
    }
    judge(b, "dw", dw, want, SAMPLES * c, 1e-5);
    for (int64_t s = 0; s < SAMPLES; s++) {
        const int64_t i = s * c / SAMPLES;
        for (int64_t j = 0; j < c; j++) {
            want[s * c + j] = 0;
            for (int64_t l = 0; l < k; l++)
                want[s * c + j] += B[l] * value(&v[W], l * c + i) * value(&v[W], l * c + j);
            m[s * c + j] = m[i * c + j];
        }
    }
    judge(b, "m", m, want, SAMPLES * c, size_of(b) == 2 ? rounding() : 3e-6);
    free(dw);
    free(dgamma);
    free(wa);
    free(m);
    free(half);
    free(want);
}

static void check_dgrad(bench *b)
{
    enum { DZ, A, WA, M, C };
    const int64_t c = b->l->c, k = b->l->k;
    const values *v = b->v;
    double *da = read_out(b, 0), *want = calloc((size_t)(SAMPLES * c), sizeof *want);
    assert_non_null(want);
    for (int64_t s = 0; s < SAMPLES; s++) {
        const int64_t i = s * (b->m - 1) / (SAMPLES - 1);
        double *row = want + s * c;
        for (int64_t j = 0; j < c; j++)
            row[j] = value(&v[C], j) + value(&v[C], c + j);
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < c; j++)
                row[j] += value(&v[DZ], i * k + l) * value(&v[WA], l * c + j);
        for (int64_t l = 0; l < c; l++)
            for (int64_t j = 0; j < c; j++)
                row[j] += value(&v[A], i * c + l) * value(&v[M], l * c + j);
        memmove(da + s * c, da + i * c, (size_t)c * sizeof *da);
    }
    judge(b, "da", da, want, SAMPLES * c,
          size_of(b) == 2 ? 1.5 * rounding() : SUMS); /* it may be rounded twice */
    free(da);
    free(want);
}

static void check_join(bench *b)
{
    enum { A, W, SHIFT, RESIDUAL };
    const int64_t c = b->l->c, k = b->l->k;
    const values *v = b->v;
    double *y = read_out(b, 0), *want = calloc((size_t)(SAMPLES * k), sizeof *want);
    assert_non_null(want);
    for (int64_t s = 0; s < SAMPLES; s++) {
        const int64_t i = s * (b->m - 1) / (SAMPLES - 1);
        for (int64_t j = 0; j < k; j++) {
            double sum = value(&v[SHIFT], j);
            for (int64_t l = 0; l < c; l++)
                sum += value(&v[A], i * c + l) * value(&v[W], j * c + l);
            if (b->l->join)
                sum += value(&v[RESIDUAL], i * k + j);
            want[s * k + j] = b->l->join && sum < 0 ? 0 : sum;
        }
        memmove(y + s * k, y + i * k, (size_t)k * sizeof *y);
    }
    judge(b, "y", y, want, SAMPLES * k, size_of(b) == 2 ? rounding() : SUMS);
    free(y);
    free(want);
}

/* ---- running */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one op: the best of three series. */
static double measure(bench *b)
{
    double best = INFINITY;
    int runs = 2;
    for (int series = 0; series < 4; series++) {
        OK(device->be->sync(device, DNRI_COMPUTE));
        const double start = now();
        for (int i = 0; i < runs; i++)
            OK(dnri_plan_run(b->r.plan));
        OK(device->be->sync(device, DNRI_COMPUTE));
        const double t = (now() - start) / runs;
        if (series == 0) /* warm-up, and how often in 50 ms */
            runs = t < 0.025 ? (int)(0.05 / t) : 2;
        else
            best = t < best ? t : best;
    }
    return best / dnri_graph_ops(b->r.g);
}

static void open_bench(bench *b, const struct layer *l)
{
    rig_open(&b->r, device, precision, true);
    b->r.timed = true;
    b->r.workspace_cap = (size_t)1 << 30;
    b->l = l;
    b->m = batch * l->h * l->h;
}

/* Prints a line, and checks the results; returns microseconds. */
static double run(const char *name, const struct layer *l, void (*build)(bench *),
                  void (*check)(bench *))
{
    static bench b;
    memset(&b, 0, sizeof b);
    open_bench(&b, l);
    build(&b); /* for its bytes */
    rig_close(&b.r);
    const double bytes = b.bytes;
    memset(&b, 0, sizeof b);
    open_bench(&b, l);
    b.copies = (int)(COLD_BYTES / bytes) + 1;
    b.copies = b.copies > 64 ? 64 : b.copies;
    for (b.copy = 0; b.copy < b.copies; b.copy++) {
        b.n_leaves = 0;
        build(&b);
    }
    const int once = dnri_graph_ops(b.r.g);
    for (int i = once; i < 12; i++) { /* and again, on the same tensors */
        const dnri_op op = *dnri_graph_op_c(b.r.g, i % once);
        dnr_tid out[DNRI_MAX_OUT];
        memcpy(out, op.out, sizeof op.out);
        OK(dnri_emit(b.r.g, op.def, op.name, op.attr, DNRI_ATTR, op.n_in, op.in, op.n_out, out));
    }
    rig_plan(&b.r, true, false);
    rig_bind(&b.r);
    for (int i = 0; i < b.n_leaves; i++)
        for (int c = 0; c < b.copies; c++) {
            free(b.v[i].at);
            fill(&b.r, b.leaf[i][c], &b.v[i]);
        }
    rig_run(&b.r);
    const double t = measure(&b), floor = fmax(b.bytes / COPY_RATE, b.flops / HALF_RATE);
    printf("  %-10s %7.1f us, floor %6.1f (%3.0f %%), %.2f TB/s, %5.1f TFLOP/s\n", name, t * 1e6,
           floor * 1e6, 100 * floor / t, b.bytes / t * 1e-12, b.flops / t * 1e-12);
    if (check)
        check(&b);
    for (int i = 0; i < b.n_leaves; i++)
        free(b.v[i].at);
    rig_close(&b.r);
    fflush(stdout);
    return t * 1e6;
}

static bool supported(void)
{
    static bench b;
    memset(&b, 0, sizeof b);
    open_bench(&b, &layers[0]);
    build_dz(&b);
    b.n_leaves = 0;
    build_gram(&b);
    b.n_leaves = 0;
    build_coef(&b);
    b.n_leaves = 0;
    build_dgrad(&b);
    b.n_leaves = 0;
    build_stats(&b);
    b.n_leaves = 0;
    build_join(&b);
    bool has = true;
    for (int i = 0; i < dnri_graph_ops(b.r.g); i++)
        has &= dnri_device_supports(device, b.r.g, dnri_graph_op_c(b.r.g, i));
    rig_close(&b.r);
    return has;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "fp16";
    dnri_numerics num;
    double total[2] = {0, 0};
    for (int i = DNR_PRECISION_FP32; i <= DNR_PRECISION_BF16; i++)
        if (strcmp(dnr_precision_name((dnr_precision)i), name) == 0)
            precision = (dnr_precision)i;
    batch = argc > 2 ? atoll(argv[2]) : batch;
    if (precision == DNR_PRECISION_AUTO || batch < 1 || argc > 3) {
        fprintf(stderr, "usage: %s [fp32|fp16|bf16 [BATCH]]\n", argv[0]);
        return 2;
    }
    if (dnr_device_open("cuda", &device) != DNR_OK ||
        device->be->numerics(device, &precision, &num) != DNR_OK) {
        fprintf(stderr, "%s (%s)\n", dnr_last_error()->what, dnr_last_error()->remedy);
        return 6;
    }
    if (!supported()) {
        fprintf(stderr, "this device lacks the ops of algebraic batch norm\n");
        return 6;
    }
    make_base();
    printf("%s, batch %lld, on %s\n", name, (long long)batch, device->description);
    for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++) {
        const struct layer *l = &layers[i];
        double ours = 0, plain = 0;
        printf("%s: M %lld, C %lld, K %lld\n", l->name, (long long)(batch * l->h * l->h),
               (long long)l->c, (long long)l->k);
        if (l->join)
            ours += run("norm.dz", l, build_dz, check_dz);
        ours += run("product", l, build_product, check_product);
        ours += run("gram", l, build_gram, check_product);
        ours += run("coef", l, build_coef, check_coef);
        ours += run("dgrad", l, build_dgrad, check_dgrad);
        run("stats", l, build_stats, NULL);
        run("join", l, build_join, check_join);
        plain += run("norm.bwd", l, build_norm_bwd, NULL);
        plain += run("wgrad", l, build_wgrad, NULL);
        plain += run("conv.dgrad", l, build_conv_dgrad, NULL);
        printf("  algebraic %.1f us, plain %.1f us, x %d\n", ours, plain, l->times);
        total[0] += ours * l->times;
        total[1] += plain * l->times;
    }
    printf("all layers: algebraic %.3f ms, plain %.3f ms; %d failures\n", total[0] * 1e-3,
           total[1] * 1e-3, failures);
    dnr_device_close(device);
    free(base);
    return failures ? 1 : 0;
}
