/* tensor.c: element types, their conversions, and descriptors. */
#include "tensor.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    size_t size;
} types[] = {
    [DNR_U8] = {"uint8", 1},  [DNR_I32] = {"int32", 4}, [DNR_F16] = {"fp16", 2},
    [DNR_BF16] = {"bf16", 2}, [DNR_F32] = {"fp32", 4},  [DNR_F64] = {"fp64", 8},
};

size_t dnri_dtype_size(dnr_dtype t)
{
    return types[t].size;
}

const char *dnri_dtype_name(dnr_dtype t)
{
    return types[t].name;
}

/* The 16-bit floats: sign, exponent, `mant` bits of mantissa. */
typedef struct layout {
    int exp, mant;
} layout;
static const layout fp16 = {5, 10}, bf16 = {8, 7};

static double from_bits(uint32_t bits)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    return (double)v;
}

/* Every code of either type is a float, too. */
static double widen_half(uint16_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x8000) << 16, rest = (uint32_t)(code & 0x7fff) << 13;
    const uint32_t e = code >> 10 & 31;
    if (e == 0) /* subnormal */
        return (sign ? -0x1p-24 : 0x1p-24) * (code & 0x3ff);
    return from_bits(sign | (e == 31 ? rest | 0x7f800000u : rest + (112u << 23)));
}

static double widen_brain(uint16_t code)
{
    return from_bits((uint32_t)code << 16);
}

/* Rounds once, from the bits of the double: by way of a float, ties would be rounded twice. */
static uint16_t narrow(double v, layout l)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    uint64_t fraction = bits & ((UINT64_C(1) << 52) - 1);
    int e = (int)(bits >> 52 & 0x7ff);
    uint16_t sign = (uint16_t)(bits >> 48 & 0x8000);
    uint16_t infinity = (uint16_t)(((1 << l.exp) - 1) << l.mant);
    if (e == 0x7ff)
        return (uint16_t)(sign | infinity | (fraction ? 1 << (l.mant - 1) : 0));

    e += (1 << (l.exp - 1)) - 1 - 1023; /* the exponent field of the result */
    int shift = 52 - l.mant;
    if (e < 1) { /* subnormal: fewer bits remain */
        shift += 1 - e;
        e = 1;
    }
    if (shift > 53)
        return sign; /* less than half of the smallest */
    uint64_t significand = fraction | UINT64_C(1) << 52;
    uint64_t half = UINT64_C(1) << (shift - 1);
    uint64_t q = significand >> shift, rest = significand & (2 * half - 1);
    q += rest > half || (rest == half && (q & 1));
    q += (uint64_t)(e - 1) << l.mant; /* the implicit bit, or a carry, steps up the exponent */
    return (uint16_t)(sign | (q < infinity ? q : infinity));
}

static double saturate(double v, double lo, double hi)
{
    return v >= hi ? hi : v >= lo ? rint(v) : v < lo ? lo : 0; /* NaN gives 0 */
}

#define EACH(dst_type, src_type, expr)                                                             \
    do {                                                                                           \
        const src_type *s = src;                                                                   \
        dst_type *d = dst;                                                                         \
        for (size_t i = 0; i < n; i++)                                                             \
            d[i] = expr;                                                                           \
    } while (0)

void dnri_to_double(dnr_dtype t, const void *src, double *dst, size_t n)
{
    switch (t) {
    case DNR_U8:
        EACH(double, uint8_t, s[i]);
        break;
    case DNR_I32:
        EACH(double, int32_t, s[i]);
        break;
    case DNR_F16:
        EACH(double, uint16_t, widen_half(s[i]));
        break;
    case DNR_BF16:
        EACH(double, uint16_t, widen_brain(s[i]));
        break;
    case DNR_F32:
        EACH(double, float, (double)s[i]);
        break;
    case DNR_F64:
        EACH(double, double, s[i]);
        break;
    }
}

void dnri_from_double(dnr_dtype t, const double *src, void *dst, size_t n)
{
    switch (t) {
    case DNR_U8:
        EACH(uint8_t, double, (uint8_t)saturate(s[i], 0, UINT8_MAX));
        break;
    case DNR_I32:
        EACH(int32_t, double, (int32_t)saturate(s[i], INT32_MIN, INT32_MAX));
        break;
    case DNR_F16:
        EACH(uint16_t, double, narrow(s[i], fp16));
        break;
    case DNR_BF16:
        EACH(uint16_t, double, narrow(s[i], bf16));
        break;
    case DNR_F32:
        EACH(float, double, (float)s[i]);
        break;
    case DNR_F64:
        EACH(double, double, s[i]);
        break;
    }
}

int64_t dnri_count(const dnr_desc *d)
{
    return d->dim[0] * d->dim[1] * d->dim[2] * d->dim[3];
}

size_t dnri_bytes(const dnr_desc *d)
{
    return (size_t)dnri_count(d) * dnri_dtype_size(d->dtype);
}

bool dnri_desc_equal(const dnr_desc *a, const dnr_desc *b)
{
    return a->dtype == b->dtype && memcmp(a->dim, b->dim, sizeof a->dim) == 0;
}

const char *dnri_desc_text(const dnr_desc *d, char buf[64])
{
    snprintf(buf, 64, "%s[%lld,%lld,%lld,%lld]", dnri_dtype_name(d->dtype), (long long)d->dim[0],
             (long long)d->dim[1], (long long)d->dim[2], (long long)d->dim[3]);
    return buf;
}
