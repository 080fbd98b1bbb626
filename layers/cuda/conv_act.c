/* conv_act.c: convolutions that finish what they write, through an engine of cuDNN's with the epilogue, or fprop's and a
 * pass of our own, whichever is faster; norms folded into weights. */
#include "../../runtime/cuda/convplan.h"
#include "../../runtime/engine_ops.h"
#include "../layers.h"
#include "kernels.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

enum { X, W, BIAS, RESIDUAL, LOW };       /* in of conv.act */
enum { F_W, GAMMA, BETA, MEAN, VAR };     /* of fold */
enum { FOLDED, FOLDED_BIAS, FOLDED_LOW }; /* its out */

typedef struct conv {
    const dnri_conv_plan *plan; /* the device's */
    bool whole;                 /* it does all; else it is fprop's */
    k_conv_args geometry;
    cudnnBackendDescriptor_t pack;
} conv;

static void release(dnri_cuda_op *s)
{
    conv *c = s->own;
    if (c && c->pack)
        (void)cudnnBackendDestroyDescriptor(c->pack);
    free(c);
}

static dnr_status prepare(dnri_cuda_op *s)
{
    conv *c = s->own;
    dnri_conv_at at = {
        .x = s->at.in[X], .w = s->at.in[W], .y = s->at.out[0], .workspace = s->at.workspace};
    if (!c->plan->plan)
        return DNR_OK;
    if (c->whole) {
        at.bias = s->at.in[LOW] ? s->at.in[LOW] : s->at.in[BIAS];
        at.residual = s->at.in[RESIDUAL];
    }
    if (c->pack)
        (void)cudnnBackendDestroyDescriptor(c->pack);
    c->pack = NULL;
    return dnri_cudnn_pack(&c->pack, &at);
}

static dnr_status run(dnri_cuda_op *s)
{
    const conv *c = s->own;
    if (c->plan->plan)
        DNRI_CUDNN(cudnnBackendExecute(s->dev->cudnn, c->plan->plan, c->pack), "running %s",
                   c->plan->impl);
    else
        k_conv_fprop(s->stream, &c->geometry, s->at.in[X], s->at.in[W], s->at.out[0]);
    if (c->whole)
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

/* The plan of both, or fprop's where that and a pass of our own is faster, or there is no other. */
static dnr_status choose(dnri_cuda *d, const dnri_conv_problem *p, dnri_conv_plan **out)
{
    dnri_conv_problem fprop = *p;
    dnri_conv_plan *both;
    fprop.kind = DNRI_FPROP;
    fprop.residual = fprop.relu = 0;
    DNR_TRY(dnri_cudnn_choose(d, p, &both));
    *out = both;
    if (both->plan && both->verdict == DNRI_UNJUDGED && both->us == FLT_MAX)
        both->verdict = DNRI_ONE_PLAN;
    if (both->plan && both->verdict == DNRI_ONE_PLAN)
        return DNR_OK;
    DNR_TRY(dnri_cudnn_choose(d, &fprop, out));
    if (both->plan && both->verdict == DNRI_UNJUDGED) {
        float us;
        DNR_TRY(time_two(d, p, &us));
        both->verdict = (*out)->us < FLT_MAX && us < FLT_MAX && (*out)->us + us < both->us
                            ? DNRI_TWO_PASSES
                            : DNRI_ONE_PLAN;
        *out = both->verdict == DNRI_ONE_PLAN ? both : *out;
        return dnri_cudnn_remember(d, both);
    }
    return DNR_OK;
}

static dnri_conv_problem problem_of(const dnr_graph *g, const dnri_op *op, const dnri_lower_opts *o)
{
    const dnri_conv_act_attr *a = (const dnri_conv_act_attr *)op->attr;
    const dnr_desc *x = dnri_desc(g, op->in[X]), *y = dnri_desc(g, op->out[0]);
    return (dnri_conv_problem){
        .kind = DNRI_FPROP_ACT,
        .type = x->dtype,
        .tf32 = dnri_graph_numerics(g)->tf32,
        .n = x->dim[0],
        .h = x->dim[1],
        .w = x->dim[2],
        .c = x->dim[3],
        .p = y->dim[1],
        .q = y->dim[2],
        .k = y->dim[3],
        .kernel = a->conv.kernel,
        .stride = a->conv.stride,
        .pad = a->conv.pad,
        .residual = op->in[RESIDUAL] >= 0,
        .relu = a->relu,
        .deterministic = o->deterministic,
        .benchmark = o->benchmark,
        .workspace_cap = (int64_t)o->workspace_cap,
    };
}

static dnr_status lower_act(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    dnri_conv_problem p = problem_of(g, op, o);
    dnri_conv_plan *plan;
    char impl[64];
    if (p.type != DNR_F32 && op->in[LOW] < 0) { /* no engine takes a bias of another type */
        p.kind = DNRI_FPROP;
        p.residual = p.relu = 0;
        DNR_TRY(dnri_cudnn_choose(d, &p, &plan));
    } else {
        DNR_TRY(choose(d, &p, &plan));
    }
    const bool whole = plan->plan && plan->problem.kind == DNRI_FPROP_ACT;
    if (!plan->plan)
        dnri_log(DNR_LOG_WARN,
                 "%s (%s): cuDNN has no engine for %s, kernel %d, stride %d, within %zu MiB: plain "
                 "loops are used, slowly",
                 op->name, op->def->name, dnri_dtype_name((dnr_dtype)p.type), (int)p.kernel,
                 (int)p.stride, o->workspace_cap >> 20);
    conv *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    dnri_cuda_op *s;
    snprintf(impl, sizeof impl, "%s%.50s", whole ? "" : "k_bias_act+",
             plan->plan ? plan->impl : "direct");
    dnr_status st = dnri_cuda_lower(dev, g, op, run, whole ? 1 : 2, impl, out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (conv){.plan = plan,
                .whole = whole,
                .geometry = {(int)p.type, d->sms, (int)p.n, (int)p.h, (int)p.w, (int)p.c, (int)p.p,
                             (int)p.q, (int)p.k, (int)p.kernel, (int)p.stride, (int)p.pad}};
    s->own = c;
    s->release = release;
    s->prepare = prepare;
    out->workspace = plan->plan ? plan->workspace : 0;
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
