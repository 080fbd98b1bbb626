/* test_comm.c: ranks that meet, add up, compare, and lose each other (dist/), with no trainer. */
#include "distrig.h"

#include "../dist/launch.h"
#include "../dist/socket.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* ================================================================ in a rank */

enum { MANY = (1 << 18) / 4 * 3 + 5 }; /* floats: more than two chunks, and not a multiple of one */

static double part(int rank, int64_t i)
{
    return (double)((i * 37 + rank * 11) % 101) - 50;
}

static double whole(int world, int64_t i)
{
    double sum = 0;
    for (int r = 0; r < world; r++)
        sum += part(r, i);
    return sum;
}

static void sums(dnr_comm *c, int64_t n)
{
    float *f = calloc((size_t)n + 1, sizeof *f);
    double *d = calloc((size_t)n + 1, sizeof *d);
    int64_t *w = calloc((size_t)n + 1, sizeof *w);
    for (int64_t i = 0; i < n; i++) {
        f[i] = (float)part(c->rank, i);
        d[i] = part(c->rank, i);
        w[i] = (int64_t)part(c->rank, i);
    }
    OK(c->ops->begin_sum(c, DNRI_SUM_F32, f, n, 0)); /* all on their way at once */
    OK(c->ops->begin_sum(c, DNRI_SUM_F64, d, n, 0));
    OK(c->ops->begin_sum(c, DNRI_SUM_I64, w, n, 0));
    OK(c->ops->end_sums(c));
    for (int64_t i = 0; i < n; i++)
        assert_true(f[i] == (float)whole(c->world, i) && d[i] == whole(c->world, i) &&
                    w[i] == (int64_t)whole(c->world, i));
    assert_true(f[n] == 0 && d[n] == 0 && w[n] == 0);
    free(f);
    free(d);
    free(w);
}

/* In 16 bits: an element is off by at most N roundings of Σ|x| (of N summands and N − 1 sums), and what is not finite
 * stays so. */
static void sums_in_16_bits(dnr_comm *c, dnr_dtype type, double u, double least, int64_t n)
{
    double *mine = calloc((size_t)n, sizeof *mine), *exact = calloc((size_t)n, sizeof *exact);
    double *size = calloc((size_t)n, sizeof *size), *got = calloc((size_t)n, sizeof *got);
    uint16_t *wire = calloc((size_t)n, sizeof *wire);
    uint64_t seed = (uint64_t)c->rank + 1;
    double worst = 0;
    for (int64_t i = 0; i < n; i++) {
        mine[i] = ldexp(rig_normal(&seed), (int)(i % 24) - 12);
        exact[i] = mine[i];
        size[i] = fabs(mine[i]);
    }
    mine[7] = c->rank ? 1 : INFINITY;
    dnri_from_double(type, mine, wire, (size_t)n);
    OK(dnri_comm_sum(c, "test", dnri_sum_of(type), wire, n));
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, exact, n));
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, size, n));
    dnri_to_double(type, wire, got, (size_t)n);
    for (int64_t i = 0; i < n; i++) {
        double bound = c->world * (1.01 * u * size[i] + least);
        if (i != 7 && !(fabs(got[i] - exact[i]) <= bound))
            fail_msg("element %d: %g, not %g, of summands that make %g", (int)i, got[i], exact[i],
                     size[i]);
        worst = i != 7 && fabs(got[i] - exact[i]) / bound > worst ? fabs(got[i] - exact[i]) / bound
                                                                  : worst;
    }
    assert_true(isinf(got[7]));
    assert_true(worst > 0.2); /* the bound is not far off */
    free(mine);
    free(exact);
    free(size);
    free(got);
    free(wire);
}

static void case_collectives(void **state)
{
    dnr_comm *c = rank_open(20);
    sums_in_16_bits(c, DNR_F16, 0x1p-11, 0x1p-25, MANY);
    sums_in_16_bits(c, DNR_BF16, 0x1p-8, 0, MANY);
    if (getenv("DNR_RANK")) { /* else mpirun has started it */
        assert_int_equal(c->rank, atoi(getenv("DNR_RANK")));
        assert_int_equal(c->world, atoi(getenv("DNR_WORLD_SIZE")));
    }
    assert_int_equal(dnr_comm_local_rank(c), c->rank);
    assert_int_equal(c->local_world, c->world);
    assert_true(dnr_comm_launched(c) && !dnri_comm_alone(c));
    sums(c, 1);
    sums(c, 3);
    sums(c, MANY);
    double *v = calloc(MANY, sizeof *v);
    for (int i = 0; i < MANY; i++)
        v[i] = c->rank == 0 ? i : -1;
    OK(dnri_comm_broadcast(c, "test", v, MANY * sizeof *v));
    for (int i = 0; i < MANY; i++)
        assert_true(v[i] == i);
    double all[RANKS_MOST] = {0}, mine = c->rank + 0.5;
    OK(dnri_comm_allgather(c, "test", &mine, sizeof mine, all));
    for (int r = 0; r < RANKS_MOST; r++)
        assert_true(all[r] == (r < c->world ? r + 0.5 : 0));
    for (int i = 0; i < 600; i++) /* more than the queue holds */
        OK(c->ops->begin_sum(c, DNRI_SUM_F64, &v[i], 1, 0));
    OK(c->ops->end_sums(c));
    for (int i = 0; i < 600; i++)
        assert_true(v[i] == (double)i * c->world);
    free(v);
    dnr_comm_close(c, NULL);
}

/* Sums over groups, among others over all. */
static void case_groups(void **state)
{
    dnr_comm *c = rank_open(20);
    const int size = atoi(getenv("SIZE")), first = c->rank / size * size;
    if (c->ops->prepare)
        OK(c->ops->prepare(c, size));
    for (int64_t n = 1; n <= MANY; n = n * 1000 + 1) {
        float *f = calloc((size_t)n, sizeof *f), *all = calloc((size_t)n, sizeof *all);
        for (int64_t i = 0; i < n; i++)
            f[i] = all[i] = (float)part(c->rank, i);
        OK(c->ops->begin_sum(c, DNRI_SUM_F32, f, n, size));
        OK(c->ops->begin_sum(c, DNRI_SUM_F32, all, n, 0));
        OK(c->ops->end_sums(c));
        for (int64_t i = 0; i < n; i++) {
            double sum = 0;
            for (int r = first; r < first + size; r++)
                sum += part(r, i);
            assert_true(f[i] == (float)sum && all[i] == (float)whole(c->world, i));
        }
        free(f);
        free(all);
    }
    dnr_comm_close(c, NULL);
}

/* The order of summation is that of the ranks, whoever comes first: the same bits each time. */
static void case_same_bits(void **state)
{
    dnr_comm *c = rank_open(20);
    float first = 0, mine[] = {1e8f, 1, -1e8f, 1};
    for (int i = 0; i < 20; i++) {
        float v = mine[c->rank];
        usleep((useconds_t)(((c->rank + i) * 7919) % 5) * 1000);
        OK(dnri_comm_sum(c, "test", DNRI_SUM_F32, &v, 1));
        first = i ? first : v;
        assert_true(v == first);
    }
    assert_true(first == ((1e8f + 1) + -1e8f) + 1);
    dnr_comm_close(c, NULL);
}

static void case_compare(void **state)
{
    dnr_comm *c = rank_open(20);
    bool odd = getenv("ODD") && c->rank == atoi(getenv("ODD"));
    dnr_fact facts[] = {{"build", "1"}, {"cfg", odd ? "a = 1\nb = 3\nc" : "a = 1\nb = 2\nc"}};
    if (dnr_comm_compare(c, facts, 2) != DNR_OK)
        rank_die(c);
    dnr_comm_close(c, NULL);
}

static void case_mismatch(void **state)
{
    dnr_comm *c = rank_open(20);
    double v[8] = {0};
    if (dnri_comm_sum(c, "test", DNRI_SUM_F64, v, c->rank == 1 ? 8 : 4) != DNR_OK)
        rank_die(c);
    dnr_comm_close(c, NULL);
}

/* The rank VICTIM does HOW while the others wait for it in a sum. */
static void case_victim(void **state)
{
    dnr_comm *c = rank_open(atof(getenv("TIMEOUT")));
    const char *how = getenv("HOW");
    double v = 1;
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, &v, 1));
    dnri_comm_stage(c, 0, "step 7");
    usleep(300000); /* for a heartbeat to tell of it */
    if (c->rank == atoi(getenv("VICTIM"))) {
        if (!strcmp(how, "kill"))
            raise(SIGKILL);
        if (!strcmp(how, "stop"))
            raise(SIGSTOP);
        if (!strcmp(how, "hang"))
            sleep(60);
        if (!strcmp(how, "fail")) {
            DNR_FAIL(DNR_EDISK, "free some", "the disk is full");
            rank_die(c);
        }
        if (!strcmp(how, "slow")) {
            dnri_comm_stage(c, 20, "saving");
            sleep(4);
        }
    }
    if (dnri_comm_sum(c, "test", DNRI_SUM_F64, &v, 1) != DNR_OK) {
        sleep(3); /* the side thread ends the process */
        rank_die(c);
    }
    dnr_comm_close(c, NULL);
}

/* Without on_loss the waiting call itself fails. */
static void case_no_callback(void **state)
{
    dnr_comm *c;
    double v = 1;
    dnr_comm_opts o = {.timeout_s = 20};
    OK(dnr_comm_open(&o, &c));
    if (c->rank == 1)
        raise(SIGKILL);
    assert_int_equal(dnri_comm_sum(c, "test", DNRI_SUM_F64, &v, 1), DNR_EPEER);
    assert_non_null(strstr(dnr_last_error()->what, "rank 1 on "));
    assert_int_equal(dnri_comm_check(c), DNR_EPEER);
    dnr_comm_close(c, dnr_last_error());
}

/* Which GPU it works on is said by UNIT and the rank; a kind of device by KIND. */
static void case_attaches(void **state)
{
    dnr_comm *c = rank_open(20);
    dnr_device *dev;
    OK(dnr_device_open("ref", &dev));
    dnri_backend other = *dev->be;
    snprintf(dev->unit, sizeof dev->unit, "%s%d", getenv("UNIT"), c->rank % 2);
    if (getenv("KIND") && c->rank == 1) {
        other.name = getenv("KIND");
        dev->be = &other;
    }
    if (dnri_comm_attach(c, dev) != DNR_OK)
        rank_die(c);
    dnr_device_close(dev);
    dnr_comm_close(c, NULL);
}

static void case_open(void **state)
{
    dnr_comm *c = rank_open(atof(getenv("TIMEOUT")));
    dnr_comm_close(c, NULL);
}

/* It may have SOFT files open, and raise that to HARD. */
static void case_few_files(void **state)
{
    struct rlimit r = {(rlim_t)atoi(getenv("SOFT")), (rlim_t)atoi(getenv("HARD"))};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &r), 0);
    dnr_comm_close(rank_open(2), NULL);
}

/* Rank 0 is at work long after the others are done, and they after it. */
static void case_leave(void **state)
{
    dnr_comm *c = rank_open(3);
    usleep((useconds_t)(c->rank == atoi(getenv("LAST")) ? 1500000 : 0));
    dnr_comm_close(c, NULL);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(case_groups),      cmocka_unit_test(case_collectives),
    cmocka_unit_test(case_same_bits),   cmocka_unit_test(case_compare),
    cmocka_unit_test(case_mismatch),    cmocka_unit_test(case_victim),
    cmocka_unit_test(case_no_callback), cmocka_unit_test(case_open),
    cmocka_unit_test(case_leave),       cmocka_unit_test(case_attaches),
    cmocka_unit_test(case_few_files),
};

/* ================================================================ tests */

static const char *tcp(char buf[64])
{
    static int port;
    port = port ? port + 1 : 21000 + (int)getpid() % 9000;
    snprintf(buf, 64, "DNR_MASTER=127.0.0.1:%d", port);
    return buf;
}

static void collectives(void **state)
{
    char master[64];
    for (int world = 1; world <= 4; world++)
        ranks_pass(world, "case_collectives", NULL);
    ranks_pass(3, "case_collectives", tcp(master));
}

static void groups(void **state)
{
    ranks_pass(4, "case_groups", "SIZE=2");
    ranks_pass(6, "case_groups", "SIZE=3");
    ranks_pass(3, "case_groups", "SIZE=1");
    ranks_pass(2, "case_groups", "SIZE=2");
}

static void same_bits(void **state)
{
    ranks_pass(4, "case_same_bits", NULL);
}

static void compares(void **state)
{
    ranks r;
    ranks_pass(3, "case_compare", NULL);
    ranks_start(&r, 3, 3, "case_compare", "ODD=2");
    ranks_end(&r, 20);
    for (int k = 0; k < 3; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k, "rank 2 on ");
        ranks_say(&r, k, "differs in cfg: 'b = 3', rank 0 has 'b = 2'");
    }
    ranks_free(&r);
}

static void mismatched_sizes_do_not_hang(void **state)
{
    ranks r;
    ranks_start(&r, 3, 3, "case_mismatch", NULL);
    ranks_end(&r, 20);
    for (int k = 0; k < 3; k++)
        assert_int_equal(r.code[k], 5);
    ranks_say(&r, 0, "rank 1 on ");
    ranks_say(&r, 0, "64 bytes");
    ranks_say(&r, 0, "32 bytes");
    ranks_say(&r, 2, "rank 0 on "); /* which ended with that error */
    ranks_free(&r);
}

/* Runs case_victim; all but the victim must say `text` and its stage within `limit_s` and leave with 5. */
static void lose(int world, int victim, const char *how, double timeout, const char *text,
                 double limit_s)
{
    ranks r;
    char extra[128], name[32];
    snprintf(extra, sizeof extra, "VICTIM=%d HOW=%s TIMEOUT=%g", victim, how, timeout);
    snprintf(name, sizeof name, "rank %d on ", victim);
    ranks_start(&r, world, world, "case_victim", extra);
    pid_t pid = r.pid[victim];
    double end = dnri_clock() + limit_s + 5;
    bool stopped = !strcmp(how, "stop"), hung = !strcmp(how, "hang");
    if (stopped) { /* it never ends by itself */
        usleep((useconds_t)((limit_s + 1) * 1e6));
        kill(pid, SIGKILL);
    }
    ranks_end(&r, end - dnri_clock() > 1 ? end - dnri_clock() : 1);
    for (int k = 0; k < world; k++) {
        if (k == victim)
            continue;
        if (r.code[k] != 5 || r.took[k] > limit_s + 1.5)
            fail_msg("%s of %d: rank %d has code %d after %.1f s: %s", how, victim, k, r.code[k],
                     r.took[k], r.said[k]);
        ranks_say(&r, k, name);
        ranks_say(&r, k, text);
        ranks_say(&r, k, "step 7");
        ranks_say(&r, k, "remedy: ");
        assert_null(strstr(strstr(r.said[k], "remedy: ") + 1, "remedy: ")); /* said once */
    }
    if (hung) /* it lives and is told */
        assert_int_equal(r.code[victim], 5);
    ranks_free(&r);
}

static void a_killed_rank_is_named_at_once(void **state)
{
    lose(3, 1, "kill", 30, "is lost", 2);
    lose(3, 0, "kill", 30, "is lost", 2);
    lose(2, 1, "kill", 30, "is lost", 2);
}

static void a_stopped_rank_is_named_in_time(void **state)
{
    lose(3, 2, "stop", 3, "nothing was heard of it", 4);
    lose(3, 0, "stop", 3, "nothing was heard of it", 4);
}

static void a_hung_rank_is_named_in_time(void **state)
{
    lose(3, 1, "hang", 3, "has kept the others waiting", 4);
    lose(2, 0, "hang", 3, "has kept the others waiting", 4);
}

static void a_failed_rank_is_quoted(void **state)
{
    ranks r;
    ranks_start(&r, 3, 3, "case_victim", "VICTIM=1 HOW=fail TIMEOUT=30");
    ranks_end(&r, 20);
    assert_int_equal(r.code[1], 7);
    assert_int_equal(r.code[0], 5);
    assert_int_equal(r.code[2], 5);
    ranks_say(&r, 0, "ended with an error (the disk is full)");
    ranks_say(&r, 2, "ended with an error (the disk is full)");
    assert_true(r.took[0] < 4);
    ranks_free(&r);
}

static void a_slow_rank_is_waited_for(void **state)
{
    ranks_pass(3, "case_victim", "VICTIM=1 HOW=slow TIMEOUT=2");
    ranks_pass(2, "case_victim", "VICTIM=0 HOW=slow TIMEOUT=2");
}

static void a_loss_without_a_callback_fails_the_call(void **state)
{
    ranks r;
    ranks_start(&r, 3, 3, "case_no_callback", NULL);
    ranks_end(&r, 20);
    assert_true(r.code[0] == 0 && r.code[2] == 0);
    ranks_free(&r);
}

static void ranks_leave_in_any_order(void **state)
{
    ranks_pass(3, "case_leave", "LAST=0");
    ranks_pass(3, "case_leave", "LAST=2");
}

static void two_ranks_on_one_gpu_are_refused(void **state)
{
    ranks r;
    ranks_pass(2, "case_attaches", "UNIT=0000:3b:00.");
    ranks_start(&r, 3, 3, "case_attaches", "UNIT=0000:3b:00.");
    ranks_end(&r, 20);
    for (int k = 0; k < 3; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k, "ranks 0 and 2 both use the GPU at 0000:3b:00.0 of ");
    }
    ranks_free(&r);
    ranks_start(&r, 2, 2, "case_attaches", "UNIT=0000:3b:00. KIND=other");
    ranks_end(&r, 20);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k, "computes on other, rank 0 on ");
    }
    ranks_free(&r);
}

static void missing_ranks_are_named(void **state)
{
    ranks r;
    ranks_start(&r, 2, 4, "case_open", "TIMEOUT=2");
    ranks_end(&r, 10);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k, "missing 2, 3");
    }
    ranks_free(&r);
}

/* The default of 1024 does not do for two connections to each of many ranks. */
static void rank_0_asks_for_files(void **state)
{
    ranks r;
    ranks_pass(8, "case_few_files", "SOFT=16 HARD=400");
    ranks_start(&r, 2, 2, "case_few_files", "SOFT=64 HARD=200");
    ranks_end(&r, 10);
    ranks_say(&r, 0, "rank 0 of 2 ranks needs 260 open files, and may have 200");
    ranks_say(&r, 0, "ulimit -n");
    ranks_say(&r, 1, "rank 1 found no rank 0 within 2 s");
    ranks_free(&r);
}

static void no_rank_0(void **state)
{
    ranks r;
    char master[64], extra[128];
    snprintf(extra, sizeof extra, "%s TIMEOUT=1 DNR_RANK=1", tcp(master));
    ranks_start(&r, 1, 2, "case_open", extra);
    ranks_end(&r, 10);
    assert_int_equal(r.code[0], 5);
    ranks_say(&r, 0, "rank 1 found no rank 0 within 1 s");
    ranks_say(&r, 0, "refused");
    ranks_free(&r);
}

/* Two with the same number; one of another job; one that was told of another world. */
static void strangers_are_refused(void **state)
{
    ranks r;
    char master[64], extra[200];
    ranks one, two;
    ranks_start(&one, 2, 3, "case_open", "TIMEOUT=5 DNR_JOB=same");
    snprintf(extra, sizeof extra, "TIMEOUT=5 DNR_JOB=same DNR_RANK=1");
    usleep(300000);
    ranks_start(&two, 1, 3, "case_open", extra);
    ranks_end(&two, 10);
    ranks_end(&one, 10);
    assert_int_equal(two.code[0], 5);
    ranks_say(&two, 0, "there is a rank 1 already");
    ranks_say(&one, 0, "there is a rank 1 already");
    ranks_free(&one);
    ranks_free(&two);

    snprintf(extra, sizeof extra, "%s TIMEOUT=5 DNR_JOB=a", tcp(master));
    ranks_start(&one, 1, 2, "case_open", extra);
    snprintf(extra, sizeof extra, "%s TIMEOUT=5 DNR_JOB=b DNR_RANK=1", master);
    ranks_start(&two, 1, 2, "case_open", extra);
    ranks_end(&two, 10);
    ranks_end(&one, 10);
    ranks_say(&two, 0, "it belongs to job 'b', rank 0 to 'a'");
    assert_true(one.code[0] == 5 && two.code[0] == 5);
    ranks_free(&one);
    ranks_free(&two);

    /* something that speaks another language is sent away, what says nothing is not waited for, and the ranks meet */
    const char *address = tcp(master) + strlen("DNR_MASTER=");
    int fd[5] = {-1, -1, -1, -1, -1};
    snprintf(extra, sizeof extra, "%s TIMEOUT=8 DNR_JOB=c", master);
    ranks_start(&r, 1, 2, "case_open", extra);
    for (int k = 0; k < 5; k++)
        for (int i = 0; i < 100 && dnri_connect(address, 0, dnri_clock() + 1, &fd[k]); i++)
            usleep(10000);
    assert_true(fd[4] >= 0);
    char get[2000] = "GET / HTTP/1.1\r\n\r\n";
    OK(dnri_send(fd[0], get, sizeof get, dnri_clock() + 1));
    close(fd[0]);
    snprintf(extra, sizeof extra, "%s TIMEOUT=8 DNR_JOB=c DNR_RANK=1", master);
    ranks_start(&one, 1, 2, "case_open", extra);
    ranks_end(&one, 20);
    ranks_end(&r, 20);
    for (int k = 1; k < 5; k++)
        close(fd[k]);
    if (r.code[0] || one.code[0] || one.took[0] > 5)
        fail_msg("codes %d and %d after %.1f s: %s%s", r.code[0], one.code[0], one.took[0],
                 r.said[0], one.said[0]);
    ranks_free(&r);
    ranks_free(&one);
}

static void clear_launchers(void)
{
    static const char *const names[] = {"DNR_RANK",
                                        "DNR_WORLD_SIZE",
                                        "DNR_MASTER",
                                        "DNR_LOCAL_RANK",
                                        "DNR_LOCAL_SIZE",
                                        "DNR_JOB",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_STEP_NUM_NODES",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_NTASKS",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unsetenv(names[i]);
}

static void reads_launchers(void **state)
{
    dnri_launch l;
    char host[64];
    clear_launchers();
    OK(dnri_launch_read(&l));
    assert_true(!l.launcher && l.world == 1 && l.rank == 0);
    dnr_comm *c;
    OK(dnr_comm_open(NULL, &c));
    assert_true(!dnr_comm_launched(c) && dnr_comm_world(c) == 1 && dnri_comm_alone(c));
    double v = 3;
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, &v, 1));
    OK(dnr_comm_compare(c, NULL, 0));
    assert_true(v == 3);
    dnr_comm_close(c, NULL);

    setenv("SLURM_PROCID", "0", 1); /* a batch script of a job of 16 tasks is alone */
    setenv("SLURM_NTASKS", "16", 1);
    OK(dnri_launch_read(&l));
    assert_null(l.launcher);
    setenv("SLURM_STEP_NUM_TASKS", "16", 1);
    setenv("SLURM_PROCID", "9", 1);
    setenv("SLURM_LOCALID", "1", 1);
    setenv("SLURM_JOB_ID", "1234567", 1);
    setenv("SLURM_STEP_ID", "2", 1);
    setenv("SLURM_STEP_NUM_NODES", "2", 1);
    setenv("SLURM_STEP_NODELIST", "gpu[007-008]", 1);
    OK(dnri_launch_read(&l));
    assert_string_equal(l.launcher, "Slurm");
    assert_true(l.rank == 9 && l.world == 16 && l.local_rank == 1);
    assert_memory_equal(l.master, "gpu007:2", 8);
    assert_string_equal(l.job, "1234567.2");
    setenv("PMI_RANK", "9", 1); /* srun --mpi=pmi2 */
    setenv("PMI_SIZE", "16", 1);
    OK(dnri_launch_read(&l));
    assert_string_equal(l.launcher, "Slurm");
    assert_memory_equal(l.master, "gpu007:2", 8);
    setenv("PMI_RANK", "3", 1); /* an mpiexec that srun started */
    setenv("PMI_SIZE", "4", 1);
    OK(dnri_launch_read(&l));
    assert_string_equal(l.launcher, "MPICH");
    assert_true(l.rank == 3 && l.world == 4);
    setenv("OMPI_COMM_WORLD_RANK", "1", 1); /* mpirun within that job */
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    OK(dnri_launch_read(&l));
    assert_string_equal(l.launcher, "Open MPI");
    assert_true(l.rank == 1 && l.world == 2);
    clear_launchers();

    setenv("DNR_RANK", "0", 1);
    assert_int_equal(dnri_launch_read(&l), DNR_EUSAGE);
    setenv("DNR_WORLD_SIZE", "2x", 1);
    assert_int_equal(dnri_launch_read(&l), DNR_EUSAGE);
    setenv("DNR_WORLD_SIZE", "2", 1);
    setenv("DNR_RANK", "2", 1);
    assert_int_equal(dnri_launch_read(&l), DNR_EUSAGE);
    setenv("DNR_RANK", "1", 1);
    assert_int_equal(dnr_comm_open(NULL, &c), DNR_EUSAGE); /* where is rank 0? */
    assert_non_null(strstr(dnr_last_error()->remedy, "DNR_MASTER"));
    clear_launchers();

    assert_true(dnri_first_host("a,b", host, sizeof host) && !strcmp(host, "a"));
    assert_true(dnri_first_host("n[03-05,7]b,c", host, sizeof host) && !strcmp(host, "n03b"));
    assert_true(dnri_first_host("x-[1,4-9]", host, sizeof host) && !strcmp(host, "x-1"));
    assert_false(dnri_first_host("x[1", host, sizeof host));
    assert_false(dnri_first_host("", host, sizeof host));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_launchers),
        cmocka_unit_test(collectives),
        cmocka_unit_test(groups),
        cmocka_unit_test(same_bits),
        cmocka_unit_test(compares),
        cmocka_unit_test(mismatched_sizes_do_not_hang),
        cmocka_unit_test(a_killed_rank_is_named_at_once),
        cmocka_unit_test(a_stopped_rank_is_named_in_time),
        cmocka_unit_test(a_hung_rank_is_named_in_time),
        cmocka_unit_test(a_failed_rank_is_quoted),
        cmocka_unit_test(a_slow_rank_is_waited_for),
        cmocka_unit_test(a_loss_without_a_callback_fails_the_call),
        cmocka_unit_test(ranks_leave_in_any_order),
        cmocka_unit_test(two_ranks_on_one_gpu_are_refused),
        cmocka_unit_test(missing_ranks_are_named),
        cmocka_unit_test(rank_0_asks_for_files),
        cmocka_unit_test(no_rank_0),
        cmocka_unit_test(strangers_are_refused),
    };
    int code = dist_case(cases, sizeof cases / sizeof cases[0]);
    return code >= 0 ? code : cmocka_run_group_tests(tests, NULL, NULL);
}
