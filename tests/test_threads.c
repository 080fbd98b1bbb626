/* test_threads.c: where the threads of a training on the CPU run. The tool is started, and /proc looked at. */
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "clirig.h"

enum { MOST = 64 };

/* The threads of a training, after some steps. */
typedef struct crowd {
    int n_loaders, n_others;
    cpu_set_t main, loader[MOST], other[MOST]; /* other: but the main one */
    int nice[MOST];                            /* of loaders */
} crowd;

static void look(pid_t pid, crowd *c)
{
    char path[64], file[384], name[32];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    assert_non_null(d);
    *c = (crowd){0};
    for (struct dirent *e; (e = readdir(d));) {
        pid_t tid = atoi(e->d_name);
        cpu_set_t cpus;
        if (tid <= 0)
            continue;
        snprintf(file, sizeof file, "%s/%s/comm", path, e->d_name);
        char *text = slurp(file);
        snprintf(name, sizeof name, "%s", text ? text : "");
        free(text);
        if (!*name || sched_getaffinity(tid, sizeof cpus, &cpus) != 0)
            continue; /* it has just ended */
        assert_true(c->n_loaders < MOST && c->n_others < MOST);
        if (tid == pid)
            c->main = cpus;
        else if (!strncmp(name, "dnnrun-loader", 13)) {
            c->nice[c->n_loaders] = getpriority(PRIO_PROCESS, (id_t)tid);
            c->loader[c->n_loaders++] = cpus;
        } else
            c->other[c->n_others++] = cpus;
    }
    closedir(d);
}

/* Trains with these variables set, long enough to be looked at. */
static void train(const char *env, const char *settings, crowd *c)
{
    char command[2048];
    struct stat sb = {0};
    sh("rm -rf run");
    snprintf(command, sizeof command,
             "exec env -u OMP_NUM_THREADS -u OMP_PROC_BIND -u OMP_PLACES %s '%s' train "
             "quickstart.cfg device=cpu "
             "train.epochs=100000 run.log_every=1 --out run %s >said.txt 2>&1 </dev/null",
             env, tool, settings);
    pid_t pid = fork();
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    assert_true(pid > 0);
    for (int i = 0; i < 12000 && sb.st_size == 0; i++) { /* two minutes at most */
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        if (stat("run/metrics.jsonl", &sb) != 0)
            sb.st_size = 0;
    }
    if (sb.st_size)
        look(pid, c);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    if (!sb.st_size)
        fail_msg("no step: %s", slurp("said.txt"));
}

/* CPUs that the test may use; skips where there are fewer than two. */
static int cpus(cpu_set_t *all, int id[MOST])
{
    int n = 0;
    assert_int_equal(sched_getaffinity(0, sizeof *all, all), 0);
    for (int i = 0; i < CPU_SETSIZE && n < MOST; i++)
        if (CPU_ISSET(i, all))
            id[n++] = i;
    if (n < 2) {
        print_message("skipped: one CPU\n");
        skip();
    }
    return n;
}

static bool launched(void)
{
    return getenv("OMPI_COMM_WORLD_LOCAL_SIZE") || getenv("MPI_LOCALNRANKS") ||
           getenv("PMI_SIZE") || getenv("SLURM_NTASKS") || getenv("GOMP_CPU_AFFINITY") ||
           getenv("KMP_AFFINITY");
}

/* As it is found: one thread a CPU, all but the caller bound, each to another; loaders anywhere, politely. */
static void a_thread_a_cpu(void **state)
{
    cpu_set_t all, bound;
    int id[MOST], n = cpus(&all, id), n_bound = 0;
    crowd c;
    NEEDS_CPU();
    if (launched())
        skip();
    train("OMP_WAIT_POLICY=passive", "", &c);
    char said[64], *text = slurp("said.txt");
    snprintf(said, sizeof said, ", %d threads, ", n);
    bool whole = strstr(text, said); /* a cgroup's limit gives fewer */
    free(text);
    assert_true(CPU_EQUAL(&c.main, &all));
    CPU_ZERO(&bound);
    for (int i = 0; i < c.n_others; i++)
        if (CPU_COUNT(&c.other[i]) == 1) {
            CPU_OR(&bound, &bound, &c.other[i]);
            n_bound++;
        }
    assert_int_equal(n_bound, whole ? n - 1 : 0);
    assert_int_equal(CPU_COUNT(&bound), n_bound);
    assert_true(c.n_loaders >= 2); /* of training and of validation pictures */
    for (int i = 0; i < c.n_loaders; i++)
        assert_true(c.nice[i] == 10 && CPU_EQUAL(&c.loader[i], &all));
}

/* Within what it is given: of one CPU, one thread. */
static void one_cpu(void **state)
{
    cpu_set_t all;
    int id[MOST], n = cpus(&all, id);
    char env[64];
    crowd c;
    NEEDS_CPU();
    snprintf(env, sizeof env, "taskset -c %d", id[n - 1]);
    train(env, "", &c);
    char *text = slurp("said.txt");
    has(text, ", 1 thread, ");
    free(text);
    for (int i = 0; i < c.n_loaders; i++)
        assert_true(CPU_COUNT(&c.loader[i]) == 1 && CPU_ISSET(id[n - 1], &c.loader[i]));
}

/* OpenMP's own variables hold; where they leave CPUs, loaders take those. */
static void places_are_kept(void **state)
{
    cpu_set_t all;
    int id[MOST];
    char env[128];
    crowd c;
    cpus(&all, id);
    NEEDS_CPU();
    snprintf(env, sizeof env, "OMP_NUM_THREADS=1 OMP_PROC_BIND=true OMP_PLACES='{%d}'", id[1]);
    train(env, "data.threads=2", &c);
    assert_true(CPU_COUNT(&c.main) == 1 && CPU_ISSET(id[1], &c.main));
    assert_int_equal(c.n_loaders, 4);
    for (int i = 0; i < c.n_loaders; i++)
        assert_true(!CPU_ISSET(id[1], &c.loader[i]) &&
                    CPU_COUNT(&c.loader[i]) == CPU_COUNT(&all) - 1);
}

/* Where they leave none, loaders do not inherit the one CPU of the thread that starts them. */
static void no_cpu_is_left(void **state)
{
    cpu_set_t all;
    int id[MOST], n = cpus(&all, id);
    char env[128];
    crowd c;
    NEEDS_CPU();
    snprintf(env, sizeof env, "OMP_NUM_THREADS=%d OMP_PROC_BIND=true OMP_WAIT_POLICY=passive", n);
    train(env, "", &c);
    assert_int_equal(CPU_COUNT(&c.main), 1);
    for (int i = 0; i < c.n_loaders; i++)
        assert_true(CPU_EQUAL(&c.loader[i], &all));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thread_a_cpu),
        cmocka_unit_test(one_cpu),
        cmocka_unit_test(places_are_kept),
        cmocka_unit_test(no_cpu_is_left),
    };
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
