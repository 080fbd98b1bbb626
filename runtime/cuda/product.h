/* product.h: matrix products through cuBLASLt with sums in fp32, in the order of our tensors: row after row, without gaps.
 * Where cuBLASLt has no algorithm, plain loops. */
#ifndef DNR_PRODUCT_H
#define DNR_PRODUCT_H

#include "device.h"

/* D [m,n] = A [m,l] · B [l,n]. All fields of one width, so that two compare by memcmp. */
typedef struct dnri_product_spec {
    int64_t m, n, l;
    int64_t a_t, b_t; /* A is stored as [l,m], B as [n,l] */
    int64_t in,
        out; /* dnr_dtype of A and B; of D and the bias. F16 or BF16 in: out is the same or F32 */
    int64_t tf32;  /* F32 may be multiplied in TF32 */
    int64_t bias;  /* + bias [n] in each row */
    int64_t add;   /* + C, or D as it was where the run gives no C */
    int64_t relu;  /* of all that */
    int64_t mask;  /* with relu: bit j of a row, of byte j/8, says whether what ReLU had was above 0
                                     * (a 0 may count as above); n is a multiple of 128. Not of plain loops */
    int64_t batch; /* so many products of equal shape; 0: one */
    int64_t step_a, step_b, step_d; /* elements from one matrix of the batch to the next */
    int64_t
        align; /* bytes that the addresses of A, B and D are multiples of; 0: those of a tensor */
} dnri_product_spec;

/* How a product is computed: chosen once for each problem of a device, which owns it. Timed where o->benchmark and
 * not o->deterministic; the same bits every time either way. */
typedef struct dnri_product dnri_product;
dnr_status dnri_product_choose(dnri_cuda *d, const dnri_product_spec *z, const dnri_lower_opts *o,
                               const dnri_product **out);
/* The same with a remark where plain loops are all there is. */
dnr_status dnri_product_for(dnri_cuda *d, const dnri_op *op, const dnri_product_spec *z,
                            const dnri_lower_opts *o, const dnri_product **out);
void dnri_product_drop_all(dnri_cuda *d);

size_t dnri_product_workspace(const dnri_product *p); /* bytes, at most o->workspace_cap */
const char *dnri_product_impl(const dnri_product *p); /* "cublasLt algo 66 tile 20", "direct" */
bool dnri_product_is_direct(const dnri_product *p);   /* plain loops, slow */
float dnri_product_us(const dnri_product *p);         /* FLT_MAX: it was not timed */

/* `bias`, `c` and `mask`: NULL where the spec has none. */
typedef struct dnri_product_at {
    const void *a, *b, *c, *bias;
    void *d, *mask, *workspace;
} dnri_product_at;
dnr_status dnri_product_run(dnri_cuda *d, const dnri_product *p, cudaStream_t s,
                            const dnri_product_at *at);

#endif
