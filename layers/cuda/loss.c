/* loss.c: softmax cross-entropy through our own kernels. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"

static k_loss_args args_of(const dnri_cuda_op *s)
{
    const dnri_loss_attr *a = (const dnri_loss_attr *)s->op.attr;
    return (k_loss_args){.type = (int)s->in[0].dtype,
                         .n = (int)s->in[0].dim[0],
                         .k = (int)s->in[0].dim[3],
                         .logits = s->at.in[0],
                         .labels = s->at.in[1],
                         .soft = s->at.in[2],
                         .smoothing = a->smoothing,
                         .grad_scale = a->grad_scale,
                         .training = a->training};
}

static dnr_status run_loss(dnri_cuda_op *s)
{
    k_loss_args a = args_of(s);
    k_loss(s->stream, &a, s->at.in[3], s->at.out[0], s->at.out[1], s->at.workspace);
    return DNR_OK;
}

static dnr_status run_loss_bwd(dnri_cuda_op *s)
{
    k_loss_args a = args_of(s);
    k_loss_bwd(s->stream, &a, s->at.in[3], s->at.out[0]);
    return DNR_OK;
}

static dnr_status lower_loss(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_loss, 2, "k_loss rows+total", out, NULL));
    out->workspace = (size_t)dnri_desc(g, op->in[0])->dim[0];
    return DNR_OK;
}

static dnr_status lower_loss_bwd(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                 const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_loss_bwd, 1, "k_loss_bwd", out, NULL);
}

const dnri_lowering dnri_cuda_loss[] = {
    {&dnri_def_loss, NULL, lower_loss},
    {&dnri_def_loss_bwd, NULL, lower_loss_bwd},
    {0},
};
