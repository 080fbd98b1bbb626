/* algbn.c: algebraic batch norm. The large products are cuBLASLt's, the rest is our own.
 *
 * gram: rows in chunks, a batch of products with a partial result each; they are added up afterwards. */
#include "../../runtime/cuda/product.h"
#include "../layers.h"
#include "narrow.h"

#include <stdio.h>
#include <stdlib.h>

enum { Z_Y, Z_DY, Z_DY2 }; /* in of norm.dz */
enum { G_A, G_B };         /* in of gram */
enum {
    C_P,
    C_GRAM,
    C_SUM_A,
    C_SUM_DZ,
    C_W,
    C_GAMMA,
    C_MEAN,
    C_INVSTD,
    C_HEADER
};                                  /* of algbn.coef */
enum { D_DZ, D_A, D_WA, D_M, D_C }; /* in of algbn.dgrad */

static int64_t rows_of(const dnr_desc *x)
{
    return x->dim[0] * x->dim[1] * x->dim[2];
}

static size_t up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* ---------------------------------------------------------------- norm.dz */

static dnr_status run_dz(dnri_cuda_op *s)
{
    const dnr_desc *dy = &s->in[Z_DY];
    const bool bits = s->at.in[Z_Y] && s->in[Z_Y].dtype == DNR_U8;
    const bool even = s->at.in[Z_DY2] && !dnri_desc_equal(&s->in[Z_DY2], dy);
    const k_norm_bwd_args a = {.type = (int)dy->dtype,
                               .sms = s->dev->sms,
                               .rows = rows_of(dy),
                               .c = dy->dim[3],
                               .y = bits ? NULL : s->at.in[Z_Y],
                               .mask = bits ? s->at.in[Z_Y] : NULL,
                               .dy = s->at.in[Z_DY],
                               .dy2 = s->at.in[Z_DY2],
                               .dz = s->at.out[0],
                               .dbeta = s->at.out[1],
                               .h = even ? (int)dy->dim[1] : 0,
                               .w = even ? (int)dy->dim[2] : 0};
    k_norm_dz(s->stream, &a, s->at.workspace);
    return DNR_OK;
}

static dnr_status lower_dz(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                           const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *dy = dnri_desc(g, op->in[Z_DY]);
    char impl[64], access[32];
    snprintf(impl, sizeof impl, "k_norm dz %s", dnri_cuda_access(dy->dtype, dy->dim[3], access));
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_dz, 2, impl, out, NULL));
    out->in_place =
        op->in[Z_Y] >= 0; /* without it dy is read through the cache for what nobody writes */
    out->workspace = k_norm_workspace((int)dy->dtype, dnri_cuda_of(dev)->sms, dy->dim[3]);
    return DNR_OK;
}

/* A thread has the bits of a byte where it has 8 channels. */
static bool has_mask(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *dy = dnri_desc(g, op->in[Z_DY]);
    return op->in[Z_Y] < 0 || dnri_desc(g, op->in[Z_Y])->dtype != DNR_U8 ||
           (dnri_dtype_size(dy->dtype) == 2 && dy->dim[3] % 8 == 0);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---------------------------------------------------------------- gram */

/* A tensor core rounds towards zero as it adds, so that long sums come out low: by 2e-6 to 8e-6 over this many rows
 * (measured on an H200, fp16), ten times that over all rows of a large layer. */
#define CHUNK_ROWS 1568
/* Bytes of partial results at a time: what stays in the L2 cache until they are added up. */
#define PARTS_BYTES ((size_t)40 << 20)
#define PRODUCT_CAP ((size_t)8 << 20) /* for a batch of products, which need not be split further */

typedef struct gram {
    int64_t chunk, rest; /* rows of a chunk, and what is left over */
    int64_t waves;       /* of `wave` chunks each, the last one of `last` */
    int64_t wave, last;
    const dnri_product *of_wave, *of_last, *of_rest;
    size_t columns, own; /* where column sums and cuBLASLt's part of the workspace begin */
} gram;

static void release_gram(dnri_cuda_op *s)
{
    free(s->own);
}

/* Equal chunks where the rows can be divided so. */
static int64_t chunk_of(int64_t rows)
{
    const int64_t least = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    for (int64_t n = least; n < 2 * least; n++)
        if (rows % n == 0)
            return rows / n;
    return CHUNK_ROWS;
}

static int64_t lowest_bit(int64_t n)
{
    return n & -n;
}

static const dnr_desc *b_of(const dnri_cuda_op *s)
{
    return s->at.in[G_B] ? &s->in[G_B] : &s->in[G_A];
}

static dnr_status run_gram(dnri_cuda_op *s)
{
    const gram *q = s->own;
    const int64_t c = s->in[G_A].dim[3], kb = b_of(s)->dim[3];
    const size_t size = dnri_dtype_size(s->in[G_A].dtype);
    const char *a = s->at.in[G_A], *b = s->at.in[G_B] ? s->at.in[G_B] : a;
    float *part = s->at.workspace, *columns = (float *)((char *)s->at.workspace + q->columns);
    k_gram_merge_args m = {
        .part = part, .p = s->at.out[0], .n = kb * c, .columns = columns, .c = c};
    for (int64_t w = 0; w < q->waves; w++) {
        const bool last = w == q->waves - 1;
        const int64_t first = w * q->wave * q->chunk;
        dnri_product_at at = {.a = b + (size_t)(first * kb) * size,
                              .b = a + (size_t)(first * c) * size,
                              .d = part,
                              .workspace = (char *)s->at.workspace + q->own};
        DNR_TRY(dnri_product_run(s->dev, last ? q->of_last : q->of_wave, s->stream, &at));
        m.parts = (int)(last ? q->last : q->wave);
        if (last && q->rest) {
            const int64_t row = first + q->last * q->chunk;
            at.a = b + (size_t)(row * kb) * size;
            at.b = a + (size_t)(row * c) * size;
            at.d = part + m.parts * m.n;
            DNR_TRY(dnri_product_run(s->dev, q->of_rest, s->stream, &at));
            m.parts++;
        }
        if (last && s->op.n_out > 1) {
            m.sum = s->at.out[1];
            m.blocks = k_column_parts(s->stream, (int)s->in[G_A].dtype, s->dev->sms, a,
                                      rows_of(&s->in[G_A]), c, columns);
        }
        m.add = w > 0;
        k_gram_merge(s->stream, &m);
    }
    return DNR_OK;
}

/* Chunks, waves and where things lie. */
static void divide(gram *q, int64_t rows, size_t matrix, size_t columns, size_t cap)
{
    const size_t room = cap < PARTS_BYTES ? cap : PARTS_BYTES;
    const int64_t at_once = room / matrix > 1 ? (int64_t)(room / matrix) : 1;
    q->chunk = chunk_of(rows);
    const int64_t n = rows / q->chunk;
    q->rest = rows - n * q->chunk;
    q->waves = (n + at_once - 1) / at_once;
    q->wave = (n + q->waves - 1) / q->waves;
    q->waves = (n + q->wave - 1) / q->wave;
    q->last = n - (q->waves - 1) * q->wave;
    const int64_t in_last = q->last + (q->rest > 0);
    q->columns = up((size_t)(q->wave > in_last ? q->wave : in_last) * matrix);
    q->own = q->columns + columns;
}

static dnr_status choose_gram(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, gram *q, size_t *workspace)
{
    const dnr_desc *a = dnri_desc(g, op->in[G_A]), *p = dnri_desc(g, op->out[0]);
    const int64_t c = a->dim[3], kb = p->dim[0];
    const size_t size = dnri_dtype_size(a->dtype);
    dnri_lower_opts own = *o;
    own.workspace_cap = o->workspace_cap > q->own ? o->workspace_cap - q->own : 0;
    own.workspace_cap = own.workspace_cap < PRODUCT_CAP ? own.workspace_cap : PRODUCT_CAP;
    dnri_product_spec z = {.m = kb,
                           .n = c,
                           .l = q->chunk,
                           .a_t = 1,
                           .in = a->dtype,
                           .out = p->dtype,
                           .batch = q->wave,
                           .step_a = q->chunk * kb,
                           .step_b = q->chunk * c,
                           .step_d = kb * c};
    /* a wave and the rest begin behind some chunks */
    z.align = lowest_bit((int64_t)size * (z.step_a | z.step_b) | 256);
    if (q->waves > 1)
        DNR_TRY(dnri_product_for(dnri_cuda_of(dev), op, &z, &own, &q->of_wave));
    z.batch = q->last;
    DNR_TRY(dnri_product_for(dnri_cuda_of(dev), op, &z, &own, &q->of_last));
    if (q->rest) {
        const dnri_product_spec rest = {
            .m = kb, .n = c, .l = q->rest, .a_t = 1, .in = z.in, .out = z.out, .align = z.align};
        DNR_TRY(dnri_product_for(dnri_cuda_of(dev), op, &rest, &own, &q->of_rest));
    }
    const dnri_product *all[] = {q->of_wave, q->of_last, q->of_rest};
    *workspace = 0;
    for (int i = 0; i < 3; i++)
        *workspace = all[i] ? larger(*workspace, dnri_product_workspace(all[i])) : *workspace;
    *workspace += q->own;
    return DNR_OK;
}

static dnr_status lower_gram(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *a = dnri_desc(g, op->in[G_A]), *p = dnri_desc(g, op->out[0]);
    const bool sums = op->n_out > 1;
    const size_t columns =
        sums ? up(k_norm_workspace((int)a->dtype, dnri_cuda_of(dev)->sms, a->dim[3])) : 0;
    size_t workspace;
    dnri_cuda_op *s;
    gram *q = calloc(1, sizeof *q);
    if (!q)
        return DNR_FAIL_NOMEM();
    divide(q, rows_of(a), (size_t)dnri_count(p) * sizeof(float), columns, o->workspace_cap);
    dnr_status st = choose_gram(dev, g, op, o, q, &workspace);
    if (st == DNR_OK) {
        char impl[64];
        snprintf(impl, sizeof impl, "%.40s, %d x %d rows", dnri_product_impl(q->of_last),
                 (int)(rows_of(a) / q->chunk), (int)q->chunk);
        st = dnri_cuda_lower(dev, g, op, run_gram, (int)q->waves * 2 + (q->rest > 0) + sums, impl,
                             out, &s);
    }
    if (st != DNR_OK) {
        free(q);
        return st;
    }
    s->own = q;
    s->release = release_gram;
    out->workspace = workspace;
    return DNR_OK;
}

/* ---------------------------------------------------------------- algbn.coef */

static dnr_status run_coef(dnri_cuda_op *s)
{
    const dnri_algbn_attr *attr = (const dnri_algbn_attr *)s->op.attr;
    void *const *in = s->at.in, *const *out = s->at.out;
    const k_algbn_args a = {.type = (int)s->in[C_W].dtype,
                            .rows = attr->rows,
                            .k = s->in[C_W].dim[0],
                            .c = s->in[C_W].dim[3],
                            .w = in[C_W],
                            .p = in[C_P],
                            .gram = in[C_GRAM],
                            .sum_a = in[C_SUM_A],
                            .sum_dz = in[C_SUM_DZ],
                            .gamma = in[C_GAMMA],
                            .mean = in[C_MEAN],
                            .invstd = in[C_INVSTD],
                            .dw = out[0],
                            .dgamma = out[1],
                            .dbeta = out[2],
                            .wa = out[3],
                            .m = out[4],
                            .constant = out[5],
                            .first = attr->first};
    k_algbn_coef(s->stream, &a, in[C_HEADER], out[6], s->at.workspace);
    return DNR_OK;
}

static dnr_status lower_coef(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *w = dnri_desc(g, op->in[C_W]);
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_coef, 3, "k_algbn tf32 x 2", out, NULL));
    out->workspace = k_algbn_workspace(w->dim[0], w->dim[3]);
    return DNR_OK;
}

/* ---------------------------------------------------------------- algbn.dgrad */

/* da = a·m + the lower half of c, then da + dz·wa + the upper one; or in one pass of our own, which reads a narrow da's
 * tensors once and rounds once. */
typedef struct dgrad {
    const dnri_product *of_a, *of_dz;
} dgrad;

static void release_dgrad(dnri_cuda_op *s)
{
    free(s->own);
}

static dnr_status run_pair(dnri_cuda *d, const void *own, cudaStream_t stream,
                           const k_narrow_args *z, void *workspace)
{
    const dgrad *q = own;
    const size_t half = (size_t)z->n * dnri_dtype_size((dnr_dtype)z->type);
    dnri_product_at at = {.a = z->a[1],
                          .b = z->b[1],
                          .bias = (const char *)z->halves + half,
                          .d = z->d,
                          .workspace = workspace};
    DNR_TRY(dnri_product_run(d, q->of_a, stream, &at));
    at.a = z->a[0];
    at.b = z->b[0];
    at.bias = z->halves;
    return dnri_product_run(d, q->of_dz, stream, &at);
}

static k_narrow_args dgrad_args(const dnri_cuda *d, const dnr_desc *dz, const dnr_desc *a)
{
    return (k_narrow_args){.type = (int)a->dtype,
                           .sms = d->sms,
                           .cc = d->cc,
                           .rows = rows_of(a),
                           .n = (int)a->dim[3],
                           .depth = {(int)dz->dim[3], (int)a->dim[3]}};
}

static dnr_status run_dgrad(dnri_cuda_op *s)
{
    k_narrow_args a = dgrad_args(s->dev, &s->in[D_DZ], &s->in[D_A]);
    a.a[0] = s->at.in[D_DZ];
    a.a[1] = s->at.in[D_A];
    a.b[0] = s->at.in[D_WA];
    a.b[1] = s->at.in[D_M];
    a.halves = s->at.in[D_C];
    a.d = s->at.out[0];
    if (s->own)
        return run_pair(s->dev, s->own, s->stream, &a, s->at.workspace);
    k_narrow(s->stream, &a);
    return DNR_OK;
}

/* Two products of cuBLASLt's. */
static dnr_status choose_pair(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dgrad *q)
{
    const dnr_desc *dz = dnri_desc(g, op->in[D_DZ]), *a = dnri_desc(g, op->in[D_A]);
    dnri_product_spec z = {.m = rows_of(a),
                           .n = a->dim[3],
                           .l = a->dim[3],
                           .in = a->dtype,
                           .out = a->dtype,
                           .bias = 1};
    DNR_TRY(dnri_product_for(dnri_cuda_of(dev), op, &z, o, &q->of_a));
    z.l = dz->dim[3];
    z.add = 1;
    return dnri_product_for(dnri_cuda_of(dev), op, &z, o, &q->of_dz);
}

static dnr_status lower_pair(dnr_device *dev, const dnr_graph *g, const dnri_op *op, const dgrad *q,
                             size_t workspace, dnri_step *out)
{
    char impl[64];
    dnri_cuda_op *s;
    dgrad *own = malloc(sizeof *own);
    if (!own)
        return DNR_FAIL_NOMEM();
    *own = *q;
    snprintf(impl, sizeof impl, "%.30s+%.30s", dnri_product_impl(q->of_a),
             dnri_product_impl(q->of_dz));
    dnr_status st = dnri_cuda_lower(dev, g, op, run_dgrad, 2, impl, out, &s);
    if (st != DNR_OK) {
        free(own);
        return st;
    }
    s->own = own;
    s->release = release_dgrad;
    out->workspace = workspace;
    return DNR_OK;
}

/* Without timing our own is taken where all of its columns are one tile. */
static dnr_status lower_dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    const k_narrow_args a = dgrad_args(d, dnri_desc(g, op->in[D_DZ]), dnri_desc(g, op->in[D_A]));
    const bool timed = o->benchmark && !o->deterministic && !d->paper, takes = k_narrow_takes(&a);
    bool own = takes && a.n <= 128;
    dgrad pair;
    size_t workspace = 0;
    if (!own || timed) {
        DNR_TRY(choose_pair(dev, g, op, o, &pair));
        workspace = larger(dnri_product_workspace(pair.of_a), dnri_product_workspace(pair.of_dz));
    }
    const dnri_narrow_contest contest = {
        .name = "algbn.dgrad", .a = a, .rival = run_pair, .own = &pair, .workspace = workspace};
    if (takes && timed)
        DNR_TRY(dnri_narrow_wins(d, &contest, &own));
    if (!own)
        return lower_pair(dev, g, op, &pair, workspace, out);
    return dnri_cuda_lower(dev, g, op, run_dgrad, 1, "k_narrow", out, NULL);
}

/* ---------------------------------------------------------------- what the device has */

/* Our kernels take four channels at a time, and a half of c has to begin on 16 bytes. TF32 came with sm_80; where a
 * itself is rounded to it the sums are of no use: large terms cancel in dw. */
static bool fits(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    for (int i = 0; i < op->n_out; i++) /* the state is of 8·n bytes */
        if (dnri_desc(g, op->out[i])->dim[3] % 8 != 0)
            return false;
    for (int i = 0; i < op->n_in; i++)
        if (op->in[i] >= 0 && dnri_desc(g, op->in[i])->dim[3] % 8 != 0)
            return false;
    return dnri_cuda_of(dev)->cc >= 80 && !dnri_graph_numerics(g)->tf32;
}

const dnri_lowering dnri_cuda_algbn[] = {
    {&dnri_def_norm_dz, has_mask, lower_dz},
    {&dnri_def_gram, fits, lower_gram},
    {&dnri_def_algbn_coef, fits, lower_coef},
    {&dnri_def_algbn_dgrad, fits, lower_dgrad},
    {0},
};
