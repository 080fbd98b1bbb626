/* avx512.h: bf16 tensors by AVX-512, 32 channels at a time. HAVE_AVX512: the compiler knows its bf16 instructions. */
#ifndef DNR_CPU_AVX512_H
#define DNR_CPU_AVX512_H

#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<avx512bf16intrin.h>)
#define HAVE_AVX512
#endif
#endif

#ifdef HAVE_AVX512
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#define AVX    __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE AVX static inline __attribute__((always_inline))

enum { WIDE = 32 };

static const int64_t STREAMED = 8 << 20; /* bytes: a larger result goes past the caches */

typedef uint16_t bf16;

typedef struct wide { /* 32 channels */
    __m512 lo, hi;
} wide;

static inline bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

/* Channels of a mask, a bit each; all 32 where `part` is false, which is known at compile time. */
INLINE wide load(const bf16 *p, bool part, __mmask32 some)
{
    __m256i lo, hi;
    if (part) {
        const __m512i v = _mm512_maskz_loadu_epi16(some, p);
        lo = _mm512_castsi512_si256(v);
        hi = _mm512_extracti64x4_epi64(v, 1);
    } else {
        lo = _mm256_loadu_si256((const __m256i *)p);
        hi = _mm256_loadu_si256((const __m256i *)p + 1);
    }
    return (wide){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(lo), 16)),
                  _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(hi), 16))};
}

/* Rounds to nearest even; what is below FLT_MIN becomes 0. */
INLINE void store(bf16 *p, wide v, bool part, __mmask32 some, bool stream)
{
    const __m512i r = (__m512i)_mm512_cvtne2ps_pbh(v.hi, v.lo);
    if (part)
        _mm512_mask_storeu_epi16(p, some, r);
    else if (stream)
        _mm512_stream_si512((__m512i *)p, r);
    else
        _mm512_storeu_si512(p, r);
}

/* Calls body(j, part, some) for all channels, 32 at a time and then the rest. */
#define EACH_CHANNEL(c, BODY)                                                                      \
    do {                                                                                           \
        int64_t j = 0;                                                                             \
        for (; j + WIDE <= (c); j += WIDE)                                                         \
            BODY(j, false, 0);                                                                     \
        if (j < (c))                                                                               \
            BODY(j, true, (__mmask32)(((uint64_t)1 << ((c)-j)) - 1));                              \
    } while (0)

#endif
#endif
