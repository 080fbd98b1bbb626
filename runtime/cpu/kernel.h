/* kernel.h: writing CPU kernels once for fp32 and bf16, in forms that compilers vectorise.
 *
 * A kernel is an always-inline function whose last argument says whether tensors are bf16; DNRI_KERNEL(f) makes
 * the two instances and the table f_k[2]. Threads stay in threads.c: a compiler outlines a parallel region before
 * it clones a function for each instruction set, and would leave the region's body in the plainest one. */
#ifndef DNR_CPU_KERNEL_H
#define DNR_CPU_KERNEL_H

#include <stdint.h>
#include <string.h>

#include "cpu.h"

/* One instance for each instruction set, chosen when the module loads. Only gcc does this well, and
 * sanitizers do not survive the resolvers. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) &&                             \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DNRI_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DNRI_CLONES
#endif

#define DNRI_INLINE static inline __attribute__((always_inline))

#define DNRI_KERNEL(f)                                                                             \
    DNRI_CLONES static void f##_f32(void *ctx, int slice, int64_t begin, int64_t end)              \
    {                                                                                              \
        f(ctx, slice, begin, end, false);                                                          \
    }                                                                                              \
    DNRI_CLONES static void f##_bf16(void *ctx, int slice, int64_t begin, int64_t end)             \
    {                                                                                              \
        f(ctx, slice, begin, end, true);                                                           \
    }                                                                                              \
    static const dnri_slice_fn f##_k[2] = {f##_f32, f##_bf16}

/* for i in begin … end − 1, in any order and several at once */
#define DNRI_EACH(i, begin, end) _Pragma("omp simd") for (int64_t i = (begin); i < (end); i++)

/* Element i of a tensor. */
DNRI_INLINE float dnri_ld(const void *p, int64_t i, bool bf16)
{
    if (!bf16)
        return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Rounds to nearest even; NaN stays NaN. */
DNRI_INLINE void dnri_st(void *p, int64_t i, float v, bool bf16)
{
    if (!bf16) {
        ((float *)p)[i] = v;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    uint32_t round = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    ((uint16_t *)p)[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : round);
}

/* keep ? v : 0, by masking: compilers turn the plain form into a branch around the load of v, and
 * then do not vectorise the loop. */
DNRI_INLINE float dnri_keep_if(bool keep, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    bits &= -(uint32_t)keep;
    memcpy(&v, &bits, sizeof v);
    return v;
}

#endif
