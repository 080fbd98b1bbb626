/* test_trainer.c: training and evaluation with small nets on drawn pictures (trainrig.h).
 *
 *     test_trainer                      on ref
 *     test_trainer DEVICE PRECISION     exit code 77: the machine has no such device or precision */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../runtime/engine_ops.h"
#include "../runtime/plan_internal.h"
#include "trainrig.h"
#include <jansson.h>

/* ---- training */

static void loss_falls(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.optim.schedule = DNR_SCHEDULE_COSINE;
    o.optim.warmup_epochs = 0.5;
    training r = tr_open(state, &o);
    double before = 0;
    dnr_metrics m;
    for (int s = 0; s < 25; s++) {
        m = tr_train(&r, s * TR_BATCH, 1);
        assert_int_equal(m.step, s + 1);
        assert_int_equal(m.samples, (s + 1) * TR_BATCH);
        assert_true(m.lr == dnr_learning_rate(&o.optim, s * TR_BATCH, 1600, 160, TR_BATCH));
        assert_true(m.loss_scale == (r.t->num.scaled ? TR_SCALE : 1) && m.skipped == 0);
        assert_true(m.grad_norm == 0 && m.top5 == 1);
        before += s < 3 ? m.loss / 3 : 0;
    }
    assert_true(before > 0.9 && before < 4); /* ln 4 = 1.39 */
    assert_true(m.loss < 0.4 * before && m.top1 > 0.8);
    dnr_eval_result e = tr_evaluate(&r, 64);
    assert_true(e.images == 64 && e.correct1 >= 56 && e.correct5 == 64);
    tr_close(&r);
}

static void same_seed_same_bits(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o), b = tr_open(state, &o);
    o.seed = 2;
    training c = tr_open(state, &o);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);
    assert_true(tr_distance(&a, &c, DNRI_MASTER) > 0.1);
    tr_train(&a, 0, 4);
    tr_train(&b, 0, 4);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);
    assert_true(tr_distance(&a, &b, DNRI_MOMENTUM) == 0);
    assert_true(tr_distance(&a, &b, DNRI_BUFFER) == 0);
    assert_int_equal(dnr_trainer_plan_hash(a.t), dnr_trainer_plan_hash(b.t));
    tr_close(&a);
    tr_close(&b);
    tr_close(&c);
}

/* Four micro-batches with the same pictures have the batch-norm statistics of one batch that holds each
 * picture four times: the steps must be equal. */
static void accumulation_equals_a_large_batch(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.label_smoothing = 0.1;
    training large = tr_open(state, &o);
    o.batch = TR_BATCH / 4;
    o.accumulate = 4;
    training small = tr_open(state, &o);
    for (int s = 0; s < 3; s++) {
        void *one = tr_slot(TR_BATCH, 0, TR_BATCH),
             *quarter = tr_slot(TR_BATCH / 4, 8 * s, TR_BATCH / 4);
        char *to = one, *from = quarter;
        for (size_t i = 0; i < 4; i++) {
            size_t labels = TR_BATCH, pixels = TR_BATCH / 4 * TR_IMAGE * TR_IMAGE * 3;
            memcpy(to + dnri_slot_labels() + i * labels, from + dnri_slot_labels(), labels);
            memcpy(to + dnri_slot_pixels(TR_BATCH) + i * pixels,
                   from + dnri_slot_pixels(TR_BATCH / 4), pixels);
        }
        dnr_metrics l, m;
        OK(dnri_trainer_step_on(large.t, &one, &l));
        OK(dnri_trainer_step_on(small.t, (void *[]){quarter, quarter, quarter, quarter}, &m));
        assert_true(fabs(l.loss - m.loss) <= tr_rounding(&large) * l.loss);
        assert_true(l.top1 == m.top1 && l.samples == m.samples && l.step == m.step);
        free(one);
        free(quarter);
    }
    assert_true(tr_distance(&small, &large, DNRI_MASTER) < tr_rounding(&large));
    assert_true(tr_distance(&small, &large, DNRI_MOMENTUM) < 20 * tr_rounding(&large));
    tr_close(&large);
    tr_close(&small);
}

/* The sum over two different micro-batches is the sum of their gradients, and starts anew each step. */
static void gradients_add_up(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.batch = 4;
    o.optim.lr = 0;
    training a = tr_open(state, &o), b = tr_open(state, &o);
    o.accumulate = 2;
    training both = tr_open(state, &o);
    tr_train(&a, 0, 1);
    tr_train(&b, 4, 1);
    tr_train(&both, 50, 1);
    tr_train(&both, 0, 1);
    int64_t n;
    double *ga = tr_slab(&a, DNRI_GRAD, &n), *gb = tr_slab(&b, DNRI_GRAD, &n),
           *sum = tr_slab(&both, DNRI_GSUM, &n);
    double d = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double want =
            (ga[i] + gb[i]) / 2; /* their means are over 4 samples, the step's is over 8 */
        d += (sum[i] - want) * (sum[i] - want);
        norm += want * want;
    }
    assert_true(norm > 0 && sqrt(d / norm) < tr_rounding(&a));
    free(ga);
    free(gb);
    free(sum);
    tr_close(&a);
    tr_close(&b);
    tr_close(&both);
}

static void recomputation_changes_nothing(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.model.name = "resnet20"; /* blocks enough that each mode saves something */
    training plain = tr_open(state, &o);
    tr_train(&plain, 0, 3);
    for (int mode = DNR_RECOMPUTE_STAGE; mode <= DNR_RECOMPUTE_BLOCK; mode++) {
        o.recompute = (dnr_recompute)mode;
        training r = tr_open(state, &o);
        tr_train(&r, 0, 3);
        assert_true(tr_distance(&r, &plain, DNRI_MASTER) == 0);
        assert_true(tr_distance(&r, &plain, DNRI_BUFFER) == 0);
        assert_true(dnri_plan_activations(r.t->program[DNRI_LAST].plan) <
                    dnri_plan_activations(plain.t->program[DNRI_LAST].plan));
        tr_close(&r);
    }
    tr_close(&plain);
}

static void clips(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.optim.momentum = 0;
    o.optim.weight_decay = 0;
    o.optim.clip_norm = 0.01;
    training r = tr_open(state, &o);
    int64_t n;
    double *before = tr_slab(&r, DNRI_MASTER, &n);
    dnr_metrics m = tr_train(&r, 0, 1);
    double *grad = tr_slab(&r, DNRI_GRAD, &n), *after = tr_slab(&r, DNRI_MASTER, &n);
    double norm = 0, moved = 0;
    for (int64_t i = 0; i < n; i++) {
        double g = grad[i] / m.loss_scale, d = after[i] - before[i];
        norm += g * g;
        moved += d * d;
    }
    assert_true(m.grad_norm > 0.02 && fabs(sqrt(norm) / m.grad_norm - 1) < 1e-5);
    assert_true(fabs(sqrt(moved) / (0.01 * o.optim.lr) - 1) < 1e-3);
    free(before);
    free(grad);
    free(after);
    tr_close(&r);
}

/* GradScaler's states, in any precision: overflow skips the step and halves, 2000 good steps double. */
static void overflow_is_skipped(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    dnri_trainer_extra scaled = {.scaled = true};
    training a = tr_open_with(state, &o, &scaled), b = tr_open_with(state, &o, &scaled);
    int fc = dnri_params_find(a.t->params, "fc.bias");
    double bias[TR_CLASSES], nan[TR_CLASSES] = {NAN, 0, 0, 0};
    dnri_state s;
    tr_train(&a, 0, 2);
    tr_train(&b, 0, 2);
    OK(dnri_store_read(a.t->store, DNRI_MASTER, fc, bias));
    OK(dnri_store_write(a.t->store, DNRI_MASTER, fc, nan));
    dnr_metrics m = tr_train(&a, 64, 1);
    OK(dnri_store_write(a.t->store, DNRI_MASTER, fc, bias));
    assert_true(m.step == 3 && m.skipped == 1 && m.samples == 3 * TR_BATCH);
    assert_true(m.loss_scale == TR_SCALE / 2);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);
    assert_true(tr_distance(&a, &b, DNRI_MOMENTUM) == 0);
    OK(dnri_store_read_state(a.t->store, &s));
    assert_int_equal(s.growth, 0);
    s.growth = DNRI_SCALE_INTERVAL - 1;
    OK(dnri_store_write_state(a.t->store, &s));
    m = tr_train(&a, 32, 1);
    assert_true(m.skipped == 1 && m.loss_scale == TR_SCALE);
    OK(dnri_store_read_state(a.t->store, &s));
    assert_true(s.growth == 0 && s.found_inf == 0);
    tr_train(&b, 32, 1); /* the same step at twice the scale */
    assert_true(tr_distance(&a, &b, DNRI_MASTER) < tr_rounding(&a) / 10);
    tr_close(&a);
    tr_close(&b);
}

static void a_step_allocates_nothing(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.accumulate = 2;
    training r = tr_open(state, &o);
    int64_t allocs, syncs, allocs2, syncs2;
    r.dev->be->counters(r.dev, &allocs, &syncs);
    tr_train(&r, 0, 3);
    tr_evaluate(&r, 20);
    tr_train(&r, 0, 1);
    r.dev->be->counters(r.dev, &allocs2, &syncs2);
    assert_int_equal(allocs2 - allocs, 0);
    assert_int_equal(syncs2 - syncs, 0);
    assert_true(allocs > 0);
    tr_close(&r);
}

/* ---- evaluation */

/* What the logits of the batch just evaluated say. */
static void tally(training *r, int first, int count, dnr_eval_result *sum)
{
    double logits[32 * TR_CLASSES];
    const dnri_program *p = &r->t->program[DNRI_EVAL];
    assert_true(r->t->o.eval_batch <= 32);
    OK(dnri_plan_read(p->plan, p->logits, logits));
    for (int i = 0; i < count; i++) {
        const double *z = logits + i * TR_CLASSES;
        int label = (first + i) % TR_CLASSES, above = 0;
        double total = 0;
        for (int k = 0; k < TR_CLASSES; k++) {
            total += exp(z[k] - z[label]);
            above += z[k] > z[label] || (z[k] == z[label] && k < label);
        }
        sum->images++;
        sum->correct1 += above == 0;
        sum->correct5++;
        sum->loss += log(total);
    }
}

static void evaluation_is_exact(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.label_smoothing = 0.1; /* the reported loss is without */
    o.eval_batch = 8;
    training r = tr_open(state, &o);
    tr_train(&r, 0, 6);
    dnr_eval_result want = {0}, got = {0}, again;
    for (int i = 0; i < 19; i += 8) {
        int count = 19 - i < 8 ? 19 - i : 8;
        void *slot = tr_slot(8, i, count);
        OK(dnri_trainer_eval_on(r.t, slot, i == 0, &got));
        tally(&r, i, count, &want);
        free(slot);
    }
    assert_int_equal(got.images, 19);
    assert_int_equal(got.correct1, want.correct1);
    assert_int_equal(got.correct5, 19);
    assert_true(fabs(got.loss / (want.loss / 19) - 1) < 1e-5);
    again = tr_evaluate(&r, 19);
    assert_memory_equal(&again, &got, sizeof got);

    o.eval_batch = 19;
    training whole = tr_open(state, &o);
    tr_train(&whole, 0, 6);
    again = tr_evaluate(&whole, 19);
    if (tr_rounding(&r) < 0.01)
        assert_int_equal(again.correct1, got.correct1);
    assert_true(fabs(again.loss / got.loss - 1) < tr_rounding(&r));
    tr_close(&whole);
    tr_close(&r);
}

static void evaluation_does_not_disturb_training(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o), b = tr_open(state, &o);
    tr_train(&a, 0, 3);
    tr_train(&b, 0, 2);
    tr_evaluate(&b, 20);
    dnr_metrics m = tr_train(&b, 32, 1);
    assert_true(m.step == 3 && m.samples == 48);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);
    assert_true(tr_distance(&a, &b, DNRI_BUFFER) == 0);
    tr_close(&a);
    tr_close(&b);
}

/* A slot's pictures in a batch of the public interface. */
static dnr_batch own_batch(training *r, int batch, int first, int count)
{
    dnr_batch b;
    void *slot = tr_slot(batch, first, count);
    OK(dnr_batch_new(r->dev, batch, TR_IMAGE, &b));
    assert_true(b.bytes == dnri_slot_bytes(batch, TR_IMAGE, TR_IMAGE) && b.labels[0] == -1);
    memcpy(b.slot, slot, b.bytes);
    free(slot);
    return b;
}

/* Both say the same of pictures 0 … 31, to the rounding of folded weights. */
static dnr_eval_result same_evaluation(training *a, training *b)
{
    dnr_eval_result x = tr_evaluate(a, 32), y = tr_evaluate(b, 32);
    assert_true(fabs(x.loss / y.loss - 1) < tr_rounding(a));
    assert_true(x.images == y.images);
    if (tr_rounding(a) < 0.01)
        assert_true(x.correct1 == y.correct1 && x.correct5 == y.correct5);
    return x;
}

/* Norms are folded into convolutions for an evaluation, anew each time that weights or statistics have changed, or the
 * arena was used by something else, and not otherwise. */
static void evaluation_folds_the_weights_of_now(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.ema = 0.5;
    training a = tr_open(state, &o);
    o.fusion = DNR_FUSION_OFF;
    training b = tr_open(state, &o);
    training *const both[] = {&a, &b};
    int folds = 0;
    const dnr_graph *g = dnri_plan_graph(a.t->program[DNRI_EVAL].plan);
    for (int i = 0; i < dnri_graph_ops(g); i++)
        folds += dnri_graph_op_c(g, i)->phase == DNRI_PREPARE;
    assert_int_equal(folds, 7); /* ResNet-8's convolutions */
    dnr_eval_result e[7];
    e[0] = same_evaluation(&a, &b); /* initial weights */
    tr_train(&a, 0, 4);
    tr_train(&b, 0, 4);
    e[1] = same_evaluation(&a, &b); /* trained */
    assert_true(a.t->prepared != 0);
    const uint64_t prepared = a.t->prepared;
    same_evaluation(&a, &b);
    assert_true(a.t->prepared == prepared);
    for (int i = 0; i < 2; i++)
        OK(dnri_store_swap_ema(both[i]->t->store));
    e[2] = same_evaluation(&a, &b); /* averages */
    for (int i = 0; i < 2; i++)
        OK(dnri_store_swap_ema(both[i]->t->store));
    e[3] = same_evaluation(&a, &b);
    assert_memory_equal(&e[3], &e[1], sizeof e[1]); /* as before, bit for bit */
    dnr_batch pictures = own_batch(&a, TR_BATCH, 0, TR_BATCH);
    float logits[2][TR_BATCH * TR_CLASSES];
    tr_train(&a, 64, 1);
    tr_train(&b, 64, 1);
    for (int i = 0; i < 2; i++) /* right after a step, without an evaluation in between */
        OK(dnr_trainer_predict(both[i]->t, &pictures, logits[i]));
    double d = 0, norm = 0;
    for (int i = 0; i < TR_BATCH * TR_CLASSES; i++) {
        d += pow((double)(logits[0][i] - logits[1][i]), 2);
        norm += pow((double)logits[1][i], 2);
    }
    assert_true(sqrt(d / norm) < fmax(tr_rounding(&a), 1e-6)); /* logits are fp32 */
    e[4] = same_evaluation(&a, &b);
    for (int i = 0; i < 2; i++)
        OK(dnri_store_init(both[i]->t->store, 1));
    e[5] = same_evaluation(&a, &b); /* loaded */
    for (int i = 0; i < 5; i++)
        assert_true(i == 2 || fabs(e[i].loss / e[i + 1].loss - 1) > 1e-3 || i + 1 == 3);
    assert_true(fabs(e[5].loss / e[0].loss - 1) < tr_rounding(&a));
    dnr_batch_free(a.dev, &pictures);
    tr_close(&a);
    tr_close(&b);
}

static void batches_of_the_caller(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.accumulate = 2;
    training a = tr_open(state, &o), b = tr_open(state, &o);
    dnr_batch batches[2];
    dnr_metrics m, n;
    for (int s = 0; s < 3; s++) {
        for (int i = 0; i < 2; i++)
            batches[i] = own_batch(&a, TR_BATCH, (2 * s + i) * TR_BATCH, TR_BATCH);
        OK(dnr_trainer_step_on(a.t, batches, 2, &m));
        assert_int_equal(m.step, s);        /* the step before */
        dnr_batch_free(a.dev, &batches[0]); /* the caller's again, though the step may still run */
        dnr_batch_free(a.dev, &batches[1]);
        n = tr_train(&b, 2 * s * TR_BATCH, 1);
    }
    OK(dnr_trainer_finish(a.t, &m));
    assert_true(m.step == 3 && m.loss == n.loss && m.samples == n.samples);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);

    dnr_batch one = own_batch(&a, TR_BATCH, 0, TR_BATCH), small = own_batch(&a, 4, 0, 4),
              none = {0};
    assert_int_equal(dnr_trainer_step_on(a.t, &one, 1, &m), DNR_EUSAGE);
    tr_says("1 batches for a step of 2");
    batches[0] = one;
    batches[1] = small;
    assert_int_equal(dnr_trainer_step_on(a.t, batches, 2, &m), DNR_EUSAGE);
    tr_says("16 pictures of 8 x 8");
    assert_int_equal(dnr_trainer_predict(a.t, &none, NULL), DNR_EUSAGE);
    tr_says("a batch of 0 bytes");
    assert_int_equal(dnr_batch_new(a.dev, 0, TR_IMAGE, &none), DNR_EUSAGE);
    dnr_batch_free(a.dev, &one);
    dnr_batch_free(a.dev, &small);
    dnr_batch_free(a.dev, &none); /* nothing */
    tr_close(&a);
    tr_close(&b);
}

/* The logits are those that evaluation counts with, whatever the labels, and in the order of the calls. */
static void predictions_are_what_evaluation_counts(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = tr_open(state, &o);
    tr_train(&r, 0, 10);
    enum { BATCHES = 4 };
    float logits[TR_BATCH * TR_CLASSES], again[TR_BATCH * TR_CLASSES];
    int right = 0;
    double loss = 0;
    dnr_batch b = {0};
    for (int k = 0; k < BATCHES; k++) {
        dnr_batch_free(r.dev, &b);
        b = own_batch(&r, TR_BATCH, k * TR_BATCH, TR_BATCH);
        OK(dnr_trainer_predict(r.t, &b, logits));
        for (int i = 0; i < TR_BATCH; i++) {
            const float *x = logits + i * TR_CLASSES;
            int best = 0;
            double sum = 0;
            for (int c = 0; c < TR_CLASSES; c++) {
                best = x[c] > x[best] ? c : best;
                sum += exp(x[c]);
            }
            right += best == b.labels[i];
            loss += (log(sum) - x[b.labels[i]]) / (BATCHES * TR_BATCH);
        }
    }
    dnr_eval_result e = tr_evaluate(&r, BATCHES * TR_BATCH);
    assert_int_equal(e.correct1, right);
    assert_true(fabs(e.loss - loss) <=
                fmax(2 * tr_rounding(&r), 1e-6) * loss); /* logits are fp32 */
    dnr_batch other = own_batch(&r, TR_BATCH, 999, TR_BATCH);
    OK(dnr_trainer_predict(r.t, &other, NULL)); /* enqueues; the next call waits for it too */
    for (int i = 0; i < TR_BATCH; i++)
        b.labels[i] = -1;
    OK(dnr_trainer_predict(r.t, &b, again));
    assert_memory_equal(again, logits, sizeof logits);
    dnr_batch_free(r.dev, &other);
    dnr_batch_free(r.dev, &b);
    tr_close(&r);
}

static void an_evaluation_without_pictures_fails(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = tr_open(state, &o);
    dnr_eval_result e;
    void *slot = tr_slot(TR_BATCH, 0, 0);
    assert_int_equal(dnri_trainer_eval_on(r.t, slot, true, &e), DNR_EDATA);
    free(slot);
    tr_close(&r);
}

/* ---- creation */

static void bad_options_are_refused(void **state)
{
    dnr_device *dev;
    OK(tr_device(state, &dev));
#define CASE(change, text)                                                                         \
    do {                                                                                           \
        dnr_trainer_opts o = tr_options(state);                                                    \
        dnr_trainer *t = (void *)1;                                                                \
        change;                                                                                    \
        assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);                             \
        assert_null(t);                                                                            \
        tr_says(text);                                                                             \
    } while (0)
    CASE(o.model.name = NULL, "no model");
    CASE(o.model.name = "resnet51", "resnet51");
    CASE(o.model.stem = "mnist", "mnist");
    CASE(o.model.classes = 0, "classes");
    CASE(o.batch = -1, "batch");
    CASE(o.batch = 0, "evaluation's 0");
    CASE(o.accumulate = -2, "accumulate");
    CASE(o.image = 0, "image");
    CASE(o.image = 1 << 20, "image");
    CASE(o.std[1] = 1, "std");
    CASE(o.mean[0] = NAN; o.std[0] = o.std[1] = o.std[2] = 1, "mean");
    CASE(o.label_smoothing = 1, "smoothing");
    CASE(o.memory_fraction = 1.5, "fraction");
    CASE(o.epoch_samples = 0, "epoch");
    CASE(o.optim.lr = NAN, "lr");
    CASE(o.optim.momentum = 1, "momentum");
    CASE(o.optim.momentum = 0; o.optim.nesterov = true, "Nesterov");
    CASE(o.optim.weight_decay = -1, "decay");
    CASE(o.optim.clip_norm = -1, "clip");
    CASE(o.optim.lr_min = 1, "lr_min");
    CASE(o.optim.schedule = DNR_SCHEDULE_STEP, "step_epochs");
    CASE(o.optim.schedule = DNR_SCHEDULE_MULTISTEP, "milestones");
    CASE(o.optim.schedule = DNR_SCHEDULE_POLY, "power");
    CASE(o.optim.schedule = DNR_SCHEDULE_ONECYCLE; o.optim.warmup_epochs = 1, "one-cycle");
    CASE(o.optim.schedule = (dnr_schedule)99, "99");
#undef CASE
    dnr_device_close(dev);
}

/* Too large a batch is refused before memory is taken, and the batch named is the largest that fits. */
static void too_large_a_batch_is_refused(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.batch = 20;
    training r = tr_open(state, &o);
    /* cuda tries engines while it plans, and their workspaces do not grow evenly with the batch */
    bool trials = strncmp(dnr_device_name(r.dev), "cuda", 4) == 0;
    size_t arena, store, free_bytes, total;
    dnr_trainer_memory(r.t, &arena, &store);
    OK(r.dev->be->memory(r.dev, &free_bytes, &total));
    o.memory_fraction =
        ((double)(arena + store + 2 * dnri_slot_bytes(20, TR_IMAGE, TR_IMAGE)) + 1024) /
        (double)total;
    tr_close(&r);

    dnr_device *dev;
    dnr_trainer *t;
    int64_t before, after, syncs;
    OK(tr_device(state, &dev));
    dev->be->counters(dev, &before, &syncs);
    o.batch = 300;
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EMEM);
    dev->be->counters(dev, &after, &syncs);
    assert_true(before == after || trials);
    const char *fits = strstr(dnr_last_error()->what, "fits is ");
    assert_non_null(fits);
    int64_t batch = atoi(fits + 8);
    char remedy[64];
    snprintf(remedy, sizeof remedy, "train.batch to %lld ", (long long)batch);
    assert_non_null(strstr(dnr_last_error()->remedy, remedy));
    assert_true(batch >= (trials ? 1 : 20) && batch < 300);
    o.batch = batch + 1;
    if (!trials)
        assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EMEM);
    o.batch = batch;
    OK(dnr_trainer_create(dev, &o, &t));
    dnr_trainer_destroy(t);

    o.memory_fraction = 1e-9;
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EMEM);
    tr_says("fits is 0");
    assert_non_null(strstr(dnr_last_error()->remedy, "no batch fits"));
    dnr_device_close(dev);
}

/* A step that tests have put themselves before. */
typedef struct watched {
    dnri_step was;
    dnri_store *store;
    int calls, lost;
} watched;

static dnr_status run_and_spoil(void *ctx)
{
    watched *w = ctx;
    DNR_TRY(w->was.run(w->was.ctx));
    if (w->calls++ > 0) /* as the launch of an algebraic layer by itself may */
        memset(dnri_store_ptr(w->store, DNRI_GRAD, -1), 0xff,
               dnri_store_bytes(w->store, DNRI_GRAD));
    return DNR_OK;
}

static dnr_status look_and_run(void *ctx)
{
    watched *w = ctx;
    dnri_state s;
    DNR_TRY(dnri_store_read_state(w->store, &s));
    w->lost += s.found_inf != 0;
    w->calls++;
    return w->was.run(w->was.ctx);
}

/* The optimizer does nothing with gradients that are no numbers: that would not be its time. */
static void the_optimizer_is_measured_at_work(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = tr_open(state, &o);
    dnri_plan *p = r.t->program[DNRI_LAST].plan;
    int sgd = 0, backward = 0;
    if (r.dev->be->capture_begin) { /* which records what is enqueued, not these */
        print_message("skipped: launches are captured\n");
        tr_close(&r);
        skip();
    }
    while (dnri_graph_op_c(p->g, sgd)->def != &dnri_def_sgd)
        sgd++;
    for (int i = 0; dnri_graph_op_c(p->g, i)->phase != DNRI_UPDATE; i++)
        backward = p->steps[i].run ? i : backward;
    watched spoilt = {p->steps[backward], r.t->store, 0, 0};
    watched seen = {p->steps[sgd], r.t->store, 0, 0};
    p->steps[backward].run = run_and_spoil;
    p->steps[backward].ctx = &spoilt;
    p->steps[sgd].run = look_and_run;
    p->steps[sgd].ctx = &seen;
    OK(dnr_trainer_measure(r.t));
    p->steps[backward] = spoilt.was;
    p->steps[sgd] = seen.was;
    assert_true(spoilt.calls > 1 && seen.calls > 1);
    assert_int_equal(seen.lost, 0);
    tr_close(&r);
}

static void explains_itself(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.accumulate = 2;
    training r = tr_open(state, &o);
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    OK(dnr_trainer_explain(r.t, DNR_EXPLAIN_TEXT, f));
    fclose(f);
    assert_non_null(strstr(text, "program micro"));
    assert_non_null(strstr(text, "program last"));
    assert_non_null(strstr(text, "program eval"));
    assert_non_null(strstr(text, "layer3.0.conv2"));
    free(text);
    f = open_memstream(&text, &size);
    OK(dnr_trainer_explain(r.t, DNR_EXPLAIN_JSON, f));
    fclose(f);
    json_t *root = json_loads(text, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(root, "programs")), 3);
    size_t arena, store;
    dnr_trainer_memory(r.t, &arena, &store);
    json_t *memory = json_object_get(root, "memory");
    assert_int_equal(json_integer_value(json_object_get(memory, "arena")), arena);
    assert_int_equal(json_integer_value(json_object_get(memory, "store")), store);
    json_decref(root);
    free(text);
    FILE *full = fopen("/dev/full", "w");
    setvbuf(full, NULL, _IONBF, 0);
    assert_int_equal(dnr_trainer_explain(r.t, DNR_EXPLAIN_TEXT, full), DNR_EDISK);
    assert_int_equal(dnr_trainer_explain(r.t, DNR_EXPLAIN_JSON, full), DNR_EDISK);
    fclose(full);

    uint64_t hash = dnr_trainer_plan_hash(r.t);
    o.batch = 8;
    training s = tr_open(state, &o);
    assert_true(dnr_trainer_plan_hash(s.t) != hash);
    tr_close(&s);
    tr_close(&r);
}

/* ---- with a loader */

static void metrics_come_one_step_late(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.accumulate = 2;
    training r = tr_open(state, &o);
    dnr_source *src;
    dnr_loader *l, *val, *odd;
    dnr_loader_opts lo = {
        .batch = TR_BATCH, .image = TR_IMAGE, .train = true, .shuffle = true, .threads = 1};
    OK(dnr_source_open(
        "synthetic",
        &(dnr_source_opts){.classes = TR_CLASSES, .synthetic_n = 37, .synthetic_image = TR_IMAGE},
        &src));
    OK(dnr_loader_open(src, r.dev, &lo, &l));
    dnr_metrics m;
    OK(dnr_trainer_finish(r.t, &m));
    assert_int_equal(m.step, 0);
    for (int s = 0; s < 5; s++) {
        OK(dnr_trainer_step(r.t, l, &m));
        assert_true(m.step == s && m.samples == s * 2 * TR_BATCH);
        assert_true(s == 0 || (isfinite(m.loss) && m.loss > 0 && m.top5 == 1));
    }
    OK(dnr_trainer_finish(r.t, &m));
    assert_true(m.step == 5 && m.samples == 5 * 2 * TR_BATCH);

    lo = (dnr_loader_opts){.batch = TR_BATCH, .image = TR_IMAGE, .threads = 1};
    OK(dnr_loader_open(src, r.dev, &lo, &val));
    dnr_eval_result first, second;
    OK(dnr_trainer_eval(r.t, val, &first));
    assert_true(first.images == 37 && first.correct5 == 37); /* 16 + 16 + 5 */
    OK(dnr_trainer_eval(r.t, val, &second));
    assert_memory_equal(&first, &second, sizeof first);

    /* it ends when asked to, and is whole another time */
    dnr_trainer_ask_stop(r.t);
    assert_int_equal(dnr_trainer_eval(r.t, val, &second), DNR_STOPPED);
    r.t->ask_stop = false;
    OK(dnr_trainer_eval(r.t, val, &second));
    assert_memory_equal(&first, &second, sizeof first);

    /* loaders that do not fit */
    assert_int_equal(dnr_trainer_step(r.t, val, &m), DNR_EUSAGE);
    assert_int_equal(dnr_trainer_eval(r.t, l, &first), DNR_EUSAGE);
    lo.batch = 4;
    OK(dnr_loader_open(src, r.dev, &lo, &odd));
    assert_int_equal(dnr_trainer_eval(r.t, odd, &first), DNR_EUSAGE);
    tr_says("4 pictures");
    dnr_loader_close(odd);
    OK(dnr_trainer_step(r.t, l, &m)); /* still works */
    assert_int_equal(m.step, 5);
    dnr_loader_close(val);
    dnr_loader_close(l);
    dnr_source_close(src);
    tr_close(&r);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loss_falls),
        cmocka_unit_test(same_seed_same_bits),
        cmocka_unit_test(accumulation_equals_a_large_batch),
        cmocka_unit_test(gradients_add_up),
        cmocka_unit_test(recomputation_changes_nothing),
        cmocka_unit_test(clips),
        cmocka_unit_test(overflow_is_skipped),
        cmocka_unit_test(a_step_allocates_nothing),
        cmocka_unit_test(evaluation_is_exact),
        cmocka_unit_test(evaluation_folds_the_weights_of_now),
        cmocka_unit_test(evaluation_does_not_disturb_training),
        cmocka_unit_test(batches_of_the_caller),
        cmocka_unit_test(predictions_are_what_evaluation_counts),
        cmocka_unit_test(an_evaluation_without_pictures_fails),
        cmocka_unit_test(bad_options_are_refused),
        cmocka_unit_test(too_large_a_batch_is_refused),
        cmocka_unit_test(the_optimizer_is_measured_at_work),
        cmocka_unit_test(explains_itself),
        cmocka_unit_test(metrics_come_one_step_late),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
