/* pool_avx512.c: maximum pooling of bf16 tensors by AVX-512: pool.c's arithmetic, with what it compares in registers. */
#include "pool.h"

#include "avx512.h"

#include <math.h>
#include <stddef.h>

#ifdef HAVE_AVX512

typedef struct best { /* of 16 channels so far, and where it was */
    __m512 v;
    __m512i tap;
} best;

/* The first of equals; NaN wins and stays. */
INLINE void take(best *b, __m512 v, __m512i here)
{
    const __mmask16 more =
        _mm512_cmp_ps_mask(v, b->v, _CMP_NLE_UQ) & _mm512_cmp_ps_mask(b->v, b->v, _CMP_ORD_Q);
    b->v = _mm512_mask_mov_ps(b->v, more, v);
    b->tap = _mm512_mask_mov_epi32(b->tap, more, here);
}

INLINE void put(const best *b, bool positive, bf16 *y, uint8_t *index, __mmask16 some)
{
    const __mmask16 none =
        positive ? _mm512_cmp_ps_mask(b->v, _mm512_setzero_ps(), _CMP_NGT_UQ) : 0;
    const __m512i tap = _mm512_mask_mov_epi32(b->tap, none, _mm512_set1_epi32(255));
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(b->v), 16);
    _mm512_mask_cvtepi32_storeu_epi16(y, some, bits);
    _mm512_mask_cvtepi32_storeu_epi8(index, some, tap);
}

/* The window r0 … r1 − 1, s0 … s1 − 1 that begins at x. */
INLINE void max_of(const dnri_pool *s, const bf16 *x, int64_t r0, int64_t r1, int64_t s0,
                   int64_t s1, bf16 *y, uint8_t *index, bool part, __mmask32 some)
{
    best lo = {_mm512_set1_ps(-INFINITY), _mm512_set1_epi32((int)(r0 * s->kernel + s0))}, hi = lo;
    for (int64_t r = r0; r < r1; r++)
        for (int64_t t = s0; t < s1; t++) {
            const wide v = load(x + (r * s->w + t) * s->c, part, some);
            const __m512i here = _mm512_set1_epi32((int)(r * s->kernel + t));
            take(&lo, v.lo, here);
            take(&hi, v.hi, here);
        }
    const __mmask32 all = part ? some : ~(__mmask32)0;
    put(&lo, s->positive, y, index, (__mmask16)all);
    put(&hi, s->positive, y + 16, index + 16, (__mmask16)(all >> 16));
}

AVX static void max_rows(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnri_pool *s = ctx;
    for (int64_t row = begin; row < end; row++)
        for (int64_t q = 0; q < s->q; q++) {
            const int64_t h0 = row % s->p * s->stride - s->pad, w0 = q * s->stride - s->pad;
            const int64_t r0 = dnri_at_least(0, -h0), r1 = dnri_at_most(s->kernel, s->h - h0);
            const int64_t s0 = dnri_at_least(0, -w0), s1 = dnri_at_most(s->kernel, s->w - w0);
            const int64_t from = ((row / s->p * s->h + h0) * s->w + w0) * s->c;
            const int64_t to = (row * s->q + q) * s->c;
            const bf16 *x = s->b.in[0];
            bf16 *y = s->b.out[0];
            uint8_t *index = s->b.out[1];
#define AT(j, part, some)                                                                          \
    max_of(s, x + from + (j), r0, r1, s0, s1, y + to + (j), index + to + (j), part, some)
            EACH_CHANNEL(s->c, AT);
#undef AT
        }
}

/* The windows p0 … p1 − 1, q0 … q1 − 1 that hold the pixel (h, w). */
INLINE void gather(const dnri_pool *s, int64_t n, int64_t h, int64_t w, int64_t j, int64_t p0,
                   int64_t p1, int64_t q0, int64_t q1, bf16 *dx, bool stream, bool part,
                   __mmask32 some)
{
    wide sum = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t p = p0; p < p1; p++)
        for (int64_t q = q0; q < q1; q++) {
            const int64_t from = ((n * s->p + p) * s->q + q) * s->c + j;
            const int64_t here =
                (h + s->pad - p * s->stride) * s->kernel + w + s->pad - q * s->stride;
            const uint8_t *index = (const uint8_t *)s->b.in[1] + from;
            const __m256i at = part ? _mm256_maskz_loadu_epi8(some, index)
                                    : _mm256_loadu_si256((const __m256i *)index);
            const __mmask32 is = _mm256_cmpeq_epi8_mask(at, _mm256_set1_epi8((char)here));
            const wide dy = load((const bf16 *)s->b.in[0] + from, part, some);
            sum.lo = _mm512_mask_add_ps(sum.lo, (__mmask16)is, sum.lo, dy.lo);
            sum.hi = _mm512_mask_add_ps(sum.hi, (__mmask16)(is >> 16), sum.hi, dy.hi);
        }
    store(dx, sum, part, some, stream);
}

INLINE void bwd_with(const dnri_pool *s, int64_t begin, int64_t end, bool stream)
{
    for (int64_t row = begin; row < end; row++)
        for (int64_t w = 0; w < s->w; w++) {
            const int64_t n = row / s->h, h = row % s->h;
            /* windows p with p·stride − pad <= h < p·stride − pad + kernel */
            const int64_t p0 = dnri_at_least(0, (h + s->pad - s->kernel + s->stride) / s->stride);
            const int64_t p1 = dnri_at_most(s->p, (h + s->pad) / s->stride + 1);
            const int64_t q0 = dnri_at_least(0, (w + s->pad - s->kernel + s->stride) / s->stride);
            const int64_t q1 = dnri_at_most(s->q, (w + s->pad) / s->stride + 1);
            bf16 *dx = (bf16 *)s->b.out[0] + (row * s->w + w) * s->c;
#define AT(j, part, some) gather(s, n, h, w, j, p0, p1, q0, q1, dx + (j), stream, part, some)
            EACH_CHANNEL(s->c, AT);
#undef AT
        }
    if (stream)
        _mm_sfence();
}

AVX static void max_bwd_rows(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnri_pool *s = ctx;
    const int64_t bytes = s->n * s->h * s->w * s->c * (int64_t)sizeof(bf16);
    if (bytes > STREAMED && s->c % WIDE == 0 && (uintptr_t)s->b.out[0] % 64 == 0)
        bwd_with(s, begin, end, true);
    else
        bwd_with(s, begin, end, false);
}

dnri_slice_fn dnri_max_pool_avx512(bool forward)
{
    return !has_avx512() ? NULL : forward ? max_rows : max_bwd_rows;
}

#else
dnri_slice_fn dnri_max_pool_avx512(bool forward)
{
    return NULL;
}
#endif
