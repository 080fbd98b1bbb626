/* bucket.h: the flat gradient slab cut into buckets for communication. */
#ifndef DNR_BUCKET_H
#define DNR_BUCKET_H

#include "store.h"

/* PyTorch DDP's sizes: a small first bucket starts communication early. */
#define DNRI_BUCKET_FIRST (1 << 20)
#define DNRI_BUCKET_BYTES (25 << 20)

typedef struct dnri_bucket {
    int64_t offset, count; /* elements of the flat slab */
    int first, last;       /* parameters: positions in slab order, both included */
} dnri_bucket;

/* Cuts the sealed table into buckets of at least `bytes` (the first of `first_bytes`, so that
 * communication starts early) of elements of `elem` bytes; no parameter is cut in two. `*out` from
 * malloc. */
dnr_status dnri_buckets_make(const dnri_params *p, size_t elem, size_t first_bytes, size_t bytes,
                             dnri_bucket **out, int *n);

/* Index in the table of the parameter at position k of the slab order; -1 past the end. */
int dnri_params_slab_order(const dnri_params *p, int k);

#endif
