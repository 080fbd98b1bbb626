/* norm.c: batch norm through our own kernels, fused with ReLU and residual; and ReLU on its own. */
#include "../../runtime/cuda/device.h"
#include "../layers.h"
#include "kernels.h"
#include "norm.h"

#include <stdio.h>

enum { X, GAMMA, BETA, RESIDUAL, MEAN, VAR, SUM, SQSUM };          /* in of the forward ops */
enum { OUT_MASK = 3 };                                             /* out of norm.train */
enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD }; /* in of norm.bwd */

static int64_t rows_of(const dnr_desc *x)
{
    return x->dim[0] * x->dim[1] * x->dim[2];
}

static k_norm_args args_of(const dnri_cuda_op *s)
{
    const dnri_norm_attr *a = (const dnri_norm_attr *)s->op.attr;
    return (k_norm_args){.type = (int)s->in[X].dtype,
                         .sms = s->dev->sms,
                         .rows = rows_of(&s->in[X]),
                         .c = s->in[X].dim[3],
                         .x = s->at.in[X],
                         .residual = s->at.in[RESIDUAL],
                         .gamma = s->at.in[GAMMA],
                         .beta = s->at.in[BETA],
                         .mean = s->at.in[MEAN],
                         .invstd = s->at.in[VAR],
                         .y = s->at.out[0],
                         .eps = a->eps,
                         .momentum = a->momentum,
                         .relu = a->relu};
}

static k_norm_args train_args_of(const dnri_cuda_op *s)
{
    k_norm_args a = args_of(s);
    a.running_mean = a.mean;
    a.running_var = a.invstd;
    a.mean = s->at.out[1];
    a.invstd = s->at.out[2];
    a.mask = s->op.n_out > OUT_MASK ? s->at.out[OUT_MASK] : NULL;
    return a;
}

static dnr_status run_train(dnri_cuda_op *s)
{
    k_norm_args a = train_args_of(s);
    k_norm_stats(s->stream, &a, s->at.workspace);
    k_norm_apply(s->stream, &a);
    return DNR_OK;
}

static dnr_status run_train_once(dnri_cuda_op *s)
{
    k_norm_args a = train_args_of(s);
    DNRI_CUDA(k_norm_train_once(s->stream, &s->dev->k, &a, s->at.workspace), "launching k_norm");
    return DNR_OK;
}

static dnr_status run_train_from_sums(dnri_cuda_op *s)
{
    k_norm_args a = train_args_of(s);
    a.sum = s->at.in[SUM];
    a.sqsum = s->at.in[SQSUM];
    k_norm_train(s->stream, &a);
    return DNR_OK;
}

static dnr_status run_apply(dnri_cuda_op *s)
{
    k_norm_args a = args_of(s);
    k_norm_apply(s->stream, &a);
    return DNR_OK;
}

static dnr_status run_eval(dnri_cuda_op *s)
{
    k_norm_args a = args_of(s);
    k_norm_eval(s->stream, &a);
    return DNR_OK;
}

static k_norm_bwd_args bwd_args_of(const dnri_cuda_op *s)
{
    const dnri_norm_bwd_attr *a = (const dnri_norm_bwd_attr *)s->op.attr;
    void *const *in = s->at.in;
    const bool bits = a->residual && s->in[B_Y].dtype == DNR_U8;
    return (k_norm_bwd_args){
        .type = (int)s->in[B_X].dtype,
        .sms = s->dev->sms,
        .rows = rows_of(&s->in[B_X]),
        .c = s->in[B_X].dim[3],
        .x = in[B_X],
        /* else the mask follows from x, which is read anyway */
        .y = a->residual && !bits ? in[B_Y] : NULL,
        .mask = bits ? in[B_Y] : NULL,
        .dy = in[B_DY],
        .dy2 = in[B_DY2],
        .gamma = in[B_GAMMA],
        .beta = in[B_BETA],
        .mean = in[B_MEAN],
        .invstd = in[B_INVSTD],
        .dx = s->at.out[0],
        .dgamma = s->at.out[1],
        .dbeta = s->at.out[2],
        .dz = s->op.n_out > 3 ? s->at.out[3] : NULL,
        .relu = a->relu,
    };
}

static dnr_status run_bwd(dnri_cuda_op *s)
{
    const k_norm_bwd_args a = bwd_args_of(s);
    k_norm_bwd(s->stream, &a, s->at.workspace);
    return DNR_OK;
}

static dnr_status run_bwd_once(dnri_cuda_op *s)
{
    const k_norm_bwd_args a = bwd_args_of(s);
    DNRI_CUDA(k_norm_bwd_once(s->stream, &s->dev->k, &a, s->at.workspace), "launching k_norm");
    return DNR_OK;
}

/* ---- over several ranks (sync_norm.c) */

void dnri_cuda_sums(const dnri_cuda_op *s, const dnr_desc *d, const void *x, void *sum, void *sqsum)
{
    const k_norm_args a = {.type = (int)d->dtype,
                           .sms = s->dev->sms,
                           .rows = rows_of(d),
                           .c = d->dim[3],
                           .x = x,
                           .sum = sum,
                           .sqsum = sqsum};
    k_norm_stats(s->stream, &a, s->at.workspace);
}

static dnr_status run_sums(dnri_cuda_op *s)
{
    dnri_cuda_sums(s, &s->in[X], s->at.in[X], s->at.out[0], s->at.out[1]);
    return DNR_OK;
}

static dnr_status run_sync(dnri_cuda_op *s)
{
    k_norm_args a = train_args_of(s);
    a.sum = s->at.in[SUM];
    a.sqsum = s->at.in[SQSUM];
    a.all_rows = a.rows * ((const dnri_norm_sync_attr *)s->op.attr)->ranks;
    k_norm_train(s->stream, &a);
    return DNR_OK;
}

static dnr_status run_bwd_sums(dnri_cuda_op *s)
{
    enum { DGAMMA, DBETA, ALL_SUM, ALL_DOT, DRESIDUAL };
    k_norm_bwd_args a = bwd_args_of(s);
    a.dx = NULL;
    a.dgamma = s->at.out[DGAMMA];
    a.dbeta = s->at.out[DBETA];
    a.sum = s->at.out[ALL_SUM];
    a.dot = s->at.out[ALL_DOT];
    a.dz = s->at.out[DRESIDUAL];
    k_norm_sync_sums(s->stream, &a, s->at.workspace);
    return DNR_OK;
}

static dnr_status run_bwd_dx(dnri_cuda_op *s)
{
    enum { D_X, D_Y, D_DY, D_DY2, D_GAMMA, D_MEAN, D_INVSTD, D_SUM, D_DOT };
    const dnri_norm_dx_attr *d = (const dnri_norm_dx_attr *)s->op.attr;
    void *const *in = s->at.in;
    const k_norm_bwd_args a = {.type = (int)s->in[D_X].dtype,
                               .sms = s->dev->sms,
                               .rows = rows_of(&s->in[D_X]),
                               .all_rows = rows_of(&s->in[D_X]) * d->ranks,
                               .c = s->in[D_X].dim[3],
                               .x = in[D_X],
                               .y = d->relu ? in[D_Y] : NULL,
                               .dy = in[D_DY],
                               .dy2 = in[D_DY2],
                               .gamma = in[D_GAMMA],
                               .mean = in[D_MEAN],
                               .invstd = in[D_INVSTD],
                               .dx = s->at.out[0],
                               .dgamma = in[D_DOT],
                               .dbeta = in[D_SUM],
                               .relu = d->relu};
    k_norm_sync_dx(s->stream, &a);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        dnr_status (*launch)(dnri_cuda_op *), int launches, const char *what,
                        dnri_step *out)
{
    const dnr_desc *x = dnri_desc(g, op->in[X]);
    char impl[64], access[32];
    snprintf(impl, sizeof impl, "%s %s", what, dnri_cuda_access(x->dtype, x->dim[3], access));
    DNR_TRY(dnri_cuda_lower(dev, g, op, launch, launches, impl, out, NULL));
    out->in_place = true;
    if (launches > 1)
        out->workspace = k_norm_workspace((int)x->dtype, dnri_cuda_of(dev)->sms, x->dim[3]);
    return DNR_OK;
}

/* From this share of a tensor in shared memory on, one launch is faster than three; backward, where the gradient of a
 * residual is not written as well, from the second. */
#define ONCE_SHARE     0.5
#define ONCE_SHARE_BWD 0.1

static bool takes_once(dnr_device *dev, const dnr_desc *x, bool backward, double share)
{
    return k_norm_once_share(&dnri_cuda_of(dev)->k, (int)x->dtype, rows_of(x), x->dim[3],
                             backward) >= share;
}

static dnr_status lower_once(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             dnr_status (*launch)(dnri_cuda_op *), dnri_step *out)
{
    DNR_TRY(lower(dev, g, op, launch, 1, "k_norm once", out));
    out->workspace = k_norm_once_workspace(&dnri_cuda_of(dev)->k);
    return DNR_OK;
}

static dnr_status lower_train(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    if (op->n_in > SUM && op->in[SUM] >= 0)
        return lower(dev, g, op, run_train_from_sums, 1, "k_norm apply of sums", out);
    if (takes_once(dev, dnri_desc(g, op->in[X]), false, ONCE_SHARE))
        return lower_once(dev, g, op, run_train_once, out);
    return lower(dev, g, op, run_train, 3, "k_norm stats+apply", out);
}

static dnr_status lower_bwd(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    const bool residual = ((const dnri_norm_bwd_attr *)op->attr)->residual;
    if (takes_once(dev, dnri_desc(g, op->in[B_X]), true, residual ? ONCE_SHARE : ONCE_SHARE_BWD))
        return lower_once(dev, g, op, run_bwd_once, out);
    return lower(dev, g, op, run_bwd, 3, "k_norm sums+apply", out);
}

/* The ops that are done in one way whatever their shape. */
static dnr_status lower_other(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    static const struct {
        const dnri_op_def *def;
        dnr_status (*launch)(dnri_cuda_op *);
        int launches;
        const char *what;
    } ways[] = {
        {&dnri_def_norm_apply, run_apply, 1, "k_norm apply"},
        {&dnri_def_norm_eval, run_eval, 1, "k_norm eval"},
        {&dnri_def_norm_sums, run_sums, 2, "k_norm stats"},
        {&dnri_def_norm_sync, run_sync, 1, "k_norm apply of sums"},
        {&dnri_def_norm_bwd_sums, run_bwd_sums, 2, "k_norm sums"},
        {&dnri_def_norm_bwd_dx, run_bwd_dx, 1, "k_norm apply"},
    };
    size_t i = 0;
    while (ways[i].def != op->def)
        i++;
    return lower(dev, g, op, ways[i].launch, ways[i].launches, ways[i].what, out);
}

static dnr_status run_relu(dnri_cuda_op *s)
{
    k_relu(s->stream, (int)s->in[0].dtype, s->dev->sms, s->at.in[0], s->at.out[0],
           dnri_count(&s->in[0]));
    return DNR_OK;
}

static dnr_status run_relu_bwd(dnri_cuda_op *s)
{
    k_relu_bwd(s->stream, (int)s->in[0].dtype, s->dev->sms, s->at.in[0], s->at.in[1], s->at.out[0],
               dnri_count(&s->in[0]));
    return DNR_OK;
}

static dnr_status lower_relu(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const bool forward = op->def == &dnri_def_relu;
    DNR_TRY(dnri_cuda_lower(dev, g, op, forward ? run_relu : run_relu_bwd, 1,
                            forward ? "k_relu" : "k_relu_bwd", out, NULL));
    out->in_place = true;
    return DNR_OK;
}

/* A thread has the bits of a byte where it has 8 channels. */
static bool has_mask(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return op->n_out <= OUT_MASK || dnri_dtype_size(dnri_desc(g, op->in[X])->dtype) == 2;
}

const dnri_lowering dnri_cuda_norm[] = {
    {&dnri_def_norm_train, has_mask, lower_train},
    {&dnri_def_norm_apply, NULL, lower_other},
    {&dnri_def_norm_eval, NULL, lower_other},
    {&dnri_def_norm_bwd, NULL, lower_bwd},
    {&dnri_def_norm_sums, NULL, lower_other},
    {&dnri_def_norm_sync, NULL, lower_other},
    {&dnri_def_norm_bwd_sums, NULL, lower_other},
    {&dnri_def_norm_bwd_dx, NULL, lower_other},
    {&dnri_def_relu, NULL, lower_relu},
    {&dnri_def_relu_bwd, NULL, lower_relu},
    {0},
};
