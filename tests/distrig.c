/* distrig.c: see distrig.h. */
#include "distrig.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int dist_case(const struct CMUnitTest *cases, size_t n)
{
    const char *name = getenv("DNR_TEST_CASE");
    for (size_t i = 0; name && i < n; i++)
        if (!strcmp(cases[i].name, name))
            return _cmocka_run_group_tests(name, &cases[i], 1, NULL, NULL);
    if (name)
        print_error("there is no case %s\n", name);
    return name ? 98 : -1;
}

static void set(const char *name, int value)
{
    char text[32];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* In the child. */
static void become_rank(int job, int rank, int world, const char *command, const char *extra,
                        int out)
{
    char text[1024], *save = NULL;
    snprintf(text, sizeof text, "test-%d-%d", (int)getppid(), job);
    set("DNR_RANK", rank);
    set("DNR_WORLD_SIZE", world);
    set("DNR_LOCAL_RANK", rank);
    set("DNR_LOCAL_SIZE", world);
    setenv("DNR_JOB", text, 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    snprintf(text, sizeof text, "%s", extra ? extra : "");
    for (char *p = strtok_r(text, " ", &save); p; p = strtok_r(NULL, " ", &save)) {
        char *eq = strchr(p, '=');
        *eq = 0;
        setenv(p, eq + 1, 1);
    }
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(97);
}

void ranks_run(ranks *r, int n, int world, const char *const command[], const char *extra)
{
    static int jobs;
    assert_true(n <= RANKS_MOST);
    *r = (ranks){.n = n, .begun = now()};
    jobs++;
    for (int k = 0; k < n; k++) {
        char file[64], line[4096];
        snprintf(file, sizeof file, "/tmp/dnnrun-rank-XXXXXX");
        snprintf(line, sizeof line, "exec %s", command[k]);
        int out = mkstemp(file);
        assert_true(out >= 0);
        r->said[k] = strdup(file); /* the file's name until it has ended */
        r->pid[k] = fork();
        assert_true(r->pid[k] >= 0);
        if (r->pid[k] == 0)
            become_rank(jobs, k, world, line, extra, out);
        close(out);
    }
}

void ranks_start(ranks *r, int n, int world, const char *name, const char *extra)
{
    static char self[1024];
    const char *command[RANKS_MOST];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    for (int k = 0; k < RANKS_MOST; k++)
        command[k] = self;
    setenv("DNR_TEST_CASE", name, 1);
    ranks_run(r, n, world, command, extra);
    unsetenv("DNR_TEST_CASE");
}

static char *take_file(char *path)
{
    char *text = NULL, buf[4096];
    size_t size = 0, n;
    FILE *f = fopen(path, "r"), *m = open_memstream(&text, &size);
    assert_true(f && m);
    while ((n = fread(buf, 1, sizeof buf, f)) > 0)
        fwrite(buf, 1, n, m);
    fclose(f);
    fclose(m);
    unlink(path);
    free(path);
    return text;
}

void ranks_end(ranks *r, double limit_s)
{
    double end = now() + limit_s;
    for (int left = r->n; left;) {
        bool over = now() > end;
        for (int k = 0; k < r->n; k++) {
            int status;
            if (!r->pid[k])
                continue;
            if (over)
                kill(r->pid[k], SIGKILL);
            if (waitpid(r->pid[k], &status, over ? 0 : WNOHANG) != r->pid[k])
                continue;
            r->code[k] = over                ? -1
                         : WIFEXITED(status) ? WEXITSTATUS(status)
                                             : 128 + WTERMSIG(status);
            r->took[k] = now() - r->begun;
            r->pid[k] = 0;
            r->said[k] = take_file(r->said[k]);
            left--;
        }
        usleep(2000);
    }
}

void ranks_pass(int world, const char *name, const char *extra)
{
    ranks r;
    ranks_start(&r, world, world, name, extra);
    ranks_end(&r, 120);
    for (int k = 0; k < world; k++)
        if (r.code[k] != 0)
            fail_msg("%s: rank %d of %d ended with %d: %s", name, k, world, r.code[k], r.said[k]);
    ranks_free(&r);
}

void ranks_free(ranks *r)
{
    for (int k = 0; k < r->n; k++)
        free(r->said[k]);
}

void ranks_say(const ranks *r, int k, const char *text)
{
    if (!strstr(r->said[k], text))
        fail_msg("rank %d (code %d) does not say '%s' but: %s", k, r->code[k], text, r->said[k]);
}

/* ---- in a rank */

static void leave(const dnr_error *e)
{
    dprintf(STDERR_FILENO, "%s (%s)\n  remedy: %s\n", e->what, e->where, e->remedy);
    _exit((int)e->status);
}

static void on_loss(void *user, const dnr_error *why)
{
    leave(why);
}

dnr_comm *rank_open(double timeout_s)
{
    dnr_comm *c;
    dnr_comm_opts o = {
        .timeout_s = timeout_s, .on_loss = on_loss, .transport = getenv("DNR_TEST_TRANSPORT")};
    if (dnr_comm_open(&o, &c) != DNR_OK)
        leave(dnr_last_error());
    return c;
}

void rank_die(dnr_comm *c)
{
    dnr_error why = *dnr_last_error();
    dnr_comm_close(c, &why);
    leave(&why);
}
