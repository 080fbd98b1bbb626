/* test_fuse_algbn.c: algebraic batch norm against the plain graph, on the reference device in fp64; what is kept for
 * backward then; which layers are left alone. */
#include "rig.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"
#include "../runtime/rewrite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ANY_SIZE (-1) /* algbn_rows */

/* ---- a network under training: a picture, blocks, pool, fully connected layer, loss */

typedef struct block {
    int width, out, stride;
    bool relu;     /* the last norm's */
    bool residual; /* the shortcut */
} block;

typedef struct net {
    const char *model; /* of models/, or the blocks */
    block blocks[3];
    int n_blocks;
    int64_t n, h, w;
    double mean;   /* of the picture, and of each beta: what means come to beside spreads */
    bool no_gamma; /* every third gamma is 0 */
    int rows;      /* algbn_rows; 0: any */
} net;

typedef struct built {
    rig r;
    dnr_tid x, labels;
} built;

enum { CLASSES = 3 };

static dnr_tid conv_norm(dnr_graph *g, const char *name, int i, dnr_tid x, dnr_conv_opts o,
                         dnr_tid residual, bool relu)
{
    char conv[32], bn[32];
    snprintf(conv, sizeof conv, "%s.conv%d", name, i);
    snprintf(bn, sizeof bn, "%s.bn%d", name, i);
    return dnr_norm(g, bn, dnr_conv(g, conv, x, &o), residual, &(dnr_norm_opts){.relu = relu});
}

static dnr_tid bottleneck(dnr_graph *g, int index, const block *b, dnr_tid x)
{
    char name[16];
    snprintf(name, sizeof name, "block%d", index);
    dnri_graph_scope(g, index, index);
    dnr_tid skip = x;
    if (!b->residual)
        skip = DNRI_NONE;
    else if (b->stride > 1 || dnri_desc(g, x)->dim[3] != b->out)
        skip = conv_norm(g, name, 4, x, (dnr_conv_opts){b->out, 1, b->stride, 0}, DNRI_NONE, false);
    dnr_tid y = conv_norm(g, name, 1, x, (dnr_conv_opts){b->width, 1, 1, 0}, DNRI_NONE, true);
    y = conv_norm(g, name, 2, y, (dnr_conv_opts){b->width, 3, b->stride, 1}, DNRI_NONE, true);
    y = conv_norm(g, name, 3, y, (dnr_conv_opts){b->out, 1, 1, 0}, skip, b->relu);
    dnri_graph_scope(g, -1, -1);
    return y;
}

static dnr_tid forward(dnr_graph *g, const net *t, dnr_tid x)
{
    if (t->model) {
        const dnr_model_opts o = {.name = t->model, .classes = CLASSES};
        dnri_model_fn model;
        OK(dnri_model_find(t->model, &model));
        return model(g, x, &o);
    }
    x = conv_norm(g, "stem", 0, x, (dnr_conv_opts){8, 3, 1, 1}, DNRI_NONE, true);
    for (int i = 0; i < t->n_blocks; i++)
        x = bottleneck(g, i, &t->blocks[i], x);
    return dnr_dense(g, "fc", dnr_global_avg_pool(g, "pool", x), CLASSES);
}

static void build(built *b, const net *t, const dnri_fuse_opts *o)
{
    rig_open(&b->r, rig_ref, DNR_PRECISION_AUTO, true);
    dnr_graph *g = b->r.g;
    dnri_tensor picture = {
        .name = "x", .desc = dnri_desc4(DNR_F64, t->n, t->h, t->w, 3), .param = -1, .keep = true};
    b->x = dnri_graph_new_tensor(g, &picture);
    b->labels = rig_leaf(&b->r, "labels", dnri_desc4(DNR_I32, t->n, 1, 1, 1));
    OK(dnri_model_loss(g, forward(g, t, b->x), b->labels, 0.1, 1.0 / (double)t->n));
    OK(dnri_graph_backward(g));
    OK(dnri_model_fuse(g, rig_ref, o));
    OK(dnri_rewrite_recompute(g, o->recompute));
}

/* Other values than the initial ones for norms. */
static void set_norms(rig *r, const net *t)
{
    uint64_t seed = 3;
    for (int i = 0; i < dnri_params_count(r->params); i++) {
        const dnri_param *p = dnri_params_at(r->params, i);
        double *v = malloc((size_t)p->count * sizeof *v);
        for (int64_t k = 0; k < p->count; k++)
            v[k] = p->kind == DNRI_NORM_W
                       ? t->no_gamma && k % 3 == 0 ? 0 : 1 + 0.3 * rig_normal(&seed)
                       : t->mean + 0.3 * rig_normal(&seed);
        if (p->kind == DNRI_NORM_W || p->kind == DNRI_NORM_B)
            OK(dnri_store_write(r->store, DNRI_MASTER, i, v));
        free(v);
    }
}

/* One pass: the gradients of all parameters, then the running statistics. `state` is what it leaves. */
static double *run(built *b, const net *t, int64_t *n, dnri_state *state)
{
    uint64_t seed = 1;
    rig *r = &b->r;
    rig_plan(r, true, false);
    rig_bind(r);
    OK(dnri_store_init(r->store, 5));
    OK(dnri_store_write_state(r->store, &(dnri_state){.loss_scale = 1, .algbn_ratio = 1e9f}));
    set_norms(r, t);
    const int64_t pixels = rig_count(r, b->x);
    const int64_t flat = dnri_params_flat(r->params), buffers = dnri_params_buffers(r->params);
    double *x = malloc((size_t)pixels * sizeof *x), *out,
           *labels = malloc((size_t)t->n * sizeof *x);
    for (int64_t i = 0; i < pixels; i++)
        x[i] = rig_normal(&seed) + t->mean;
    for (int64_t i = 0; i < t->n; i++)
        labels[i] = (double)((i + 2) % CLASSES);
    rig_write(r, b->x, x);
    rig_write(r, b->labels, labels);
    rig_run(r);
    OK(dnri_store_read_state(r->store, state));
    free(x);
    free(labels);
    *n = flat + buffers;
    out = malloc((size_t)*n * sizeof *out);
    OK(dnri_copy_now(rig_ref, out, dnri_store_ptr(r->store, DNRI_GRAD, -1),
                     (size_t)flat * sizeof *out));
    OK(dnri_copy_now(rig_ref, out + flat, dnri_store_ptr(r->store, DNRI_BUFFER, -1),
                     (size_t)buffers * sizeof *out));
    return out;
}

/* The largest relative error of one parameter's gradient or running statistic. Errors below what fp64 makes of the
 * largest gradient count beside that. */
static double worst_error(const rig *r, const double *a, const double *b, const char **name)
{
    double worst = 0, largest = 0;
    const int64_t flat = dnri_params_flat(r->params);
    for (int64_t i = 0; i < flat; i++)
        largest = fmax(largest, fabs(b[i]));
    for (int i = 0; i < dnri_params_count(r->params); i++) {
        const dnri_param *p = dnri_params_at(r->params, i);
        const int64_t at = p->kind == DNRI_RUNNING ? flat + p->offset : p->offset;
        double diff = 0, norm = 0;
        for (int64_t k = at; k < at + p->count; k++) {
            diff += (a[k] - b[k]) * (a[k] - b[k]);
            norm += b[k] * b[k];
        }
        const double floor = 1e-3 * largest * sqrt((double)p->count);
        const double error = sqrt(diff) / fmax(sqrt(norm), floor);
        if (!(error <= worst)) { /* NaN too */
            worst = error;
            *name = p->name;
        }
    }
    return worst;
}

static const net nets[] = {
    /* projection, then identity, then a strided projection; an odd number of rows */
    {.blocks = {{4, 16, 1, true, true}, {4, 16, 1, true, true}, {8, 32, 2, true, true}},
     .n_blocks = 3,
     .n = 3,
     .h = 7,
     .w = 5},
    /* without a ReLU at the end, without a residual, and neither */
    {.blocks = {{4, 16, 1, false, true}, {8, 24, 2, true, false}, {8, 32, 1, false, false}},
     .n_blocks = 3,
     .n = 2,
     .h = 6,
     .w = 9},
    /* means far from 0 */
    {.blocks = {{4, 16, 1, true, true}, {8, 32, 2, true, true}},
     .n_blocks = 2,
     .n = 4,
     .h = 8,
     .w = 8,
     .mean = 30},
    {.blocks = {{4, 16, 1, true, true}, {8, 32, 2, true, true}},
     .n_blocks = 2,
     .n = 4,
     .h = 8,
     .w = 8,
     .no_gamma = true},
    /* channels that are no multiple of 8 have no mask */
    {.blocks = {{3, 9, 2, true, true}, {5, 17, 1, true, true}, {5, 17, 1, true, true}},
     .n_blocks = 3,
     .n = 1,
     .h = 9,
     .w = 11},
    /* a strided projection with too few rows, behind an identity */
    {.blocks = {{4, 16, 1, true, true}, {4, 16, 1, true, true}, {8, 32, 2, true, true}},
     .n_blocks = 3,
     .n = 3,
     .h = 7,
     .w = 5,
     .rows = 1},
    {.model = "resnet50", .n = 2, .h = 64, .w = 64},
};
#define N_NETS (int)(sizeof nets / sizeof nets[0])

/* Gradients of 1×1 convolutions that are spread over the pixels these stride over. */
static int count_spread(const dnr_graph *g)
{
    int n = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        const dnri_conv_attr *conv = (const dnri_conv_attr *)op->attr;
        n += op->def == &dnri_def_conv_dgrad && conv->kernel == 1 && conv->stride > 1;
    }
    return n;
}

/* A network at one level of fusion against what it gives without any. Returns the r that it notes. */
static double compare(const net *t, int index, dnr_fusion level, const double *plain, int64_t n)
{
    built b;
    dnri_state state;
    int64_t m;
    const char *name = "";
    build(&b, t, &(dnri_fuse_opts){.fusion = level, .algbn_rows = t->rows ? t->rows : ANY_SIZE});
    assert_int_equal(count_spread(b.r.g), 0);
    const int layers = rig_count_ops(b.r.g, &dnri_def_algbn_dgrad);
    assert_true(layers > 0);
    assert_int_equal(rig_count_ops(b.r.g, &dnri_def_algbn_join),
                     level == DNR_FUSION_D3 ? layers : 0);
    double *fused = run(&b, t, &m, &state);
    assert_int_equal(n, m);
    const double error = worst_error(&b.r, fused, plain, &name);
    print_message("network %d, %s: %d layers algebraic; the largest error is %.1e, of %s\n", index,
                  level == DNR_FUSION_D3 ? "d3" : "d2", layers, error, name);
    assert_true(error > 0 && error < 1e-9);
    free(fused);
    rig_close(&b.r);
    return (double)state.algbn_ratio;
}

static void test_equal(void **state)
{
    for (int i = 0; i < N_NETS; i++) {
        int64_t n;
        dnri_state unused;
        built b;
        if (nets[i].model)
            continue; /* test_parity has it against PyTorch, at each level */
        build(&b, &nets[i], &(dnri_fuse_opts){.fusion = DNR_FUSION_OFF});
        double *plain = run(&b, &nets[i], &n, &unused);
        rig_close(&b.r);
        const double r = compare(&nets[i], i, DNR_FUSION_D2, plain, n);
        assert_true(r > 0.1 && r < 1e3);
        assert_true(fabs(compare(&nets[i], i, DNR_FUSION_D3, plain, n) / r - 1) < 1e-6);
        free(plain);
    }
}

/* Recomputing changes no bit, although without it gradients read masks. */
static void test_recompute(void **state)
{
    static const dnr_recompute modes[] = {DNR_RECOMPUTE_CHEAP, DNR_RECOMPUTE_BLOCK,
                                          DNR_RECOMPUTE_STAGE};
    for (int i = 0; i < 2 * N_NETS; i++) {
        dnri_fuse_opts o = {.fusion = i % 2 ? DNR_FUSION_D3 : DNR_FUSION_D2,
                            .algbn_rows = ANY_SIZE};
        net t = nets[i / 2];
        if (t.model && o.fusion == DNR_FUSION_D2)
            continue; /* d3 has all of its ops */
        t.h = t.w = t.model ? 32 : t.w;
        int64_t n, m;
        dnri_state unused;
        built kept;
        build(&kept, &t, &o);
        double *a = run(&kept, &t, &n, &unused);
        for (int k = 0; k < (t.model ? 1 : 3); k++) {
            built remade;
            o.recompute = modes[k];
            build(&remade, &t, &o);
            double *b = run(&remade, &t, &m, &unused);
            assert_int_equal(n, m);
            assert_memory_equal(a, b, (size_t)n * sizeof *a);
            free(b);
            rig_close(&remade.r);
        }
        free(a);
        rig_close(&kept.r);
    }
}

/* ---- what is kept */

/* Does an op of the backward pass read what a convolution before an algebraic norm wrote? `layers`: such norms. */
static int read_late(const dnr_graph *g, int *layers)
{
    int late = 0;
    *layers = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *conv = dnri_graph_op_c(g, i);
        if (conv->phase != DNRI_FORWARD || strstr(conv->name, ".conv3") == NULL)
            continue;
        if (conv->def != &dnri_def_conv && conv->def != &dnri_def_conv_stats)
            continue;
        ++*layers;
        for (int k = i; k < dnri_graph_ops(g); k++)
            for (int j = 0; j < dnri_graph_op_c(g, k)->n_in; j++)
                late += dnri_graph_op_c(g, k)->phase == DNRI_BACKWARD &&
                        dnri_graph_op_c(g, k)->in[j] == conv->out[0];
    }
    return late;
}

static void test_kept(void **state)
{
    const net t = {.model = "resnet50", .n = 2, .h = 64, .w = 64};
    for (int recompute = DNR_RECOMPUTE_NONE; recompute <= DNR_RECOMPUTE_CHEAP; recompute++) {
        for (int level = DNR_FUSION_D1; level <= DNR_FUSION_D3; level++) {
            const bool d2 = level >= DNR_FUSION_D2, d3 = level == DNR_FUSION_D3;
            built b;
            int layers, late;
            build(&b, &t,
                  &(dnri_fuse_opts){.fusion = (dnr_fusion)level,
                                    .recompute = (dnr_recompute)recompute,
                                    .algbn_rows = ANY_SIZE});
            late = read_late(b.r.g, &layers);
            assert_int_equal(layers, d3 ? 0 : 16);
            if (d2 || recompute == DNR_RECOMPUTE_NONE || recompute == DNR_RECOMPUTE_CHEAP)
                assert_int_equal(late, d2 ? 0 : 16);
            /* 16 ends of blocks and 4 projections, three of which stride */
            assert_int_equal(rig_count_ops(b.r.g, &dnri_def_algbn_dgrad), d2 ? 20 : 0);
            assert_int_equal(rig_count_ops(b.r.g, &dnri_def_norm_dz), d2 ? 16 : 0);
            if (recompute == DNR_RECOMPUTE_NONE)
                assert_int_equal(rig_count_ops(b.r.g, &dnri_def_shortcut), d2 ? d3 ? 6 : 3 : 0);
            if (recompute != DNR_RECOMPUTE_STAGE) /* small products are never made again */
                assert_int_equal(rig_count_ops(b.r.g, &dnri_def_gram), d2 ? 40 : 0);
            /* their gradients join norm.dz as they are */
            assert_int_equal(rig_count_ops(b.r.g, &dnri_def_shortcut_bwd), 0);
            assert_int_equal(rig_count_ops(b.r.g, &dnri_def_algbn_stats), d3 ? 20 : 0);
            rig_close(&b.r);
        }
    }
}

/* ---- statistics from a Gram matrix */

enum { STATS_C = 8, STATS_K = 16, STATS_ROWS = 2 * 9 * 7 };

typedef struct statistics {
    double mean[STATS_K], invstd[STATS_K], running_mean[STATS_K], running_var[STATS_K];
    double ratio[STATS_K]; /* r (layers.h), where x is there */
} statistics;

/* √(Σ_c w_kc² · mean of a_c²) */
static void find_apart(const double *a, const double *w, double apart[STATS_K])
{
    for (int k = 0; k < STATS_K; k++) {
        double sum = 0;
        for (int i = 0; i < STATS_ROWS * STATS_C; i++) {
            const double v = w[k * STATS_C + i % STATS_C] * a[i];
            sum += v * v / STATS_ROWS;
        }
        apart[k] = sqrt(sum);
    }
}

/* Of x = a·wᵀ, by two ops of one program, for `a` of these means, with the sign of each c in turn where `cancel`; from x
 * itself where `plain`. The second op's a comes first. */
static dnri_state statistics_of(const double shift[2], bool cancel, bool plain, bool first,
                                statistics out[2])
{
    const dnri_conv_attr conv = {1, 1, 0, 9, 7};
    const dnri_norm_attr norm = {DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, false};
    dnr_tid leaf[2][4], stats[2][3];
    uint64_t seed = 1;
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    for (int i = 0; i < 2; i++) {
        const dnri_algbn_stats_attr attr = {STATS_ROWS, DNRI_NORM_EPS, DNRI_NORM_MOMENTUM, i == 0};
        const dnr_desc vector = dnri_desc1(DNR_F64, STATS_K);
        dnr_tid gram[2] = {DNRI_NONE, DNRI_NONE}, y = DNRI_NONE;
        leaf[i][0] = rig_leaf(&r, "a", dnri_desc4(DNR_F64, 2, 9, 7, STATS_C));
        leaf[i][1] = rig_leaf(&r, "w", dnri_desc4(DNR_F64, STATS_K, 1, 1, STATS_C));
        leaf[i][2] = rig_leaf(&r, "running_mean", vector);
        leaf[i][3] = rig_leaf(&r, "running_var", vector);
        stats[i][0] = stats[i][1] = stats[i][2] = DNRI_NONE;
        if (plain) {
            const dnr_tid gamma = rig_leaf(&r, "gamma", vector);
            OK(dnri_emit(r.g, &dnri_def_conv, "c", &conv, sizeof conv, 2, leaf[i], 1, &y));
            OK(dnri_emit(r.g, &dnri_def_norm_train, "n", &norm, sizeof norm, 6,
                         (dnr_tid[]){y, gamma, gamma, DNRI_NONE, leaf[i][2], leaf[i][3]}, 3,
                         stats[i]));
            stats[i][0] = stats[i][1];
            stats[i][1] = stats[i][2];
        } else {
            stats[i][2] = dnri_slab_tensor(r.g, DNRI_STATE);
            OK(dnri_emit(r.g, &dnri_def_gram, "g", NULL, 0, 2, (dnr_tid[]){leaf[i][0], DNRI_NONE},
                         2, gram));
            OK(dnri_emit(r.g, &dnri_def_algbn_stats, "s", &attr, sizeof attr, 7,
                         (dnr_tid[]){gram[0], gram[1], leaf[i][0], leaf[i][1], leaf[i][2],
                                     leaf[i][3], dnri_slab_tensor(r.g, DNRI_HEADER)},
                         3, stats[i]));
        }
        rig_keep(&r, stats[i][0]);
        rig_keep(&r, stats[i][1]);
    }
    rig_plan(&r, true, false);
    rig_bind(&r);
    rig_header(&r, 0, first);
    OK(dnri_store_write_state(
        r.store, &(dnri_state){.loss_scale = 1, .algbn_ratio = 2.5f, .algbn_exact = 100}));
    for (int i = 0; i < 2; i++) {
        double v[4][STATS_ROWS * STATS_C];
        for (int k = 0; k < 4; k++)
            for (int64_t j = 0; j < rig_count(&r, leaf[i][k]); j++) {
                const double mean = cancel && j % 2 ? -shift[i] : shift[i];
                v[k][j] = rig_normal(&seed) + (k == 0 ? mean : k == 3);
                if (k == 1 && cancel) /* the mean of a channel of x is near 0 */
                    v[k][j] = j % 2 ? v[k][j - 1] + 1e-3 * v[k][j] : v[k][j];
            }
        for (int k = 0; k < 4; k++)
            rig_write(&r, leaf[i][k], v[k]);
        find_apart(v[0], v[1], out[i].ratio);
    }
    rig_run(&r);
    for (int i = 0; i < 2; i++) {
        rig_read(&r, stats[i][0], out[i].mean);
        rig_read(&r, stats[i][1], out[i].invstd);
        rig_read(&r, leaf[i][2], out[i].running_mean);
        rig_read(&r, leaf[i][3], out[i].running_var);
        for (int k = 0; k < STATS_K; k++)
            out[i].ratio[k] = fmax(out[i].ratio[k], fabs(out[i].mean[k])) * out[i].invstd[k];
    }
    dnri_state s;
    OK(dnri_store_read_state(r.store, &s));
    rig_close(&r);
    return s;
}

/* Whatever the means, statistics are norm.train's; which channels took the long way is told. */
static void check_guard(const double shifts[2], bool cancel, bool first)
{
    statistics plain[2], gram[2];
    double largest = first ? 0 : 2.5;
    int beyond = first ? 0 : 100;
    statistics_of(shifts, cancel, true, first, plain);
    const dnri_state s = statistics_of(shifts, cancel, false, first, gram);
    for (int l = 0; l < 2; l++) {
        assert_true(rig_error(gram[l].mean, plain[l].mean, STATS_K) < 1e-12);
        assert_true(rig_error(gram[l].invstd, plain[l].invstd, STATS_K) < 1e-9);
        assert_true(rig_error(gram[l].running_mean, plain[l].running_mean, STATS_K) < 1e-12);
        assert_true(rig_error(gram[l].running_var, plain[l].running_var, STATS_K) < 1e-9);
        for (int k = 0; k < STATS_K; k++) {
            largest = fmax(largest, plain[l].ratio[k]);
            beyond += plain[l].ratio[k] > DNRI_ALGBN_GUARD;
            if (cancel && shifts[l] > 1)
                assert_true(fabs(plain[l].mean[k]) * plain[l].invstd[k] < 1);
        }
    }
    assert_int_equal(s.algbn_exact, beyond);
    /* what r itself is beyond some 1e6 no Gram matrix tells */
    assert_true(largest > 1e5 ? s.algbn_ratio > 1e5f : fabs(s.algbn_ratio / largest - 1) < 1e-4);
}

static void test_guard(void **state)
{
    static const double shifts[][2] = {{0, 0.3}, {3, 1}, {0, 40}, {1e3, 40}, {1e6, 1e5}};
    for (size_t i = 0; i < sizeof shifts / sizeof shifts[0]; i++)
        for (int first = 0; first < 2; first++)
            check_guard(shifts[i], false, first);
    /* means that cancel in a product */
    static const double cancelled[][2] = {{3, 40}, {0, 100}};
    for (int i = 0; i < 2; i++)
        check_guard(cancelled[i], true, true);
}

/* ---- limits */

/* Which layers take the form: those whose convolution is 1×1, without padding, widens, has rows enough, whose dx nothing
 * else reads, and whose dz has a sum; on a device that has the ops. */
static void test_limits(void **state)
{
    enum {
        RELU,
        RESIDUAL,
        STRIDED,
        TAKEN,
        KERNEL = TAKEN,
        NARROW,
        PAD,
        READ,
        KEPT,
        ROWS,
        NO_DZ,
        LACKING,
        MODES
    };
    dnr_device *cpu;
    OK(dnr_device_open("cpu", &cpu));
    for (int mode = 0; mode < MODES; mode++) {
        rig r;
        rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
        dnr_graph *g = r.g;
        const dnr_conv_opts conv = {.out = mode == NARROW ? 4 : 8,
                                    .kernel = mode == KERNEL ? 3 : 1,
                                    .stride = mode == STRIDED ? 2 : 1,
                                    .pad = mode == PAD || mode == KERNEL};
        const dnr_tid labels = rig_leaf(&r, "labels", dnri_desc4(DNR_I32, 2, 1, 1, 1));
        const dnr_tid x = rig_leaf(&r, "x", dnri_desc4(DNR_F64, 2, 4, 4, 4));
        const dnr_tid y = dnr_conv(g, "c", x, &conv);
        const dnr_tid residual = rig_leaf(&r, "residual", *dnri_desc(g, y));
        dnr_tid z = dnr_norm(g, "b", y, mode == RESIDUAL ? residual : DNRI_NONE,
                             &(dnr_norm_opts){.relu = mode != NO_DZ});
        if (mode == READ)
            z = dnri_add(g, "add", z, y);
        OK(dnri_model_loss(g, dnr_dense(g, "fc", dnr_global_avg_pool(g, "p", z), 3), labels, 0, 1));
        OK(dnri_graph_backward(g));
        for (int i = 0; i < dnri_graph_ops(g); i++)
            if (mode == KEPT && dnri_graph_op_c(g, i)->def == &dnri_def_norm_bwd)
                dnri_keep(g, dnri_graph_op_c(g, i)->out[0]);
        OK(dnri_fuse_algbn(g, mode == LACKING ? cpu : rig_ref,
                           mode == ROWS      ? 5
                           : mode == STRIDED ? 0
                                             : 4));
        assert_int_equal(rig_count_ops(g, &dnri_def_algbn_coef), mode < TAKEN);
        assert_int_equal(rig_count_ops(g, &dnri_def_norm_bwd), mode >= TAKEN);
        rig_close(&r);
    }
    dnr_device_close(cpu);
}

/* Shapes that do not fit are named. */
static void test_shapes(void **state)
{
    const int64_t n = 2, C = 8, K = 16;
    const dnri_algbn_attr attr = {.rows = n * 9};
    const dnri_algbn_join_attr join = {.relu = true};
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    const dnr_tid a = rig_leaf(&r, "a", dnri_desc4(DNR_F64, n, 3, 3, C));
    const dnr_tid dz = rig_leaf(&r, "dz", dnri_desc4(DNR_F64, n, 3, 3, K));
    const dnr_tid few = rig_leaf(&r, "few", dnri_desc4(DNR_F64, n, 3, 1, K));
    const dnr_tid mask = rig_leaf(&r, "mask", dnri_desc4(DNR_U8, n, 3, 3, C / 8));
    const dnr_tid kc = rig_leaf(&r, "kc", dnri_desc4(DNR_F64, K, 1, 1, C));
    const dnr_tid cc = rig_leaf(&r, "cc", dnri_desc4(DNR_F64, C, 1, 1, C));
    const dnr_tid k = rig_leaf(&r, "k", dnri_desc1(DNR_F64, K));
    const dnr_tid c = rig_leaf(&r, "c", dnri_desc1(DNR_F64, C));
    const dnr_tid cc2 = rig_leaf(&r, "2c", dnri_desc1(DNR_F64, 2 * C));
    const dnr_tid no = DNRI_NONE;
    const struct {
        const dnri_op_def *def;
        int n_in, n_out, bad; /* the input to spoil */
        dnr_tid in[9], with;
        const char *what;
    } cases[] = {
        {&dnri_def_norm_dz, 3, 2, 0, {dz, dz, no}, no, "dy alone"},
        {&dnri_def_norm_dz, 3, 2, 0, {dz, dz, no}, few, "y is"},
        {&dnri_def_norm_dz, 3, 2, 0, {dz, dz, no}, mask, "mask"},
        {&dnri_def_norm_dz, 3, 2, 2, {dz, dz, no}, few, "dy2"},
        {&dnri_def_gram, 2, 2, 1, {a, no}, few, "b is"},
        {&dnri_def_algbn_coef, 9, 7, 0, {kc, cc, c, k, kc, k, k, k, no}, cc, "product"},
        {&dnri_def_algbn_coef, 9, 7, 1, {kc, cc, c, k, kc, k, k, k, no}, kc, "gram"},
        {&dnri_def_algbn_coef, 9, 7, 2, {kc, cc, c, k, kc, k, k, k, no}, k, "sum of a"},
        {&dnri_def_algbn_coef, 9, 7, 3, {kc, cc, c, k, kc, k, k, k, no}, c, "sum of dz"},
        {&dnri_def_algbn_coef, 9, 7, 4, {kc, cc, c, k, kc, k, k, k, no}, dz, "weight"},
        {&dnri_def_algbn_coef, 9, 7, 5, {kc, cc, c, k, kc, k, k, k, no}, c, "gamma"},
        {&dnri_def_algbn_coef, 9, 7, 6, {kc, cc, c, k, kc, k, k, k, no}, c, "mean"},
        {&dnri_def_algbn_coef, 9, 7, 7, {kc, cc, c, k, kc, k, k, k, no}, c, "invstd"},
        {&dnri_def_algbn_dgrad, 5, 1, 0, {dz, a, kc, cc, cc2}, few, "dz is"},
        {&dnri_def_algbn_dgrad, 5, 1, 2, {dz, a, kc, cc, cc2}, cc, "wa is"},
        {&dnri_def_algbn_dgrad, 5, 1, 3, {dz, a, kc, cc, cc2}, kc, "m is"},
        {&dnri_def_algbn_dgrad, 5, 1, 4, {dz, a, kc, cc, cc2}, c, "c is"},
        {&dnri_def_algbn_stats, 7, 2, 0, {cc, c, a, kc, k, k, k}, kc, "gram"},
        {&dnri_def_algbn_stats, 7, 2, 1, {cc, c, a, kc, k, k, k}, k, "sum of a"},
        {&dnri_def_algbn_stats, 7, 2, 2, {cc, c, a, kc, k, k, k}, c, "no variance"},
        {&dnri_def_algbn_stats, 7, 2, 3, {cc, c, a, kc, k, k, k}, a, "weight"},
        {&dnri_def_algbn_stats, 7, 2, 4, {cc, c, a, kc, k, k, k}, c, "running mean"},
        {&dnri_def_algbn_stats, 7, 2, 5, {cc, c, a, kc, k, k, k}, c, "running variance"},
        {&dnri_def_algbn_fold, 5, 2, 0, {kc, c, k, k, k}, a, "weight"},
        {&dnri_def_algbn_fold, 5, 2, 1, {kc, c, k, k, k}, k, "sum of a"},
        {&dnri_def_algbn_fold, 5, 2, 2, {kc, c, k, k, k}, c, "gamma"},
        {&dnri_def_algbn_fold, 5, 2, 3, {kc, c, k, k, k}, c, "beta"},
        {&dnri_def_algbn_fold, 5, 2, 4, {kc, c, k, k, k}, c, "invstd"},
        {&dnri_def_algbn_join, 5, 2, 1, {a, kc, k, dz, no}, cc2, "wf"},
        {&dnri_def_algbn_join, 5, 2, 2, {a, kc, k, dz, no}, c, "shift"},
        {&dnri_def_algbn_join, 5, 2, 3, {a, kc, k, dz, no}, a, "residual"},
        {&dnri_def_algbn_join, 5, 2, 4, {a, kc, k, dz, k}, c, "rounded shift"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dnri_op op = {
            .def = cases[i].def, .name = "l", .n_in = cases[i].n_in, .n_out = cases[i].n_out};
        if (op.def == &dnri_def_algbn_join)
            memcpy(op.attr, &join, sizeof join);
        else
            memcpy(op.attr, &attr, sizeof attr);
        memcpy(op.in, cases[i].in, sizeof cases[i].in);
        for (int j = 0; j < DNRI_MAX_OUT; j++)
            op.out[j] = DNRI_NONE;
        OK(op.def->infer(r.g, &op));
        op.in[cases[i].bad] = cases[i].with;
        assert_int_equal(op.def->infer(r.g, &op), DNR_EUSAGE);
        assert_non_null(strstr(dnr_last_error()->what, cases[i].what));
    }
    rig_close(&r);
}

/* A mask is of a ReLU, and of 8·n channels. */
static void test_join_mask(void **state)
{
    rig r;
    rig_open(&r, rig_ref, DNR_PRECISION_AUTO, true);
    for (int mode = 0; mode < 3; mode++) {
        const int64_t k = mode == 1 ? 12 : 16;
        const dnri_algbn_join_attr join = {.relu = mode != 2};
        const dnr_tid a = rig_leaf(&r, "a", dnri_desc4(DNR_F64, 2, 3, 3, 4));
        const dnr_tid wf = rig_leaf(&r, "wf", dnri_desc4(DNR_F64, k, 1, 1, 4));
        const dnr_tid shift = rig_leaf(&r, "shift", dnri_desc1(DNR_F64, k));
        dnri_op op = {.def = &dnri_def_algbn_join,
                      .name = "l",
                      .n_in = 5,
                      .n_out = 2,
                      .in = {a, wf, shift, DNRI_NONE, DNRI_NONE},
                      .out = {DNRI_NONE, DNRI_NONE}};
        memcpy(op.attr, &join, sizeof join);
        assert_int_equal(op.def->infer(r.g, &op), mode ? DNR_EUSAGE : DNR_OK);
    }
    rig_close(&r);
}

/* Operations are counted: of one layer those of the plain ops, and what the small products add. */
static void test_flops(void **state)
{
    const net t = {.blocks = {{4, 16, 1, true, true}}, .n_blocks = 1, .n = 2, .h = 6, .w = 6};
    const double M = 72, K = 16, C = 4,
                 C1 = 8; /* the block's end; its projection is of 8 channels */
    for (int d3 = 0; d3 < 2; d3++) {
        double sum = 0;
        built b;
        build(&b, &t,
              &(dnri_fuse_opts){.fusion = d3 ? DNR_FUSION_D3 : DNR_FUSION_D2,
                                .algbn_rows = ANY_SIZE});
        for (int i = 0; i < dnri_graph_ops(b.r.g); i++) {
            const dnri_op *op = dnri_graph_op_c(b.r.g, i);
            if (op->def == &dnri_def_gram || strncmp(op->def->name, "algbn", 5) == 0)
                sum += op->def->flops ? op->def->flops(b.r.g, op) : 0;
        }
        assert_true(sum == (4 + 2 * d3) * M * K * (C + C1) + 4 * M * (C * C + C1 * C1) +
                               (4 + 2 * d3) * K * (C * C + C1 * C1));
        rig_close(&b.r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal),     cmocka_unit_test(test_recompute),
        cmocka_unit_test(test_kept),      cmocka_unit_test(test_guard),
        cmocka_unit_test(test_limits),    cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_join_mask), cmocka_unit_test(test_flops),
    };
    return cmocka_run_group_tests(tests, rig_open_ref, rig_close_ref);
}
