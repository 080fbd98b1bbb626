/* conv_packed.c: the stem over packed pictures through cuDNN. Three channels suit no tensor core; which packing
 * does depends on cuDNN's kernels. ResNet-50's stem, batch 256, H200, cuDNN 9.19, microseconds of fprop + wgrad:
 *
 *     channels         3            4, QUADS      16, BLOCKS
 *     fp16         552 + 546      404 + 1115     625 + 452
 *     untimed     1509 + 1143     846 + 1122     625 + 452 or somewhat more
 *     bf16        ~1750 + 1140   1761 + 1115     622 + 453
 *
 * In fp16 the engine of 404 and 552 may sum in less than fp32, so that it is taken only where it is timed and proves
 * right: see tune.c. (Its wgrad does not: of 398 microseconds, it is off by 1.4e-3.) So fp16 in training takes
 * QUADS forwards and BLOCKS backwards, written side by side: another 103 MB written, some 30 microseconds; all
 * else takes BLOCKS. Weights are packed anew each step, unless they come packed, as a fold's do, and dw is unpacked where
 * it is widened. */
#include "../../runtime/cuda/convplan.h"
#include "../../runtime/engine_ops.h"
#include "../layers.h"
#include "kernels.h"

#include <stdlib.h>

typedef struct stem {
    bool wgrad;
    bool packed; /* w is so already */
    k_packed_args weights;
    k_conv_args geometry; /* of the packed convolution */
    const dnri_conv_plan *plan;
    cudnnBackendDescriptor_t pack;
    size_t bytes; /* of packed weights or their gradients, at the start of the workspace */
} stem;

static void release(dnri_cuda_op *s)
{
    stem *c = s->own;
    if (c && c->pack)
        (void)cudnnBackendDestroyDescriptor(c->pack);
    free(c);
}

static dnr_status prepare(dnri_cuda_op *s)
{
    stem *c = s->own;
    const dnri_conv_at at = {.x = s->at.in[0],
                             .w = c->packed ? s->at.in[1] : s->at.workspace,
                             .y = c->wgrad ? s->at.in[1] : s->at.out[0],
                             .workspace = (char *)s->at.workspace + c->bytes};
    if (!c->plan->plan)
        return DNR_OK;
    if (c->pack)
        (void)cudnnBackendDestroyDescriptor(c->pack);
    c->pack = NULL;
    return dnri_cudnn_pack(&c->pack, &at);
}

static dnr_status run(dnri_cuda_op *s)
{
    stem *c = s->own;
    k_packed_args w = c->weights;
    void *packed = c->packed ? s->at.in[1] : s->at.workspace;
    if (!c->wgrad && !c->packed)
        k_pack_weight(s->stream, &w, s->at.in[1], packed);
    if (c->plan->plan) {
        DNRI_CUDNN(cudnnBackendExecute(s->dev->cudnn, c->plan->plan, c->pack), "running %s",
                   c->plan->impl);
    } else if (c->wgrad) {
        k_conv_wgrad(s->stream, &c->geometry, s->at.in[0], s->at.in[1], DNR_F32, packed);
        w.type = DNR_F32; /* of plain loops' dw */
    } else {
        k_conv_fprop(s->stream, &c->geometry, s->at.in[0], packed, s->at.out[0]);
    }
    if (c->wgrad)
        k_unpack_dw(s->stream, &w, packed, s->at.out[0]);
    return DNR_OK;
}

/* The windows of the table above, in the packings that it favours. */
static bool supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)op->attr;
    const dnr_desc *w = dnri_desc(g, op->def == &dnri_def_packed_conv ? op->in[1] : op->out[0]);
    const dnr_dtype type = dnri_desc(g, op->in[0])->dtype;
    const bool wgrad = op->def == &dnri_def_packed_conv_wgrad;
    return (w->dim[3] == 3 || !wgrad) && a->conv.kernel == 7 && a->conv.stride == 2 &&
           a->conv.pad == 3 && a->conv.h % 2 == 0 && a->conv.w % 2 == 0 &&
           (a->packing == DNRI_BLOCKS ? type == DNR_F16 || type == DNR_BF16
                                      : type == DNR_F16 && !wgrad);
}

static dnri_conv_problem problem_of(const dnr_desc *x, const dnr_desc *y, bool wgrad,
                                    const dnri_packed_conv_attr *a, const dnri_lower_opts *o)
{
    const bool blocks = a->packing == DNRI_BLOCKS;
    return (dnri_conv_problem){
        .kind = wgrad ? DNRI_WGRAD : DNRI_FPROP,
        .type = x->dtype,
        .n = x->dim[0],
        .h = x->dim[1],
        .w = x->dim[2],
        .c = x->dim[3],
        .p = y->dim[1],
        .q = y->dim[2],
        .k = y->dim[3],
        .kernel = blocks ? (a->conv.kernel + a->conv.pad % 2 + 1) / 2 : a->conv.kernel,
        .stride = blocks ? 1 : a->conv.stride,
        .pad = blocks ? (a->conv.pad + 1) / 2 : a->conv.pad,
        .deterministic = o->deterministic,
        .benchmark = o->tried ? DNRI_ANEW : o->benchmark,
    };
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)op->attr;
    const bool wgrad = op->def == &dnri_def_packed_conv_wgrad;
    dnri_cuda *d = dnri_cuda_of(dev);
    dnri_conv_problem p = problem_of(dnri_desc(g, op->in[0]),
                                     dnri_desc(g, wgrad ? op->in[1] : op->out[0]), wgrad, a, o);
    const bool packed = !wgrad && dnri_desc(g, op->in[1])->dim[3] != 3;
    const size_t bytes = packed
                             ? 0
                             : ((size_t)(p.k * p.kernel * p.kernel * p.c) * sizeof(float) + 255) &
                                   ~(size_t)255; /* room for plain loops' dw */
    dnri_conv_plan *plan;
    dnri_cuda_op *s;
    p.workspace_cap = o->workspace_cap > bytes ? (int64_t)(o->workspace_cap - bytes) : 0;
    DNR_TRY(dnri_cudnn_choose_for(d, &p, g, op, o, &plan));
    dnri_cudnn_tell(o, g, op, plan, plan);
    if (!plan->plan)
        dnri_log(DNR_LOG_WARN,
                 "%s (%s): cuDNN has no engine for packed %s within %zu MiB: plain "
                 "loops are used, slowly",
                 op->name, op->def->name, dnri_dtype_name((dnr_dtype)p.type),
                 o->workspace_cap >> 20);
    stem *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_cuda_lower(dev, g, op, run, packed ? 1 : 2,
                                    plan->plan ? plan->impl : "direct", out, &s);
    if (st != DNR_OK) {
        free(c);
        return st;
    }
    *c = (stem){.wgrad = wgrad,
                .packed = packed,
                .weights = {(int)p.type, (int)p.k, a->conv.kernel, (int)p.kernel, a->conv.pad % 2,
                            a->packing == DNRI_BLOCKS},
                .geometry = {(int)p.type, d->sms, (int)p.n, (int)p.h, (int)p.w, (int)p.c, (int)p.p,
                             (int)p.q, (int)p.k, (int)p.kernel, (int)p.stride, (int)p.pad},
                .plan = plan,
                .bytes = bytes};
    s->own = c;
    s->release = release;
    s->prepare = prepare;
    out->workspace = bytes + plan->workspace;
    return DNR_OK;
}

const dnri_lowering dnri_cuda_packed_conv[] = {
    {&dnri_def_packed_conv, supports, lower},
    {&dnri_def_packed_conv_wgrad, supports, lower},
    {0},
};
