/* test_plan.c: from a model to a plan: memory, recomputation, what is explained. No memory is taken for it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine_ops.h"
#include "model.h"
#include "plan.h"
#include "rewrite.h"

static dnr_device *dev;

/* ResNet `name`'s training program on `dev`. */
static dnri_plan *training_plan(const char *name, int image, int64_t batch, dnr_recompute mode,
                                dnri_params **params)
{
    const dnri_lower_opts o = {.workspace_cap = (size_t)1 << 30};
    const dnr_model_opts m = {.name = name, .classes = 1000};
    const dnri_ingest_attr in = {.n = batch, .h = image, .w = image, .scale = {1, 1, 1}};
    const dnri_update_opts update = {.last = true};
    dnr_precision p = DNR_PRECISION_FP32;
    dnri_numerics num;
    dnri_model_fn model;
    dnri_plan *plan = NULL;
    dnr_tid x, labels;
    assert_int_equal(dev->be->numerics(dev, &p, &num), DNR_OK);
    assert_int_equal(dnri_model_find(name, &model), DNR_OK);
    *params = dnri_params_new();
    dnr_graph *g = dnri_graph_new(*params, &num, true);
    assert_int_equal(dnri_ingest(g, &in, &x, &labels), DNR_OK);
    assert_int_equal(dnri_model_loss(g, model(g, x, &m), labels, 0, 1.0 / (double)batch), DNR_OK);
    assert_int_equal(dnri_graph_backward(g), DNR_OK);
    assert_int_equal(dnri_rewrite_recompute(g, mode), DNR_OK);
    assert_int_equal(dnri_emit_update(g, &update), DNR_OK);
    assert_int_equal(dnri_plan_build(g, dev, "last", &o, &plan), DNR_OK);
    return plan;
}

static void recompute_lowers_the_peak(void **state)
{
    dnri_params *params;
    size_t peak[3];
    const dnr_recompute modes[] = {DNR_RECOMPUTE_NONE, DNR_RECOMPUTE_STAGE, DNR_RECOMPUTE_BLOCK};
    for (int i = 0; i < 3; i++) {
        dnri_plan *p = training_plan("resnet50", 224, 16, modes[i], &params);
        peak[i] = dnri_plan_activations(p);
        dnri_plan_free(p);
        dnri_params_free(params);
    }
    print_message(
        "resnet50, batch 16: activations at the peak %.0f MiB, by stage %.0f, by block %.0f\n",
        (double)peak[0] / 0x1p20, (double)peak[1] / 0x1p20, (double)peak[2] / 0x1p20);
    assert_true((double)peak[2] <= 0.6 * (double)peak[0]);
    assert_true(peak[1] < peak[0]);
}

static json_int_t of(const json_t *span, const char *key)
{
    return json_integer_value(json_object_get(span, key));
}

/* In the map that `dnnrun plan --json` shows, nothing alive together overlaps, unless written over it on purpose. */
static void memory_map_is_sound(void **state)
{
    dnri_params *params;
    dnri_plan *p = training_plan("resnet18", 64, 4, DNR_RECOMPUTE_NONE, &params);
    json_t *plan = dnri_plan_json(p), *map = json_object_get(plan, "memory");
    size_t n = json_array_size(map), largest = 0;
    int shared = 0;
    assert_true(n > 50);
    for (size_t i = 0; i < n; i++) {
        const json_t *a = json_array_get(map, i);
        size_t end = (size_t)(of(a, "offset") + of(a, "size"));
        largest = end > largest ? end : largest;
        for (size_t k = 0; k < i; k++) {
            const json_t *b = json_array_get(map, k);
            bool together = of(a, "first") <= of(b, "last") && of(b, "first") <= of(a, "last");
            bool apart = of(a, "offset") + of(a, "size") <= of(b, "offset") ||
                         of(b, "offset") + of(b, "size") <= of(a, "offset");
            const json_t *over = json_object_get(a, "in_place_of"),
                         *under = json_object_get(b, "in_place_of");
            if (together &&
                !apart) { /* one is written over the other, by the last op that reads that */
                const json_t *later = of(a, "first") > of(b, "first") ? a : b,
                             *sooner = later == a ? b : a;
                const char *taken = json_string_value(later == a ? over : under);
                assert_non_null(taken);
                assert_string_equal(taken, json_string_value(json_object_get(sooner, "tensor")));
                assert_int_equal(of(later, "first"), of(sooner, "last"));
                assert_int_equal(of(later, "offset"), of(sooner, "offset"));
                assert_int_equal(of(later, "size"), of(sooner, "size"));
                shared++;
            }
        }
    }
    assert_true(shared > 10);
    assert_true(largest <= dnri_plan_arena(p));
    assert_true(dnri_plan_arena(p) - largest < 256); /* the peak is reached */
    assert_int_equal(json_array_size(json_object_get(plan, "ops")),
                     dnri_graph_ops(dnri_plan_graph(p)));
    json_decref(plan);
    dnri_plan_free(p);
    dnri_params_free(params);
}

/* A forward pass of ResNet-50 at 224 is 4.09 G multiply-adds; backward is twice that, less the stem's dgrad. */
static void counts_operations(void **state)
{
    dnri_params *params;
    dnri_plan *p = training_plan("resnet50", 224, 2, DNR_RECOMPUTE_NONE, &params);
    json_t *plan = dnri_plan_json(p);
    double flops = json_real_value(json_object_get(plan, "flops")) / 2;
    double update = 8.0 * (double)dnri_params_flat(params) / 2; /* of the optimizer */
    assert_true(fabs((flops - update) / (2 * (3 * 4.089e9 - 0.118e9)) - 1) < 0.01);
    json_decref(plan);
    dnri_plan_free(p);
    dnri_params_free(params);
}

static double bytes_of(const json_t *plan, const char *op, const char *layer)
{
    size_t i;
    const json_t *o;
    json_array_foreach(json_object_get(plan, "ops"), i, o)
    {
        if (!strcmp(json_string_value(json_object_get(o, "op")), op) &&
            !strcmp(json_string_value(json_object_get(o, "layer")), layer))
            return json_number_value(json_object_get(o, "bytes"));
    }
    fail_msg("the plan has no %s of %s", op, layer);
    return 0;
}

/* A projection that strides by 2 passes over three quarters of x. */
static void counts_bytes(void **state)
{
    dnri_params *params;
    dnri_plan *p = training_plan("resnet50", 224, 2, DNR_RECOMPUTE_NONE, &params);
    json_t *plan = dnri_plan_json(p);
    const double x = 2 * 56 * 56 * 256, y = 2 * 28 * 28 * 512, w = 512 * 256;
    assert_true(bytes_of(plan, "conv.fprop", "layer2.0.downsample.0") == 4 * (x / 4 + w + y));
    assert_true(bytes_of(plan, "conv.wgrad", "layer2.0.downsample.0") == 4 * (x / 4 + w + y));
    assert_true(bytes_of(plan, "conv.dgrad", "layer2.0.downsample.0") == 4 * (x + w + y));
    json_decref(plan);
    dnri_plan_free(p);
    dnri_params_free(params);
}

static void hashes_tell_plans_apart(void **state)
{
    dnri_params *params[3];
    dnri_plan *p[] = {training_plan("resnet20", 32, 4, DNR_RECOMPUTE_NONE, &params[0]),
                      training_plan("resnet20", 32, 4, DNR_RECOMPUTE_NONE, &params[1]),
                      training_plan("resnet20", 32, 8, DNR_RECOMPUTE_NONE, &params[2])};
    assert_true(dnri_plan_hash(p[0]) == dnri_plan_hash(p[1]));
    assert_true(dnri_plan_hash(p[0]) != dnri_plan_hash(p[2]));
    for (int i = 0; i < 3; i++) {
        dnri_plan_free(p[i]);
        dnri_params_free(params[i]);
    }
}

static void a_failed_graph_fails_the_plan(void **state)
{
    const dnri_lower_opts o = {.workspace_cap = (size_t)1 << 30};
    const dnr_model_opts m = {.name = "resnet50", .classes = 10};
    const dnri_ingest_attr in = {.n = 1, .h = 16, .w = 16, .scale = {1, 1, 1}};
    dnr_precision p = DNR_PRECISION_FP32;
    dnri_numerics num;
    dnri_model_fn model;
    dnri_plan *plan;
    dnr_tid x, labels;
    assert_int_equal(dev->be->numerics(dev, &p, &num), DNR_OK);
    assert_int_equal(dnri_model_find("resnet50", &model), DNR_OK);
    dnri_params *params = dnri_params_new();
    dnr_graph *g = dnri_graph_new(params, &num, true);
    assert_int_equal(dnri_ingest(g, &in, &x, &labels), DNR_OK);
    /* one picture of 16 pixels: the last stage has one value a channel, which has no variance */
    assert_int_equal(model(g, x, &m), DNRI_NONE);
    assert_int_equal(dnri_plan_build(g, dev, "last", &o, &plan), DNR_EUSAGE);
    assert_null(plan);
    assert_non_null(strstr(dnr_last_error()->remedy, "data.image"));
    dnri_params_free(params);
}

int main(void)
{
    if (dnr_device_open("cpu", &dev) != DNR_OK) {
        printf("skipped: %s\n", dnr_last_error()->what);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recompute_lowers_the_peak),
        cmocka_unit_test(memory_map_is_sound),
        cmocka_unit_test(counts_operations),
        cmocka_unit_test(counts_bytes),
        cmocka_unit_test(hashes_tell_plans_apart),
        cmocka_unit_test(a_failed_graph_fails_the_plan),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dnr_device_close(dev);
    return failed;
}
