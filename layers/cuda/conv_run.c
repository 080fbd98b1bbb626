/* conv_run.c: see conv_run.h. */
#include "conv_run.h"

#include <stdlib.h>

dnri_conv_problem dnri_conv_problem_of(dnri_conv_kind kind, const dnr_desc *x, const dnr_desc *y,
                                       const dnri_conv_attr *a, const dnri_lower_opts *o)
{
    return (dnri_conv_problem){
        .kind = kind,
        .type = x->dtype,
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
        .benchmark = o->tried ? DNRI_ANEW : o->benchmark,
        .workspace_cap = (int64_t)o->workspace_cap,
    };
}

dnri_conv_run dnri_conv_run_of(const dnri_cuda *d, const dnri_conv_problem *p, const dnri_op *op,
                               const dnri_conv_plan *plan)
{
    if (plan && !plan->plan)
        dnri_log(DNR_LOG_WARN,
                 "%s (%s): cuDNN has no engine for %s, kernel %d, stride %d, within %lld MiB: "
                 "plain loops are used, slowly",
                 op->name, op->def->name, dnri_dtype_name((dnr_dtype)p->type), (int)p->kernel,
                 (int)p->stride, (long long)(p->workspace_cap >> 20));
    return (dnri_conv_run){.plan = plan,
                           .geometry = {(int)p->type, d->sms, (int)p->n, (int)p->h, (int)p->w,
                                        (int)p->c, (int)p->p, (int)p->q, (int)p->k, (int)p->kernel,
                                        (int)p->stride, (int)p->pad}};
}

static void drop_pack(dnri_conv_run *r)
{
    if (r->pack)
        (void)cudnnBackendDestroyDescriptor(r->pack);
    r->pack = NULL;
}

void dnri_conv_release(dnri_cuda_op *s)
{
    if (s->own)
        drop_pack(s->own);
    free(s->own);
}

dnr_status dnri_conv_bind(dnri_cuda_op *s, const dnri_conv_at *at)
{
    dnri_conv_run *r = s->own;
    if (!r->plan || !r->plan->plan)
        return DNR_OK;
    drop_pack(r);
    return dnri_cudnn_pack(&r->pack, at);
}

dnr_status dnri_conv_execute(dnri_cuda_op *s)
{
    const cudaStream_t home = s->dev->lane[DNRI_COMPUTE];
    const dnri_conv_run *r = s->own;
    if (s->stream != home) /* cuDNN's handle belongs to the compute lane and is lent to another */
        DNRI_CUDNN(cudnnSetStream(s->dev->cudnn, s->stream), "changing lanes");
    const cudnnStatus_t st = cudnnBackendExecute(s->dev->cudnn, r->plan->plan, r->pack);
    if (s->stream != home)
        DNRI_CUDNN(cudnnSetStream(s->dev->cudnn, home), "changing lanes");
    DNRI_CUDNN(st, "running %s", r->plan->impl);
    return DNR_OK;
}
