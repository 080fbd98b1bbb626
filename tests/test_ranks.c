/* test_ranks.c: the tool as several ranks, from outside: same results as one rank, and every way of losing one. */
#include "clirig.h"
#include "distrig.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A run of 32 pictures a step that gives the same bits each time, and saves every 13 steps. */
#define LONG                                                                                       \
    "train quickstart.cfg device=cpu model.name=resnet20 data.image=16 train.deterministic=true "  \
    "run.log_every=5 run.save_every=0.3 "
#define RUN  LONG "train.max_steps=60 "
#define HALF "train.batch=16 " /* two ranks make the quickstart's batch of 32 */

/* Ranks 0 … n − 1 on the tool with `args`, rank `odd` with `more` besides. */
static void start(ranks *r, int n, const char *args, int odd, const char *more, const char *extra)
{
    static char line[RANKS_MOST][3000];
    const char *command[RANKS_MOST];
    for (int k = 0; k < n; k++) {
        snprintf(line[k], sizeof line[k], "'%s' %s %s", tool, args, k == odd ? more : "");
        command[k] = line[k];
    }
    ranks_run(r, n, n, command, extra);
}

static void succeed(int n, const char *args)
{
    ranks r;
    start(&r, n, args, -1, "", NULL);
    ranks_end(&r, 120);
    for (int k = 0; k < n; k++)
        if (r.code[k] != 0)
            fail_msg("%s: rank %d of %d ended with %d: %s", args, k, n, r.code[k], r.said[k]);
    for (int k = 1; k < n; k++) /* rank 0 speaks */
        if (r.said[k][0])
            fail_msg("rank %d says: %s", k, r.said[k]);
    ranks_free(&r);
}

static void await(const char *file)
{
    for (int i = 0; access(file, F_OK) != 0; i++) {
        if (i == 3000)
            fail_msg("%s does not appear", file);
        usleep(20000);
    }
}

/* Weights of two runs agree to the bit. */
static void same_weights(const char *a, const char *b)
{
    sh("cmp %s/checkpoints/last/model.safetensors %s/checkpoints/last/model.safetensors", a, b);
}

/* Records agree but for times. */
static void same_records(const char *a, const char *b)
{
    json_t *x = metrics(a), *y = metrics(b);
    size_t i = 0;
    for (size_t k = 0; k < json_array_size(y); k++) {
        const json_t *want = json_array_get(y, k), *got;
        if (strcmp(text_of(want, "event"), "train") && strcmp(text_of(want, "event"), "eval"))
            continue;
        do { /* "stopped" and "resumed" are in one alone */
            got = json_array_get(x, i++);
            assert_non_null(got);
        } while (strcmp(text_of(got, "event"), "train") && strcmp(text_of(got, "event"), "eval"));
        assert_string_equal(text_of(got, "event"), text_of(want, "event"));
        assert_true(number_of(got, "step") == number_of(want, "step"));
        assert_true(number_of(got, "loss") == number_of(want, "loss"));
        assert_true(number_of(got, "top1") == number_of(want, "top1"));
    }
    json_decref(x);
    json_decref(y);
}

static const json_t *last_eval(const json_t *list)
{
    for (size_t i = json_array_size(list); i-- > 0;)
        if (!strcmp(text_of(json_array_get(list, i), "event"), "eval"))
            return json_array_get(list, i);
    fail_msg("no evaluation is recorded");
    return NULL;
}

/* The runs that others are compared with. */
static int set_up(void **state)
{
    if (cli_set_up(state))
        return -1;
    if (!have_cpu())
        return 0;
    succeed(2, RUN HALF "--out two");
    return 0;
}

static void two_ranks_equal_one_that_accumulates(void **state)
{
    NEEDS_CPU();
    assert_int_equal(dnnrun(RUN HALF "train.accumulate=2 --out one"), 0);
    json_t *one = metrics("one"), *two = metrics("two");
    assert_int_equal(json_array_size(one), json_array_size(two));
    for (size_t i = 0; i < json_array_size(one); i++) {
        const json_t *a = json_array_get(one, i), *b = json_array_get(two, i);
        if (strcmp(text_of(a, "event"), "train"))
            continue;
        assert_true(number_of(a, "step") == number_of(b, "step"));
        assert_true(number_of(a, "samples") == number_of(b, "samples"));
        assert_true(number_of(a, "lr") == number_of(b, "lr"));
        if (i < 3 && fabs(number_of(a, "loss") / number_of(b, "loss") - 1) > 1e-3)
            fail_msg("step %g: loss %g and %g", number_of(a, "step"), number_of(a, "loss"),
                     number_of(b, "loss"));
    }
    assert_true(number_of(last_eval(two), "images") == number_of(last_eval(one), "images"));
    json_decref(one);
    json_decref(two);
}

static void the_same_bits_again(void **state)
{
    NEEDS_CPU();
    succeed(2, RUN HALF "--out again");
    same_weights("again", "two");
    same_records("again", "two");
}

static void evaluates_on_any_number(void **state)
{
    NEEDS_CPU();
    ranks r;
    assert_int_equal(dnnrun("eval two --json"), 0);
    json_t *one = parse(out_text);
    start(&r, 3, "eval two --json", -1, "", NULL);
    ranks_end(&r, 60);
    json_t *three = parse(r.said[0]);
    assert_true(r.code[1] == 0 && !r.said[1][0] && !r.said[2][0]);
    assert_true(number_of(one, "images") == number_of(three, "images"));
    assert_true(number_of(one, "correct1") == number_of(three, "correct1"));
    assert_true(fabs(number_of(one, "loss") - number_of(three, "loss")) < 1e-5);
    json_decref(one);
    json_decref(three);
    ranks_free(&r);
}

/* The sums, where they stand: each bucket's behind its last gradient, on a lane of its own, and the update behind all. */
static void plans_its_sums(void **state)
{
    NEEDS_CPU();
    ranks r;
    start(&r, 2, "plan quickstart.cfg device=cpu model.name=resnet20 dist.bucket_mb=0.2 --json", -1,
          "", NULL);
    ranks_end(&r, 60);
    if (r.code[0] || r.code[1] || r.said[1][0])
        fail_msg("codes %d and %d; rank 1 says: %s", r.code[0], r.code[1], r.said[1]);
    json_t *j = parse(r.said[0]);
    size_t i, k, sums = 0, buckets = 0, last_backward = 0, wait = 0, first = 0;
    json_t *program, *op;
    json_array_foreach(json_object_get(j, "programs"), i, program)
    {
        if (strcmp(text_of(program, "program"), "last"))
            continue;
        buckets = json_array_size(json_object_get(program, "buckets"));
        json_array_foreach(json_object_get(program, "ops"), k, op)
        {
            const char *name = text_of(op, "op");
            if (!strcmp(name, "reduce") && strstr(text_of(op, "layer"), "bucket ")) {
                const json_t *b = json_array_get(json_object_get(program, "buckets"), sums++);
                assert_true(number_of(b, "after") + 1 == (double)k);
                assert_string_equal(text_of(op, "lane"), "comm");
                first = first ? first : k;
                assert_int_equal(wait, 0);
            } else if (!strcmp(name, "reduce.wait")) {
                wait = k;
            } else if (!strcmp(text_of(op, "phase"), "backward")) {
                last_backward = k;
            }
            assert_true(strcmp(text_of(op, "phase"), "update") || wait > 0);
        }
    }
    assert_true(buckets > 3 && sums == buckets && wait > last_backward);
    assert_true(first < last_backward * 3 / 4); /* it travels while backward goes on */
    json_decref(j);
    ranks_free(&r);
    start(&r, 2, "plan quickstart.cfg device=cpu --measure", -1, "", NULL);
    ranks_end(&r, 60);
    assert_true(r.code[0] == 2 && r.code[1] == 2);
    ranks_say(&r, 0, "start it without mpirun or srun");
    ranks_free(&r);
}

static void differing_ranks_are_named(void **state)
{
    NEEDS_CPU();
    ranks r;
    start(&r, 3, RUN HALF "--out differ", 2, "optim.momentum=0.8", NULL);
    ranks_end(&r, 60);
    for (int k = 0; k < 3; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k,
                  "differs in the cfg: 'optim.momentum = 0.8', rank 0 has 'optim.momentum = 0.9'");
    }
    ranks_free(&r);
    char digits[1200];
    snprintf(digits, sizeof digits, "data.train=%s/data/digits.tar:test", DNRI_SOURCE_DIR);
    start(&r, 2, RUN HALF "--out differ", 1, digits, NULL);
    ranks_end(&r, 60);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(r.code[k], 5);
        ranks_say(&r, k, "differs in the pictures of data.train");
    }
    ranks_free(&r);
    assert_true(access("differ", F_OK) != 0); /* nothing was begun */
    start(&r, 2, RUN HALF "--out differ", 1, "data.train=nowhere", NULL);
    ranks_end(&r, 60);
    assert_int_equal(r.code[1], 3);
    assert_int_equal(r.code[0], 5);
    ranks_say(&r, 0, "rank 1 on ");
    ranks_say(&r, 0, "nowhere");
    ranks_free(&r);
}

static void one_run_directory_for_one_run(void **state)
{
    NEEDS_CPU();
    ranks r;
    start(&r, 2, RUN HALF "--out two", -1, "", NULL);
    ranks_end(&r, 60);
    assert_int_equal(r.code[0], 2);
    assert_int_equal(r.code[1], 5);
    ranks_say(&r, 0, "already holds a run");
    ranks_say(&r, 1, "rank 0 on ");
    ranks_say(&r, 1, "already holds a run");
    ranks_free(&r);

    ranks first;
    start(&first, 2, LONG HALF "--out busy --resume auto", -1, "", NULL);
    await("busy/resolved.cfg");
    start(&r, 2, RUN HALF "--out busy --resume auto", -1, "", NULL);
    ranks_end(&r, 60);
    ranks_say(&r, 0, "another process is training in");
    assert_true(r.code[0] == 2 && r.code[1] == 5);
    ranks_free(&r);
    kill(first.pid[0], SIGKILL);
    ranks_end(&first, 30);
    assert_int_equal(first.code[1], 5);
    ranks_free(&first);
}

/* Rank `victim` gets `sig` in the middle; the other leaves with 5 within `limit_s`; then all go on to the end. */
static void strike(int victim, int sig, const char *out, const char *more, double limit_s)
{
    ranks r;
    char args[1000], file[64], name[32];
    snprintf(args, sizeof args, RUN HALF "%s --out %s --resume auto", more, out);
    snprintf(file, sizeof file, "%s/checkpoints/last/model.safetensors", out);
    snprintf(name, sizeof name, "rank %d on ", victim);
    start(&r, 2, args, -1, "", NULL);
    await(file);
    double then = 0;
    pid_t pid = r.pid[victim];
    kill(pid, sig);
    if (sig == SIGSTOP) {
        usleep((useconds_t)(limit_s * 1e6));
        kill(pid, SIGKILL);
        then = limit_s;
    }
    ranks_end(&r, limit_s - then + 2);
    int other = 1 - victim;
    if (r.code[other] != 5)
        fail_msg("rank %d has code %d: %s", other, r.code[other], r.said[other]);
    ranks_say(&r, other, name);
    ranks_say(&r, other, "it was at: ");
    ranks_free(&r);
    succeed(2, args);
    same_weights(out, "two");
    same_records(out, "two");
}

static void a_killed_rank_ends_the_run_and_loses_nothing(void **state)
{
    NEEDS_CPU();
    strike(1, SIGKILL, "kill1", "", 3);
    strike(0, SIGKILL, "kill0", "", 3);
    strike(1, SIGSEGV, "segv1", "", 3);
}

static void a_stopped_rank_ends_the_run_in_time(void **state)
{
    NEEDS_CPU();
    strike(1, SIGSTOP, "stop1", "dist.timeout=3", 4);
    strike(0, SIGSTOP, "stop0", "dist.timeout=3", 4);
}

/* A signal to one rank saves and ends all with 75 after the same step. */
static void a_signal_to_any_rank_stops_all(void **state)
{
    NEEDS_CPU();
    for (int k = 0; k < 2; k++) {
        ranks r;
        char args[1000];
        snprintf(args, sizeof args, RUN HALF "--out usr%d --resume auto", k);
        start(&r, 2, args, -1, "", NULL);
        snprintf(args, sizeof args, "usr%d/checkpoints/last/model.safetensors", k);
        await(args);
        kill(r.pid[k], SIGUSR1);
        ranks_end(&r, 60);
        if (r.code[0] != 75 || r.code[1] != 75)
            fail_msg("codes %d and %d: %s%s", r.code[0], r.code[1], r.said[0], r.said[1]);
        ranks_say(&r, 0, "stopped after step ");
        ranks_free(&r);
        snprintf(args, sizeof args, RUN HALF "--out usr%d --resume auto", k);
        succeed(2, args);
        snprintf(args, sizeof args, "usr%d", k);
        same_weights(args, "two");
        same_records(args, "two");
    }
}

static void an_unwritable_run_directory_is_everybodys_end(void **state)
{
    NEEDS_CPU();
    ranks r;
    sh("touch file");
    start(&r, 2, RUN HALF "--out file/run", -1, "", NULL);
    ranks_end(&r, 60);
    assert_int_equal(r.code[0], 7);
    assert_int_equal(r.code[1], 5);
    ranks_say(&r, 1, "file/run");
    ranks_free(&r);
}

static void goes_on_with_another_number_of_ranks(void **state)
{
    NEEDS_CPU();
    succeed(2, LONG HALF "train.max_steps=20 --out more");
    assert_int_equal(dnnrun(LONG HALF "train.max_steps=40 --out more --resume auto"), 0);
    has(out_text, "train.accumulate=2, so that the global batch stays 32");
    succeed(4, RUN "train.batch=8 --allow-changes --out more --resume auto");
    json_t *a = metrics("more"), *b = metrics("two");
    size_t i = 0, n = 0;
    for (size_t k = 0; k < json_array_size(b); k++) {
        const json_t *want = json_array_get(b, k), *got;
        if (strcmp(text_of(want, "event"), "train"))
            continue;
        do {
            got = json_array_get(a, i++);
            assert_non_null(got);
        } while (strcmp(text_of(got, "event"), "train"));
        assert_true(number_of(got, "samples") == number_of(want, "samples"));
        assert_true(number_of(got, "lr") == number_of(want, "lr"));
        n++;
    }
    assert_true(n == 12);
    json_decref(a);
    json_decref(b);
    ranks r; /* 32 is no multiple of 3 */
    start(&r, 3, RUN HALF "train.epochs=41 --out more --resume auto", -1, "", NULL);
    ranks_end(&r, 60);
    ranks_say(&r, 0, "global batch of 32");
    assert_int_equal(r.code[0], 2);
    ranks_say(&r, 0, "a number of ranks that divides 32");
    ranks_free(&r);
}

static void all_ranks_may_speak(void **state)
{
    NEEDS_CPU();
    ranks r;
    start(&r, 2, LONG HALF "train.max_steps=5 --log-all-ranks --out loud", -1, "", NULL);
    ranks_end(&r, 60);
    ranks_say(&r, 0, "[rank 0] ranks   2 ranks on 1 host, started by DNR_RANK, tcp over local");
    ranks_say(&r, 1, "[rank 1] trained 5 steps");
    ranks_free(&r);
}

static int kills;

static double uniform(double from, double to)
{
    return from + (to - from) * (rand() / (RAND_MAX + 1.0));
}

/* One of two ranks is killed at a random moment, from before they meet on, again and again; whenever a run comes to its end
 * it holds the undisturbed one's bits, and another begins. */
static void killed_at_random(void **state)
{
    NEEDS_CPU();
    const unsigned seed = (unsigned)time(NULL);
    int killed = 0, runs = 0;
    srand(seed);
    print_message("%d kills, seed %u\n", kills, seed);
    while (killed < kills || runs == 0) {
        ranks r;
        const int victim = rand() % 2;
        start(&r, 2, RUN HALF "dist.timeout=5 --out storm --resume auto", -1, "", NULL);
        /* where enough were killed, this one may go on to the end */
        usleep((useconds_t)(1e6 * (killed < kills ? uniform(0, 2.5) : 0)));
        if (killed < kills)
            kill(r.pid[victim], SIGKILL);
        ranks_end(&r, killed < kills ? 15 : 120);
        const int code = r.code[1 - victim];
        if (r.code[victim] == 128 + SIGKILL) {
            killed++;
            /* it may have been done with all but its farewell */
            if (code != 5 && code != 0)
                fail_msg("kill %d: rank %d ended with %d: %s", killed, 1 - victim, code,
                         r.said[1 - victim]);
        } else if (r.code[victim] || code) {
            fail_msg("after %d kills: codes %d and %d: %s%s", killed, r.code[0], r.code[1],
                     r.said[0], r.said[1]);
        }
        if (r.code[0] == 0 && r.code[1] == 0) {
            same_weights("storm", "two");
            same_records("storm", "two");
            sh("rm -rf storm");
            runs++;
        }
        ranks_free(&r);
    }
    print_message("%d kills, %d whole runs of the same bits\n", killed, runs);
}

/* test_ranks [KILLS]: that many random kills and nothing else. */
int main(int argc, char **argv)
{
    const struct CMUnitTest storm[] = {cmocka_unit_test(killed_at_random)};
    kills = argc > 1 ? atoi(argv[1]) : 0;
    if (kills > 0)
        return cmocka_run_group_tests(storm, set_up, cli_tear_down);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_equal_one_that_accumulates),
        cmocka_unit_test(the_same_bits_again),
        cmocka_unit_test(evaluates_on_any_number),
        cmocka_unit_test(plans_its_sums),
        cmocka_unit_test(differing_ranks_are_named),
        cmocka_unit_test(one_run_directory_for_one_run),
        cmocka_unit_test(a_killed_rank_ends_the_run_and_loses_nothing),
        cmocka_unit_test(a_stopped_rank_ends_the_run_in_time),
        cmocka_unit_test(a_signal_to_any_rank_stops_all),
        cmocka_unit_test(an_unwritable_run_directory_is_everybodys_end),
        cmocka_unit_test(goes_on_with_another_number_of_ranks),
        cmocka_unit_test(all_ranks_may_speak),
    };
    return cmocka_run_group_tests(tests, set_up, cli_tear_down);
}
