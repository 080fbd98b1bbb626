/* rng.h: random numbers that are a pure function of a few integers, say (seed, epoch, sample), so
 * that nothing need be stored to go on after a resume, and threads may draw in any order.
 *
 *     dnri_rng r = DNRI_RNG(seed, epoch, sample);
 *     double u = dnri_rng_uniform(&r);
 *
 * The generator is splitmix64 (Steele, Lea, Flood 2014): draw i is a hash of key + i · odd
 * constant. */
#ifndef DNR_RNG_H
#define DNR_RNG_H

#include <stdbool.h>
#include <stdint.h>

typedef struct dnri_rng {
    uint64_t state;
    double spare; /* the second of a pair of normals */
    bool has_spare;
} dnri_rng;

/* A generator keyed by n integers; order matters. */
dnri_rng dnri_rng_seed(const uint64_t *words, int n);
#define DNRI_RNG(...)                                                                              \
    dnri_rng_seed((const uint64_t[]){__VA_ARGS__},                                                 \
                  (int)(sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)))
/* An integer to key with, from a name (FNV-1a). */
uint64_t dnri_rng_word(const char *text);

uint64_t dnri_rng_next(dnri_rng *r);              /* all 64 bits */
double dnri_rng_uniform(dnri_rng *r);             /* in [0, 1), a multiple of 2^-53 */
uint64_t dnri_rng_below(dnri_rng *r, uint64_t n); /* in [0, n), without bias; n >= 1 */
double dnri_rng_normal(dnri_rng *r);              /* mean 0, variance 1 */

#endif
