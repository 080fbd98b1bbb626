/* test_extend.c: an op and a model from outside, through extend.h. The op copies, and its gradient can be spoilt: what is
 * then said of a gradient that is not finite. */
#include "../layers/layers.h"
#include "../runtime/extend.h"
#include "trainrig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- y = x; dx = dy, but for one element of sample SPOILT where `spoil` is set */

enum { SPOILT = 5 };
static bool spoil;
static int runs;

static dnr_status same_shape(dnr_graph *g, dnri_op *op)
{
    return dnri_out(g, op, 0, *dnri_desc(g, op->in[0]), "same");
}

static const dnri_op_def twin_def, twin_bwd_def;

static dnr_status twin_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return dnri_emit(g, &twin_bwd_def, op->name, NULL, 0, 1, dy, 1, &dx[0]);
}

static const dnri_op_def twin_def = {.name = "twin.fprop", .infer = same_shape, .grad = twin_grad};
static const dnri_op_def twin_bwd_def = {.name = "twin.bwd", .infer = same_shape};

typedef struct twin {
    dnri_binding at;
    dnr_desc d;
    bool backward;
} twin;

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    ((twin *)ctx)->at = *b;
    return DNR_OK;
}

static dnr_status run(void *ctx)
{
    const twin *s = ctx;
    memcpy(s->at.out[0], s->at.in[0], dnri_bytes(&s->d));
    runs++;
    if (s->backward && spoil) {
        const double inf = INFINITY;
        size_t each = dnri_bytes(&s->d) / (size_t)s->d.dim[0];
        dnri_from_double(s->d.dtype, &inf, (char *)s->at.out[0] + SPOILT * each, 1);
    }
    return DNR_OK;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    twin *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->d = *dnri_desc(g, op->in[0]);
    s->backward = op->def == &twin_bwd_def;
    *out = (dnri_step){
        .bind = bind, .run = run, .drop = free, .ctx = s, .launches = 1, .impl = "twin"};
    return DNR_OK;
}

static const dnri_lowering rows[] = {{&twin_def, NULL, lower}, {&twin_bwd_def, NULL, lower}};

static dnr_tid net(dnr_graph *g, dnr_tid x, const dnr_model_opts *o)
{
    const dnr_conv_opts conv = {.out = 8, .kernel = 3, .stride = 1, .pad = 1};
    dnr_tid y = DNRI_NONE;
    /* linear alone could not tell the waves apart: their means are equal */
    x = dnr_norm(g, "bn", dnr_conv(g, "conv", x, &conv), DNRI_NONE, &(dnr_norm_opts){.relu = true});
    if (x >= 0)
        dnri_emit(g, &twin_def, "twin", NULL, 0, 1, &x, 1, &y);
    return dnr_dense(g, "fc", dnr_global_avg_pool(g, "pool", y), o->classes);
}

/* ---- the tests */

static dnr_trainer_opts options(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.model.name = "twin-net";
    return o;
}

/* Before anything is registered. */
static void unknown_at_first(void **state)
{
    dnr_trainer_opts o = options(state);
    dnr_device *dev;
    dnr_trainer *t;
    OK(tr_device(state, &dev));
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);
    tr_says("there is no model \"twin-net\"");
    OK(dnr_extend_model("twin-net", net));
    assert_int_equal(dnr_trainer_create(dev, &o, &t), DNR_EUSAGE);
    tr_says("twin"); /* the op is known, but no back end has it */
    for (size_t i = 0; i < 2; i++)
        OK(dnr_extend_lowering(dev->be->name, &rows[i]));
    dnr_device_close(dev);
}

static void refuses_wrong_use(void **state)
{
    assert_int_equal(dnr_extend_model("resnet50", net), DNR_EUSAGE);
    tr_says("there is a model \"resnet50\" already");
    assert_int_equal(dnr_extend_model("twin-net", net), DNR_EUSAGE);
    assert_int_equal(dnri_extend_lowering(DNRI_BACKEND_ABI - 1, "cpu", &rows[0]), DNR_EUSAGE);
    tr_says("another version");
}

static void learns(void **state)
{
    dnr_trainer_opts o = options(state);
    training r = tr_open(state, &o);
    runs = 0;
    double first = tr_train(&r, 0, 1).loss, last = tr_train(&r, 0, 20).loss;
    assert_true(last < 0.95 * first);
    assert_true(runs >= 2 * 21);
    tr_close(&r);
}

static void names_the_gradient(void **state)
{
    dnr_trainer_opts o = options(state);
    training r = tr_open(state, &o);
    void *slot = tr_slot(TR_BATCH, 0, TR_BATCH);
    dnr_metrics m;
    spoil = true;
    assert_int_equal(dnri_trainer_step_on(r.t, &slot, &m), DNR_EFAIL);
    spoil = false;
    tr_says("step 1: twin.bwd of twin gives twin.same");
    tr_says("0 NaN and 1 infinite of 8192 elements");
    tr_says("samples: sample 5");
    assert_null(strstr(dnr_last_error()->what, "sample 5,")); /* and no other */
    assert_non_null(strstr(dnr_last_error()->remedy, "train.clip_norm"));
    free(slot);
    tr_close(&r);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unknown_at_first),
        cmocka_unit_test(refuses_wrong_use),
        cmocka_unit_test(learns),
        cmocka_unit_test(names_the_gradient),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
