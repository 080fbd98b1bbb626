/* conv.c: convolutions through cuDNN; plain loops where it has no engine. */
#include "../../runtime/cuda/convplan.h"
#include "../layers.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct conv {
    dnri_conv_kind kind;
    k_conv_args geometry;
    const dnri_conv_plan *plan; /* the device's */
    cudnnBackendDescriptor_t pack;
    size_t
        dw; /* wgrad in 16 bits: bytes of dw in the compute type, at the start of the workspace */
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
    dnri_binding *b = &s->at;
    char *workspace = b->workspace;
    void *dw = c->dw ? workspace : b->out[0];
    if (c->pack)
        (void)cudnnBackendDestroyDescriptor(c->pack);
    c->pack = NULL;
    workspace = workspace ? workspace + c->dw : NULL;
    switch (c->kind) {
    case DNRI_FPROP:
        return dnri_cudnn_pack(&c->pack, b->in[0], b->in[1], b->out[0], workspace);
    case DNRI_DGRAD:
        return dnri_cudnn_pack(&c->pack, b->out[0], b->in[1], b->in[0], workspace);
    default:
        return dnri_cudnn_pack(&c->pack, b->in[0], dw, b->in[1], workspace);
    }
}

static dnr_status run_cudnn(dnri_cuda_op *s)
{
    const conv *c = s->own;
    DNRI_CUDNN(cudnnBackendExecute(s->dev->cudnn, c->plan->plan, c->pack), "running %s",
               c->plan->impl);
    if (c->dw)
        k_widen(s->stream, (int)s->in[0].dtype, s->dev->sms, s->at.workspace, s->at.out[0],
                dnri_count(&s->out[0]));
    return DNR_OK;
}

static dnr_status run_direct(dnri_cuda_op *s)
{
    const conv *c = s->own;
    void *const *in = s->at.in, *out = s->at.out[0];
    if (c->kind == DNRI_FPROP)
        k_conv_fprop(s->stream, &c->geometry, in[0], in[1], out);
    else if (c->kind == DNRI_DGRAD)
        k_conv_dgrad(s->stream, &c->geometry, in[0], in[1], out);
    else
        k_conv_wgrad(s->stream, &c->geometry, in[0], in[1], out);
    return DNR_OK;
}

static dnri_conv_problem problem_of(dnri_conv_kind kind, const dnr_graph *g, const dnri_op *op,
                                    const dnri_lower_opts *o)
{
    const dnri_conv_attr *a = (const dnri_conv_attr *)op->attr;
    const dnr_desc *x = dnri_desc(g, kind == DNRI_DGRAD ? op->out[0] : op->in[0]);
    const dnr_desc *y = dnri_desc(g, kind == DNRI_FPROP   ? op->out[0]
                                     : kind == DNRI_DGRAD ? op->in[0]
                                                          : op->in[1]);
    return (dnri_conv_problem){
        .kind = kind,
        .type = x->dtype,
        .tf32 = dnri_graph_numerics(g)->tf32,
        .n = x->dim[0],
        .h = x->dim[1],
        .w = x->dim[2],
        .c = x->dim[3],
        .p = y->dim[1],
        .q = y->dim[2],
        .k = y->dim[3],
        .kernel = a->kernel,
        .stride = a->stride,
        .pad = a->pad,
        .deterministic = o->deterministic,
        .benchmark = o->benchmark,
        .workspace_cap = (int64_t)o->workspace_cap,
    };
}

static dnr_status lower(dnri_conv_kind kind, dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    dnri_conv_problem p = problem_of(kind, g, op, o);
    const dnri_conv_plan *plan;
    size_t dw = 0;
    if (kind == DNRI_WGRAD && p.type != DNR_F32) {
        dw = (size_t)(p.k * p.kernel * p.kernel * p.c) * dnri_dtype_size((dnr_dtype)p.type);
        dw = (dw + 255) & ~(size_t)255;
        p.workspace_cap = (size_t)p.workspace_cap > dw ? p.workspace_cap - (int64_t)dw : 0;
    }
    DNR_TRY(dnri_cudnn_choose(d, &p, &plan));
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
    dnr_status st =
        dnri_cuda_lower(dev, g, op, plan->plan ? run_cudnn : run_direct, plan->plan && dw ? 2 : 1,
                        plan->plan ? plan->impl : "direct", out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (conv){.kind = kind,
                .plan = plan,
                .geometry = {(int)p.type, d->sms, (int)p.n, (int)p.h, (int)p.w, (int)p.c, (int)p.p,
                             (int)p.q, (int)p.k, (int)p.kernel, (int)p.stride, (int)p.pad}};
    s->own = c;
    s->release = release;
    if (plan->plan) {
        c->dw = dw;
        s->prepare = prepare;
        out->workspace = dw + plan->workspace;
    }
    return DNR_OK;
}

static dnr_status lower_fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    return lower(DNRI_FPROP, dev, g, op, o, out);
}

static dnr_status lower_dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    return lower(DNRI_DGRAD, dev, g, op, o, out);
}

static dnr_status lower_wgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    return lower(DNRI_WGRAD, dev, g, op, o, out);
}

const dnri_lowering dnri_cuda_conv[] = {
    {&dnri_def_conv, NULL, lower_fprop},
    {&dnri_def_conv_dgrad, NULL, lower_dgrad},
    {&dnri_def_conv_wgrad, NULL, lower_wgrad},
    {0},
};
