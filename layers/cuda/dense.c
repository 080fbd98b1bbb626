/* dense.c: the fully connected layer through cuBLASLt, fp32 sums; plain loops where it has no algorithm.
 *
 * cuBLASLt counts columns first: its matrix of ld = C is our row-major one transposed, so y = x·wᵀ is asked for as
 * yᵀ [K,n] = w · xᵀ. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

#define WORKSPACE ((size_t)32 << 20) /* more helps no algorithm here */

typedef struct product {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
    bool found;
    k_matmul_args plain; /* the same for k_matmul, in our order */
} product;

static void release(dnri_cuda_op *s)
{
    product *m = s->own;
    if (m && m->a)
        (void)cublasLtMatrixLayoutDestroy(m->a);
    if (m && m->b)
        (void)cublasLtMatrixLayoutDestroy(m->b);
    if (m && m->d)
        (void)cublasLtMatrixLayoutDestroy(m->d);
    if (m && m->op)
        (void)cublasLtMatmulDescDestroy(m->op);
    free(m);
}

static cudaDataType_t type_of(dnr_dtype t)
{
    return t == DNR_F16 ? CUDA_R_16F : t == DNR_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* D [rows, cols], column-major, = op(A)·op(B) over `inner`; A and B are stored with leading dimensions lda, ldb. */
typedef struct shape {
    cublasOperation_t op_a, op_b;
    int64_t rows, cols, inner;
    dnr_dtype in, out;
    bool bias; /* added to each column of D */
} shape;

static dnr_status layouts(product *m, const shape *z, bool tf32)
{
    bool ta = z->op_a == CUBLAS_OP_T, tb = z->op_b == CUBLAS_OP_T;
    int64_t ar = ta ? z->inner : z->rows, ac = ta ? z->rows : z->inner;
    int64_t br = tb ? z->cols : z->inner, bc = tb ? z->inner : z->cols;
    cublasComputeType_t compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    DNRI_CUBLAS(cublasLtMatmulDescCreate(&m->op, compute, CUDA_R_32F), "describing a product");
    DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(m->op, CUBLASLT_MATMUL_DESC_TRANSA, &z->op_a,
                                               sizeof z->op_a),
                "describing a product");
    DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(m->op, CUBLASLT_MATMUL_DESC_TRANSB, &z->op_b,
                                               sizeof z->op_b),
                "describing a product");
    if (z->bias) {
        cublasLtEpilogue_t e = CUBLASLT_EPILOGUE_BIAS;
        /* stands for the bias until a run brings it: the choice of an algorithm looks at its alignment */
        const void *aligned = (const void *)(uintptr_t)(DNRI_PARAM_ALIGN * 2);
        DNRI_CUBLAS(
            cublasLtMatmulDescSetAttribute(m->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &e, sizeof e),
            "describing a bias");
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(m->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                   &aligned, sizeof aligned),
                    "describing a bias");
    }
    DNRI_CUBLAS(cublasLtMatrixLayoutCreate(&m->a, type_of(z->in), (uint64_t)ar, (uint64_t)ac, ar),
                "describing a matrix");
    DNRI_CUBLAS(cublasLtMatrixLayoutCreate(&m->b, type_of(z->in), (uint64_t)br, (uint64_t)bc, br),
                "describing a matrix");
    DNRI_CUBLAS(cublasLtMatrixLayoutCreate(&m->d, type_of(z->out), (uint64_t)z->rows,
                                           (uint64_t)z->cols, z->rows),
                "describing a matrix");
    return DNR_OK;
}

static dnr_status preferences(cublasLtMatmulPreference_t pref, size_t workspace)
{
    /* parameters lie on multiples of 64 elements, arena tensors on 256 bytes */
    uint32_t align = DNRI_PARAM_ALIGN * 2;
    /* no sums through atomics or in 16 bits: the same bits every time, and all of them */
    uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof workspace),
                "bounding a workspace");
    DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
                    pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums),
                "bounding sums");
    for (int i = 0; i < 4; i++)
        DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(pref, aligned[i], &align, sizeof align),
                    "telling alignments");
    return DNR_OK;
}

/* The algorithm that cuBLASLt thinks fastest; m->found stays false where it has none. */
static dnr_status find(dnri_cuda *d, product *m, size_t cap)
{
    cublasLtHandle_t lt;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t result;
    int n = 0;
    DNR_TRY(dnri_cuda_lt(d, &lt));
    DNRI_CUBLAS(cublasLtMatmulPreferenceCreate(&pref), "choosing an algorithm");
    dnr_status st = preferences(pref, cap < WORKSPACE ? cap : WORKSPACE);
    if (st == DNR_OK &&
        cublasLtMatmulAlgoGetHeuristic(lt, m->op, m->a, m->b, m->d, m->d, pref, 1, &result, &n) ==
            CUBLAS_STATUS_SUCCESS &&
        n == 1 && result.state == CUBLAS_STATUS_SUCCESS) {
        m->found = true;
        m->algo = result.algo;
        m->workspace = result.workspaceSize;
    }
    (void)cublasLtMatmulPreferenceDestroy(pref);
    return st;
}

static dnr_status multiply(dnri_cuda_op *s, const void *a, const void *b, void *d, const void *bias)
{
    const product *m = s->own;
    float one = 1, zero = 0;
    if (!m->found) { /* its operands are those of cuBLASLt, exchanged */
        k_matmul(s->stream, &m->plain, b, a, bias, d);
        return DNR_OK;
    }
    if (bias)
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(m->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                                   sizeof bias),
                    "giving the bias");
    DNRI_CUBLAS(cublasLtMatmul(s->dev->lt, m->op, &one, a, m->a, b, m->b, &zero, d, m->d, d, m->d,
                               &m->algo, s->at.workspace, m->workspace, s->stream),
                "multiplying %d x %d by %d x %d", m->plain.m, m->plain.l, m->plain.l, m->plain.n);
    return DNR_OK;
}

static dnr_status run_fprop(dnri_cuda_op *s)
{
    return multiply(s, s->at.in[1], s->at.in[0], s->at.out[0], s->at.in[2]);
}

static dnr_status run_dgrad(dnri_cuda_op *s)
{
    return multiply(s, s->at.in[1], s->at.in[0], s->at.out[0], NULL);
}

static dnr_status run_wgrad(dnri_cuda_op *s)
{
    DNR_TRY(multiply(s, s->at.in[0], s->at.in[1], s->at.out[0], NULL));
    k_column_sum(s->stream, (int)s->in[1].dtype, s->at.in[1], s->at.out[1], (int)s->in[1].dim[0],
                 (int)s->in[1].dim[3]);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, shape z, const k_matmul_args *plain,
                        dnr_status (*launch)(dnri_cuda_op *), int extra, dnri_step *out)
{
    dnri_cuda_op *s;
    DNR_TRY(dnri_cuda_lower(dev, g, op, launch, 1 + extra, "cublasLt", out, &s));
    product *m = calloc(1, sizeof *m);
    if (!m)
        return DNR_FAIL_NOMEM();
    s->own = m;
    s->release = release;
    m->plain = *plain;
    DNR_TRY(layouts(m, &z, dnri_graph_numerics(g)->tf32));
    DNR_TRY(find(s->dev, m, o->workspace_cap));
    out->workspace = m->workspace;
    if (m->found) {
        int id = 0;
        size_t written;
        (void)cublasLtMatmulAlgoConfigGetAttribute(&m->algo, CUBLASLT_ALGO_CONFIG_ID, &id,
                                                   sizeof id, &written);
        snprintf(out->impl, sizeof out->impl, "cublasLt algo %d", id);
        return DNR_OK;
    }
    dnri_log(DNR_LOG_WARN,
             "%s (%s): cuBLASLt has no algorithm for %s: plain loops are used, slowly", op->name,
             op->def->name, dnri_dtype_name(z.in));
    snprintf(out->impl, sizeof out->impl, "direct");
    return DNR_OK;
}

/* y [n,K] = x [n,C] · wᵀ [C,K] + b */
static dnr_status lower_fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *y = dnri_desc(g, op->out[0]);
    int64_t n = x->dim[0], c = x->dim[3], k = y->dim[3];
    k_matmul_args plain = {
        (int)x->dtype, (int)y->dtype, dnri_cuda_of(dev)->sms, (int)n, (int)k, (int)c, c, 1, 1, c};
    return lower(dev, g, op, o,
                 (shape){CUBLAS_OP_T, CUBLAS_OP_N, k, n, c, x->dtype, y->dtype, true}, &plain,
                 run_fprop, 0, out);
}

/* dx [n,C] = dy [n,K] · w [K,C] */
static dnr_status lower_dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *dy = dnri_desc(g, op->in[0]), *dx = dnri_desc(g, op->out[0]);
    int64_t n = dy->dim[0], c = dx->dim[3], k = dy->dim[3];
    k_matmul_args plain = {
        (int)dy->dtype, (int)dx->dtype, dnri_cuda_of(dev)->sms, (int)n, (int)c, (int)k, k, 1, c, 1};
    return lower(dev, g, op, o,
                 (shape){CUBLAS_OP_N, CUBLAS_OP_N, c, n, k, dy->dtype, dx->dtype, false}, &plain,
                 run_dgrad, 0, out);
}

/* dw [K,C] = dyᵀ [K,n] · x [n,C] */
static dnr_status lower_wgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *dw = dnri_desc(g, op->out[0]);
    int64_t n = x->dim[0], c = x->dim[3], k = dw->dim[0];
    k_matmul_args plain = {
        (int)x->dtype, (int)dw->dtype, dnri_cuda_of(dev)->sms, (int)k, (int)c, (int)n, 1, k, c, 1};
    return lower(dev, g, op, o,
                 (shape){CUBLAS_OP_N, CUBLAS_OP_T, c, k, n, x->dtype, dw->dtype, false}, &plain,
                 run_wgrad, 1, out);
}

const dnri_lowering dnri_cuda_dense[] = {
    {&dnri_def_dense, NULL, lower_fprop},
    {&dnri_def_dense_dgrad, NULL, lower_dgrad},
    {&dnri_def_dense_wgrad, NULL, lower_wgrad},
    {0},
};
