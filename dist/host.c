/* host.c: see host.h. */
#include "host.h"
#include "star.h"

#include <stdlib.h>
#include <string.h>

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    dnri_reduce_step *s = ctx;
    s->data = (char *)b->in[0] + s->a.offset;
    return DNR_OK;
}

void *dnri_reduce_step_new(const dnri_op *op, size_t size, const char *impl,
                           dnr_status (*reduce)(void *), dnr_status (*wait)(void *), dnri_step *out)
{
    dnri_reduce_step *s = calloc(1, size);
    bool waits = op->def == &dnri_def_reduce_wait;
    if (!s) {
        (void)DNR_FAIL_NOMEM();
        return NULL;
    }
    if (!waits)
        memcpy(&s->a, op->attr, sizeof s->a);
    *out = (dnri_step){.bind = bind,
                       .run = waits ? wait : reduce,
                       .drop = free,
                       .ctx = s,
                       .launches = waits ? 0 : 1,
                       .lane = waits || s->a.wait ? DNRI_COMPUTE : DNRI_COMM};
    snprintf(out->impl, sizeof out->impl, "%s", impl);
    return s;
}

dnr_status dnri_reduce_queue(const dnri_reduce_step *s, void **queue)
{
    const dnr_lane lane = s->a.wait ? DNRI_COMPUTE : DNRI_COMM;
    *queue = s->dev->be->queue(s->dev, lane);
    return lane == DNRI_COMM ? s->dev->be->fence(s->dev, DNRI_COMPUTE, DNRI_COMM) : DNR_OK;
}

dnr_status dnri_reduce_wait(void *ctx)
{
    dnr_device *dev = ((const dnri_reduce_step *)ctx)->dev;
    return dev->be->fence(dev, DNRI_COMM, DNRI_COMPUTE);
}

/* ---- in host memory */

typedef struct host_step {
    dnri_reduce_step r; /* first */
    dnr_comm *c;
} host_step;

static dnr_status run_wait(void *ctx)
{
    host_step *s = ctx;
    dnri_star_doing(s->c->star, "waiting for sums");
    dnri_star_advance(s->c->star);
    DNR_TRY(s->c->ops->end_sums(s->c));
    dnri_star_doing(s->c->star, NULL);
    return DNR_OK;
}

static dnr_status run_reduce(void *ctx)
{
    host_step *s = ctx;
    DNR_TRY(s->c->ops->begin_sum(s->c, (dnri_sum)s->r.a.sum, s->r.data, s->r.a.count,
                                 (int)s->r.a.group));
    return s->r.a.wait == 2 ? run_wait(s) : DNR_OK;
}

dnr_status dnri_host_lower(dnr_comm *c, const dnri_op *op, dnri_step *out)
{
    host_step *s = dnri_reduce_step_new(op, sizeof *s, c->ops->name, run_reduce, run_wait, out);
    if (!s)
        return DNR_EMEM;
    s->c = c;
    if (!s->r.a.group || !c->ops->prepare)
        return DNR_OK;
    dnr_status st = c->ops->prepare(c, (int)s->r.a.group);
    if (st != DNR_OK)
        out->drop(out->ctx);
    return st;
}
