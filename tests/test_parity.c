/* test_parity.c: dnnrun's numbers against PyTorch's.
 *
 *     test_parity                          exact: the ref back end (fp64) against PyTorch in fp64
 *     test_parity DEVICE PRECISION [FUSION]   rounding: DEVICE against PyTorch's own error in that precision,
 *                                             at that level of fusion: off, d2, d3
 *
 * Exact: loss, losses of the samples, logits, every gradient and running statistic of step 1, loss and
 * weights of step 5, and logits in evaluation mode after it, each within EXACT relative norm. Recomputed
 * gradients equal the plain ones bit for bit; resnet20 and 50 are also run without fusion, resnet50 with
 * algebraic batch norm (d2, d3) in every layer that may have it, whatever its size.
 *
 * Rounding: step 1 on five draws of weights and pictures. The truth is ref's, itself held to PyTorch's fp64
 * within EXACT. An error is ‖a − truth‖ / ‖truth‖: over the draws the root mean square of what forward
 * computes, and the median of gradients, which jump where rounding crosses a kink (golden/models.py tells more
 * and how the draws were chosen). For every tensor (none of them is analytically zero) dnnrun's error is at most
 * FACTOR times PyTorch's in the same precision, as golden/rounding_*.json has it; of gradients the upper quartile of
 * its draws counts, and one tensor of a network may err twice as much: next to the loss a few ReLU inputs that rounding
 * takes to the other side make the whole error, two in one program and five in another of the same precision.
 * Recomputation changes no bit. */
#include "../layers/layers.h"
#include "../runtime/trainer.h"
#include "parity_golden.h"
#include "parity_numbers.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdlib.h>

#define EXACT  1e-6
#define FACTOR 2.0
#define SLOTS  2 /* most micro-batches of a case */
#define DRAWS  9 /* most draws of a case */

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) != DNR_OK)                                                                      \
            fail_msg("%s: %s", dnr_last_error()->where, dnr_last_error()->what);                   \
    } while (0)

static const char *const precision_names[] = {"auto", "fp64", "fp32", "tf32", "fp16", "bf16"};
static dnr_device *ref, *device; /* device: NULL in the exact test */
static dnr_precision precision;
static dnr_fusion fusion = DNR_FUSION_D1; /* unless asked for */
static const json_t *rounding;            /* PyTorch's errors */

/* ---- cases */

static double number(const json_t *c, const char *key)
{
    const json_t *v = json_object_get(c, key);
    if (!json_is_number(v) && !json_is_boolean(v))
        fail_msg("the case lacks \"%s\"", key);
    return json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
}

static const char *text(const json_t *c, const char *key)
{
    const char *s = json_string_value(json_object_get(c, key));
    if (!s)
        fail_msg("the case lacks \"%s\"", key);
    return s;
}

static int draw_of(const json_t *c, size_t i)
{
    return (int)json_integer_value(json_array_get(json_object_get(c, "draws"), i));
}

static bool has_op(const dnr_graph *g, const dnri_op_def *def)
{
    for (int i = 0; i < dnri_graph_ops(g); i++)
        if (dnri_graph_op_c(g, i)->def == def)
            return true;
    return false;
}

/* A trainer on a case, its weights set. */
static dnr_trainer *start(const json_t *c, dnr_device *dev, dnr_precision p, int draw,
                          dnr_recompute recompute, bool deterministic)
{
    int64_t batch = (int64_t)number(c, "batch"), accumulate = (int64_t)number(c, "accumulate");
    /* the learning rates fall in a straight line: lr, 4/5 lr … */
    dnr_trainer_opts o = {
        .model = {.name = text(c, "model"),
                  .classes = (int)number(c, "classes"),
                  .stem = text(c, "stem")},
        .optim = {.lr = json_number_value(json_array_get(json_object_get(c, "lr"), 0)),
                  .momentum = number(c, "momentum"),
                  .nesterov = number(c, "nesterov") != 0,
                  .weight_decay = number(c, "weight_decay"),
                  .decay_norm_bias = number(c, "decay_norm_bias") != 0,
                  .clip_norm = number(c, "clip_norm"),
                  .schedule = DNR_SCHEDULE_LINEAR},
        .precision = p,
        .batch = batch,
        .accumulate = accumulate,
        .image = (int)number(c, "image"),
        .label_smoothing = number(c, "smoothing"),
        .epoch_samples = 5 * batch * accumulate,
        .total_samples = 5 * batch * accumulate,
        .deterministic = deterministic,
        .benchmark = !deterministic,
        .recompute = recompute,
        .fusion = fusion,
    };
    dnr_trainer *t;
    OK(dnri_trainer_create(dev, &o, &(dnri_trainer_extra){.keep = true, .algbn_rows = -1}, &t));
    bool bottleneck = dnri_params_find(t->params, "layer1.0.bn3.weight") >= 0;
    const dnr_graph *g = dnri_plan_graph(t->program[DNRI_LAST].plan);
    if (fusion >= DNR_FUSION_D2 && bottleneck)
        assert_true(has_op(g, &dnri_def_algbn_dgrad) &&
                    has_op(g, &dnri_def_algbn_join) == (fusion == DNR_FUSION_D3));
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *w = dnri_params_at(t->params, i);
        double *v = malloc((size_t)w->count * sizeof *v);
        assert_non_null(v);
        parity_weights(w, draw, strstr(w->name, bottleneck ? ".bn3." : ".bn2."), v);
        OK(dnri_store_write(t->store, w->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER, i, v));
        free(v);
    }
    if (t->num.scaled) {
        dnri_state s;
        OK(dnri_store_read_state(t->store, &s));
        s.loss_scale = (float)number(rounding, "loss_scale");
        OK(dnri_store_write_state(t->store, &s));
    }
    return t;
}

/* A slot that starts at position `start` of the case's stream; the caller frees it. */
static void *slot_at(const dnr_trainer *t, int draw, int64_t start_at)
{
    const dnr_trainer_opts *o = &t->o;
    void *slot = calloc(1, dnri_slot_bytes(o->batch, o->image, o->image));
    assert_non_null(slot);
    parity_batch(slot, draw, start_at, o->batch, o->image, o->model.classes);
    return slot;
}

/* One optimizer step; returns its mean loss. */
static double step(dnr_trainer *t, int draw)
{
    void *slots[SLOTS];
    dnr_metrics m;
    assert_true(t->o.accumulate <= SLOTS);
    for (int i = 0; i < t->o.accumulate; i++)
        slots[i] = slot_at(t, draw, t->samples + i * t->o.batch);
    OK(dnri_trainer_step_on(t, slots, &m));
    for (int i = 0; i < t->o.accumulate; i++)
        free(slots[i]);
    assert_int_equal(m.skipped, 0);
    const dnr_graph *g = dnri_plan_graph(t->program[DNRI_LAST].plan);
    assert_true((m.algbn_ratio > 0) == has_op(g, &dnri_def_algbn_coef));
    return m.loss;
}

/* ---- tensors */

static dnr_tid losses(const dnri_plan *p)
{
    const dnr_graph *g = dnri_plan_graph(p);
    for (int i = 0; i < dnri_graph_ops(g); i++)
        if (dnri_graph_op_c(g, i)->def->is_loss)
            return dnri_graph_op_c(g, i)->out[0];
    fail_msg("the program has no loss");
    return DNRI_NONE;
}

static double *read_kept(dnri_plan *p, dnr_tid id, int64_t *n)
{
    *n = dnri_count(dnri_desc(dnri_plan_graph(p), id));
    double *v = malloc((size_t)*n * sizeof *v);
    assert_non_null(v);
    OK(dnri_plan_read(p, id, v));
    return v;
}

static double *read_param(dnr_trainer *t, const char *key, int64_t *n)
{
    const char *name = strchr(key, '/') + 1;
    int i = dnri_params_find(t->params, name);
    if (i < 0)
        fail_msg("%s has no parameter \"%s\"", t->o.model.name, name);
    const dnri_param *p = dnri_params_at(t->params, i);
    bool grad = strncmp(key, "grad/", 5) == 0;
    dnri_role role = !grad                 ? p->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER
                     : t->o.accumulate > 1 ? DNRI_GSUM
                                           : DNRI_GRAD;
    dnri_state s;
    OK(dnri_store_read_state(t->store, &s));
    double *v = malloc((size_t)p->count * sizeof *v), *out = malloc((size_t)p->count * sizeof *v);
    assert_true(v && out);
    OK(dnri_store_read(t->store, role, i, v));
    for (int64_t k = 0; grad && k < p->count; k++)
        v[k] /= (double)s.loss_scale;
    parity_to_file(p, v, out);
    free(v);
    *n = p->count;
    return out;
}

/* A tensor by its golden name, in the files' order; the caller frees it. */
static double *read_tensor(dnr_trainer *t, const char *key, int64_t *n)
{
    dnri_program *last = &t->program[DNRI_LAST], *eval = &t->program[DNRI_EVAL];
    if (strcmp(key, "losses") == 0)
        return read_kept(last->plan, losses(last->plan), n);
    if (strcmp(key, "logits") == 0)
        return read_kept(last->plan, last->logits, n);
    if (strcmp(key, "logits/eval") == 0)
        return read_kept(eval->plan, eval->logits, n);
    return read_param(t, key, n);
}

/* ---- exact */

typedef struct worst {
    double error;
    const char *key;
    int tensors;
} worst;

static void check(const char *key, const double *a, int64_t n, const json_t *golden, worst *w)
{
    double e = golden_error(a, n, golden);
    w->tensors++;
    if (!(e <= EXACT))
        fail_msg("%s differs from PyTorch's by %.2e, allowed are %.0e", key, e, EXACT);
    if (e >= w->error) {
        w->error = e;
        w->key = key;
    }
}

/* Compares all golden tensors that belong to the end of the case, or to step 1. */
static void check_all(dnr_trainer *t, const json_t *c, bool end, double loss, worst *w)
{
    const char *key;
    json_t *golden, *all = json_object_get(c, "tensors");
    json_object_foreach(all, key, golden)
    {
        bool scalar = strncmp(key, "loss", 5) == 0 || strncmp(key, "loss/", 5) == 0;
        bool late = strstr(key, "/last") || strcmp(key, "logits/eval") == 0 ||
                    strncmp(key, "weight/", 7) == 0;
        int64_t n = 1;
        if (late != end)
            continue;
        double *a = scalar ? NULL : read_tensor(t, key, &n);
        check(key, scalar ? &loss : a, n, golden, w);
        free(a);
    }
}

static int count_params(const dnr_trainer *t, bool running)
{
    int n = 0;
    for (int i = 0; i < dnri_params_count(t->params); i++)
        n += (dnri_params_at(t->params, i)->kind == DNRI_RUNNING) == running;
    return n;
}

/* Step 1 with recomputation on `dev` gives the bits that it gives without, and needs less memory; with algebraic
 * batch norm no more: in these small cases its coefficients outweigh activations. */
static void check_recompute(const json_t *c, dnr_device *dev, dnr_precision p)
{
    int draw = draw_of(c, 0);
    dnr_trainer *plain = start(c, dev, p, draw, DNR_RECOMPUTE_NONE, true);
    step(plain, draw);
    for (int mode = DNR_RECOMPUTE_STAGE; mode <= DNR_RECOMPUTE_CHEAP; mode++) {
        dnr_trainer *t = start(c, dev, p, draw, (dnr_recompute)mode, true);
        step(t, draw);
        assert_true(dnri_plan_activations(t->program[DNRI_LAST].plan) <
                    dnri_plan_activations(plain->program[DNRI_LAST].plan) +
                        (fusion >= DNR_FUSION_D2));
        const char *key;
        json_t *golden, *all = json_object_get(c, "tensors");
        json_object_foreach(all, key, golden)
        {
            if (strncmp(key, "grad/", 5) && strncmp(key, "running/", 8))
                continue;
            int64_t n, m;
            double *a = read_tensor(plain, key, &n), *b = read_tensor(t, key, &m);
            if (n != m || memcmp(a, b, (size_t)n * sizeof *a))
                fail_msg("%s: recompute mode %d changes bits", key, mode);
            free(a);
            free(b);
        }
        dnr_trainer_destroy(t);
    }
    dnr_trainer_destroy(plain);
}

static void exact(void **state)
{
    const json_t *c = *state;
    int draw = draw_of(c, 0), steps = (int)json_array_size(json_object_get(c, "lr"));
    worst w = {0};
    dnr_trainer *t = start(c, ref, DNR_PRECISION_FP64, draw, DNR_RECOMPUTE_NONE, true);
    double loss = step(t, draw);
    check_all(t, c, false, loss, &w);
    for (int i = 1; i < steps; i++)
        loss = step(t, draw);
    dnr_eval_result r;
    void *slot = slot_at(t, draw, t->samples);
    OK(dnri_trainer_eval_on(t, slot, true, &r));
    free(slot);
    check_all(t, c, true, loss, &w);
    /* gradient and weight of each parameter, each running statistic, and the five that are no parameter's */
    assert_int_equal(w.tensors, 2 * count_params(t, false) + count_params(t, true) + 5);
    print_message("           %d tensors; the largest error is %.1e, of %s\n", w.tensors, w.error,
                  w.key);
    dnr_trainer_destroy(t);
}

/* Step 1 at a level of fusion. */
static void first_step_exact(const json_t *c, dnr_fusion level)
{
    worst w = {0};
    fusion = level;
    dnr_trainer *t = start(c, ref, DNR_PRECISION_FP64, draw_of(c, 0), DNR_RECOMPUTE_NONE, true);
    check_all(t, c, false, step(t, draw_of(c, 0)), &w);
    fusion = DNR_FUSION_D1;
    dnr_trainer_destroy(t);
}

/* The graph as the model and the gradient walk wrote it. */
static void unfused_exact(void **state)
{
    first_step_exact(*state, DNR_FUSION_OFF);
}

static void algebraic_exact(void **state)
{
    first_step_exact(*state, DNR_FUSION_D2);
}

/* In both directions. */
static void algebraic_forward_exact(void **state)
{
    first_step_exact(*state, DNR_FUSION_D3);
}

static void recompute_exact(void **state)
{
    check_recompute(*state, ref, DNR_PRECISION_FP64);
}

/* ---- rounding */

typedef struct row {
    const char *key;
    double draw[DRAWS];  /* dnnrun's errors */
    double ours, theirs; /* over the draws */
    double bound;
} row;

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double over_draws(row *r, size_t n)
{
    if (strncmp(r->key, "grad/", 5))
        return golden_norm(r->draw, (int64_t)n) / sqrt((double)n);
    qsort(r->draw, n, sizeof *r->draw, ascending);
    return r->draw[n / 2];
}

static int by_ours(const void *a, const void *b)
{
    double x = ((const row *)a)->ours, y = ((const row *)b)->ours;
    return x < y ? -1 : x > y;
}

static int by_theirs(const void *a, const void *b)
{
    double x = ((const row *)a)->theirs, y = ((const row *)b)->theirs;
    return x < y ? -1 : x > y;
}

/* One line for the tensors of one kind: median and largest error of both, and the worst ratio. */
static int report(const char *kind, const row *rows, int n)
{
    row *r = malloc((size_t)n * sizeof *r);
    assert_non_null(r);
    int m = 0, beyond = 0, bad = 0;
    const row *worst_row = NULL;
    for (int i = 0; i < n; i++) {
        if (strncmp(rows[i].key, kind, strlen(kind)))
            continue;
        r[m++] = rows[i];
        beyond += !(rows[i].ours <= rows[i].bound);
        bad += !(rows[i].ours <= 2 * rows[i].bound);
        if (!worst_row || rows[i].ours / rows[i].theirs > worst_row->ours / worst_row->theirs)
            worst_row = &rows[i];
    }
    assert_true(m > 0);
    qsort(r, (size_t)m, sizeof *r, by_theirs);
    double their_median = r[m / 2].theirs, their_max = r[m - 1].theirs;
    qsort(r, (size_t)m, sizeof *r, by_ours);
    print_message("    %-8s %3d  dnnrun %.2e (max %.2e)  PyTorch %.2e (max %.2e)  worst %.2f: %s "
                  "%.2e / %.2e\n",
                  kind, m, r[m / 2].ours, r[m - 1].ours, their_median, their_max,
                  worst_row->ours / worst_row->theirs, worst_row->key, worst_row->ours,
                  worst_row->theirs);
    free(r);
    return beyond > !strcmp(kind, "grad/") ? beyond : bad;
}

static const json_t *pytorch_errors(const json_t *c)
{
    size_t i;
    json_t *r, *list = json_object_get(rounding, "cases");
    json_array_foreach(list, i, r) if (strcmp(text(r, "name"), text(c, "name")) == 0 &&
                                       strcmp(text(r, "precision"), precision_names[precision]) ==
                                           0) return json_object_get(r, "tensors");
    return NULL;
}

static void round_case(void **state)
{
    const json_t *c = *state, *errors = pytorch_errors(c);
    const char *key;
    json_t *theirs;
    size_t draws = json_array_size(json_object_get(c, "draws"));
    assert_non_null(errors);
    assert_in_range(draws, 1, DRAWS);
    row *rows = calloc(json_object_size(errors), sizeof *rows);
    assert_non_null(rows);
    int n = 0, bad = 0;
    for (size_t d = 0; d < draws; d++) {
        int draw = draw_of(c, d);
        worst w = {0};
        dnr_trainer *truth = start(c, ref, DNR_PRECISION_FP64, draw, DNR_RECOMPUTE_NONE, true);
        dnr_trainer *t = start(c, device, precision, draw, DNR_RECOMPUTE_NONE, false);
        double loss = step(truth, draw);
        step(t, draw);
        if (d == 0) /* the one that PyTorch's fp64 results are stored for */
            check_all(truth, c, false, loss, &w);
        n = 0;
        json_object_foreach((json_t *)errors, key, theirs)
        {
            int64_t count;
            double *a = read_tensor(t, key, &count), *b = read_tensor(truth, key, &count);
            rows[n].key = key;
            rows[n].theirs = json_number_value(json_array_get(theirs, 0));
            rows[n].bound =
                FACTOR * json_number_value(json_array_get(theirs, json_array_size(theirs) - 1));
            rows[n++].draw[d] = golden_distance(a, b, count);
            free(a);
            free(b);
        }
        assert_int_equal(n, count_params(t, false) + count_params(t, true) + 2);
        dnr_trainer_destroy(t);
        dnr_trainer_destroy(truth);
    }
    for (int i = 0; i < n; i++)
        rows[i].ours = over_draws(&rows[i], draws);
    static const char *const kinds[] = {"losses", "logits", "grad/", "running/"};
    for (int k = 0; k < 4; k++)
        bad += report(kinds[k], rows, n);
    for (int i = 0; i < n; i++) /* the one that is let pass as well */
        if (!(rows[i].ours <= rows[i].bound))
            print_message("    beyond its bound of %.2e: %s %.2e / %.2e\n", rows[i].bound,
                          rows[i].key, rows[i].ours, rows[i].theirs);
    free(rows);
    assert_int_equal(bad, 0);
}

static void recompute_on_device(void **state)
{
    check_recompute(*state, device, precision);
}

/* ---- main */

static json_t *load(const char *name)
{
    char path[1024];
    json_error_t e;
    snprintf(path, sizeof path, "%s/golden/%s", DNRI_TEST_DIR, name);
    json_t *j = json_load_file(path, 0, &e);
    if (!j)
        fprintf(stderr, "%s:%d: %s\n", path, e.line, e.text);
    return j;
}

/* Opens the device and precision asked for; false where this machine lacks them, saying why. */
static bool open_device(const char *spec, const char *name)
{
    dnri_numerics num;
    for (precision = DNR_PRECISION_BF16; precision > 0; precision--)
        if (strcmp(name, precision_names[precision]) == 0)
            break;
    if (dnr_device_open(spec, &device) == DNR_OK &&
        device->be->numerics(device, &precision, &num) == DNR_OK)
        return true;
    fprintf(stderr, "skipped: %s\n", dnr_last_error()->what);
    return false;
}

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[64];
    json_t *models = load("models.json"), *table = NULL;
    size_t n = 0, i;
    json_t *c;
    if (!models || dnr_device_open("ref", &ref) != DNR_OK) {
        fprintf(stderr, "%s\n", dnr_last_error()->what);
        return 1;
    }
    if (argc > 1) {
        if (argc > 4 || argc < 3 ||
            (argc == 4 && strcmp(argv[3], "off") && strcmp(argv[3], "d2") &&
             strcmp(argv[3], "d3"))) {
            fprintf(stderr, "usage: test_parity [DEVICE PRECISION [off|d2|d3]]\n");
            return 2;
        }
        static const char *const levels[] = {"auto", "off", "d1", "d2", "d3"};
        for (size_t l = 0; argc == 4 && l < sizeof levels / sizeof *levels; l++)
            if (!strcmp(argv[3], levels[l]))
                fusion = (dnr_fusion)l;
        if (!open_device(argv[1], argv[2])) {
            json_decref(models);
            dnr_device_close(ref);
            return 77; /* CTest's mark for a skipped test */
        }
        rounding = table =
            load(strncmp(argv[1], "cuda", 4) ? "rounding_cpu.json" : "rounding_cuda.json");
        if (!table)
            return 1;
        printf("%s: %s\n", dnr_device_name(device), dnr_device_description(device));
    }
    json_array_foreach(json_object_get(models, "cases"), i, c)
    {
        bool is_rounding = json_array_size(json_object_get(c, "draws")) > 1;
        const char *name = text(c, "name");
        if (is_rounding != (device != NULL))
            continue;
        bool plain = strcmp(name, "resnet20") == 0 || strcmp(name, "resnet50") == 0;
        tests[n++] = (struct CMUnitTest){name, device ? round_case : exact, NULL, NULL, c};
        if (plain)
            tests[n++] = (struct CMUnitTest){"… not fused", unfused_exact, NULL, NULL, c};
        if (plain && strcmp(name, "resnet50") == 0)
            tests[n++] = (struct CMUnitTest){"… algebraic", algebraic_exact, NULL, NULL, c};
        if (plain && strcmp(name, "resnet50") == 0)
            tests[n++] = (struct CMUnitTest){"… algebraic both ways", algebraic_forward_exact, NULL,
                                             NULL, c};
        if (device || plain)
            tests[n++] = (struct CMUnitTest){
                "… recomputed", device ? recompute_on_device : recompute_exact, NULL, NULL, c};
    }
    int failed = _cmocka_run_group_tests("parity", tests, n, NULL, NULL);
    json_decref(table);
    json_decref(models);
    dnr_device_close(device);
    dnr_device_close(ref);
    return failed;
}
