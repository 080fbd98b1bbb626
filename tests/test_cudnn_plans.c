/* test_cudnn_plans.c: cuDNN has a plan for every convolution of ResNet-50, in each type, within the bounds asked for.
 * Needs cuDNN but no GPU: plans are made for the device that golden/cudnn_h200.json describes, over the toolkit's
 * stand-in for the driver where there is none. Skipped where this build has no CUDA back end. */
#include "paper.h"

#include "../runtime/cuda/problem.h"

#include <string.h>

typedef dnr_status (*probe_fn)(const char *, const dnri_conv_problem *, bool, char[64], size_t *);
static probe_fn probe;
static const char *device;

/* c, h, k, kernel, stride, pad */
static const int resnet50[][6] = {
    {3, 224, 64, 7, 2, 3},    {64, 56, 64, 1, 1, 0},    {64, 56, 64, 3, 1, 1},
    {64, 56, 256, 1, 1, 0},   {256, 56, 64, 1, 1, 0},   {256, 56, 128, 1, 1, 0},
    {128, 56, 128, 3, 2, 1},  {128, 28, 512, 1, 1, 0},  {256, 56, 512, 1, 2, 0},
    {512, 28, 128, 1, 1, 0},  {128, 28, 128, 3, 1, 1},  {512, 28, 256, 1, 1, 0},
    {256, 28, 256, 3, 2, 1},  {256, 14, 1024, 1, 1, 0}, {512, 28, 1024, 1, 2, 0},
    {1024, 14, 256, 1, 1, 0}, {256, 14, 256, 3, 1, 1},  {1024, 14, 512, 1, 1, 0},
    {512, 14, 512, 3, 2, 1},  {512, 7, 2048, 1, 1, 0},  {1024, 14, 2048, 1, 2, 0},
    {2048, 7, 512, 1, 1, 0},  {512, 7, 512, 3, 1, 1},
};
#define N_SHAPES (int)(sizeof resnet50 / sizeof resnet50[0])

static dnri_conv_problem problem(const int *s, dnri_conv_kind kind, dnr_dtype type, bool tf32,
                                 int64_t n)
{
    const int64_t p = (s[1] + 2 * s[5] - s[3]) / s[4] + 1;
    return (dnri_conv_problem){.kind = kind,
                               .type = type,
                               .tf32 = tf32,
                               .n = n,
                               .h = s[1],
                               .w = s[1],
                               .c = s[0],
                               .p = p,
                               .q = p,
                               .k = s[2],
                               .kernel = s[3],
                               .stride = s[4],
                               .pad = s[5],
                               .deterministic = 1,
                               .workspace_cap = (int64_t)1 << 30};
}

static void expect_plan(const dnri_conv_problem *p)
{
    char impl[64], again[64];
    size_t workspace, workspace_again;
    OK(probe(device, p, false, impl, &workspace));
    OK(probe(device, p, true, again, &workspace_again));
    if (!impl[0])
        print_error("no plan: kind %d, %s, n %d, c %d, h %d, k %d, kernel %d, stride %d\n",
                    (int)p->kind, dnri_dtype_name((dnr_dtype)p->type), (int)p->n, (int)p->c,
                    (int)p->h, (int)p->k, (int)p->kernel, (int)p->stride);
    assert_memory_equal(impl, "cudnn eng", 9);
    assert_string_equal(impl, again); /* a kept choice gives the plan back */
    assert_int_equal(workspace, workspace_again);
    assert_true(workspace <= (size_t)p->workspace_cap);
}

static void test_resnet50(void **state)
{
    static const struct {
        dnr_dtype type;
        bool tf32;
    } types[] = {{DNR_F16, false}, {DNR_BF16, false}, {DNR_F32, true}, {DNR_F32, false}};
    if (!probe)
        skip();
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < N_SHAPES; i++)
            for (int kind = DNRI_FPROP; kind <= DNRI_WGRAD; kind++) {
                dnri_conv_problem p =
                    problem(resnet50[i], (dnri_conv_kind)kind, types[t].type, types[t].tf32, 256);
                expect_plan(&p);
            }
}

/* The stem over packed pictures; BLOCKS is padded by less at the end than at the start. */
static void test_packed_stem(void **state)
{
    static const int quads[] = {4, 224, 64, 7, 2, 3}, blocks[] = {16, 112, 64, 4, 1, 2};
    if (!probe)
        skip();
    for (int i = 0; i < 4; i++) {
        const dnri_conv_kind kind = i % 2 ? DNRI_WGRAD : DNRI_FPROP;
        dnri_conv_problem p = i < 2 ? problem(quads, kind, DNR_F16, false, 256)
                                    : problem(blocks, kind, DNR_BF16, false, 256);
        p.p = p.q = 112;
        expect_plan(&p);
    }
}

/* Sums over y come out of a precompiled engine's epilogue for all but the stem, also of ResNet-18. */
static void test_statistics(void **state)
{
    static const int resnet18[][6] = {
        {64, 56, 128, 3, 2, 1},  {64, 56, 128, 1, 2, 0},  {128, 28, 256, 3, 2, 1},
        {128, 28, 256, 1, 2, 0}, {256, 14, 512, 3, 2, 1}, {256, 14, 512, 1, 2, 0},
    };
    static const int64_t batches[] = {32, 256};
    if (!probe)
        skip();
    for (int b = 0; b < 2; b++) {
        for (int i = 1; i < N_SHAPES; i++) {
            dnri_conv_problem p =
                problem(resnet50[i], DNRI_FPROP_STATS, DNR_F16, false, batches[b]);
            expect_plan(&p);
        }
        for (size_t i = 0; i < sizeof resnet18 / sizeof resnet18[0]; i++) {
            dnri_conv_problem p =
                problem(resnet18[i], DNRI_FPROP_STATS, DNR_F16, false, batches[b]);
            expect_plan(&p);
        }
    }
}

/* Each convolution of an evaluation with bias and ReLU, and those that need it with a residual, or without ReLU; batch 1
 * as well. All are precompiled: what is compiled at run time is not asked for. */
static void test_epilogues(void **state)
{
    static const struct {
        dnr_dtype type;
        bool tf32;
    } types[] = {{DNR_F16, false}, {DNR_BF16, false}, {DNR_F32, true}, {DNR_F32, false}};
    if (!probe)
        skip();
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < N_SHAPES; i++)
            for (int form = 0; form < 6; form++) {
                const int *s = resnet50[i];
                dnri_conv_problem p =
                    problem(s, DNRI_FPROP_ACT, types[t].type, types[t].tf32, form % 2 ? 1 : 256);
                const bool expands = s[3] == 1 && s[2] == 4 * s[0],
                           projects = s[3] == 1 && s[4] == 2;
                p.residual = form / 2 == 1;
                p.relu = form / 2 < 2;
                if (form / 2 == 0 || (form / 2 == 1 && expands) ||
                    (form / 2 == 2 && (expands || projects)))
                    expect_plan(&p);
            }
}

static void test_workspace_cap(void **state)
{
    if (!probe)
        skip();
    for (int i = 0; i < N_SHAPES; i++) {
        char impl[64];
        size_t workspace;
        dnri_conv_problem p = problem(resnet50[i], DNRI_FPROP, DNR_F16, false, 32);
        p.workspace_cap = 0;
        OK(probe(device, &p, false, impl, &workspace));
        assert_int_equal(workspace, 0);
    }
}

/* TF32 has to be allowed: fp32 alone takes another engine, or the same one with other knobs. */
static void test_fp32_is_fp32(void **state)
{
    if (!probe)
        skip();
    for (int i = 1; i < N_SHAPES; i++) {
        char exact[64], tf32[64];
        size_t workspace;
        dnri_conv_problem p = problem(resnet50[i], DNRI_FPROP, DNR_F32, false, 256);
        OK(probe(device, &p, false, exact, &workspace));
        p.tf32 = 1;
        OK(probe(device, &p, false, tf32, &workspace));
        assert_string_not_equal(exact, tf32);
    }
}

static void test_bad_device(void **state)
{
    char impl[64];
    size_t workspace;
    dnri_conv_problem p = problem(resnet50[0], DNRI_FPROP, DNR_F16, false, 1);
    if (!probe)
        skip();
    assert_int_not_equal(probe("{}", &p, false, impl, &workspace), DNR_OK);
    assert_true(dnr_last_error()->what[0] && dnr_last_error()->remedy[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resnet50),     cmocka_unit_test(test_packed_stem),
        cmocka_unit_test(test_statistics),   cmocka_unit_test(test_workspace_cap),
        cmocka_unit_test(test_fp32_is_fp32), cmocka_unit_test(test_bad_device),
        cmocka_unit_test(test_epilogues),
    };
    device = paper_properties();
    *(void **)&probe = paper_symbol("dnri_cudnn_probe");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
