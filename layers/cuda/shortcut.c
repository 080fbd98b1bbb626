/* shortcut.c: the parameter-free shortcut through our own kernels. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"

static k_shortcut_args args_of(const dnri_cuda_op *s, const dnr_desc *y)
{
    const dnri_shortcut_attr *a = (const dnri_shortcut_attr *)s->op.attr;
    return (k_shortcut_args){.type = (int)y->dtype,
                             .sms = s->dev->sms,
                             .n = (int)y->dim[0],
                             .h = (int)a->h,
                             .w = (int)a->w,
                             .c = (int)a->c,
                             .p = (int)y->dim[1],
                             .q = (int)y->dim[2],
                             .k = (int)y->dim[3],
                             .stride = a->stride,
                             .before = (int)(y->dim[3] - a->c) / 2};
}

static dnr_status run_shortcut(dnri_cuda_op *s)
{
    k_shortcut_args a = args_of(s, &s->out[0]);
    k_shortcut(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status run_shortcut_bwd(dnri_cuda_op *s)
{
    k_shortcut_args a = args_of(s, &s->in[0]);
    k_shortcut_bwd(s->stream, &a, s->at.in[0], s->at.out[0]);
    return DNR_OK;
}

static dnr_status lower_shortcut(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                 const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_shortcut, 1, "k_shortcut", out, NULL);
}

static dnr_status lower_shortcut_bwd(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                     const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_shortcut_bwd, 1, "k_shortcut_bwd", out, NULL);
}

const dnri_lowering dnri_cuda_shortcut[] = {
    {&dnri_def_shortcut, NULL, lower_shortcut},
    {&dnri_def_shortcut_bwd, NULL, lower_shortcut_bwd},
    {0},
};
