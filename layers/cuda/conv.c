/* conv.c: convolutions through cuDNN; plain loops where it has no engine. Statistics come from cuDNN's epilogue
 * or from a pass of our own over y, whichever is faster. */
#include "conv_run.h"
#include "norm.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>

enum { Y, SUM, SQSUM }; /* out of conv.stats */

typedef struct conv {
    dnri_conv_run run;
    dnri_conv_kind kind;
    bool own_sums; /* FPROP_STATS: the plan is fprop's, and our kernels sum */
    size_t
        dw; /* wgrad in 16 bits whose dw is wanted in fp32: bytes of it in the compute type, at the start of the workspace */
} conv;

static dnr_status prepare(dnri_cuda_op *s)
{
    const conv *c = s->own;
    const dnri_binding *b = &s->at;
    char *workspace = b->workspace;
    dnri_conv_at at = {.workspace = workspace ? workspace + c->dw : NULL};
    at.x = c->kind == DNRI_DGRAD ? b->out[0] : b->in[0];
    at.w = c->kind != DNRI_WGRAD ? b->in[1] : c->dw ? workspace : b->out[0];
    at.y = c->kind == DNRI_DGRAD ? b->in[0] : c->kind == DNRI_WGRAD ? b->in[1] : b->out[Y];
    if (c->kind == DNRI_FPROP_STATS && !c->own_sums) {
        at.sum = b->out[SUM];
        at.sqsum = b->out[SQSUM];
    }
    return dnri_conv_bind(s, &at);
}

/* Σ y and Σ y² by our kernels. Nobody reads those of a clone. */
static void run_sums(const dnri_cuda_op *s)
{
    const conv *c = s->own;
    if (c->own_sums && !s->op.clone)
        dnri_cuda_sums(s, &s->out[Y], s->at.out[Y], s->at.out[SUM], s->at.out[SQSUM]);
}

static dnr_status run_cudnn(dnri_cuda_op *s)
{
    const conv *c = s->own;
    DNR_TRY(dnri_conv_execute(s));
    if (c->dw) {
        const k_widen_args w = {
            (int)s->in[0].dtype, 1, {s->at.workspace}, {s->at.out[0]}, {dnri_count(&s->out[0])}};
        k_widen(s->stream, &w);
    }
    run_sums(s);
    return DNR_OK;
}

static_assert(DNRI_MAX_IN <= K_WIDEN_MOST, "one launch takes all inputs of an op");

static dnr_status run_widen(dnri_cuda_op *s)
{
    k_widen_args w = {.type = (int)s->in[0].dtype, .n = s->op.n_in};
    for (int i = 0; i < w.n; i++) {
        w.x[i] = s->at.in[i];
        w.y[i] = s->at.out[i];
        w.count[i] = dnri_count(&s->in[i]);
    }
    k_widen(s->stream, &w);
    return DNR_OK;
}

static dnr_status run_direct(dnri_cuda_op *s)
{
    const conv *c = s->own;
    void *const *in = s->at.in, *out = s->at.out[0];
    if (c->kind == DNRI_FPROP || c->kind == DNRI_FPROP_STATS)
        k_conv_fprop(s->stream, &c->run.geometry, in[0], in[1], out);
    else if (c->kind == DNRI_DGRAD)
        k_conv_dgrad(s->stream, &c->run.geometry, in[0], in[1], out);
    else
        k_conv_wgrad(s->stream, &c->run.geometry, in[0], in[1], (int)s->out[0].dtype, out);
    run_sums(s);
    return DNR_OK;
}

static dnri_conv_problem problem_of(dnri_conv_kind kind, const dnr_graph *g, const dnri_op *op,
                                    const dnri_lower_opts *o)
{
    const dnri_conv_attr *a = (const dnri_conv_attr *)op->attr;
    const dnr_desc *x = dnri_desc(g, kind == DNRI_DGRAD ? op->out[0] : op->in[0]);
    const dnr_desc *y = dnri_desc(g, kind == DNRI_DGRAD   ? op->in[0]
                                     : kind == DNRI_WGRAD ? op->in[1]
                                                          : op->out[Y]);
    dnri_conv_problem p = dnri_conv_problem_of(kind, x, y, a, o);
    p.tf32 = dnri_graph_numerics(g)->tf32;
    return p;
}

/* A statistics pass as the tuner times it: y, then workspace, then sums, in its memory. */
typedef struct pass {
    k_norm_args a;
    size_t y, workspace;
} pass;

static void time_sums(void *ctx, cudaStream_t s, void *memory)
{
    const pass *q = ctx;
    k_norm_args a = q->a;
    char *at = memory;
    a.x = at;
    a.sum = (float *)(at + q->y + q->workspace);
    a.sqsum = a.sum + a.c;
    k_norm_stats(s, &a, at + q->y);
}

/* The plan of a convolution with statistics: cuDNN's for both; or fprop's, where that and a pass of our own is
 * faster or there is no other. Equal problems get one verdict: a clone has to repeat the bits. */
static dnr_status choose_stats(dnri_cuda *d, const dnri_conv_problem *p, dnri_conv_plan **out,
                               dnri_conv_plan **tried)
{
    dnri_conv_problem fprop = *p;
    dnri_conv_plan *both;
    fprop.kind = DNRI_FPROP;
    if (p->deterministic) /* cuDNN's sums differ in their last bits from run to run, whatever its engines say */
        return dnri_cudnn_choose(d, &fprop, out);
    DNR_TRY(dnri_cudnn_choose(d, p, &both));
    *out = *tried = both;
    if (both->verdict == DNRI_ONE_PLAN)
        return DNR_OK;
    if (both->verdict == DNRI_UNJUDGED && both->plan && both->us == FLT_MAX) {
        both->verdict = DNRI_ONE_PLAN;
        return DNR_OK;
    }
    DNR_TRY(dnri_cudnn_choose(d, &fprop, out));
    if (both->verdict == DNRI_UNJUDGED && both->plan) {
        const int64_t rows = p->n * p->p * p->q;
        pass q = {.a = {.type = (int)p->type, .sms = d->sms, .rows = rows, .c = p->k}};
        q.y = (size_t)(rows * p->k) * dnri_dtype_size((dnr_dtype)p->type);
        q.y = (q.y + 255) & ~(size_t)255;
        q.workspace = k_norm_workspace(q.a.type, d->sms, p->k);
        float us;
        DNR_TRY(dnri_cuda_time(d, q.a.type, q.y + q.workspace + 2 * (size_t)p->k * sizeof(float),
                               time_sums, &q, &us));
        both->us_apart = (*out)->us < FLT_MAX && us < FLT_MAX ? (*out)->us + us : 0;
        both->verdict = (*out)->us < FLT_MAX && us < FLT_MAX && (*out)->us + us < both->us
                            ? DNRI_TWO_PASSES
                            : DNRI_ONE_PLAN;
        *out = both->verdict == DNRI_ONE_PLAN ? both : *out;
        return dnri_cudnn_remember(d, both);
    }
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_conv_kind kind = op->def == &dnri_def_conv         ? DNRI_FPROP
                                : op->def == &dnri_def_conv_stats ? DNRI_FPROP_STATS
                                : op->def == &dnri_def_conv_dgrad ? DNRI_DGRAD
                                                                  : DNRI_WGRAD;
    dnri_cuda *d = dnri_cuda_of(dev);
    dnri_conv_problem p = problem_of(kind, g, op, o);
    dnri_conv_plan *plan, *tried = NULL;
    size_t dw = 0;
    char impl[64];
    if (kind == DNRI_WGRAD && dnri_desc(g, op->out[0])->dtype != (dnr_dtype)p.type) {
        dw = (size_t)(p.k * p.kernel * p.kernel * p.c) * dnri_dtype_size((dnr_dtype)p.type);
        dw = (dw + 255) & ~(size_t)255;
        p.workspace_cap = (size_t)p.workspace_cap > dw ? p.workspace_cap - (int64_t)dw : 0;
    }
    DNR_TRY(dnri_cudnn_pinned(d, &p, g, op, o, &plan));
    if (!plan && kind == DNRI_FPROP_STATS)
        DNR_TRY(choose_stats(d, &p, &plan, &tried));
    else if (!plan)
        DNR_TRY(dnri_cudnn_choose(d, &p, &plan));
    dnri_cudnn_tell(o, g, op, tried && tried->n_tried ? tried : plan, plan);
    const bool own_sums = (int64_t)kind != plan->problem.kind;
    conv *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    dnri_cuda_op *s;
    snprintf(impl, sizeof impl, "%s%.50s", own_sums ? "k_norm sums+" : "",
             plan->plan ? plan->impl : "direct");
    dnr_status st = dnri_cuda_lower(dev, g, op, plan->plan ? run_cudnn : run_direct,
                                    plan->plan && dw         ? 2
                                    : own_sums && !op->clone ? 3
                                                             : 1,
                                    impl, out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (conv){.run = dnri_conv_run_of(d, &p, op, plan),
                .kind = kind,
                .own_sums = own_sums,
                .dw = plan->plan ? dw : 0};
    s->own = c;
    s->release = dnri_conv_release;
    s->prepare = prepare;
    if (plan->plan)
        out->workspace = dw + plan->workspace;
    if (own_sums) { /* after the convolution, so in the same place */
        const size_t sums = k_norm_workspace((int)p.type, d->sms, p.k);
        out->workspace = out->workspace > sums ? out->workspace : sums;
    }
    return DNR_OK;
}

/* Where cuDNN has precompiled engines: those for other types and numbers of channels are compiled at run time and
 * slower than two passes, and sums are worse than moments where the mean is large. */
static bool has_stats(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *w = dnri_desc(g, op->in[1]);
    return x->dtype == DNR_F16 && x->dim[3] % 8 == 0 && w->dim[0] % 8 == 0 &&
           dnri_cuda_of(dev)->cc >= 80;
}

/* A norm that holds all of y in shared memory has its statistics for next to nothing. */
static bool stats_pay(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *y = dnri_desc(g, op->out[Y]);
    return k_norm_once_share(&dnri_cuda_of(dev)->k, (int)y->dtype, dnri_count(y) / y->dim[3],
                             y->dim[3], false) < 1;
}

static bool is_narrow(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return dnri_dtype_size(dnri_desc(g, op->in[0])->dtype) == 2;
}

static dnr_status lower_widen(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_widen, 1, "k_widen", out, NULL);
}

const dnri_lowering dnri_cuda_conv[] = {
    {&dnri_def_conv, NULL, lower},
    {&dnri_def_conv_stats, has_stats, lower},
    {&dnri_def_conv_dgrad, NULL, lower},
    {&dnri_def_conv_wgrad, NULL, lower},
    {&dnri_def_grad_widen, is_narrow, lower_widen},
    {0},
};

const dnri_cuda_pays dnri_cuda_conv_pays = {&dnri_def_conv_stats, stats_pay};
