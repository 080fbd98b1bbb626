#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct dnr_graph {
    dnri_params *params;
    dnri_numerics num;
    bool training;
    dnri_op *ops;
    int n_ops, cap_ops;
    dnri_tensor *tensors;
    int n_tensors, cap_tensors;
    int stage, block;
    dnri_phase phase;
    bool *grad_taken; /* by parameter */
    int cap_taken;
    dnr_error error; /* the first; status DNR_OK = none */
};

dnr_graph *dnri_graph_new(dnri_params *params, const dnri_numerics *num, bool training)
{
    dnr_graph *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->params = params;
    g->num = *num;
    g->training = training;
    g->stage = g->block = -1;
    return g;
}

void dnri_graph_free(dnr_graph *g)
{
    if (!g)
        return;
    free(g->ops);
    free(g->tensors);
    free(g->grad_taken);
    free(g);
}

bool dnri_graph_training(const dnr_graph *g)
{
    return g->training;
}

const dnri_numerics *dnri_graph_numerics(const dnr_graph *g)
{
    return &g->num;
}

dnri_params *dnri_graph_params(const dnr_graph *g)
{
    return g->params;
}

dnr_status dnri_graph_status(const dnr_graph *g)
{
    return g->error.status == DNR_OK ? DNR_OK : dnri_fail_as(&g->error);
}

/* Keeps this thread's last error as the graph's, if it is the first. */
static dnr_status stick(dnr_graph *g)
{
    if (g->error.status == DNR_OK)
        g->error = *dnr_last_error();
    return g->error.status;
}

int dnri_graph_ops(const dnr_graph *g)
{
    return g->n_ops;
}

dnri_op *dnri_graph_op(dnr_graph *g, int i)
{
    return &g->ops[i];
}

const dnri_op *dnri_graph_op_c(const dnr_graph *g, int i)
{
    return &g->ops[i];
}

int dnri_graph_tensors(const dnr_graph *g)
{
    return g->n_tensors;
}

int dnri_graph_writer(const dnr_graph *g, dnr_tid t)
{
    for (int i = 0; i < dnri_graph_ops(g); i++)
        for (int k = 0; k < dnri_graph_op_c(g, i)->n_out; k++)
            if (dnri_graph_op_c(g, i)->out[k] == t)
                return i;
    return -1;
}

int dnri_graph_reader(const dnr_graph *g, dnr_tid t, int besides)
{
    int found = -1, reads = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++)
        for (int k = 0; i != besides && k < dnri_graph_op_c(g, i)->n_in; k++)
            if (dnri_graph_op_c(g, i)->in[k] == t) {
                found = i;
                reads++;
            }
    return reads == 1 && !dnri_graph_tensor(g, t)->keep ? found : -1;
}

const dnri_tensor *dnri_graph_tensor(const dnr_graph *g, dnr_tid t)
{
    return &g->tensors[t];
}

void dnri_graph_scope(dnr_graph *g, int stage, int block)
{
    g->stage = stage;
    g->block = block;
}

void dnri_graph_phase(dnr_graph *g, dnri_phase phase)
{
    g->phase = phase;
}

bool dnri_wants_grad(const dnr_graph *g, dnr_tid t)
{
    return t >= 0 && g->tensors[t].wants_grad;
}

void dnri_keep(dnr_graph *g, dnr_tid t)
{
    if (t >= 0)
        g->tensors[t].keep = true;
}

/* Makes room for one more element. */
static bool grow(void **array, int n, int *cap, size_t size)
{
    if (n < *cap)
        return true;
    int want = *cap ? 2 * *cap : 64;
    void *p = realloc(*array, (size_t)want * size);
    if (!p)
        return false;
    *array = p;
    *cap = want;
    return true;
}

dnr_tid dnri_graph_new_tensor(dnr_graph *g, const dnri_tensor *proto)
{
    dnri_tensor copy = *proto; /* proto may point into the array that grows */
    if (!grow((void **)&g->tensors, g->n_tensors, &g->cap_tensors, sizeof *g->tensors)) {
        DNR_FAIL_NOMEM();
        stick(g);
        return DNRI_NONE;
    }
    g->tensors[g->n_tensors] = copy;
    return g->n_tensors++;
}

void dnri_graph_replace_ops(dnr_graph *g, dnri_op *ops, int n)
{
    free(g->ops);
    g->ops = ops;
    g->n_ops = g->cap_ops = n;
}

/* Element type of a slab. */
static dnr_dtype role_dtype(const dnr_graph *g, dnri_role role)
{
    switch (role) {
    case DNRI_WEIGHT:
        return g->num.compute;
    case DNRI_STATE:
    case DNRI_HEADER:
    case DNRI_CELL:
        return DNR_U8; /* raw bytes */
    default:
        return g->num.master;
    }
}

static dnr_tid store_tensor(dnr_graph *g, dnri_role role, int param, const char *name,
                            const dnr_desc *d)
{
    for (dnr_tid t = 0; t < g->n_tensors; t++) {
        const dnri_tensor *x = &g->tensors[t];
        if (x->home == DNRI_STORE && x->role == role && x->param == param)
            return t;
    }
    dnri_tensor x = {.desc = *d, .home = DNRI_STORE, .role = role, .param = param};
    snprintf(x.name, sizeof x.name, "%s", name);
    return dnri_graph_new_tensor(g, &x);
}

dnr_tid dnri_param_tensor(dnr_graph *g, dnri_role role, const dnri_param *proto)
{
    if (g->error.status != DNR_OK)
        return DNRI_NONE;
    int index;
    if (dnri_params_add(g->params, proto, &index) != DNR_OK) {
        stick(g);
        return DNRI_NONE;
    }
    const int64_t *n = proto->dim;
    dnr_desc d = dnri_desc4(role_dtype(g, role), n[0], n[1], n[2], n[3]);
    dnr_tid t = store_tensor(g, role, index, proto->name, &d);
    if (t >= 0)
        g->tensors[t].wants_grad = g->training && (role == DNRI_WEIGHT || role == DNRI_MASTER);
    return t;
}

dnr_tid dnri_slab_tensor(dnr_graph *g, dnri_role role)
{
    static const char *const names[DNRI_ROLES] = {"master", "grad",    "gsum", "momentum",
                                                  "weight", "running", "ema",  "ema_running",
                                                  "state",  "header",  "cell"};
    int64_t n = 0;
    switch (role) {
    case DNRI_STATE:
        n = sizeof(dnri_state);
        break;
    case DNRI_HEADER:
        n = sizeof(dnri_header);
        break;
    case DNRI_CELL:
        n = sizeof(void *);
        break;
    case DNRI_BUFFER:
    case DNRI_EMA_BUFFER:
        n = dnri_params_buffers(g->params);
        break;
    default:
        n = dnri_params_flat(g->params);
        break;
    }
    dnr_desc d = dnri_desc1(role_dtype(g, role), n);
    return g->error.status == DNR_OK ? store_tensor(g, role, -1, names[role], &d) : DNRI_NONE;
}

dnr_tid dnri_grad_of(dnr_graph *g, dnr_tid w)
{
    if (g->error.status != DNR_OK || w < 0)
        return DNRI_NONE;
    const dnri_tensor *x = &g->tensors[w];
    if (x->param >= g->cap_taken) {
        int n = dnri_params_count(g->params);
        bool *p = realloc(g->grad_taken, (size_t)n * sizeof *p);
        if (!p) {
            DNR_FAIL_NOMEM();
            stick(g);
            return DNRI_NONE;
        }
        memset(p + g->cap_taken, 0, (size_t)(n - g->cap_taken) * sizeof *p);
        g->grad_taken = p;
        g->cap_taken = n;
    }
    if (g->grad_taken[x->param]) {
        DNR_FAIL(DNR_EUSAGE, "give each layer a name of its own",
                 "parameter %s is used by two layers; shared weights are not supported", x->name);
        stick(g);
        return DNRI_NONE;
    }
    g->grad_taken[x->param] = true;
    dnr_desc d = x->desc;
    d.dtype = role_dtype(g, DNRI_GRAD);
    char name[DNRI_NAME];
    snprintf(name, sizeof name, "%s", x->name);
    return store_tensor(g, DNRI_GRAD, x->param, name, &d);
}

dnr_status dnri_out(dnr_graph *g, dnri_op *op, int i, dnr_desc d, const char *suffix)
{
    char a[64], b[64];
    if (op->out[i] >= 0) {
        const dnri_tensor *t = &g->tensors[op->out[i]];
        if (!dnri_desc_equal(&t->desc, &d))
            return DNR_FAIL(DNR_EUSAGE, "this is a defect of the layer: please report it",
                            "%s of %s writes %s into %s %s", op->def->name, op->name,
                            dnri_desc_text(&d, a), t->name, dnri_desc_text(&t->desc, b));
        return DNR_OK;
    }
    for (int k = 0; k < 4; k++)
        if (d.dim[k] < 1)
            return DNR_FAIL(DNR_EUSAGE, "use a larger picture (data.image) or another model",
                            "%s: %s would be %s", op->name, suffix, dnri_desc_text(&d, a));
    dnri_tensor t = {.desc = d, .home = DNRI_ARENA, .param = -1};
    snprintf(t.name, sizeof t.name, "%.*s.%s", DNRI_NAME - 20, op->name, suffix);
    op->out[i] = dnri_graph_new_tensor(g, &t);
    return op->out[i] < 0 ? g->error.status : DNR_OK;
}

dnr_status dnri_emit(dnr_graph *g, const dnri_op_def *def, const char *name, const void *attr,
                     size_t attr_size, int n_in, const dnr_tid *in, int n_out, dnr_tid *out)
{
    if (g->error.status != DNR_OK)
        return g->error.status;
    dnri_op op = {.def = def,
                  .n_in = n_in,
                  .n_out = n_out,
                  .stage = g->stage,
                  .block = g->block,
                  .phase = g->phase};
    snprintf(op.name, sizeof op.name, "%s", name);
    if (attr_size)
        memcpy(op.attr, attr, attr_size);
    bool wants = false;
    for (int i = 0; i < n_in; i++) {
        op.in[i] = in[i];
        wants |= dnri_wants_grad(g, in[i]);
    }
    for (int i = 0; i < n_out; i++)
        op.out[i] = out[i];
    if (!grow((void **)&g->ops, g->n_ops, &g->cap_ops, sizeof *g->ops)) {
        DNR_FAIL_NOMEM();
        return stick(g);
    }
    if (def->infer(g, &op) != DNR_OK)
        return stick(g);
    for (int i = 0; i < n_out; i++) {
        out[i] = op.out[i];
        if (out[i] >= 0 && g->tensors[out[i]].home == DNRI_ARENA && g->phase == DNRI_FORWARD &&
            def->grad)
            g->tensors[out[i]].wants_grad |= wants;
    }
    g->ops[g->n_ops++] = op;
    return DNR_OK;
}

dnr_status dnri_graph_fail(dnr_graph *g)
{
    return stick(g);
}

/* ---- add */

static dnr_status add_infer(dnr_graph *g, dnri_op *op)
{
    const dnr_desc *a = dnri_desc(g, op->in[0]), *b = dnri_desc(g, op->in[1]);
    char ta[64], tb[64];
    if (!dnri_desc_equal(a, b))
        return DNR_FAIL(DNR_EUSAGE, "make both branches end in the same shape",
                        "%s: cannot add %s and %s", op->name, dnri_desc_text(a, ta),
                        dnri_desc_text(b, tb));
    return dnri_out(g, op, 0, *a, "sum");
}

static dnr_status add_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    for (int i = 0; i < 2; i++)
        dx[i] = dnri_wants_grad(g, op->in[i]) ? dy[0] : DNRI_NONE;
    return DNR_OK;
}

static double add_flops(const dnr_graph *g, const dnri_op *op)
{
    return (double)dnri_count(dnri_desc(g, op->out[0]));
}

const dnri_op_def dnri_def_add = {
    .name = "add", .infer = add_infer, .grad = add_grad, .flops = add_flops, .takes = {3}};

dnr_tid dnri_add(dnr_graph *g, const char *name, dnr_tid a, dnr_tid b)
{
    dnr_tid y = DNRI_NONE;
    if (a < 0 || b < 0)
        return DNRI_NONE;
    dnri_emit(g, &dnri_def_add, name, NULL, 0, 2, (dnr_tid[]){a, b}, 1, &y);
    return y;
}
