/* relu.c: the ReLU that stands alone. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"

typedef struct relu {
    dnri_binding b;
    int64_t n;
    bool bf16;
    int slices;
} relu;

DNRI_INLINE void fprop(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const relu *s = ctx;
    const void *x = s->b.in[0];
    void *y = s->b.out[0];
    DNRI_EACH (i, begin, end) {
        float v = dnri_ld(x, i, bf16);
        dnri_st(y, i, v < 0 ? 0 : v, bf16); /* NaN passes */
    }
}
DNRI_KERNEL(fprop);

DNRI_INLINE void bwd(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const relu *s = ctx;
    const void *y = s->b.in[0], *dy = s->b.in[1];
    void *dx = s->b.out[0];
    DNRI_EACH (i, begin, end)
        dnri_st(dx, i, dnri_keep_if(dnri_ld(y, i, bf16) > 0, dnri_ld(dy, i, bf16)), bf16);
}
DNRI_KERNEL(bwd);

static dnr_status fprop_run(void *ctx)
{
    relu *s = ctx;
    dnri_slices(s->slices, s->n, fprop_k[s->bf16], s);
    return DNR_OK;
}

static dnr_status bwd_run(void *ctx)
{
    relu *s = ctx;
    dnri_slices(s->slices, s->n, bwd_k[s->bf16], s);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    relu *s = dnri_cpu_step(out, sizeof *s, op->def == &dnri_def_relu ? fprop_run : bwd_run, 1);
    if (!s)
        return DNR_EMEM;
    const dnr_desc *x = dnri_desc(g, op->in[0]);
    out->in_place = true;
    s->n = dnri_count(x);
    s->bf16 = x->dtype == DNR_BF16;
    s->slices = dnri_slices_for(dev, s->n);
    return DNR_OK;
}

const dnri_lowering dnri_cpu_relu[] = {
    {&dnri_def_relu, NULL, lower}, {&dnri_def_relu_bwd, NULL, lower}, {0}};
