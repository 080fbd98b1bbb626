#include "rig.h"

#include <math.h>
#include <stdlib.h>

void rig_ok(dnr_status st, const char *expr, const char *file, int line)
{
    if (st == DNR_OK)
        return;
    const dnr_error *e = dnr_last_error();
    print_error("%s: %s: %s (%s)\n", expr, e->where, e->what, e->remedy);
    _fail(file, line);
}

void rig_open(rig *r, dnr_device *dev, dnr_precision precision, bool training)
{
    *r = (rig){.dev = dev, .workspace_cap = (size_t)256 << 20};
    OK(dev->be->numerics(dev, &precision, &r->num));
    r->params = dnri_params_new();
    assert_non_null(r->params);
    r->g = dnri_graph_new(r->params, &r->num, training);
    assert_non_null(r->g);
}

void rig_close(rig *r)
{
    if (r->plan)
        dnri_plan_free(r->plan);
    else
        dnri_graph_free(r->g);
    dnri_store_free(r->store);
    if (r->arena)
        r->dev->be->free(r->dev, r->arena);
    dnri_params_free(r->params);
}

dnr_tid rig_leaf(rig *r, const char *name, dnr_desc d)
{
    dnri_tensor t = {
        .desc = d, .home = DNRI_ARENA, .param = -1, .wants_grad = d.dtype != DNR_I32, .keep = true};
    snprintf(t.name, sizeof t.name, "%s", name);
    return dnri_graph_new_tensor(r->g, &t);
}

dnr_tid rig_keep(rig *r, dnr_tid t)
{
    dnri_keep(r->g, t);
    return t;
}

void rig_plan(rig *r, bool train, bool sums)
{
    const dnri_lower_opts o = {.deterministic = !r->timed && !r->first,
                               .benchmark = r->timed,
                               .workspace_cap = r->workspace_cap,
                               .apart = r->apart};
    dnr_graph *g = r->g;
    r->g = NULL; /* the plan's, even where it fails */
    OK(dnri_plan_build(g, r->dev, "test", &o, &r->plan));
    r->g = g;
    OK(dnri_store_new(r->dev, r->params, &r->num,
                      (train ? DNRI_STORE_TRAIN | DNRI_STORE_EMA : 0u) |
                          (sums ? DNRI_STORE_SUMS : 0u),
                      &r->store));
    OK(r->dev->be->alloc(r->dev, dnri_plan_arena(r->plan) + 1, &r->arena));
    OK(dnri_store_write_state(r->store, &(dnri_state){.loss_scale = 1}));
    rig_header(r, 0, true);
}

void rig_bind(rig *r)
{
    OK(dnri_plan_bind(r->plan, r->store, r->arena, true));
}

void rig_header(rig *r, double lr, bool first)
{
    const dnri_header h = {.lr = lr, .first = first};
    OK(dnri_copy_now(r->dev, dnri_store_ptr(r->store, DNRI_HEADER, -1), &h, sizeof h));
}

void rig_write(rig *r, dnr_tid t, const double *v)
{
    OK(dnri_plan_write(r->plan, t, v));
}

void rig_run(rig *r)
{
    OK(dnri_plan_run(r->plan));
    OK(r->dev->be->sync(r->dev, DNRI_COMPUTE));
}

void rig_read(rig *r, dnr_tid t, double *v)
{
    OK(dnri_plan_read(r->plan, t, v));
}

int64_t rig_count(const rig *r, dnr_tid t)
{
    return dnri_count(dnri_desc(r->g, t));
}

int rig_count_ops(const dnr_graph *g, const dnri_op_def *def)
{
    int n = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++)
        n += dnri_graph_op_c(g, i)->def == def;
    return n;
}

dnr_device *rig_ref;

int rig_open_ref(void **state)
{
    OK(dnr_device_open("ref", &rig_ref));
    return 0;
}

int rig_close_ref(void **state)
{
    dnr_device_close(rig_ref);
    return 0;
}

double rig_error(const double *a, const double *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(a[i]) != isnan(b[i]) || (isinf(b[i]) && a[i] != b[i]))
            return INFINITY;
        if (isnan(b[i]) || isinf(b[i]))
            continue;
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return sqrt(norm > 0 ? diff / norm : diff);
}

static double uniform(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 11) + 0.5) / 9007199254740992.0;
}

double rig_normal(uint64_t *seed)
{
    const double u = uniform(seed), v = uniform(seed);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

void rig_round(dnr_dtype t, double *v, int64_t n)
{
    void *narrow = malloc((size_t)n * dnri_dtype_size(t) + 1);
    assert_non_null(narrow);
    dnri_from_double(t, v, narrow, (size_t)n);
    dnri_to_double(t, narrow, v, (size_t)n);
    free(narrow);
}
