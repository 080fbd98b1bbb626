/* test_dist.c: trainers of several ranks against one trainer, on ref in fp64 (trainrig.h draws the pictures).
 *
 *     test_dist                     on ref
 *     test_dist DEVICE PRECISION    exit code 77: the machine has no such device or precision */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "distrig.h"
#include "trainrig.h"

#include "../dist/socket.h"
#include "../dist/standin.h"
#include "../runtime/reduce.h"

enum { STEPS = 5 };

/* ================================================================ in a rank */

static int env_int(const char *name, int otherwise)
{
    const char *v = getenv(name);
    return v ? atoi(v) : otherwise;
}

/* A trainer in the world of `c`; batches of four pictures. */
static dnr_trainer_opts rank_options(void **state, dnr_comm *c)
{
    dnr_trainer_opts o = tr_options(state);
    o.batch = 4;
    o.accumulate = env_int("ACCUMULATE", 1);
    o.bucket_mb = 0.02; /* several buckets even here */
    o.reduce = (dnr_reduce)env_int("REDUCE", DNR_REDUCE_F32);
    o.label_smoothing = 0.1;
    o.comm = c;
    return o;
}

/* Steps of consecutive pictures, dealt to the ranks as the loader deals them. */
static dnr_metrics rank_train(training *r, int first, int steps)
{
    dnr_metrics m = {0};
    int batch = (int)r->t->o.batch, n = (int)r->t->o.accumulate;
    const dnr_comm *c = r->t->comm;
    void *slots[8] = {0};
    for (int s = 0; s < steps; s++) {
        for (int i = 0; i < n; i++, first += batch * c->world)
            slots[i] = tr_slot(batch, first + c->rank * batch, batch);
        OK(dnri_trainer_step_on(r->t, slots, &m));
        for (int i = 0; i < n; i++)
            free(slots[i]);
    }
    return m;
}

/* All ranks hold the same bits of a slab. */
static void same_everywhere(training *r, dnri_role role)
{
    int64_t n;
    double *mine = tr_slab(r, role, &n), *theirs = malloc((size_t)n * sizeof *theirs);
    memcpy(theirs, mine, (size_t)n * sizeof *mine);
    OK(dnri_comm_broadcast(r->t->comm, "test", theirs, (size_t)n * sizeof *theirs));
    assert_memory_equal(mine, theirs, (size_t)n * sizeof *mine);
    free(mine);
    free(theirs);
}

/* N ranks of b pictures are one rank that accumulates N micro-batches of b: each has its own statistics, and all
 * gradients are averaged. */
static void case_equals_accumulation(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training many = tr_open(state, &o);
    o.comm = NULL;
    o.accumulate *= c->world;
    training one = tr_open(state, &o);
    for (int s = 0; s < STEPS; s++) {
        int pictures = (int)(o.batch * o.accumulate);
        dnr_metrics m = rank_train(&many, s * pictures, 1), w = tr_train(&one, s * pictures, 1);
        assert_true(m.step == s + 1 && m.samples == w.samples && m.lr == w.lr && !m.stop);
        assert_true(fabs(m.loss - w.loss) < tr_rounding(&one) * w.loss);
        assert_true(fabs(m.top1 - w.top1) < 1e-12 && fabs(m.top5 - w.top5) < 1e-12);
    }
    double bound = tr_rounding(&one) < 1e-6 ? 1e-12 : tr_rounding(&one);
    assert_true(tr_distance(&many, &one, DNRI_MASTER) < bound);
    assert_true(tr_distance(&many, &one, DNRI_MOMENTUM) < 10 * bound);
    same_everywhere(&many, DNRI_MASTER);
    same_everywhere(&many, DNRI_MOMENTUM);
    tr_close(&many);
    tr_close(&one);
    dnr_comm_close(c, NULL);
}

/* With batch norm over all ranks, N ranks of b pictures are one of N·b: the large batch's weights, statistics and loss. In
 * groups of GROUP they are one of GROUP·b that accumulates N/GROUP micro-batches. */
static void case_equals_large_batch(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    const int group = env_int("GROUP", 0);
    o.model.sync_bn = true;
    o.model.sync_bn_group = group;
    o.model.name = getenv("MODEL") ? getenv("MODEL") : o.model.name;
    o.recompute = (dnr_recompute)env_int("RECOMPUTE", DNR_RECOMPUTE_NONE);
    training many = tr_open(state, &o);
    o.comm = NULL;
    o.recompute = DNR_RECOMPUTE_NONE;
    o.batch *= group ? group : c->world;
    o.accumulate *= group ? c->world / group : 1;
    training one = tr_open(state, &o);
    double bound = tr_rounding(&one) < 1e-6 ? 1e-9 : tr_rounding(&one);
    for (int s = 0; s < STEPS; s++) {
        int pictures = (int)(o.batch * o.accumulate);
        dnr_metrics m = rank_train(&many, s * pictures, 1), w = tr_train(&one, s * pictures, 1);
        if (!(fabs(m.loss - w.loss) < bound * w.loss && fabs(m.top1 - w.top1) < 1e-12))
            fail_msg("step %d: loss %.15g, not %.15g; top-1 %g, not %g", s + 1, m.loss, w.loss,
                     m.top1, w.top1);
    }
    double e[] = {tr_distance(&many, &one, DNRI_MASTER), tr_distance(&many, &one, DNRI_BUFFER)};
    bool split =
        o.accumulate > 1; /* running statistics are of one group, or of one after the other */
    if (!(e[0] < bound && (split || e[1] < bound)))
        fail_msg("weights differ by %.1e, statistics by %.1e", e[0], e[1]);
    same_everywhere(&many, DNRI_MASTER);
    if (!split)
        same_everywhere(&many, DNRI_BUFFER);
    tr_close(&many);
    tr_close(&one);
    dnr_comm_close(c, NULL);
}

/* A rank's own gradients of its batch, alone. */
static double *own_gradients(void **state, const dnr_trainer_opts *like, const dnr_comm *c,
                             int64_t *n)
{
    dnr_trainer_opts o = *like;
    o.comm = NULL;
    o.reduce = DNR_REDUCE_F32;
    training r = tr_open_with(
        state, &o, &(dnri_trainer_extra){.keep = true, .scaled = like->reduce == DNR_REDUCE_F16});
    tr_train(&r, c->rank * (int)o.batch, 1);
    double *g = tr_slab(&r, DNRI_GRAD, n);
    tr_close(&r);
    return g;
}

/* Gradients that travel in 16 bits: each element within N roundings of what the ranks computed, added in double. */
static void case_rounds_gradients(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    bool half = o.reduce == DNR_REDUCE_F16;
    training r = tr_open_with(state, &o, &(dnri_trainer_extra){.keep = true, .scaled = half});
    rank_train(&r, 0, 1);
    int64_t n, m;
    double *got = tr_slab(&r, DNRI_GRAD, &n), *exact = own_gradients(state, &o, c, &m);
    assert_int_equal(n, m);
    double *size = malloc((size_t)n * sizeof *size);
    for (int64_t i = 0; i < n; i++) {
        exact[i] /= c->world;
        size[i] = fabs(exact[i]);
    }
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, exact, n));
    OK(dnri_comm_sum(c, "test", DNRI_SUM_F64, size, n));
    const double u = half ? 0x1p-11 : 0x1p-8, least = half ? 0x1p-25 : 0;
    for (int64_t i = 0; i < n; i++) {
        double bound = c->world * (1.01 * u * size[i] + least) + tr_rounding(&r) * size[i];
        if (!(fabs(got[i] - exact[i]) <= bound))
            fail_msg("element %d of %d: %g, not %g", (int)i, (int)n, got[i], exact[i]);
    }
    double e = rig_error(got, exact, n);
    if (!(e < 2 * u && e > u / 100))
        fail_msg("all in all gradients differ by %.1e", e);
    same_everywhere(&r, DNRI_GRAD);
    same_everywhere(&r, DNRI_MASTER);
    free(got);
    free(exact);
    free(size);
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

static void case_refuses_groups(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    dnr_device *dev;
    dnr_trainer *t;
    o.model.sync_bn = true;
    o.model.sync_bn_group = 2;
    OK(tr_device(state, &dev));
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);
    tr_says("model.sync_bn_group is 2, and there are 3 ranks");
    dnr_device_close(dev);
    dnr_comm_close(c, NULL);
}

/* A transport that takes the time of many ranks: the step asks for each sum once, in the order of the plan, before it waits
 * for any, waits until the last is due, and computes what it does alone. On a GPU sums are captured, and not noted. */
static void case_stands_in(void **state)
{
    dnr_comm *c;
    dnr_comm_opts co = {.timeout_s = 30, .transport = "standin:8:0.05:500"};
    OK(dnr_comm_open(&co, &c));
    dnri_standin *s = c->state;
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open(state, &o);
    o.comm = NULL;
    training alone = tr_open(state, &o);
    const dnr_graph *g = dnri_plan_graph(r.t->program[DNRI_LAST].plan);
    for (int step = 0; step < 2; step++) {
        s->n = s->waits = 0;
        rank_train(&r, step * 4, 1);
        const double now = dnri_clock();
        tr_train(&alone, step * 4, 1);
        if (r.dev->be->queue)
            continue;
        int64_t n = 0;
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            const dnri_op *op = dnri_graph_op_c(g, i);
            const dnri_reduce_attr *a = (const dnri_reduce_attr *)op->attr;
            if (op->def != &dnri_def_reduce)
                continue;
            assert_true(n < s->n);
            assert_int_equal(s->note[n].bytes, a->count * (int64_t)dnri_sum_size((dnri_sum)a->sum));
            if (n > 0) {
                assert_true(s->note[n].begun >= s->note[n - 1].begun);
                assert_true(s->note[n].done >=
                            s->note[n - 1].done + dnri_standin_takes(s, s->note[n].bytes) - 1e-9);
            }
            n++;
        }
        assert_true(n == s->n && n > 5);
        assert_int_equal(s->waits, 1); /* behind all of them */
        assert_true(now >= s->note[n - 1].done);
    }
    if (!o.reduce) /* which rounds */
        assert_true(tr_distance(&r, &alone, DNRI_MASTER) == 0);
    tr_close(&r);
    tr_close(&alone);
    dnr_comm_close(c, NULL);
}

static void case_refuses_standins(void **state)
{
    static const char *const bad[] = {"standin:",      "standin:8",      "standin:0:1:1",
                                      "standin:8:0:1", "standin:8:1:-1", "standin:8:1:1x",
                                      "standing"};
    dnr_comm *c;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        dnr_comm_opts o = {.timeout_s = 30, .transport = bad[i]};
        assert_int_equal(dnr_comm_open(&o, &c), DNR_EUSAGE);
    }
}

/* fp16 is for scaled losses. */
static void case_refuses_fp16(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    dnr_device *dev;
    dnr_trainer *t;
    o.reduce = DNR_REDUCE_F16;
    OK(tr_device(state, &dev));
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);
    tr_says("the loss is not scaled");
    dnr_device_close(dev);
    dnr_comm_close(c, NULL);
}

static void count_contest(void *user, const dnr_tune_contest *c)
{
    *(int *)user += c->n > 0;
}

/* Rank 0 times implementations, the others take them: the same ones, with no contest of their own. */
static void case_tunes(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    dnr_device *dev;
    int contests = 0;
    uint64_t mine = 0, first;
    o.deterministic = false;
    o.benchmark = true;
    o.model = (dnr_model_opts){.name = "resnet18", .classes = 10, .stem = "cifar"};
    o.image = 32; /* worth timing */
    OK(tr_device(state, &dev));
    bool cpu = strcmp(dev->be->name, "cpu") == 0; /* CUDA times anew what is to be told */
    dnri_trainer_extra extra = {
        .planned = true, .tried = cpu ? count_contest : NULL, .tried_user = &contests};
    for (int times = 0; times < 2; times++) { /* a second trainer on the device finds all chosen */
        dnr_trainer *t;
        OK(dnri_trainer_create(dev, &o, &extra, &t));
        for (int i = 0; i < DNRI_PROGRAMS; i++)
            if (t->program[i].plan)
                mine = dnri_plan_choices(t->program[i].plan, mine);
        dnr_trainer_destroy(t);
    }
    first = mine;
    OK(dnri_comm_broadcast(c, "test", &first, sizeof first));
    assert_true(mine == first);
    if (cpu)
        assert_true(c->rank > 0 ? contests == 0 : contests > 3);
    dnr_device_close(dev);
    dnr_comm_close(c, NULL);
}

/* The ranks' programs run the reductions where they were planned: each bucket once, in order, in `last` alone, the
 * first long before the end of backward, and the wait before the update. */
static void case_buckets(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open(state, &o);
    for (int i = 0; i < DNRI_PROGRAMS; i++) {
        if (!r.t->program[i].plan)
            continue;
        const dnr_graph *g = dnri_plan_graph(r.t->program[i].plan);
        int64_t next = 0, at = 0, metrics = 0;
        int waits = 0, last_reduce = -1, first_bucket = -1, folds = 0;
        for (int k = 0; k < dnri_graph_ops(g); k++) {
            const dnri_op *op = dnri_graph_op_c(g, k);
            folds += strcmp(op->def->name, "grad.fold") == 0;
            if (strcmp(op->def->name, "reduce.wait") == 0) {
                waits++;
                assert_true(k > last_reduce && op->phase == DNRI_UPDATE);
            }
            if (strcmp(op->def->name, "reduce") != 0)
                continue;
            const dnri_reduce_attr *a = (const dnri_reduce_attr *)op->attr;
            last_reduce = k;
            if (a->bucket < 0) {
                metrics++;
                continue;
            }
            first_bucket = first_bucket < 0 ? k : first_bucket;
            assert_true(a->bucket == next++);
            assert_true(o.reduce ? a->offset == 0 && dnri_sum_size((dnri_sum)a->sum) == 2
                                 : a->offset == at);
            at += a->count * (int64_t)dnri_dtype_size(dnri_graph_numerics(g)->master);
        }
        bool last = i == DNRI_LAST;
        assert_int_equal(waits, last ? 1 : 0);
        assert_int_equal(metrics, last ? 3 : 0);
        assert_true(last ? next >= 3 : next == 0);
        if (last) {
            assert_true(at == (int64_t)dnri_store_bytes(r.t->store, DNRI_GRAD));
            assert_true(first_bucket < dnri_graph_ops(g) * 2 / 3);
            assert_int_equal(folds, o.accumulate > 1 ? next : 0);
        }
    }
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

/* Nobody's start but rank 0's counts. */
static void case_shares(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    o.ema = 0.9;
    training reference;
    o.comm = NULL;
    reference = tr_open(state, &o);
    o.comm = c;
    o.seed += (uint64_t)c->rank;
    training r = tr_open(state, &o);
    assert_true((tr_distance(&r, &reference, DNRI_MASTER) == 0) == (c->rank == 0));
    OK(dnr_trainer_share(r.t));
    assert_true(tr_distance(&r, &reference, DNRI_MASTER) == 0);
    rank_train(&r, 0, 2);
    same_everywhere(&r, DNRI_MASTER);
    same_everywhere(&r, DNRI_EMA);
    tr_close(&r);
    tr_close(&reference);
    dnr_comm_close(c, NULL);
}

/* One asks, all learn it at the same step. */
static void case_stops(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open(state, &o);
    assert_false(rank_train(&r, 0, 2).stop);
    if (c->rank == c->world - 1)
        dnr_trainer_ask_stop(r.t);
    assert_true(rank_train(&r, 0, 1).stop);
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

/* Ranks that differ in what they were told to train are named before the first step. */
static void case_evaluates(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    dnr_source *src;
    dnr_eval_result all, one;
    dnr_source_opts so = {
        .synthetic_n = env_int("PICTURES", 37), .synthetic_image = TR_IMAGE, .classes = TR_CLASSES};
    OK(dnr_source_open("synthetic", &so, &src));
    dnr_loader_opts lo = {.batch = o.batch, .image = TR_IMAGE, .rank = c->rank, .world = c->world};
    training r = tr_open(state, &o);
    rank_train(&r, 0, 2);
    dnr_loader *mine, *whole;
    OK(dnr_loader_open(src, r.dev, &lo, &mine));
    lo.rank = 0;
    lo.world = 1;
    OK(dnr_loader_open(src, r.dev, &lo, &whole));
    if (c->world > 1) /* it is not this rank's */
        assert_int_equal(dnr_trainer_eval(r.t, whole, &one), DNR_EUSAGE);
    OK(dnr_trainer_eval(r.t, mine, &all));
    same_everywhere(&r, DNRI_BUFFER);
    same_everywhere(&r, DNRI_MASTER);
    r.t->comm = NULL; /* alone with the same weights */
    r.t->world = 1;
    OK(dnr_trainer_eval(r.t, whole, &one));
    r.t->comm = c;
    assert_true(all.images == so.synthetic_n && one.images == so.synthetic_n);
    assert_true(all.correct1 == one.correct1 && all.correct5 == one.correct5);
    assert_true(fabs(all.loss - one.loss) <= 1e-6 * one.loss);
    dnr_loader_close(mine);
    dnr_loader_close(whole);
    dnr_source_close(src);
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

/* A gradient that is not finite in one rank skips the step, or ends the run, in all. */
static void case_overflow(void **state)
{
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open_with(state, &o, &(dnri_trainer_extra){.keep = true, .scaled = true});
    rank_train(&r, 0, 1);
    dnri_state s;
    OK(dnri_store_read_state(r.t->store, &s));
    s.loss_scale = c->rank == 1 ? INFINITY : 1024;
    OK(dnri_store_write_state(r.t->store, &s));
    int64_t n;
    double *before = tr_slab(&r, DNRI_MASTER, &n);
    dnr_metrics m = rank_train(&r, 4, 1);
    double *after = tr_slab(&r, DNRI_MASTER, &n);
    assert_int_equal(m.skipped, 1);
    assert_memory_equal(before, after, (size_t)n * sizeof *before);
    free(before);
    free(after);
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

static void checkpoint_name(char buf[128])
{
    snprintf(buf, 128, "%s/step-000000002", getenv("FOLDER"));
}

/* Rank 0 saves after two steps; then everybody goes on. */
static void case_saves(void **state)
{
    char folder[128];
    checkpoint_name(folder);
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open(state, &o);
    rank_train(&r, 0, 2);
    if (c->rank == 0)
        OK(dnr_checkpoint_save(r.t, folder, NULL));
    dnr_metrics m = rank_train(&r, 2 * 16, 3);
    snprintf(folder, sizeof folder, "%s/loss", getenv("FOLDER"));
    FILE *f = c->rank == 0 ? fopen(folder, "w") : NULL;
    if (f) {
        fprintf(f, "%.17g\n", m.loss);
        fclose(f);
    }
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

/* Another number of ranks takes it up: rank 0 reads, all go on at the same sample to the same loss. */
static void case_resumes(void **state)
{
    char folder[128];
    double loss = 0;
    checkpoint_name(folder);
    dnr_comm *c = rank_open(30);
    dnr_trainer_opts o = rank_options(state, c);
    training r = tr_open(state, &o);
    dnr_checkpoint *from = NULL;
    if (c->rank == 0) {
        OK(dnr_checkpoint_open(folder, &from));
        assert_int_equal(dnr_checkpoint_global_batch(from), 16);
        OK(dnr_checkpoint_restore(from, r.t));
    }
    OK(dnr_trainer_share(r.t));
    assert_true(r.t->steps == 2 && r.t->samples == 32);
    dnr_metrics m = rank_train(&r, 32, 3);
    assert_true(m.step == 5 && m.samples == 80);
    snprintf(folder, sizeof folder, "%s/loss", getenv("FOLDER"));
    FILE *f = fopen(folder, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%lf", &loss), 1);
    fclose(f);
    if (fabs(m.loss - loss) > 1e-3 * loss + tr_rounding(&r))
        fail_msg("loss %.17g, not %.17g", m.loss, loss);
    same_everywhere(&r, DNRI_MASTER);
    dnr_checkpoint_close(from);
    tr_close(&r);
    dnr_comm_close(c, NULL);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(case_equals_accumulation),
    cmocka_unit_test(case_equals_large_batch),
    cmocka_unit_test(case_buckets),
    cmocka_unit_test(case_rounds_gradients),
    cmocka_unit_test(case_refuses_fp16),
    cmocka_unit_test(case_refuses_groups),
    cmocka_unit_test(case_stands_in),
    cmocka_unit_test(case_refuses_standins),
    cmocka_unit_test(case_tunes),
    cmocka_unit_test(case_shares),
    cmocka_unit_test(case_stops),
    cmocka_unit_test(case_evaluates),
    cmocka_unit_test(case_overflow),
    cmocka_unit_test(case_saves),
    cmocka_unit_test(case_resumes),
};

/* ================================================================ tests */

static int most; /* ranks */

/* A GPU takes one rank only. */
static int count_gpus(void)
{
    dnr_device *dev;
    char name[32];
    int n = 0;
    for (bool there = true; there && n < RANKS_MOST; n += there) {
        snprintf(name, sizeof name, "cuda:%d", n);
        there = dnr_device_open(name, &dev) == DNR_OK;
        if (there)
            dnr_device_close(dev);
    }
    return n;
}

/* Runs a case on `world` ranks. */
static void pass(int world, const char *name, const char *extra)
{
    if (world <= most)
        ranks_pass(world, name, extra);
    else
        print_message("%s: not on %d ranks: there are %d GPUs\n", name, world, most);
}

static void ranks_equal_accumulation(void **state)
{
    pass(1, "case_equals_accumulation", NULL);
    pass(2, "case_equals_accumulation", NULL);
    pass(4, "case_equals_accumulation", NULL);
    pass(2, "case_equals_accumulation", "ACCUMULATE=3");
}

static void synchronised_ranks_equal_a_large_batch(void **state)
{
    pass(1, "case_equals_large_batch", NULL);
    pass(2, "case_equals_large_batch", NULL);
    pass(4, "case_equals_large_batch", NULL);
    pass(4, "case_equals_large_batch", "GROUP=2");
    pass(2, "case_equals_large_batch", "GROUP=1");
    pass(2, "case_equals_large_batch", "GROUP=2");
    pass(3, "case_refuses_groups", NULL);
    pass(2, "case_equals_large_batch", "RECOMPUTE=2");
    if (getenv(
            "DNR_TEST_DEVICE")) /* deeper networks on such small pictures amplify the rounding of fp32 */
        return;
    pass(2, "case_equals_large_batch", "MODEL=resnet18");
    pass(2, "case_equals_large_batch", "RECOMPUTE=3 MODEL=resnet20");
}

static void buckets_are_reduced_in_order(void **state)
{
    pass(2, "case_buckets", NULL);
    pass(1, "case_buckets", "ACCUMULATE=2");
}

static void gradients_may_travel_in_16_bits(void **state)
{
    pass(1, "case_rounds_gradients", "REDUCE=2");
    pass(4, "case_rounds_gradients", "REDUCE=2");
    pass(2, "case_buckets", "REDUCE=2 ACCUMULATE=2");
    if (!getenv("DNR_TEST_DEVICE")) {
        pass(3, "case_rounds_gradients", "REDUCE=1");
        pass(2, "case_refuses_fp16", NULL);
    }
}

static void rank_0_tunes_for_all(void **state)
{
    if (!getenv("DNR_TEST_DEVICE")) /* ref has one way */
        return;
    pass(1, "case_tunes", NULL);
    pass(2, "case_tunes", NULL);
    pass(3, "case_tunes", NULL);
}

static void a_stand_in_takes_the_time_of_many(void **state)
{
    pass(1, "case_stands_in", NULL);
    pass(1, "case_stands_in", "REDUCE=2");
    pass(1, "case_refuses_standins", NULL);
}

static void weights_come_from_rank_0(void **state)
{
    pass(1, "case_shares", NULL);
    pass(3, "case_shares", NULL);
}

static void stopping_is_agreed_on(void **state)
{
    pass(1, "case_stops", NULL);
    pass(3, "case_stops", NULL);
}

static void evaluation_is_exact(void **state)
{
    pass(1, "case_evaluates", NULL);
    pass(2, "case_evaluates", NULL);
    pass(3, "case_evaluates", "PICTURES=3"); /* two ranks have none */
    pass(3, "case_evaluates", "PICTURES=24");
}

static void an_overflow_is_everybodys(void **state)
{
    pass(2, "case_overflow", NULL);
}

static void resumes_in_another_world(void **state)
{
    char folder[] = "/tmp/dnnrun-dist-XXXXXX", extra[200];
    assert_non_null(mkdtemp(folder));
    const int large = most >= 4 ? 4 : most >= 2 ? 2 : 1;
    snprintf(extra, sizeof extra, "FOLDER=%s ACCUMULATE=%d", folder, 4 / large);
    pass(large, "case_saves", extra);
    for (int world = large; world >= 1; world /= 2) {
        snprintf(extra, sizeof extra, "FOLDER=%s ACCUMULATE=%d", folder, 4 / world);
        pass(world, "case_resumes", extra);
    }
    snprintf(extra, sizeof extra, "rm -rf %s", folder);
    assert_int_equal(system(extra), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_equal_accumulation),
        cmocka_unit_test(synchronised_ranks_equal_a_large_batch),
        cmocka_unit_test(buckets_are_reduced_in_order),
        cmocka_unit_test(gradients_may_travel_in_16_bits),
        cmocka_unit_test(rank_0_tunes_for_all),
        cmocka_unit_test(a_stand_in_takes_the_time_of_many),
        cmocka_unit_test(weights_come_from_rank_0),
        cmocka_unit_test(stopping_is_agreed_on),
        cmocka_unit_test(evaluation_is_exact),
        cmocka_unit_test(an_overflow_is_everybodys),
        cmocka_unit_test(resumes_in_another_world),
    };
    int code = dist_case(cases, sizeof cases / sizeof cases[0]);
    if (code >= 0)
        return code;
    if (argc == 3) { /* for the ranks */
        setenv("DNR_TEST_DEVICE", argv[1], 1);
        setenv("DNR_TEST_PRECISION", argv[2], 1);
    }
    most = argc == 3 && strcmp(argv[1], "cuda") == 0 ? count_gpus() : RANKS_MOST;
    return tr_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
