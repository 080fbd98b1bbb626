/* badlist.c: bad samples met so far. */
#include <stdlib.h>
#include <string.h>

#include "data.h"

dnr_status dnri_badlist_add(dnri_badlist *b, int64_t sample, const char *reason, bool *fresh)
{
    int64_t lo = 0, hi = b->n;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (b->bad[mid].sample < sample)
            lo = mid + 1;
        else
            hi = mid;
    }
    *fresh = lo == b->n || b->bad[lo].sample != sample;
    if (!*fresh) {
        b->bad[lo].times++;
        return DNR_OK;
    }
    if (b->n == b->cap) {
        int64_t cap = b->cap ? 2 * b->cap : 16;
        dnri_bad *bad = realloc(b->bad, (size_t)cap * sizeof *bad);
        if (!bad)
            return DNR_FAIL_NOMEM();
        b->bad = bad;
        b->cap = cap;
    }
    char *copy = strdup(reason);
    if (!copy)
        return DNR_FAIL_NOMEM();
    memmove(b->bad + lo + 1, b->bad + lo, (size_t)(b->n - lo) * sizeof *b->bad);
    b->bad[lo] = (dnri_bad){sample, 1, copy};
    b->n++;
    return DNR_OK;
}

const dnr_bad_sample *dnri_badlist_report(dnri_badlist *b, const dnr_source *src)
{
    dnr_bad_sample *r = realloc(b->report, ((size_t)b->n + 1) * sizeof *r);
    if (!r)
        return NULL;
    b->report = r;
    for (int64_t i = 0; i < b->n; i++)
        r[i] = (dnr_bad_sample){src->ops->name(src, b->bad[i].sample), b->bad[i].reason,
                                b->bad[i].times};
    return r;
}

void dnri_badlist_free(dnri_badlist *b)
{
    for (int64_t i = 0; i < b->n; i++)
        free(b->bad[i].reason);
    free(b->bad);
    free(b->report);
    *b = (dnri_badlist){0};
}
