/* reduce.h: sums over ranks inside a program. A pass puts them into the list of ops, where nothing runs them unless
 * there is a communicator; dist/ lowers them.
 *
 * Gradients are cut into buckets (bucket.h). A bucket is complete when the last op that writes a gradient of it has run;
 * from then on its sum travels on the comm lane while backward goes on. The update waits for all of them. */
#ifndef DNR_REDUCE_H
#define DNR_REDUCE_H

#include "bucket.h"
#include "comm.h"
#include "graph.h"

/* reduce: in {t}, out {t}: `count` elements of type `sum` from byte `offset` of t ← their sums over all ranks. Returns
 * before that is so, unless `wait`. */
typedef struct dnri_reduce_attr {
    int64_t offset, count;
    int64_t sum;    /* dnri_sum */
    int64_t bucket; /* its number; -1: no bucket of gradients */
    int64_t
        wait; /* 0: on the comm lane. On the compute lane, which goes on with the sums: 1: with a later
                       reduction's, 2: at once */
    int64_t group; /* over each so many ranks, in their order; 0: over all */
} dnri_reduce_attr;
extern const dnri_op_def dnri_def_reduce;
/* reduce.wait: in {t}, out {t}: all sums begun so far are there. */
extern const dnri_op_def dnri_def_reduce_wait;

/* wire.pack: in {GRAD or GSUM}, out {wire}: elements offset … offset + count − 1, rounded to nearest even to the 16-bit
 * type `type` in which they travel; beyond its range they become infinite, and the step is skipped as any overflow.
 * wire.unpack: in {wire}, out {GRAD or GSUM}: back to where they came from. Both offset and count are multiples of
 * DNRI_PARAM_ALIGN. */
typedef struct dnri_wire_attr {
    int64_t offset, count;
    int64_t type; /* dnr_dtype: F16 or BF16 */
} dnri_wire_attr;
extern const dnri_op_def dnri_def_wire_pack, dnri_def_wire_unpack;

typedef struct dnri_reduce_opts {
    size_t bytes;   /* of a bucket; the first has DNRI_BUCKET_FIRST where that is less */
    bool sums;      /* accumulate > 1: a bucket is folded into GSUM first, and that is reduced */
    dnr_dtype wire; /* gradients travel as F16 or BF16; else as they are */
    bool
        one_lane; /* other reductions run on the compute lane: so must all, for a library that takes them in turn */
} dnri_reduce_opts;

/* The buckets of a graph whose parameters are sealed. `*out` from malloc. */
dnr_status dnri_graph_buckets(const dnr_graph *g, size_t bytes, dnri_bucket **out, int *n);

/* after[b] ← the op behind which all gradients of bucket b are complete; -1: it has none. [n] each. */
void dnri_bucket_places(const dnr_graph *g, const dnri_bucket *b, int n, int *after);

/* Puts into a `last` graph, after its backward and before its update: a reduce after each bucket's last gradient
 * (behind a grad.fold of it where `sums`), and of the metrics after the loss. */
dnr_status dnri_rewrite_reduce(dnr_graph *g, const dnri_reduce_opts *o);
/* Emits what makes of it the gradients `grad` (GRAD or GSUM) that the update reads: the wait, and the unpacking. */
dnr_status dnri_emit_reduced(dnr_graph *g, dnr_tid grad);

#endif
