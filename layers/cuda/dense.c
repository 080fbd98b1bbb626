/* dense.c: the fully connected layer: three products, and the bias's gradient. */
#include "../../runtime/cuda/product.h"
#include "../layers.h"
#include "kernels.h"

static dnr_status multiply(dnri_cuda_op *s, const void *a, const void *b, const void *bias)
{
    return dnri_product_run(
        s->dev, s->own, s->stream,
        &(dnri_product_at){
            .a = a, .b = b, .bias = bias, .d = s->at.out[0], .workspace = s->at.workspace});
}

static dnr_status run_fprop(dnri_cuda_op *s)
{
    return multiply(s, s->at.in[0], s->at.in[1], s->at.in[2]);
}

static dnr_status run_dgrad(dnri_cuda_op *s)
{
    return multiply(s, s->at.in[0], s->at.in[1], NULL);
}

static dnr_status run_wgrad(dnri_cuda_op *s)
{
    DNR_TRY(multiply(s, s->at.in[1], s->at.in[0], NULL));
    k_column_sum(s->stream, (int)s->in[1].dtype, s->at.in[1], s->at.out[1], (int)s->in[1].dim[0],
                 (int)s->in[1].dim[3]);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_product_spec z,
                        dnr_status (*launch)(dnri_cuda_op *), int launches, dnri_step *out)
{
    const dnri_product *p;
    dnri_cuda_op *s;
    z.in = dnri_desc(g, op->in[0])->dtype;
    z.out = dnri_desc(g, op->out[0])->dtype;
    z.tf32 = dnri_graph_numerics(g)->tf32;
    DNR_TRY(dnri_product_for(dnri_cuda_of(dev), op, &z, o, &p));
    DNR_TRY(dnri_cuda_lower(dev, g, op, launch, launches, dnri_product_impl(p), out, &s));
    s->own = (void *)p; /* the device's */
    out->workspace = dnri_product_workspace(p);
    return DNR_OK;
}

/* y [n,K] = x [n,C] · wᵀ [C,K] + b */
static dnr_status lower_fprop(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *y = dnri_desc(g, op->out[0]);
    const dnri_product_spec z = {
        .m = x->dim[0], .n = y->dim[3], .l = x->dim[3], .b_t = 1, .bias = 1};
    return lower(dev, g, op, o, z, run_fprop, 1, out);
}

/* dx [n,C] = dy [n,K] · w [K,C] */
static dnr_status lower_dgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *dy = dnri_desc(g, op->in[0]), *dx = dnri_desc(g, op->out[0]);
    const dnri_product_spec z = {.m = dy->dim[0], .n = dx->dim[3], .l = dy->dim[3]};
    return lower(dev, g, op, o, z, run_dgrad, 1, out);
}

/* dw [K,C] = dyᵀ [K,n] · x [n,C] */
static dnr_status lower_wgrad(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *x = dnri_desc(g, op->in[0]), *dw = dnri_desc(g, op->out[0]);
    const dnri_product_spec z = {.m = dw->dim[0], .n = x->dim[3], .l = x->dim[0], .a_t = 1};
    return lower(dev, g, op, o, z, run_wgrad, 2, out);
}

const dnri_lowering dnri_cuda_dense[] = {
    {&dnri_def_dense, NULL, lower_fprop},
    {&dnri_def_dense_dgrad, NULL, lower_dgrad},
    {&dnri_def_dense_wgrad, NULL, lower_wgrad},
    {0},
};
