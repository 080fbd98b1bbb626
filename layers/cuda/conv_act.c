/* conv_act.c: convolutions that finish what they write: an engine of cuDNN's with the epilogue, fprop's and a pass of our
 * own, or, of single pixels, a product of cuBLASLt's, whichever is fastest; norms folded into weights. */
#include "../../runtime/cuda/product.h"
#include "../../runtime/engine_ops.h"
#include "conv_run.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

enum { X, W, BIAS, RESIDUAL, LOW };       /* in of conv.act */
enum { F_W, GAMMA, BETA, MEAN, VAR };     /* of fold */
enum { FOLDED, FOLDED_BIAS, FOLDED_LOW }; /* its out */

/* How it is done; what is chosen is the device's. */
typedef struct way {
    const dnri_product *product; /* or NULL, and then: */
    const dnri_conv_plan *plan;
    bool whole; /* the plan does all; else it is fprop's */
} way;

typedef struct conv {
    dnri_conv_run run;
    way way;
} conv;

static void *low_of(const dnri_cuda_op *s)
{
    return s->at.in[LOW] ? s->at.in[LOW] : s->at.in[BIAS];
}

static dnr_status prepare(dnri_cuda_op *s)
{
    const conv *c = s->own;
    dnri_conv_at at = {
        .x = s->at.in[X], .w = s->at.in[W], .y = s->at.out[0], .workspace = s->at.workspace};
    if (c->way.whole) {
        at.bias = low_of(s);
        at.residual = s->at.in[RESIDUAL];
    }
    return dnri_conv_bind(s, &at);
}

static dnr_status run_product(dnri_cuda_op *s)
{
    const conv *c = s->own;
    const dnri_product_at at = {.a = s->at.in[X],
                                .b = s->at.in[W],
                                .c = s->at.in[RESIDUAL],
                                .bias = low_of(s),
                                .d = s->at.out[0],
                                .workspace = s->at.workspace};
    return dnri_product_run(s->dev, c->way.product, s->stream, &at);
}

static dnr_status run(dnri_cuda_op *s)
{
    const conv *c = s->own;
    if (c->way.plan->plan)
        DNR_TRY(dnri_conv_execute(s));
    else
        k_conv_fprop(s->stream, &c->run.geometry, s->at.in[X], s->at.in[W], s->at.out[0]);
    if (c->way.whole)
        return DNR_OK;
    const int64_t k = s->out[0].dim[3];
    const k_bias_act_args a = {.type = (int)s->out[0].dtype,
                               .sms = s->dev->sms,
                               .rows = dnri_count(&s->out[0]) / k,
                               .c = k,
                               .bias = s->at.in[BIAS],
                               .residual = s->at.in[RESIDUAL],
                               .y = s->at.out[0],
                               .relu = ((const dnri_conv_act_attr *)s->op.attr)->relu};
    k_bias_act(s->stream, &a);
    return DNR_OK;
}

/* The pass of our own as the tuner times it: y, then residual, then bias, in its memory. */
typedef struct pass {
    k_bias_act_args a;
    size_t y;
    bool residual;
} pass;

static void time_pass(void *ctx, cudaStream_t s, void *memory)
{
    const pass *q = ctx;
    k_bias_act_args a = q->a;
    char *at = memory;
    a.y = at;
    a.residual = q->residual ? at + q->y : NULL;
    a.bias = (const float *)(at + (q->residual ? 2 : 1) * q->y);
    k_bias_act(s, &a);
}

static dnr_status time_two(dnri_cuda *d, const dnri_conv_problem *p, float *us)
{
    const int64_t rows = p->n * p->p * p->q;
    pass q = {.a = {.type = (int)p->type, .sms = d->sms, .rows = rows, .c = p->k, .relu = p->relu},
              .residual = p->residual};
    q.y = (size_t)(rows * p->k) * dnri_dtype_size((dnr_dtype)p->type);
    q.y = (q.y + 255) & ~(size_t)255;
    return dnri_cuda_time(d, q.a.type, (q.residual ? 2 : 1) * q.y + (size_t)p->k * sizeof(float),
                          time_pass, &q, us);
}

/* The convolution as a product [pixels, C] · [C, K], where it looks at single pixels; none where cuBLASLt has none. */
static dnr_status choose_product(dnri_cuda *d, const dnri_conv_problem *p, const dnri_lower_opts *o,
                                 const dnri_product **out)
{
    const dnri_product_spec z = {.m = p->n * p->p * p->q,
                                 .n = p->k,
                                 .l = p->c,
                                 .b_t = 1,
                                 .in = p->type,
                                 .out = p->type,
                                 .tf32 = p->tf32,
                                 .bias = 1,
                                 .add = p->residual,
                                 .relu = p->relu};
    *out = NULL;
    if (p->kernel != 1 || p->stride != 1 || p->pad != 0)
        return DNR_OK;
    DNR_TRY(dnri_product_choose(d, &z, o, out));
    if (dnri_product_is_direct(*out))
        *out = NULL;
    return DNR_OK;
}

/* The fastest way, where that is asked for; else cuDNN's plan, where there is one. */
static dnr_status choose(dnri_cuda *d, const dnri_conv_problem *p, const dnri_lower_opts *o,
                         way *out)
{
    dnri_conv_problem fprop = *p;
    dnri_conv_plan *both, *plain;
    const dnri_product *product = NULL;
    float us;
    fprop.kind = DNRI_FPROP;
    fprop.residual = fprop.relu = 0;
    DNR_TRY(dnri_cudnn_choose(d, p, &both));
    *out = (way){.plan = both, .whole = true};
    if (both->plan && (both->verdict == DNRI_ONE_PLAN || both->us == FLT_MAX))
        return DNR_OK;
    if (both->verdict == DNRI_UNJUDGED || both->verdict == DNRI_PRODUCT) {
        DNR_TRY(choose_product(d, p, o, &product));
        if (product && (both->verdict == DNRI_PRODUCT || !both->plan)) {
            *out = (way){.product = product};
            return DNR_OK;
        }
        if (both->verdict == DNRI_PRODUCT) /* it is gone */
            return DNR_OK;
    }
    DNR_TRY(dnri_cudnn_choose(d, &fprop, &plain));
    if (!both->plan || both->verdict == DNRI_TWO_PASSES) {
        *out = (way){.plan = plain};
        return DNR_OK;
    }
    DNR_TRY(time_two(d, p, &us));
    us = plain->us < FLT_MAX && us < FLT_MAX ? plain->us + us : FLT_MAX;
    const float product_us = product ? dnri_product_us(product) : FLT_MAX;
    both->verdict = DNRI_ONE_PLAN;
    if (product_us < both->us && product_us <= us) {
        both->verdict = DNRI_PRODUCT;
        *out = (way){.product = product};
    } else if (us < both->us) {
        both->verdict = DNRI_TWO_PASSES;
        *out = (way){.plan = plain};
    }
    return dnri_cudnn_remember(d, both);
}

static dnri_conv_problem problem_of(const dnr_graph *g, const dnri_op *op, const dnri_lower_opts *o)
{
    const dnri_conv_act_attr *a = (const dnri_conv_act_attr *)op->attr;
    const dnr_desc *x = dnri_desc(g, op->in[X]), *y = dnri_desc(g, op->out[0]);
    dnri_conv_problem p = dnri_conv_problem_of(DNRI_FPROP_ACT, x, y, &a->conv, o);
    p.tf32 = dnri_graph_numerics(g)->tf32;
    p.residual = op->in[RESIDUAL] >= 0;
    p.relu = a->relu;
    return p;
}

static dnr_status choose_way(dnri_cuda *d, const dnri_conv_problem *p, bool low,
                             const dnri_lower_opts *o, way *out)
{
    dnri_conv_problem fprop = *p;
    dnri_conv_plan *plan;
    if (low)
        return choose(d, p, o, out);
    fprop.kind = DNRI_FPROP; /* no engine takes a bias of another type than the rest's */
    fprop.residual = fprop.relu = 0;
    DNR_TRY(dnri_cudnn_choose(d, &fprop, &plan));
    *out = (way){.plan = plan};
    return DNR_OK;
}

static void describe(const way *w, char impl[64])
{
    if (w->product)
        snprintf(impl, 64, "%s", dnri_product_impl(w->product));
    else
        snprintf(impl, 64, "%s%.50s", w->whole ? "" : "k_bias_act+",
                 w->plan->plan ? w->plan->impl : "direct");
}

static void tell(const way *w, const dnr_graph *g, const dnri_op *op, const dnri_lower_opts *o)
{
    if (!w->product) {
        dnri_cudnn_tell(o, g, op, w->plan, w->plan);
        return;
    }
    const float us = dnri_product_us(w->product);
    const dnr_tune_way one = {dnri_product_impl(w->product), us < FLT_MAX ? (double)us : -1,
                              dnri_product_workspace(w->product)};
    dnri_tell_tried(o, g, op, &one, 1, 0, NULL);
}

static dnr_status lower_act(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    const dnri_conv_problem p = problem_of(g, op, o);
    char impl[64];
    way w;
    DNR_TRY(choose_way(d, &p, p.type == DNR_F32 || op->in[LOW] >= 0, o, &w));
    tell(&w, g, op, o);
    conv *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    dnri_cuda_op *s;
    describe(&w, impl);
    dnr_status st = dnri_cuda_lower(dev, g, op, w.product ? run_product : run,
                                    w.product || w.whole ? 1 : 2, impl, out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (conv){.run = dnri_conv_run_of(d, &p, op, w.plan), .way = w};
    s->own = c;
    s->release = dnri_conv_release;
    s->prepare = prepare;
    s->stream = d->lane[o->lane];
    out->lane = o->lane;
    out->workspace = w.product      ? dnri_product_workspace(w.product)
                     : w.plan->plan ? w.plan->workspace
                                    : 0;
    return DNR_OK;
}

/* ---- fold */

static dnr_status run_fold(dnri_cuda_op *s)
{
    const dnri_fold_attr *a = (const dnri_fold_attr *)s->op.attr;
    const dnr_desc *w = &s->in[F_W];
    const k_fold_norm_args f = {.type = (int)s->out[FOLDED].dtype,
                                .k = (int)w->dim[0],
                                .each = (int)(dnri_count(w) / w->dim[0]),
                                .eps = a->eps,
                                .w = s->at.in[F_W],
                                .gamma = s->at.in[GAMMA],
                                .beta = s->at.in[BETA],
                                .mean = s->at.in[MEAN],
                                .var = s->at.in[VAR],
                                .folded = s->at.out[FOLDED],
                                .low = s->op.n_out > FOLDED_LOW ? s->at.out[FOLDED_LOW] : NULL,
                                .bias = s->at.out[FOLDED_BIAS]};
    const k_packed_args p = {.type = f.type,
                             .k = f.k,
                             .kernel = (int)w->dim[1],
                             .m = (int)s->out[FOLDED].dim[1],
                             .lead = a->packing == DNRI_BLOCKS ? (int)a->lead : 0,
                             .blocks = a->packing == DNRI_BLOCKS};
    if (a->packing)
        k_fold_norm_packed(s->stream, &f, &p);
    else
        k_fold_norm(s->stream, &f);
    return DNR_OK;
}

static dnr_status lower_fold(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_fold, 1, "k_fold_norm", out, NULL);
}

const dnri_lowering dnri_cuda_conv_act[] = {
    {&dnri_def_conv_act, NULL, lower_act},
    {&dnri_def_fold, NULL, lower_fold},
    {0},
};
