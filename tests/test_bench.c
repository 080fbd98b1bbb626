/* test_bench.c: dnnrun bench from outside: its figures, baselines, and the comparison with PyTorch. The last needs a
 * Python with torch and safetensors: $DNR_TEST_PYTHON, else python3; it is skipped where there is none. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clirig.h"

#define SHORT " device=cpu --warmup 6 --runs 5"

static double at(const json_t *j, const char *a, const char *b)
{
    return number_of(json_object_get(j, a), b);
}

static json_t *measured(const char *args)
{
    if (dnnrun("bench %s --json" SHORT, args) != 0)
        fail_msg("bench %s: %s", args, err_text);
    return parse(out_text);
}

static void figures_hang_together(void **state)
{
    NEEDS_CPU();
    static const char *const commands[] = {"train quickstart.cfg train.batch=16 train.accumulate=2",
                                           "infer quickstart.cfg train.batch=16"};
    for (int i = 0; i < 2; i++) {
        json_t *j = measured(commands[i]);
        assert_string_equal(text_of(j, "bench"), i ? "infer" : "train");
        assert_int_equal(number_of(j, "runs"), 5);
        double min = at(j, "latency_ms", "min"), median = at(j, "latency_ms", "median"),
               p95 = at(j, "latency_ms", "p95"), p99 = at(j, "latency_ms", "p99");
        assert_true(0 < min && min <= median && median <= p95 && p95 <= p99 &&
                    p99 <= at(j, "latency_ms", "max"));
        assert_true(fabs(number_of(j, "images_per_s") * number_of(j, "ms_per_run") / 1e3 -
                         (i ? 16 : 32)) < 1e-3);
        assert_true(number_of(j, "start_s") > 0 && number_of(j, "start_s") < 300);
        double planned = at(j, "memory", "planned"), measured = at(j, "memory", "measured");
        assert_true(at(j, "memory", "arena") + at(j, "memory", "store") +
                        at(j, "memory", "staging") ==
                    planned);
        assert_true(measured > 0.5 * planned && at(j, "memory", "process_peak") > planned);
        json_decref(j);
    }
}

/* The plan of a training is the plan that dnnrun plan shows; steps on one batch learn it. */
static void a_step_is_a_training_step(void **state)
{
    NEEDS_CPU();
    json_t *j = measured("train quickstart.cfg");
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu --json"), 0);
    json_t *plan = parse(out_text);
    assert_true(at(plan, "memory", "arena") == at(j, "memory", "arena"));
    assert_true(at(plan, "memory", "store") == at(j, "memory", "store"));
    const json_t *loss = json_object_get(j, "loss");
    assert_int_equal(json_array_size(loss), 6);
    assert_true(json_number_value(json_array_get(loss, 5)) <
                0.98 * json_number_value(json_array_get(loss, 0)));
    json_decref(plan);
    json_decref(j);
}

static void prints_what_it_measured(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun("bench train quickstart.cfg" SHORT), 0);
    has(out_text, "training step of resnet8, fp32, batch 64 of 8 x 8 pixels; 6 to warm up, 5 runs");
    has(out_text, "\nlatency ");
    has(out_text, "\nthroughput ");
    has(out_text, "\nmemory ");
    has(out_text, "\nloss ");
}

static void scale(json_t *j, const char *a, const char *b, double by)
{
    json_t *in = b ? json_object_get(j, a) : j;
    json_object_set_new(in, b ? b : a, json_real(number_of(in, b ? b : a) * by));
}

static void baselines(void **state)
{
    NEEDS_CPU();
    json_t *j = measured("infer quickstart.cfg train.batch=4");
    /* as if it had been ten times slower: no run is worse than that */
    scale(j, "latency_ms", "median", 10);
    scale(j, "images_per_s", NULL, 0.1);
    json_dump_file(j, "slow.json", 0);
    if (dnnrun("bench infer quickstart.cfg train.batch=4 --baseline slow.json" SHORT) != 0)
        fail_msg("%s", err_text);
    has(out_text, "throughput"); /* the figures are printed all the same */
    scale(j, "latency_ms", "median", 1e-3);
    json_dump_file(j, "fast.json", 0);
    fails(1, "bench infer quickstart.cfg train.batch=4 --baseline fast.json --tolerance 50%" SHORT,
          "worse than fast.json by more than 50 %: latency (median)", "idle");
    assert_null(strstr(err_text, "planned memory"));
    scale(j, "latency_ms", "median", 1e3);
    scale(j, "memory", "planned", 0.9);
    json_dump_file(j, "lean.json", 0);
    fails(1, "bench infer quickstart.cfg train.batch=4 --baseline lean.json" SHORT,
          "planned memory", "");
    fails(2, "bench infer quickstart.cfg train.batch=8 --baseline slow.json" SHORT,
          "of another case: batch is 8, not 4", "like with like");
    fails(2, "bench train quickstart.cfg train.batch=4 --baseline slow.json" SHORT,
          "of another case: bench", "like with like");
    fails(2, "bench infer quickstart.cfg --baseline none.json" SHORT, "none.json", "--json >");
    assert_string_equal(out_text, ""); /* before the run */
    json_decref(j);
}

static void wrong_usage(void **state)
{
    static const struct {
        const char *args, *what, *remedy;
    } t[] = {
        {"bench", "bench of what?", "dnnrun bench train quickstart.cfg"},
        {"bench trian quickstart.cfg", "none of train", "did you mean dnnrun bench train?"},
        {"bench train", "bench train needs a cfg", "dnnrun bench train quickstart.cfg"},
        {"bench train quickstart.cfg --runs 1", "--runs 1", "whole number from 2"},
        {"bench train quickstart.cfg --warmup x", "--warmup x", "whole number from 1"},
        {"bench train quickstart.cfg --tolerance much", "--tolerance much", "5% or 0.05"},
        {"bench train quickstart.cfg --tolerance 5%", "--tolerance of what?", "--baseline FILE"},
        {"bench train quickstart.cfg --python x", "bench train has no option --python", ""},
        {"bench compare quickstart.cfg --baseline x", "no option --baseline", ""},
        {"bench train quickstart.cfg train.batchs=3", "unknown key train.batchs", "train.batch?"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
        fails(2, t[i].args, t[i].what, t[i].remedy);
}

/* ---------------------------------------------------------------- PyTorch */

static void no_torch_no_comparison(void **state)
{
    NEEDS_CPU();
    fails(6, "bench compare quickstart.cfg --python ./none" SHORT, "there is no ./none",
          "--python FILE");
    sh("printf '#!/bin/sh\\necho No module named torch >&2\\nexit 77\\n' >without; chmod +x "
       "without");
    fails(6, "bench compare quickstart.cfg --python ./without" SHORT, "No module named torch",
          "pip install torch safetensors");
    sh("printf '#!/bin/sh\\necho it broke >&2\\nexit 1\\n' >broken; chmod +x broken");
    fails(1, "bench compare quickstart.cfg --python ./broken" SHORT,
          "PyTorch did not run: it broke", "torch works");
    has(out_text, "failed: it broke");
    fails(2, "bench compare quickstart.cfg train.batch=0" SHORT, "own run failed with exit code 2",
          "message above");
    has(err_text, "train.batch = 0");
}

/* A peer that gives fixed figures: the table and the ratios. */
static void ratios(void **state)
{
    NEEDS_CPU();
    sh("cat >fake <<'E'\n#!/bin/sh\ncase \"$*\" in *--compile*) s=2000;; *contiguous*) s=4000;; *) "
       "s=1000;; esac\n"
       "echo '{\"torch\": \"9.9\", \"about\": \"PyTorch 9.9, 2 threads\", \"images_per_s\": '$s', "
       "\"start_s\": 1, "
       "\"memory\": {\"process_peak\": 100000000}, \"latency_ms\": {\"median\": 1, \"p95\": 2}, "
       "\"loss\": [1.5]}'\nE\n"
       "chmod +x fake");
    sh("mkdir tmp");
    assert_int_equal(setenv("TMPDIR", "./tmp", 1), 0);
    assert_int_equal(dnnrun("bench compare quickstart.cfg --json --python ./fake" SHORT), 0);
    json_t *j = parse(out_text);
    assert_int_equal(json_array_size(json_object_get(j, "torch")), 3);
    assert_string_equal(text_of(j, "fastest"), "eager, contiguous");
    assert_true(fabs(number_of(j, "speedup") - at(j, "dnnrun", "images_per_s") / 4000) < 1e-6);
    json_decref(j);
    assert_int_equal(dnnrun("bench compare quickstart.cfg --python ./fake" SHORT), 0);
    has(out_text, "PyTorch 9.9 compiled, channels-last");
    has(out_text, "of the fastest PyTorch (eager, contiguous)");
    sh("rmdir tmp"); /* it is left as it was */
}

/* The same losses, step by step, from the same weights on the same batch: so the models, the optimizers and their
 * settings are the same. */
static void torch_computes_the_same(void **state)
{
    NEEDS_CPU();
    const char *python = getenv("DNR_TEST_PYTHON");
    python = python ? python : "python3";
    static const char *const cases[] = {
        "quickstart.cfg train.clip_norm=0.5",
        "quickstart.cfg train.batch=8 train.accumulate=3 optim.decay_norm_bias=false",
        "resnet18-cifar10.cfg train.batch=4 data.image=16 data.pad=2",
        "resnet50.cfg train.batch=8 data.image=64 data.resize=64 model.classes=10 optim.lr=0.5",
    };
    char command[1024];
    snprintf(command, sizeof command, "%s -c 'import torch, safetensors' 2>/dev/null", python);
    if (system(command) != 0) {
        print_message("skipped: %s has no torch and safetensors\n", python);
        skip();
    }
    sh("mkdir -p exchange");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (dnnrun("bench train %s device=cpu --json --exchange exchange --warmup 4 --runs 2",
                   cases[i]))
            fail_msg("%s", err_text);
        json_t *own = parse(out_text);
        sh("cp stdout.txt exchange/dnnrun.json");
        sh("%s " DNRI_TEST_DIR "/../tools/compare_torch.py exchange --layout contiguous_format "
           ">torch.json",
           python);
        char *text = slurp("torch.json");
        json_t *torch = parse(text), *a = json_object_get(own, "loss"),
               *b = json_object_get(torch, "loss");
        assert_int_equal(json_array_size(b), 4);
        for (size_t k = 0; k < 4; k++) {
            double x = json_number_value(json_array_get(a, k)),
                   y = json_number_value(json_array_get(b, k));
            if (!(fabs(x - y) <= 1e-4 * y)) /* rounding grows from step to step */
                fail_msg("%s: step %d: loss %.7g, PyTorch's %.7g", cases[i], (int)k + 1, x, y);
        }
        assert_true(number_of(torch, "images_per_s") > 0);
        free(text);
        json_decref(own);
        json_decref(torch);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(figures_hang_together),
        cmocka_unit_test(a_step_is_a_training_step),
        cmocka_unit_test(prints_what_it_measured),
        cmocka_unit_test(baselines),
        cmocka_unit_test(wrong_usage),
        cmocka_unit_test(no_torch_no_comparison),
        cmocka_unit_test(ratios),
        cmocka_unit_test(torch_computes_the_same),
    };
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
