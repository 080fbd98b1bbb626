/* gram.c: products over all rows of a. Of a with itself by a pass of our own (gram.cu), which has its column sums as well;
 * or by cuBLASLt: rows in chunks, a batch of products with a partial result each, and column sums by another pass. Partial
 * results are added up afterwards. */
#include "gram.h"

#include "../../runtime/choices.h"
#include "../../runtime/cuda/convplan.h"
#include "../../runtime/cuda/product.h"
#include "kernels.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { A, B };

/* A tensor core rounds towards zero as it adds, so that long sums come out low: by 2e-6 to 8e-6 over this many rows
 * (measured on an H200, fp16), ten times that over all rows of a large layer. */
#define CHUNK_ROWS 1568
/* Of a with another matrix: less hangs on its last bits, and half as many partial results are to be written and read. */
#define CHUNK_ROWS_B 3136
/* Bytes of partial results at a time: what stays in the L2 cache until they are added up. */
#define PARTS_BYTES ((size_t)40 << 20)
#define PRODUCT_CAP ((size_t)8 << 20) /* for a batch of products, which need not be split further */

typedef struct gram {
    dnr_dtype type;
    int64_t rows, c, kb; /* a [rows,c], b [rows,kb] */
    bool square;         /* b is a */
    bool own;
    /* else: */
    int64_t chunk, rest; /* rows of a chunk, and what is left over */
    int64_t waves;       /* of `wave` chunks each, the last one of `last` */
    int64_t wave, last;
    const dnri_product *of_wave, *of_last, *of_rest;
    size_t columns, lt; /* where column sums and cuBLASLt's part of the workspace begin */
} gram;

typedef struct places {
    const char *a, *b;
    float *p, *sum; /* sum: NULL where it is not wanted */
    char *workspace;
} places;

static size_t up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* ---------------------------------------------------------------- our own */

static k_gram_args own_args(const dnri_cuda *d, const gram *q)
{
    return (k_gram_args){
        .type = (int)q->type, .sms = d->sms, .cc = d->cc, .rows = q->rows, .c = (int)q->c};
}

static size_t own_workspace(const k_gram_args *a)
{
    return (size_t)k_gram_parts(a) * (size_t)(a->c * (a->c + 1)) * sizeof(float);
}

static void run_own(dnri_cuda *d, const gram *q, cudaStream_t s, const places *at)
{
    k_gram_args a = own_args(d, q);
    const int parts = k_gram_parts(&a);
    a.a = at->a;
    a.part = (float *)at->workspace;
    a.columns = a.part + (int64_t)parts * a.c * a.c;
    const k_gram_merge_args m = {.part = a.part,
                                 .p = at->p,
                                 .parts = parts,
                                 .n = q->c * q->c,
                                 .columns = a.columns,
                                 .sum = at->sum,
                                 .blocks = parts,
                                 .c = q->c,
                                 .lower = true};
    k_gram(s, &a);
    k_gram_merge(s, &m);
}

/* ---------------------------------------------------------------- products of cuBLASLt's */

/* Equal chunks where the rows can be divided so. */
static int64_t chunk_of(const gram *q)
{
    const int64_t most = q->square || q->type == DNR_F32 ? CHUNK_ROWS : CHUNK_ROWS_B;
    const int64_t least = (q->rows + most - 1) / most;
    for (int64_t n = least; n < 2 * least; n++)
        if (q->rows % n == 0)
            return q->rows / n;
    return most;
}

static int64_t lowest_bit(int64_t n)
{
    return n & -n;
}

static dnr_status run_products(dnri_cuda *d, const gram *q, cudaStream_t s, const places *at)
{
    const size_t size = dnri_dtype_size(q->type);
    float *part = (float *)at->workspace, *columns = (float *)(at->workspace + q->columns);
    k_gram_merge_args m = {
        .part = part, .p = at->p, .n = q->kb * q->c, .columns = columns, .c = q->c};
    for (int64_t w = 0; w < q->waves; w++) {
        const bool last = w == q->waves - 1;
        const int64_t first = w * q->wave * q->chunk;
        dnri_product_at z = {.a = at->b + (size_t)(first * q->kb) * size,
                             .b = at->a + (size_t)(first * q->c) * size,
                             .d = part,
                             .workspace = at->workspace + q->lt};
        DNR_TRY(dnri_product_run(d, last ? q->of_last : q->of_wave, s, &z));
        m.parts = (int)(last ? q->last : q->wave);
        if (last && q->rest) {
            const int64_t row = first + q->last * q->chunk;
            z.a = at->b + (size_t)(row * q->kb) * size;
            z.b = at->a + (size_t)(row * q->c) * size;
            z.d = part + m.parts * m.n;
            DNR_TRY(dnri_product_run(d, q->of_rest, s, &z));
            m.parts++;
        }
        if (last && at->sum) {
            m.sum = at->sum;
            m.blocks = k_column_parts(s, (int)q->type, d->sms, at->a, q->rows, q->c, columns);
        }
        m.add = w > 0;
        k_gram_merge(s, &m);
    }
    return DNR_OK;
}

/* Chunks, waves and where things lie. */
static void divide(gram *q, size_t columns, size_t cap)
{
    const size_t room = cap < PARTS_BYTES ? cap : PARTS_BYTES;
    const size_t matrix = (size_t)(q->kb * q->c) * sizeof(float);
    const int64_t at_once = room / matrix > 1 ? (int64_t)(room / matrix) : 1;
    q->chunk = chunk_of(q);
    const int64_t n = q->rows / q->chunk;
    q->rest = q->rows - n * q->chunk;
    q->waves = (n + at_once - 1) / at_once;
    q->wave = (n + q->waves - 1) / q->waves;
    q->waves = (n + q->wave - 1) / q->wave;
    q->last = n - (q->waves - 1) * q->wave;
    const int64_t in_last = q->last + (q->rest > 0);
    q->columns = up((size_t)(q->wave > in_last ? q->wave : in_last) * matrix);
    q->lt = q->columns + columns;
}

static dnr_status choose_products(dnri_cuda *d, const dnri_op *op, const dnri_lower_opts *o,
                                  gram *q, size_t *workspace)
{
    const size_t size = dnri_dtype_size(q->type);
    dnri_lower_opts own = *o;
    own.workspace_cap = o->workspace_cap > q->lt ? o->workspace_cap - q->lt : 0;
    own.workspace_cap = own.workspace_cap < PRODUCT_CAP ? own.workspace_cap : PRODUCT_CAP;
    dnri_product_spec z = {.m = q->kb,
                           .n = q->c,
                           .l = q->chunk,
                           .a_t = 1,
                           .in = q->type,
                           .out = DNR_F32,
                           .batch = q->wave,
                           .step_a = q->chunk * q->kb,
                           .step_b = q->chunk * q->c,
                           .step_d = q->kb * q->c};
    /* a wave and the rest begin behind some chunks */
    z.align = lowest_bit((int64_t)size * (z.step_a | z.step_b) | 256);
    if (q->waves > 1)
        DNR_TRY(dnri_product_for(d, op, &z, &own, &q->of_wave));
    z.batch = q->last;
    DNR_TRY(dnri_product_for(d, op, &z, &own, &q->of_last));
    if (q->rest) {
        const dnri_product_spec rest = {.m = q->kb,
                                        .n = q->c,
                                        .l = q->rest,
                                        .a_t = 1,
                                        .in = z.in,
                                        .out = z.out,
                                        .align = z.align};
        DNR_TRY(dnri_product_for(d, op, &rest, &own, &q->of_rest));
    }
    const dnri_product *all[] = {q->of_wave, q->of_last, q->of_rest};
    *workspace = 0;
    for (int i = 0; i < 3; i++)
        if (all[i] && dnri_product_workspace(all[i]) > *workspace)
            *workspace = dnri_product_workspace(all[i]);
    *workspace += q->lt;
    return DNR_OK;
}

/* ---------------------------------------------------------------- choosing */

/* The two ways as they are timed: a, p, sum and workspace lie in the tuner's memory one after the other. */
typedef struct contest {
    dnri_cuda *d;
    const gram *q;
    bool own, failed;
} contest;

static void run_one(void *ctx, cudaStream_t s, void *memory)
{
    contest *c = ctx;
    const gram *q = c->q;
    places at = {.a = memory, .b = memory};
    at.p = (float *)((char *)memory + up((size_t)(q->rows * q->c) * dnri_dtype_size(q->type)));
    at.sum = at.p + q->c * q->c;
    at.workspace = (char *)at.p + up((size_t)(q->c * (q->c + 1)) * sizeof(float));
    if (c->own)
        run_own(c->d, q, s, &at);
    else if (!c->failed && run_products(c->d, q, s, &at) != DNR_OK)
        c->failed = true;
}

static dnr_status own_is_faster(dnri_cuda *d, const gram *q, size_t workspace, bool *own)
{
    contest c = {.d = d, .q = q};
    const k_gram_args a = own_args(d, q);
    const size_t bytes = up((size_t)(q->rows * q->c) * dnri_dtype_size(q->type)) +
                         up((size_t)(q->c * (q->c + 1)) * sizeof(float)) + workspace;
    char key[128], text[64];
    float us[2];
    snprintf(key, sizeof key, "gram %s rows%lld c%lld parts%d workspace%zu",
             dnri_dtype_name(q->type), (long long)q->rows, (long long)q->c, k_gram_parts(&a),
             workspace);
    const char *known = d->choices ? dnri_choices_get(d->choices, key) : NULL;
    if (known) {
        *own = strncmp(known, "own", 3) == 0;
        return DNR_OK;
    }
    for (int i = 0; i < 2; i++) {
        c.own = i == 0;
        DNR_TRY(dnri_cuda_time(d, (int)q->type, bytes, run_one, &c, &us[i]));
    }
    *own = us[0] < us[1] || c.failed;
    snprintf(text, sizeof text, "%s us %.3f, not %.3f", *own ? "own" : "other",
             (double)us[*own ? 0 : 1], (double)us[*own ? 1 : 0]);
    return d->choices && us[0] < FLT_MAX ? dnri_choices_set(d->choices, key, text) : DNR_OK;
}

/* Our own where it is there, unless it was slower. */
static dnr_status choose(dnri_cuda *d, const dnri_op *op, const dnri_lower_opts *o, gram *q,
                         size_t *workspace)
{
    const k_gram_args a = own_args(d, q);
    const bool takes = q->square && k_gram_takes(&a) && own_workspace(&a) <= o->workspace_cap;
    const bool timed = takes && o->benchmark && !o->deterministic && !d->paper;
    q->own = takes;
    if (!q->own || timed)
        DNR_TRY(choose_products(d, op, o, q, workspace));
    if (timed)
        DNR_TRY(own_is_faster(d, q, own_workspace(&a) > *workspace ? own_workspace(&a) : *workspace,
                              &q->own));
    if (q->own)
        *workspace = own_workspace(&a);
    return DNR_OK;
}

/* ---------------------------------------------------------------- lowering */

static void release_gram(dnri_cuda_op *s)
{
    free(s->own);
}

static dnr_status run_gram(dnri_cuda_op *s)
{
    const gram *q = s->own;
    const places at = {.a = s->at.in[A],
                       .b = s->at.in[B] ? s->at.in[B] : s->at.in[A],
                       .p = s->at.out[0],
                       .sum = s->op.n_out > 1 ? s->at.out[1] : NULL,
                       .workspace = s->at.workspace};
    if (!q->own)
        return run_products(s->dev, q, s->stream, &at);
    run_own(s->dev, q, s->stream, &at);
    return DNR_OK;
}

dnr_status dnri_cuda_lower_gram(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *a = dnri_desc(g, op->in[A]), *p = dnri_desc(g, op->out[0]);
    dnri_cuda *d = dnri_cuda_of(dev);
    const bool sums = op->n_out > 1;
    size_t workspace = 0;
    char impl[64] = "k_gram";
    dnri_cuda_op *s;
    gram *q = calloc(1, sizeof *q);
    if (!q)
        return DNR_FAIL_NOMEM();
    *q = (gram){.type = a->dtype,
                .rows = a->dim[0] * a->dim[1] * a->dim[2],
                .c = a->dim[3],
                .kb = p->dim[0],
                .square = op->in[B] < 0};
    divide(q, sums ? up(k_norm_workspace((int)a->dtype, d->sms, a->dim[3])) : 0, o->workspace_cap);
    dnr_status st = choose(d, op, o, q, &workspace);
    if (st == DNR_OK && !q->own)
        snprintf(impl, sizeof impl, "%.40s, %d x %d rows", dnri_product_impl(q->of_last),
                 (int)(q->rows / q->chunk), (int)q->chunk);
    if (st == DNR_OK)
        st = dnri_cuda_lower(dev, g, op, run_gram,
                             q->own ? 2 : (int)q->waves * 2 + (q->rest > 0) + sums, impl, out, &s);
    if (st != DNR_OK) {
        free(q);
        return st;
    }
    s->own = q;
    s->release = release_gram;
    out->workspace = workspace;
    return DNR_OK;
}
