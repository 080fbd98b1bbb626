/* step.c: steps of our own kernels and of oneDNN ops. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

static dnr_status keep_binding(void *ctx, const dnri_binding *b)
{
    *(dnri_binding *)ctx = *b;
    return DNR_OK;
}

void *dnri_cpu_step(dnri_step *out, size_t size, dnr_status (*run)(void *ctx), int launches)
{
    void *ctx = calloc(1, size);
    if (!ctx) {
        DNR_FAIL_NOMEM();
        return NULL;
    }
    *out = (dnri_step){.bind = keep_binding,
                       .run = run,
                       .drop = free,
                       .ctx = ctx,
                       .lane = DNRI_COMPUTE,
                       .launches = launches,
                       .impl = "openmp"};
    return ctx;
}

typedef struct dnn_step {
    dnri_dnn_op *op;
    int slot[4], residual;
    int threads; /* oneDNN wants as many in a run as it was promised when the op was made */
    /* a residual that has to lie where the result will: from, to, bytes; 0 where it need not */
    const char *from;
    char *to;
    size_t copied;
} dnn_step;

static void *bound(const dnri_binding *b, int slot)
{
    return slot == DNRI_DNN_ABSENT ? NULL : slot >= 0 ? b->in[slot] : b->out[~slot];
}

void dnri_dnn_tensors(const dnri_binding *b, const int slot[4], void *at[4])
{
    for (int i = 0; i < 4; i++)
        at[i] = bound(b, slot[i]);
}

static dnr_status dnn_bind(void *ctx, const dnri_binding *b)
{
    dnn_step *s = ctx;
    void *address[4];
    dnri_dnn_tensors(b, s->slot, address);
    s->from = bound(b, s->residual);
    s->to = address[DNRI_DNN_DST];
    return dnri_dnn_bind(s->op, address, bound(b, s->residual), b->workspace);
}

static void copy_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const dnn_step *s = ctx;
    memcpy(s->to + begin, s->from + begin, (size_t)(end - begin));
}

static dnr_status dnn_run(void *ctx)
{
    dnn_step *s = ctx;
    int before = dnri_threads_use(s->threads);
    if (s->copied)
        dnri_slices(s->threads, (int64_t)s->copied, copy_slice, s);
    dnr_status st = dnri_dnn_run(s->op);
    dnri_threads_use(before);
    return st;
}

static void dnn_drop(void *ctx)
{
    dnn_step *s = ctx;
    dnri_dnn_drop(s->op);
    free(s);
}

dnr_status dnri_cpu_dnn_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                             dnri_step *out)
{
    dnn_step *s = malloc(sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    const dnr_desc *w = &d->shape[DNRI_DNN_WEIGHTS];
    s->threads = dnri_threads_for(dev, 2.0 * (double)dnri_count(&d->shape[DNRI_DNN_DST]) *
                                           (double)(w->dim[1] * w->dim[2] * w->dim[3]));
    dnri_dnn_desc in_place = *d;
    in_place.in_place = true;
    int before = dnri_threads_use(s->threads);
    dnr_status st = dnri_dnn_create(dnri_cpu_of(dev)->dnn, d, &s->op);
    /* few implementations read a residual from elsewhere, nearly all add to what is there */
    const bool bad = d->added && !d->in_place &&
                     (st == DNR_EDEVICE || (st == DNR_OK && s->op && !dnri_dnn_is_good(s->op)));
    const bool other = bad && d->candidate == 0, copies = d->added && (d->in_place || other);
    if (other) {
        dnri_dnn_drop(s->op);
        st = dnri_dnn_create(dnri_cpu_of(dev)->dnn, &in_place, &s->op);
    }
    dnri_threads_use(before);
    if (st != DNR_OK || !s->op) {
        free(s);
        return st;
    }
    if (dnri_dnn_launches(s->op) == 0 || (bad && !other)) {
        snprintf(out->impl, sizeof out->impl, "onednn %s", dnri_dnn_impl(s->op));
        dnn_drop(s);
        return DNR_OK;
    }
    for (int i = 0; i < 4; i++)
        s->slot[i] = slot[i];
    s->residual = d->added ? d->residual : DNRI_DNN_ABSENT;
    s->copied = copies ? dnri_bytes(&d->shape[DNRI_DNN_DST]) : 0;
    *out = (dnri_step){.bind = dnn_bind,
                       .run = dnn_run,
                       .drop = dnn_drop,
                       .ctx = s,
                       .workspace = dnri_dnn_workspace(s->op),
                       .lane = DNRI_COMPUTE,
                       .launches = dnri_dnn_launches(s->op) + copies};
    snprintf(out->impl, sizeof out->impl, "onednn %.40s%s", dnri_dnn_impl(s->op),
             copies ? " + copy" : "");
    return DNR_OK;
}
