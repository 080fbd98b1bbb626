/* cache.c: decoded pictures of a data set that is small once decoded, kept from the first epoch on. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"

struct dnri_cache {
    int64_t n, budget;
    _Atomic int64_t bytes, pictures; /* kept so far */
    _Atomic(dnri_picture *) entry[];
};

dnr_status dnri_cache_open(const dnr_source *src, int64_t budget, dnri_cache **out)
{
    *out = NULL;
    /* a picture is hardly smaller decoded than encoded */
    if (!src->ops->read || src->bytes > budget || src->count > budget / 64)
        return DNR_OK;
    dnri_cache *c = calloc(1, sizeof *c + (size_t)src->count * sizeof c->entry[0]);
    if (!c)
        return DNR_FAIL_NOMEM();
    c->n = src->count;
    c->budget = budget;
    *out = c;
    return DNR_OK;
}

void dnri_cache_close(dnri_cache *c)
{
    for (int64_t i = 0; c && i < c->n; i++)
        free(c->entry[i]);
    free(c);
}

const dnri_picture *dnri_cache_get(dnri_cache *c, int64_t i)
{
    return c ? atomic_load_explicit(&c->entry[i], memory_order_acquire) : NULL;
}

void dnri_cache_put(dnri_cache *c, int64_t i, const dnri_picture *p)
{
    if (!c)
        return;
    int64_t size = (int64_t)p->w * p->h * 3, bytes = atomic_load(&c->bytes) + size;
    int64_t pictures = atomic_load(&c->pictures) + 1;
    /* only while the mean so far says that all will fit: a small part would seldom be met */
    if (bytes > c->budget || bytes / pictures > c->budget / c->n)
        return;
    dnri_picture *copy = malloc(sizeof *copy + (size_t)size), *none = NULL;
    if (!copy)
        return; /* the picture is decoded again next time */
    *copy = (dnri_picture){(uint8_t *)(copy + 1), p->w, p->h, (size_t)size};
    memcpy(copy->rgb, p->rgb, (size_t)size);
    if (!atomic_compare_exchange_strong_explicit(&c->entry[i], &none, copy, memory_order_release,
                                                 memory_order_relaxed)) {
        free(copy);
        return;
    }
    atomic_fetch_add(&c->bytes, size);
    atomic_fetch_add(&c->pictures, 1);
}
