/* shortcut.c: option-A shortcuts: rows of channels copied or zeroed. */
#include "../../runtime/cpu/kernel.h"
#include "../layers.h"

typedef struct shortcut {
    dnri_binding b;
    size_t elem; /* bytes */
    int slices, stride;
    int64_t n, h, w, c; /* of x */
    int64_t p, q, k;    /* of y */
} shortcut;

/* a row: the pixels of one picture line of y */
static void fprop_rows(void *ctx, int slice, int64_t begin, int64_t end)
{
    const shortcut *s = ctx;
    const char *x = s->b.in[0];
    size_t before = (size_t)((s->k - s->c) / 2) * s->elem, row = (size_t)s->c * s->elem;
    size_t after = (size_t)s->k * s->elem - before - row;
    char *y = (char *)s->b.out[0] + (size_t)(begin * s->q * s->k) * s->elem;
    for (int64_t r = begin; r < end; r++) {
        int64_t line = r / s->p * s->h + r % s->p * s->stride;
        for (int64_t q = 0; q < s->q; q++) {
            memset(y, 0, before);
            memcpy(y + before, x + (size_t)(line * s->w + q * s->stride) * row, row);
            memset(y + before + row, 0, after);
            y += before + row + after;
        }
    }
}

/* a row: the pixels of one picture line of dx */
static void bwd_rows(void *ctx, int slice, int64_t begin, int64_t end)
{
    const shortcut *s = ctx;
    const char *dy = (const char *)s->b.in[0] + (size_t)((s->k - s->c) / 2) * s->elem;
    size_t row = (size_t)s->c * s->elem, from_row = (size_t)s->k * s->elem;
    char *dx = (char *)s->b.out[0] + (size_t)(begin * s->w) * row;
    for (int64_t r = begin; r < end; r++) {
        int64_t n = r / s->h, h = r % s->h, line = (n * s->p + h / s->stride) * s->q;
        for (int64_t w = 0; w < s->w; w++, dx += row)
            if (h % s->stride == 0 && w % s->stride == 0)
                memcpy(dx, dy + (size_t)(line + w / s->stride) * from_row, row);
            else
                memset(dx, 0, row);
    }
}

static dnr_status fprop_run(void *ctx)
{
    shortcut *s = ctx;
    dnri_slices(s->slices, s->n * s->p, fprop_rows, s);
    return DNR_OK;
}

static dnr_status bwd_run(void *ctx)
{
    shortcut *s = ctx;
    dnri_slices(s->slices, s->n * s->h, bwd_rows, s);
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    bool forward = op->def == &dnri_def_shortcut;
    shortcut *s = dnri_cpu_step(out, sizeof *s, forward ? fprop_run : bwd_run, 1);
    if (!s)
        return DNR_EMEM;
    const dnri_shortcut_attr *a = (const dnri_shortcut_attr *)op->attr;
    const dnr_desc *y = dnri_desc(g, forward ? op->out[0] : op->in[0]);
    s->elem = dnri_dtype_size(y->dtype);
    s->stride = a->stride;
    s->n = y->dim[0];
    s->h = a->h;
    s->w = a->w;
    s->c = a->c;
    s->p = y->dim[1];
    s->q = y->dim[2];
    s->k = y->dim[3];
    s->slices = dnri_slices_for(dev, dnri_count(y));
    return DNR_OK;
}

const dnri_lowering dnri_cpu_shortcut[] = {
    {&dnri_def_shortcut, NULL, lower}, {&dnri_def_shortcut_bwd, NULL, lower}, {0}};
