/* test_cli.c: the tool from outside: exit codes, messages, a short training, what it leaves behind. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "clirig.h"

/* ---------------------------------------------------------------- usage */

static void help_and_version(void **state)
{
    static const char *const names[] = {"train", "eval", "predict", "bench",
                                        "plan",  "tune", "version"};
    enum { N = sizeof names / sizeof names[0] };
    assert_int_equal(dnnrun("--help"), 0);
    for (int i = 0; i < N; i++)
        has(out_text, names[i]);
    assert_false(strstr(out_text, "config-doc")); /* not for users */
    for (int i = 0; i < N; i++) {
        char example[32];
        snprintf(example, sizeof example, "  dnnrun %s", names[i]);
        assert_int_equal(dnnrun("%s --help", names[i]), 0);
        has(out_text, example);
        assert_string_equal(err_text, "");
        char *first = strdup(out_text);
        assert_int_equal(dnnrun("help %s", names[i]), 0);
        assert_string_equal(first, out_text);
        free(first);
    }
    assert_int_equal(dnnrun("train -h"), 0);
    has(out_text, "docs/cfg.md");
    has(out_text, "  train.batch                256                1 … 65536 pictures");
    assert_int_equal(dnnrun("--version"), 0);
    assert_string_equal(out_text, "dnnrun " DNR_VERSION "\n");
    assert_int_equal(dnnrun("version"), 0);
    has(out_text, "dnnrun " DNR_VERSION "\n");
    has(out_text, "\ncpu   ");
    has(out_text, "\ncuda  ");
}

static void wrong_usage(void **state)
{
    static const struct {
        const char *args, *what, *remedy;
    } t[] = {
        {"", "no command given", "dnnrun train quickstart.cfg"},
        {"trian", "there is no command trian", "did you mean dnnrun train?"},
        {"zzzzzzzzz", "there is no command", "dnnrun --help"},
        {"help evla", "there is no command evla", "did you mean dnnrun eval?"},
        {"train", "train needs a cfg", "dnnrun train quickstart.cfg"},
        {"train train.batch=3", "train needs a cfg before train.batch=3", "quickstart.cfg"},
        {"train quickstart.cfg --dryrun", "train has no option --dryrun",
         "did you mean --dry-run?"},
        {"train quickstart.cfg --weights=x", "train has no option --weights",
         "dnnrun train --help"},
        {"train quickstart.cfg -x", "train has no option -x", "dnnrun train --help"},
        {"train quickstart.cfg --out", "option --out needs a value", "dnnrun train --help"},
        {"train quickstart.cfg --out ''", "empty path for the run directory", "--out DIR"},
        {"train quickstart.cfg --batch 3", "train has no option --batch", "section.key=value"},
        {"train quickstrat.cfg", "there is no cfg quickstrat.cfg", "did you mean quickstart.cfg?"},
        {"train resnet50", "there is no cfg resnet50", "did you mean resnet50.cfg?"},
        {"plan .", "cannot read the cfg: Is a directory (.:1)", "RUN/resolved.cfg"},
        {"train quickstart.cfg dist.standin=8:1:1", "this run has no ranks", "DNR_RANK=0"},
        {"train quickstart.cfg other.cfg", "other.cfg is not of the form section.key=value",
         "one cfg file"},
        {"train quickstart.cfg train.batchs=3", "unknown key train.batchs (command line)",
         "did you mean train.batch?"},
        {"train quickstart.cfg train.batch=0", "train.batch = 0: out of range",
         "allowed: 1 … 65536"},
        {"train quickstart.cfg train.batch=1 train.batch=2", "given twice", "remove one"},
        {"train bad.cfg", "unknown key optim.learning_rate (bad.cfg:4)", "docs/cfg.md"},
        {"train missing.cfg", "data.train is missing (missing.cfg)", "data.train=FOLDER"},
        {"eval quickstart.cfg", "which weights", "--weights FILE"},
        {"eval runs/mistyped", "there is no cfg runs/mistyped", "path of a cfg"},
        {"eval quickstart.cfg data.val= --weights x", "data.val is missing", "data.val=FOLDER"},
        {"eval . --weights x", "no resolved.cfg", "folder of a run"},
        {"version x", "version takes no arguments", "leave it out"},
        {"plan quickstart.cfg device=tpu", "there is no device \"tpu\" (command line",
         "use auto, cpu"},
    };
    sh("printf '[model]\\nname = resnet20\\n[optim]\\nlearning_rate = 1\\n' >bad.cfg");
    sh("printf '[model]\\nname = resnet20\\n' >missing.cfg");
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
        fails(2, t[i].args, t[i].what, t[i].remedy);
    assert_int_not_equal(access("runs", F_OK), 0); /* none of them left a run behind */
}

static void the_key_reference_is_current(void **state)
{
    char *committed = slurp(DNRI_TEST_DIR "/../docs/cfg.md");
    assert_int_equal(dnnrun("config-doc"), 0);
    assert_non_null(committed);
    if (strcmp(committed, out_text))
        fail_msg("docs/cfg.md is stale: dnnrun config-doc >docs/cfg.md");
    free(committed);
}

static void a_missing_device_is_6(void **state)
{
    fails(6, "plan quickstart.cfg device=cuda:99", "cuda", "");
}

static void output_that_cannot_be_written_is_7(void **state)
{
    if (access("/dev/full", W_OK) != 0)
        skip();
    char command[2048];
    snprintf(command, sizeof command, "'%s' config-doc >/dev/full 2>/dev/null", tool);
    assert_int_equal(WEXITSTATUS(system(command)), 7);
    NEEDS_CPU();
    /* without standard streams nothing that is printed comes into a file of the run */
    snprintf(command, sizeof command,
             "'%s' train quickstart.cfg device=cpu train.max_steps=30 --out mute <&- >&- 2>&-",
             tool);
    assert_int_equal(system(command), 0);
    sh("! grep -r parameters, mute");
    json_decref(metrics("mute"));
    /* a limit on file sizes is an error, and kills no run */
    snprintf(command, sizeof command,
             "ulimit -f 100; '%s' train quickstart.cfg device=cpu train.max_steps=30 --out limited "
             ">limited.txt 2>&1",
             tool);
    assert_int_equal(WEXITSTATUS(system(command)), 7);
    sh("grep -q 'File too large' limited.txt && grep -q 'remedy: .*ulimit -f' limited.txt");
    snprintf(command, sizeof command,
             "(ulimit -f 1; '%s' train quickstart.cfg device=cpu --out limited2 2>&1) | "
             "grep -q 'remedy: .*ulimit -f'",
             tool);
    assert_int_equal(system(command), 0);
    sh("touch a_file");
    fails(7, "train quickstart.cfg device=cpu --out a_file/run", "a_file", "--out DIR");
}

/* ---------------------------------------------------------------- data */

static void more_threads_than_cpus_are_remarked(void **state)
{
    NEEDS_CPU();
    char n[16];
    const char *before = getenv("OMP_NUM_THREADS");
    snprintf(n, sizeof n, "%ld", sysconf(_SC_NPROCESSORS_CONF) + 1);
    setenv("OMP_NUM_THREADS", n, 1);
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu"), 0);
    has(err_text, "wait for each other: OMP_NUM_THREADS = ");
    if (before)
        setenv("OMP_NUM_THREADS", before, 1);
    else
        unsetenv("OMP_NUM_THREADS");
}

static void bad_data_is_3(void **state)
{
    NEEDS_CPU();
    sh("mkdir -p empty classes/a classes/b flat; rm -rf lone; mkdir -p lone/a; tar "
       "-xf " DNRI_TEST_DIR "/../data/digits.tar -O test/7/0044.png >lone/a/x.png");
    fails(3, "train quickstart.cfg device=cpu data.train=lone", "has 1 class (a), but 10", "");
    fails(3, "train quickstart.cfg device=cpu data.train=nowhere", "data.train = nowhere", "");
    has(err_text, "(command line, data/");
    sh("sed 's|^train = .*|train = nowhere|' " DNRI_TEST_DIR
       "/../models/quickstart.cfg >nowhere.cfg");
    fails(3, "train nowhere.cfg device=cpu", "data.train = nowhere", "");
    has(err_text, "(nowhere.cfg:9, data/");
    fails(3, "train quickstart.cfg device=cpu data.train=empty", "empty", "");
    fails(3, "train quickstart.cfg device=cpu data.val=classes", "data.val = classes", "");
    fails(3, "train quickstart.cfg device=cpu model.classes=5", "data.train = ", "");
    has(err_text, "10");
    fails(3, "train quickstart.cfg device=cpu data.train=x.tar", "x.tar", "");
    fails(3, "eval quickstart.cfg device=cpu --weights none.safetensors", "none.safetensors", "");
    sh("printf 'not a weights file' >junk.safetensors");
    fails(3, "eval quickstart.cfg device=cpu --weights junk.safetensors", "junk.safetensors", "");
    assert_int_not_equal(access("runs/x", F_OK), 0);
}

static void too_little_memory_is_4(void **state)
{
    NEEDS_CPU();
    fails(4, "plan quickstart.cfg device=cpu memory.fraction=1e-7",
          "batch 64 (evaluation: 64) needs", "no batch fits");
    /* said before anything is timed: that would take minutes, and the memory */
    fails(4, "plan resnet50.cfg device=cpu data.train=synthetic data.val= train.batch=65536",
          "the largest batch that fits is ", "lower train.batch to ");
}

/* ---------------------------------------------------------------- plan, dry run */

static void plan_and_dry_run(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu"), 0);
    has(out_text, "conv.fprop");
    has(out_text, "arena");
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu memory.recompute=auto:1e99"), 0);
    has(out_text, "recompute none");
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu --json"), 0);
    json_decref(parse(out_text));
    assert_int_equal(dnnrun("train quickstart.cfg device=cpu train.seed=7 --dry-run --out dry"), 0);
    has(out_text, "resnet8");
    has(out_text, "1,438 pictures to train, 359 to validate");
    has(out_text, "\nseed = 7\n");
    has(out_text, "\nmean = 0.305 0.305 0.305\n");
    has(out_text, "conv.fprop");
    assert_int_not_equal(access("dry", F_OK), 0);
    assert_int_not_equal(access("runs", F_OK), 0);
}

static int by_time(const void *a, const void *b)
{
    const double x = number_of(*(json_t *const *)a, "ts"), y = number_of(*(json_t *const *)b, "ts");
    return x < y ? -1 : x > y;
}

/* The trace: every launch of every step by name, none over another in its row, and the host's doings. */
static void profile(void **state)
{
    NEEDS_CPU();
    assert_int_equal(
        dnnrun("train quickstart.cfg device=cpu train.max_steps=8 data.val= --profile 3 "
               "--out profiled"),
        0);
    has(out_text, "profiled/trace.json");
    char *text = slurp("profiled/trace.json");
    json_t *trace = parse(text), *events = json_object_get(trace, "traceEvents"), *e;
    json_t *bar[4096];
    size_t i, n = 0;
    int convs = 0, waits = 0, updates = 0, names = 0;
    free(text);
    has(text_of(json_object_get(trace, "otherData"), "times"), "host's clock");
    assert_int_equal(number_of(json_object_get(trace, "otherData"), "steps"), 3);
    json_array_foreach(events, i, e)
    {
        const char *name = text_of(e, "name");
        if (!strcmp(text_of(e, "ph"), "M")) {
            names++;
            continue;
        }
        assert_true(number_of(e, "dur") >= 0 && n < 4096);
        convs += !strcmp(name, "conv.fprop conv1");
        updates += !strcmp(name, "sgd update");
        waits += !strcmp(name, "data wait");
        if (number_of(e, "tid") == 0)
            bar[n++] = e;
    }
    assert_int_equal(names, 4);
    assert_int_equal(convs, 3);
    assert_int_equal(updates, 3);
    assert_int_equal(waits, 3);
    assert_true(n > 3 * 40 && n % 3 == 0);
    qsort(bar, n, sizeof *bar, by_time);
    for (i = 1; i < n; i++)
        assert_true(number_of(bar[i], "ts") >=
                    number_of(bar[i - 1], "ts") + number_of(bar[i - 1], "dur") - 1e-3);
    json_decref(trace);
    /* no more steps than there are */
    assert_int_equal(dnnrun("train quickstart.cfg device=cpu train.max_steps=3 data.val= "
                            "--profile 1000 --out profiled3"),
                     0);
    has(out_text, "profile 3 steps, to profiled3/trace.json");
    assert_int_equal(access("profiled3/trace.json", F_OK), 0);
    fails(2, "train quickstart.cfg device=cpu --profile 0", "--profile 0", "whole number");
}

/* Launches beside what they could take. */
static void floors(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu --measure"), 0);
    has(out_text, "floor us");
    has(out_text, "GB/s (read and written");
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu --measure --json"), 0);
    json_t *plan = parse(out_text);
    json_t *program = json_array_get(json_object_get(plan, "programs"), 0);
    json_t *ops = json_object_get(program, "ops"), *op;
    const double copy = number_of(program, "bytes_per_second");
    const double rate = number_of(program, "flops_per_second");
    size_t i;
    assert_true(copy > 1e8 && copy < 1e14 && rate > 1e8 && rate < 1e14);
    json_array_foreach(ops, i, op)
    {
        const double bytes = number_of(op, "bytes") / copy * 1e6;
        const double flops = number_of(op, "flops") / rate * 1e6;
        const bool by_bytes = !strcmp(text_of(op, "bound"), "bytes");
        assert_true(by_bytes == (bytes >= flops));
        assert_float_equal(number_of(op, "floor_us"), by_bytes ? bytes : flops,
                           1e-3 * (bytes + flops));
    }
    json_decref(plan);
}

/* Of a network with convolutions of some size: each candidate with a time, one of them taken. */
static void tune(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun("tune resnet18-cifar10.cfg device=cpu train.batch=4 --json"), 0);
    json_t *all = parse(out_text), *contests = json_object_get(all, "contests"), *c;
    size_t i;
    assert_true(json_array_size(contests) > 5);
    json_array_foreach(contests, i, c)
    {
        const json_t *ways = json_object_get(c, "ways");
        const json_t *taken = json_array_get(ways, (size_t)number_of(c, "chosen"));
        assert_true(json_array_size(json_object_get(c, "layers")) > 0);
        assert_true(json_array_size(ways) > 0 && number_of(taken, "us") > 0);
        for (size_t k = 0; k < json_array_size(ways); k++) {
            const json_t *us = json_object_get(json_array_get(ways, k), "us");
            assert_true(json_is_null(us) || json_real_value(us) > 0.9 * number_of(taken, "us"));
        }
    }
    json_decref(all);
    assert_int_equal(dnnrun("tune resnet18-cifar10.cfg device=cpu train.batch=4"), 0);
    has(out_text, "conv.wgrad of ");
    has(out_text, "\n  * ");
    fails(2, "tune quickstart.cfg device=cpu --export", "no engines", "device = cuda");
    fails(2, "tune quickstart.cfg device=cpu cudnn.benchmark=false", "nothing is timed",
          "cudnn.benchmark = true");
    fails(2, "plan quickstart.cfg device=cpu cudnn.pin.layer9.conv1.fprop=eng3",
          "no convolution layer9.conv1", "leave the pin out");
    assert_int_equal(dnnrun("plan quickstart.cfg device=cpu cudnn.pin.conv1.fprop=eng3"), 0);
    has(err_text, "cudnn.pin.* is for CUDA");
}

/* ---------------------------------------------------------------- a run */

static void check_train_record(const json_t *r)
{
    static const char *const numbers[] = {"step",         "epoch",     "samples",    "loss",
                                          "top1",         "top5",      "lr",         "seconds",
                                          "images_per_s", "data_wait", "loss_scale", "skipped"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        assert_true(number_of(r, numbers[i]) >= 0);
    assert_true(json_is_null(json_object_get(r, "grad_norm"))); /* no clipping */
    assert_true(json_is_null(json_object_get(r, "algbn_ratio")) &&
                json_is_null(json_object_get(r, "algbn_exact"))); /* not on a CPU */
    assert_true(number_of(r, "data_wait") <= 1.01);
    assert_float_equal(number_of(r, "samples"), 64 * number_of(r, "step"), 0);
    assert_float_equal(number_of(r, "epoch"), number_of(r, "samples") / 1438, 1e-6);
}

static void a_short_run(void **state)
{
    NEEDS_CPU();
    sh("rm -rf run1");
    assert_int_equal(dnnrun("train --out run1 quickstart.cfg device=cpu train.epochs=5 "
                            "optim.warmup=1 run.log_every=10 "
                            "run.save_every=2 run.eval_every=2"),
                     0);
    assert_null(strchr(out_text, '\r')); /* not a terminal */
    has(out_text, "epoch 2/5: accuracy ");
    has(out_text, "the run lies in run1");
    assert_string_equal(err_text, "");

    /* 5 × 1438 samples in steps of 64: 113 steps, records at 10, 20 … 110 and the rest */
    json_t *list = metrics("run1"), *last_eval = NULL, *r;
    size_t i;
    int trains = 0, evals = 0;
    double step = 0;
    json_array_foreach(list, i, r)
    {
        if (!strcmp(text_of(r, "event"), "train")) {
            check_train_record(r);
            assert_true(number_of(r, "step") > step);
            step = number_of(r, "step");
            assert_true(trains == 11 || step == 10 * (trains + 1));
            trains++;
        } else {
            assert_string_equal(text_of(r, "event"), "eval");
            assert_float_equal(number_of(r, "images"), 359, 0);
            assert_float_equal(number_of(r, "top1"), number_of(r, "correct1") / 359, 1e-9);
            assert_float_equal(number_of(r, "top5"), number_of(r, "correct5") / 359, 1e-9);
            assert_true(number_of(r, "loss") > 0 && number_of(r, "seconds") > 0);
            evals++;
            last_eval = r;
        }
    }
    assert_int_equal(trains, 12);
    assert_float_equal(step, 113, 0);
    assert_int_equal(evals, 3); /* after epochs 2, 4 and 5 */
    assert_true(number_of(last_eval, "top1") > 0.7);

    char *manifest_text = slurp("run1/manifest.json");
    json_t *m = parse(manifest_text);
    assert_string_equal(text_of(m, "dnnrun"), DNR_VERSION);
    assert_string_equal(text_of(m, "device"), "cpu");
    assert_string_equal(text_of(m, "precision"), "fp32");
    assert_int_equal(strlen(text_of(m, "plan_hash")), 16);
    assert_string_equal(json_string_value(json_array_get(json_object_get(m, "command"), 1)),
                        "--out");
    assert_float_equal(number_of(json_object_get(json_object_get(m, "data"), "train"), "pictures"),
                       1438, 0);
    assert_int_equal(strlen(text_of(json_object_get(json_object_get(m, "data"), "val"), "hash")),
                     16);
    assert_true(number_of(m, "parameters") > 70000 && number_of(m, "parameters") < 90000);
    json_decref(m);
    free(manifest_text);

    /* 1438 · 2 and 1438 · 4 samples are in after steps 45 and 90 */
    static const char *const saved[] = {"last", "best", "step-000000045", "step-000000090"};
    for (int k = 0; k < 4; k++) {
        char path[128];
        snprintf(path, sizeof path, "run1/checkpoints/%s/model.safetensors", saved[k]);
        assert_int_equal(access(path, R_OK), 0);
    }

    /* the saved weights give the same counts */
    assert_int_equal(dnnrun("eval run1 --json"), 0);
    json_t *e = parse(out_text);
    assert_int_equal(json_object_size(e), 6);
    assert_float_equal(number_of(e, "correct1"), number_of(last_eval, "correct1"), 0);
    assert_float_equal(number_of(e, "correct5"), number_of(last_eval, "correct5"), 0);
    assert_float_equal(number_of(e, "images"), 359, 0);
    assert_float_equal(number_of(e, "top1"), number_of(last_eval, "top1"), 1e-9);
    assert_float_equal(number_of(e, "loss"), number_of(last_eval, "loss"), 1e-5);
    json_decref(e);
    /* … at another batch size too, and from a cfg */
    assert_int_equal(dnnrun("eval quickstart.cfg device=cpu train.batch=100 --weights "
                            "run1/checkpoints/last/model.safetensors"),
                     0);
    char expect[64];
    snprintf(expect, sizeof expect, "(%.0f of 359)", number_of(last_eval, "correct1"));
    has(out_text, expect);
    json_decref(list);

    sh("mkdir begun; cp run1/resolved.cfg begun");
    fails(3, "eval begun", "the run begun has saved no weights yet", "--resume auto");
    fails(2, "train quickstart.cfg device=cpu --out run1", "run1 already holds a run",
          "--resume auto");
    fails(3,
          "eval quickstart.cfg device=cpu model.name=resnet20 --weights "
          "run1/checkpoints/last/model.safetensors",
          "model.safetensors", "");
    sh("head -c 100000 run1/checkpoints/last/model.safetensors >cut.safetensors");
    fails(3, "eval quickstart.cfg device=cpu --weights cut.safetensors", "cut.safetensors", "");

    /* the resolved cfg is a cfg of the same run */
    assert_int_equal(dnnrun("train run1/resolved.cfg --out run2 train.max_steps=3"), 0);
    list = metrics("run2");
    r = json_array_get(list, 0);
    assert_float_equal(number_of(r, "step"), 3, 0);
    json_decref(list);
}

/* Gradients that blow up end the run with a reason; the records stay JSON. */
static void divergence(void **state)
{
    NEEDS_CPU();
    fails(1,
          "train quickstart.cfg device=cpu --out lost optim.lr=1e6 optim.warmup=0 "
          "optim.weight_decay=100 run.log_every=1",
          "conv.fprop of layer", "lower optim.lr");
    has(err_text, "samples: digits.tar:train/");
    json_t *list = metrics("lost"), *r;
    size_t i;
    assert_true(json_array_size(list) >= 1);
    json_array_foreach(list, i, r) assert_true(json_is_number(json_object_get(r, "loss")));
    json_decref(list);
    fails(1, "train quickstart.cfg device=cpu --out lost2 data.std=1e-39",
          "step 1: ingest of input gives input.x fp32[64,8,8,3]", "correct data.mean and data.std");
}

static void evaluated_once(const char *run, double step)
{
    json_t *list = metrics(run), *r;
    size_t i;
    int n = 0;
    json_array_foreach(list, i, r)
    {
        n += !strcmp(text_of(r, "event"), "eval") && number_of(r, "step") == step;
    }
    json_decref(list);
    assert_int_equal(n, 1);
}

static void bad_pictures_are_reported(void **state)
{
    NEEDS_CPU();
    sh("rm -rf tree; mkdir tree; tar -xf " DNRI_TEST_DIR "/../data/digits.tar -C tree");
    sh("find tree -type d -name train -exec ln -sfn '{}' digits_train ';'");
    sh("for d in digits_train/*/; do printf 'no picture' >$d/broken.png; break; done");
    assert_int_equal(dnnrun("train quickstart.cfg device=cpu data.train=digits_train "
                            "train.epochs=1 optim.warmup=0 --out bad"),
                     0);
    has(out_text,
        "data.train: 1 bad picture so far, replaced by others; listed in bad/metrics.jsonl");
    has(err_text, "broken.png: "); /* once */
    assert_null(strstr(strstr(err_text, "broken.png: ") + 1, "broken.png: "));
    assert_null(strstr(out_text, "broken.png: "));
    json_t *list = metrics("bad"), *r, *found = NULL;
    size_t i;
    json_array_foreach(list, i, r) if (!strcmp(text_of(r, "event"), "bad_pictures")) found = r;
    assert_non_null(found);
    assert_float_equal(number_of(found, "count"), 1, 0);
    has(text_of(json_array_get(json_object_get(found, "new"), 0), "name"), "broken.png");
    json_decref(list);
    /* a run among the class folders would be one of them */
    fails(2, "train quickstart.cfg device=cpu data.train=digits_train --out digits_train/a/b/",
          "the run directory digits_train/a/b/ lies in data.train = digits_train", "--out DIR");
    assert_int_not_equal(access("digits_train/a", F_OK), 0);
    fails(2, "train quickstart.cfg device=cpu data.val=. --out ''x", "lies in data.val = .", "");
    fails(2, "train quickstart.cfg device=cpu data.val=.", "directory runs lies in data.val", "");
    fails(3,
          "train quickstart.cfg device=cpu data.train=digits_train data.on_error=stop "
          "train.epochs=1 optim.warmup=0 --out bad2",
          "broken.png", "");
    /* no step is lost by it */
    const char *args = "train quickstart.cfg device=cpu data.val=digits_train train.epochs=2 "
                       "optim.warmup=0 --out bad3 --resume auto";
    char more[512];
    snprintf(more, sizeof more, "%s data.max_bad=0", args);
    fails(3, more, "more than data.max_bad = 0", "raise data.max_bad");
    has(out_text, "saved after step 23 of 45; once the pictures are mended, go on with --out bad3");
    assert_int_equal(dnnrun("%s", args), 0);
    has(out_text, "after step 23 of 45");
    has(out_text, "the evaluation after step 23 is still due");
    has(out_text, "on 1438 pictures");
    evaluated_once("bad3", 23);
    /* nor the evaluation, if the step was the last */
    args = "train quickstart.cfg device=cpu data.val=digits_train train.max_steps=2 train.ema=0.9 "
           "--out bad4 --resume auto";
    snprintf(more, sizeof more, "%s data.max_bad=0", args);
    for (int twice = 0; twice < 2; twice++) { /* the second time it cannot be made, either */
        fails(3, more, "more than data.max_bad = 0", "raise data.max_bad");
        assert_int_equal(access("bad4/checkpoints/step-000000002", F_OK), 0);
    }
    assert_int_equal(dnnrun("%s", args), 0);
    has(out_text, "on 1438 pictures");
    evaluated_once("bad4", 2);
    assert_int_equal(dnnrun("eval bad4"), 0);
    has(err_text, "1 bad picture is not counted");
    assert_int_equal(dnnrun("%s", args), 0);
    has(out_text, "complete after step 2: nothing to do");
    has(out_text, "of 1438)");
    evaluated_once("bad4", 2);
}

/* A run whose paths are long, no UTF-8 and look like comments is saved, evaluated and resumed. */
static void odd_paths(void **state)
{
    NEEDS_CPU();
    sh("d=$(printf 'a # %%0150d\\351' 1) && mkdir \"$d\" && cd \"$d\" && "
       "tar -xf " DNRI_TEST_DIR "/../data/digits.tar test && ln -s \"$d\" ../odd-path && "
       "printf '%%s' \"$d\" >../odd-name");
    const char *args = "quickstart.cfg device=cpu data.train=\"$(cat odd-name)/test\" "
                       "data.val=\"$(cat odd-name)/test\" train.max_steps=2 "
                       "--out \"$(cat odd-name)/run\"";
    assert_int_equal(dnnrun("train %s", args), 0);
    assert_int_equal(dnnrun("eval \"$(cat odd-name)/run\""), 0);
    has(out_text, "of 359)");
    assert_int_equal(dnnrun("train %s --resume auto", args), 0);
    has(out_text, "nothing to do");
    sh("cp \"$(ls -d odd-path/test/7/* | head -1)\" \"$(printf 'seven\\351.png')\"");
    assert_int_equal(dnnrun("predict --json --weights "
                            "odd-path/run/checkpoints/last/model.safetensors seven*.png"),
                     0);
    has(out_text, "\"image\": \"seven?.png\"");
}

/* SIGTERM: a checkpoint is saved, 75. */
static void a_signal_stops_cleanly(void **state)
{
    NEEDS_CPU();
    char text[] = "train.epochs=100000";
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR),
            file = open("stopped.txt", O_WRONLY | O_CREAT | O_TRUNC, 0666);
        dup2(null, 0);
        dup2(file, 1);
        execl(tool, tool, "train", "quickstart.cfg", "device=cpu", text, "run.log_every=1", "--out",
              "stopped", (char *)NULL);
        _exit(127);
    }
    assert_true(pid > 0);
    struct stat sb = {0};
    for (int i = 0; i < 30000 && sb.st_size == 0;
         i++) { /* five minutes at most for the first record */
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        if (stat("stopped/metrics.jsonl", &sb) != 0)
            sb.st_size = 0;
    }
    kill(pid, sb.st_size > 0 ? SIGTERM : SIGKILL);
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 75);
    json_t *list = metrics("stopped"), *last = json_array_get(list, json_array_size(list) - 1);
    assert_string_equal(text_of(last, "event"), "stopped");
    assert_string_equal(text_of(last, "signal"), "Terminated");
    json_decref(list);
    char *said = slurp("stopped.txt");
    has(said, "stopped after step ");
    free(said);
    assert_int_equal(dnnrun("eval stopped --json"), 0);
    json_decref(parse(out_text));
}

/* As where Ctrl-C ends the `tee` behind a run. */
static void a_closed_pipe_stops_cleanly(void **state)
{
    NEEDS_CPU();
    sh("{ '%s' train quickstart.cfg device=cpu train.epochs=100000 --out piped; echo $? >code; } | "
       "sed '/^epoch 2/q' >said",
       tool);
    char *code = slurp("code");
    assert_string_equal(code, "75\n");
    free(code);
    json_t *list = metrics("piped"), *last = json_array_get(list, json_array_size(list) - 1);
    assert_string_equal(text_of(last, "event"), "stopped");
    assert_string_equal(text_of(last, "signal"), "Broken pipe");
    json_decref(list);
    assert_int_equal(dnnrun("eval piped"), 0);
}

/* Three runs at once: each in a folder of its own, and of one folder exactly one. */
static void runs_at_once_share_no_folder(void **state)
{
    NEEDS_CPU();
    sh("mkdir at-once && cd at-once && for i in 1 2 3; do { '%s' train quickstart.cfg device=cpu "
       "data.val= "
       "train.max_steps=2 >said 2>&1; } & done; wait",
       tool);
    sh("test $(ls -d at-once/runs/*/checkpoints/last | wc -l) = 3");
    sh("cd at-once && for i in 1 2 3; do { '%s' train quickstart.cfg device=cpu data.val= "
       "train.max_steps=2 --out one >said 2>&1; echo $? >code$i; } & done; wait",
       tool);
    sh("test \"$(sort at-once/code? | tr '\\n' ' ')\" = '0 2 2 '");
}

static void validation_of_other_classes_is_refused(void **state)
{
    NEEDS_CPU();
    sh("rm -rf other; cp -r tree other; find other -type d -name 9 | while read d; do mv $d "
       "${d%%9}x; done");
    sh("find other -type d -name test -exec ln -sfn '{}' digits_other ';'");
    fails(3, "train quickstart.cfg device=cpu data.val=digits_other --out other_run",
          "class 9 is 9 in data.train and x in data.val", "same class folders");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(help_and_version),
        cmocka_unit_test(wrong_usage),
        cmocka_unit_test(the_key_reference_is_current),
        cmocka_unit_test(a_missing_device_is_6),
        cmocka_unit_test(output_that_cannot_be_written_is_7),
        cmocka_unit_test(bad_data_is_3),
        cmocka_unit_test(too_little_memory_is_4),
        cmocka_unit_test(plan_and_dry_run),
        cmocka_unit_test(tune),
        cmocka_unit_test(more_threads_than_cpus_are_remarked),
        cmocka_unit_test(profile),
        cmocka_unit_test(floors),
        cmocka_unit_test(a_short_run),
        cmocka_unit_test(divergence),
        cmocka_unit_test(bad_pictures_are_reported),
        cmocka_unit_test(odd_paths),
        cmocka_unit_test(a_signal_stops_cleanly),
        cmocka_unit_test(a_closed_pipe_stops_cleanly),
        cmocka_unit_test(runs_at_once_share_no_folder),
        cmocka_unit_test(validation_of_other_classes_is_refused),
    };
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
