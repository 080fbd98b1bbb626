/* step.c: the frame around each lowered op: binding, launch errors, shapes in messages. */
#include "device.h"

#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>

const char *dnri_cuda_shapes(const dnri_cuda_op *s, char *buf, size_t size)
{
    size_t len = 0;
    buf[0] = 0;
    for (int k = 0; k < s->op.n_in + s->op.n_out && len < size; k++) {
        bool out = k >= s->op.n_in;
        char text[64];
        const dnr_desc *d = out ? &s->out[k - s->op.n_in] : &s->in[k];
        if ((out ? s->op.out[k - s->op.n_in] : s->op.in[k]) < 0)
            continue;
        int n = snprintf(buf + len, size - len, "%s%s",
                         k == s->op.n_in ? " → "
                         : k             ? " "
                                         : "",
                         dnri_desc_text(d, text));
        len += n > 0 ? (size_t)n : 0;
    }
    return buf;
}

const char *dnri_cuda_access(dnr_dtype t, int64_t c, char buf[32])
{
    int wide = 16 / (int)dnri_dtype_size(t);
    snprintf(buf, 32, "%s x %d", dnri_dtype_name(t), c % wide == 0 ? wide : 1);
    return buf;
}

bool dnri_cuda_types(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    for (int k = 0; k < op->n_in + op->n_out; k++) {
        dnr_tid t = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
        if (t >= 0 && dnri_desc(g, t)->dtype == DNR_F64)
            return false;
    }
    return true;
}

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    dnri_cuda_op *s = ctx;
    s->at = *b;
    return s->prepare ? s->prepare(s) : DNR_OK;
}

static dnr_status run(void *ctx)
{
    dnri_cuda_op *s = ctx;
    char shapes[512];
    nvtxRangePushA(s->range); /* nothing where no profiler is attached */
    const dnr_status st = s->launch(s);
    (void)nvtxRangePop();
    if (st != DNR_OK)
        return dnri_fail_context("%s", dnri_cuda_shapes(s, shapes, sizeof shapes));
    cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess)
        return dnri_cuda_fail(DNRI_HERE, e, "launching kernels for %s",
                              dnri_cuda_shapes(s, shapes, sizeof shapes));
    return DNR_OK;
}

static void drop(void *ctx)
{
    dnri_cuda_op *s = ctx;
    if (s && s->release)
        s->release(s);
    free(s);
}

dnr_status dnri_cuda_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                           dnr_status (*launch)(dnri_cuda_op *), int launches, const char *impl,
                           dnri_step *out, dnri_cuda_op **made)
{
    dnri_cuda_op *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->dev = dnri_cuda_of(dev);
    s->stream = s->dev->lane[DNRI_COMPUTE];
    s->op = *op;
    s->launch = launch;
    snprintf(s->range, sizeof s->range, "%s %s", op->def->name, op->name);
    for (int i = 0; i < op->n_in; i++)
        if (op->in[i] >= 0)
            s->in[i] = *dnri_desc(g, op->in[i]);
    for (int i = 0; i < op->n_out; i++)
        if (op->out[i] >= 0)
            s->out[i] = *dnri_desc(g, op->out[i]);
    *out = (dnri_step){.bind = bind,
                       .run = run,
                       .drop = drop,
                       .ctx = s,
                       .lane = DNRI_COMPUTE,
                       .launches = launches};
    snprintf(out->impl, sizeof out->impl, "%s", impl);
    if (made)
        *made = s;
    return DNR_OK;
}
