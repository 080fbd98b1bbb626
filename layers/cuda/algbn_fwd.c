/* algbn_fwd.c: algebraic batch norm forwards: statistics, folding, and the join with the residual as one product. */
#include "../../runtime/cuda/product.h"
#include "../layers.h"
#include "narrow.h"

enum { S_GRAM, S_SUM_A, S_A, S_W, S_MEAN, S_VAR, S_HEADER }; /* in of algbn.stats */
enum { F_W, F_SUM_A, F_GAMMA, F_BETA, F_INVSTD };            /* in of algbn.fold */
enum { J_A, J_WF, J_SHIFT, J_RESIDUAL, J_LOW };              /* in of algbn.join */

static int64_t rows_of(const dnr_desc *x)
{
    return x->dim[0] * x->dim[1] * x->dim[2];
}

/* ---------------------------------------------------------------- algbn.stats and algbn.fold */

static dnr_status run_stats(dnri_cuda_op *s)
{
    const dnri_algbn_stats_attr *attr = (const dnri_algbn_stats_attr *)s->op.attr;
    void *const *in = s->at.in, *const *out = s->at.out;
    const k_algbn_stats_args a = {.type = (int)s->in[S_W].dtype,
                                  .rows = attr->rows,
                                  .k = s->in[S_W].dim[0],
                                  .c = s->in[S_W].dim[3],
                                  .a = in[S_A],
                                  .w = in[S_W],
                                  .gram = in[S_GRAM],
                                  .sum_a = in[S_SUM_A],
                                  .running_mean = in[S_MEAN],
                                  .running_var = in[S_VAR],
                                  .mean = out[0],
                                  .invstd = out[1],
                                  .eps = attr->eps,
                                  .momentum = attr->momentum,
                                  .guard = DNRI_ALGBN_GUARD,
                                  .first = attr->first};
    k_algbn_stats(s->stream, &a, in[S_HEADER], out[2]);
    return DNR_OK;
}

static dnr_status lower_stats(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                              const dnri_lower_opts *o, dnri_step *out)
{
    const bool first = ((const dnri_algbn_stats_attr *)op->attr)->first;
    return dnri_cuda_lower(dev, g, op, run_stats, 1 + first, "k_algbn", out, NULL);
}

static dnr_status run_fold(dnri_cuda_op *s)
{
    const k_algbn_fold_args a = {.type = (int)s->in[F_W].dtype,
                                 .rows = ((const dnri_algbn_attr *)s->op.attr)->rows,
                                 .k = s->in[F_W].dim[0],
                                 .c = s->in[F_W].dim[3],
                                 .w = s->at.in[F_W],
                                 .sum_a = s->at.in[F_SUM_A],
                                 .gamma = s->at.in[F_GAMMA],
                                 .beta = s->at.in[F_BETA],
                                 .invstd = s->at.in[F_INVSTD],
                                 .wf = s->at.out[0],
                                 .shift = s->at.out[1],
                                 .low = s->op.n_out > 2 ? s->at.out[2] : NULL};
    k_algbn_fold(s->stream, &a);
    return DNR_OK;
}

static dnr_status lower_fold(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_fold, 1, "k_algbn_fold", out, NULL);
}

/* ---------------------------------------------------------------- algbn.join */

/* In 16 bits a pass of our own, or a product of cuBLASLt's, whose epilogue adds a rounded shift and makes the same mask
 * (as nvmath-python's tests describe it: bit i mod 8 of byte ⌊i/8⌋ of a column is row i's). */
static k_narrow_args join_args(const dnri_cuda *d, const dnr_desc *a, const dnr_desc *wf)
{
    return (k_narrow_args){.type = (int)a->dtype,
                           .sms = d->sms,
                           .cc = d->cc,
                           .rows = rows_of(a),
                           .n = (int)wf->dim[0],
                           .depth = {(int)a->dim[3]},
                           .b_t = true};
}

static dnr_status run_join(dnri_cuda_op *s)
{
    k_narrow_args a = join_args(s->dev, &s->in[J_A], &s->in[J_WF]);
    a.a[0] = s->at.in[J_A];
    a.b[0] = s->at.in[J_WF];
    a.shift = s->at.in[J_SHIFT];
    a.residual = s->at.in[J_RESIDUAL];
    a.d = s->at.out[0];
    a.mask = s->op.n_out > 1 ? s->at.out[1] : NULL;
    a.relu = ((const dnri_algbn_join_attr *)s->op.attr)->relu;
    DNRI_CUDA(k_narrow(s->stream, &a), "%s: multiplying", s->op.name);
    return DNR_OK;
}

static dnr_status run_join_product(dnri_cuda_op *s)
{
    const dnri_product_at at = {.a = s->at.in[J_A],
                                .b = s->at.in[J_WF],
                                .c = s->at.in[J_RESIDUAL],
                                .bias = s->at.in[J_LOW] ? s->at.in[J_LOW] : s->at.in[J_SHIFT],
                                .d = s->at.out[0],
                                .mask = s->op.n_out > 1 ? s->at.out[1] : NULL,
                                .workspace = s->at.workspace};
    return dnri_product_run(s->dev, s->own, s->stream, &at);
}

static dnr_status run_rival(dnri_cuda *d, const void *own, cudaStream_t stream,
                            const k_narrow_args *a, void *workspace)
{
    const dnri_product_at at = {.a = a->a[0],
                                .b = a->b[0],
                                .c = a->residual,
                                .bias = a->halves,
                                .d = a->d,
                                .mask = a->mask,
                                .workspace = workspace};
    return dnri_product_run(d, own, stream, &at);
}

/* cuBLASLt's product in 16 bits, where it is there and faster, else NULL. It is another one with a mask than without, and
 * recomputation does without: so that it changes no bit, deterministic runs take our own. */
static dnr_status choose_join(dnri_cuda *d, const dnri_op *op, const dnri_product_spec *z,
                              const k_narrow_args *a, const dnri_lower_opts *o,
                              const dnri_product **out)
{
    dnri_narrow_contest c = {
        .name = "algbn.join", .a = *a, .residual = z->add, .mask = z->mask, .rival = run_rival};
    bool own = true;
    c.a.relu = z->relu;
    *out = NULL;
    if (o->deterministic || op->in[J_LOW] < 0 || (z->mask && z->n % 128))
        return DNR_OK;
    DNR_TRY(dnri_product_choose(d, z, o, out));
    c.own = *out;
    c.workspace = dnri_product_workspace(*out);
    if (!dnri_product_is_direct(*out)) {
        own = false;
        if (o->benchmark && !d->paper)
            DNR_TRY(dnri_narrow_wins(d, &c, &own));
    }
    *out = own ? NULL : *out;
    return DNR_OK;
}

static dnr_status lower_join(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnr_desc *a = dnri_desc(g, op->in[J_A]), *wf = dnri_desc(g, op->in[J_WF]);
    const dnri_product_spec z = {.m = rows_of(a),
                                 .n = wf->dim[0],
                                 .l = a->dim[3],
                                 .b_t = 1,
                                 .in = a->dtype,
                                 .out = a->dtype,
                                 .bias = 1,
                                 .add = op->in[J_RESIDUAL] >= 0,
                                 .relu = ((const dnri_algbn_join_attr *)op->attr)->relu,
                                 .mask = op->n_out > 1};
    dnri_cuda *d = dnri_cuda_of(dev);
    const k_narrow_args args = join_args(d, a, wf);
    const dnri_product *p;
    dnri_cuda_op *s;
    if (a->dtype == DNR_F32)
        DNR_TRY(dnri_product_for(d, op, &z, o, &p));
    else
        DNR_TRY(choose_join(d, op, &z, &args, o, &p));
    DNR_TRY(dnri_cuda_lower(dev, g, op, p ? run_join_product : run_join, 1,
                            p ? dnri_product_impl(p) : "k_narrow", out, &s));
    s->own = (void *)p; /* the device's */
    out->in_place = true;
    out->workspace = p ? dnri_product_workspace(p) : 0;
    return DNR_OK;
}

/* ---------------------------------------------------------------- what the device has */

/* As algbn.c's. */
static bool able(dnr_device *dev, const dnr_graph *g, const dnr_desc *w)
{
    return w->dim[0] % 8 == 0 && w->dim[3] % 8 == 0 && w->dim[3] <= K_ALGBN_CHANNELS &&
           dnri_cuda_of(dev)->cc >= 80 && !dnri_graph_numerics(g)->tf32;
}

static bool has_stats(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return able(dev, g, dnri_desc(g, op->in[S_W]));
}

static bool has_fold(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return able(dev, g, dnri_desc(g, op->in[F_W]));
}

static bool has_join(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnr_desc *a = dnri_desc(g, op->in[J_A]), *wf = dnri_desc(g, op->in[J_WF]);
    const k_narrow_args args = join_args(dnri_cuda_of(dev), a, wf);
    if (a->dtype == DNR_F32)
        return op->n_out == 1 && able(dev, g, wf);
    return k_narrow_takes(&args);
}

const dnri_lowering dnri_cuda_algbn_fwd[] = {
    {&dnri_def_algbn_stats, has_stats, lower_stats},
    {&dnri_def_algbn_fold, has_fold, lower_fold},
    {&dnri_def_algbn_join, has_join, lower_join},
    {0},
};
