/* test_resume.c: runs that are killed, stopped, damaged or changed, and go on: to the bits of an undisturbed run, or
 * with the right error.
 *
 *     test_resume [KILLS]      6 random kills where no number is given */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "clirig.h"

static int kills = 6;
static double seconds; /* that the undisturbed run took */

/* 45 steps of 64 digits; a checkpoint every sixth step or so */
#define PLAIN                                                                                      \
    "quickstart.cfg device=cpu train.deterministic=true train.epochs=2 optim.warmup=1 "            \
    "train.ema=0.9 "
#define RUN    PLAIN "run.log_every=4 run.save_every=0.25 "
#define RESUME "train " RUN "--resume auto --out "

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void rest(double s)
{
    nanosleep(&(struct timespec){(time_t)s, (long)(1e9 * (s - (double)(time_t)s))}, NULL);
}

/* Starts the tool without waiting for it; `env`: assignments for it, or "". */
static pid_t start_in(const char *env, const char *args)
{
    char command[4096];
    snprintf(command, sizeof command, "exec env %s '%s' %s >started.txt 2>&1 </dev/null", env, tool,
             args);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGHUP, SIG_DFL); /* the tests may run under nohup */
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    assert_true(pid > 0);
    return pid;
}

static pid_t start(const char *args)
{
    return start_in("", args);
}

/* Its wait status; killed, and the test failed, after two minutes. */
static int finish(pid_t pid)
{
    int status;
    for (double end = now() + 120; now() < end; rest(0.005))
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    fail_msg("the tool did not end: %s", slurp("started.txt"));
    return 0;
}

/* ---- same bits */

static void same_file(const char *a, const char *b, const char *name)
{
    sh("cmp '%s/checkpoints/last/%s' '%s/checkpoints/last/%s'", a, name, b, name);
}

static void same_weights(const char *a, const char *b)
{
    same_file(a, b, "model.safetensors");
    same_file(a, b, "model_ema.safetensors");
}

/* The records of training and evaluation, without what a clock says. */
static json_t *records(const char *run)
{
    json_t *all = metrics(run), *kept = json_array(), *r;
    size_t i;
    json_array_foreach(all, i, r)
    {
        const char *event = text_of(r, "event");
        if (strncmp(event, "train", 5) && strncmp(event, "eval", 4))
            continue;
        json_object_del(r, "seconds");
        json_object_del(r, "images_per_s");
        json_object_del(r, "data_wait");
        json_array_append(kept, r);
    }
    json_decref(all);
    return kept;
}

/* The run ended where the undisturbed one did, and its log tells the same. */
static void same_as_undisturbed(const char *run)
{
    json_t *a = records("whole"), *b = records(run);
    same_weights("whole", run);
    if (!json_equal(a, b))
        fail_msg("%s/metrics.jsonl is not that of an undisturbed run", run);
    assert_true(json_array_size(a) > 12);
    json_decref(a);
    json_decref(b);
    /* momentum, state, … but not the notes, which tell the time */
    sh("tail -c 100000 whole/checkpoints/last/trainer.safetensors >a.bin");
    sh("tail -c 100000 '%s/checkpoints/last/trainer.safetensors' | cmp - a.bin", run);
}

static void undisturbed(void)
{
    if (access("whole", F_OK) == 0)
        return;
    double begun = now();
    assert_int_equal(dnnrun("train " RUN "--out whole"), 0);
    seconds = now() - begun;
}

/* ---- kills and signals */

/* Until there is one, or for a minute. */
static void await_records(const char *path)
{
    struct stat sb = {0};
    for (double end = now() + 60; now() < end && sb.st_size == 0; rest(0.002))
        if (stat(path, &sb) != 0)
            sb.st_size = 0;
}

static void killed_at_random(void **state)
{
    NEEDS_CPU();
    undisturbed();
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    int done = 0, runs = 0;
    while (done < kills) {
        sh("rm -rf killed");
        for (int tries = 0;; tries++) {
            assert_true(tries < 1000);
            pid_t pid = start(RESUME "killed");
            rest(seconds * rand() / RAND_MAX);
            if (kill(pid, SIGKILL) != 0)
                fail_msg("cannot kill: %s", strerror(errno));
            int status = finish(pid);
            if (WIFEXITED(status)) {
                if (WEXITSTATUS(status) != 0)
                    fail_msg("exit code %d: %s", WEXITSTATUS(status), slurp("started.txt"));
                break;
            }
            assert_int_equal(WTERMSIG(status), SIGKILL);
            if (++done == kills) {
                assert_int_equal(dnnrun(RESUME "killed"), 0);
                break;
            }
        }
        runs++;
        same_as_undisturbed("killed");
        char *said = slurp("started.txt");
        assert_null(strstr(said, "passed over")); /* a kill never leaves a damaged checkpoint */
        free(said);
    }
    print_message("%d kills in %d runs: all ended with the same bits\n", done, runs);
}

static void signals_save_all(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
    NEEDS_CPU();
    undisturbed();
    for (int i = 0; i < 4; i++) {
        sh("rm -rf stopped");
        pid_t pid = start("train " PLAIN "run.log_every=4 run.save_every=0 --out stopped");
        await_records("stopped/metrics.jsonl");
        kill(pid, signals[i]);
        int status = finish(pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 75)
            fail_msg("%s: status %x: %s", strsignal(signals[i]), status, slurp("started.txt"));
        json_t *list = metrics("stopped"), *last = json_array_get(list, json_array_size(list) - 1);
        assert_string_equal(text_of(last, "event"), "stopped");
        assert_string_equal(text_of(last, "signal"), strsignal(signals[i]));
        assert_true(number_of(last, "step") >= 4 && number_of(last, "step") < 45);
        json_decref(list);
        char *said = slurp("started.txt");
        has(said, "and saved; go on with --out stopped --resume auto");
        free(said);
        assert_int_equal(dnnrun(RESUME "stopped"), 0);
        has(out_text, "resume  from stopped/checkpoints/step-0000000");
        same_as_undisturbed("stopped");
    }
}

/* An evaluation of hours, at the end of epoch 1. */
static void a_signal_cuts_an_evaluation_short(void **state)
{
    static const char args[] = "train " PLAIN "run.log_every=23 data.val=synthetic "
                               "data.synthetic_n=%d --out cut --resume auto %s";
    char first[512];
    NEEDS_CPU();
    snprintf(first, sizeof first, args, 100000000, "");
    pid_t pid = start(first);
    await_records("cut/metrics.jsonl");
    rest(0.1);
    kill(pid, SIGTERM);
    int status = finish(pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 75)
        fail_msg("status %x: %s", status, slurp("started.txt"));
    json_t *list = metrics("cut");
    assert_int_equal(json_array_size(list), 2); /* training and the end, no evaluation */
    assert_string_equal(text_of(json_array_get(list, 1), "event"), "stopped");
    assert_float_equal(number_of(json_array_get(list, 1), "step"), 23, 0);
    json_decref(list);
    assert_int_equal(dnnrun(args, 64, "--allow-changes"), 0);
    has(out_text, "the evaluation after step 23 is still due");
    list = records("cut");
    assert_int_equal(json_array_size(list), 6); /* both weights, twice; trained to 23 and to 45 */
    for (size_t i = 0; i < 6; i++)
        assert_float_equal(number_of(json_array_get(list, i), "step"), i < 3 ? 23 : 45, 0);
    json_decref(list);
    same_weights("whole", "cut");
}

/* ---- which checkpoint */

/* A run that ended after 30 steps: checkpoints at 17 and 23 (quarters of an epoch) and 30. */
static void cut_short(const char *run)
{
    undisturbed();
    sh("rm -rf %s", run);
    assert_int_equal(dnnrun("train " RUN "run.keep=0 train.max_steps=30 --out %s", run), 0);
    sh("test -d %s/checkpoints/step-000000023 -a -d %s/checkpoints/step-000000030", run, run);
}

static void flip(const char *path)
{
    int fd = open(path, O_RDWR);
    char c = 0;
    assert_true(fd >= 0 && pread(fd, &c, 1, 60000) == 1);
    c = (char)(c ^ 16);
    assert_int_equal(pwrite(fd, &c, 1, 60000), 1);
    close(fd);
}

static void damaged_checkpoints_are_passed_over(void **state)
{
    NEEDS_CPU();
    cut_short("dam");
    flip("dam/checkpoints/step-000000030/model.safetensors");
    fails(3, "train " RUN "--resume dam/checkpoints/last",
          "model.safetensors is damaged: its checksum is ", "--resume auto");
    assert_int_equal(dnnrun(RESUME "dam"), 0);
    has(err_text, "passed over: checkpoint dam/checkpoints/step-000000030: model.safetensors is "
                  "damaged");
    has(err_text, "set aside as dam/checkpoints/superseded-step-000000030");
    has(out_text, "resume  from dam/checkpoints/step-0000000");
    same_as_undisturbed("dam");

    /* none is whole: a fresh start, and nothing of the old run remains in the log */
    cut_short("dam");
    sh("for f in dam/checkpoints/step-*/checksums; do echo x >$f; done");
    assert_int_equal(dnnrun(RESUME "dam"), 0);
    has(out_text, "no whole checkpoint in dam/checkpoints: a fresh start");
    same_as_undisturbed("dam");
    /* no run at all: a fresh start too */
    sh("rm -rf dam");
    assert_int_equal(dnnrun(RESUME "dam train.max_steps=2"), 0);
    has(out_text, "a fresh start");
}

static void one_checkpoint_by_name(void **state)
{
    NEEDS_CPU();
    cut_short("named");
    fails(3, "train " RUN "--resume named/checkpoints/step-7", "No such file", "--resume auto");
    fails(3, "train " RUN "--resume .", "cannot open checksums", "--resume auto");
    /* elsewhere: a run of its own, and the first one stays */
    assert_int_equal(dnnrun("train " RUN "--resume named/checkpoints/step-000000023 --out branch"),
                     0);
    same_file("whole", "branch", "model.safetensors");
    sh("test -d named/checkpoints/step-000000030");
    /* in place, from an earlier one: later ones are set aside, later records dropped */
    assert_int_equal(dnnrun("train " RUN "--resume named/checkpoints/step-000000023"), 0);
    has(out_text, "after step 23 of 45");
    sh("test -d named/checkpoints/superseded-step-000000030");
    same_as_undisturbed("named");
    /* by the name of the run: its last, which is complete */
    assert_int_equal(dnnrun("train " RUN "--resume named"), 0);
    has(out_text, "complete after step 45: nothing to do");
    same_as_undisturbed("named");
    char *manifest = slurp("named/manifest.json");
    json_t *m = parse(manifest), *resumes = json_object_get(m, "resumes");
    assert_int_equal(json_array_size(resumes), 2);
    assert_true(number_of(json_array_get(resumes, 0), "step") == 23);
    json_decref(m);
    free(manifest);
    fails(2, "train " RUN "--resume named/checkpoints/last --out whole",
          "whole already holds a run", "--resume auto");
    fails(3, "train " RUN "model.name=resnet20 --allow-changes --resume named --out other",
          "does not fit resnet20", "");
}

static void records_are_repaired(void **state)
{
    NEEDS_CPU();
    cut_short("torn");
    sh("{ echo '{\"event\": \"train\", \"step\": 40, \"loss\": 1}'; echo 'no record'; "
       "printf '{\"event\": \"tra'; } >>torn/metrics.jsonl");
    assert_int_equal(dnnrun(RESUME "torn"), 0);
    has(out_text, "2 damaged or unfinished lines dropped");
    json_t *list = metrics("torn"), *r;
    size_t i, resumed = 0;
    double step = 0;
    json_array_foreach(list, i, r)
    {
        assert_true(number_of(r, "step") >= step);
        step = number_of(r, "step");
        resumed += !strcmp(text_of(r, "event"), "resumed");
    }
    assert_int_equal(resumed, 1);
    json_decref(list);
    same_file("whole", "torn", "model.safetensors");
    /* without any records it goes on too */
    cut_short("torn");
    sh("rm torn/metrics.jsonl torn/manifest.json");
    assert_int_equal(dnnrun(RESUME "torn"), 0);
    same_file("whole", "torn", "model.safetensors");
}

static void old_ones_are_removed(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun("train " RUN "run.keep=2 --out kept"), 0);
    int n = 0;
    DIR *d = opendir("kept/checkpoints");
    for (struct dirent *e; (e = readdir(d));)
        n += !strncmp(e->d_name, "step-", 5);
    closedir(d);
    assert_true(n == 2 || n == 3); /* with the best, where it is older */
    sh("test -f kept/checkpoints/last/trainer.safetensors -a -f "
       "kept/checkpoints/best/model_ema.safetensors");
    assert_int_equal(dnnrun("eval kept --json"), 0);
    assert_int_equal(
        dnnrun("eval kept --json --weights kept/checkpoints/best/model_ema.safetensors"), 0);
}

/* ---- what may change */

static void changes_are_shown_and_refused(void **state)
{
    NEEDS_CPU();
    cut_short("cfg");
    fails(2,
          "train " PLAIN
          "run.log_every=9 run.save_every=0.25 optim.lr=0.2 train.seed=5 --out cfg --resume auto",
          "not the one that checkpoint cfg/checkpoints/step-000000030 was made with: train.seed, "
          "optim.lr differ",
          "--allow-changes");
    has(out_text, "changed optim.lr                 0.1 → 0.2\n");
    has(out_text, "changed run.log_every            4 → 9   (may change)\n");
    fails(2,
          RESUME "cfg model.zero_init_residual=true data.pad=2 data.flip=true data.mean=0.5 "
                 "data.std=0.5 train.label_smoothing=0 train.clip_norm=1 train.seed=5 "
                 "optim.lr=0.2 optim.momentum=0.8 optim.nesterov=false optim.weight_decay=0 "
                 "optim.decay_norm_bias=false",
          "optim.weight_decay and 1 more differ", "set them back");
    fails(2, RESUME "cfg data.val=@cfg/../data/digits.tar:train", "data.val (pictures) differs",
          "set it back");
    assert_int_equal(dnnrun(RESUME "cfg optim.lr=0.2 --allow-changes train.max_steps=32"), 0);
    has(out_text, "changed optim.lr");
    /* what only says how fast or where may change; the bits stay */
    cut_short("cfg");
    assert_int_equal(dnnrun(RESUME "cfg data.threads=1 data.prefetch=1 run.keep=5 "
                                   "memory.fraction=0.5"),
                     0);
    same_weights("whole", "cfg");
    /* the same pictures under another path */
    cut_short("cfg");
    sh("mkdir -p moved; cp " DNRI_TEST_DIR "/../data/digits.tar moved");
    assert_int_equal(
        dnnrun(RESUME "cfg data.train=moved/digits.tar:train data.val=moved/digits.tar:test"), 0);
    same_weights("whole", "cfg");
}

static void the_global_batch_stays(void **state)
{
    NEEDS_CPU();
    cut_short("gb");
    fails(2, RESUME "gb train.batch=48 --allow-changes", "global batch of 64", "a divisor of 64");
    fails(2, RESUME "gb train.batch=16 train.accumulate=2 --allow-changes", "16 x 2 = 32",
          "set train.accumulate=4");
    fails(2, RESUME "gb train.batch=32", "train.batch, train.accumulate differ", "--allow-changes");
    assert_int_equal(dnnrun(RESUME "gb train.batch=32 --allow-changes"), 0);
    has(out_text, "train.accumulate=2, so that the global batch stays 64");
    has(out_text, "trained 45 steps");
}

static void wrong_usage(void **state)
{
    NEEDS_CPU();
    undisturbed();
    fails(2, "train " RUN "--resume auto", "--resume auto without a run directory", "--out DIR");
    fails(2, RESUME "x --dry-run", "--dry-run trains nothing", "leave one");
    fails(2, "train " RUN "--allow-changes", "belongs to --resume", "--resume auto");
    fails(2, "train " RUN "--resume whole --init whole/checkpoints/last/model.safetensors",
          "brings its own weights", "leave one");
    fails(2, "train " RUN "--out whole", "whole already holds a run", "--resume auto");
    fails(3, "train " RUN "--init none.safetensors --out x", "none.safetensors", "");
    assert_int_not_equal(access("x", F_OK), 0);

    struct stat sb;
    sh("rm -rf busy");
    pid_t pid = start("train quickstart.cfg device=cpu train.epochs=100000 --out busy");
    for (double end = now() + 60; now() < end && stat("busy/metrics.jsonl", &sb) != 0;)
        rest(0.002);
    fails(2, "train quickstart.cfg device=cpu train.epochs=100000 --out busy --resume auto",
          "another process is training in busy", "--out DIR");
    kill(pid, SIGKILL);
    finish(pid);
    assert_int_equal(dnnrun("train quickstart.cfg device=cpu train.max_steps=2 train.epochs=100000 "
                            "--out busy --resume auto"),
                     0);
}

/* ---- fine-tuning */

static void other_classes(void **state)
{
    NEEDS_CPU();
    undisturbed();
    assert_int_equal(dnnrun("train " RUN "data.train=synthetic data.val= data.synthetic_n=640 "
                            "model.classes=37 train.max_steps=2 --out tuned --init "
                            "whole/checkpoints/best/model_ema.safetensors"),
                     0);
    has(err_text, "tensors taken from whole/checkpoints/best/model_ema.safetensors");
    has(err_text, "not taken, and so at their initial values: fc.weight, fc.bias");
    has(err_text, "[10,64], not [37,64]");
    sh("grep -q '^init = whole/checkpoints/best/model_ema.safetensors' tuned/resolved.cfg");
    fails(3,
          "train " RUN "model.name=resnet20 train.init=whole/checkpoints/last/model.safetensors "
          "--out y",
          "does not fit resnet20", "");
}

/* ---- a disk that fails */

static const char *need_faults(void)
{
    static char faults[1100];
    snprintf(faults, sizeof faults, "%.*s/libdnr_faults.so", (int)(strrchr(tool, '/') - tool),
             tool);
    if (access(faults, R_OK) != 0) {
        print_message("skipped: no %s in this build\n", faults);
        skip();
    }
    return faults;
}

/* A checkpoint for which there was no memory is made once more, before the run ends. */
static void memory_fails(void **state)
{
    NEEDS_CPU();
    char env[1300];
    undisturbed();
    snprintf(env, sizeof env, "LD_PRELOAD='%s' DNR_FAULTS=fs:60:%d", need_faults(), ENOMEM);
    sh("rm -rf full");
    int status = finish(start_in(env, "train " RUN "--out full"));
    char *said = slurp("started.txt");
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 4)
        fail_msg("status %x: %s", status, said);
    has(said, "saved after step 6 of 45; once that is mended, go on with --out full");
    has(said, strerror(ENOMEM));
    free(said);
    assert_int_equal(dnnrun(RESUME "full"), 0);
    has(out_text, "after step 6 of 45");
    same_as_undisturbed("full");
}

static void the_disk_fails(void **state)
{
    NEEDS_CPU();
    const char *faults = need_faults();
    char env[1300];
    undisturbed();
    int failed = 0;
    for (long n = 1;; n += kills > 100 ? 11 : 229) {
        int err = failed & 1 ? EIO : ENOSPC;
        snprintf(env, sizeof env, "LD_PRELOAD='%s' DNR_FAULTS=fs:%ld:%d%s", faults, n, err,
                 failed & 2 ? ":sticky" : "");
        sh("rm -rf full");
        int status = finish(start_in(env, "train " RUN "--out full"));
        char *said = slurp("started.txt");
        bool done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!done) {
            if (!WIFEXITED(status) || WEXITSTATUS(status) != 7)
                fail_msg("%s: status %x: %s", env, status, said);
            has(said, strerror(err));
            has(said, "\n  remedy: ");
            assert_int_equal(dnnrun(RESUME "full"), 0);
            assert_null(strstr(err_text, "passed over"));
        }
        same_as_undisturbed("full");
        /* where only the removal of an old checkpoint failed, the run went on with a warning */
        bool untouched = done && !strstr(said, "warning: ");
        free(said);
        if (untouched)
            break; /* there were fewer calls */
        failed++;
    }
    print_message("the disk failed at %d places\n", failed);
    assert_true(failed > 3);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_at_random),
        cmocka_unit_test(signals_save_all),
        cmocka_unit_test(a_signal_cuts_an_evaluation_short),
        cmocka_unit_test(damaged_checkpoints_are_passed_over),
        cmocka_unit_test(one_checkpoint_by_name),
        cmocka_unit_test(records_are_repaired),
        cmocka_unit_test(old_ones_are_removed),
        cmocka_unit_test(changes_are_shown_and_refused),
        cmocka_unit_test(the_global_batch_stays),
        cmocka_unit_test(wrong_usage),
        cmocka_unit_test(other_classes),
        cmocka_unit_test(memory_fails),
        cmocka_unit_test(the_disk_fails),
    };
    if (argc > 1)
        kills = atoi(argv[1]);
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
