/* test_faults.c: each allocation, and each call that writes to the disk, fails in turn: an error each time, never a
 * crash, a leak or a lost checkpoint.
 *
 *     test_faults          every call on ref; some of them on the CPU back end, which plans more slowly
 *     test_faults --long   every call on both */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "faults.h"
#include "trainrig.h"

static bool all;
static char folder[256];

/* In memory where that can be: thousands of syncs would take long. */
static void fresh_folder(void)
{
    const char *tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dnnrun-faults-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
}

static const char *in(const char *name)
{
    static char path[2][512];
    static int k;
    k = !k;
    snprintf(path[k], sizeof path[k], "%s/%s", folder, name);
    return path[k];
}

static dnr_trainer_opts options(void)
{
    dnr_trainer_opts o = tr_options(NULL);
    o.precision = DNR_PRECISION_AUTO;
    o.ema = 0.9;
    o.accumulate = 2;
    o.optim.clip_norm = 1;
    return o;
}

/* ---- the disk */

/* Entries but "step-…", and the number of those. */
static int rubbish(int *whole)
{
    int other = 0;
    DIR *d = opendir(folder);
    *whole = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (!strncmp(e->d_name, "step-", 5))
            ++*whole;
        else
            other += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    closedir(d);
    return other;
}

/* Saves over what is there, with the n-th call failing. `over`: a checkpoint of that name exists. */
static bool save_with_fault(training *r, bool over, long n, int err, bool sticky)
{
    dnr_checkpoint *c;
    int whole;
    const char *name = in(over ? "step-000000001" : "step-000000002");
    const int64_t before = 1, now = r->t->steps;
    faults_arm(FAULTS_FS, n, err, sticky);
    dnr_status st = dnr_checkpoint_save(r->t, name, NULL);
    long seen = faults_disarm();
    if (n > seen) {
        assert_int_equal(st, DNR_OK);
        return false;
    }
    if (st != DNR_EDISK)
        fail_msg("call %ld of %ld failed (%s): status %d", n, seen, strerror(err), (int)st);
    tr_says(strerror(err));
    tr_says("step-00000000");
    assert_int_equal(rubbish(&whole), 0);
    /* what was there is whole; what is new is whole or not there */
    OK(dnr_checkpoint_newest(folder, &c));
    assert_non_null(c);
    int64_t steps = dnr_checkpoint_steps(c);
    dnr_checkpoint_close(c);
    assert_true(steps == before || steps == now);
    assert_int_equal(whole, over || steps == before ? 1 : 2);
    OK(dnr_checkpoint_open(in("step-000000001"), &c));
    dnr_checkpoint_close(c);
    return true;
}

static void every_write_fails_in_turn(void **state)
{
    static const int errors[] = {ENOSPC, EIO, EROFS, EDQUOT};
    dnr_trainer_opts o = options();
    o.batch = 2;
    training r = tr_open(NULL, &o);
    int tried = 0;
    for (int kind = 0; kind < 8; kind++) {
        bool over = kind & 1, sticky = kind & 2;
        for (long n = 1;; n += all ? 1 : 3) {
            fresh_folder();
            OK(dnri_trainer_go_on(r.t, &(dnri_state){.steps = 1, .loss_scale = 1}, 4));
            OK(dnr_checkpoint_save(r.t, in("step-000000001"), NULL));
            OK(dnri_trainer_go_on(r.t, &(dnri_state){.steps = 2, .loss_scale = 1}, 8));
            bool more = save_with_fault(&r, over, n, errors[(n + kind / 4) % 4], sticky);
            remove_folder();
            tried++;
            if (!more)
                break;
        }
        if (kind == 3 && !all)
            break;
    }
    assert_true(tried > 4 * 15); /* files, folders, syncs, renames */
    tr_close(&r);
}

/* ---- memory */

typedef struct scene {
    dnr_device *dev;
    dnr_trainer_opts o;
    void *slots[2];
    bool checkpoint;
} scene;

/* From nothing to a step, and where asked for to a checkpoint and back. */
static dnr_status run(const scene *s)
{
    static const char *const notes[] = {"key", "text", NULL};
    dnr_trainer *t = NULL;
    dnr_checkpoint *c = NULL;
    dnr_metrics m;
    dnr_status st;
    DNR_GOTO(st, dnr_trainer_create(s->dev, &s->o, &t));
    DNR_GOTO(st, dnri_trainer_step_on(t, s->slots, &m));
    if (!s->checkpoint)
        goto out;
    DNR_GOTO(st, dnr_checkpoint_save(t, in("step-000000001"), notes));
    DNR_GOTO(st, dnr_checkpoint_newest(folder, &c));
    if (!c) { /* a save that failed says so, and so does a search */
        st = DNR_FAIL(DNR_EFAIL, "look into dnr_checkpoint_newest", "the checkpoint is not found");
        goto out;
    }
    DNR_GOTO(st, dnr_checkpoint_restore(c, t));
    DNR_GOTO(st, dnr_checkpoint_prune(folder, 1, "step-000000001"));
    st = dnri_trainer_step_on(t, s->slots, &m);
out:
    dnr_checkpoint_close(c);
    dnr_trainer_destroy(t);
    return st;
}

/* Returns how many allocations there are. */
static long fail_each(const scene *s, long stride, bool sticky)
{
    for (long n = 1;; n += stride) {
        faults_forget();
        faults_arm(FAULTS_MEMORY, n, ENOMEM, sticky);
        dnr_status st = run(s);
        long seen = faults_disarm(), left = faults_live();
        if (left != 0)
            fail_msg("allocation %ld failed: %ld others were never freed (status %d: %s)", n, left,
                     (int)st, dnr_last_error()->what);
        if (n > seen) {
            if (st != DNR_OK)
                fail_msg("nothing failed, but: %s", dnr_last_error()->what);
            return seen;
        }
        if (st != DNR_EMEM && !(st == DNR_OK && faults_of_libc()))
            fail_msg("allocation %ld of %ld failed: status %d (%s)", n, seen, (int)st,
                     st == DNR_OK ? "none" : dnr_last_error()->what);
    }
}

static void allocations_on(const char *device, bool checkpoint, long stride)
{
    scene s = {.o = options(), .checkpoint = checkpoint};
    if (dnr_device_open(device, &s.dev) != DNR_OK) {
        print_message("skipped: %s\n", dnr_last_error()->what);
        skip();
    }
    s.o.batch = 2;
    for (int i = 0; i < 2; i++)
        s.slots[i] = tr_slot(2, 2 * i, 2);
    fresh_folder();
    OK(run(&s)); /* what is taken once for ever, as by OpenMP, is taken here */
    long n = fail_each(&s, stride, false);
    print_message("%s: %ld allocations, every %ld. of them failed in turn\n", device, n, stride);
    assert_true(n > 200);
    fail_each(&s, 7 * stride, true);
    remove_folder();
    free(s.slots[0]);
    free(s.slots[1]);
    dnr_device_close(s.dev);
}

static void every_allocation_of_a_first_step_fails_in_turn(void **state)
{
    allocations_on("ref", false, 1);
}

static void allocations_of_a_checkpoint_fail_in_turn(void **state)
{
    allocations_on("ref", true, all ? 1 : 97);
}

/* A whole checkpoint is not passed over for want of memory. */
static void allocations_of_a_search_fail_in_turn(void **state)
{
    dnr_trainer_opts o = options();
    dnr_checkpoint *c;
    long seen = 0;
    o.batch = 2;
    training r = tr_open(NULL, &o);
    fresh_folder();
    OK(dnr_checkpoint_save(r.t, in("step-000000001"), NULL));
    for (long n = 1; n - 1 <= seen; n++) { /* the last time none fails */
        faults_forget();
        faults_arm(FAULTS_MEMORY, n, ENOMEM, false);
        dnr_status st = dnr_checkpoint_newest(folder, &c);
        seen = faults_disarm();
        if (n > seen ? st != DNR_OK || !c : st != DNR_EMEM && !(c && faults_of_libc()))
            fail_msg("allocation %ld of %ld failed: status %d, %s", n, seen, (int)st,
                     c ? "opened" : "not found");
        dnr_checkpoint_close(c);
        assert_int_equal(faults_live(), 0);
    }
    assert_true(seen > 20);
    remove_folder();
    tr_close(&r);
}

static void allocations_on_the_cpu_fail_in_turn(void **state)
{
    allocations_on("cpu", false, all ? 1 : 5);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_write_fails_in_turn),
        cmocka_unit_test(every_allocation_of_a_first_step_fails_in_turn),
        cmocka_unit_test(allocations_of_a_checkpoint_fail_in_turn),
        cmocka_unit_test(allocations_of_a_search_fail_in_turn),
        cmocka_unit_test(allocations_on_the_cpu_fail_in_turn),
    };
    all = argc > 1 && !strcmp(argv[1], "--long");
    return tr_main(1, argv, tests, sizeof tests / sizeof tests[0]);
}
