/* conv_packed.c: the stem over packed pictures. Three channels suit no tensor core; which packing does depends on the
 * kernels. ResNet-50's stem, batch 256, H200, cuDNN 9.19, microseconds of fprop + wgrad:
 *
 *     channels         3            4, QUADS      16, BLOCKS
 *     fp16         552 + 546      404 + 1115     625 + 452
 *     untimed     1509 + 1143     846 + 1122     625 + 452 or somewhat more
 *     bf16        ~1750 + 1140   1761 + 1115     622 + 453
 *
 * In fp16 the engine of 404 and 552 may sum in less than fp32, so that it is taken only where it is timed and proves
 * right: see tune.c. (Its wgrad does not: of 398 microseconds, it is off by 1.4e-3.)
 *
 * QUADS are for kernels of our own (stem.cu: 256 + 263, with the sums of batch norm), where these take the shape; all
 * else takes BLOCKS. Where fprop is timed against cuDNN's engines, the faster way is taken; the wgrad of these is out of
 * the question. Their weights are packed anew each step, unless they come packed, as a fold's do, and dw is unpacked
 * where it is widened. */
#include "../../runtime/engine_ops.h"
#include "conv_run.h"
#include "norm.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

enum { Y, SUM, SQSUM }; /* out of conv_packed.fprop */

typedef struct stem {
    dnri_conv_run run; /* of the packed convolution */
    bool wgrad;
    bool packed;      /* w is so already */
    k_stem_args args; /* of our own */
    k_packed_args weights;
    size_t bytes; /* of packed weights or their gradients, at the start of the workspace */
} stem;

static dnr_status prepare(dnri_cuda_op *s)
{
    const stem *c = s->own;
    const dnri_conv_at at = {.x = s->at.in[0],
                             .w = c->packed ? s->at.in[1] : s->at.workspace,
                             .y = c->wgrad ? s->at.in[1] : s->at.out[Y],
                             .workspace = (char *)s->at.workspace + c->bytes};
    return dnri_conv_bind(s, &at);
}

/* Are statistics wanted? Nobody reads those of a clone. */
static bool sums(const dnri_op *op)
{
    return op->n_out > SUM && !op->clone;
}

static dnr_status run_own(dnri_cuda_op *s)
{
    const stem *c = s->own;
    k_stem_args a = c->args;
    a.x = s->at.in[0];
    if (c->wgrad) {
        a.dy = s->at.in[1];
        a.dw = s->at.out[0];
        k_stem_wgrad(s->stream, &a, s->at.workspace);
        return DNR_OK;
    }
    a.weights = s->at.in[1];
    a.y = s->at.out[Y];
    a.sum = sums(&s->op) ? s->at.out[SUM] : NULL;
    a.sqsum = sums(&s->op) ? s->at.out[SQSUM] : NULL;
    k_stem(s->stream, &a, s->at.workspace);
    return DNR_OK;
}

static dnr_status run(dnri_cuda_op *s)
{
    const stem *c = s->own;
    k_packed_args w = c->weights;
    void *packed = c->packed ? s->at.in[1] : s->at.workspace;
    if (!c->wgrad && !c->packed)
        k_pack_weight(s->stream, &w, s->at.in[1], packed);
    if (c->run.plan->plan) {
        DNR_TRY(dnri_conv_execute(s));
    } else if (c->wgrad) {
        k_conv_wgrad(s->stream, &c->run.geometry, s->at.in[0], s->at.in[1], DNR_F32, packed);
        w.type = DNR_F32; /* of plain loops' dw */
    } else {
        k_conv_fprop(s->stream, &c->run.geometry, s->at.in[0], packed, s->at.out[Y]);
    }
    if (c->wgrad)
        k_unpack_dw(s->stream, &w, packed, s->at.out[0]);
    if (!c->wgrad && sums(&s->op))
        dnri_cuda_sums(s, &s->out[Y], s->at.out[Y], s->at.out[SUM], s->at.out[SQSUM]);
    return DNR_OK;
}

static k_stem_args stem_of(const dnri_cuda *d, const dnr_desc *x, const dnr_desc *w)
{
    return (k_stem_args){.type = (int)x->dtype,
                         .sms = d->sms,
                         .cc = d->cc,
                         .shared = d->k.shared,
                         .n = (int)x->dim[0],
                         .h = (int)x->dim[1],
                         .w = (int)x->dim[2],
                         .k = (int)w->dim[0],
                         .channels = (int)w->dim[3]};
}

/* The stem's windows, in the packings that the table above favours. */
static bool supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)op->attr;
    const bool wgrad = op->def == &dnri_def_packed_conv_wgrad;
    const dnr_desc *w = dnri_desc(g, wgrad ? op->out[0] : op->in[1]);
    dnr_desc x = *dnri_desc(g, op->in[0]);
    if (a->conv.kernel != 7 || a->conv.stride != 2 || a->conv.pad != 3 || a->conv.h % 2 ||
        a->conv.w % 2 || (wgrad && w->dim[3] != 3))
        return false;
    if (a->packing == DNRI_BLOCKS)
        return (x.dtype == DNR_F16 || x.dtype == DNR_BF16) && op->n_out == 1;
    x = dnri_packed_desc(x.dtype, x.dim[0], a->conv.h, a->conv.w, a->packing); /* not yet packed */
    const k_stem_args own = stem_of(dnri_cuda_of(dev), &x, w);
    return wgrad ? k_stem_wgrad_takes(&own) : k_stem_takes(&own);
}

static dnri_conv_problem problem_of(const dnr_desc *x, const dnr_desc *y, bool wgrad,
                                    const dnri_packed_conv_attr *a, const dnri_lower_opts *o)
{
    const bool blocks = a->packing == DNRI_BLOCKS;
    const dnri_conv_attr packed = {.kernel = blocks ? (a->conv.kernel + a->conv.pad % 2 + 1) / 2
                                                    : a->conv.kernel,
                                   .stride = blocks ? 1 : a->conv.stride,
                                   .pad = blocks ? (a->conv.pad + 1) / 2 : a->conv.pad};
    return dnri_conv_problem_of(wgrad ? DNRI_WGRAD : DNRI_FPROP, x, y, &packed, o);
}

/* ---------------------------------------------------------------- ours or cuDNN's */

static size_t up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* What is timed: our kernel; or the pass for statistics that cuDNN's needs. x, w, y, sums and workspace lie in the tuner's
 * memory one after the other. */
typedef struct timing {
    k_stem_args a;
    bool sums, pass;
    size_t w, y, sum, workspace;
} timing;

static void work(void *ctx, cudaStream_t s, void *memory)
{
    const timing *t = ctx;
    char *at = memory;
    float *sum = (float *)(at + t->sum);
    k_stem_args a = t->a;
    a.x = at;
    a.weights = at + t->w;
    a.y = at + t->y;
    a.sum = t->sums ? sum : NULL;
    a.sqsum = t->sums ? sum + a.k : NULL;
    if (!t->pass) {
        k_stem(s, &a, at + t->workspace);
        return;
    }
    const k_norm_args pass = {.type = a.type,
                              .sms = a.sms,
                              .rows = (int64_t)a.n * (a.h / 2) * (a.w / 2),
                              .c = a.k,
                              .x = a.y,
                              .sum = a.sum,
                              .sqsum = a.sqsum};
    k_norm_stats(s, &pass, at + t->workspace);
}

static dnr_status time_work(dnri_cuda *d, const k_stem_args *a, bool with_sums, bool pass,
                            float *us)
{
    const size_t size = dnri_dtype_size((dnr_dtype)a->type), x = (size_t)a->n * a->h * a->w;
    const size_t own = k_stem_workspace(a), stats = k_norm_workspace(a->type, a->sms, a->k);
    timing t = {.a = *a, .sums = with_sums, .pass = pass};
    t.w = up(x * 4 * size);
    t.y = t.w + up((size_t)a->k * 49 * (size_t)a->channels * size);
    t.sum = t.y + up(x / 4 * (size_t)a->k * size);
    t.workspace = t.sum + up(2 * (size_t)a->k * sizeof(float));
    return dnri_cuda_time(d, a->type, t.workspace + (own > stats ? own : stats), work, &t, us);
}

/* `plan`: what was timed beside ours; NULL: nothing was. */
static void tell_own(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                     const dnri_conv_plan *plan)
{
    dnr_tune_way ways[DNRI_CANDIDATES + 1];
    int n = 0;
    for (; plan && n < plan->n_tried; n++) {
        ways[n] = plan->tried[n];
        ways[n].implementation = plan->impls[n];
    }
    if (plan)
        ways[n++] =
            (dnr_tune_way){DNRI_PIN_OWN, plan->us_apart > 0 ? (double)plan->us_apart : -1, 0};
    dnri_tell_tried(o, g, op, ways, n, n - 1, DNRI_PIN_OWN);
}

/* Ours, which repeats its bits, or cuDNN's plan where that is timed as the faster one, with a pass for statistics where
 * they are wanted. Equal problems get one verdict, that of the first: a clone has to repeat the bits. */
static dnr_status judge(dnri_cuda *d, const k_stem_args *own, const dnri_op *op,
                        dnri_conv_plan *plan)
{
    float us, pass = 0;
    if (plan->verdict == DNRI_ONE_PLAN || plan->verdict == DNRI_OWN)
        return DNR_OK;
    DNR_TRY(time_work(d, own, sums(op), false, &us));
    if (sums(op))
        DNR_TRY(time_work(d, own, true, true, &pass));
    plan->us_apart = us < FLT_MAX ? us : 0;
    plan->verdict = plan->plan && plan->us + pass < us ? DNRI_ONE_PLAN : DNRI_OWN;
    return dnri_cudnn_remember(d, plan);
}

/* *out NULL: ours. The user's choice, the faster one, or ours where nothing is timed. */
static dnr_status choose(dnri_cuda *d, const dnri_conv_problem *p, const k_stem_args *own,
                         const dnr_graph *g, const dnri_op *op, const dnri_lower_opts *o,
                         dnri_conv_plan **out)
{
    char pin[DNRI_PIN];
    const bool pinned = dnri_pin_of(o, g, op, pin) && strcmp(pin, DNRI_PIN_OWN) == 0;
    dnri_conv_plan *plan = NULL;
    if (!pinned)
        DNR_TRY(dnri_cudnn_pinned(d, p, g, op, o, &plan));
    if (!pinned && !plan && p->kind == DNRI_FPROP && p->benchmark && !p->deterministic &&
        !d->paper) {
        DNR_TRY(dnri_cudnn_choose(d, p, &plan));
        DNR_TRY(judge(d, own, op, plan));
    }
    *out = plan && plan->verdict == DNRI_ONE_PLAN ? plan : NULL;
    if (*out)
        dnri_cudnn_tell(o, g, op, plan, plan);
    else
        tell_own(o, g, op, plan);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)op->attr;
    const bool wgrad = op->def == &dnri_def_packed_conv_wgrad;
    dnri_cuda *d = dnri_cuda_of(dev);
    const dnr_desc *x = dnri_desc(g, op->in[0]);
    const dnr_desc *w = dnri_desc(g, wgrad ? op->out[0] : op->in[1]);
    dnri_conv_problem p = problem_of(x, dnri_desc(g, wgrad ? op->in[1] : op->out[Y]), wgrad, a, o);
    const bool packed = !wgrad && w->dim[3] != 3;
    const size_t bytes = packed ? 0
                                : up((size_t)(p.k * p.kernel * p.kernel * p.c) *
                                     sizeof(float)); /* room for plain loops' dw */
    const k_stem_args own = stem_of(d, x, w);
    dnri_conv_plan *plan;
    dnri_cuda_op *s;
    p.workspace_cap = o->workspace_cap > bytes ? (int64_t)(o->workspace_cap - bytes) : 0;
    if (a->packing == DNRI_QUADS) {
        DNR_TRY(choose(d, &p, &own, g, op, o, &plan));
    } else {
        DNR_TRY(dnri_cudnn_choose_for(d, &p, g, op, o, &plan));
        dnri_cudnn_tell(o, g, op, plan, plan);
    }
    stem *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    const char *impl = !plan ? DNRI_PIN_OWN : plan->plan ? plan->impl : "direct";
    const bool with_sums = !wgrad && sums(op);
    const int launches = plan ? (packed ? 1 : 2) + 2 * with_sums : wgrad ? 2 : 1 + with_sums;
    dnr_status st = dnri_cuda_lower(dev, g, op, plan ? run : run_own, launches, impl, out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (stem){.run = dnri_conv_run_of(d, &p, op, plan),
                .wgrad = wgrad,
                .packed = packed,
                .args = own,
                .weights = {(int)p.type, (int)p.k, a->conv.kernel, (int)p.kernel, a->conv.pad % 2,
                            a->packing == DNRI_BLOCKS},
                .bytes = bytes};
    s->own = c;
    s->release = dnri_conv_release;
    s->prepare = prepare;
    if (!plan) {
        out->workspace = wgrad ? k_stem_wgrad_workspace(&own) : k_stem_workspace(&own);
        return DNR_OK;
    }
    out->workspace = bytes + plan->workspace;
    if (with_sums) { /* after the convolution, so in the same place */
        const size_t stats = k_norm_workspace((int)p.type, d->sms, p.k);
        out->workspace = out->workspace > stats ? out->workspace : stats;
    }
    return DNR_OK;
}

const dnri_lowering dnri_cuda_packed_conv[] = {
    {&dnri_def_packed_conv, supports, lower},
    {&dnri_def_packed_conv_wgrad, supports, lower},
    {0},
};
