/* arena.c: lifetimes to offsets. First fit is only as good as its order, so a few orders are tried,
 * and each is improved by what it got wrong: the spans that reached the peak go first next time. */
#include "arena.h"

#include <stdlib.h>
#include <string.h>

typedef struct item {
    dnri_span span; /* size rounded up */
    int index;      /* in the caller's array */
    double key;     /* greatest first */
} item;

static size_t round_up(size_t size, size_t align)
{
    return (size + align - 1) & ~(align - 1);
}

size_t dnri_arena_lower_bound(const dnri_span *spans, int n, size_t align)
{
    size_t most = 0;
    for (int i = 0; i < n; i++) { /* the sum rises only where a span begins */
        int t = spans[i].first;
        size_t alive = 0;
        for (int k = 0; k < n; k++) /* no branches, so that it is vectorised */
            alive += round_up(spans[k].size, align) *
                     (size_t)((spans[k].first <= t) & (t <= spans[k].last));
        most = alive > most ? alive : most;
    }
    return most;
}

/* Puts the items, in turn, at the lowest place that is free for all of their life; returns the
 * peak. `map` holds those placed, sorted by offset. */
static size_t first_fit(item *items, int n, dnri_span *map)
{
    size_t peak = 0;
    for (int i = 0; i < n; i++) {
        dnri_span *s = &items[i].span;
        size_t end = s->size;
        for (int k = 0; k < i && map[k].offset < end; k++) {
            size_t above = map[k].offset + map[k].size + s->size;
            if (s->first <= map[k].last && map[k].first <= s->last && above > end)
                end = above;
        }
        s->offset = end - s->size;
        int at = i;
        for (; at > 0 && map[at - 1].offset > s->offset; at--)
            map[at] = map[at - 1];
        map[at] = *s;
        peak = end > peak ? end : peak;
    }
    return peak;
}

static int by_key(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? 1 : -1;
    if (x->span.size != y->span.size)
        return x->span.size < y->span.size ? 1 : -1;
    return x->index - y->index;
}

enum { BY_SIZE, BY_AREA, BY_LIFE, BY_FIRST, ORDERS };

static void sort(item *items, int n, int order)
{
    for (int i = 0; i < n; i++) {
        const dnri_span *s = &items[i].span;
        double size = (double)s->size, life = (double)s->last - s->first + 1;
        const double keys[ORDERS] = {size, size * life, life, -(double)s->first};
        items[i].key = keys[order];
    }
    qsort(items, (size_t)n, sizeof *items, by_key);
}

/* Moves the items that end at the peak to the front, where they keep their order. */
static void promote(item *items, int n, size_t peak)
{
    for (int i = 0, front = 0; i < n; i++)
        if (items[i].span.offset + items[i].span.size == peak) {
            item top = items[i];
            memmove(&items[front + 1], &items[front], (size_t)(i - front) * sizeof top);
            items[front++] = top;
        }
}

dnr_status dnri_arena_plan(dnri_span *spans, int n, size_t align, size_t *peak)
{
    dnr_status st = DNR_OK;
    item *items = malloc(((size_t)n + 1) * sizeof *items);
    dnri_span *map = malloc(((size_t)n + 1) * sizeof *map);
    if (!items || !map) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    int used = 0;
    for (int i = 0; i < n; i++) {
        spans[i].offset = 0;
        if (spans[i].size == 0)
            continue;
        if (spans[i].first > spans[i].last) {
            st = DNR_FAIL(DNR_EUSAGE, "let a span end after it begins",
                          "span %d lives from %d to %d", i, spans[i].first, spans[i].last);
            goto out;
        }
        items[used] = (item){.span = spans[i], .index = i};
        items[used++].span.size = round_up(spans[i].size, align);
    }
    size_t bound = dnri_arena_lower_bound(spans, n, align);
    double affordable =
        4e6 / ((double)used * used + 1); /* keeps thousands of spans within some 20 ms */
    int rounds = affordable < 2 ? 2 : affordable > 32 ? 32 : (int)affordable;
    *peak = used ? SIZE_MAX : 0;
    for (int try = 0; try<ORDERS * rounds && * peak> bound; try++) {
        if (try % rounds == 0)
            sort(items, used, try / rounds);
        size_t got = first_fit(items, used, map);
        if (got < *peak) {
            *peak = got;
            for (int i = 0; i < used; i++)
                spans[items[i].index].offset = items[i].span.offset;
        }
        promote(items, used, got);
    }
out:
    free(items);
    free(map);
    return st;
}
