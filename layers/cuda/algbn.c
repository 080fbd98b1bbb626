/* algbn.c: algebraic batch norm backwards, but for gram. */
#include "../../runtime/cuda/product.h"
#include "../layers.h"
#include "gram.h"
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
    const bool first = ((const dnri_algbn_attr *)op->attr)->first;
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_coef, 2 + first, "k_algbn tf32 x 2", out, NULL));
    out->workspace = k_algbn_workspace(w->dim[0], w->dim[3]);
    return DNR_OK;
}

/* ---------------------------------------------------------------- algbn.dgrad */

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

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
    DNRI_CUDA(k_narrow(s->stream, &a), "%s: multiplying", s->op.name);
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
    {&dnri_def_gram, fits, dnri_cuda_lower_gram},
    {&dnri_def_algbn_coef, fits, lower_coef},
    {&dnri_def_algbn_dgrad, fits, lower_dgrad},
    {0},
};
