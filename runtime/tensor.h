/* tensor.h: element types and tensor descriptors. */
#ifndef DNR_TENSOR_H
#define DNR_TENSOR_H

#include "status.h"

typedef enum dnr_dtype { DNR_U8, DNR_I32, DNR_F16, DNR_BF16, DNR_F32, DNR_F64 } dnr_dtype;

size_t dnri_dtype_size(dnr_dtype t);
const char *dnri_dtype_name(dnr_dtype t); /* "fp16" … */

/* n values from type `t` to double and back; conversion to a narrower type rounds to nearest even,
 * overflow becomes infinity, NaN stays NaN. I32 and U8 saturate. */
void dnri_to_double(dnr_dtype t, const void *src, double *dst, size_t n);
void dnri_from_double(dnr_dtype t, const double *src, void *dst, size_t n);

/* A dense NHWC tensor; weights are [K, R, S, C] (output channels, height, width, input channels),
 * vectors [1, 1, 1, C]. */
typedef struct dnr_desc {
    dnr_dtype dtype;
    int64_t dim[4];
} dnr_desc;

static inline dnr_desc dnri_desc4(dnr_dtype t, int64_t n, int64_t h, int64_t w, int64_t c)
{
    return (dnr_desc){t, {n, h, w, c}};
}
static inline dnr_desc dnri_desc1(dnr_dtype t, int64_t c)
{
    return dnri_desc4(t, 1, 1, 1, c);
}
int64_t dnri_count(const dnr_desc *d); /* elements */
size_t dnri_bytes(const dnr_desc *d);
bool dnri_desc_equal(const dnr_desc *a, const dnr_desc *b);
/* "fp16[256,56,56,64]" into buf; returns buf */
const char *dnri_desc_text(const dnr_desc *d, char buf[64]);

#endif
