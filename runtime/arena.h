/* arena.h: lifetimes to offsets. A pure function; knows nothing of graphs. */
#ifndef DNR_ARENA_H
#define DNR_ARENA_H

#include "status.h"

typedef struct dnri_span {
    size_t size;     /* bytes; 0 is allowed */
    int first, last; /* live during ops first…last, both included */
    size_t offset;   /* result: a multiple of `align` */
} dnri_span;

/* Sets the offsets so that no two spans that are alive together overlap. `align` is a power of two.
 * `*peak` is the arena's size. Deterministic; O(n²). The problem is NP-hard (dynamic storage
 * allocation): no bound near the lower bound below is proven for this method. Tests hold it to 1.25
 * times that bound on random and adversarial sets, and to it exactly where lives nest, as in
 * forward and backward. */
dnr_status dnri_arena_plan(dnri_span *spans, int n, size_t align, size_t *peak);

/* Largest sum of sizes (rounded up to `align`) alive at one op: no arena is smaller. */
size_t dnri_arena_lower_bound(const dnri_span *spans, int n, size_t align);

#endif
