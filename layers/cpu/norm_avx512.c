/* norm_avx512.c: batch normalisation's passes over bf16 tensors by AVX-512.
 *
 * They are bound by memory, which compilers' code for bf16 is not. Sums are taken in fp32 over RUN rows and in double over
 * these: x has 8 bits and its square 16, so that where a mean far from 0 makes E[x²] − E[x]² a difference of near equals
 * (all x of a channel within a factor of 2) nothing is rounded before the double. */
#include "norm.h"

#include "avx512.h"

#include <float.h>
#include <string.h>

#ifdef HAVE_AVX512

enum { RUN = 8 }; /* rows summed in fp32 */

INLINE wide load_f32(const float *p, bool part, __mmask32 some)
{
    if (part)
        return (wide){_mm512_maskz_loadu_ps((__mmask16)some, p),
                      _mm512_maskz_loadu_ps((__mmask16)(some >> 16), p + 16)};
    return (wide){_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)};
}

INLINE wide add(wide a, wide b)
{
    return (wide){_mm512_add_ps(a.lo, b.lo), _mm512_add_ps(a.hi, b.hi)};
}

INLINE wide sub(wide a, wide b)
{
    return (wide){_mm512_sub_ps(a.lo, b.lo), _mm512_sub_ps(a.hi, b.hi)};
}

INLINE wide mul(wide a, wide b)
{
    return (wide){_mm512_mul_ps(a.lo, b.lo), _mm512_mul_ps(a.hi, b.hi)};
}

/* a · b + c */
INLINE wide mul_add(wide a, wide b, wide c)
{
    return (wide){_mm512_fmadd_ps(a.lo, b.lo, c.lo), _mm512_fmadd_ps(a.hi, b.hi, c.hi)};
}

/* a, and 0 where b < least or NaN */
INLINE wide keep_where(wide a, wide b, float least)
{
    const __m512 bound = _mm512_set1_ps(least);
    return (wide){_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b.lo, bound, _CMP_GE_OQ), a.lo),
                  _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b.hi, bound, _CMP_GE_OQ), a.hi)};
}

INLINE void add_to_8(double *sum, __m256 v, bool part, __mmask8 some)
{
    const __m512d d = _mm512_cvtps_pd(v);
    if (part)
        _mm512_mask_storeu_pd(sum, some, _mm512_add_pd(_mm512_maskz_loadu_pd(some, sum), d));
    else
        _mm512_storeu_pd(sum, _mm512_add_pd(_mm512_loadu_pd(sum), d));
}

INLINE __m256 upper(__m512 v)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}

INLINE void add_to(double *sum, wide v, bool part, __mmask32 some)
{
    add_to_8(sum, _mm512_castps512_ps256(v.lo), part, (__mmask8)some);
    add_to_8(sum + 8, upper(v.lo), part, (__mmask8)(some >> 8));
    add_to_8(sum + 16, _mm512_castps512_ps256(v.hi), part, (__mmask8)(some >> 16));
    add_to_8(sum + 24, upper(v.hi), part, (__mmask8)(some >> 24));
}

/* Large, and no row begins or ends within a cache line. */
static bool streams(const dnri_norm *s, const void *to)
{
    return s->m * s->c * (int64_t)sizeof(bf16) > STREAMED && s->c % WIDE == 0 &&
           (uintptr_t)to % 64 == 0;
}

/* ---- forward */

INLINE void moments_of(const bf16 *x, int64_t c, int64_t rows, bool part, __mmask32 some,
                       double *sum, double *square)
{
    wide a = {_mm512_setzero_ps(), _mm512_setzero_ps()}, b = a;
    for (int64_t r = 0; r < rows; r++) {
        const wide v = load(x + r * c, part, some);
        a = add(a, v);
        b = mul_add(v, v, b);
    }
    add_to(sum, a, part, some);
    add_to(square, b, part, some);
}

AVX static void moments(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnri_norm *s = ctx;
    const int64_t c = s->c;
    double *sum = s->sums + 2 * slice * c, *square = sum + c;
    memset(sum, 0, 2 * (size_t)c * sizeof *sum);
    int64_t r = begin;
#define OF(j, part, some)                                                                          \
    moments_of((const bf16 *)s->x + r * c + (j), c, rows, part, some, sum + (j), square + (j))
    for (const int rows = RUN; r + rows <= end; r += rows)
        EACH_CHANNEL(c, OF);
    const int64_t rows = end - r;
    EACH_CHANNEL(c, OF);
#undef OF
}

typedef struct channel_params { /* of the channel at hand */
    wide mean, factor, beta;
} channel_params;

INLINE channel_params params_at(const dnri_norm *s, int64_t j, bool beta, bool part, __mmask32 some)
{
    channel_params p = {.mean = load_f32(s->mean + j, part, some),
                        .factor = load_f32(s->factor + j, part, some)};
    if (beta)
        p.beta = load_f32(s->beta + j, part, some);
    return p;
}

/* Also what backward takes its mask from. */
INLINE wide scaled(wide x, const channel_params *p)
{
    return mul_add(sub(x, p->mean), p->factor, p->beta);
}

INLINE void normalise_at(const dnri_norm *s, int64_t i, int64_t j, bool relu, bool res, bool stream,
                         bool part, __mmask32 some)
{
    const channel_params p = params_at(s, j, true, part, some);
    wide v = scaled(load((const bf16 *)s->x + i + j, part, some), &p);
    if (res)
        v = add(v, load((const bf16 *)s->res + i + j, part, some));
    if (relu) { /* the second where one is NaN */
        v.lo = _mm512_max_ps(_mm512_setzero_ps(), v.lo);
        v.hi = _mm512_max_ps(_mm512_setzero_ps(), v.hi);
    }
    store((bf16 *)s->y + i + j, v, part, some, stream);
}

INLINE void normalise_with(const dnri_norm *s, int64_t begin, int64_t end, bool relu, bool res,
                           bool stream)
{
    const dnri_norm k = *s;
#define AT(j, part, some) normalise_at(&k, r *k.c, j, relu, res, stream, part, some)
    for (int64_t r = begin; r < end; r++)
        EACH_CHANNEL(k.c, AT);
#undef AT
    if (stream)
        _mm_sfence();
}

/* Options become constants, so that each case gets a loop without branches. */
AVX static void normalise(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnri_norm *s = ctx;
#define CASE(relu, res, stream)                                                                    \
    case (relu) + 2 * (res) + 4 * (stream):                                                        \
        normalise_with(s, begin, end, relu, res, stream);                                          \
        break
    switch (s->relu + 2 * (s->res != NULL) + 4 * streams(s, s->y)) {
        CASE(false, false, false);
        CASE(true, false, false);
        CASE(false, true, false);
        CASE(true, true, false);
        CASE(false, false, true);
        CASE(true, false, true);
        CASE(false, true, true);
        CASE(true, true, true);
    }
#undef CASE
}

/* ---- backward */

enum { NO_MASK, FROM_Y, FROM_X };

INLINE wide dz_at(const dnri_norm *s, int64_t i, wide x, const channel_params *p, int mask,
                  bool dy2, bool part, __mmask32 some)
{
    wide dz = load((const bf16 *)s->dy + i, part, some);
    if (dy2)
        dz = add(dz, load((const bf16 *)s->dy2_in + i, part, some));
    if (mask == FROM_Y) /* no bf16 lies between */
        dz = keep_where(dz, load((const bf16 *)s->y + i, part, some), FLT_TRUE_MIN);
    else if (mask == FROM_X)
        dz = keep_where(dz, scaled(x, p), FLT_MIN);
    return dz;
}

INLINE void sums_of(const dnri_norm *s, int64_t i, int64_t j, int64_t rows, int mask, bool dy2,
                    bool res, bool stream, bool part, __mmask32 some, double *sum, double *dot)
{
    const channel_params p = params_at(s, j, mask == FROM_X, part, some);
    wide a = {_mm512_setzero_ps(), _mm512_setzero_ps()}, b = a;
    i += j;
    for (int64_t r = 0; r < rows; r++, i += s->c) {
        const wide x = load((const bf16 *)s->x + i, part, some);
        const wide dz = dz_at(s, i, x, &p, mask, dy2, part, some);
        if (res)
            store((bf16 *)s->dres + i, dz, part, some, stream);
        a = add(a, dz);
        b = mul_add(dz, sub(x, p.mean), b);
    }
    add_to(sum + j, a, part, some);
    add_to(dot + j, b, part, some);
}

INLINE void sums_with(const dnri_norm *s, int slice, int64_t begin, int64_t end, int mask, bool dy2,
                      bool res, bool stream)
{
    const dnri_norm k = *s;
    double *sum = k.sums + 2 * slice * k.c, *dot = sum + k.c;
    memset(sum, 0, 2 * (size_t)k.c * sizeof *sum);
    int64_t r = begin;
#define OF(j, part, some) sums_of(&k, r *k.c, j, n, mask, dy2, res, stream, part, some, sum, dot)
    for (const int n = RUN; r + n <= end; r += n)
        EACH_CHANNEL(k.c, OF);
    const int64_t n = end - r;
    EACH_CHANNEL(k.c, OF);
#undef OF
    if (stream)
        _mm_sfence();
}

INLINE void dx_at(const dnri_norm *s, int64_t i, int64_t j, int mask, bool dy2, bool stream,
                  bool part, __mmask32 some)
{
    const channel_params p = params_at(s, j, mask == FROM_X, part, some);
    const wide offset = load_f32(s->offset + j, part, some);
    const wide slope = load_f32(s->slope + j, part, some);
    const wide x = load((const bf16 *)s->x + i + j, part, some);
    const wide dz = dz_at(s, i + j, x, &p, mask, dy2, part, some);
    const wide t = mul(sub(x, p.mean), slope);
    store((bf16 *)s->dx + i + j, mul(p.factor, sub(sub(dz, offset), t)), part, some, stream);
}

INLINE void dx_with(const dnri_norm *s, int64_t begin, int64_t end, int mask, bool dy2, bool stream)
{
    const dnri_norm k = *s;
#define AT(j, part, some) dx_at(&k, r *k.c, j, mask, dy2, stream, part, some)
    for (int64_t r = begin; r < end; r++)
        EACH_CHANNEL(k.c, AT);
#undef AT
    if (stream)
        _mm_sfence();
}

/* Where the ReLU's mask comes from: y with a residual (then dresidual is written as well) or where there is no beta. */
static int mask_of(const dnri_norm *s)
{
    return !s->relu ? NO_MASK : s->beta && !s->dres ? FROM_X : FROM_Y;
}

#define EACH_CASE(CASE)                                                                            \
    CASE(NO_MASK, false, false);                                                                   \
    CASE(NO_MASK, true, false);                                                                    \
    CASE(FROM_Y, false, false);                                                                    \
    CASE(FROM_Y, true, false);                                                                     \
    CASE(FROM_X, false, false);                                                                    \
    CASE(FROM_X, true, false);                                                                     \
    CASE(NO_MASK, false, true);                                                                    \
    CASE(NO_MASK, true, true);                                                                     \
    CASE(FROM_Y, false, true);                                                                     \
    CASE(FROM_Y, true, true);                                                                      \
    CASE(FROM_X, false, true);                                                                     \
    CASE(FROM_X, true, true)

AVX static void bwd_sums(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnri_norm *s = ctx;
#define CASE(mask, dy2, stream)                                                                    \
    case (mask) + 3 * (dy2) + 6 * (stream):                                                        \
        sums_with(s, slice, begin, end, mask, dy2, (mask) == FROM_Y, stream);                      \
        break
    switch (mask_of(s) + 3 * s->dy2 + 6 * (s->dres && streams(s, s->dres))) {
        EACH_CASE(CASE);
    }
#undef CASE
}

AVX static void bwd_dx(void *ctx, int slice, int64_t begin, int64_t end)
{
    dnri_norm s = *(const dnri_norm *)ctx;
    int mask = mask_of(&s);
    if (s.dres) { /* it holds dz */
        s.dy = s.dres;
        s.dy2 = false;
        mask = NO_MASK;
    }
#define CASE(mask, dy2, stream)                                                                    \
    case (mask) + 3 * (dy2) + 6 * (stream):                                                        \
        dx_with(&s, begin, end, mask, dy2, stream);                                                \
        break
    switch (mask + 3 * s.dy2 + 6 * streams(&s, s.dx)) {
        EACH_CASE(CASE);
    }
#undef CASE
}

const dnri_norm_passes *dnri_norm_avx512(void)
{
    static const dnri_norm_passes passes = {moments, normalise, bwd_sums, bwd_dx};
    return has_avx512() ? &passes : NULL;
}

#else
const dnri_norm_passes *dnri_norm_avx512(void)
{
    return NULL;
}
#endif
