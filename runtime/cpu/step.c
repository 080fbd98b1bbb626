/* step.c: steps of our own kernels and of oneDNN ops. */
#include "cpu.h"

#include <stdlib.h>

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
    int slot[4];
    int threads; /* oneDNN wants as many in a run as it was promised when the op was made */
} dnn_step;

static void *bound(const dnri_binding *b, int slot)
{
    return slot == DNRI_DNN_ABSENT ? NULL : slot >= 0 ? b->in[slot] : b->out[~slot];
}

static dnr_status dnn_bind(void *ctx, const dnri_binding *b)
{
    dnn_step *s = ctx;
    void *address[4];
    for (int i = 0; i < 4; i++)
        address[i] = bound(b, s->slot[i]);
    return dnri_dnn_bind(s->op, address, b->workspace);
}

static dnr_status dnn_run(void *ctx)
{
    const dnn_step *s = ctx;
    int before = dnri_threads_use(s->threads);
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
    int before = dnri_threads_use(s->threads);
    dnr_status st = dnri_dnn_create(dnri_cpu_of(dev)->dnn, d, &s->op);
    dnri_threads_use(before);
    if (st != DNR_OK || !s->op) {
        free(s);
        return st;
    }
    if (dnri_dnn_launches(s->op) == 0) {
        snprintf(out->impl, sizeof out->impl, "onednn %s", dnri_dnn_impl(s->op));
        dnn_drop(s);
        return DNR_OK;
    }
    for (int i = 0; i < 4; i++)
        s->slot[i] = slot[i];
    *out = (dnri_step){.bind = dnn_bind,
                       .run = dnn_run,
                       .drop = dnn_drop,
                       .ctx = s,
                       .workspace = dnri_dnn_workspace(s->op),
                       .lane = DNRI_COMPUTE,
                       .launches = dnri_dnn_launches(s->op)};
    snprintf(out->impl, sizeof out->impl, "onednn %s", dnri_dnn_impl(s->op));
    return DNR_OK;
}
