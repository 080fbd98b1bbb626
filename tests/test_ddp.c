/* test_ddp.c: ranks on ref, in fp64, against PyTorch's DistributedDataParallel on as many processes (golden/ddp.py):
 * losses of five steps, the weights after them, rank 0's running statistics; each within BOUND. */
#include "../runtime/slot.h"
#include "../runtime/trainer.h"
#include "distrig.h"
#include "parity_golden.h"

#include <stdlib.h>

#define BOUND 1e-6

static json_t *read_cases(void)
{
    json_error_t e;
    json_t *j = json_load_file(DNRI_TEST_DIR "/golden/ddp.json", 0, &e);
    if (!j)
        fail_msg("golden/ddp.json: %s", e.text);
    return j;
}

static const json_t *get(const json_t *c, const char *key)
{
    const json_t *v = json_object_get(c, key);
    if (!v)
        fail_msg("the case lacks \"%s\"", key);
    return v;
}

static double number(const json_t *c, const char *key)
{
    const json_t *v = get(c, key);
    return json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
}

/* ---- in a rank */

static dnr_trainer *start(const json_t *c, dnr_device *dev, dnr_comm *comm)
{
    int64_t samples = (int64_t)(number(c, "batch") * number(c, "accumulate") * comm->world);
    dnr_trainer_opts o = {
        .model = {.name = json_string_value(get(c, "model")),
                  .classes = (int)number(c, "classes"),
                  .stem = json_string_value(get(c, "stem"))},
        .optim = {.lr = json_number_value(json_array_get(get(c, "lr"), 0)),
                  .momentum = number(c, "momentum"),
                  .nesterov = number(c, "nesterov") != 0,
                  .weight_decay = number(c, "weight_decay"),
                  .decay_norm_bias = number(c, "decay_norm_bias") != 0,
                  .schedule = DNR_SCHEDULE_LINEAR},
        .batch = (int64_t)number(c, "batch"),
        .accumulate = (int64_t)number(c, "accumulate"),
        .image = (int)number(c, "image"),
        .label_smoothing = number(c, "smoothing"),
        .epoch_samples = 5 * samples,
        .total_samples = 5 * samples,
        .comm = comm,
        .bucket_mb = 0.1,
    };
    dnr_trainer *t;
    OK(dnr_trainer_create(dev, &o, &t));
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *w = dnri_params_at(t->params, i);
        double *v = malloc((size_t)w->count * sizeof *v);
        parity_weights(w, 0, strstr(w->name, ".bn2."), v);
        OK(dnri_store_write(t->store, w->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER, i, v));
        free(v);
    }
    return t;
}

static double step(dnr_trainer *t, dnr_comm *comm, int64_t k)
{
    const dnr_trainer_opts *o = &t->o;
    void *slots[4] = {0};
    dnr_metrics m;
    assert_true(o->accumulate <= 4);
    for (int64_t i = 0; i < o->accumulate; i++) {
        slots[i] = calloc(1, dnri_slot_bytes(o->batch, o->image, o->image));
        parity_batch(slots[i], 0, ((k * o->accumulate + i) * comm->world + comm->rank) * o->batch,
                     o->batch, o->image, o->model.classes);
    }
    OK(dnri_trainer_step_on(t, slots, &m));
    for (int64_t i = 0; i < o->accumulate; i++)
        free(slots[i]);
    return m.loss;
}

/* A tensor of the trainer's, in the files' order. */
static double *read_tensor(dnr_trainer *t, const char *key, int64_t *n)
{
    int i = dnri_params_find(t->params, strchr(key, '/') + 1);
    if (i < 0)
        fail_msg("there is no %s", key);
    const dnri_param *p = dnri_params_at(t->params, i);
    double *v = malloc((size_t)p->count * sizeof *v), *out = malloc((size_t)p->count * sizeof *v);
    OK(dnri_store_read(t->store, p->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER, i, v));
    parity_to_file(p, v, out);
    free(v);
    *n = p->count;
    return out;
}

static void case_equals_ddp(void **state)
{
    json_t *all = read_cases();
    const json_t *c = json_array_get(get(all, "cases"), (size_t)atoi(getenv("CASE")));
    dnr_comm *comm = rank_open(60);
    dnr_device *dev;
    OK(dnr_device_open("ref", &dev));
    dnr_trainer *t = start(c, dev, comm);
    double loss[5], worst = 0;
    int tensors = 0;
    for (int k = 0; k < 5; k++)
        loss[k] = step(t, comm, k);
    const char *key;
    json_t *golden, *tensors_of = json_object_get(c, "tensors");
    json_object_foreach(tensors_of, key, golden)
    {
        int64_t n = 5;
        bool losses = strcmp(key, "losses") == 0;
        if (comm->rank > 0 && strncmp(key, "running/", 8) == 0)
            continue;
        double *a = losses ? loss : read_tensor(t, key, &n), e = golden_error(a, n, golden);
        if (!(e <= BOUND))
            fail_msg("%s differs from PyTorch's by %.2e, allowed are %.0e", key, e, BOUND);
        worst = e > worst ? e : worst;
        tensors++;
        if (!losses)
            free(a);
    }
    assert_true(tensors > 50);
    print_message("%d tensors, largest error %.1e\n", tensors, worst);
    dnr_trainer_destroy(t);
    dnr_device_close(dev);
    dnr_comm_close(comm, NULL);
    json_decref(all);
}

/* ---- tests */

static void equals_ddp(void **state)
{
    json_t *all = read_cases();
    for (size_t i = 0; i < json_array_size(get(all, "cases")); i++) {
        char extra[32];
        snprintf(extra, sizeof extra, "CASE=%zu", i);
        ranks_pass((int)number(json_array_get(get(all, "cases"), i), "ranks"), "case_equals_ddp",
                   extra);
    }
    json_decref(all);
}

int main(void)
{
    const struct CMUnitTest cases[] = {cmocka_unit_test(case_equals_ddp)};
    const struct CMUnitTest tests[] = {cmocka_unit_test(equals_ddp)};
    int code = dist_case(cases, 1);
    return code >= 0 ? code : cmocka_run_group_tests(tests, NULL, NULL);
}
