/* test_engine_ops.c: feeding a batch, folding gradients, rounding them for the wire, and the optimizer, on one device against the
 * reference device. The same programs run on both, with the same values in their stores.
 *
 *     test_engine_ops DEVICE PRECISION    test_engine_ops cuda fp16
 *
 * Exit code 77: this machine has no such device or precision. */
#include "probe.h"
#include "../runtime/reduce.h"
#include "../runtime/slot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static dnr_device *device_of(int side)
{
    return side == REF ? probe_ref : probe_device;
}

static dnr_precision precision_of(int side)
{
    return side == REF ? DNR_PRECISION_AUTO : probe_precision;
}

/* ---- ingest */

/* Runs ingest over one slot; x, labels, header as it leaves them. */
static void run_ingest(int side, const dnri_ingest_attr *a, const unsigned char *slot, double *x,
                       double *labels, dnri_header *header)
{
    const size_t bytes = dnri_slot_bytes(a->n, a->h, a->w);
    rig r;
    dnr_tid tx, tl;
    void *at;
    rig_open(&r, device_of(side), precision_of(side), true);
    OK(dnri_ingest(r.g, a, &tx, &tl));
    rig_keep(&r, tx);
    rig_keep(&r, tl);
    rig_plan(&r, true, false);
    OK(r.dev->be->alloc(r.dev, bytes, &at));
    OK(dnri_copy_now(r.dev, at, slot, bytes));
    OK(dnri_copy_now(r.dev, dnri_store_ptr(r.store, DNRI_CELL, -1), &at, sizeof at));
    rig_bind(&r);
    rig_run(&r);
    rig_read(&r, tx, x);
    rig_read(&r, tl, labels);
    OK(dnri_copy_now(r.dev, header, dnri_store_ptr(r.store, DNRI_HEADER, -1), sizeof *header));
    r.dev->be->free(r.dev, at);
    rig_close(&r);
}

static void test_ingest(void **state)
{
    static const dnri_ingest_attr cases[] = {
        {3, 5, 7, {0.0171, 0.0175, 0.0174}, {-2.118, -2.036, -1.804}},
        {1, 1, 1, {1 / 255.0, 1 / 255.0, 1 / 255.0}, {0, 0, 0}},
        {17, 16, 16, {0.01, 0.02, 0.03}, {-1, -2, -3}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        const dnri_ingest_attr *a = &cases[i];
        const int64_t n = a->n * a->h * a->w * 3;
        const dnri_header h = {.lr = 0.123, .first = 1};
        unsigned char *slot = calloc(1, dnri_slot_bytes(a->n, a->h, a->w));
        double *x[SIDES], *labels[SIDES];
        dnri_header header[SIDES];
        memcpy(slot, &h, sizeof h);
        for (int64_t k = 0; k < a->n; k++)
            ((int32_t *)(slot + dnri_slot_labels()))[k] = (int32_t)(k * 37 % 1000 - 1);
        for (int64_t k = 0; k < n; k++)
            slot[dnri_slot_pixels(a->n) + (size_t)k] = (unsigned char)(k * 131 + k / 256);
        for (int side = 0; side < SIDES; side++) {
            x[side] = malloc((size_t)n * sizeof *x[side]);
            labels[side] = malloc((size_t)a->n * sizeof *labels[side]);
            run_ingest(side, a, slot, x[side], labels[side], &header[side]);
            assert_memory_equal(&header[side], &h, sizeof h);
        }
        const double error = rig_error(x[DEVICE], x[REF], n);
        assert_true(probe_judge("ingest", "x", error, probe_bound(POINT)));
        assert_memory_equal(labels[DEVICE], labels[REF], (size_t)a->n * sizeof *labels[0]);
        for (int side = 0; side < SIDES; side++) {
            free(x[side]);
            free(labels[side]);
        }
        free(slot);
    }
}

/* ---- the optimizer */

static const dnri_param protos[] = {
    {.name = "conv", .kind = DNRI_CONV_W, .dim = {32, 3, 3, 17}},
    {.name = "gamma", .kind = DNRI_NORM_W, .dim = {1, 1, 1, 65}},
    {.name = "beta", .kind = DNRI_NORM_B, .dim = {1, 1, 1, 64}},
    {.name = "dense", .kind = DNRI_DENSE_W, .dim = {10, 1, 1, 100}},
    {.name = "bias", .kind = DNRI_BIAS, .dim = {1, 1, 1, 10}},
    {.name = "running", .kind = DNRI_RUNNING, .dim = {1, 1, 1, 70}},
};
enum { PARAMS = sizeof protos / sizeof protos[0] - 1, RUNNING = PARAMS };

static void open_update(rig *r, int side, const dnri_update_opts *o)
{
    rig_open(r, device_of(side), precision_of(side), true);
    for (int i = 0; i < PARAMS; i++)
        assert_true(dnri_param_tensor(r->g, DNRI_WEIGHT, &protos[i]) >= 0);
    assert_true(dnri_param_tensor(r->g, DNRI_BUFFER, &protos[RUNNING]) >= 0);
    OK(dnri_emit_update(r->g, o));
    rig_plan(r, true, o->sums);
    rig_bind(r);
}

/* The same values on both sides: what the device's master type holds. */
static void fill(rig r[SIDES], dnri_role role, int param, double scale, uint64_t seed)
{
    const int64_t n = dnri_params_at(r[REF].params, param)->count;
    double *v = malloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++)
        v[i] = scale * rig_normal(&seed);
    rig_round(r[DEVICE].num.master, v, n);
    for (int side = 0; side < SIDES; side++)
        OK(dnri_store_write(r[side].store, role, param, v));
    free(v);
}

static int judge(rig r[SIDES], const char *name, dnri_role role, double bound)
{
    int bad = 0;
    const bool running = role == DNRI_EMA_BUFFER;
    for (int p = running ? RUNNING : 0; p < (running ? RUNNING + 1 : PARAMS); p++) {
        const int64_t n = dnri_params_at(r[REF].params, p)->count;
        double *v[SIDES];
        for (int side = 0; side < SIDES; side++) {
            v[side] = malloc((size_t)n * sizeof *v[side]);
            OK(dnri_store_read(r[side].store, role, p, v[side]));
        }
        bad += !probe_judge("update", name, rig_error(v[DEVICE], v[REF], n), bound);
        free(v[REF]);
        free(v[DEVICE]);
    }
    return bad;
}

static int judge_state(rig r[SIDES])
{
    dnri_state s[SIDES];
    double whole[SIDES][5];
    for (int side = 0; side < SIDES; side++) {
        OK(dnri_store_read_state(r[side].store, &s[side]));
        const double v[] = {s[side].loss_scale, s[side].found_inf, s[side].growth,
                            (double)s[side].steps, (double)s[side].skipped};
        memcpy(whole[side], v, sizeof v);
    }
    int bad = !probe_judge("update", "scaler", rig_error(whole[DEVICE], whole[REF], 5), 0);
    if (!s[REF].found_inf)
        bad += !probe_judge("update", "grad_sqsum",
                            rig_error(&s[DEVICE].grad_sqsum, &s[REF].grad_sqsum, 1), 1e-6);
    return bad;
}

static void set_state(rig r[SIDES], const dnri_state *s)
{
    for (int side = 0; side < SIDES; side++)
        OK(dnri_store_write_state(r[side].store, s));
}

/* Puts `value` into one gradient. */
static void spoil(rig r[SIDES], int param, double value)
{
    for (int side = 0; side < SIDES; side++) {
        double v[100 * 10];
        OK(dnri_store_read(r[side].store, DNRI_GRAD, param, v));
        v[7] = value;
        OK(dnri_store_write(r[side].store, DNRI_GRAD, param, v));
    }
}

static int run_steps(const dnri_update_opts *o)
{
    rig r[SIDES];
    int bad = 0;
    const double scale = o->sgd.scaled ? 256 : 1;
    for (int side = 0; side < SIDES; side++)
        open_update(&r[side], side, o);
    set_state(r, &(dnri_state){.loss_scale = (float)scale, .growth = DNRI_SCALE_INTERVAL - 3});
    for (int p = 0; p < PARAMS; p++) {
        fill(r, DNRI_MASTER, p, 1, (uint64_t)p);
        fill(r, DNRI_MOMENTUM, p, 0.1, (uint64_t)p + 50);
        fill(r, DNRI_EMA, p, 1, (uint64_t)p + 70);
    }
    fill(r, DNRI_EMA_BUFFER, RUNNING, 1, 80);
    for (int step = 0; step < 5; step++) {
        for (int p = 0; p < PARAMS; p++)
            fill(r, DNRI_GRAD, p, scale, (uint64_t)(100 + step * PARAMS + p));
        fill(r, DNRI_BUFFER, RUNNING, 1, (uint64_t)(200 + step));
        if (step == 3)
            spoil(r, 3,
                  INFINITY); /* after the scale has grown; without one: no step counts any more */
        if (o->sgd.scaled && step == 4)
            spoil(r, 4, NAN);
        for (int side = 0; side < SIDES; side++) {
            rig_header(&r[side], 0.1 / (step + 1), step != 1);
            rig_run(&r[side]);
        }
        bad += judge(r, "master", DNRI_MASTER, 1e-6) + judge(r, "momentum", DNRI_MOMENTUM, 1e-6) +
               judge(r, "weight", DNRI_WEIGHT, probe_bound(POINT) + 1e-6) + judge_state(r);
        bad += judge(r, "average", DNRI_EMA, 1e-6);
        bad += judge(r, "average of statistics", DNRI_EMA_BUFFER, 1e-6);
        if (o->sums)
            bad += judge(r, "sum", DNRI_GSUM, 1e-6);
    }
    for (int side = 0; side < SIDES; side++)
        rig_close(&r[side]);
    return bad;
}

static void test_update(void **state)
{
    static const dnri_sgd_attr cases[] = {
        {.momentum = 0},
        {.momentum = 0.9},
        {.momentum = 0.9, .weight_decay = 1e-2, .decay_norm_bias = true},
        {.momentum = 0.9, .weight_decay = 1e-2, .nesterov = true},
        {.momentum = 0.9, .weight_decay = 1e-2, .nesterov = true, .clip_norm = 3},
        {.momentum = 0.9, .clip_norm = 1e6},
        {.momentum = 0.9, .weight_decay = 1e-2, .scaled = true},
        {.momentum = 0.9, .nesterov = true, .weight_decay = 1e-2, .clip_norm = 3, .scaled = true},
    };
    int bad = 0;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int sums = 0; sums < 2; sums++) {
            const int b = run_steps(&(dnri_update_opts){
                .sgd = cases[i], .sums = sums, .last = true, .ema = sums ? 0.9 : 0});
            if (b)
                print_error("  in case %d, sums %d\n", (int)i, sums);
            bad += b;
        }
    assert_int_equal(bad, 0);
}

/* GradScaler on the device: an overflow skips the step and halves the scale; 2,000 good steps double it. */
static void test_scaler(void **state)
{
    const dnri_update_opts o = {.sgd = {.momentum = 0.9, .scaled = true}, .last = true};
    rig r[SIDES];
    dnri_state s;
    double before[64], after[64];
    for (int side = 0; side < SIDES; side++)
        open_update(&r[side], side, &o);
    rig *d = &r[DEVICE];
    set_state(r, &(dnri_state){.loss_scale = 1024, .growth = 1999});
    for (int p = 0; p < PARAMS; p++) {
        fill(r, DNRI_MASTER, p, 1, 1);
        fill(r, DNRI_GRAD, p, 1, 2);
    }
    rig_header(d, 0.1, true);
    rig_run(d);
    OK(dnri_store_read_state(d->store, &s));
    assert_true(s.loss_scale == 2048 && s.growth == 0 && s.steps == 1 && s.skipped == 0);
    spoil(r, 3, INFINITY);
    OK(dnri_store_read(d->store, DNRI_MASTER, 2, before));
    rig_run(d);
    OK(dnri_store_read(d->store, DNRI_MASTER, 2, after));
    OK(dnri_store_read_state(d->store, &s));
    assert_true(s.loss_scale == 1024 && s.growth == 0 && s.steps == 2 && s.skipped == 1);
    assert_true(s.found_inf == 1);
    assert_memory_equal(before, after, sizeof before);
    fill(r, DNRI_GRAD, 3, 1, 2);
    rig_run(d);
    OK(dnri_store_read(d->store, DNRI_MASTER, 2, after));
    OK(dnri_store_read_state(d->store, &s));
    assert_true(s.growth == 1 && s.steps == 3 && s.skipped == 1 && s.found_inf == 0);
    assert_true(rig_error(before, after, 64) > 1e-6); /* the next step counts again */
    s.loss_scale = ldexpf(1, 127);                    /* twice that is not finite: it stays */
    s.growth = 1999;
    OK(dnri_store_write_state(d->store, &s));
    rig_run(d);
    OK(dnri_store_read_state(d->store, &s));
    assert_true(s.loss_scale == ldexpf(1, 127) && s.growth == 0);
    for (int side = 0; side < SIDES; side++)
        rig_close(&r[side]);
}

/* ---- gradients between ranks */

/* A part of the slab to the type of the wire and back: what the reference makes of it, to the bit. */
static void wire_equals_ref(dnr_dtype type)
{
    const dnri_update_opts none = {.last = false};
    const dnri_wire_attr a = {.offset = 9 * DNRI_PARAM_ALIGN, .count = 80 * DNRI_PARAM_ALIGN, type};
    rig r[SIDES];
    double *wire[SIDES], *grad[SIDES];
    int64_t flat = 0;
    for (int side = 0; side < SIDES; side++) {
        rig_open(&r[side], device_of(side), precision_of(side), true);
        for (int i = 0; i < PARAMS; i++)
            assert_true(dnri_param_tensor(r[side].g, DNRI_WEIGHT, &protos[i]) >= 0);
        OK(dnri_emit_update(r[side].g, &none)); /* seals the table */
        dnr_tid slab = dnri_slab_tensor(r[side].g, DNRI_GRAD), t = DNRI_NONE;
        OK(dnri_emit(r[side].g, &dnri_def_wire_pack, "wire", &a, sizeof a, 1, &slab, 1, &t));
        OK(dnri_emit(r[side].g, &dnri_def_wire_unpack, "wire", &a, sizeof a, 1, &t, 1, &slab));
        rig_keep(&r[side], t);
        rig_plan(&r[side], true, false);
        rig_bind(&r[side]);
        flat = dnri_params_flat(r[side].params);
        assert_true(a.offset + a.count <= flat);
        wire[side] = calloc((size_t)a.count, sizeof(double));
        grad[side] = calloc((size_t)(PARAMS * flat), sizeof(double));
    }
    /* all magnitudes, so that some overflow, vanish, or are subnormal; and a tie */
    uint64_t seed = 3;
    for (int p = 0; p < PARAMS; p++) {
        const int64_t n = dnri_params_at(r[REF].params, p)->count;
        double *v = malloc((size_t)n * sizeof *v);
        for (int64_t i = 0; i < n; i++)
            v[i] = ldexp(rig_normal(&seed), (int)(i % 60) - 40);
        v[0] = 1 + 0x1p-11;
        v[1] = 1 + 0x1p-8;
        rig_round(DNR_F32, v, n);
        for (int side = 0; side < SIDES; side++)
            OK(dnri_store_write(r[side].store, DNRI_GRAD, p, v));
        free(v);
    }
    for (int side = 0; side < SIDES; side++) {
        rig_run(&r[side]);
        for (int i = 0; i < dnri_graph_ops(r[side].g); i++)
            if (dnri_graph_op_c(r[side].g, i)->def == &dnri_def_wire_pack)
                rig_read(&r[side], dnri_graph_op_c(r[side].g, i)->out[0], wire[side]);
        for (int p = 0; p < PARAMS; p++)
            OK(dnri_store_read(r[side].store, DNRI_GRAD, p, grad[side] + p * flat));
    }
    assert_memory_equal(wire[DEVICE], wire[REF], (size_t)a.count * sizeof(double));
    assert_memory_equal(grad[DEVICE], grad[REF], (size_t)(PARAMS * flat) * sizeof(double));
    for (int side = 0; side < SIDES; side++) {
        free(wire[side]);
        free(grad[side]);
        rig_close(&r[side]);
    }
}

static void test_wire(void **state)
{
    if (strcmp(probe_device->be->name, "cpu")) /* whose losses are not scaled */
        wire_equals_ref(DNR_F16);
    wire_equals_ref(DNR_BF16);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ingest),
        cmocka_unit_test(test_update),
        cmocka_unit_test(test_scaler),
        cmocka_unit_test(test_wire),
    };
    const int rc = probe_open(argc, argv);
    return rc ? rc : probe_end(cmocka_run_group_tests(tests, NULL, NULL));
}
