/* parity_golden.h: a tensor against one that a script of golden/ has stored, whole or as projections. */
#ifndef DNR_PARITY_GOLDEN_H
#define DNR_PARITY_GOLDEN_H

#include "parity_numbers.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static inline double golden_norm(const double *a, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * a[i];
    return sqrt(sum);
}

static inline double golden_distance(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum) / golden_norm(b, n);
}

/* Relative error against a stored tensor; for one kept as projections the larger of the norm's error and
 * what the projections estimate. */
static inline double golden_error(const double *a, int64_t n, const json_t *golden)
{
    const json_t *list = json_object_get(golden, "values");
    bool whole = list != NULL;
    if (!whole)
        list = json_object_get(golden, "proj");
    int count = (int)json_array_size(list);
    double want[128], got[128];
    assert_in_range(count, 1, 128);
    for (int i = 0; i < count; i++)
        want[i] = json_number_value(json_array_get(list, (size_t)i));
    if (whole) {
        assert_int_equal(count, n);
        return golden_distance(a, want, n);
    }
    double length = json_number_value(json_object_get(golden, "norm")), sum = 0;
    parity_project(a, n, count, got);
    for (int i = 0; i < count; i++)
        sum += (got[i] - want[i]) * (got[i] - want[i]);
    return fmax(sqrt(sum / count), fabs(golden_norm(a, n) - length)) / length;
}

#endif
