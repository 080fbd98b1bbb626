/* sum.c: the types that ranks add up, and adding on the host. */
#include "../runtime/comm.h"

enum { PIECE = 1024 }; /* elements */

size_t dnri_sum_size(dnri_sum t)
{
    static const size_t size[] = {[DNRI_SUM_F32] = 4,
                                  [DNRI_SUM_F64] = 8,
                                  [DNRI_SUM_I64] = 8,
                                  [DNRI_SUM_F16] = 2,
                                  [DNRI_SUM_BF16] = 2};
    return size[t];
}

dnri_sum dnri_sum_of(dnr_dtype t)
{
    return t == DNR_F64    ? DNRI_SUM_F64
           : t == DNR_F16  ? DNRI_SUM_F16
           : t == DNR_BF16 ? DNRI_SUM_BF16
                           : DNRI_SUM_F32;
}

#define ADD(type)                                                                                  \
    do {                                                                                           \
        for (size_t i = 0; i < n; i++)                                                             \
            ((type *)sum)[i] += ((const type *)more)[i];                                           \
    } while (0)

/* In double, which holds the sum of two 16-bit floats as it is, or near enough that it is rounded once. */
static void add_16(dnr_dtype t, uint16_t *sum, const uint16_t *more, size_t n)
{
    double a[PIECE], b[PIECE];
    for (size_t at = 0, some; at < n; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        dnri_to_double(t, sum + at, a, some);
        dnri_to_double(t, more + at, b, some);
        for (size_t i = 0; i < some; i++)
            a[i] += b[i];
        dnri_from_double(t, a, sum + at, some);
    }
}

void dnri_sum_add(dnri_sum t, void *sum, const void *more, size_t n)
{
    switch (t) {
    case DNRI_SUM_F32:
        ADD(float);
        break;
    case DNRI_SUM_F64:
        ADD(double);
        break;
    case DNRI_SUM_I64:
        ADD(int64_t);
        break;
    case DNRI_SUM_F16:
        add_16(DNR_F16, sum, more, n);
        break;
    case DNRI_SUM_BF16:
        add_16(DNR_BF16, sum, more, n);
        break;
    }
}
