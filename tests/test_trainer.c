/* test_trainer.c: training and evaluation with small nets on drawn pictures.
 *
 *     test_trainer            on ref, and on cpu where it is built
 *     test_trainer DEVICE     on that device */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "../runtime/safetensors.h"
#include "../runtime/slot.h"
#include "../runtime/trainer.h"

enum { CLASSES = 4, IMAGE = 8, BATCH = 16, SCALE = 1024 };

/* ---- drawn pictures */

/* A gray wave whose direction is the label, under noise; `seed` chooses the picture. */
static void draw(uint8_t *rgb, int label, uint32_t seed)
{
    uint32_t r = seed * 2654435761u + 12345;
    for (int y = 0; y < IMAGE; y++)
        for (int x = 0; x < IMAGE; x++)
            for (int c = 0; c < 3; c++) {
                r = r * 1664525u + 1013904223u;
                double along = (double[]){x, y, x + y, x - y}[label];
                *rgb++ = (uint8_t)(128 + 70 * sin(0.9 * along) + (double)(r >> 26));
            }
}

/* A slot of `batch` pictures first, first + 1, …; those from `count` on are absent. */
static void *slot_of(int batch, int first, int count)
{
    char *slot = calloc(1, dnri_slot_bytes(batch, IMAGE, IMAGE));
    assert_non_null(slot);
    int32_t *labels = (int32_t *)(slot + dnri_slot_labels());
    uint8_t *pixels = (uint8_t *)(slot + dnri_slot_pixels(batch));
    for (int i = 0; i < batch; i++) {
        labels[i] = i < count ? (first + i) % CLASSES : -1;
        if (i < count)
            draw(pixels + i * IMAGE * IMAGE * 3, labels[i], (uint32_t)(first + i));
    }
    return slot;
}

/* ---- set-up */

static void ok(dnr_status s)
{
    if (s != DNR_OK)
        fail_msg("%s: %s (%s)", dnr_last_error()->where, dnr_last_error()->what,
                 dnr_last_error()->remedy);
}

static void says(const char *text)
{
    if (!strstr(dnr_last_error()->what, text))
        fail_msg("'%s' does not say '%s'", dnr_last_error()->what, text);
    assert_true(dnr_last_error()->remedy[0]);
}

static dnr_trainer_opts options(void)
{
    return (dnr_trainer_opts){.model = {.name = "resnet8", .classes = CLASSES},
                              .optim = {.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-4},
                              .batch = BATCH,
                              .image = IMAGE,
                              .epoch_samples = 160,
                              .total_samples = 1600,
                              .seed = 1,
                              .deterministic = true};
}

typedef struct {
    dnr_device *dev;
    dnr_trainer *t;
} rig;

static rig open_with(void **state, const dnr_trainer_opts *o, const dnri_trainer_extra *extra)
{
    rig r;
    ok(dnr_device_open(*state, &r.dev));
    ok(dnri_trainer_create(r.dev, o, extra, &r.t));
    if (r.t->num.scaled) /* a scale at which fp16 does not overflow by itself */
        ok(dnri_store_write_state(r.t->store, &(dnri_state){.loss_scale = SCALE}));
    return r;
}

static rig open_rig(void **state, const dnr_trainer_opts *o)
{
    return open_with(state, o, &(dnri_trainer_extra){.keep = true});
}

static void close_rig(rig *r)
{
    dnr_trainer_destroy(r->t);
    dnr_device_close(r->dev);
}

/* Steps on consecutive pictures from `first`. */
static dnr_metrics train(rig *r, int first, int steps)
{
    dnr_metrics m = {0};
    int batch = (int)r->t->o.batch, n = (int)r->t->o.accumulate;
    void *slots[8] = {0};
    for (int s = 0; s < steps; s++) {
        for (int i = 0; i < n; i++, first += batch)
            slots[i] = slot_of(batch, first, batch);
        ok(dnri_trainer_step_on(r->t, slots, &m));
        for (int i = 0; i < n; i++)
            free(slots[i]);
    }
    return m;
}

/* Evaluates pictures 0 … n − 1. */
static dnr_eval_result evaluate(rig *r, int n)
{
    dnr_eval_result e = {0};
    int batch = (int)r->t->o.eval_batch;
    for (int i = 0; i < n; i += batch) {
        void *slot = slot_of(batch, i, n - i < batch ? n - i : batch);
        ok(dnri_trainer_eval_on(r->t, slot, i == 0, &e));
        free(slot);
    }
    return e;
}

/* A whole slab, parameter after parameter. */
static double *slab(rig *r, dnri_role role, int64_t *n)
{
    int64_t total = 0;
    double *v = calloc((size_t)dnri_params_flat(r->t->params) + 1, sizeof *v);
    assert_non_null(v);
    for (int i = 0; i < dnri_params_count(r->t->params); i++) {
        const dnri_param *p = dnri_params_at(r->t->params, i);
        if ((p->kind == DNRI_RUNNING) != (role == DNRI_BUFFER))
            continue;
        ok(dnri_store_read(r->t->store, role, i, v + total));
        total += p->count;
    }
    assert_true(total > 100);
    *n = total;
    return v;
}

/* ‖a − b‖ / ‖b‖ of a slab of two trainers, the first times `scale`; NaN where either holds one. */
static double distance(rig *a, dnri_role role_a, double scale, rig *b, dnri_role role_b)
{
    int64_t n, m;
    double *x = slab(a, role_a, &n), *y = slab(b, role_b, &m), d = 0, norm = 0;
    assert_int_equal(n, m);
    for (int64_t i = 0; i < n; i++) {
        d += (scale * x[i] - y[i]) * (scale * x[i] - y[i]);
        norm += y[i] * y[i];
    }
    free(x);
    free(y);
    assert_true(norm > 0);
    return sqrt(d / norm);
}

static double rounding(const rig *r) /* a generous bound for a few steps */
{
    dnr_dtype t = r->t->num.compute;
    return t == DNR_F64 ? 1e-10 : t == DNR_F32 ? 1e-4 : 0.05;
}

/* ---- training */

static void loss_falls(void **state)
{
    dnr_trainer_opts o = options();
    o.optim.schedule = DNR_SCHEDULE_COSINE;
    o.optim.warmup_epochs = 0.5;
    rig r = open_rig(state, &o);
    double before = 0;
    dnr_metrics m;
    for (int s = 0; s < 25; s++) {
        m = train(&r, s * BATCH, 1);
        assert_int_equal(m.step, s + 1);
        assert_int_equal(m.samples, (s + 1) * BATCH);
        assert_true(m.lr == dnr_learning_rate(&o.optim, s * BATCH, 1600, 160, BATCH));
        assert_true(m.loss_scale == (r.t->num.scaled ? SCALE : 1) && m.skipped == 0);
        assert_true(m.grad_norm == 0 && m.top5 == 1);
        before += s < 3 ? m.loss / 3 : 0;
    }
    assert_true(before > 0.9 && before < 4); /* ln 4 = 1.39 */
    assert_true(m.loss < 0.4 * before && m.top1 > 0.8);
    dnr_eval_result e = evaluate(&r, 64);
    assert_true(e.images == 64 && e.correct1 >= 56 && e.correct5 == 64);
    close_rig(&r);
}

static void same_seed_same_bits(void **state)
{
    dnr_trainer_opts o = options();
    rig a = open_rig(state, &o), b = open_rig(state, &o);
    o.seed = 2;
    rig c = open_rig(state, &o);
    assert_true(distance(&a, DNRI_MASTER, 1, &b, DNRI_MASTER) == 0);
    assert_true(distance(&a, DNRI_MASTER, 1, &c, DNRI_MASTER) > 0.1);
    train(&a, 0, 4);
    train(&b, 0, 4);
    assert_true(distance(&a, DNRI_MASTER, 1, &b, DNRI_MASTER) == 0);
    assert_true(distance(&a, DNRI_MOMENTUM, 1, &b, DNRI_MOMENTUM) == 0);
    assert_true(distance(&a, DNRI_BUFFER, 1, &b, DNRI_BUFFER) == 0);
    assert_int_equal(dnr_trainer_plan_hash(a.t), dnr_trainer_plan_hash(b.t));
    close_rig(&a);
    close_rig(&b);
    close_rig(&c);
}

/* Four micro-batches with the same pictures have the batch-norm statistics of one batch that holds each
 * picture four times: the steps must be equal. */
static void accumulation_equals_a_large_batch(void **state)
{
    dnr_trainer_opts o = options();
    o.label_smoothing = 0.1;
    rig large = open_rig(state, &o);
    o.batch = BATCH / 4;
    o.accumulate = 4;
    rig small = open_rig(state, &o);
    for (int s = 0; s < 3; s++) {
        void *one = slot_of(BATCH, 0, BATCH), *quarter = slot_of(BATCH / 4, 8 * s, BATCH / 4);
        char *to = one, *from = quarter;
        for (size_t i = 0; i < 4; i++) {
            size_t labels = BATCH, pixels = BATCH / 4 * IMAGE * IMAGE * 3;
            memcpy(to + dnri_slot_labels() + i * labels, from + dnri_slot_labels(), labels);
            memcpy(to + dnri_slot_pixels(BATCH) + i * pixels, from + dnri_slot_pixels(BATCH / 4),
                   pixels);
        }
        dnr_metrics l, m;
        ok(dnri_trainer_step_on(large.t, &one, &l));
        ok(dnri_trainer_step_on(small.t, (void *[]){quarter, quarter, quarter, quarter}, &m));
        assert_true(fabs(l.loss - m.loss) <= rounding(&large) * l.loss);
        assert_true(l.top1 == m.top1 && l.samples == m.samples && l.step == m.step);
        free(one);
        free(quarter);
    }
    assert_true(distance(&small, DNRI_MASTER, 1, &large, DNRI_MASTER) < rounding(&large));
    assert_true(distance(&small, DNRI_MOMENTUM, 1, &large, DNRI_MOMENTUM) < 20 * rounding(&large));
    close_rig(&large);
    close_rig(&small);
}

/* The sum over two different micro-batches is the sum of their gradients, and starts anew each step. */
static void gradients_add_up(void **state)
{
    dnr_trainer_opts o = options();
    o.batch = 4;
    o.optim.lr = 0;
    rig a = open_rig(state, &o), b = open_rig(state, &o);
    o.accumulate = 2;
    rig both = open_rig(state, &o);
    train(&a, 0, 1);
    train(&b, 4, 1);
    train(&both, 50, 1);
    train(&both, 0, 1);
    int64_t n;
    double *ga = slab(&a, DNRI_GRAD, &n), *gb = slab(&b, DNRI_GRAD, &n),
           *sum = slab(&both, DNRI_GSUM, &n);
    double d = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double want =
            (ga[i] + gb[i]) / 2; /* their means are over 4 samples, the step's is over 8 */
        d += (sum[i] - want) * (sum[i] - want);
        norm += want * want;
    }
    assert_true(norm > 0 && sqrt(d / norm) < rounding(&a));
    free(ga);
    free(gb);
    free(sum);
    close_rig(&a);
    close_rig(&b);
    close_rig(&both);
}

static void recomputation_changes_nothing(void **state)
{
    dnr_trainer_opts o = options();
    rig plain = open_rig(state, &o);
    train(&plain, 0, 3);
    for (int mode = DNR_RECOMPUTE_STAGE; mode <= DNR_RECOMPUTE_BLOCK; mode++) {
        o.recompute = (dnr_recompute)mode;
        rig r = open_rig(state, &o);
        train(&r, 0, 3);
        assert_true(distance(&r, DNRI_MASTER, 1, &plain, DNRI_MASTER) == 0);
        assert_true(distance(&r, DNRI_BUFFER, 1, &plain, DNRI_BUFFER) == 0);
        assert_true(dnri_plan_activations(r.t->program[DNRI_LAST].plan) <
                    dnri_plan_activations(plain.t->program[DNRI_LAST].plan));
        close_rig(&r);
    }
    close_rig(&plain);
}

static void clips(void **state)
{
    dnr_trainer_opts o = options();
    o.optim.momentum = 0;
    o.optim.weight_decay = 0;
    o.optim.clip_norm = 0.01;
    rig r = open_rig(state, &o);
    int64_t n;
    double *before = slab(&r, DNRI_MASTER, &n);
    dnr_metrics m = train(&r, 0, 1);
    double *grad = slab(&r, DNRI_GRAD, &n), *after = slab(&r, DNRI_MASTER, &n);
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
    close_rig(&r);
}

/* GradScaler's states, in any precision: overflow skips the step and halves, 2000 good steps double. */
static void overflow_is_skipped(void **state)
{
    dnr_trainer_opts o = options();
    dnri_trainer_extra scaled = {.scaled = true};
    rig a = open_with(state, &o, &scaled), b = open_with(state, &o, &scaled);
    int fc = dnri_params_find(a.t->params, "fc.bias");
    double bias[CLASSES], nan[CLASSES] = {NAN, 0, 0, 0};
    dnri_state s;
    train(&a, 0, 2);
    train(&b, 0, 2);
    ok(dnri_store_read(a.t->store, DNRI_MASTER, fc, bias));
    ok(dnri_store_write(a.t->store, DNRI_MASTER, fc, nan));
    dnr_metrics m = train(&a, 64, 1);
    ok(dnri_store_write(a.t->store, DNRI_MASTER, fc, bias));
    assert_true(m.step == 3 && m.skipped == 1 && m.samples == 3 * BATCH);
    assert_true(m.loss_scale == SCALE / 2);
    assert_true(distance(&a, DNRI_MASTER, 1, &b, DNRI_MASTER) == 0);
    assert_true(distance(&a, DNRI_MOMENTUM, 1, &b, DNRI_MOMENTUM) == 0);
    ok(dnri_store_read_state(a.t->store, &s));
    assert_int_equal(s.growth, 0);
    s.growth = DNRI_SCALE_INTERVAL - 1;
    ok(dnri_store_write_state(a.t->store, &s));
    m = train(&a, 32, 1);
    assert_true(m.skipped == 1 && m.loss_scale == SCALE);
    ok(dnri_store_read_state(a.t->store, &s));
    assert_true(s.growth == 0 && s.found_inf == 0);
    train(&b, 32, 1); /* the same step at twice the scale */
    assert_true(distance(&a, DNRI_MASTER, 1, &b, DNRI_MASTER) < rounding(&a) / 10);
    close_rig(&a);
    close_rig(&b);
}

static void a_step_allocates_nothing(void **state)
{
    dnr_trainer_opts o = options();
    o.accumulate = 2;
    rig r = open_rig(state, &o);
    int64_t allocs, syncs, allocs2, syncs2;
    r.dev->be->counters(r.dev, &allocs, &syncs);
    train(&r, 0, 3);
    evaluate(&r, 20);
    train(&r, 0, 1);
    r.dev->be->counters(r.dev, &allocs2, &syncs2);
    assert_int_equal(allocs2 - allocs, 0);
    assert_int_equal(syncs2 - syncs, 0);
    assert_true(allocs > 0);
    close_rig(&r);
}

/* ---- evaluation */

/* What the logits of the batch just evaluated say. */
static void tally(rig *r, int first, int count, dnr_eval_result *sum)
{
    double logits[32 * CLASSES];
    const dnri_program *p = &r->t->program[DNRI_EVAL];
    assert_true(r->t->o.eval_batch <= 32);
    ok(dnri_plan_read(p->plan, p->logits, logits));
    for (int i = 0; i < count; i++) {
        const double *z = logits + i * CLASSES;
        int label = (first + i) % CLASSES, above = 0;
        double total = 0;
        for (int k = 0; k < CLASSES; k++) {
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
    dnr_trainer_opts o = options();
    o.label_smoothing = 0.1; /* the reported loss is without */
    o.eval_batch = 8;
    rig r = open_rig(state, &o);
    train(&r, 0, 6);
    dnr_eval_result want = {0}, got = {0}, again;
    for (int i = 0; i < 19; i += 8) {
        int count = 19 - i < 8 ? 19 - i : 8;
        void *slot = slot_of(8, i, count);
        ok(dnri_trainer_eval_on(r.t, slot, i == 0, &got));
        tally(&r, i, count, &want);
        free(slot);
    }
    assert_int_equal(got.images, 19);
    assert_int_equal(got.correct1, want.correct1);
    assert_int_equal(got.correct5, 19);
    assert_true(fabs(got.loss / (want.loss / 19) - 1) < 1e-5);
    again = evaluate(&r, 19);
    assert_memory_equal(&again, &got, sizeof got);

    o.eval_batch = 19;
    rig whole = open_rig(state, &o);
    train(&whole, 0, 6);
    again = evaluate(&whole, 19);
    if (rounding(&r) < 0.01)
        assert_int_equal(again.correct1, got.correct1);
    assert_true(fabs(again.loss / got.loss - 1) < rounding(&r));
    close_rig(&whole);
    close_rig(&r);
}

static void evaluation_does_not_disturb_training(void **state)
{
    dnr_trainer_opts o = options();
    rig a = open_rig(state, &o), b = open_rig(state, &o);
    train(&a, 0, 3);
    train(&b, 0, 2);
    evaluate(&b, 20);
    dnr_metrics m = train(&b, 32, 1);
    assert_true(m.step == 3 && m.samples == 48);
    assert_true(distance(&a, DNRI_MASTER, 1, &b, DNRI_MASTER) == 0);
    assert_true(distance(&a, DNRI_BUFFER, 1, &b, DNRI_BUFFER) == 0);
    close_rig(&a);
    close_rig(&b);
}

static void an_evaluation_without_pictures_fails(void **state)
{
    dnr_trainer_opts o = options();
    rig r = open_rig(state, &o);
    dnr_eval_result e;
    void *slot = slot_of(BATCH, 0, 0);
    assert_int_equal(dnri_trainer_eval_on(r.t, slot, true, &e), DNR_EDATA);
    free(slot);
    close_rig(&r);
}

/* ---- files */

static const char *temp_path(void)
{
    static char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/dnnrun-trainer-%ld.safetensors", tmp ? tmp : "/tmp",
             (long)getpid());
    return path;
}

static void weights_go_round(void **state)
{
    dnr_trainer_opts o = options();
    rig a = open_rig(state, &o);
    train(&a, 0, 5);
    ok(dnr_trainer_save(a.t, temp_path()));
    o.seed = 7;
    o.batch = 0; /* evaluates only */
    o.eval_batch = BATCH;
    rig b = open_rig(state, &o);
    dnr_eval_result before = evaluate(&b, 40), want = evaluate(&a, 40);
    assert_true(before.loss != want.loss);
    ok(dnr_trainer_load(b.t, temp_path()));
    dnr_eval_result got = evaluate(&b, 40);
    assert_memory_equal(&got, &want, sizeof got);
    assert_true(distance(&b, DNRI_MASTER, 1, &a, DNRI_MASTER) == 0);
    dnri_state s;
    ok(dnri_store_read_state(b.t->store, &s));
    assert_int_equal(s.forwards, 5);
    unlink(temp_path());
    close_rig(&a);
    close_rig(&b);
}

static void files_have_torchvisions_form(void **state)
{
    dnr_trainer_opts o = options();
    o.model.name = "resnet18";
    rig r = open_rig(state, &o);
    dnri_st_file *f;
    ok(dnr_trainer_save(r.t, temp_path()));
    ok(dnri_st_open(temp_path(), &f));
    assert_string_equal(dnri_st_metadata(f, "format"), "pt");
    assert_string_equal(dnri_st_metadata(f, "architecture"), "resnet18");
    assert_int_equal(dnri_st_count(f), 122); /* 62 parameters, 20 norms with three buffers each */
    const dnri_st_tensor *w = dnri_st_find(f, "layer2.0.conv1.weight");
    assert_non_null(w);
    assert_true(w->ndim == 4 && w->dim[0] == 128 && w->dim[1] == 64 && w->dim[2] == 3);
    const dnri_st_tensor *n = dnri_st_find(f, "layer4.1.bn2.num_batches_tracked");
    assert_true(n && n->type == DNRI_ST_I64 && n->ndim == 0);
    assert_int_equal(dnri_st_find(f, "fc.weight")->ndim, 2);
    /* OIHW: value (k, c, r, s) of the file is (k, r, s, c) of the store */
    double *file = malloc((size_t)w->count * sizeof *file),
           *store = malloc((size_t)w->count * sizeof *store);
    ok(dnri_st_read(f, w, file));
    ok(dnri_store_read(r.t->store, DNRI_MASTER, dnri_params_find(r.t->params, w->name), store));
    for (int k = 0; k < 128; k++)
        for (int c = 0; c < 64; c++)
            for (int p = 0; p < 9; p++)
                assert_true(file[(k * 64 + c) * 9 + p] == store[(k * 9 + p) * 64 + c]);
    free(file);
    free(store);
    dnri_st_close(f);
    unlink(temp_path());
    close_rig(&r);
}

/* Writes the file again without tensor `drop`, or with one named `add`, or with `drop` of another shape. */
static void rewrite(const char *drop, const char *add, bool reshape)
{
    dnri_st_file *f;
    ok(dnri_st_open(temp_path(), &f));
    int n = dnri_st_count(f), k = 0;
    dnri_st_tensor *t = calloc((size_t)n + 1, sizeof *t);
    static double zeros[1 << 17];
    for (int i = 0; i < n; i++) {
        const dnri_st_tensor *x = dnri_st_at(f, i);
        bool it = drop && strcmp(x->name, drop) == 0;
        assert_true(x->bytes <= sizeof zeros);
        if (!it)
            t[k++] = dnri_st_make(x->name, x->type, x->ndim, x->dim, zeros);
        else if (reshape)
            t[k++] = dnri_st_make(x->name, x->type, 2, (int64_t[]){3, 5}, zeros);
    }
    if (add)
        t[k++] = dnri_st_make(add, DNRI_ST_F32, 1, (int64_t[]){3}, zeros);
    ok(dnri_st_write(temp_path(), NULL, t, k));
    free(t);
    dnri_st_close(f);
}

static void other_weights_are_refused(void **state)
{
    dnr_trainer_opts o = options();
    rig r = open_rig(state, &o);
    int64_t n;
    double *before = slab(&r, DNRI_MASTER, &n);
    static const struct {
        const char *drop, *add;
        bool reshape;
        const char *says;
    } CASES[] = {
        {"layer2.0.bn1.running_var", NULL, false, "layer2.0.bn1.running_var is missing"},
        {"fc.weight", NULL, true, "fc.weight is [3,5], not [4,64]"},
        {NULL, "layer9.weight", false, "layer9.weight is not of this model"},
        {"bn1.num_batches_tracked", "bn1.num_batches_tracked", false, "num_batches_tracked"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        ok(dnr_trainer_save(r.t, temp_path()));
        rewrite(CASES[i].drop, CASES[i].add, CASES[i].reshape);
        assert_int_equal(dnr_trainer_load(r.t, temp_path()), DNR_EDATA);
        says(CASES[i].says);
        says("does not say of which model");
    }
    /* nothing was changed by them */
    double *after = slab(&r, DNRI_MASTER, &n);
    assert_memory_equal(before, after, (size_t)n * sizeof *before);
    /* the counters may be missing */
    ok(dnr_trainer_save(r.t, temp_path()));
    rewrite("bn1.num_batches_tracked", NULL, false);
    ok(dnr_trainer_load(r.t, temp_path()));
    /* another model and another number of classes */
    ok(dnr_trainer_save(r.t, temp_path()));
    o.model.name = "resnet20";
    rig s = open_rig(state, &o);
    assert_int_equal(dnr_trainer_load(s.t, temp_path()), DNR_EDATA);
    says("layer1.1.conv1.weight is missing");
    says("says it is of resnet8");
    o = options();
    o.model.classes = 5;
    rig u = open_rig(state, &o);
    assert_int_equal(dnr_trainer_load(u.t, temp_path()), DNR_EDATA);
    says("fc.weight is [4,64], not [5,64]");
    unlink(temp_path());
    assert_int_equal(dnr_trainer_load(u.t, temp_path()), DNR_EDATA);
    says("No such file");
    free(before);
    free(after);
    close_rig(&r);
    close_rig(&s);
    close_rig(&u);
}

/* ---- creation */

static void bad_options_are_refused(void **state)
{
    dnr_device *dev;
    ok(dnr_device_open(*state, &dev));
#define CASE(change, text)                                                                         \
    do {                                                                                           \
        dnr_trainer_opts o = options();                                                            \
        dnr_trainer *t = (void *)1;                                                                \
        change;                                                                                    \
        assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);                             \
        assert_null(t);                                                                            \
        says(text);                                                                                \
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
    dnr_trainer_opts o = options();
    /* cuda tries engines while it plans, and their workspaces do not grow evenly with the batch */
    bool trials = strncmp(*state, "cuda", 4) == 0;
    o.batch = 20;
    rig r = open_rig(state, &o);
    size_t arena, store, free_bytes, total;
    dnr_trainer_memory(r.t, &arena, &store);
    ok(r.dev->be->memory(r.dev, &free_bytes, &total));
    o.memory_fraction =
        ((double)(arena + store + 2 * dnri_slot_bytes(20, IMAGE, IMAGE)) + 1024) / (double)total;
    close_rig(&r);

    dnr_device *dev;
    dnr_trainer *t;
    int64_t before, after, syncs;
    ok(dnr_device_open(*state, &dev));
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
    ok(dnr_trainer_create(dev, &o, &t));
    dnr_trainer_destroy(t);

    o.memory_fraction = 1e-9;
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EMEM);
    says("fits is 0");
    assert_non_null(strstr(dnr_last_error()->remedy, "no batch fits"));
    dnr_device_close(dev);
}

static void explains_itself(void **state)
{
    dnr_trainer_opts o = options();
    o.accumulate = 2;
    rig r = open_rig(state, &o);
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    ok(dnr_trainer_explain(r.t, DNR_EXPLAIN_TEXT, f));
    fclose(f);
    assert_non_null(strstr(text, "program micro"));
    assert_non_null(strstr(text, "program last"));
    assert_non_null(strstr(text, "program eval"));
    assert_non_null(strstr(text, "layer3.0.conv2"));
    free(text);
    f = open_memstream(&text, &size);
    ok(dnr_trainer_explain(r.t, DNR_EXPLAIN_JSON, f));
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
    rig s = open_rig(state, &o);
    assert_true(dnr_trainer_plan_hash(s.t) != hash);
    close_rig(&s);
    close_rig(&r);
}

/* ---- with a loader */

static void metrics_come_one_step_late(void **state)
{
    dnr_trainer_opts o = options();
    o.accumulate = 2;
    rig r = open_rig(state, &o);
    dnr_source *src;
    dnr_loader *l, *val, *odd;
    dnr_loader_opts lo = {
        .batch = BATCH, .image = IMAGE, .train = true, .shuffle = true, .threads = 1};
    ok(dnr_source_open(
        "synthetic",
        &(dnr_source_opts){.classes = CLASSES, .synthetic_n = 37, .synthetic_image = IMAGE}, &src));
    ok(dnr_loader_open(src, r.dev, &lo, &l));
    dnr_metrics m;
    ok(dnr_trainer_finish(r.t, &m));
    assert_int_equal(m.step, 0);
    for (int s = 0; s < 5; s++) {
        ok(dnr_trainer_step(r.t, l, &m));
        assert_true(m.step == s && m.samples == s * 2 * BATCH);
        assert_true(s == 0 || (isfinite(m.loss) && m.loss > 0 && m.top5 == 1));
    }
    ok(dnr_trainer_finish(r.t, &m));
    assert_true(m.step == 5 && m.samples == 5 * 2 * BATCH);

    lo = (dnr_loader_opts){.batch = BATCH, .image = IMAGE, .threads = 1};
    ok(dnr_loader_open(src, r.dev, &lo, &val));
    dnr_eval_result first, second;
    ok(dnr_trainer_eval(r.t, val, &first));
    assert_true(first.images == 37 && first.correct5 == 37); /* 16 + 16 + 5 */
    ok(dnr_trainer_eval(r.t, val, &second));
    assert_memory_equal(&first, &second, sizeof first);

    /* loaders that do not fit */
    assert_int_equal(dnr_trainer_step(r.t, val, &m), DNR_EUSAGE);
    assert_int_equal(dnr_trainer_eval(r.t, l, &first), DNR_EUSAGE);
    lo.batch = 4;
    ok(dnr_loader_open(src, r.dev, &lo, &odd));
    assert_int_equal(dnr_trainer_eval(r.t, odd, &first), DNR_EUSAGE);
    says("4 pictures");
    dnr_loader_close(odd);
    ok(dnr_trainer_step(r.t, l, &m)); /* still works */
    assert_int_equal(m.step, 5);
    dnr_loader_close(val);
    dnr_loader_close(l);
    dnr_source_close(src);
    close_rig(&r);
}

/* ---- all of them, on each device */

#define TESTS(X)                                                                                   \
    X(loss_falls)                                                                                  \
    X(same_seed_same_bits)                                                                         \
    X(accumulation_equals_a_large_batch)                                                           \
    X(gradients_add_up)                                                                            \
    X(recomputation_changes_nothing)                                                               \
    X(clips)                                                                                       \
    X(overflow_is_skipped)                                                                         \
    X(a_step_allocates_nothing)                                                                    \
    X(evaluation_is_exact)                                                                         \
    X(evaluation_does_not_disturb_training)                                                        \
    X(an_evaluation_without_pictures_fails)                                                        \
    X(weights_go_round)                                                                            \
    X(files_have_torchvisions_form)                                                                \
    X(other_weights_are_refused)                                                                   \
    X(bad_options_are_refused)                                                                     \
    X(too_large_a_batch_is_refused)                                                                \
    X(explains_itself)                                                                             \
    X(metrics_come_one_step_late)

static int run_on(char *device)
{
#define ROW(test) {#test, test, NULL, NULL, device},
    const struct CMUnitTest tests[] = {TESTS(ROW)};
    return _cmocka_run_group_tests(device, tests, sizeof tests / sizeof *tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    static char ref[] = "ref", cpu[] = "cpu";
    dnr_device *dev;
    if (argc > 1)
        return run_on(argv[1]);
    int failed = run_on(ref);
    if (dnr_device_open("cpu", &dev) != DNR_OK) {
        print_message("not on cpu: %s\n", dnr_last_error()->what);
        return failed;
    }
    dnr_device_close(dev);
    return run_on(cpu) || failed;
}
