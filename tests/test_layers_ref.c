/* test_layers_ref.c: the layers as models build them, on the reference device: outputs and gradients
 * against PyTorch's in fp64 (golden/layers.json) and against finite differences; the optimizer. */
#include "rig.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN_BOUND 1e-10
#define DIFF_BOUND   1e-6

/* ---- one layer, built as models build it */

enum { MAX_SLOTS = 12 };

/* A named tensor of a case: an arena tensor, or a parameter in a role. */
typedef struct slot {
    const char *key; /* "x", "weight", "dx" … */
    dnr_tid tid;     /* < 0: a parameter */
    dnri_role role;
    int param;
    int64_t n;
} slot;

typedef struct chain {
    rig r;
    slot slot[MAX_SLOTS];
    int n;
    json_t *json;
    bool loss;
} chain;

static void add_tensor(chain *c, const char *key, dnr_tid t)
{
    if (t < 0)
        return;
    assert_true(c->n < MAX_SLOTS);
    c->slot[c->n++] = (slot){key, rig_keep(&c->r, t), DNRI_MASTER, -1, rig_count(&c->r, t)};
}

static void add_param(chain *c, const char *key, const char *suffix, dnri_role role)
{
    char name[DNRI_NAME];
    snprintf(name, sizeof name, "l.%s", suffix);
    const int i = dnri_params_find(c->r.params, name);
    if (i < 0)
        return;
    assert_true(c->n < MAX_SLOTS);
    c->slot[c->n++] = (slot){key, DNRI_NONE, role, i, dnri_params_at(c->r.params, i)->count};
}

static const slot *find(const chain *c, const char *key)
{
    for (int i = 0; i < c->n; i++)
        if (strcmp(c->slot[i].key, key) == 0)
            return &c->slot[i];
    return NULL;
}

static void get(chain *c, const slot *s, double *v)
{
    if (s->tid >= 0)
        rig_read(&c->r, s->tid, v);
    else
        OK(dnri_store_read(c->r.store, s->role, s->param, v));
}

static void put(chain *c, const slot *s, const double *v)
{
    if (s->tid >= 0)
        rig_write(&c->r, s->tid, v);
    else
        OK(dnri_store_write(c->r.store, s->role, s->param, v));
}

static int integer(json_t *o, const char *key)
{
    return (int)json_integer_value(json_object_get(o, key));
}

static bool truth(json_t *o, const char *key)
{
    return json_is_true(json_object_get(o, key));
}

static double number(json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static void doubles(json_t *array, double *v, int64_t n)
{
    assert_int_equal(json_array_size(array), n);
    for (int64_t i = 0; i < n; i++)
        v[i] = json_number_value(json_array_get(array, (size_t)i));
}

static dnr_tid emit_layer(chain *c, const char *op, json_t *o, dnr_tid x, dnr_tid extra)
{
    dnr_graph *g = c->r.g;
    const dnr_pool_opts pool = {integer(o, "kernel"), integer(o, "stride"), integer(o, "pad")};
    if (strcmp(op, "conv") == 0)
        return dnr_conv(g, "l", x,
                        &(dnr_conv_opts){integer(o, "out"), pool.kernel, pool.stride, pool.pad});
    if (strcmp(op, "norm") == 0)
        return dnr_norm(g, "l", x, extra, &(dnr_norm_opts){.relu = truth(o, "relu")});
    if (strcmp(op, "max_pool") == 0)
        return dnr_max_pool(g, "l", x, &pool);
    if (strcmp(op, "avg_pool") == 0)
        return dnr_avg_pool(g, "l", x, &pool);
    if (strcmp(op, "global_pool") == 0)
        return dnr_global_avg_pool(g, "l", x);
    if (strcmp(op, "dense") == 0)
        return dnr_dense(g, "l", x, integer(o, "out"));
    if (strcmp(op, "shortcut") == 0)
        return dnr_shortcut_a(g, "l", x, integer(o, "out"), integer(o, "stride"));
    if (strcmp(op, "loss") == 0) {
        const dnr_desc d = *dnri_desc(g, x);
        dnr_tid labels = rig_leaf(&c->r, "labels", dnri_desc4(DNR_I32, d.dim[0], 1, 1, 1));
        add_tensor(c, "labels", labels);
        return dnr_loss(g, x, labels, extra,
                        &(dnr_loss_opts){number(o, "smoothing"), 1.0 / (double)d.dim[0]});
    }
    fail_msg("golden/layers.json has an unknown op %s", op);
    return DNRI_NONE;
}

/* The layer of a golden case, with its own backward ops, ready to run. */
static void chain_open(chain *c, json_t *json)
{
    *c = (chain){.json = json};
    json_t *o = json_object_get(json, "opts"), *shape = json_object_get(json, "x");
    const char *op = json_string_value(json_object_get(json, "op"));
    const bool training = strcmp(op, "norm") != 0 || truth(o, "training");
    int64_t n[4];
    for (size_t i = 0; i < 4; i++)
        n[i] = json_integer_value(json_array_get(shape, i));
    c->loss = strcmp(op, "loss") == 0;
    rig_open(&c->r, rig_ref, DNR_PRECISION_AUTO, training);
    const dnr_desc d = dnri_desc4(DNR_F64, n[0], n[1], n[2], n[3]);
    dnr_tid x = rig_leaf(&c->r, "x", d), extra = DNRI_NONE;
    add_tensor(c, "x", x);
    if (truth(o, "residual") || truth(o, "soft")) {
        extra = rig_leaf(&c->r, "extra", d);
        add_tensor(c, c->loss ? "soft" : "residual", extra);
    }
    dnr_tid y = emit_layer(c, op, o, x, extra);
    OK(dnri_graph_status(c->r.g));
    add_tensor(c, "y", y);
    const dnri_op op_copy = *dnri_graph_op(c->r.g, dnri_graph_ops(c->r.g) - 1);
    if (op_copy.def->grad) {
        dnr_tid dy[DNRI_MAX_OUT], dx[DNRI_MAX_IN];
        for (int i = 0; i < DNRI_MAX_OUT; i++)
            dy[i] = DNRI_NONE;
        for (int i = 0; i < DNRI_MAX_IN; i++)
            dx[i] = DNRI_NONE;
        if (!c->loss) {
            dy[0] = rig_leaf(&c->r, "dy", *dnri_desc(c->r.g, y));
            add_tensor(c, "dy", dy[0]);
        }
        OK(op_copy.def->grad(c->r.g, &op_copy, dy, dx));
        add_tensor(c, "dx", dx[0]);
        if (extra >= 0 && !c->loss)
            add_tensor(c, "dresidual", dx[3]);
    }
    rig_plan(&c->r, training, false);
    rig_bind(&c->r);
    add_param(c, "weight", "weight", DNRI_MASTER);
    add_param(c, "bias", "bias", DNRI_MASTER);
    if (training) {
        add_param(c, "dweight", "weight", DNRI_GRAD);
        add_param(c, "dbias", "bias", DNRI_GRAD);
    }
    add_param(c, "running_mean", "running_mean", DNRI_BUFFER);
    add_param(c, "running_var", "running_var", DNRI_BUFFER);
    const char *key;
    json_t *value;
    json_object_foreach(json_object_get(json, "in"), key, value)
    {
        const slot *s = find(c, key);
        if (!s) { /* an evaluation has no dy */
            assert_string_equal(key, "dy");
            continue;
        }
        double *v = malloc((size_t)s->n * sizeof *v);
        doubles(value, v, s->n);
        put(c, s, v);
        free(v);
    }
}

static json_t *load_golden(void)
{
    json_error_t e;
    json_t *all = json_load_file(DNRI_TEST_DIR "/golden/layers.json", 0, &e);
    if (!all)
        fail_msg("golden/layers.json:%d: %s", e.line, e.text);
    assert_true(json_array_size(all) > 30);
    return all;
}

static bool is_layer(json_t *json)
{
    return json_object_get(json, "x") != NULL;
}

static void describe(json_t *json, const char *what, double error, double bound)
{
    char *opts = json_dumps(json_object_get(json, "opts"), JSON_COMPACT);
    print_error("%s %s: %s differs by %.2e, bound %.0e\n",
                json_string_value(json_object_get(json, "op")), opts, what, error, bound);
    free(opts);
}

static void test_golden(void **state)
{
    json_t *all = load_golden(), *json;
    size_t i;
    int bad = 0, checked = 0;
    json_array_foreach(all, i, json)
    {
        if (!is_layer(json))
            continue;
        chain c;
        const char *key;
        json_t *value;
        chain_open(&c, json);
        rig_run(&c.r);
        json_object_foreach(json_object_get(json, "out"), key, value)
        {
            const slot *s = find(&c, key);
            if (!s)
                fail_msg("the layer gives no %s", key);
            double *got = malloc((size_t)s->n * sizeof *got);
            double *want = malloc((size_t)s->n * sizeof *want);
            get(&c, s, got);
            doubles(value, want, s->n);
            const double error = rig_error(got, want, s->n);
            if (!(error <= GOLDEN_BOUND)) {
                describe(json, key, error, GOLDEN_BOUND);
                bad++;
            }
            checked++;
            free(got);
            free(want);
        }
        rig_close(&c.r);
    }
    json_decref(all);
    assert_true(checked > 80);
    assert_int_equal(bad, 0);
}

/* ---- finite differences */

/* What the backward ops differentiate: Σ y·dy, or the mean loss. */
static double objective(chain *c)
{
    const slot *y = find(c, "y"), *dy = find(c, "dy");
    double *a = malloc((size_t)y->n * sizeof *a), *b = malloc((size_t)y->n * sizeof *b), sum = 0;
    rig_run(&c->r);
    get(c, y, a);
    if (dy)
        get(c, dy, b);
    for (int64_t i = 0; i < y->n; i++)
        sum += a[i] * (dy ? b[i] : 1.0 / (double)y->n);
    free(a);
    free(b);
    return sum;
}

/* Relative error of the derivative along a random direction that leans towards the gradient. */
static double difference(chain *c, const slot *in, const slot *grad, uint64_t *seed)
{
    const int64_t n = in->n;
    double *at = malloc((size_t)n * sizeof *at), *g = malloc((size_t)n * sizeof *g);
    double *dir = malloc((size_t)n * sizeof *dir), *moved = malloc((size_t)n * sizeof *moved);
    double norm = 0, slope = 0, side[2];
    const double step = 1e-4;
    objective(c);
    get(c, in, at);
    get(c, grad, g);
    for (int64_t i = 0; i < n; i++)
        norm += g[i] * g[i];
    assert_true(norm > 0);
    for (int64_t i = 0; i < n; i++) {
        dir[i] = g[i] / sqrt(norm) + rig_normal(seed) / sqrt((double)n);
        slope += dir[i] * g[i];
    }
    for (int k = 0; k < 2; k++) {
        for (int64_t i = 0; i < n; i++)
            moved[i] = at[i] + (k ? -step : step) * dir[i];
        put(c, in, moved);
        side[k] = objective(c);
    }
    put(c, in, at);
    free(at);
    free(g);
    free(dir);
    free(moved);
    return fabs((side[0] - side[1]) / (2 * step) - slope) / sqrt(norm);
}

static void test_finite_differences(void **state)
{
    static const char *const pairs[][2] = {
        {"x", "dx"}, {"residual", "dresidual"}, {"weight", "dweight"}, {"bias", "dbias"}};
    json_t *all = load_golden(), *json;
    size_t i;
    int bad = 0, checked = 0;
    uint64_t seed = 11;
    json_array_foreach(all, i, json)
    {
        if (!is_layer(json) || truth(json_object_get(json, "opts"), "tied"))
            continue; /* a maximum has no derivative at a tie */
        chain c;
        chain_open(&c, json);
        for (size_t p = 0; p < 4; p++) {
            const slot *in = find(&c, pairs[p][0]), *grad = find(&c, pairs[p][1]);
            for (int k = 0; in && grad && k < 3; k++, checked++) {
                const double error = difference(&c, in, grad, &seed);
                if (!(error <= DIFF_BOUND)) {
                    describe(json, pairs[p][1], error, DIFF_BOUND);
                    bad++;
                }
            }
        }
        rig_close(&c.r);
    }
    json_decref(all);
    assert_true(checked > 100);
    assert_int_equal(bad, 0);
}

/* ---- the optimizer against torch.optim.SGD and clip_grad_norm_ */

static void sgd_case(json_t *json)
{
    static const dnri_param protos[] = {
        {.name = "a", .kind = DNRI_CONV_W, .dim = {2, 1, 1, 3}},
        {.name = "b", .kind = DNRI_NORM_W, .dim = {1, 1, 1, 5}},
        {.name = "c", .kind = DNRI_BIAS, .dim = {1, 1, 1, 4}},
    };
    json_t *o = json_object_get(json, "opts"), *trace = json_object_get(json, "trace"), *step;
    const double scale = number(o, "scale");
    rig r;
    double v[8], want[8];
    size_t s;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    for (int i = 0; i < 3; i++)
        assert_true(dnri_param_tensor(r.g, DNRI_WEIGHT, &protos[i]) >= 0);
    OK(dnri_emit_update(
        r.g, &(dnri_update_opts){.last = true,
                                 .sgd = {.momentum = number(o, "momentum"),
                                         .weight_decay = number(o, "weight_decay"),
                                         .clip_norm = number(o, "clip_norm"),
                                         .nesterov = truth(o, "nesterov"),
                                         .decay_norm_bias = truth(o, "decay_norm_bias")}}));
    rig_plan(&r, true, false);
    rig_bind(&r);
    OK(dnri_store_write_state(r.store, &(dnri_state){.loss_scale = (float)scale}));
    for (int i = 0; i < 3; i++) {
        const int64_t n = dnri_params_at(r.params, i)->count;
        doubles(json_array_get(json_object_get(json, "start"), (size_t)i), v, n);
        OK(dnri_store_write(r.store, DNRI_MASTER, i, v));
    }
    json_array_foreach(trace, s, step)
    {
        rig_header(&r, json_number_value(json_array_get(json_object_get(json, "lr"), s)), true);
        for (int i = 0; i < 3; i++) {
            const int64_t n = dnri_params_at(r.params, i)->count;
            doubles(json_array_get(json_object_get(step, "grad"), (size_t)i), v, n);
            for (int64_t k = 0; k < n; k++)
                v[k] *= scale;
            OK(dnri_store_write(r.store, DNRI_GRAD, i, v));
        }
        rig_run(&r);
        for (int i = 0; i < 3; i++) {
            const int64_t n = dnri_params_at(r.params, i)->count;
            doubles(json_array_get(json_object_get(step, "weight"), (size_t)i), want, n);
            OK(dnri_store_read(r.store, DNRI_MASTER, i, v));
            const double error = rig_error(v, want, n);
            if (!(error <= GOLDEN_BOUND)) {
                describe(json, dnri_params_at(r.params, i)->name, error, GOLDEN_BOUND);
                fail();
            }
        }
        if (number(o, "clip_norm") > 0) {
            dnri_state st;
            OK(dnri_store_read_state(r.store, &st));
            const double norm = json_number_value(json_array_get(json_object_get(json, "norm"), s));
            assert_true(fabs(sqrt(st.grad_sqsum) - norm) <= GOLDEN_BOUND * norm);
            assert_true(norm > number(o, "clip_norm")); /* or nothing is clipped */
        }
    }
    rig_close(&r);
}

static void test_sgd(void **state)
{
    json_t *all = load_golden(), *json;
    size_t i;
    int checked = 0;
    json_array_foreach(all, i, json)
    {
        if (is_layer(json))
            continue;
        sgd_case(json);
        checked++;
    }
    json_decref(all);
    assert_true(checked >= 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_sgd),
    };
    return cmocka_run_group_tests(tests, rig_open_ref, rig_close_ref);
}
