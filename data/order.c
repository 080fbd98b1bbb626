/* order.c: in which order samples are met. Nothing is stored but the permutations at hand, which are pure
 * functions of (seed, epoch). */
#include <stdlib.h>
#include <string.h>

#include "data.h"

dnr_status dnri_order_open(int64_t n, uint64_t seed, bool shuffle, dnri_order *out)
{
    if (n < 1 || n > UINT32_MAX)
        return DNR_FAIL(DNR_EUSAGE, "use a data set of 1 … 4294967295 samples", "%lld samples",
                        (long long)n);
    *out = (dnri_order){n, seed, shuffle, {NULL, NULL}, {-1, -1}};
    for (int i = 0; shuffle && i < 2; i++)
        if (!(out->perm[i] = malloc((size_t)n * sizeof **out->perm))) {
            dnri_order_close(out);
            return DNR_FAIL_NOMEM();
        }
    return DNR_OK;
}

void dnri_order_close(dnri_order *o)
{
    free(o->perm[0]);
    free(o->perm[1]);
    o->perm[0] = o->perm[1] = NULL;
}

/* Fisher and Yates, as by Durstenfeld 1964. */
static void permute(uint32_t *p, int64_t n, uint64_t seed, int64_t epoch)
{
    dnri_rng r = DNRI_RNG(DNRI_DRAW_ORDER, seed, (uint64_t)epoch);
    for (int64_t i = 0; i < n; i++)
        p[i] = (uint32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)dnri_rng_below(&r, (uint64_t)i + 1);
        uint32_t t = p[i];
        p[i] = p[j];
        p[j] = t;
    }
}

void dnri_order_at(dnri_order *o, int64_t position, int64_t *epoch, int64_t *sample)
{
    *epoch = position / o->n;
    *sample = position % o->n;
    if (!o->shuffle)
        return;
    int half = (int)(*epoch & 1);
    if (o->epoch[half] != *epoch) {
        permute(o->perm[half], o->n, o->seed, *epoch);
        o->epoch[half] = *epoch;
    }
    *sample = o->perm[half][*sample];
}

int64_t dnri_order_substitute(const dnri_order *o, int64_t epoch, int64_t sample, int attempt)
{
    dnri_rng r = DNRI_RNG(DNRI_DRAW_SUBSTITUTE, o->seed, (uint64_t)epoch, (uint64_t)sample,
                          (uint64_t)attempt);
    return (int64_t)dnri_rng_below(&r, (uint64_t)o->n);
}
