/* test_schedule.c: the learning rate against torch's schedulers (golden/schedule.py), and its edges. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dnnrun.h"

static const char *const NAMES[] = {"constant", "step", "multistep", "linear",
                                    "cosine",   "poly", "onecycle"};
#define N_NAMES (sizeof NAMES / sizeof *NAMES)

static double number(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static dnr_optim_opts options(const json_t *o, double lr)
{
    dnr_optim_opts out = {.lr = lr,
                          .schedule = (dnr_schedule)-1,
                          .warmup_epochs = number(o, "warmup_epochs"),
                          .warmup_factor = number(o, "warmup_factor"),
                          .lr_min = number(o, "lr_min"),
                          .gamma = number(o, "gamma"),
                          .step_epochs = number(o, "step_epochs"),
                          .power = number(o, "power"),
                          .pct_start = number(o, "pct_start"),
                          .div_factor = number(o, "div_factor"),
                          .final_div_factor = number(o, "final_div_factor")};
    for (size_t i = 0; i < N_NAMES; i++)
        if (strcmp(json_string_value(json_object_get(o, "schedule")), NAMES[i]) == 0)
            out.schedule = (dnr_schedule)i;
    json_t *m = json_object_get(o, "milestones");
    out.n_milestones = (int)json_array_size(m);
    for (int i = 0; i < out.n_milestones; i++)
        out.milestones[i] = json_number_value(json_array_get(m, (size_t)i));
    return out;
}

static void equals_torch(void **unused)
{
    json_t *root = json_load_file(DNRI_TEST_DIR "/golden/schedule.json", 0, NULL);
    assert_non_null(root);
    int64_t total = (int64_t)number(root, "total"), epoch = (int64_t)number(root, "epoch");
    int64_t batch = (int64_t)number(root, "batch");
    bool seen[N_NAMES] = {0};
    json_t *c;
    size_t i;
    json_array_foreach(json_object_get(root, "cases"), i, c)
    {
        dnr_optim_opts o = options(json_object_get(c, "options"), number(root, "lr"));
        json_t *want = json_object_get(c, "lr");
        assert_int_equal(json_array_size(want), total / batch);
        seen[o.schedule] = true;
        for (int64_t s = 0; s < total / batch; s++) {
            double w = json_number_value(json_array_get(want, (size_t)s));
            double got = dnr_learning_rate(&o, s * batch, total, epoch, batch);
            if (!(fabs(got - w) <= 1e-9 * o.lr))
                fail_msg("case %zu (%s), step %lld: %.12g, torch has %.12g", i, NAMES[o.schedule],
                         (long long)s, got, w);
        }
    }
    for (i = 0; i < N_NAMES; i++)
        assert_true(seen[i]);
    json_decref(root);
}

/* Resuming with another batch asks for the same point of the run: the same rate. */
static void is_a_function_of_samples(void **unused)
{
    dnr_optim_opts o = {
        .lr = 1, .schedule = DNR_SCHEDULE_COSINE, .warmup_epochs = 1, .warmup_factor = 0.1};
    for (int64_t s = 0; s < 10000; s += 640)
        assert_true(dnr_learning_rate(&o, s, 10000, 1000, 64) ==
                    dnr_learning_rate(&o, s, 10000, 1000, 128));
}

static void edges(void **unused)
{
    dnr_optim_opts o = {.lr = 2, .lr_min = 0.5, .power = 1};
    static const dnr_schedule falling[] = {DNR_SCHEDULE_LINEAR, DNR_SCHEDULE_COSINE,
                                           DNR_SCHEDULE_POLY};
    for (int i = 0; i < 3; i++) {
        o.schedule = falling[i];
        assert_true(dnr_learning_rate(&o, 0, 1000, 100, 10) == 2);
        assert_true(fabs(dnr_learning_rate(&o, 1000, 1000, 100, 10) - 0.5) < 1e-12);
        assert_true(fabs(dnr_learning_rate(&o, 5000, 1000, 100, 10) - 0.5) < 1e-12);
    }
    /* a warm-up as long as the run, and one shorter than a step */
    o.warmup_epochs = 10;
    assert_true(fabs(dnr_learning_rate(&o, 500, 1000, 100, 10) - 2 * (0.01 + 0.99 * 0.5)) < 1e-12);
    o.warmup_epochs = 0.01;
    assert_true(dnr_learning_rate(&o, 0, 1000, 100, 10) == 2);
    /* a run of one step */
    o = (dnr_optim_opts){.lr = 2, .schedule = DNR_SCHEDULE_ONECYCLE};
    assert_true(isfinite(dnr_learning_rate(&o, 0, 10, 100, 10)));
    /* fractional steps fall on their edge although 0.1 is rounded */
    o = (dnr_optim_opts){.lr = 1, .schedule = DNR_SCHEDULE_STEP, .gamma = 0.5, .step_epochs = 0.1};
    assert_true(fabs(dnr_learning_rate(&o, 29, 1000, 100, 1) - 0.25) < 1e-12);
    assert_true(fabs(dnr_learning_rate(&o, 30, 1000, 100, 1) - 0.125) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_torch),
        cmocka_unit_test(is_a_function_of_samples),
        cmocka_unit_test(edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
