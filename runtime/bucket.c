/* bucket.c: cuts the flat gradient slab into buckets. */
#include "bucket.h"

#include <stdlib.h>

int dnri_params_slab_order(const dnri_params *p, int k)
{
    for (int i = dnri_params_count(p) - 1; i >= 0; i--)
        if (dnri_params_at(p, i)->kind != DNRI_RUNNING && k-- == 0)
            return i;
    return -1;
}

dnr_status dnri_buckets_make(const dnri_params *p, size_t elem, size_t first_bytes, size_t bytes,
                             dnri_bucket **out, int *n)
{
    *n = 0;
    *out = malloc((size_t)(dnri_params_count(p) + 1) * sizeof **out);
    if (!*out)
        return DNR_FAIL_NOMEM();
    int64_t start = 0;
    for (int k = 0, first = 0; start < dnri_params_flat(p); k++) {
        int next = dnri_params_slab_order(p, k + 1);
        int64_t end = next < 0 ? dnri_params_flat(p) : dnri_params_at(p, next)->offset;
        if (next >= 0 && (size_t)(end - start) * elem < (*n ? bytes : first_bytes))
            continue;
        (*out)[(*n)++] = (dnri_bucket){start, end - start, first, k};
        start = end;
        first = k + 1;
    }
    return DNR_OK;
}
