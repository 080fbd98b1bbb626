/* test_paper.c: whole networks planned for an H200 that is not there: every op finds an implementation, and memory stays
 * within what is promised. Needs cuDNN but no GPU; skipped where this build has no CUDA back end. */
#include "paper.h"

#include "../layers/layers.h"
#include "../runtime/plan_internal.h"
#include "../runtime/trainer.h"

#include <stdlib.h>
#include <string.h>

static dnr_device *dev;
static const dnri_trainer_extra planned = {.planned = true};

static dnr_trainer_opts options(const char *model, dnr_precision precision, int64_t batch)
{
    return (dnr_trainer_opts){.model = {.name = model, .classes = 1000},
                              .optim = {.lr = 0.1, .momentum = 0.9},
                              .precision = precision,
                              .batch = batch,
                              .image = 224,
                              .epoch_samples = 1281167,
                              .total_samples = 1281167,
                              .benchmark = true};
}

/* ---- memory of ResNet-50, fp16, batch 256 */

static double gib(dnr_recompute mode, dnr_fusion fusion)
{
    dnr_trainer_opts o = options("resnet50", DNR_PRECISION_FP16, 256);
    dnr_trainer *t;
    size_t arena, store;
    o.recompute = mode;
    o.fusion = fusion;
    OK(dnri_trainer_create(dev, &o, &planned, &t));
    dnr_trainer_memory(t, &arena, &store);
    const double all = (double)(arena + store + 2 * t->staging_bytes) / 0x1p30;
    print_message(
        "resnet50, fp16, batch 256, recompute %s, fusion %d: %.3f GiB = arena %.3f + store %.3f + "
        "staging %.3f\n",
        dnr_recompute_name(mode), (int)fusion, all, (double)arena / 0x1p30, (double)store / 0x1p30,
        2 * (double)t->staging_bytes / 0x1p30);
    dnr_trainer_destroy(t);
    return all;
}

static void test_memory(void **state)
{
    if (!dev)
        skip();
    static const struct {
        dnr_fusion fusion;
        dnr_recompute mode;
        double most;
    } promised[] = {
        {DNR_FUSION_D1, DNR_RECOMPUTE_NONE, 10.25}, {DNR_FUSION_D1, DNR_RECOMPUTE_CHEAP, 8.6},
        {DNR_FUSION_D1, DNR_RECOMPUTE_STAGE, 5.2},  {DNR_FUSION_D1, DNR_RECOMPUTE_BLOCK, 3.4},
        {DNR_FUSION_D2, DNR_RECOMPUTE_NONE, 7.2},   {DNR_FUSION_D2, DNR_RECOMPUTE_CHEAP, 5.5},
        {DNR_FUSION_D2, DNR_RECOMPUTE_STAGE, 3.4},  {DNR_FUSION_D2, DNR_RECOMPUTE_BLOCK, 3.4},
        {DNR_FUSION_D3, DNR_RECOMPUTE_NONE, 7.2},   {DNR_FUSION_D3, DNR_RECOMPUTE_CHEAP, 5.5},
        {DNR_FUSION_D3, DNR_RECOMPUTE_STAGE, 3.4},  {DNR_FUSION_D3, DNR_RECOMPUTE_BLOCK, 3.4},
    };
    for (size_t i = 0; i < sizeof promised / sizeof promised[0]; i++)
        assert_true(gib(promised[i].mode, promised[i].fusion) <= promised[i].most);
}

/* memory.recompute = auto:GIB takes `want`; DNR_RECOMPUTE_AUTO: nothing fits. Of DNR_RECOMPUTE_CHEAP it remakes `norms`. */
static void expect_mode(double limit, dnr_fusion fusion, dnr_recompute want, int norms)
{
    dnr_trainer_opts o = options("resnet50", DNR_PRECISION_FP16, 256);
    dnr_trainer *t;
    o.fusion = fusion;
    o.recompute = DNR_RECOMPUTE_AUTO;
    o.recompute_gib = limit;
    const dnr_status st = dnri_trainer_create(dev, &o, &planned, &t);
    if (want == DNR_RECOMPUTE_AUTO) {
        assert_int_equal(st, DNR_EMEM);
        print_message("%s; %s\n", dnr_last_error()->what, dnr_last_error()->remedy);
        assert_non_null(
            strstr(dnr_last_error()->what, "fits in no mode; the smallest, stage, needs 3."));
        assert_non_null(strstr(dnr_last_error()->remedy, "auto:3."));
        assert_non_null(strstr(dnr_last_error()->remedy, "lower train.batch to "));
        return;
    }
    OK(st);
    size_t arena, store;
    dnr_trainer_memory(t, &arena, &store);
    assert_string_equal(dnr_recompute_name(dnr_trainer_recompute(t)), dnr_recompute_name(want));
    assert_true((double)(arena + store + 2 * t->staging_bytes) <= limit * 0x1p30);
    int remade = 0;
    for (int i = 0; i < dnri_graph_ops(t->program[DNRI_LAST].plan->g); i++)
        remade += dnri_graph_op_c(t->program[DNRI_LAST].plan->g, i)->def == &dnri_def_norm_apply;
    print_message("auto:%g, fusion %d: %s, %d norms remade, %.3f GiB\n", limit, (int)fusion,
                  dnr_recompute_name(want), remade,
                  (double)(arena + store + 2 * t->staging_bytes) / 0x1p30);
    if (want == DNR_RECOMPUTE_CHEAP)
        assert_int_equal(remade, norms);
    dnr_trainer_destroy(t);
}

static void test_auto(void **state)
{
    if (!dev)
        skip();
    expect_mode(12, DNR_FUSION_D1, DNR_RECOMPUTE_NONE, 0);
    expect_mode(10, DNR_FUSION_D1, DNR_RECOMPUTE_CHEAP, 2);
    expect_mode(8.6, DNR_FUSION_D1, DNR_RECOMPUTE_CHEAP, 32);
    expect_mode(4, DNR_FUSION_D1, DNR_RECOMPUTE_BLOCK, 0);
    expect_mode(7, DNR_FUSION_D2, DNR_RECOMPUTE_CHEAP, 1);
    expect_mode(5.5, DNR_FUSION_D2, DNR_RECOMPUTE_CHEAP, 32);
    expect_mode(2, DNR_FUSION_D2, DNR_RECOMPUTE_AUTO, 0);
}

/* ---- launches of ResNet-50, batch 32 */

/* Counts the steps of a training step's ops of `def`, and those of them that are one launch. */
static void count_steps(const dnri_plan *p, const dnri_op_def *def, int *all, int *once)
{
    *all = *once = 0;
    for (int k = 0; k < p->n; k++)
        if (dnri_graph_op_c(p->g, k)->def == def) {
            *all += 1;
            *once += strstr(p->steps[k].impl, "once") != NULL && p->steps[k].launches == 1;
        }
}

static void test_launches(void **state)
{
    static const struct {
        dnr_precision precision;
        int64_t batch;
        int stats, train, bwd; /* convolutions with statistics, norms in one launch */
        int launches;          /* at most */
    } cases[] = {
        {DNR_PRECISION_FP16, 32, 4, 48, 49, 298},   {DNR_PRECISION_BF16, 32, 0, 52, 49, 298},
        {DNR_PRECISION_FP16, 64, 10, 42, 45, 306},  {DNR_PRECISION_FP16, 128, 24, 28, 38, 320},
        {DNR_PRECISION_FP16, 256, 36, 16, 33, 330}, {DNR_PRECISION_TF32, 32, 0, 48, 45, 310},
    };
    if (!dev)
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dnr_trainer_opts o = options("resnet50", cases[i].precision, cases[i].batch);
        dnr_trainer *t;
        o.fusion = DNR_FUSION_D1;
        int stats, train, bwd, all, launches = 0, unused;
        OK(dnri_trainer_create(dev, &o, &planned, &t));
        const dnri_plan *p = t->program[DNRI_LAST].plan;
        count_steps(p, &dnri_def_conv_stats, &stats, &unused);
        count_steps(p, &dnri_def_norm_train, &all, &train);
        assert_int_equal(all, 52);
        count_steps(p, &dnri_def_norm_bwd, &all, &bwd);
        assert_int_equal(all, 52);
        for (int k = 0; k < p->n; k++)
            launches += p->steps[k].launches;
        print_message("resnet50, %s, batch %d: %d launches; %d conv.stats; in one launch %d "
                      "norm.train and %d norm.bwd of 52\n",
                      dnr_precision_name(cases[i].precision), (int)cases[i].batch, launches, stats,
                      train, bwd);
        assert_int_equal(stats, cases[i].stats);
        assert_int_equal(train, cases[i].train);
        assert_int_equal(bwd, cases[i].bwd);
        assert_true(launches <= cases[i].launches);
        dnr_trainer_destroy(t);
    }
}

/* ---- the stem */

/* In 16 bits it has kernels of our own for pictures of four channels, which leave sums for the norm; also where nothing is
 * timed, and with recomputation. The backward pass makes its pictures anew, and nothing is in blocks. Pictures of odd
 * sides, and those too wide for shared memory, are left to cuDNN. */
static void test_stem(void **state)
{
    static const struct {
        int image;
        bool packed, own;
    } cases[] = {{224, true, true}, {96, true, true}, {225, false, false}, {1600, true, false}};
    if (!dev)
        skip();
    for (int i = 0; i < 16; i++) {
        const bool bf16 = i & 1, recompute = i & 2;
        const int image = cases[i / 4].image, own = cases[i / 4].own;
        dnr_trainer_opts o = options("resnet18", bf16 ? DNR_PRECISION_BF16 : DNR_PRECISION_FP16, 2);
        dnr_trainer *t;
        int ingests = 0, convs = 0, ours = 0;
        o.image = image;
        o.deterministic = recompute;
        o.recompute = recompute ? DNR_RECOMPUTE_BLOCK : DNR_RECOMPUTE_NONE;
        OK(dnri_trainer_create(dev, &o, &planned, &t));
        const dnri_plan *p = t->program[DNRI_LAST].plan;
        for (int k = 0; k < p->n; k++) {
            const dnri_op *op = dnri_graph_op_c(p->g, k);
            ingests += op->def == &dnri_def_packed_ingest;
            convs += op->def == &dnri_def_packed_conv || op->def == &dnri_def_packed_conv_wgrad;
            ours += strcmp(p->steps[k].impl, "k_stem") == 0;
            if (op->def == &dnri_def_packed_ingest)
                assert_int_equal(op->out[DNRI_QUADS_OUT] >= 0, own);
            if (op->def == &dnri_def_norm_pool_train)
                assert_int_equal(op->n_in, own ? 7 : 5);
        }
        assert_int_equal(ingests, cases[i / 4].packed ? 2 : 0);
        assert_int_equal(convs, !cases[i / 4].packed ? 0 : recompute ? 3 : 2);
        assert_int_equal(ours, own ? convs : 0);
        dnr_trainer_destroy(t);
    }
}

/* ---- the folded join of d3 */

/* 13 ends of blocks and two projections have rows enough. A library's product does them all, but in deterministic
 * runs, where it would change bits with recomputation. */
static void test_joins(void **state)
{
    if (!dev)
        skip();
    for (int i = 0; i < 8; i++) {
        const bool deterministic = i & 1, recompute = i & 2;
        dnr_trainer_opts o =
            options("resnet50", i & 4 ? DNR_PRECISION_BF16 : DNR_PRECISION_FP16, 256);
        dnr_trainer *t;
        int joins = 0;
        o.fusion = DNR_FUSION_D3;
        o.deterministic = deterministic;
        o.recompute = recompute ? DNR_RECOMPUTE_CHEAP : DNR_RECOMPUTE_NONE;
        OK(dnri_trainer_create(dev, &o, &planned, &t));
        const dnri_plan *p = t->program[DNRI_LAST].plan;
        for (int k = 0; k < p->n; k++) {
            const dnri_op *op = dnri_graph_op_c(p->g, k);
            if (op->def != &dnri_def_algbn_join || op->clone)
                continue;
            joins++;
            assert_string_equal(p->steps[k].impl, deterministic ? "k_narrow" : "cublasLt");
            assert_int_equal(op->n_out, op->in[3] >= 0 && !recompute ? 2 : 1); /* with its mask */
        }
        assert_int_equal(joins, 15);
        dnr_trainer_destroy(t);
    }
}

/* ---- pins */

/* What a tuner says, as lines of pins. */
typedef struct told {
    char pins[1 << 16];
    int n, training;
} told;

static void take_note(void *user, const dnr_tune_contest *c)
{
    told *t = user;
    t->n++;
    if (!c->training)
        return;
    t->training++;
    assert_non_null(c->pin);
    assert_true(c->n == 0 && c->chosen < 0); /* nothing runs here */
    const size_t at = strlen(t->pins);
    snprintf(t->pins + at, sizeof t->pins - at, "%s.%s=%s\n", c->layer, c->pass, c->pin);
}

static int remarks;
static void count_remark(void *user, dnr_log_level level, const char *text)
{
    remarks += strstr(text, user) != NULL;
}

static const char *impl_of(const dnr_trainer *t, const char *layer, const char *op)
{
    const dnri_plan *p = t->program[DNRI_LAST].plan;
    for (int i = 0; i < p->n; i++)
        if (!strcmp(dnri_graph_op_c(p->g, i)->name, layer) &&
            !strcmp(dnri_graph_op_c(p->g, i)->def->name, op))
            return p->steps[i].impl;
    fail_msg("no %s of %s", op, layer);
    return NULL;
}

static void test_pins(void **state)
{
    static told t;
    dnr_trainer_opts o = options("resnet50", DNR_PRECISION_FP16, 32);
    dnr_trainer *plain, *pinned;
    char other[512];
    if (!dev)
        skip();
    o.fusion = DNR_FUSION_D1;
    OK(dnr_tune(dev, &o, take_note, &t));
    assert_true(t.training >= 53 * 3 - 1 && t.n > t.training);
    OK(dnri_trainer_create(dev, &o, &planned, &plain));

    /* its own choices, pinned: the same plan, and no remark */
    o.pins = t.pins;
    dnr_set_log(count_remark, "cudnn.pin");
    remarks = 0;
    OK(dnri_trainer_create(dev, &o, &planned, &pinned));
    assert_int_equal(remarks, 0);
    const dnri_plan *a = plain->program[DNRI_LAST].plan, *b = pinned->program[DNRI_LAST].plan;
    assert_true(dnri_plan_choices(a, 0) == dnri_plan_choices(b, 0));
    dnr_trainer_destroy(pinned);

    /* an engine that computes something else is left out with one remark; another layer's is taken */
    const char *one = impl_of(plain, "layer1.0.conv2", "conv.wgrad"),
               *two = impl_of(plain, "layer1.1.conv2", "conv.wgrad");
    assert_string_equal(one, two);
    snprintf(other, sizeof other, "layer1.0.conv2.wgrad=eng99999\nlayer1.1.conv2.wgrad=%s\n",
             one + 6); /* after "cudnn " */
    o.pins = other;
    OK(dnri_trainer_create(dev, &o, &planned, &pinned));
    assert_int_equal(remarks, 1);
    assert_string_equal(impl_of(pinned, "layer1.0.conv2", "conv.wgrad"), one);
    assert_string_equal(impl_of(pinned, "layer1.1.conv2", "conv.wgrad"), one);
    dnr_trainer_destroy(pinned);
    dnr_set_log(NULL, NULL);

    static const char *const bad[] = {
        "layer9.0.conv2.wgrad=eng3\n",      "layer1.0.conv2.wgrad=engine 3\n",
        "layer1.0.conv2.up=eng3\n",         "layer1.0.conv2.wgrad=eng3 k2=\n",
        "layer1.0.conv2.dgrad=sums+eng3\n", "nonsense\n"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        o.pins = bad[i];
        assert_int_equal(dnri_trainer_create(dev, &o, &planned, &pinned), DNR_EUSAGE);
        assert_non_null(strstr(dnr_last_error()->what, "cudnn.pin."));
    }
    dnr_trainer_destroy(plain);

    o.pins = NULL;
    o.benchmark = false;
    assert_int_equal(dnr_tune(dev, &o, take_note, &t), DNR_EUSAGE);
}

/* ---- a forward pass of ResNet-50 */

/* The four projections of a picture's pass run beside the two convolutions after them, and nothing that those write lies over
 * what a projection reads, writes or works in. A large batch keeps to one lane. */
static void test_forks(void **state)
{
    static const int64_t batches[] = {1, 64};
    if (!dev)
        skip();
    for (int b = 0; b < 2; b++) {
        dnr_trainer_opts o = options("resnet50", DNR_PRECISION_FP16, 0);
        dnr_trainer *t;
        int forks = 0;
        o.eval_batch = batches[b];
        OK(dnri_trainer_create(dev, &o, &planned, &t));
        const dnri_plan *p = t->program[DNRI_EVAL].plan;
        for (int i = 0; i < p->n; i++) {
            const dnri_op *op = dnri_graph_op_c(p->g, i);
            assert_true((p->join[i] > 0) == (p->steps[i].lane != DNRI_COMPUTE));
            if (!p->join[i])
                continue;
            forks++;
            assert_non_null(strstr(op->name, "downsample"));
            assert_int_equal(p->join[i], i + 3);
            const int own[] = {op->in[0], op->out[0], p->n_tensors + i};
            for (int k = 0; k < 3; k++)
                assert_true(p->spans[own[k]].last >= p->join[i]);
            for (int s = 0; s < p->n_tensors + p->n; s++)
                for (int k = 0; k < 3; k++) {
                    const dnri_span *x = &p->spans[own[k]], *y = &p->spans[s];
                    const bool apart =
                        x->offset + x->size <= y->offset || y->offset + y->size <= x->offset;
                    const bool meets = y->first <= p->join[i] && y->last >= i;
                    assert_true(s == own[k] || !y->size || !x->size || !meets || apart);
                }
        }
        assert_int_equal(forks, batches[b] == 1 ? 4 : 0);
        dnr_trainer_destroy(t);
    }
}

/* ---- every network */

/* No op is left to plain loops, and nothing wants more workspace than it may. */
static void expect_whole(const char *model, dnr_precision precision, bool deterministic,
                         dnr_fusion fusion)
{
    dnr_trainer_opts o = options(model, precision, 256);
    dnr_trainer *t;
    int convs = 0;
    const bool cifar = atoi(model + 6) < 18 || atoi(model + 6) % 12 == 8;
    o.image = cifar ? 32 : 224;
    o.model.classes = cifar ? 10 : 1000;
    o.deterministic = deterministic;
    o.fusion = fusion;
    OK(dnri_trainer_create(dev, &o, &planned, &t));
    for (int i = 0; i < DNRI_PROGRAMS; i++) {
        const dnri_plan *p = t->program[i].plan;
        for (int k = 0; p && k < p->n; k++) {
            if (strstr(p->steps[k].impl, "direct"))
                print_error("%s, %s: plain loops for %s of %s\n", model,
                            dnr_precision_name(precision), dnri_graph_op_c(p->g, k)->def->name,
                            dnri_graph_op_c(p->g, k)->name);
            assert_null(strstr(p->steps[k].impl, "direct"));
            convs += strstr(p->steps[k].impl, "cudnn eng") != NULL;
        }
    }
    if (fusion == DNR_FUSION_D1) /* fprop, dgrad, wgrad, eval's fprop */
        assert_true(convs >= 4 * (atoi(model + 6) - 2));
    dnr_trainer_destroy(t);
}

static void test_every_network(void **state)
{
    static const dnr_precision precisions[] = {DNR_PRECISION_FP16, DNR_PRECISION_BF16,
                                               DNR_PRECISION_TF32, DNR_PRECISION_FP32};
    if (!dev)
        skip();
    for (const char *const *model = dnr_model_names(); *model; model++)
        for (int p = 0; p < 4; p++)
            for (int deterministic = 0; deterministic < 2; deterministic++) {
                expect_whole(*model, precisions[p], deterministic, DNR_FUSION_D1);
                if (p < 2) /* more than that by default */
                    expect_whole(*model, precisions[p], deterministic, DNR_FUSION_AUTO);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_auto),
        cmocka_unit_test(test_launches), cmocka_unit_test(test_stem),
        cmocka_unit_test(test_joins),    cmocka_unit_test(test_pins),
        cmocka_unit_test(test_forks),    cmocka_unit_test(test_every_network),
    };
    paper_open((size_t)139 << 30, &dev);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    dnr_device_close(dev);
    return failed;
}
