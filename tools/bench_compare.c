/* bench_compare.c: dnnrun bench compare: the same steps in PyTorch. Each contender is a process of its own, one after
 * the other, so that start-up and peak memory are its own. dnnrun goes first and leaves what the others need in a
 * folder: its settings (as JSON), its first weights and the batch. */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { LIMIT_S = 1800, NO_TORCH = 77, MAX_ARGS = 160 };

/* What PyTorch is tried with; contiguous is sometimes faster on CPUs. */
static const struct {
    const char *name, *layout;
    bool compile, cpu_only;
} peers[] = {
    {"eager, channels-last", "channels_last", false, false},
    {"eager, contiguous", "contiguous_format", false, true},
    {"compiled, channels-last", "channels_last", true, false},
};
enum { N_PEERS = sizeof peers / sizeof peers[0] };

typedef struct contest {
    const tool_args *a;
    char dir[PATH_MAX], script[PATH_MAX];
    json_t *own, *peer[N_PEERS]; /* NULL: not run */
    dnr_error *err;
} contest;

static const char *inside(const contest *c, const char *name, char buf[PATH_MAX])
{
    snprintf(buf, PATH_MAX, "%.4000s/%.80s", c->dir, name);
    return buf;
}

/* ---------------------------------------------------------------- processes */

static int wait_bounded(pid_t pid)
{
    int status;
    double deadline = tool_now() + LIMIT_S;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (tool_now() > deadline)
            kill(pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Runs a program with its output in files of the folder (err NULL: ours); its exit code. */
static int run(const contest *c, char *const argv[], const char *out, const char *errors)
{
    char path[PATH_MAX];
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t defaults;
    pid_t pid;
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGINT);
    posix_spawnattr_setsigdefault(&attr, &defaults);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF);
    posix_spawn_file_actions_addopen(&files, 1, inside(c, out, path), O_WRONLY | O_CREAT | O_TRUNC,
                                     0600);
    if (errors)
        posix_spawn_file_actions_addopen(&files, 2, inside(c, errors, path),
                                         O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int failed = posix_spawnp(&pid, argv[0], &files, &attr, argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    return failed ? 127 : wait_bounded(pid);
}

/* The last line of a file that is not empty. */
static void last_line(const contest *c, const char *file, char buf[400])
{
    char path[PATH_MAX], line[400];
    FILE *f = fopen(inside(c, file, path), "r");
    buf[0] = 0;
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (*line)
            snprintf(buf, 400, "%s", line);
    }
    if (f)
        fclose(f);
}

/* ---------------------------------------------------------------- contenders */

static dnr_status run_own(contest *c)
{
    char exe[PATH_MAX], warmup[24], runs[24], path[PATH_MAX], *argv[MAX_ARGS];
    char word_bench[] = "bench", mode[8], json[] = "--json", o1[] = "--exchange", o2[] = "--warmup",
         o3[] = "--runs";
    const tool_args *a = c->a;
    int n = 0;
    ssize_t len = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[len > 0 ? len : 0] = 0;
    snprintf(mode, sizeof mode, "%s", a->infer ? "infer" : "train");
    snprintf(warmup, sizeof warmup, "%lld", (long long)(a->warmup < 0 ? 10 : a->warmup));
    snprintf(runs, sizeof runs, "%lld", (long long)(a->runs < 0 ? 100 : a->runs));
    char *head[] = {exe, word_bench, mode, json, o1, c->dir, o2, warmup, o3, runs, (char *)a->cfg};
    for (size_t i = 0; i < sizeof head / sizeof head[0]; i++)
        argv[n++] = head[i];
    for (int i = 0; i < a->n_set && n < MAX_ARGS - 1; i++)
        argv[n++] = a->set[i];
    argv[n] = NULL;
    int code = run(c, argv, "dnnrun.json", NULL);
    if (code) { /* it has told why */
        tool_fail(c->err, code == 127 || code > 128 ? DNR_EFAIL : (dnr_status)code, "bench compare",
                  "dnnrun's own run failed with exit code %d", code);
        return tool_remedy(c->err,
                           "see its message above, or run dnnrun bench %s with the same "
                           "cfg",
                           mode);
    }
    c->own = json_load_file(inside(c, "dnnrun.json", path), 0, NULL);
    if (c->own)
        return DNR_OK;
    tool_fail(c->err, DNR_EFAIL, "bench compare", "dnnrun's own run left no figures");
    return tool_remedy(c->err, "run dnnrun bench %s with the same cfg", mode);
}

static dnr_status run_peer(contest *c, int i)
{
    char python[PATH_MAX], layout_option[] = "--layout", layout[32], compile[] = "--compile",
                           path[PATH_MAX], line[400];
    snprintf(python, sizeof python, "%s", c->a->python ? c->a->python : "python3");
    snprintf(layout, sizeof layout, "%s", peers[i].layout);
    char *argv[] = {
        python, c->script, c->dir, layout_option, layout, peers[i].compile ? compile : NULL, NULL};
    int code = run(c, argv, "peer.json", "peer.err");
    if (code == 127) {
        tool_fail(c->err, DNR_EDEVICE, "bench compare", "there is no %.200s to run PyTorch with",
                  python);
        return tool_remedy(c->err, "install Python, or give one with --python FILE");
    }
    last_line(c, "peer.err", line);
    if (code == NO_TORCH) {
        tool_fail(c->err, DNR_EDEVICE, "bench compare", "%.200s: %s", python, line);
        return tool_remedy(c->err, "give a Python that has it with --python FILE, or pip install "
                                   "torch safetensors");
    }
    c->peer[i] = code ? NULL : json_load_file(inside(c, "peer.json", path), 0, NULL);
    if (!c->peer[i])
        c->peer[i] = json_pack("{s:s}", "failed", line);
    json_object_set_new(c->peer[i], "as", json_string(peers[i].name));
    return DNR_OK;
}

/* ---------------------------------------------------------------- results */

static double at(const json_t *j, const char *a, const char *b)
{
    const json_t *v = json_object_get(j, a);
    v = b ? json_object_get(v, b) : v;
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static double last_loss(const json_t *j)
{
    const json_t *list = json_object_get(j, "loss");
    size_t n = json_array_size(list);
    const json_t *v = n ? json_array_get(list, n - 1) : NULL;
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static bool on_cpu(const contest *c)
{
    const char *device =
        json_string_value(json_object_get(json_object_get(c->own, "case"), "device"));
    return device && !strncmp(device, "cpu", 3);
}

static double memory_of(const contest *c, const json_t *j)
{
    return at(j, "memory", on_cpu(c) ? "process_peak" : "device_used");
}

static void print_row(const contest *c, const char *name, const json_t *j)
{
    char memory[32];
    const char *failed = json_string_value(json_object_get(j, "failed"));
    if (failed) {
        printf("%-40s failed: %s\n", name, failed);
        return;
    }
    printf("%-40s %10.1f %10.3f %10.3f %10s %8.2f", name, at(j, "images_per_s", NULL),
           at(j, "latency_ms", "median"), at(j, "latency_ms", "p95"),
           tool_bytes(memory_of(c, j), memory), at(j, "start_s", NULL));
    printf(c->a->infer ? "\n" : " %12.6f\n", last_loss(j));
}

/* The fastest PyTorch; −1: none ran. */
static int fastest(const contest *c)
{
    int best = -1;
    for (int i = 0; i < N_PEERS; i++)
        if (at(c->peer[i], "images_per_s", NULL) >
            (best < 0 ? 0 : at(c->peer[best], "images_per_s", NULL)))
            best = i;
    return best;
}

static void print_all(const contest *c)
{
    char name[96];
    const json_t *k = json_object_get(c->own, "case");
    int best = fastest(c);
    printf("%s of %s, %s, batch %lld x %lld of %lld x %lld pixels on %s: %s\n\n",
           c->a->infer ? "forward passes" : "training steps",
           json_string_value(json_object_get(k, "model")),
           json_string_value(json_object_get(k, "precision")), (long long)at(k, "batch", NULL),
           (long long)(c->a->infer ? 1 : at(k, "accumulate", NULL)),
           (long long)at(k, "image", NULL), (long long)at(k, "image", NULL),
           json_string_value(json_object_get(k, "device")),
           json_string_value(json_object_get(k, "device_description")));
    printf("%-40s %10s %10s %10s %10s %8s%s\n", "", "images/s", "median ms", "p95 ms", "memory",
           "start s", c->a->infer ? "" : "         loss");
    snprintf(name, sizeof name, "dnnrun %s", dnr_version());
    print_row(c, name, c->own);
    for (int i = 0; i < N_PEERS; i++) {
        const char *version = json_string_value(json_object_get(c->peer[i], "torch"));
        if (!c->peer[i])
            continue;
        snprintf(name, sizeof name, "PyTorch%s%.16s %s", version ? " " : "", version ? version : "",
                 peers[i].name);
        print_row(c, name, c->peer[i]);
    }
    if (!c->a->infer)
        printf("\nloss: after %lld steps from equal weights on an equal batch\n",
               (long long)at(c->own, "warmup", NULL));
    if (best >= 0)
        printf(
            "%sdnnrun: %.2f x the throughput and %.2f x the memory of the fastest PyTorch (%s)\n",
            c->a->infer ? "\n" : "",
            at(c->own, "images_per_s", NULL) / at(c->peer[best], "images_per_s", NULL),
            memory_of(c, c->own) / memory_of(c, c->peer[best]), peers[best].name);
    const char *about = best >= 0 ? json_string_value(json_object_get(c->peer[best], "about")) : "";
    printf("%s%s", about ? about : "", about && *about ? "\n" : "");
}

static void print_json(const contest *c)
{
    int best = fastest(c);
    json_t *list = json_array(), *j;
    for (int i = 0; i < N_PEERS; i++)
        if (c->peer[i])
            json_array_append(list, c->peer[i]);
    j = json_pack("{s:s, s:O, s:o}", "bench", "compare", "dnnrun", c->own, "torch", list);
    if (best >= 0) {
        json_object_set_new(j, "fastest", json_string(peers[best].name));
        json_object_set_new(
            j, "speedup",
            json_real(at(c->own, "images_per_s", NULL) / at(c->peer[best], "images_per_s", NULL)));
        json_object_set_new(j, "memory_ratio",
                            json_real(memory_of(c, c->own) / memory_of(c, c->peer[best])));
    }
    json_dumpf(j, stdout, JSON_REAL_PRECISION(10));
    putchar('\n');
    json_decref(j);
}

static void remove_folder(const contest *c)
{
    static const char *const files[] = {"initial.safetensors", "batch.bin", "dnnrun.json",
                                        "peer.json", "peer.err"};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        unlink(inside(c, files[i], path));
    rmdir(c->dir);
}

dnr_status bench_compare(const tool_args *a, dnr_error *err)
{
    contest c = {.a = a, .err = err};
    dnr_status st = DNR_OK;
    const char *tmp = getenv("TMPDIR");
    if (!tool_shipped("compare_torch.py", c.script, sizeof c.script)) {
        tool_fail(err, DNR_EFAIL, "bench compare",
                  "compare_torch.py is not where dnnrun looks for "
                  "it: %.300s",
                  c.script);
        return tool_remedy(err, "install dnnrun anew");
    }
    snprintf(c.dir, sizeof c.dir, "%.3000s/dnnrun-compare-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(c.dir)) {
        tool_fail(err, DNR_EDISK, "bench compare", "cannot make %.300s: %s", c.dir,
                  strerror(errno));
        return tool_remedy(err, "set TMPDIR to a folder that you may write to");
    }
    signal(SIGINT, SIG_IGN); /* Ctrl-C ends the contender, and we tidy up */
    TOOL_TRY(st, run_own(&c));
    for (int i = 0; i < N_PEERS; i++)
        if (on_cpu(&c) || !peers[i].cpu_only)
            TOOL_TRY(st, run_peer(&c, i));
    if (a->json)
        print_json(&c);
    else
        print_all(&c);
    if (fastest(&c) < 0) {
        st = tool_fail(err, DNR_EFAIL, "bench compare", "PyTorch did not run: %.400s",
                       json_string_value(json_object_get(c.peer[0], "failed")));
        tool_remedy(err, "see that this Python's torch works on this device");
    }
out:
    remove_folder(&c);
    json_decref(c.own);
    for (int i = 0; i < N_PEERS; i++)
        json_decref(c.peer[i]);
    return st;
}
