/* norm_pool.c: batch norm, ReLU and max pool in one pass through our own kernels; other windows than the stem's
 * are split. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"

#include <stdio.h>

enum { X, GAMMA, BETA, MEAN, VAR, SUM, SQSUM };
enum { Y, INDEX, OUT_MEAN, OUT_INVSTD };
enum { B_X, B_INDEX, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD, B_Y };

static k_pool_args geometry(const dnri_cuda *d, const dnri_pool_attr *a, const dnr_desc *x,
                            const dnr_desc *y)
{
    return (k_pool_args){.type = (int)x->dtype,
                         .sms = d->sms,
                         .n = (int)x->dim[0],
                         .h = (int)x->dim[1],
                         .w = (int)x->dim[2],
                         .c = (int)x->dim[3],
                         .p = (int)y->dim[1],
                         .q = (int)y->dim[2],
                         .kernel = a->kernel,
                         .stride = a->stride,
                         .pad = a->pad};
}

static int64_t rows_of(const dnr_desc *x)
{
    return x->dim[0] * x->dim[1] * x->dim[2];
}

static dnr_status run_forward(dnri_cuda_op *s)
{
    const dnri_norm_pool_attr *at = (const dnri_norm_pool_attr *)s->op.attr;
    const bool train = s->op.def == &dnri_def_norm_pool_train, sums = s->op.n_in > SUM;
    const k_pool_args g = geometry(s->dev, &at->pool, &s->in[X], &s->out[Y]);
    k_norm_args a = {.type = g.type,
                     .sms = g.sms,
                     .rows = rows_of(&s->in[X]),
                     .c = g.c,
                     .x = s->at.in[X],
                     .gamma = s->at.in[GAMMA],
                     .beta = s->at.in[BETA],
                     .mean = train ? s->at.out[OUT_MEAN] : s->at.in[MEAN],
                     .invstd = train ? s->at.out[OUT_INVSTD] : s->at.in[VAR],
                     .running_mean = s->at.in[MEAN],
                     .running_var = s->at.in[VAR],
                     .sum = sums ? s->at.in[SUM] : NULL,
                     .sqsum = sums ? s->at.in[SQSUM] : NULL,
                     .y = s->at.out[Y],
                     .eps = at->norm.eps,
                     .momentum = at->norm.momentum,
                     .relu = true};
    if (train && !sums)
        k_norm_stats(s->stream, &a, s->at.workspace);
    k_norm_pool_apply(s->stream, &a, &g, s->at.out[INDEX]);
    return DNR_OK;
}

static dnr_status run_bwd(dnri_cuda_op *s)
{
    const k_pool_args g =
        geometry(s->dev, (const dnri_pool_attr *)s->op.attr, &s->in[B_X], &s->in[B_DY]);
    const k_norm_bwd_args a = {.type = g.type,
                               .sms = g.sms,
                               .rows = rows_of(&s->in[B_X]),
                               .c = g.c,
                               .x = s->at.in[B_X],
                               .y = s->at.in[B_Y],
                               .dy = s->at.in[B_DY],
                               .dy2 = s->at.in[B_DY2],
                               .gamma = s->at.in[B_GAMMA],
                               .beta = s->at.in[B_BETA],
                               .mean = s->at.in[B_MEAN],
                               .invstd = s->at.in[B_INVSTD],
                               .dx = s->at.out[0],
                               .dgamma = s->at.out[1],
                               .dbeta = s->at.out[2]};
    k_norm_pool_bwd(s->stream, &a, &g, s->at.in[B_INDEX], s->at.workspace);
    return DNR_OK;
}

static k_pool_args geometry_of(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const bool bwd = op->def == &dnri_def_norm_pool_bwd;
    const dnri_pool_attr *a =
        bwd ? (const dnri_pool_attr *)op->attr : &((const dnri_norm_pool_attr *)op->attr)->pool;
    return geometry(dnri_cuda_of(dev), a, dnri_desc(g, op->in[X]),
                    dnri_desc(g, bwd ? op->in[B_DY] : op->out[Y]));
}

static bool supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const k_pool_args a = geometry_of(dev, g, op);
    return k_norm_pool_takes(&a);
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    const bool stats = op->def == &dnri_def_norm_pool_train && op->n_in <= SUM,
               bwd = op->def == &dnri_def_norm_pool_bwd;
    const k_pool_args a = geometry_of(dev, g, op);
    char impl[64], access[32];
    snprintf(impl, sizeof impl, "k_norm_pool %s %s",
             bwd     ? "sums+apply"
             : stats ? "stats+apply"
                     : "apply",
             dnri_cuda_access((dnr_dtype)a.type, a.c, access));
    DNR_TRY(dnri_cuda_lower(dev, g, op, bwd ? run_bwd : run_forward, stats || bwd ? 3 : 1, impl,
                            out, NULL));
    out->in_place = true;
    out->workspace = bwd     ? k_norm_pool_bwd_workspace(&a)
                     : stats ? k_norm_workspace(a.type, a.sms, a.c)
                             : 0;
    return DNR_OK;
}

const dnri_lowering dnri_cuda_norm_pool[] = {
    {&dnri_def_norm_pool_train, supports, lower},
    {&dnri_def_norm_pool_apply, supports, lower},
    {&dnri_def_norm_pool_bwd, supports, lower},
    {0},
};
