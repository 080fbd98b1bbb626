/* product.c: matrix products: which algorithm of cuBLASLt's, the first or the fastest of the first few, and their runs.
 *
 * cuBLASLt counts columns first: a matrix of ours is its matrix transposed, so D = A·B is asked for as Dᵀ = Bᵀ·Aᵀ,
 * and our B is its A. */
#include "product.h"
#include "../choices.h"
#include "convplan.h"
#include "kernels.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORKSPACE ((size_t)32 << 20) /* more helps no algorithm here */
enum { CANDIDATES = 8 };

struct dnri_product {
    struct dnri_product *next;
    dnri_product_spec spec;
    size_t cap; /* bytes of workspace */
    bool timed;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d; /* cuBLASLt's A is our B */
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
    float us; /* FLT_MAX: not timed */
    bool found;
    char impl[64];
};

float dnri_product_us(const dnri_product *p)
{
    return p->us;
}

size_t dnri_product_workspace(const dnri_product *p)
{
    return p->workspace;
}

const char *dnri_product_impl(const dnri_product *p)
{
    return p->impl;
}

bool dnri_product_is_direct(const dnri_product *p)
{
    return !p->found;
}

static int64_t batch(const dnri_product_spec *z)
{
    return z->batch ? z->batch : 1;
}

/* ---------------------------------------------------------------- describing */

static cudaDataType_t type_of(int64_t t)
{
    return t == DNR_F16 ? CUDA_R_16F : t == DNR_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* A matrix as it is stored, columns first: `rows` is also its leading dimension. */
static dnr_status layout(cublasLtMatrixLayout_t *out, int64_t type, int64_t rows, int64_t cols,
                         int64_t n, int64_t step)
{
    const int32_t count = (int32_t)n;
    DNRI_CUBLAS(
        cublasLtMatrixLayoutCreate(out, type_of(type), (uint64_t)rows, (uint64_t)cols, rows),
        "describing a matrix");
    if (n == 1)
        return DNR_OK;
    DNRI_CUBLAS(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                 sizeof count),
                "describing a batch");
    DNRI_CUBLAS(cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                 &step, sizeof step),
                "describing a batch");
    return DNR_OK;
}

static dnr_status describe(dnri_product *p)
{
    const dnri_product_spec *z = &p->spec;
    const cublasOperation_t op_a = z->b_t ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = z->a_t ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasComputeType_t compute = z->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    DNRI_CUBLAS(cublasLtMatmulDescCreate(&p->op, compute, CUDA_R_32F), "describing a product");
    DNRI_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a),
        "describing a product");
    DNRI_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b),
        "describing a product");
    const cublasLtEpilogue_t e =
        z->bias && z->relu ? z->mask ? CUBLASLT_EPILOGUE_RELU_AUX_BIAS : CUBLASLT_EPILOGUE_RELU_BIAS
        : z->bias          ? CUBLASLT_EPILOGUE_BIAS
        : z->relu          ? z->mask ? CUBLASLT_EPILOGUE_RELU_AUX : CUBLASLT_EPILOGUE_RELU
                           : CUBLASLT_EPILOGUE_DEFAULT;
    DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &e, sizeof e),
                "describing what follows a product");
    /* These stand for bias and mask until a run brings them: the choice of an algorithm looks at their alignment, which
     * for a part of a vector is that of one access. */
    const void *part = (const void *)(uintptr_t)(DNRI_PARAM_ALIGN * 2 + 16);
    void *whole = (void *)(uintptr_t)(DNRI_PARAM_ALIGN * 2);
    if (z->bias)
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &part,
                                                   sizeof part),
                    "describing a bias");
    if (z->mask) {
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                                   &whole, sizeof whole),
                    "describing a mask");
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
                                                   &z->n, sizeof z->n),
                    "describing a mask");
    }
    DNR_TRY(layout(&p->a, z->in, z->b_t ? z->l : z->n, z->b_t ? z->n : z->l, batch(z), z->step_b));
    DNR_TRY(layout(&p->b, z->in, z->a_t ? z->m : z->l, z->a_t ? z->l : z->m, batch(z), z->step_a));
    return layout(&p->d, z->out, z->n, z->m, batch(z), z->step_d);
}

/* Bytes that `a` and each matrix `step` elements further on are aligned to. */
static uint32_t alignment(const dnri_product_spec *z, int64_t step, int64_t type)
{
    uint64_t bytes = z->align ? (uint64_t)z->align : DNRI_PARAM_ALIGN * 2;
    if (batch(z) > 1)
        bytes |= (uint64_t)step * dnri_dtype_size((dnr_dtype)type);
    bytes &= -bytes; /* the largest power of two that divides both */
    return (uint32_t)(bytes < DNRI_PARAM_ALIGN * 2 ? bytes : DNRI_PARAM_ALIGN * 2);
}

static dnr_status preferences(const dnri_product *p, cublasLtMatmulPreference_t pref)
{
    const dnri_product_spec *z = &p->spec;
    const size_t workspace = p->cap < WORKSPACE ? p->cap : WORKSPACE;
    /* no sums through atomics or in 16 bits: the same bits every time, and all of them */
    const uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t d = alignment(z, z->step_d, z->out);
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        uint32_t bytes;
    } aligned[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(z, z->step_b, z->in)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(z, z->step_a, z->in)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d},
    };
    DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof workspace),
                "bounding a workspace");
    DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
                    pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums),
                "bounding sums");
    for (int i = 0; i < 4; i++)
        DNRI_CUBLAS(cublasLtMatmulPreferenceSetAttribute(pref, aligned[i].what, &aligned[i].bytes,
                                                         sizeof aligned[i].bytes),
                    "telling alignments");
    return DNR_OK;
}

/* ---------------------------------------------------------------- running */

dnr_status dnri_product_run(dnri_cuda *d, const dnri_product *p, cudaStream_t s,
                            const dnri_product_at *at)
{
    const dnri_product_spec *z = &p->spec;
    const float one = 1, beta = z->add ? 1 : 0;
    const void *c = at->c ? at->c : at->d;
    if (!p->found) {
        const k_matmul_args g = {
            .type = (int)z->in,
            .d_type = (int)z->out,
            .sms = d->sms,
            .m = z->m,
            .n = z->n,
            .l = z->l,
            .a_row = z->a_t ? 1 : z->l,
            .a_col = z->a_t ? z->m : 1,
            .b_row = z->b_t ? 1 : z->n,
            .b_col = z->b_t ? z->l : 1,
            .batch = batch(z),
            .step_a = z->step_a,
            .step_b = z->step_b,
            .step_d = z->step_d,
            .add = z->add != 0,
            .relu = z->relu != 0,
        };
        k_matmul(s, &g, at->a, at->b, c, at->bias, at->d);
        return DNR_OK;
    }
    if (z->bias)
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                   &at->bias, sizeof at->bias),
                    "giving the bias");
    if (z->mask)
        DNRI_CUBLAS(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                                   &at->mask, sizeof at->mask),
                    "giving the mask");
    DNRI_CUBLAS(cublasLtMatmul(d->lt, p->op, &one, at->b, p->a, at->a, p->b, &beta, c, p->d, at->d,
                               p->d, &p->algo, at->workspace, p->workspace, s),
                "multiplying %lld x %lld by %lld x %lld", (long long)z->m, (long long)z->l,
                (long long)z->l, (long long)z->n);
    return DNR_OK;
}

/* ---------------------------------------------------------------- choosing */

static void take(dnri_product *p, const cublasLtMatmulHeuristicResult_t *r)
{
    int32_t id = 0, tile = 0;
    size_t written;
    p->found = true;
    p->algo = r->algo;
    p->workspace = r->workspaceSize;
    (void)cublasLtMatmulAlgoConfigGetAttribute(&p->algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id,
                                               &written);
    (void)cublasLtMatmulAlgoConfigGetAttribute(&p->algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
                                               sizeof tile, &written);
    snprintf(p->impl, sizeof p->impl, "cublasLt algo %d tile %d", (int)id, (int)tile);
}

/* A candidate as it is timed: operands lie in the tuner's memory one after the other. */
typedef struct contest {
    dnri_cuda *d;
    const dnri_product *p;
    size_t b, out, bias, mask, workspace; /* where they begin */
    bool failed;
} contest;

static void time_candidate(void *ctx, cudaStream_t s, void *memory)
{
    contest *c = ctx;
    char *at = memory;
    const dnri_product_at where = {.a = at,
                                   .b = at + c->b,
                                   .d = at + c->out,
                                   .bias = at + c->bias,
                                   .mask = at + c->mask,
                                   .workspace = at + c->workspace};
    if (!c->failed && dnri_product_run(c->d, c->p, s, &where) != DNR_OK)
        c->failed = true;
}

static size_t extent(int64_t matrix, int64_t n, int64_t step, int64_t type)
{
    const size_t bytes = (size_t)(matrix + (n - 1) * step) * dnri_dtype_size((dnr_dtype)type);
    return (bytes + 255) & ~(size_t)255;
}

/* Takes the fastest of `n` candidates; the first where there is no memory to time them. */
static dnr_status fastest(dnri_cuda *d, dnri_product *p, const cublasLtMatmulHeuristicResult_t *r,
                          int n, float *shortest)
{
    const dnri_product_spec *z = &p->spec;
    contest c = {.d = d, .p = p};
    int best = 0;
    c.b = extent(z->m * z->l, batch(z), z->step_a, z->in);
    c.out = c.b + extent(z->l * z->n, batch(z), z->step_b, z->in);
    c.bias = c.out + extent(z->m * z->n, batch(z), z->step_d, z->out);
    c.mask = c.bias + extent(z->n, 1, 0, z->out);
    c.workspace = c.mask + (z->mask ? extent(z->m * z->n / 8, 1, 0, DNR_U8) : 0);
    *shortest = FLT_MAX;
    for (int i = 0; i < n; i++) {
        float us;
        c.failed = false;
        take(p, &r[i]);
        DNR_TRY(dnri_cuda_time(d, (int)z->in, c.workspace + p->workspace, time_candidate, &c, &us));
        if (c.failed || us >= *shortest)
            continue;
        *shortest = us;
        best = i;
    }
    take(p, &r[best]);
    return DNR_OK;
}

/* All of a timed problem. */
static void key_of(const dnri_product *p, char key[256])
{
    const dnri_product_spec *z = &p->spec;
    snprintf(
        key, 256,
        "product %s%s %s m%lld n%lld l%lld%s%s%s%s%s%s batch%lld steps%lld,%lld,%lld align%lld "
        "cap%zu",
        z->tf32 ? "tf32 " : "", dnri_dtype_name((dnr_dtype)z->in),
        dnri_dtype_name((dnr_dtype)z->out), (long long)z->m, (long long)z->n, (long long)z->l,
        z->a_t ? " a_t" : "", z->b_t ? " b_t" : "", z->bias ? " bias" : "", z->add ? " add" : "",
        z->relu ? " relu" : "", z->mask ? " mask" : "", (long long)batch(z), (long long)z->step_a,
        (long long)z->step_b, (long long)z->step_d, (long long)z->align, p->cap);
}

/* "us 25.3 algo 4200…": cuBLASLt's own words for an algorithm, which its manual lets one keep for the same version */
static dnr_status remember(dnri_cuda *d, const dnri_product *p)
{
    char key[256], text[64 + 2 * sizeof p->algo];
    unsigned char bytes[sizeof p->algo];
    if (!d->choices || p->us == FLT_MAX)
        return DNR_OK;
    memcpy(bytes, &p->algo, sizeof bytes);
    key_of(p, key);
    int len = snprintf(text, sizeof text, "us %.3f algo ", (double)p->us);
    for (size_t i = 0; i < sizeof bytes; i++)
        len += snprintf(text + len, sizeof text - (size_t)len, "%02x", bytes[i]);
    return dnri_choices_set(d->choices, key, text);
}

/* The algorithm that an earlier start timed; p->found stays false where there was none, or it no longer serves. */
static void recall(dnri_cuda *d, cublasLtHandle_t lt, dnri_product *p)
{
    char key[256];
    unsigned char bytes[sizeof p->algo];
    cublasLtMatmulAlgo_t algo;
    cublasLtMatmulHeuristicResult_t r;
    float us;
    int at = 0;
    key_of(p, key);
    const char *text = d->choices ? dnri_choices_get(d->choices, key) : NULL;
    if (!text || sscanf(text, "us %f algo %n", &us, &at) != 1 || !at ||
        strlen(text + at) != 2 * sizeof bytes)
        return;
    for (size_t i = 0; i < sizeof bytes; i++)
        if (sscanf(text + at + 2 * i, "%2hhx", &bytes[i]) != 1)
            return;
    memcpy(&algo, bytes, sizeof bytes);
    if (cublasLtMatmulAlgoCheck(lt, p->op, p->a, p->b, p->d, p->d, &algo, &r) ==
            CUBLAS_STATUS_SUCCESS &&
        r.workspaceSize <= p->cap) {
        r.algo = algo; /* the check fills in the rest */
        take(p, &r);
        p->us = us;
    }
}

static dnr_status choose(dnri_cuda *d, dnri_product *p)
{
    cublasLtHandle_t lt;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t r[CANDIDATES];
    int asked = 0, n = 0;
    p->us = FLT_MAX;
    snprintf(p->impl, sizeof p->impl, "direct");
    DNR_TRY(describe(p));
    if (d->paper) { /* cuBLASLt proposes only for a device that is there */
        p->found = true;
        p->workspace = p->cap < WORKSPACE ? p->cap : WORKSPACE;
        snprintf(p->impl, sizeof p->impl, "cublasLt");
        return DNR_OK;
    }
    DNR_TRY(dnri_cuda_lt(d, &lt));
    if (p->timed)
        recall(d, lt, p);
    if (p->found)
        return DNR_OK;
    DNRI_CUBLAS(cublasLtMatmulPreferenceCreate(&pref), "choosing an algorithm");
    dnr_status st = preferences(p, pref);
    if (st == DNR_OK && cublasLtMatmulAlgoGetHeuristic(lt, p->op, p->a, p->b, p->d, p->d, pref,
                                                       p->timed ? CANDIDATES : 1, r,
                                                       &asked) != CUBLAS_STATUS_SUCCESS)
        asked = 0;
    (void)cublasLtMatmulPreferenceDestroy(pref);
    DNR_TRY(st);
    for (int i = 0; i < asked; i++)
        if (r[i].state == CUBLAS_STATUS_SUCCESS)
            r[n++] = r[i];
    if (n == 1 && !p->timed)
        take(p, &r[0]);
    else if (n > 0)
        DNR_TRY(fastest(d, p, r, n, &p->us));
    return remember(d, p);
}

static void drop(dnri_product *p)
{
    if (p->a)
        (void)cublasLtMatrixLayoutDestroy(p->a);
    if (p->b)
        (void)cublasLtMatrixLayoutDestroy(p->b);
    if (p->d)
        (void)cublasLtMatrixLayoutDestroy(p->d);
    if (p->op)
        (void)cublasLtMatmulDescDestroy(p->op);
    free(p);
}

dnr_status dnri_product_choose(dnri_cuda *d, const dnri_product_spec *z, const dnri_lower_opts *o,
                               const dnri_product **out)
{
    const bool timed = o->benchmark && !o->deterministic;
    for (dnri_product *q = d->products; q; q = q->next)
        if (memcmp(&q->spec, z, sizeof *z) == 0 && q->cap == o->workspace_cap &&
            q->timed == timed) {
            *out = q;
            return DNR_OK;
        }
    dnri_product *p = calloc(1, sizeof *p);
    if (!p)
        return DNR_FAIL_NOMEM();
    p->spec = *z;
    p->cap = o->workspace_cap;
    p->timed = timed;
    dnr_status st = choose(d, p);
    if (st != DNR_OK) {
        drop(p);
        return st;
    }
    p->next = d->products;
    *out = d->products = p;
    return DNR_OK;
}

dnr_status dnri_product_for(dnri_cuda *d, const dnri_op *op, const dnri_product_spec *z,
                            const dnri_lower_opts *o, const dnri_product **out)
{
    DNR_TRY(dnri_product_choose(d, z, o, out));
    if (dnri_product_is_direct(*out))
        dnri_log(DNR_LOG_WARN,
                 "%s (%s): cuBLASLt has no algorithm for %s: plain loops are used, slowly",
                 op->name, op->def->name, dnri_dtype_name((dnr_dtype)z->in));
    return DNR_OK;
}

void dnri_product_drop_all(dnri_cuda *d)
{
    while (d->products) {
        dnri_product *next = d->products->next;
        drop(d->products);
        d->products = next;
    }
}
