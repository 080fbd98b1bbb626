/* rng.c: splitmix64 and the distributions drawn from it. */
#include "rng.h"

#include <math.h>

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t dnri_rng_next(dnri_rng *r)
{
    return mix(r->state += 0x9e3779b97f4a7c15u);
}

dnri_rng dnri_rng_seed(const uint64_t *words, int n)
{
    dnri_rng r = {.state = (uint64_t)n};
    for (int i = 0; i < n; i++)
        r.state = dnri_rng_next(&r) ^ mix(words[i] + 0x632be59bd9b4e019u);
    r.state = mix(r.state);
    return r;
}

uint64_t dnri_rng_word(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

double dnri_rng_uniform(dnri_rng *r)
{
    return (double)(dnri_rng_next(r) >> 11) * 0x1p-53;
}

uint64_t dnri_rng_below(dnri_rng *r, uint64_t n)
{
    uint64_t skip =
        (0 - n) % n; /* 2^64 mod n: with these left out, each remainder is equally frequent */
    uint64_t x;
    do
        x = dnri_rng_next(r);
    while (x < skip);
    return x % n;
}

/* Box and Muller 1958. */
double dnri_rng_normal(dnri_rng *r)
{
    r->has_spare = !r->has_spare;
    if (!r->has_spare)
        return r->spare;
    double radius = sqrt(-2 * log1p(-dnri_rng_uniform(r))); /* 1 - u is never 0 */
    double angle = 6.283185307179586 * dnri_rng_uniform(r);
    r->spare = radius * sin(angle);
    return radius * cos(angle);
}
