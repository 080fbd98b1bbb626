/* layer.c: a layer of one's own, SiLU (y = x·σ(x)), in a model of one's own, trained on the bundled digits on the CPU.
 *   cc layer.c $(pkg-config --cflags --libs dnnrun) -lm -o layer
 *   ./layer .../share/dnnrun/data/digits.tar:train .../share/dnnrun/data/digits.tar:test */
#include <dnnrun/layers/layers.h>
#include <dnnrun/runtime/extend.h>

#include <math.h>
#include <stdlib.h>

/* ---- the layer, described once: shapes and gradient */

static const dnri_op_def silu_def, silu_bwd_def;

static dnr_status same_shape(dnr_graph *g, dnri_op *op)
{
    return dnri_out(g, op, 0, *dnri_desc(g, op->in[0]), op->n_in == 1 ? "y" : "dx");
}

static dnr_status silu_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    dnr_tid in[] = {op->in[0], dy[0]};
    return dnri_emit(g, &silu_bwd_def, op->name, NULL, 0, 2, in, 1, &dx[0]);
}

static const dnri_op_def silu_def = {.name = "silu.fprop", .infer = same_shape, .grad = silu_grad};
static const dnri_op_def silu_bwd_def = {.name = "silu.bwd", .infer = same_shape};

static dnr_tid silu(dnr_graph *g, const char *name, dnr_tid x)
{
    dnr_tid y = DNRI_NONE;
    if (x >= 0) /* else the graph has failed already */
        dnri_emit(g, &silu_def, name, NULL, 0, 1, &x, 1, &y);
    return y;
}

/* ---- its arithmetic on the CPU */

typedef struct step {
    dnri_binding at;
    int64_t n;
} step;

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    ((step *)ctx)->at = *b;
    return DNR_OK;
}

static dnr_status fprop(void *ctx)
{
    const step *s = ctx;
    const float *x = s->at.in[0];
    float *y = s->at.out[0];
    for (int64_t i = 0; i < s->n; i++)
        y[i] = x[i] / (1 + expf(-x[i]));
    return DNR_OK;
}

static dnr_status bwd(void *ctx)
{
    const step *s = ctx;
    const float *x = s->at.in[0], *dy = s->at.in[1];
    float *dx = s->at.out[0];
    for (int64_t i = 0; i < s->n; i++) {
        float p = 1 / (1 + expf(-x[i]));
        dx[i] = dy[i] * p * (1 + x[i] * (1 - p));
    }
    return DNR_OK;
}

static bool fp32_only(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    (void)dev;
    return dnri_desc(g, op->in[0])->dtype == DNR_F32;
}

static dnr_status lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                        const dnri_lower_opts *o, dnri_step *out)
{
    (void)dev, (void)o;
    step *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    s->n = dnri_count(dnri_desc(g, op->in[0]));
    *out = (dnri_step){.bind = bind,
                       .run = op->def == &silu_def ? fprop : bwd,
                       .drop = free,
                       .ctx = s,
                       .launches = 1,
                       .impl = "mine"};
    return DNR_OK;
}

static const dnri_lowering cpu_rows[] = {{&silu_def, fp32_only, lower},
                                         {&silu_bwd_def, fp32_only, lower}};

/* ---- the model */

static dnr_tid net(dnr_graph *g, dnr_tid x, const dnr_model_opts *o)
{
    const dnr_norm_opts norm = {0};
    const dnr_conv_opts wide = {.out = 32, .kernel = 3, .stride = 1, .pad = 1},
                        down = {.out = 64, .kernel = 3, .stride = 2, .pad = 1};
    x = silu(g, "silu1", dnr_norm(g, "bn1", dnr_conv(g, "conv1", x, &wide), DNRI_NONE, &norm));
    x = silu(g, "silu2", dnr_norm(g, "bn2", dnr_conv(g, "conv2", x, &down), DNRI_NONE, &norm));
    return dnr_dense(g, "fc", dnr_global_avg_pool(g, "pool", x), o->classes);
}

/* ---- and its training */

#define TRY(call)                                                                                  \
    if ((call) != DNR_OK)                                                                          \
    return fprintf(stderr, "%s\n  %s\n", dnr_last_error()->what, dnr_last_error()->remedy), 1

int main(int argc, char **argv)
{
    dnr_device *dev;
    dnr_source *train, *test;
    TRY(dnr_extend_lowering("cpu", &cpu_rows[0]));
    TRY(dnr_extend_lowering("cpu", &cpu_rows[1]));
    TRY(dnr_extend_model("silu-net", net));
    TRY(dnr_device_open("cpu", &dev));
    TRY(dnr_source_open(argc > 1 ? argv[1] : "digits.tar:train", NULL, &train));
    TRY(dnr_source_open(argc > 2 ? argv[2] : "digits.tar:test", NULL, &test));

    const int64_t n = dnr_source_count(train), steps = n * 8 / 64;
    dnr_trainer_opts opts = {.model = {.name = "silu-net", .classes = dnr_source_classes(train)},
                             .optim = {.lr = 0.1, .momentum = 0.9, .schedule = DNR_SCHEDULE_COSINE},
                             .batch = 64,
                             .image = 8,
                             .epoch_samples = n,
                             .total_samples = steps * 64};
    dnr_trainer *t;
    TRY(dnr_trainer_create(dev, &opts, &t));
    dnr_loader_opts pass = {.batch = 64, .image = 8}, stream = pass;
    stream.train = stream.shuffle = true;
    dnr_loader *feed, *check;
    TRY(dnr_loader_open(train, dev, &stream, &feed));
    TRY(dnr_loader_open(test, dev, &pass, &check));
    dnr_metrics m;
    for (int64_t i = 0; i < steps; i++)
        TRY(dnr_trainer_step(t, feed, &m));
    dnr_eval_result r;
    TRY(dnr_trainer_eval(t, check, &r));
    printf("%lld of %lld right\n", (long long)r.correct1, (long long)r.images);
    dnr_loader_close(feed), dnr_loader_close(check), dnr_trainer_destroy(t);
    dnr_source_close(train), dnr_source_close(test), dnr_device_close(dev);
    return 0;
}
