/* test_arena.c: properties of the arena planner on random and adversarial sets of lifetimes. */
#include "arena.h"
#include "rng.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SPANS 2000

enum { UNIFORM, FEW_SIZES, POWERS, NEST, FRAGMENTS, CHAIN, UNIT, KINDS };

static size_t draw(dnri_rng *r, size_t lo, size_t hi)
{
    return lo + dnri_rng_below(r, hi - lo + 1);
}

/* A set of n spans of the given kind. */
static void make(int kind, dnri_rng *r, dnri_span *s, int n)
{
    int time = 1 + (int)draw(r, 0, (size_t)(2 * n));
    for (int i = 0; i < n; i++) {
        int a = (int)draw(r, 0, (size_t)time), b = (int)draw(r, 0, (size_t)time);
        int lo = a < b ? a : b, hi = a < b ? b : a;
        switch (kind) {
        case UNIFORM:
            s[i] = (dnri_span){draw(r, 0, 9999), lo, hi, 0};
            break;
        case FEW_SIZES: /* short lives */
            s[i] = (dnri_span){draw(r, 1, 5), lo, lo + (int)draw(r, 0, 7), 0};
            break;
        case POWERS:
            s[i] = (dnri_span){(size_t)1 << draw(r, 0, 19), lo, hi, 0};
            break;
        case NEST: /* written forward, read backward; between them the short lives of gradients */
            s[i] = (dnri_span){draw(r, 1, 1000), i, 2 * n - i, 0};
            if (draw(r, 0, 2) == 0)
                s[i] = (dnri_span){draw(r, 1, 4000), 2 * n - i, 2 * n - i + (int)draw(r, 1, 3), 0};
            break;
        case FRAGMENTS: /* many small ones, some of them long, and a few large ones */
            s[i] = (dnri_span){draw(r, 0, 2) ? draw(r, 1, 4) : 100, lo,
                               draw(r, 0, 3) ? lo + 1 : hi + 1, 0};
            break;
        case CHAIN: /* each overlaps the next ones, so that gaps seldom fit */
            s[i] = (dnri_span){draw(r, 1, 1000), i, i + (int)draw(r, 1, 3), 0};
            break;
        case UNIT:
            s[i] = (dnri_span){1, lo, hi, 0};
            break;
        }
    }
}

static bool together(const dnri_span *a, const dnri_span *b)
{
    return a->first <= b->last && b->first <= a->last;
}

/* Plans, checks what any plan must keep to, and returns peak over lower bound. */
static double check(dnri_span *s, int n, size_t align)
{
    size_t peak, bound = dnri_arena_lower_bound(s, n, align), top = 0;
    assert_int_equal(dnri_arena_plan(s, n, align, &peak), DNR_OK);
    for (int i = 0; i < n; i++) {
        assert_int_equal(s[i].offset % align, 0);
        if (s[i].size && s[i].offset + s[i].size > top)
            top = s[i].offset + s[i].size;
        for (int k = 0; k < i; k++)
            if (s[i].size && s[k].size && together(&s[i], &s[k]))
                assert_true(s[i].offset + s[i].size <= s[k].offset ||
                            s[k].offset + s[k].size <= s[i].offset);
    }
    assert_int_equal((top + align - 1) / align * align, peak);
    assert_true(peak >= bound);
    return bound ? (double)peak / (double)bound : 1;
}

static void random_sets(void **state)
{
    static dnri_span s[MAX_SPANS];
    static const struct {
        int spans, sets;
    } sizes[] = {{12, 400}, {60, 150}, {300, 8}, {MAX_SPANS, 1}};
    for (int kind = 0; kind < KINDS; kind++) {
        double worst = 1, sum = 0;
        int sets = 0;
        for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
            for (int i = 0; i < sizes[z].sets; i++, sets++) {
                dnri_rng r = DNRI_RNG((uint64_t)kind, z, (uint64_t)i);
                int n = z == 3 ? MAX_SPANS : (int)draw(&r, 1, (size_t)sizes[z].spans);
                make(kind, &r, s, n);
                double ratio = check(s, n, i % 2 ? 1 : (size_t)1 << draw(&r, 0, 8));
                sum += ratio;
                worst = ratio > worst ? ratio : worst;
            }
        print_message("kind %d: peak / lower bound: worst %.3f, mean %.4f\n", kind, worst,
                      sum / sets);
        assert_true(worst <= 1.25);
        assert_true(sum / sets <= 1.03);
    }
}

/* Forward keeps one tensor an op, backward frees them in turn: the bound is met exactly. */
static void nests_are_exact(void **state)
{
    dnri_span s[400];
    for (uint64_t seed = 0; seed < 50; seed++) {
        dnri_rng r = DNRI_RNG(seed);
        int n = (int)draw(&r, 1, 400);
        for (int i = 0; i < n; i++)
            s[i] = (dnri_span){draw(&r, 1, 100000), i, 2 * n - i, 0};
        assert_true(check(s, n, 256) == 1);
    }
}

static size_t first_fit(dnri_span *s, const int *order, int n)
{
    size_t peak = 0;
    for (int i = 0; i < n; i++) {
        dnri_span *x = &s[order[i]];
        x->offset = 0;
        for (int k = 0; k < i; k++) {
            const dnri_span *y = &s[order[k]];
            if (together(x, y) && x->offset < y->offset + y->size &&
                y->offset < x->offset + x->size) {
                x->offset = y->offset + y->size;
                k = -1; /* look again from the start */
            }
        }
        peak = x->offset + x->size > peak ? x->offset + x->size : peak;
    }
    return peak;
}

/* Some order of first fit is optimal: the one that sorts an optimal plan by offset. */
static size_t optimum(dnri_span *s, int *order, int n, int done)
{
    if (done == n)
        return first_fit(s, order, n);
    size_t best = SIZE_MAX;
    for (int i = done; i < n; i++) {
        int t = order[done];
        order[done] = order[i];
        order[i] = t;
        size_t got = optimum(s, order, n, done + 1);
        best = got < best ? got : best;
        order[i] = order[done];
        order[done] = t;
    }
    return best;
}

static void small_sets_against_the_optimum(void **state)
{
    int exact = 0, sets = 0;
    double worst = 1;
    for (int kind = 0; kind < KINDS; kind++)
        for (uint64_t seed = 0; seed < 100; seed++, sets++) {
            dnri_span s[6], copy[6];
            int order[6] = {0, 1, 2, 3, 4, 5};
            dnri_rng r = DNRI_RNG((uint64_t)kind, seed, 7);
            int n = (int)draw(&r, 3, 6);
            size_t peak;
            make(kind, &r, s, n);
            memcpy(copy, s, sizeof s);
            assert_int_equal(dnri_arena_plan(s, n, 1, &peak), DNR_OK);
            size_t best = optimum(copy, order, n, 0);
            assert_true(peak >= best);
            exact += peak == best;
            if (best && (double)peak / (double)best > worst)
                worst = (double)peak / (double)best;
        }
    print_message("%d of %d optimal, worst %.3f times the optimum\n", exact, sets, worst);
    assert_true(exact >= sets * 99 / 100);
    assert_true(worst <= 1.1);
}

static void edges(void **state)
{
    size_t peak = 1;
    assert_int_equal(dnri_arena_plan(NULL, 0, 256, &peak), DNR_OK);
    assert_int_equal(peak, 0);
    assert_int_equal(dnri_arena_lower_bound(NULL, 0, 256), 0);

    dnri_span empty[2] = {{0, 0, 5, 9}, {0, 3, 2, 9}}; /* without a size, a life means nothing */
    assert_int_equal(dnri_arena_plan(empty, 2, 256, &peak), DNR_OK);
    assert_int_equal(peak, 0);
    assert_int_equal(empty[0].offset, 0);

    dnri_span touch[2] = {{100, 0, 3, 0}, {100, 3, 4, 0}}; /* both ends are included */
    assert_true(check(touch, 2, 64) == 1);
    assert_int_not_equal(touch[0].offset, touch[1].offset);
    dnri_span apart[2] = {{100, 0, 3, 0}, {100, 4, 4, 0}};
    assert_true(check(apart, 2, 64) == 1);
    assert_int_equal(apart[0].offset, apart[1].offset);

    dnri_span backwards = {1, 5, 4, 0};
    assert_int_equal(dnri_arena_plan(&backwards, 1, 256, &peak), DNR_EUSAGE);
}

static void same_input_same_plan(void **state)
{
    dnri_span a[200], b[200];
    dnri_rng r = DNRI_RNG(5);
    size_t peak_a, peak_b;
    make(UNIFORM, &r, a, 200);
    memcpy(b, a, sizeof a);
    assert_int_equal(dnri_arena_plan(a, 200, 256, &peak_a), DNR_OK);
    assert_int_equal(dnri_arena_plan(b, 200, 256, &peak_b), DNR_OK);
    assert_int_equal(peak_a, peak_b);
    assert_memory_equal(a, b, sizeof a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_sets),
        cmocka_unit_test(nests_are_exact),
        cmocka_unit_test(small_sets_against_the_optimum),
        cmocka_unit_test(edges),
        cmocka_unit_test(same_input_same_plan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
