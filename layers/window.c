/* window.c: shape checks that several layers share. */
#include "internal.h"

dnr_status dnri_window(const char *name, int kernel, int stride, int pad, int64_t h, int64_t w,
                       int64_t *p, int64_t *q)
{
    if (kernel < 1 || stride < 1 || pad < 0)
        return DNR_FAIL(DNR_EUSAGE, "use kernel >= 1, stride >= 1, pad >= 0",
                        "%s: kernel %d, stride %d, pad %d", name, kernel, stride, pad);
    if (h + 2 * (int64_t)pad < kernel || w + 2 * (int64_t)pad < kernel)
        return DNR_FAIL(DNR_EUSAGE, "use larger pictures (data.image) or a smaller model",
                        "%s: the kernel, %d x %d, exceeds its input, %lld x %lld padded by %d",
                        name, kernel, kernel, (long long)h, (long long)w, pad);
    *p = (h + 2 * pad - kernel) / stride + 1;
    *q = (w + 2 * pad - kernel) / stride + 1;
    return DNR_OK;
}

dnr_status dnri_want(const dnr_graph *g, const dnri_op *op, int i, const char *what, dnr_desc want)
{
    char a[64], b[64];
    const dnr_desc *d = dnri_desc(g, op->in[i]);
    if (dnri_desc_equal(d, &want))
        return DNR_OK;
    return DNR_FAIL(DNR_EUSAGE, "feed the layer the shape that it wants",
                    "%s (%s): %s is %s, not %s", op->name, op->def->name, what,
                    dnri_desc_text(d, a), dnri_desc_text(&want, b));
}
