/* trainrig.c: see trainrig.h. */
#include "trainrig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- where to run */

static const char *device = "ref";
static dnr_precision precision = DNR_PRECISION_FP64;

/* A rank of a test has no command line. */
static void from_environment(void)
{
    const char *name = getenv("DNR_TEST_PRECISION");
    if (!getenv("DNR_TEST_DEVICE") || !name)
        return;
    device = getenv("DNR_TEST_DEVICE");
    for (precision = DNR_PRECISION_FP64; strcmp(name, dnr_precision_name(precision));)
        precision++;
}

int tr_main(int argc, char **argv, const struct CMUnitTest *tests, size_t n)
{
    if (argc == 3) {
        device = argv[1];
        precision = DNR_PRECISION_FP64;
        while (precision <= DNR_PRECISION_BF16 && strcmp(argv[2], dnr_precision_name(precision)))
            precision++;
    } else if (argc != 1) {
        precision = DNR_PRECISION_BF16 + 1;
    }
    if (precision > DNR_PRECISION_BF16) {
        print_error("usage: %s [DEVICE fp64|fp32|tf32|fp16|bf16]\n", argv[0]);
        return 2;
    }
    dnr_device *dev;
    dnri_numerics num;
    dnr_precision p = precision;
    dnr_status st = tr_device(NULL, &dev);
    if (st == DNR_OK) {
        st = dev->be->numerics(dev, &p, &num);
        dnr_device_close(dev);
    }
    if (st != DNR_OK) {
        print_message("cannot run here: %s\n", dnr_last_error()->what);
        return RIG_SKIP;
    }
    return _cmocka_run_group_tests(device, tests, n, NULL, NULL);
}

/* Each rank of a test has a GPU of its own. */
dnr_status tr_device(void **state, dnr_device **out)
{
    char name[32];
    from_environment();
    const char *rank = strcmp(device, "cuda") == 0 ? getenv("DNR_LOCAL_RANK") : NULL;
    snprintf(name, sizeof name, "%s%s%s", device, rank ? ":" : "", rank ? rank : "");
    return dnr_device_open(name, out);
}

dnr_trainer_opts tr_options(void **state)
{
    from_environment();
    return (dnr_trainer_opts){.model = {.name = "resnet8", .classes = TR_CLASSES},
                              .optim = {.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-4},
                              .precision = precision,
                              .batch = TR_BATCH,
                              .image = TR_IMAGE,
                              .epoch_samples = 160,
                              .total_samples = 1600,
                              .seed = 1,
                              .deterministic = true};
}

training tr_open_with(void **state, const dnr_trainer_opts *o, const dnri_trainer_extra *extra)
{
    training r;
    OK(tr_device(state, &r.dev));
    OK(dnri_trainer_create(r.dev, o, extra, &r.t));
    if (r.t->num.scaled)
        OK(dnri_store_write_state(r.t->store, &(dnri_state){.loss_scale = TR_SCALE}));
    return r;
}

training tr_open(void **state, const dnr_trainer_opts *o)
{
    return tr_open_with(state, o, &(dnri_trainer_extra){.keep = true});
}

void tr_close(training *r)
{
    dnr_trainer_destroy(r->t);
    dnr_device_close(r->dev);
}

/* ---- what to run on */

/* A gray wave whose direction is the label, under noise; `seed` chooses the picture. */
static void draw(uint8_t *rgb, int label, uint32_t seed)
{
    uint32_t r = seed * 2654435761u + 12345;
    for (int y = 0; y < TR_IMAGE; y++)
        for (int x = 0; x < TR_IMAGE; x++)
            for (int c = 0; c < 3; c++) {
                r = r * 1664525u + 1013904223u;
                double along = (double[]){x, y, x + y, x - y}[label];
                *rgb++ = (uint8_t)(120 + 70 * sin(0.9 * along) + (double)(r >> 26));
            }
}

void *tr_slot(int batch, int first, int count)
{
    char *slot = calloc(1, dnri_slot_bytes(batch, TR_IMAGE, TR_IMAGE));
    assert_non_null(slot);
    int32_t *labels = (int32_t *)(slot + dnri_slot_labels());
    uint8_t *pixels = (uint8_t *)(slot + dnri_slot_pixels(batch));
    for (int i = 0; i < batch; i++) {
        labels[i] = i < count ? (first + i) % TR_CLASSES : -1;
        if (i < count)
            draw(pixels + i * TR_IMAGE * TR_IMAGE * 3, labels[i], (uint32_t)(first + i));
    }
    return slot;
}

dnr_metrics tr_train(training *r, int first, int steps)
{
    dnr_metrics m = {0};
    int batch = (int)r->t->o.batch, n = (int)r->t->o.accumulate;
    void *slots[8] = {0};
    assert_true(n <= 8);
    for (int s = 0; s < steps; s++) {
        for (int i = 0; i < n; i++, first += batch)
            slots[i] = tr_slot(batch, first, batch);
        OK(dnri_trainer_step_on(r->t, slots, &m));
        for (int i = 0; i < n; i++)
            free(slots[i]);
    }
    return m;
}

dnr_eval_result tr_evaluate(training *r, int n)
{
    dnr_eval_result e = {0};
    int batch = (int)r->t->o.eval_batch;
    for (int i = 0; i < n; i += batch) {
        void *slot = tr_slot(batch, i, n - i < batch ? n - i : batch);
        OK(dnri_trainer_eval_on(r->t, slot, i == 0, &e));
        free(slot);
    }
    return e;
}

/* ---- what came of it */

double *tr_slab(training *r, dnri_role role, int64_t *n)
{
    int64_t total = 0;
    double *v = calloc((size_t)dnri_params_flat(r->t->params) + 1, sizeof *v);
    assert_non_null(v);
    for (int i = 0; i < dnri_params_count(r->t->params); i++) {
        const dnri_param *p = dnri_params_at(r->t->params, i);
        if ((p->kind == DNRI_RUNNING) != (role == DNRI_BUFFER))
            continue;
        OK(dnri_store_read(r->t->store, role, i, v + total));
        total += p->count;
    }
    assert_true(total > 100);
    *n = total;
    return v;
}

double tr_distance(training *a, training *b, dnri_role role)
{
    int64_t n, m;
    double *x = tr_slab(a, role, &n), *y = tr_slab(b, role, &m);
    assert_int_equal(n, m);
    for (int64_t i = 0; i < n; i++)
        assert_true(isfinite(x[i]) && isfinite(y[i]));
    double e = rig_error(x, y, n);
    free(x);
    free(y);
    return e;
}

double tr_rounding(const training *r)
{
    switch (r->t->o.precision) {
    case DNR_PRECISION_FP64:
        return 1e-10;
    case DNR_PRECISION_FP32:
        return 1e-4;
    default:
        return 0.05;
    }
}

void tr_says(const char *text)
{
    if (!strstr(dnr_last_error()->what, text))
        fail_msg("'%s' does not say '%s'", dnr_last_error()->what, text);
    assert_true(dnr_last_error()->remedy[0]);
}
