/* test_rewrite.c: recomputation, splitting and buckets. A small interpreter runs the graphs before and after a
 * rewrite: gradients, loss and running sums must keep their bits. */
#include "backend.h"
#include "bucket.h"
#include "rewrite.h"
#include "rng.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N          2 /* samples, of one pixel and C channels */
#define C          4
#define COUNT      (N * C)
#define MAX_PARAMS 32

/* ---- ops of the tests: x, y, dx, dy are [N,1,1,C] */

static dnr_desc like_x(void)
{
    return dnri_desc4(DNR_F64, N, 1, 1, C);
}

static dnr_status source_infer(dnr_graph *g, dnri_op *op)
{
    return dnri_out(g, op, 0, like_x(), "x");
}

static dnr_status plain_infer(dnr_graph *g, dnri_op *op)
{
    return dnri_out(g, op, 0, like_x(), "y");
}

static dnr_status in_place(dnr_graph *g, dnri_op *op)
{
    return DNR_OK;
}

/* scale: y = w·x, w a number */
static const dnri_op_def scale_dx = {.name = "scale.dx", .infer = plain_infer};
static const dnri_op_def scale_dw = {.name = "scale.dw", .infer = in_place};

static dnr_status scale_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    dnr_tid dw = dnri_grad_of(g, op->in[1]);
    DNR_TRY(dnri_emit(g, &scale_dw, op->name, NULL, 0, 2, (dnr_tid[]){op->in[0], dy[0]}, 1, &dw));
    if (!dnri_wants_grad(g, op->in[0]))
        return DNR_OK;
    return dnri_emit(g, &scale_dx, op->name, NULL, 0, 2, (dnr_tid[]){dy[0], op->in[1]}, 1, dx);
}
static const dnri_op_def scale = {.name = "scale", .infer = plain_infer, .grad = scale_grad};

/* center: y = x - mean(x) by channel; running += mean. Its clone, center.again, reads the mean saved. */
static const dnri_op_def center_again = {.name = "center.again", .infer = plain_infer};
static const dnri_op_def center_dx = {.name = "center.dx", .infer = plain_infer};

static dnr_status center_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(plain_infer(g, op));
    return dnri_out(g, op, 1, dnri_desc1(DNR_F64, C), "mean");
}

static dnr_status center_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return dnri_emit(g, &center_dx, op->name, NULL, 0, 3, (dnr_tid[]){op->in[0], dy[0], op->out[1]},
                     1, dx);
}

static void center_reclone(const dnri_op *from, dnri_op *op)
{
    op->def = &center_again;
    op->in[1] = from->out[1];
    op->n_out = 1;
}
static const dnri_op_def center = {
    .name = "center", .infer = center_infer, .grad = center_grad, .reclone = center_reclone};
static const dnri_op_def impure = {.name = "impure", .infer = center_infer, .grad = center_grad};

/* clip: y = max(x, 0), index = x > 0 (uint8): a pool in small */
static const dnri_op_def clip_dx = {.name = "clip.dx", .infer = plain_infer};

static dnr_status clip_infer(dnr_graph *g, dnri_op *op)
{
    DNR_TRY(plain_infer(g, op));
    return dnri_out(g, op, 1, dnri_desc4(DNR_U8, N, 1, 1, C), "index");
}

static dnr_status clip_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return dnri_emit(g, &clip_dx, op->name, NULL, 0, 2, (dnr_tid[]){dy[0], op->out[1]}, 1, dx);
}
static const dnri_op_def clip = {
    .name = "clip", .infer = clip_infer, .grad = clip_grad, .cheap = true};

/* loss: STATE += Σ x²/2; dx = x */
static const dnri_op_def loss_dx = {.name = "loss.dx", .infer = plain_infer};

static dnr_status loss_grad(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[])
{
    return dnri_emit(g, &loss_dx, op->name, NULL, 0, 1, op->in, 1, dx);
}
static const dnri_op_def loss = {
    .name = "loss", .infer = in_place, .grad = loss_grad, .is_loss = true};

static const dnri_op_def source = {.name = "source", .infer = source_infer};

/* twice: y = 2·w·x. It splits into half.twice and half.twice, each into one scale and an add. */
static const dnri_op_def half, twice;

static dnr_status twice_expand(dnr_graph *g, const dnri_op *op)
{
    dnr_tid t = DNRI_NONE, y = op->out[0];
    DNR_TRY(dnri_emit(g, &half, op->name, NULL, 0, 2, op->in, 1, &t));
    return dnri_emit(g, &dnri_def_add, op->name, NULL, 0, 2, (dnr_tid[]){t, t}, 1, &y);
}

static dnr_status half_expand(dnr_graph *g, const dnri_op *op)
{
    dnr_tid y = op->out[0];
    return dnri_emit(g, &scale, op->name, NULL, 0, 2, op->in, 1, &y);
}
static const dnri_op_def half = {.name = "half", .infer = plain_infer, .expand = half_expand};
static const dnri_op_def twice = {.name = "twice", .infer = plain_infer, .expand = twice_expand};

static const dnri_op_def endless;
static dnr_status endless_expand(dnr_graph *g, const dnri_op *op)
{
    dnr_tid y = op->out[0];
    return dnri_emit(g, &endless, op->name, NULL, 0, 1, op->in, 1, &y);
}
static const dnri_op_def endless = {
    .name = "endless", .infer = plain_infer, .expand = endless_expand};

/* ---- the interpreter */

typedef struct result {
    double running, loss, grad[MAX_PARAMS]; /* running: sum of all that was added to running sums */
} result;

/* Runs the list in order. A tensor is filled with NaN until written, so that reading early shows. */
static result run(dnr_graph *g)
{
    int tensors = dnri_graph_tensors(g);
    double(*v)[COUNT] = malloc((size_t)tensors * sizeof *v);
    result r = {0};
    assert_non_null(v);
    for (int t = 0; t < tensors; t++)
        for (int i = 0; i < COUNT; i++)
            v[t][i] = (double)NAN;
    for (int o = 0; o < dnri_graph_ops(g); o++) {
        const dnri_op *op = dnri_graph_op_c(g, o);
        const double *a = op->n_in > 0 ? v[op->in[0]] : NULL;
        const double *b = op->n_in > 1 && op->in[1] >= 0 ? v[op->in[1]] : NULL;
        double *y = v[op->out[0]], *z = op->n_out > 1 ? v[op->out[1]] : NULL;
        double w = 0; /* of a scale */
        if (op->n_in > 1 && dnri_graph_tensor(g, op->in[1])->home == DNRI_STORE)
            w = 1 + 0.25 * dnri_graph_tensor(g, op->in[1])->param;
        for (int c = 0; z && op->def != &clip && c < C; c++) {
            z[c] = (a[c] + a[C + c]) / N;
            r.running += z[c];
        }
        for (int i = 0; i < COUNT; i++) {
            if (op->def == &source)
                y[i] = (i * 7 % 5 - 1.5) / 3;
            else if (op->def == &scale || op->def == &scale_dx || op->def == &half)
                y[i] = w * a[i];
            else if (op->def == &twice)
                y[i] = 2 * w * a[i];
            else if (op->def == &scale_dw)
                r.grad[dnri_graph_tensor(g, op->out[0])->param] += a[i] * b[i];
            else if (op->def == &center || op->def == &impure)
                y[i] = a[i] - z[i % C];
            else if (op->def == &center_again)
                y[i] = a[i] - b[i % C];
            else if (op->def == &center_dx)
                y[i] = b[i] * (1 + a[i] - v[op->in[2]][i % C]);
            else if (op->def == &clip) {
                y[i] = a[i] > 0 ? a[i] : 0 * a[i];
                z[i] = a[i] != a[i] ? a[i] : a[i] > 0;
            } else if (op->def == &clip_dx)
                y[i] = a[i] * b[i];
            else if (op->def == &loss)
                r.loss += a[i] * a[i] / 2;
            else if (op->def == &loss_dx)
                y[i] = a[i];
            else if (op->def == &dnri_def_add)
                y[i] = a[i] + b[i];
            else
                fail_msg("the interpreter does not know %s", op->def->name);
        }
    }
    free(v);
    return r;
}

static dnri_params *params; /* of the model at hand */

static void assert_same_result(const result *a, const result *b)
{
    assert_memory_equal(a, b, sizeof *a);
    assert_true(isfinite(a->loss) && a->loss > 0 && isfinite(a->running) && a->running != 0);
    for (int i = 0; i < dnri_params_count(params); i++)
        assert_true(isfinite(a->grad[i]) &&
                    (a->grad[i] != 0) == (dnri_params_at(params, i)->kind != DNRI_RUNNING));
}

/* ---- the model: source → scale, then blocks of x + scale(clip(center(scale(x)))), then a loss */

static dnr_tid param(dnr_graph *g, dnri_role role, dnri_param_kind kind, const char *layer,
                     int64_t c)
{
    dnri_param p = {.kind = kind, .dim = {1, 1, 1, c}};
    snprintf(p.name, sizeof p.name, "%s", layer);
    return dnri_param_tensor(g, role, &p);
}

static dnr_tid emit_scale(dnr_graph *g, const dnri_op_def *def, const char *name, dnr_tid x)
{
    dnr_tid y = DNRI_NONE;
    dnri_emit(g, def, name, NULL, 0, 2,
              (dnr_tid[]){x, param(g, DNRI_MASTER, DNRI_DENSE_W, name, 1)}, 1, &y);
    return y;
}

static dnr_tid block(dnr_graph *g, int stage, int index, const dnri_op_def *norm, dnr_tid x)
{
    char name[DNRI_NAME];
    dnri_graph_scope(g, stage, index);
    snprintf(name, sizeof name, "%d.%d.scale1", stage, index);
    dnr_tid y = emit_scale(g, &scale, name, x);
    snprintf(name, sizeof name, "%d.%d.center", stage, index);
    dnr_tid pair[2] = {DNRI_NONE, DNRI_NONE};
    dnri_emit(g, norm, name, NULL, 0, 2,
              (dnr_tid[]){y, param(g, DNRI_BUFFER, DNRI_RUNNING, name, C)}, 2, pair);
    y = pair[0];
    snprintf(name, sizeof name, "%d.%d.clip", stage, index);
    pair[0] = pair[1] = DNRI_NONE;
    dnri_emit(g, &clip, name, NULL, 0, 1, &y, 2, pair);
    snprintf(name, sizeof name, "%d.%d.scale2", stage, index);
    y = emit_scale(g, &scale, name, pair[0]);
    return dnri_add(g, name, x, y);
}

static dnr_graph *model(int stages, int blocks, const dnri_op_def *norm)
{
    const dnri_numerics num = {DNR_F64, DNR_F64, false, false};
    params = dnri_params_new();
    dnr_graph *g = dnri_graph_new(params, &num, true);
    dnr_tid x = DNRI_NONE, state = dnri_slab_tensor(g, DNRI_STATE);
    dnri_emit(g, &source, "input", NULL, 0, 0, NULL, 1, &x);
    x = emit_scale(g, &scale, "stem", x);
    for (int s = 0; s < stages; s++)
        for (int b = 0; b < blocks; b++)
            x = block(g, s, b, norm, x);
    dnri_graph_scope(g, -1, -1);
    dnri_emit(g, &loss, "loss", NULL, 0, 1, &x, 1, &state);
    assert_int_equal(dnri_graph_backward(g), DNR_OK);
    return g;
}

static void done(dnr_graph *g)
{
    dnri_graph_free(g);
    dnri_params_free(params);
}

static int count_clones(dnr_graph *g, int stage, int index)
{
    int n = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op(g, i);
        n += op->clone && op->stage == stage && op->block == index;
    }
    return n;
}

/* Clones stand in one run just before their segment's first backward op, after the loss; they are of the
 * kinds expected, read nothing of the store but weights, and write nothing that another op writes. */
static void check_clones(dnr_graph *g, dnr_recompute mode)
{
    int n = dnri_graph_ops(g);
    int *writers = calloc((size_t)dnri_graph_tensors(g), sizeof *writers);
    assert_non_null(writers);
    bool after_loss = false;
    for (int i = 0; i < n; i++) {
        const dnri_op *op = dnri_graph_op(g, i);
        after_loss |= op->def->is_loss;
        for (int k = 0; k < op->n_out; k++)
            if (dnri_graph_tensor(g, op->out[k])->home == DNRI_ARENA)
                assert_int_equal(++writers[op->out[k]], 1);
        if (!op->clone)
            continue;
        assert_true(after_loss);
        assert_int_equal(op->phase, DNRI_BACKWARD);
        assert_true(op->def == &scale || op->def == &center_again || op->def == &clip ||
                    (mode == DNR_RECOMPUTE_STAGE && op->def == &dnri_def_add));
        for (int k = 0; k < op->n_in; k++) {
            const dnri_tensor *t = dnri_graph_tensor(g, op->in[k]);
            assert_true(t->home == DNRI_ARENA || t->role == DNRI_MASTER);
        }
        for (int k = 0; k < op->n_out; k++)
            assert_int_equal(dnri_graph_tensor(g, op->out[k])->home, DNRI_ARENA);
        assert_true(i + 1 < n);
        const dnri_op *next = dnri_graph_op(g, i + 1);
        assert_int_equal(next->stage, op->stage);
        if (mode == DNR_RECOMPUTE_BLOCK)
            assert_int_equal(next->block, op->block);
        for (int k = 0; k < i; k++) { /* no backward op of the segment before */
            const dnri_op *before = dnri_graph_op(g, k);
            if (before->phase == DNRI_BACKWARD && before->stage == op->stage && !before->clone)
                assert_true(mode == DNR_RECOMPUTE_BLOCK && before->block != op->block);
        }
    }
    free(writers);
}

/* After the rewrite, what a remade segment wrote in forward is read by no backward op, but for what leaves it
 * and vectors. Returns how many such forward tensors there are. */
static int count_freed(dnr_graph *g)
{
    int freed = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op(g, i);
        if (op->phase != DNRI_FORWARD || op->stage < 0)
            continue;
        bool read_late = false;
        for (int k = i; k < dnri_graph_ops(g); k++) {
            const dnri_op *late = dnri_graph_op(g, k);
            for (int j = 0; late->phase == DNRI_BACKWARD && j < late->n_in; j++)
                read_late |=
                    late->in[j] == op->out[0] || (op->def == &clip && late->in[j] == op->out[1]);
        }
        freed += !read_late;
    }
    return freed;
}

static void recompute_block(void **state)
{
    dnr_graph *g = model(2, 2, &center);
    int ops = dnri_graph_ops(g);
    result before = run(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_BLOCK), DNR_OK);
    result after = run(g);
    assert_same_result(&before, &after);
    check_clones(g, DNR_RECOMPUTE_BLOCK);
    /* scale1, center, clip of three blocks; scale2 and the add lead to nothing that backward reads. The last
     * block's backward comes first, so it has none. */
    for (int b = 0; b < 3; b++)
        assert_int_equal(count_clones(g, b / 2, b % 2), 3);
    assert_int_equal(count_clones(g, 1, 1), 0);
    assert_int_equal(dnri_graph_ops(g), ops + 9);
    done(g);

    /* of each block: scale1, center, clip freed; in the plain graph center's y is read by none of them */
    g = model(2, 2, &center);
    int plain = count_freed(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_BLOCK), DNR_OK);
    assert_int_equal(count_freed(g) - plain, 3 * 2);
    done(g);
}

/* Of four blocks the clips, each just before what reads it; an add would need two tensors to live longer. */
static void recompute_cheap(void **state)
{
    dnr_graph *g = model(2, 2, &center);
    int ops = dnri_graph_ops(g), clones = 0;
    result before = run(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_CHEAP), DNR_OK);
    result after = run(g);
    assert_same_result(&before, &after);
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        if (!op->clone)
            continue;
        clones++;
        assert_ptr_equal(op->def, &clip);
        const dnri_op *reader = dnri_graph_op_c(g, i + 1);
        bool read = false;
        for (int k = 0; k < reader->n_in; k++)
            read |= reader->in[k] == op->out[0] || reader->in[k] == op->out[1];
        assert_true(read && reader->phase == DNRI_BACKWARD);
    }
    assert_int_equal(clones, 4);
    assert_int_equal(dnri_graph_ops(g), ops + 4);
    done(g);
}

/* As many clones as make up for the bytes: of equal ones, so many; none twice, and no more than there are. None where
 * the input would have to be kept for it. */
static void remake_some(void **state)
{
    const size_t each = COUNT * sizeof(double) + N * C; /* y of a clip and its index */
    for (int kept = 0; kept < 2; kept++)
        for (int want = 0; want <= 5; want++) {
            dnr_graph *g = model(2, 2, &center);
            const int ops = dnri_graph_ops(g), most = !kept ? 0 : want < 4 ? want : 4;
            int clones = 0;
            for (int i = 0; kept && i < ops; i++)
                if (dnri_graph_op(g, i)->def == &clip)
                    dnri_keep(g, dnri_graph_op(g, i)->in[0]);
            result before = run(g);
            assert_int_equal(dnri_rewrite_remake(g, (size_t)want * each - (want > 1)), DNR_OK);
            result after = run(g);
            assert_same_result(&before, &after);
            for (int i = 0; i < dnri_graph_ops(g); i++)
                clones += dnri_graph_op(g, i)->clone;
            assert_int_equal(clones, most);
            assert_int_equal(dnri_graph_ops(g), ops + most);
            done(g);
        }
}

static void recompute_stage(void **state)
{
    dnr_graph *g = model(3, 2, &center);
    int ops = dnri_graph_ops(g);
    result before = run(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_STAGE), DNR_OK);
    result after = run(g);
    assert_same_result(&before, &after);
    check_clones(g, DNR_RECOMPUTE_STAGE);
    done(g);

    /* Two blocks in a stage: what enters the second is inside the segment and is remade too, so its scale2 and add
     * are cloned: 3 + 2 ops for the first block, 3 for the second. */
    g = model(3, 2, &center);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_STAGE), DNR_OK);
    int adds = 0;
    for (int i = 0; i < dnri_graph_ops(g); i++)
        adds += dnri_graph_op(g, i)->clone && dnri_graph_op(g, i)->def == &dnri_def_add;
    assert_int_equal(adds, 2);
    for (int s = 0; s < 2; s++) {
        assert_int_equal(count_clones(g, s, 0), 5);
        assert_int_equal(count_clones(g, s, 1), 3);
    }
    assert_int_equal(count_clones(g, 2, 0) + count_clones(g, 2, 1), 0);
    assert_int_equal(dnri_graph_ops(g), ops + 16);
    done(g);
}

/* A kept tensor is read where it is, and nothing is cloned for it. */
static void recompute_keeps_what_is_kept(void **state)
{
    dnr_graph *g = model(1, 2, &center);
    result before = run(g);
    dnr_tid kept = DNRI_NONE;
    for (int i = 0; i < dnri_graph_ops(g); i++)
        if (strcmp(dnri_graph_op(g, i)->name, "0.0.scale1") == 0 && kept < 0)
            kept = dnri_graph_op(g, i)->out[0];
    dnri_keep(g, kept);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_BLOCK), DNR_OK);
    result after = run(g);
    assert_same_result(&before, &after);
    assert_int_equal(count_clones(g, 0, 0), 2); /* center, clip */
    done(g);
}

static void recompute_none(void **state)
{
    dnr_graph *g = model(2, 2, &center);
    int ops = dnri_graph_ops(g), tensors = dnri_graph_tensors(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_NONE), DNR_OK);
    assert_int_equal(dnri_graph_ops(g), ops);
    assert_int_equal(dnri_graph_tensors(g), tensors);
    done(g);
    /* one segment only: the first that backward visits */
    g = model(1, 1, &center);
    ops = dnri_graph_ops(g);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_BLOCK), DNR_OK);
    assert_int_equal(dnri_graph_ops(g), ops);
    done(g);
}

/* An op that updates running sums and has no reclone must not run twice. */
static void recompute_refuses_side_effects(void **state)
{
    dnr_graph *g = model(1, 2, &impure);
    assert_int_equal(dnri_rewrite_recompute(g, DNR_RECOMPUTE_BLOCK), DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "impure of 0.0.center"));
    done(g);
}

/* ---- splitting */

static const dnri_op_def *lacks[4];

static bool supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    for (int i = 0; i < 4; i++)
        if (lacks[i] == op->def)
            return false;
    return true;
}

static const dnri_backend backend = {.abi = DNRI_BACKEND_ABI, .name = "test", .supports = supports};
static dnr_device device = {.be = &backend, .name = "test:0"};

static dnr_graph *split_model(const dnri_op_def *middle)
{
    const dnri_numerics num = {DNR_F64, DNR_F64, false, false};
    params = dnri_params_new();
    dnr_graph *g = dnri_graph_new(params, &num, true);
    dnr_tid x = DNRI_NONE, state = dnri_slab_tensor(g, DNRI_STATE);
    dnri_emit(g, &source, "input", NULL, 0, 0, NULL, 1, &x);
    x = emit_scale(g, &scale, "before", x);
    dnri_graph_scope(g, 3, 5);
    x = emit_scale(g, middle, "middle", x);
    dnri_graph_scope(g, -1, -1);
    x = emit_scale(g, &scale, "after", x);
    dnri_emit(g, &loss, "loss", NULL, 0, 1, &x, 1, &state);
    assert_int_equal(dnri_graph_status(g), DNR_OK);
    return g;
}

static void split_in_place(void **state)
{
    static const struct {
        const dnri_op_def *lacks[4];
        int ops;
        const dnri_op_def *middle[2];
    } cases[] = {
        {{NULL}, 5, {&twice}},
        {{&twice}, 6, {&half, &dnri_def_add}},
        {{&half, &twice}, 6, {&scale, &dnri_def_add}}, /* a split of a split */
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        dnr_graph *g = split_model(&twice);
        dnr_tid y = dnri_graph_op(g, 2)->out[0];
        result before = run(g);
        memcpy(lacks, cases[c].lacks, sizeof lacks);
        assert_int_equal(dnri_rewrite_split(g, &device), DNR_OK);
        assert_int_equal(dnri_graph_ops(g), cases[c].ops);
        int parts = cases[c].ops - 4;
        for (int i = 0; i < parts; i++) {
            const dnri_op *op = dnri_graph_op(g, 2 + i);
            assert_ptr_equal(op->def, cases[c].middle[i]);
            assert_string_equal(op->name, "middle");
            assert_int_equal(op->stage, 3);
            assert_int_equal(op->block, 5);
            assert_int_equal(op->phase, DNRI_FORWARD);
        }
        assert_int_equal(dnri_graph_op(g, 1 + parts)->out[0], y);
        assert_string_equal(dnri_graph_op(g, 2 + parts)->name, "after");
        result after = run(g);
        assert_true(after.loss > 0 && before.loss == after.loss);
        done(g);
    }
    memset(lacks, 0, sizeof lacks);
}

/* Backward ops and clones stay what they are when they are split. */
static void split_keeps_the_phase(void **state)
{
    dnr_graph *g = split_model(&twice);
    dnri_op *op = dnri_graph_op(g, 2);
    op->phase = DNRI_BACKWARD;
    op->clone = true;
    lacks[0] = &twice;
    assert_int_equal(dnri_rewrite_split(g, &device), DNR_OK);
    lacks[0] = NULL;
    for (int i = 2; i < 4; i++)
        assert_true(dnri_graph_op(g, i)->phase == DNRI_BACKWARD && dnri_graph_op(g, i)->clone);
    assert_false(dnri_graph_op(g, 4)->clone);
    done(g);
}

static void split_fails_by_name(void **state)
{
    dnr_graph *g = split_model(&twice);
    lacks[0] = &scale;
    assert_int_equal(dnri_rewrite_split(g, &device), DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "test:0 can run neither scale of before"));
    done(g);
    g = split_model(&endless);
    lacks[0] = &endless;
    assert_int_equal(dnri_rewrite_split(g, &device), DNR_EUSAGE);
    assert_non_null(strstr(dnr_last_error()->what, "endless of middle"));
    lacks[0] = NULL;
    done(g);
}

/* ---- buckets */

static void check_buckets(const dnri_params *p, size_t elem, size_t first_bytes, size_t bytes)
{
    dnri_bucket *b;
    int n, position = 0;
    int64_t offset = 0;
    assert_int_equal(dnri_buckets_make(p, elem, first_bytes, bytes, &b, &n), DNR_OK);
    for (int i = 0; i < n; i++) {
        assert_int_equal(b[i].offset, offset);
        assert_int_equal(b[i].first, position);
        assert_true(b[i].last >= b[i].first);
        size_t least = i ? bytes : first_bytes;
        if (i < n - 1)
            assert_true((size_t)b[i].count * elem >= least);
        /* no more than it takes: without its last parameter it would be too small */
        const dnri_param *last = dnri_params_at(p, dnri_params_slab_order(p, b[i].last));
        assert_true(b[i].last == b[i].first || (size_t)(last->offset - offset) * elem < least);
        for (int k = b[i].first; k <= b[i].last; k++) {
            const dnri_param *x = dnri_params_at(p, dnri_params_slab_order(p, k));
            assert_true(x->offset >= offset && x->offset + x->count <= offset + b[i].count);
        }
        offset += b[i].count;
        position = b[i].last + 1;
    }
    assert_int_equal(offset, dnri_params_flat(p));
    assert_int_equal(dnri_params_slab_order(p, position), -1);
    free(b);
}

static void buckets(void **state)
{
    for (uint64_t seed = 0; seed < 200; seed++) {
        dnri_rng r = DNRI_RNG(seed);
        dnri_params *p = dnri_params_new();
        int count = (int)dnri_rng_below(&r, 60);
        for (int i = 0; i < count; i++) {
            bool buffer = dnri_rng_below(&r, 3) == 0;
            dnri_param x = {.kind = buffer ? DNRI_RUNNING : DNRI_BIAS,
                            .dim = {1, 1, 1, 1 + (int64_t)dnri_rng_below(&r, 5000)}};
            int index;
            snprintf(x.name, sizeof x.name, "p%d", i);
            assert_int_equal(dnri_params_add(p, &x, &index), DNR_OK);
        }
        dnri_params_seal(p);
        int64_t end = 0; /* slab order: by offset, each trainable parameter once */
        for (int k = 0, i; (i = dnri_params_slab_order(p, k)) >= 0; k++) {
            assert_int_equal(dnri_params_at(p, i)->offset, end);
            end += (dnri_params_at(p, i)->count + 63) / 64 * 64;
        }
        assert_int_equal(end, dnri_params_flat(p));
        check_buckets(p, 4, dnri_rng_below(&r, 30000), 1 + dnri_rng_below(&r, 100000));
        check_buckets(p, 2, 0, 0);                         /* a bucket for each */
        check_buckets(p, 8, SIZE_MAX / 16, SIZE_MAX / 16); /* one bucket */
        dnri_params_free(p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recompute_block),
        cmocka_unit_test(recompute_cheap),
        cmocka_unit_test(remake_some),
        cmocka_unit_test(recompute_stage),
        cmocka_unit_test(recompute_keeps_what_is_kept),
        cmocka_unit_test(recompute_none),
        cmocka_unit_test(recompute_refuses_side_effects),
        cmocka_unit_test(split_in_place),
        cmocka_unit_test(split_keeps_the_phase),
        cmocka_unit_test(split_fails_by_name),
        cmocka_unit_test(buckets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
