/* fakesource.h: a data set that misbehaves to order: sample i is a 4 × 4 picture whose red is i mod 251, its
 * label is i mod 10 and its name "picK" of K = i mod 10. */
#ifndef DNR_FAKESOURCE_H
#define DNR_FAKESOURCE_H

#include <stdatomic.h>

#include "datarig.h"

typedef struct fake {
    dnr_source base;
    bool encoded; /* read() gives BMPs, so that the cache is in play */
    bool (*bad)(int64_t i);
    dnr_status bad_status;
    _Atomic int64_t reads;
    _Atomic int64_t stuck; /* sample that does not come; −1 = none */
    int delay_us;
} fake;

fake fake_source(int64_t n, bool encoded);
bool bad_tenth(int64_t i); /* i mod 10 = 3 */
bool bad_all(int64_t i);
bool bad_five(int64_t i); /* i = 5 */

/* Options of a shuffled training stream, and of a validation pass, of 4 × 4 pictures. */
dnr_loader_opts train(int64_t batch, int threads);
dnr_loader_opts pass(int64_t batch, int threads);

/* A hash of `samples` samples of a stream, taken one by one so that batch sizes do not matter. */
uint64_t stream_hash(dnr_source *s, dnr_loader_opts o, int64_t samples);

#endif
