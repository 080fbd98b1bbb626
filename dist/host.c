/* host.c: see host.h. */
#include "host.h"
#include "star.h"

#include <stdlib.h>
#include <string.h>

typedef struct reduce_step {
    dnr_comm *c;
    dnri_reduce_attr a;
    char *data;
} reduce_step;

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    reduce_step *s = ctx;
    s->data = (char *)b->in[0] + s->a.offset;
    return DNR_OK;
}

static dnr_status run_wait(void *ctx)
{
    reduce_step *s = ctx;
    dnri_star_doing(s->c->star, "waiting for sums");
    dnri_star_advance(s->c->star);
    DNR_TRY(s->c->ops->end_sums(s->c));
    dnri_star_doing(s->c->star, NULL);
    return DNR_OK;
}

static dnr_status run_reduce(void *ctx)
{
    reduce_step *s = ctx;
    DNR_TRY(s->c->ops->begin_sum(s->c, (dnri_sum)s->a.sum, s->data, s->a.count, (int)s->a.group));
    return s->a.wait == 2 ? run_wait(s) : DNR_OK;
}

dnr_status dnri_host_lower(dnr_comm *c, const dnri_op *op, dnri_step *out)
{
    reduce_step *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->c = c;
    bool wait = op->def == &dnri_def_reduce_wait;
    if (!wait)
        memcpy(&s->a, op->attr, sizeof s->a);
    if (s->a.group && c->ops->prepare && c->ops->prepare(c, (int)s->a.group) != DNR_OK) {
        free(s);
        return dnr_last_error()->status;
    }
    *out = (dnri_step){.bind = bind,
                       .run = wait ? run_wait : run_reduce,
                       .drop = free,
                       .ctx = s,
                       .launches = wait ? 0 : 1,
                       .lane = wait || s->a.wait ? DNRI_COMPUTE : DNRI_COMM};
    snprintf(out->impl, sizeof out->impl, "%s", c->ops->name);
    return DNR_OK;
}
