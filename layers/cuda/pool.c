/* pool.c: pooling through our own kernels. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"

#include <stdio.h>

/* Geometry from the tensor of y's side; x's sides are in the attributes. */
static k_pool_args args_of(const dnri_cuda_op *s, const dnr_desc *y)
{
    const dnri_pool_attr *a = (const dnri_pool_attr *)s->op.attr;
    return (k_pool_args){.type = (int)y->dtype,
                         .sms = s->dev->sms,
                         .n = (int)y->dim[0],
                         .h = (int)a->h,
                         .w = (int)a->w,
                         .c = (int)y->dim[3],
                         .p = (int)y->dim[1],
                         .q = (int)y->dim[2],
                         .kernel = a->kernel,
                         .stride = a->stride,
                         .pad = a->pad,
                         .positive = a->positive};
}

static dnr_status run_max(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->out[0]);
    k_max_pool(s->stream, &a, s->at.in[0], s->at.out[0], s->at.out[1]);
    return DNR_OK;
}

static dnr_status run_max_act(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->out[0]);
    k_max_pool_act(s->stream, &a, s->at.in[0], s->at.in[1], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_max_bwd(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->in[0]);
    k_max_pool_bwd(s->stream, &a, s->at.in[0], s->at.in[1], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_avg(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->out[0]);
    k_avg_pool(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_avg_bwd(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->in[0]);
    k_avg_pool_bwd(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_global(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->out[0]);
    k_global_pool(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_global_bwd(dnri_cuda_op *s)
{
    k_pool_args a = args_of(s, &s->in[0]);
    k_global_pool_bwd(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    static const struct {
        const dnri_op_def *def;
        dnr_status (*run)(dnri_cuda_op *);
        const char *kernel;
    } ops[] = {
        {&dnri_def_max_pool, run_max, "k_max_pool"},
        {&dnri_def_max_pool_bwd, run_max_bwd, "k_max_pool_bwd"},
        {&dnri_def_max_pool_act, run_max_act, "k_max_pool_act"},
        {&dnri_def_avg_pool, run_avg, "k_avg_pool"},
        {&dnri_def_avg_pool_bwd, run_avg_bwd, "k_avg_pool_bwd"},
        {&dnri_def_global_pool, run_global, "k_global_pool"},
        {&dnri_def_global_pool_bwd, run_global_bwd, "k_global_pool_bwd"},
    };
    int i = 0;
    char impl[64], access[32];
    const dnr_desc *x = dnri_desc(g, op->in[0]);
    while (ops[i].def != op->def)
        i++;
    snprintf(impl, sizeof impl, "%s %s", ops[i].kernel,
             dnri_cuda_access(x->dtype, x->dim[3], access));
    return dnri_cuda_lower(dev, g, op, ops[i].run, 1, impl, out, NULL);
}

const dnri_lowering dnri_cuda_pool[] = {
    {&dnri_def_max_pool, NULL, lower},        {&dnri_def_max_pool_bwd, NULL, lower},
    {&dnri_def_max_pool_act, NULL, lower},    {&dnri_def_avg_pool, NULL, lower},
    {&dnri_def_avg_pool_bwd, NULL, lower},    {&dnri_def_global_pool, NULL, lower},
    {&dnri_def_global_pool_bwd, NULL, lower}, {0},
};
