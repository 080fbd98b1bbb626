/* test_cpu_ways.c: the CPU's ways to run a convolution: each of oneDNN's candidates, Winograd's method and
 * AMX against plain fp64 loops, and the contest that picks one. */
#include "../layers/cpu/amx.h"
#include "../layers/cpu/winograd.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

extern const dnri_backend dnri_backend_cpu;
static dnr_device *dev;

typedef struct shape {
    int64_t n, h, w, c, k;
    int kernel, stride, pad;
} shape;

static uint64_t state = 1;

static float draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(state >> 11) / 4503599627370496. - 1);
}

static double error_of(const float *got, const double *want, int64_t n)
{
    double d = 0, w = 0;
    for (int64_t i = 0; i < n; i++) {
        d += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        w += want[i] * want[i];
    }
    return isfinite(d) ? sqrt(d / w) : INFINITY;
}

/* tensor[which] in fp64 from the two others; they are src, weights, bias (absent), dst. */
static double *naive(const dnri_dnn_desc *d, int which, float *const *tensor)
{
    const dnr_desc *x = &d->shape[0], *w = &d->shape[1], *y = &d->shape[3];
    double *out = calloc((size_t)dnri_count(&d->shape[which]), sizeof *out);
    for (int64_t n = 0; n < y->dim[0]; n++)
        for (int64_t p = 0; p < y->dim[1]; p++)
            for (int64_t q = 0; q < y->dim[2]; q++)
                for (int64_t k = 0; k < y->dim[3]; k++)
                    for (int64_t r = 0; r < w->dim[1]; r++)
                        for (int64_t s = 0; s < w->dim[2]; s++) {
                            int64_t h = p * d->stride - d->pad + r, v = q * d->stride - d->pad + s;
                            if (h < 0 || h >= x->dim[1] || v < 0 || v >= x->dim[2])
                                continue;
                            int64_t xi = ((n * x->dim[1] + h) * x->dim[2] + v) * x->dim[3];
                            int64_t wi = ((k * w->dim[1] + r) * w->dim[2] + s) * w->dim[3];
                            int64_t yi = ((n * y->dim[1] + p) * y->dim[2] + q) * y->dim[3] + k;
                            for (int64_t c = 0; c < x->dim[3]; c++)
                                if (which == DNRI_DNN_DST)
                                    out[yi] +=
                                        (double)tensor[0][xi + c] * (double)tensor[1][wi + c];
                                else if (which == DNRI_DNN_SRC)
                                    out[xi + c] +=
                                        (double)tensor[1][wi + c] * (double)tensor[3][yi];
                                else
                                    out[wi + c] +=
                                        (double)tensor[0][xi + c] * (double)tensor[3][yi];
                        }
    return out;
}

static dnri_dnn_desc describe(shape s, dnri_dnn_pass pass)
{
    int64_t p = (s.h + 2 * s.pad - s.kernel) / s.stride + 1;
    int64_t q = (s.w + 2 * s.pad - s.kernel) / s.stride + 1;
    dnri_dnn_desc d = {.pass = pass, .training = true, .stride = s.stride, .pad = s.pad};
    d.shape[DNRI_DNN_SRC] = (dnr_desc){DNR_F32, {s.n, s.h, s.w, s.c}};
    d.shape[DNRI_DNN_WEIGHTS] = (dnr_desc){DNR_F32, {s.k, s.kernel, s.kernel, s.c}};
    d.shape[DNRI_DNN_DST] = (dnr_desc){DNR_F32, {s.n, p, q, s.k}};
    return d;
}

/* Runs the step twice on memory full of NaN; the result's error. */
static double run_step(dnri_step *step, const dnri_dnn_desc *d, int which, float *const *tensor,
                       const double *want)
{
    size_t count = (size_t)dnri_count(&d->shape[which]);
    float *out = malloc(count * sizeof *out);
    dnri_binding b = {.workspace = aligned_alloc(256, (step->workspace + 511) / 256 * 256)};
    for (int i = 0; i < (d->added ? 5 : 4); i++)
        b.in[i] = i == which ? out : tensor[i];
    memset(b.workspace, 0xff, step->workspace);
    assert_int_equal(step->bind(step->ctx, &b), DNR_OK);
    for (int i = 0; i < 2; i++) {
        memset(out, 0xff, count * sizeof *out);
        assert_int_equal(step->run(step->ctx), DNR_OK);
    }
    double e = error_of(out, want, (int64_t)count);
    step->drop(step->ctx);
    free(out);
    free(b.workspace);
    return e;
}

static const int slots[4] = {0, 1, DNRI_DNN_ABSENT, 3}, all_slots[4] = {0, 1, 2, 3};

/* Relative error. oneDNN's range from 1e-7 to 1.3e-6 here, Winograd's from 1e-7 to 1.1e-6. */
#define BOUND 2e-6

static void check(shape s, int want_winograd)
{
    for (int pass = 0; pass < 3; pass++) {
        dnri_dnn_desc d = describe(s, (dnri_dnn_pass)pass);
        int which = pass == DNRI_DNN_FPROP   ? DNRI_DNN_DST
                    : pass == DNRI_DNN_DGRAD ? DNRI_DNN_SRC
                                             : 1;
        float *tensor[4] = {0};
        for (int i = 0; i < 4; i++)
            if (i != DNRI_DNN_BIAS) {
                int64_t n = dnri_count(&d.shape[i]);
                tensor[i] = malloc((size_t)n * sizeof(float));
                for (int64_t j = 0; j < n; j++)
                    tensor[i][j] = draw();
            }
        double *want = naive(&d, which, tensor);
        dnri_step step = {0};
        assert_int_equal(dnri_winograd_fits(&d), want_winograd);
        if (want_winograd) {
            assert_int_equal(dnri_winograd_step(dev, &d, slots, &step), DNR_OK);
            double e = run_step(&step, &d, which, tensor, want);
            if (e >= BOUND)
                fail_msg("pass %d, %lld channels: relative error %.2g", pass, (long long)s.c, e);
        }
        for (int i = 0;; i++) {
            step = (dnri_step){0};
            d.candidate = i;
            assert_int_equal(dnri_cpu_dnn_step(dev, &d, slots, &step), DNR_OK);
            if (!step.run && step.impl[0])
                continue;
            if (!step.run) {
                assert_true(i > 0 && i < 64);
                break;
            }
            char impl[64];
            snprintf(impl, sizeof impl, "%s", step.impl);
            double e = run_step(&step, &d, which, tensor, want);
            if (e >= BOUND)
                fail_msg("%s, pass %d, %lld channels: %.2g", impl, pass, (long long)s.c, e);
        }
        for (int i = 0; i < 4; i++)
            free(tensor[i]);
        free(want);
    }
}

/* Bias, residual and ReLU after each way's convolution; oneDNN reads the residual, or adds to a copy. */
static void check_epilogue(shape s, bool relu, bool added, bool in_place)
{
    dnri_dnn_desc d = describe(s, DNRI_DNN_FPROP);
    float *tensor[5] = {0};
    d.training = false;
    d.shape[DNRI_DNN_BIAS] = (dnr_desc){DNR_F32, {1, 1, 1, s.k}};
    for (int i = 0; i < 5; i++) {
        const int64_t n = dnri_count(&d.shape[i < 4 ? i : DNRI_DNN_DST]);
        tensor[i] = malloc((size_t)n * sizeof(float));
        for (int64_t j = 0; j < n; j++)
            tensor[i][j] = (i == 2 || i == 4 ? 3 : 1) * draw();
    }
    double *want = naive(&d, DNRI_DNN_DST, tensor);
    for (int64_t i = 0; i < dnri_count(&d.shape[DNRI_DNN_DST]); i++) {
        want[i] += (double)tensor[2][i % s.k] + (added ? (double)tensor[4][i] : 0);
        want[i] = relu && want[i] < 0 ? 0 : want[i];
    }
    d.biased = true;
    d.relu = relu;
    d.added = added;
    d.in_place = in_place;
    d.residual = 4;
    for (int i = dnri_winograd_fits(&d) ? -1 : 0;; i++) {
        dnri_step step = {0};
        d.candidate = i;
        if (i < 0)
            assert_int_equal(dnri_winograd_step(dev, &d, all_slots, &step), DNR_OK);
        else
            assert_int_equal(dnri_cpu_dnn_step(dev, &d, all_slots, &step), DNR_OK);
        if (!step.run && step.impl[0])
            continue;
        if (!step.run) {
            assert_true(i > 0 && i < 64);
            break;
        }
        char impl[64];
        snprintf(impl, sizeof impl, "%s", step.impl);
        assert_true(i != 0 || !in_place || strstr(impl, "copy"));
        const double e = run_step(&step, &d, DNRI_DNN_DST, tensor, want);
        if (e >= BOUND)
            fail_msg("%s, relu %d, residual %d, copied %d: %.2g", impl, relu, added, in_place, e);
    }
    for (int i = 0; i < 5; i++)
        free(tensor[i]);
    free(want);
}

static void test_epilogues(void **unused)
{
    static const shape shapes[] = {
        {2, 9, 10, 16, 32, 3, 1, 1}, {1, 8, 8, 64, 64, 3, 1, 1}, {2, 7, 7, 32, 64, 1, 1, 0},
        {2, 9, 9, 16, 16, 1, 2, 0},  {1, 15, 15, 3, 8, 7, 2, 3},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int form = 0; form < 6; form++)
            check_epilogue(shapes[i], form & 1, form >= 2, form >= 4);
}

static void test_ways_agree(void **unused)
{
    check((shape){2, 8, 8, 16, 32, 3, 1, 1}, true);
    check((shape){3, 7, 5, 32, 16, 3, 1, 1}, true); /* cut tiles */
    check((shape){1, 9, 14, 64, 48, 3, 1, 0}, true);
    check((shape){2, 3, 6, 48, 64, 3, 1, 2}, true);
    check((shape){1, 1, 1, 16, 16, 3, 1, 1}, true);     /* less than a tile */
    check((shape){40, 12, 12, 16, 128, 3, 1, 1}, true); /* several groups and slices */
    check((shape){9, 28, 28, 64, 16, 3, 1, 1}, true);
    check((shape){2, 9, 9, 16, 32, 3, 2, 1}, false);
    check((shape){2, 8, 8, 16, 24, 3, 1, 1}, false);
    check((shape){2, 8, 8, 16, 32, 1, 1, 0}, false);
    check((shape){2, 23, 23, 3, 16, 7, 2, 3}, false);
}

/* Of bf16, whose rounding alone makes 1.7e-3. */
#define BOUND_BF16 2e-3

static float widened(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* run_step for a result in bf16. */
static double run_step_bf16(dnri_step *step, const dnri_dnn_desc *d, int which, float *const *given,
                            const double *want)
{
    const int64_t count = dnri_count(&d->shape[which]);
    uint16_t *out = malloc((size_t)count * sizeof *out);
    float *got = malloc((size_t)count * sizeof *got);
    dnri_binding b = {.workspace = aligned_alloc(256, (step->workspace + 511) / 256 * 256)};
    for (int i = 0; i < 4; i++)
        b.in[i] = i == which ? (void *)out : given[i];
    memset(b.workspace, 0xff, step->workspace);
    assert_int_equal(step->bind(step->ctx, &b), DNR_OK);
    for (int i = 0; i < 2; i++) {
        memset(out, 0xff, (size_t)count * sizeof *out);
        assert_int_equal(step->run(step->ctx), DNR_OK);
    }
    for (int64_t i = 0; i < count; i++)
        got[i] = widened(out[i]);
    const double e = error_of(got, want, count);
    step->drop(step->ctx);
    free(out);
    free(got);
    free(b.workspace);
    return e;
}

/* A pass of bf16 pictures, by AMX and by oneDNN. */
static void check_bf16_pass(shape s, dnri_dnn_pass pass, bool amx)
{
    dnri_dnn_desc d = describe(s, pass);
    float *tensor[4] = {0}; /* in fp32 for the truth, */
    float *given[4] = {0};  /* in bf16 */
    const int which = pass == DNRI_DNN_FPROP   ? DNRI_DNN_DST
                      : pass == DNRI_DNN_DGRAD ? DNRI_DNN_SRC
                                               : DNRI_DNN_WEIGHTS;
    for (int i = 0; i < 4; i++) {
        if (i == DNRI_DNN_BIAS || (i == DNRI_DNN_WEIGHTS && i == which))
            continue; /* a weight gradient is fp32 */
        d.shape[i].dtype = DNR_BF16;
        if (i == which)
            continue;
        const int64_t n = dnri_count(&d.shape[i]);
        uint16_t *half = malloc((size_t)n * sizeof *half);
        tensor[i] = malloc((size_t)n * sizeof(float));
        for (int64_t j = 0; j < n; j++) {
            const float v = draw();
            uint32_t bits;
            memcpy(&bits, &v, sizeof bits);
            half[j] = (uint16_t)(bits >> 16);
            tensor[i][j] = widened(half[j]);
        }
        given[i] = (float *)(void *)half;
    }
    double *want = naive(&d, which, tensor);
    if (dnri_dnn_amx())
        assert_int_equal(dnri_amx_fits(&d), amx);
    for (int i = dnri_amx_fits(&d) ? -1 : 0; i < 64; i++) {
        dnri_step step = {0};
        d.candidate = i;
        if (i < 0)
            assert_int_equal(dnri_amx_step(dev, &d, slots, &step), DNR_OK);
        else
            assert_int_equal(dnri_cpu_dnn_step(dev, &d, slots, &step), DNR_OK);
        if (!step.run && step.impl[0])
            continue;
        if (!step.run)
            break;
        char impl[64];
        snprintf(impl, sizeof impl, "%s", step.impl);
        const double e = pass == DNRI_DNN_WGRAD ? run_step(&step, &d, which, given, want)
                                                : run_step_bf16(&step, &d, which, given, want);
        if (e >= (pass == DNRI_DNN_WGRAD ? BOUND : BOUND_BF16))
            fail_msg("%s, pass %d, %lld channels: %.2g", impl, (int)pass, (long long)s.c, e);
    }
    for (int i = 0; i < 4; i++) {
        free(tensor[i]);
        free(given[i]);
    }
    free(want);
}

/* amx: do weight gradients fit; the others do up to kernels of 5 and strides of 2. */
static void check_bf16(shape s, bool amx)
{
    for (int pass = 0; pass < 3; pass++)
        check_bf16_pass(s, (dnri_dnn_pass)pass,
                        amx && (pass == DNRI_DNN_WGRAD || (s.kernel <= 5 && s.stride <= 2)));
}

static void test_bf16(void **unused)
{
    if (!dnri_dnn_native_bf16())
        return;
    check_bf16((shape){2, 7, 5, 32, 64, 1, 1, 0}, true);
    check_bf16((shape){1, 3, 3, 64, 32, 3, 1, 1}, true); /* less than a step */
    check_bf16((shape){3, 9, 10, 32, 32, 3, 2, 1}, true);
    check_bf16((shape){2, 9, 9, 64, 96, 1, 2, 0}, true);
    check_bf16((shape){3, 28, 28, 32, 64, 3, 1, 1}, true);  /* several blocks */
    check_bf16((shape){8, 16, 16, 96, 288, 1, 1, 0}, true); /* several chunks of rows */
    check_bf16((shape){1, 11, 11, 32, 32, 7, 2, 3}, true);
    check_bf16((shape){5, 8, 7, 32, 32, 3, 2, 1}, true); /* even and odd sides, uneven groups */
    check_bf16((shape){3, 9, 8, 32, 64, 3, 1, 0}, true);
    check_bf16((shape){2, 6, 6, 64, 32, 3, 1, 2}, true); /* larger than what it reads */
    check_bf16((shape){2, 10, 9, 32, 32, 5, 2, 2}, true);
    check_bf16((shape){2, 9, 10, 32, 32, 2, 2, 0}, true); /* a line that nothing reaches */
    check_bf16((shape){2, 8, 8, 32, 32, 1, 2, 1}, true);
    check_bf16((shape){2, 10, 10, 32, 32, 3, 3, 1}, true);
    check_bf16((shape){2, 5, 5, 288, 320, 3, 1, 1}, true); /* several chunks of weights */
    check_bf16((shape){2, 8, 8, 16, 32, 3, 1, 1}, false);
    check_bf16((shape){2, 8, 8, 32, 48, 3, 1, 1}, false);
}

/* ---- the contest */

typedef struct race {
    int ways, made[8];
    int ms[8]; /* way −1's at 7 */
    size_t workspace[8];
} race;

typedef struct runner {
    dnri_binding b;
    int ms;
} runner;

static dnr_status sleep_ms(void *ctx)
{
    nanosleep(&(struct timespec){.tv_nsec = ((runner *)ctx)->ms * 1000000L}, NULL);
    return DNR_OK;
}

static dnr_status enter(dnr_device *device, const void *what, int way, dnri_step *out)
{
    race *r = (race *)(uintptr_t)what;
    if (way >= r->ways)
        return DNR_OK;
    int i = way < 0 ? 7 : way;
    runner *s = dnri_cpu_step(out, sizeof *s, sleep_ms, 1);
    assert_non_null(s);
    s->ms = r->ms[i];
    out->workspace = r->workspace[i];
    snprintf(out->impl, sizeof out->impl, "way %d", way);
    r->made[i]++;
    return DNR_OK;
}

static void expect_way(race *r, int64_t key, int extra, int way)
{
    dnri_tune_key k = {{key}};
    dnri_step step = {0};
    char want[16];
    const dnri_op op = {0};
    assert_int_equal(dnri_cpu_fastest(dev, NULL, &op, &k, enter, r, extra,
                                      &(dnri_lower_opts){.workspace_cap = 1 << 20}, &step),
                     DNR_OK);
    snprintf(want, sizeof want, "way %d", way);
    assert_string_equal(step.impl, want);
    step.drop(step.ctx);
}

static void test_contest(void **unused)
{
    race r = {.ways = 3, .ms = {60, 20, 60, [7] = 60}, .workspace = {100, 100, 100, 100}};
    expect_way(&r, 1, 1, 1);
    assert_int_equal(r.made[0] + r.made[2] + r.made[7], 3);
    assert_int_equal(r.made[1], 2); /* for the contest, and to keep */
    r.ms[2] = 1;
    expect_way(&r, 1, 1, 1); /* known: not timed again */
    assert_int_equal(r.made[2], 1);
    expect_way(&r, 2, 1, 2);  /* of another shape */
    r.workspace[2] = 2 << 20; /* beyond the cap */
    expect_way(&r, 3, 1, 1);
    r = (race){.ways = 1, .ms = {40, [7] = 5}};
    expect_way(&r, 4, 1, -1);
    expect_way(&r, 5, 0, 0);
}

static int open_device(void **unused)
{
    return dnri_backend_cpu.open(NULL, &dev) != DNR_OK || !(dev->be = &dnri_backend_cpu);
}

static int close_device(void **unused)
{
    dnri_backend_cpu.close(dev);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ways_agree),
                                       cmocka_unit_test(test_bf16), cmocka_unit_test(test_contest),
                                       cmocka_unit_test(test_epilogues)};
    return cmocka_run_group_tests(tests, open_device, close_device);
}
