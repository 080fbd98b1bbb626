/* test_store.c: element types, random numbers, the parameter table, and the store on every device at hand. */
#include "backend.h"
#include "rng.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- element types */

static double widen(dnr_dtype t, uint16_t code)
{
    double v;
    dnri_to_double(t, &code, &v, 1);
    return v;
}

static uint16_t narrow(dnr_dtype t, double v)
{
    uint16_t code;
    dnri_from_double(t, &v, &code, 1);
    return code;
}

static void all_codes_round_trip(void **state)
{
    for (uint32_t c = 0; c < 65536; c++) {
        uint16_t code = (uint16_t)c;
        float f;
        uint32_t bits = c << 16; /* a bf16 is the upper half of a float */
        memcpy(&f, &bits, sizeof f);
        double half = widen(DNR_F16, code), brain = widen(DNR_BF16, code);
        if (isnan(half)) {
            assert_true((c & 0x7c00) == 0x7c00 && (c & 0x3ff));
            assert_true(isnan(widen(DNR_F16, narrow(DNR_F16, half))));
        } else {
            assert_int_equal(narrow(DNR_F16, half), code);
        }
        if (isnan(f)) {
            assert_true(isnan(brain) && isnan(widen(DNR_BF16, narrow(DNR_BF16, brain))));
        } else {
            assert_true(brain == (double)f && !signbit(brain) == !signbit(f));
            assert_int_equal(narrow(DNR_BF16, brain), code);
        }
    }
}

/* The values of IEEE 754 binary16: a few known, and between neighbours a step that doubles with the exponent. */
static void half_values(void **state)
{
    assert_true(widen(DNR_F16, 0x0001) == 0x1p-24);
    assert_true(widen(DNR_F16, 0x0400) == 0x1p-14);
    assert_true(widen(DNR_F16, 0x3c00) == 1);
    assert_true(widen(DNR_F16, 0xc000) == -2);
    assert_true(widen(DNR_F16, 0x7bff) == 65504);
    assert_true(widen(DNR_F16, 0x7c00) == (double)INFINITY);
    assert_true(widen(DNR_F16, 0xfc00) == -(double)INFINITY);
    assert_true(signbit(widen(DNR_F16, 0x8000)));
    double step = 0x1p-24;
    for (uint16_t c = 0; c < 0x7bff; c++) {
        if (c >= 0x0800 && c % 0x400 == 0)
            step *= 2;
        assert_true(widen(DNR_F16, (uint16_t)(c + 1)) - widen(DNR_F16, c) == step);
    }
}

/* Between each two neighbours: the tie goes to the even code, a hair to either side goes to the nearer. */
static void ties_go_to_even(void **state)
{
    static const struct {
        dnr_dtype type;
        uint16_t infinity;
    } types[] = {{DNR_F16, 0x7c00}, {DNR_BF16, 0x7f80}};
    for (int t = 0; t < 2; t++) {
        dnr_dtype type = types[t].type;
        uint16_t infinity = types[t].infinity;
        for (uint16_t c = 0; c < infinity; c++) {
            uint16_t up = (uint16_t)(c + 1);
            double lo = widen(type, c), hi = widen(type, up);
            if (up == infinity) /* rounding treats it as the next number */
                hi = lo + (lo - widen(type, (uint16_t)(c - 1)));
            double tie = lo + (hi - lo) / 2;
            for (int sign = 0; sign < 2; sign++) {
                uint16_t s = sign ? 0x8000 : 0;
                double m = sign ? -1 : 1;
                assert_int_equal(narrow(type, m * tie), s | (c % 2 ? up : c));
                assert_int_equal(narrow(type, m * nextafter(tie, 0)), s | c);
                assert_int_equal(narrow(type, m * nextafter(tie, (double)INFINITY)), s | up);
            }
        }
        assert_int_equal(narrow(type, 1e300), infinity);
        assert_int_equal(narrow(type, -(double)INFINITY), 0x8000 | infinity);
        assert_int_equal(narrow(type, 5e-324), 0);
        assert_int_equal(narrow(type, -5e-324), 0x8000);
        assert_true(isnan(widen(type, narrow(type, (double)NAN))));
    }
}

static void other_types(void **state)
{
    const double v[] = {-1e12, -0.5, 0.5, 1.5, 254.5, 255.5, 1e12, (double)NAN, (double)INFINITY};
    uint8_t u[9];
    int32_t i[9];
    float f[9];
    double d[9];
    const uint8_t want_u[] = {0, 0, 0, 2, 254, 255, 255, 0, 255};
    const int32_t want_i[] = {INT32_MIN, 0, 0, 2, 254, 256, INT32_MAX, 0, INT32_MAX};
    dnri_from_double(DNR_U8, v, u, 9);
    dnri_from_double(DNR_I32, v, i, 9);
    dnri_from_double(DNR_F32, v, f, 9);
    assert_memory_equal(u, want_u, sizeof u);
    assert_memory_equal(i, want_i, sizeof i);
    for (int k = 0; k < 9; k++)
        assert_true(k == 7 ? isnan(f[k]) : f[k] == (float)v[k]);
    dnri_to_double(DNR_U8, u, d, 9);
    assert_true(d[4] == 254);
    dnri_to_double(DNR_I32, i, d, 9);
    assert_true(d[0] == INT32_MIN);

    const size_t sizes[] = {1, 4, 2, 2, 4, 8};
    for (int t = DNR_U8; t <= DNR_F64; t++)
        assert_int_equal(dnri_dtype_size((dnr_dtype)t), sizes[t]);
    char text[64];
    dnr_desc a = dnri_desc4(DNR_F16, 256, 56, 55, 64), b = a;
    assert_string_equal(dnri_desc_text(&a, text), "fp16[256,56,55,64]");
    assert_int_equal(dnri_bytes(&a), 2 * 256 * 56 * 55 * 64);
    assert_true(dnri_desc_equal(&a, &b));
    b.dtype = DNR_BF16;
    assert_false(dnri_desc_equal(&a, &b));
    b = a;
    b.dim[3]++;
    assert_false(dnri_desc_equal(&a, &b));
}

/* ---- random numbers */

static void rng_is_a_function_of_its_key(void **state)
{
    dnri_rng a = DNRI_RNG(1, 2), b = DNRI_RNG(1, 2), c = DNRI_RNG(2, 1), d = DNRI_RNG(1, 2, 0);
    uint64_t x = dnri_rng_next(&a);
    assert_true(x == dnri_rng_next(&b));
    assert_true(x != dnri_rng_next(&c));
    assert_true(x != dnri_rng_next(&d));
    assert_true(dnri_rng_word("layer1.0.bn1") != dnri_rng_word("layer1.0.bn2"));
}

/* Means over n draws lie within 5 standard errors. */
static void rng_distributions(void **state)
{
    enum { N = 200000, BINS = 12 };
    double u1 = 0, u2 = 0, n1 = 0, n2 = 0, n4 = 0, pairs = 0, last = 0, count[BINS] = {0};
    for (uint64_t k = 0; k < N; k++) {
        dnri_rng r = DNRI_RNG(42, k / 2); /* neighbouring keys are independent too */
        if (k % 2)
            dnri_rng_normal(&r), dnri_rng_next(&r);
        double u = dnri_rng_uniform(&r);
        assert_true(u >= 0 && u < 1);
        u1 += u;
        u2 += u * u;
        pairs += (u - 0.5) * (last - 0.5);
        last = u;
        uint64_t b = dnri_rng_below(&r, BINS);
        assert_true(b < BINS);
        count[b]++;
        double n = dnri_rng_normal(&r);
        n1 += n;
        n2 += n * n;
        n4 += n * n * n * n;
    }
    double e = 5 / sqrt(N), chi2 = 0;
    assert_true(fabs(u1 / N - 0.5) < e * sqrt(1 / 12.0));
    assert_true(fabs(u2 / N - 1 / 3.0) < e * sqrt(4 / 45.0));
    assert_true(fabs(pairs / N) < e / 12);
    assert_true(fabs(n1 / N) < e);
    assert_true(fabs(n2 / N - 1) < e * sqrt(2));
    assert_true(fabs(n4 / N - 3) < e * sqrt(96));
    for (int b = 0; b < BINS; b++)
        chi2 += pow(count[b] - (double)N / BINS, 2) / ((double)N / BINS);
    assert_true(chi2 < 31.3); /* 11 degrees of freedom, p = 0.001 */

    dnri_rng r = DNRI_RNG(1);
    uint64_t high = 0, n = UINT64_C(3)
                           << 62; /* a plain remainder would give half of all to the lower third */
    for (int k = 0; k < N; k++)
        high += dnri_rng_below(&r, n) >= n / 3;
    assert_true(fabs((double)high / N - 2 / 3.0) < e * sqrt(2) / 3);
    assert_int_equal(dnri_rng_below(&r, 1), 0);
}

/* ---- the parameter table */

static int add(dnri_params *p, const char *name, dnri_param_kind kind, dnri_init init, int64_t fan,
               int64_t k, int64_t r, int64_t s, int64_t c)
{
    dnri_param x = {.kind = kind, .init = init, .fan = fan, .dim = {k, r, s, c}};
    int index;
    snprintf(x.name, sizeof x.name, "%s", name);
    return dnri_params_add(p, &x, &index) == DNR_OK ? index : -1;
}

enum { CONV, NORM_W, NORM_B, MEAN, VAR, DENSE, BIAS, N_PARAMS };
enum { ALL = DNRI_STORE_TRAIN | DNRI_STORE_SUMS | DNRI_STORE_EMA };

/* A net of one conv, one norm and one dense layer; reversed: in the opposite order. */
static dnri_params *small_net(bool reversed)
{
    dnri_params *p = dnri_params_new();
    assert_non_null(p);
    for (int i = 0; i < N_PARAMS; i++)
        switch (reversed ? N_PARAMS - 1 - i : i) {
        case CONV:
            add(p, "conv1.weight", DNRI_CONV_W, DNRI_INIT_FAN_OUT, 0, 33, 3, 3, 31);
            break;
        case NORM_W:
            add(p, "bn1.weight", DNRI_NORM_W, DNRI_INIT_ONE, 0, 1, 1, 1, 33);
            break;
        case NORM_B:
            add(p, "bn1.bias", DNRI_NORM_B, DNRI_INIT_ZERO, 0, 1, 1, 1, 33);
            break;
        case MEAN:
            add(p, "bn1.running_mean", DNRI_RUNNING, DNRI_INIT_ZERO, 0, 1, 1, 1, 33);
            break;
        case VAR:
            add(p, "bn1.running_var", DNRI_RUNNING, DNRI_INIT_ONE, 0, 1, 1, 1, 33);
            break;
        case DENSE:
            add(p, "fc.weight", DNRI_DENSE_W, DNRI_INIT_LINEAR, 0, 70, 1, 1, 100);
            break;
        case BIAS:
            add(p, "fc.bias", DNRI_BIAS, DNRI_INIT_LINEAR, 100, 1, 1, 1, 70);
            break;
        }
    return p;
}

static void params_table(void **state)
{
    dnri_params *p = small_net(false);
    assert_int_equal(dnri_params_count(p), N_PARAMS);
    assert_int_equal(dnri_params_find(p, "fc.weight"), DENSE);
    assert_int_equal(dnri_params_find(p, "fc"), -1);
    assert_int_equal(dnri_params_at(p, CONV)->count, 33 * 9 * 31);
    /* again: the same one; with other dims: an error that names it */
    assert_int_equal(add(p, "fc.bias", DNRI_BIAS, DNRI_INIT_LINEAR, 100, 1, 1, 1, 70), BIAS);
    assert_int_equal(add(p, "fc.bias", DNRI_BIAS, DNRI_INIT_LINEAR, 100, 1, 1, 1, 71), -1);
    assert_int_equal(dnr_last_error()->status, DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "fc.bias"));
    assert_int_equal(add(p, "empty", DNRI_BIAS, DNRI_INIT_ZERO, 0, 1, 1, 1, 0), -1);
    assert_int_equal(add(p, "huge", DNRI_CONV_W, DNRI_INIT_ZERO, 0, INT64_MAX, 3, 3, INT64_MAX),
                     -1);

    dnri_params_seal(p);
    dnri_params_seal(p);
    assert_int_equal(add(p, "late", DNRI_BIAS, DNRI_INIT_ZERO, 0, 1, 1, 1, 8), -1);
    assert_int_equal(add(p, "fc.bias", DNRI_BIAS, DNRI_INIT_LINEAR, 100, 1, 1, 1, 70), BIAS);
    /* reverse order of use, aligned, no gaps but padding */
    const int order[] = {BIAS, DENSE, NORM_B, NORM_W, CONV};
    int64_t end = 0;
    for (int k = 0; k < 5; k++) {
        const dnri_param *x = dnri_params_at(p, order[k]);
        assert_int_equal(x->offset, end);
        end += (x->count + 63) / 64 * 64;
    }
    assert_int_equal(dnri_params_flat(p), end);
    assert_int_equal(dnri_params_at(p, MEAN)->offset, 0);
    assert_int_equal(dnri_params_at(p, VAR)->offset, 64);
    assert_int_equal(dnri_params_buffers(p), 128);

    const bool decays[N_PARAMS] = {[CONV] = true, [DENSE] = true};
    for (int i = 0; i < N_PARAMS; i++) {
        bool buffer = i == MEAN || i == VAR;
        assert_int_equal(dnri_param_decays(dnri_params_at(p, i), false), decays[i]);
        assert_int_equal(dnri_param_decays(dnri_params_at(p, i), true), !buffer);
    }
    dnri_params_free(p);
    dnri_params_free(NULL);
}

/* ---- a device over malloc that counts and can be told to fail */

static struct {
    int live, made, fail_at;
} heap;

static dnr_status heap_alloc(dnr_device *dev, size_t bytes, void **out)
{
    if (++heap.made == heap.fail_at)
        return DNR_FAIL(DNR_EMEM, "ask for less", "heap is full");
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(*out, 0, bytes);
    heap.live++;
    return DNR_OK;
}

static void heap_free(dnr_device *dev, void *p)
{
    heap.live -= p != NULL;
    free(p);
}

static dnr_status heap_copy(dnr_device *dev, dnr_lane lane, void *dst, const void *src,
                            size_t bytes)
{
    memcpy(dst, src, bytes);
    return DNR_OK;
}

static dnr_status heap_sync(dnr_device *dev, dnr_lane lane)
{
    return DNR_OK;
}

static const dnri_backend heap_backend = {.abi = DNRI_BACKEND_ABI,
                                          .name = "heap",
                                          .alloc = heap_alloc,
                                          .free = heap_free,
                                          .copy = heap_copy,
                                          .sync = heap_sync};
static dnr_device heap_device = {.be = &heap_backend, .name = "heap"};

/* ---- the store */

static const dnri_numerics fp64 = {DNR_F64, DNR_F64, false, false},
                           fp32 = {DNR_F32, DNR_F32, false, false},
                           fp16 = {DNR_F16, DNR_F32, false, true},
                           bf16 = {DNR_BF16, DNR_F32, false, false};

static double *read_all(dnri_store *s, dnri_role role, int param)
{
    double *v = calloc((size_t)dnri_params_at(dnri_store_params(s), param)->count, sizeof *v);
    assert_non_null(v);
    assert_int_equal(dnri_store_read(s, role, param, v), DNR_OK);
    return v;
}

/* The raw bytes of a whole flat slab. */
static void *raw_slab(dnr_device *dev, dnri_store *s, dnri_role role, size_t elem, size_t *n)
{
    *n = (size_t)dnri_params_flat(dnri_store_params(s));
    void *raw = malloc(*n * elem);
    assert_non_null(raw);
    assert_int_equal(dnri_copy_now(dev, raw, dnri_store_ptr(s, role, -1), *n * elem), DNR_OK);
    return raw;
}

static void check_initial(dnri_store *s, const dnri_numerics *num)
{
    double *v = read_all(s, DNRI_MASTER, CONV), sum = 0, square = 0;
    const int n = 33 * 9 * 31;
    for (int i = 0; i < n; i++) {
        sum += v[i];
        square += v[i] * v[i];
    }
    double var = 2.0 / (33 * 9), error = 5 / sqrt(n); /* five standard errors */
    assert_true(fabs(sum / n) < error * sqrt(var));
    assert_true(fabs(square / n / var - 1) < error * sqrt(2));
    double *w = read_all(s, DNRI_WEIGHT, CONV);
    for (int i = 0; i < n; i++) { /* the low-precision copy is the master's, rounded */
        char code[8];
        double want;
        dnri_from_double(num->compute, &v[i], code, 1);
        dnri_to_double(num->compute, code, &want, 1);
        assert_true(w[i] == want);
    }
    free(v);
    free(w);

    for (int i = DENSE; i <= BIAS; i++) { /* both: uniform in ±1/sqrt(100) */
        double most = 0, total = 0;
        int64_t count = dnri_params_at(dnri_store_params(s), i)->count;
        v = read_all(s, DNRI_MASTER, i);
        for (int64_t k = 0; k < count; k++) {
            most = fmax(most, fabs(v[k]));
            total += v[k];
        }
        assert_true(most <= 0.1 + 1e-8 && most > 0.09);
        assert_true(fabs(total / (double)count) < 5 * 0.1 / sqrt(3.0 * (double)count));
        free(v);
    }
    const struct {
        dnri_role role;
        int param;
        double value;
    } constant[] = {{DNRI_MASTER, NORM_W, 1}, {DNRI_MASTER, NORM_B, 0}, {DNRI_BUFFER, MEAN, 0},
                    {DNRI_BUFFER, VAR, 1},    {DNRI_GRAD, CONV, 0},     {DNRI_GSUM, DENSE, 0},
                    {DNRI_MOMENTUM, BIAS, 0}};
    for (size_t i = 0; i < sizeof constant / sizeof *constant; i++) {
        v = read_all(s, constant[i].role, constant[i].param);
        for (int k = 0; k < 33; k++)
            assert_true(v[k] == constant[i].value);
        free(v);
    }
    dnri_state st;
    assert_int_equal(dnri_store_read_state(s, &st), DNR_OK);
    dnri_state fresh = {.loss_scale = num->scaled ? 65536 : 1};
    assert_memory_equal(&st, &fresh, sizeof st);
}

static void check_store(dnr_device *dev, const dnri_numerics *num)
{
    dnri_params *p = small_net(false);
    dnri_store *s;
    assert_int_equal(dnri_store_new(dev, p, num, ALL, &s), DNR_OK);
    assert_ptr_equal(dnri_store_params(s), p);
    bool alias = num->compute == num->master;
    size_t elem = dnri_dtype_size(num->master), n;

    /* addresses */
    for (int i = 0; i < N_PARAMS; i++) {
        const dnri_param *x = dnri_params_at(p, i);
        bool buffer = x->kind == DNRI_RUNNING,
             norm = x->kind == DNRI_NORM_W || x->kind == DNRI_NORM_B;
        dnri_role role = buffer ? DNRI_BUFFER : DNRI_MASTER;
        char *slab = dnri_store_ptr(s, role, -1);
        assert_ptr_equal(dnri_store_ptr(s, role, i), slab + (size_t)x->offset * elem);
        assert_null(dnri_store_ptr(s, buffer ? DNRI_MASTER : DNRI_BUFFER, i));
        if (!buffer)
            assert_int_equal(dnri_store_ptr(s, DNRI_WEIGHT, i) == dnri_store_ptr(s, DNRI_MASTER, i),
                             alias || norm);
    }
    assert_true((dnri_store_ptr(s, DNRI_WEIGHT, -1) == dnri_store_ptr(s, DNRI_MASTER, -1)) ==
                alias);
    assert_non_null(dnri_store_ptr(s, DNRI_STATE, -1));
    assert_non_null(dnri_store_ptr(s, DNRI_HEADER, -1));
    assert_non_null(dnri_store_ptr(s, DNRI_CELL, -1));
    assert_null(dnri_store_ptr(s, DNRI_STATE, 0));

    /* initial values; and again after everything was written to, padding included */
    assert_int_equal(dnri_store_init(s, 7), DNR_OK);
    check_initial(s, num);
    double *first = read_all(s, DNRI_MASTER, CONV);
    void *noise = raw_slab(dev, s, DNRI_MASTER, elem, &n);
    memset(noise, 0x11, n * elem);
    for (int role = DNRI_MASTER; role <= DNRI_MOMENTUM; role++)
        assert_int_equal(
            dnri_copy_now(dev, dnri_store_ptr(s, (dnri_role)role, -1), noise, n * elem), DNR_OK);
    free(noise);
    assert_int_equal(dnri_store_init(s, 7), DNR_OK);
    check_initial(s, num);
    double *again = read_all(s, DNRI_MASTER, CONV);
    assert_memory_equal(first, again, 33 * 9 * 31 * sizeof(double));
    unsigned char *raw = raw_slab(dev, s, DNRI_MASTER, elem, &n), zeros[64 * 8] = {0};
    for (int i = 0; i < N_PARAMS; i++) {
        const dnri_param *x = dnri_params_at(p, i);
        if (x->kind != DNRI_RUNNING)
            assert_memory_equal(raw + (size_t)(x->offset + x->count) * elem, zeros,
                                (size_t)(-x->count & 63) * elem);
    }
    free(raw);

    /* another order of registration, the same values; another seed, others */
    dnri_params *q = small_net(true);
    dnri_store *t;
    assert_int_equal(dnri_store_new(dev, q, num, 0, &t), DNR_OK);
    assert_int_equal(dnri_store_init(t, 7), DNR_OK);
    double *other = read_all(t, DNRI_MASTER, dnri_params_find(q, "conv1.weight"));
    assert_memory_equal(first, other, 33 * 9 * 31 * sizeof(double));
    free(other);
    assert_int_equal(dnri_store_init(t, 8), DNR_OK);
    other = read_all(t, DNRI_MASTER, dnri_params_find(q, "conv1.weight"));
    assert_memory_not_equal(first, other, 33 * 9 * 31 * sizeof(double));
    free(other);
    free(first);
    free(again);

    /* writes reach their parameter, its low-precision copy, and nothing else */
    double v[100], got[100];
    for (int i = 0; i < 33; i++)
        v[i] = 1 + i / 3.0;
    double *fc = read_all(s, DNRI_MASTER, DENSE), *conv = read_all(s, DNRI_MASTER, CONV);
    for (int i = NORM_W; i <= VAR; i++)
        assert_int_equal(dnri_store_write(s, i >= MEAN ? DNRI_BUFFER : DNRI_MASTER, i, v), DNR_OK);
    double *fc2 = read_all(s, DNRI_MASTER, DENSE), *conv2 = read_all(s, DNRI_MASTER, CONV);
    assert_memory_equal(fc, fc2, 7000 * sizeof(double));
    assert_memory_equal(conv, conv2, 33 * 9 * 31 * sizeof(double));
    free(fc);
    free(fc2);
    free(conv);
    free(conv2);
    for (int i = NORM_W; i <= VAR; i++) {
        assert_int_equal(dnri_store_read(s, i >= MEAN ? DNRI_BUFFER : DNRI_WEIGHT, i, got), DNR_OK);
        for (int k = 0; k < 33; k++)
            assert_true(got[k] == (num->master == DNR_F64 ? v[k] : (double)(float)v[k]));
    }
    for (int i = 0; i < 70; i++)
        v[i] = 1 + 0x1p-11 +
               0x1p-30; /* above an fp16 tie; the fp32 master rounds it down to the tie */
    assert_int_equal(dnri_store_write(s, DNRI_MASTER, BIAS, v), DNR_OK);
    assert_int_equal(dnri_store_read(s, DNRI_WEIGHT, BIAS, got), DNR_OK);
    double want = alias ? (num->master == DNR_F64 ? v[0] : (double)(float)v[0]) : 1;
    for (int i = 0; i < 70; i++)
        assert_true(got[i] == want);
    dnri_state st = {.steps = 12345, .loss_scale = 8}, back;
    assert_int_equal(dnri_store_write_state(s, &st), DNR_OK);
    assert_int_equal(dnri_store_read_state(s, &back), DNR_OK);
    assert_memory_equal(&st, &back, sizeof st);

    /* what is not there */
    assert_null(dnri_store_ptr(t, DNRI_GRAD, 0));
    assert_null(dnri_store_ptr(t, DNRI_MOMENTUM, -1));
    assert_int_equal(dnri_store_read(t, DNRI_GRAD, 0, got), DNR_EUSAGE);
    assert_int_equal(dnri_store_read(s, DNRI_BUFFER, BIAS, got), DNR_EUSAGE);
    assert_int_equal(dnri_store_write(s, DNRI_MASTER, MEAN, v), DNR_EUSAGE);
    assert_int_equal(dnri_store_write(s, DNRI_STATE, BIAS, v), DNR_EUSAGE);
    assert_int_equal(dnri_store_read(s, DNRI_MASTER, N_PARAMS, got), DNR_EUSAGE);
    assert_int_equal(dnri_store_read(s, DNRI_MASTER, -1, got), DNR_EUSAGE);
    dnri_store_free(t);
    dnri_store_free(s);
    dnri_store_free(NULL);
    dnri_params_free(p);
    dnri_params_free(q);
}

static void store_on_heap(void **state)
{
    check_store(&heap_device, &fp64);
    check_store(&heap_device, &fp32);
    check_store(&heap_device, &fp16);
    check_store(&heap_device, &bf16);
    assert_int_equal(heap.live, 0);
}

/* On a device of this machine, in each precision that it does. */
static void store_on(const char *spec)
{
    dnr_device *dev;
    if (dnr_device_open(spec, &dev) != DNR_OK) {
        assert_int_equal(dnr_last_error()->status, DNR_EDEVICE);
        print_message("%s: %s\n", spec, dnr_last_error()->what);
        skip();
    }
    for (int p = DNR_PRECISION_FP64; p <= DNR_PRECISION_BF16; p++) {
        dnr_precision precision = (dnr_precision)p;
        dnri_numerics num;
        if (dev->be->numerics(dev, &precision, &num) == DNR_OK) {
            print_message("%s: %s\n", dev->name, dnr_precision_name(precision));
            check_store(dev, &num);
        }
    }
    dnr_device_close(dev);
}

static void store_on_ref(void **state)
{
    store_on("ref");
}

static void store_on_cpu(void **state)
{
    store_on("cpu");
}

static void store_on_cuda(void **state)
{
    store_on("cuda");
}

/* Each allocation fails in turn: the error says which slab, and nothing leaks. */
static void store_without_memory(void **state)
{
    dnri_params *p = small_net(false);
    dnri_store *s;
    int fails = 0;
    for (heap.fail_at = 1;; heap.fail_at++, fails++) {
        heap.made = 0;
        if (dnri_store_new(&heap_device, p, &fp16, ALL, &s) == DNR_OK)
            break;
        assert_null(s);
        assert_int_equal(heap.live, 0);
        assert_int_equal(dnr_last_error()->status, DNR_EMEM);
        assert_non_null(strstr(dnr_last_error()->what, "slab: heap is full"));
    }
    heap.fail_at = 0;
    assert_int_equal(fails, DNRI_ROLES);
    dnri_store_free(s);
    assert_int_equal(heap.live, 0);

    size_t flat = (size_t)dnri_params_flat(p);
    assert_int_equal(dnri_store_size(p, &fp32, 0), flat * 4 + 128 * 4 + 3 * 256);
    assert_int_equal(dnri_store_size(p, &fp16, DNRI_STORE_SUMS) - dnri_store_size(p, &fp16, 0),
                     flat * 4);
    assert_int_equal(dnri_store_size(p, &fp16, 0) - dnri_store_size(p, &fp32, 0),
                     (flat * 2 + 255) / 256 * 256);
    dnri_params_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_codes_round_trip),
        cmocka_unit_test(half_values),
        cmocka_unit_test(ties_go_to_even),
        cmocka_unit_test(other_types),
        cmocka_unit_test(rng_is_a_function_of_its_key),
        cmocka_unit_test(rng_distributions),
        cmocka_unit_test(params_table),
        cmocka_unit_test(store_on_heap),
        cmocka_unit_test(store_on_ref),
        cmocka_unit_test(store_on_cpu),
        cmocka_unit_test(store_on_cuda),
        cmocka_unit_test(store_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
