/* ref.c: the seam: a device that is plain host memory, and steps that run at once. */
#include "ref.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct ref_device {
    dnr_device base; /* first */
    int64_t allocs, syncs;
} ref_device;

static const ref_row *const tables[] = {ref_conv_rows,      ref_norm_rows,   ref_pool_rows,
                                        ref_norm_pool_rows, ref_packed_rows, ref_algbn_rows,
                                        ref_dense_rows,     ref_loss_rows,   ref_engine_rows};

static const ref_row *find(const dnri_op_def *def)
{
    for (size_t t = 0; t < sizeof tables / sizeof tables[0]; t++)
        for (const ref_row *row = tables[t]; row->def; row++)
            if (row->def == def)
                return row;
    return NULL;
}

static dnr_status ref_open(const char *arg, dnr_device **out)
{
    ref_device *d = calloc(1, sizeof *d);
    if (!d)
        return DNR_FAIL_NOMEM();
    snprintf(d->base.name, sizeof d->base.name, "ref");
    snprintf(d->base.description, sizeof d->base.description,
             "reference back end: naive, fp64, for tests");
    *out = &d->base;
    return DNR_OK;
}

static void ref_close(dnr_device *dev)
{
    free(dev);
}

static dnr_status ref_numerics(dnr_device *dev, dnr_precision *p, dnri_numerics *out)
{
    if (*p != DNR_PRECISION_AUTO && *p != DNR_PRECISION_FP64)
        return DNR_FAIL(DNR_EUSAGE, "set train.precision to auto or fp64, or use another device",
                        "the reference device computes in fp64 only, not in %s",
                        dnr_precision_name(*p));
    *p = DNR_PRECISION_FP64;
    *out = (dnri_numerics){.compute = DNR_F64, .master = DNR_F64};
    return DNR_OK;
}

static dnr_status ref_memory(dnr_device *dev, size_t *free_bytes, size_t *total)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *free_bytes = page * (size_t)sysconf(_SC_AVPHYS_PAGES);
    *total = page * (size_t)sysconf(_SC_PHYS_PAGES);
    return DNR_OK;
}

static dnr_status ref_alloc(dnr_device *dev, size_t bytes, void **out)
{
    const size_t size = (bytes + 256) & ~(size_t)255;
    ((ref_device *)dev)->allocs++;
    *out = aligned_alloc(256, size);
    if (!*out)
        return DNR_FAIL(DNR_EMEM, "lower train.batch or data.image",
                        "out of memory: %zu bytes on ref", bytes);
    memset(*out, 0, size);
    return DNR_OK;
}

static void ref_free(dnr_device *dev, void *p)
{
    free(p);
}

static dnr_status ref_copy(dnr_device *dev, dnr_lane lane, void *dst, const void *src, size_t bytes)
{
    memmove(dst, src, bytes);
    return DNR_OK;
}

static dnr_status ref_fence(dnr_device *dev, dnr_lane from, dnr_lane to)
{
    return DNR_OK;
}

static dnr_status ref_mark(dnr_device *dev, dnr_lane lane, int id)
{
    return DNR_OK;
}

static dnr_status ref_reached(dnr_device *dev, int id, bool *done)
{
    *done = true;
    return DNR_OK;
}

static dnr_status ref_sync(dnr_device *dev, dnr_lane lane)
{
    ((ref_device *)dev)->syncs++;
    return DNR_OK;
}

static void ref_counters(dnr_device *dev, int64_t *allocs, int64_t *syncs)
{
    *allocs = ((ref_device *)dev)->allocs;
    *syncs = ((ref_device *)dev)->syncs;
}

static bool ref_supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return find(op->def) != NULL;
}

static dnr_status step_bind(void *ctx, const dnri_binding *b)
{
    ((ref_step *)ctx)->at = *b;
    return DNR_OK;
}

static dnr_status step_run(void *ctx)
{
    const ref_step *s = ctx;
    s->run(s);
    return DNR_OK;
}

static void step_drop(void *ctx)
{
    free(((ref_step *)ctx)->decay);
    free(ctx);
}

static dnr_status ref_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    const ref_row *row = find(op->def);
    if (!row)
        return DNR_FAIL(DNR_EUSAGE, "write it in tests/ref", "ref has no %s", op->def->name);
    ref_step *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->op = *op;
    s->run = row->run;
    for (int i = 0; i < op->n_in; i++)
        if (op->in[i] >= 0)
            s->in[i] = *dnri_desc(g, op->in[i]);
    for (int i = 0; i < op->n_out; i++)
        if (op->out[i] >= 0)
            s->out[i] = *dnri_desc(g, op->out[i]);
    s->flat = dnri_params_flat(dnri_graph_params(g));
    if (op->def == &dnri_def_sgd) {
        const dnri_sgd_attr *a = (const dnri_sgd_attr *)op->attr;
        s->decay = dnri_decay_map(dnri_graph_params(g), a->decay_norm_bias);
        if (!s->decay) {
            free(s);
            return DNR_FAIL_NOMEM();
        }
    }
    *out = (dnri_step){.bind = step_bind,
                       .run = step_run,
                       .drop = step_drop,
                       .ctx = s,
                       .lane = DNRI_COMPUTE,
                       .launches = 1,
                       .in_place = op->def != &dnri_def_norm_pool_bwd, /* which writes dx first */
                       .impl = "ref"};
    return DNR_OK;
}

extern const dnri_backend dnri_backend_ref;
const dnri_backend dnri_backend_ref = {
    .abi = DNRI_BACKEND_ABI,
    .name = "ref",
    .open = ref_open,
    .close = ref_close,
    .numerics = ref_numerics,
    .memory = ref_memory,
    .alloc = ref_alloc,
    .free = ref_free,
    .alloc_host = ref_alloc,
    .free_host = ref_free,
    .copy = ref_copy,
    .fence = ref_fence,
    .mark = ref_mark,
    .reached = ref_reached,
    .sync = ref_sync,
    .supports = ref_supports,
    .lower = ref_lower,
    .counters = ref_counters,
};
