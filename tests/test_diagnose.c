/* test_diagnose.c: what a training says, and leaves, when its gradients are no longer finite.
 *   test_diagnose [DEVICE PRECISION] */
#include "trainrig.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One step that must fail; says so again when asked again. */
static void loses(training *r, int first, const char *step, const char *where)
{
    void *slot = tr_slot(TR_BATCH, first, TR_BATCH);
    dnr_metrics m;
    assert_int_equal(dnri_trainer_step_on(r->t, &slot, &m), DNR_EFAIL);
    tr_says(step);
    tr_says(where);
    assert_int_equal(dnr_trainer_finish(r->t, &m), DNR_EFAIL);
    tr_says(where);
    free(slot);
}

static void set_all(training *r, const char *name, double value)
{
    int i = dnri_params_find(r->t->params, name);
    assert_true(i >= 0);
    const int64_t n = dnri_params_at(r->t->params, i)->count;
    double *v = malloc((size_t)n * sizeof *v);
    for (int64_t k = 0; k < n; k++)
        v[k] = value;
    OK(dnri_store_write(r->t->store, DNRI_MASTER, i, v));
    free(v);
}

/* Below fp32's largest number, or fp64's, by less than a normalised activation. */
static double nearly_infinite(const training *r)
{
    return r->t->num.master == DNR_F64 ? DBL_MAX / 1.1 : FLT_MAX / 1.1;
}

/* In fp16 each of these would come down from 65536 first. */
static training start(void **state, const dnr_trainer_opts *o)
{
    training r = tr_open(state, o);
    if (r.t->num.scaled)
        OK(dnri_store_write_state(r.t->store, &(dnri_state){.loss_scale = 1}));
    return r;
}

static void names_poisoned_weights(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = start(state, &o);
    set_all(&r, "layer2.0.conv1.weight", NAN);
    loses(&r, 0, "step 1:", "layer2.0.conv1.weight");
    tr_says("4608 NaN"); /* 32 · 3 · 3 · 16 */
    assert_non_null(strstr(dnr_last_error()->remedy, "loaded from"));
    tr_close(&r);
}

static void names_the_layer(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = start(state, &o);
    tr_train(&r, 0, 2);
    int64_t n;
    set_all(&r, "layer3.0.bn1.weight", nearly_infinite(&r));
    double *before = tr_slab(&r, DNRI_MOMENTUM, &n);
    loses(&r, 32, "step 3:", "of layer3.0.bn1 gives layer3.0.bn1.y");
    tr_says("samples: sample ");
    assert_non_null(strstr(dnr_last_error()->remedy, "lower optim.lr"));
    double *after = tr_slab(&r, DNRI_MOMENTUM, &n);
    assert_memory_equal(before, after, (size_t)n * sizeof *before); /* the step was left out */
    free(before);
    free(after);
    tr_close(&r);
}

static void names_the_pixels(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    for (int c = 0; c < 3; c++) {
        o.mean[c] = 0.5;
        o.std[c] = o.precision == DNR_PRECISION_FP64 ? 1e-310 : 1e-39;
    }
    training r = start(state, &o);
    loses(&r, 0, "step 1:", "of input gives input.");
    assert_non_null(strstr(dnr_last_error()->remedy, "data.std"));
    tr_close(&r);
}

/* A loss scale comes down first; at 1 there is nothing left to try. */
static void loss_scale_has_a_floor(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = tr_open_with(state, &o, &(dnri_trainer_extra){.scaled = true});
    OK(dnri_store_write_state(r.t->store, &(dnri_state){.loss_scale = 4}));
    set_all(&r, "fc.bias", NAN);
    dnr_metrics m = tr_train(&r, 0, 2);
    assert_true(m.skipped == 2 && m.loss_scale == 1);
    loses(&r, 32, "step 3:", "fc.bias");
    tr_close(&r);
}

/* The steps after a lost one change no weight either, though their own gradients would be finite. */
static void later_steps_change_nothing(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = start(state, &o);
    void *slot = tr_slot(TR_BATCH, 0, TR_BATCH);
    dnr_metrics m;
    dnri_state s;
    int fc = dnri_params_find(r.t->params, "fc.bias");
    double good[TR_CLASSES], bad[TR_CLASSES] = {NAN, 0, 0, 0};
    OK(dnri_store_read(r.t->store, DNRI_MASTER, fc, good));
    OK(dnri_store_write(r.t->store, DNRI_MASTER, fc, bad));
    assert_int_equal(dnri_trainer_step_on(r.t, &slot, &m), DNR_EFAIL);
    OK(dnri_store_write(r.t->store, DNRI_MASTER, fc, good));
    int64_t n;
    double *before = tr_slab(&r, DNRI_MASTER, &n);
    assert_int_equal(dnri_trainer_step_on(r.t, &slot, &m), DNR_EFAIL);
    double *after = tr_slab(&r, DNRI_MASTER, &n);
    assert_memory_equal(before, after, (size_t)n * sizeof *before);
    OK(dnri_store_read_state(r.t->store, &s));
    assert_true(s.found_inf == 1 && s.steps == 2);
    free(before);
    free(after);
    free(slot);
    tr_close(&r);
}

/* Through a loader every micro-batch can be read again, and samples have names. */
static void reads_batches_again(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.accumulate = 3;
    o.model.classes = 10;
    o.epoch_samples = 1438;
    training r = start(state, &o);
    dnr_source *src;
    dnr_loader *l;
    OK(dnr_source_open(DNRI_SOURCE_DIR "/data/digits.tar:train", NULL, &src));
    OK(dnr_loader_open(
        src, NULL,
        &(dnr_loader_opts){
            .batch = TR_BATCH, .image = TR_IMAGE, .train = true, .shuffle = true, .threads = 2},
        &l));
    dnr_metrics m;
    OK(dnr_trainer_step(r.t, l, &m));
    OK(dnr_trainer_finish(r.t, &m));
    set_all(&r, "layer1.0.bn2.bias", nearly_infinite(&r));
    set_all(&r, "layer1.0.bn2.weight", nearly_infinite(&r));
    OK(dnr_trainer_step(r.t, l, &m)); /* enqueued; described by the next */
    assert_int_equal(dnr_trainer_step(r.t, l, &m), DNR_EFAIL);
    tr_says("step 2:");
    tr_says("of layer1.0.bn2 gives layer1.0.bn2.y");
    tr_says(".png");
    tr_close(&r);
    dnr_loader_close(l);
    dnr_source_close(src);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_poisoned_weights),     cmocka_unit_test(names_the_layer),
        cmocka_unit_test(names_the_pixels),           cmocka_unit_test(loss_scale_has_a_floor),
        cmocka_unit_test(later_steps_change_nothing), cmocka_unit_test(reads_batches_again),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
