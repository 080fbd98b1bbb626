#include "probe.h"

#include <stdlib.h>
#include <string.h>

dnr_device *probe_ref, *probe_device;
dnr_precision probe_precision;

/* ---- the two devices */

int probe_open(int argc, char **argv)
{
    dnri_numerics num;
    for (int i = DNR_PRECISION_FP32; argc == 3 && i <= DNR_PRECISION_BF16; i++)
        if (strcmp(dnr_precision_name((dnr_precision)i), argv[2]) == 0)
            probe_precision = (dnr_precision)i;
    if (probe_precision == DNR_PRECISION_AUTO) {
        print_error("usage: %s DEVICE fp32|tf32|fp16|bf16\n", argv[0]);
        return 2;
    }
    if (dnr_device_open("ref", &probe_ref) != DNR_OK) {
        print_error("%s\n", dnr_last_error()->what);
        return 1;
    }
    if (dnr_device_open(argv[1], &probe_device) != DNR_OK ||
        probe_device->be->numerics(probe_device, &probe_precision, &num) != DNR_OK) {
        print_message("skipped: %s\n", dnr_last_error()->what);
        return RIG_SKIP;
    }
    return 0;
}

void probe_close(void)
{
    dnr_device_close(probe_device);
    dnr_device_close(probe_ref);
}

/* ---- bounds */

/* One rounding to a 16-bit type errs by at most 2^-11 (fp16) or 2^-8 (bf16) of each element; products
 * of 16-bit numbers are exact in fp32. TF32 rounds factors to 11 bits. cuDNN rounds weight gradients to the
 * compute type before they reach the master type, as in PyTorch. */
double probe_bound(probe_kind k)
{
    static const double bounds[][PROBE_KINDS] = {
        [DNR_PRECISION_FP32] = {0, 5e-7, 3e-6, 3e-6, 3e-6},
        [DNR_PRECISION_TF32] = {0, 5e-7, 3e-6, 1e-3, 1e-3},
        [DNR_PRECISION_FP16] = {0, 4.9e-4, 3e-6, 4.9e-4, 4.9e-4},
        [DNR_PRECISION_BF16] = {0, 3.92e-3, 3e-6, 3.92e-3, 3.92e-3},
    };
    return bounds[probe_precision][k];
}

enum { MAX_WORST = 64 };
static struct worst {
    const char *op, *name;
    double error, bound;
} worst[MAX_WORST];
static int n_worst;

bool probe_judge(const char *op, const char *name, double error, double bound)
{
    int i = 0;
    while (i < n_worst && (strcmp(worst[i].op, op) || strcmp(worst[i].name, name)))
        i++;
    if (i == n_worst) {
        assert_true(n_worst < MAX_WORST);
        worst[n_worst++] = (struct worst){op, name, -1, bound};
    }
    if (error > worst[i].error)
        worst[i] = (struct worst){op, name, error, bound};
    if (error <= bound)
        return true;
    print_error("%s %s: error %.2e, bound %.1e\n", op, name, error, bound);
    return false;
}

int probe_end(int failed)
{
    for (int i = 0; i < n_worst; i++)
        print_message("%-16s %-14s worst error %.1e, bound %.1e\n", worst[i].op, worst[i].name,
                      worst[i].error, worst[i].bound);
    probe_close();
    return failed ? 1 : 0;
}

/* ---- building */

dnr_graph *probe_graph(probe *p)
{
    return p->r[p->side].g;
}

dnr_dtype probe_compute(const probe *p)
{
    return p->r[p->side].num.compute;
}

dnr_dtype probe_master(const probe *p)
{
    return p->r[p->side].num.master;
}

/* `held`: what the device under test holds the values in. */
static dnr_tid leaf(probe *p, const char *name, dnr_desc d, dnr_dtype held, double scale,
                    double shift)
{
    const int i = p->n_leaves++;
    assert_true(i < MAX_LEAVES);
    const dnr_tid t = p->leaf[i].tid[p->side] = rig_leaf(&p->r[p->side], name, d);
    if (p->side == REF) {
        const int64_t n = p->leaf[i].count = dnri_count(&d);
        double *v = p->leaf[i].v = malloc((size_t)n * sizeof *v);
        for (int64_t k = 0; k < n; k++)
            v[k] = scale * rig_normal(&p->seed) + shift;
        rig_round(held, v, n);
    }
    return t;
}

dnr_tid probe_leaf(probe *p, const char *name, dnr_desc d, double scale, double shift)
{
    return leaf(p, name, d, p->r[DEVICE].num.compute, scale, shift);
}

dnr_tid probe_tensor(probe *p, const char *name, int64_t n, int64_t h, int64_t w, int64_t c)
{
    return probe_leaf(p, name, dnri_desc4(probe_compute(p), n, h, w, c), 1, 0);
}

dnr_tid probe_vector(probe *p, const char *name, int64_t c, double scale, double shift)
{
    return leaf(p, name, dnri_desc1(probe_master(p), c), p->r[DEVICE].num.master, scale, shift);
}

double *probe_values(probe *p, dnr_tid t)
{
    for (int i = 0; p->side == REF && i < p->n_leaves; i++)
        if (p->leaf[i].tid[REF] == t)
            return p->leaf[i].v;
    return NULL;
}

void probe_emit(probe *p, const dnri_op_def *def, const void *attr, size_t size, int n_in,
                const dnr_tid *in, int n_out, dnr_tid *out)
{
    OK(dnri_emit(probe_graph(p), def, "l", attr, size, n_in, in, n_out, out));
}

double probe_split(probe *p)
{
    const dnr_graph *g = p->r[p->side].g;
    const dnri_op *op = dnri_graph_op_c(g, dnri_graph_ops(g) - 1);
    return p->side == DEVICE && !probe_device->be->supports(probe_device, g, op) ? 2 : 1;
}

void probe_result(probe *p, const char *op, const char *name, dnr_tid t, probe_kind k, double loose)
{
    const int i = p->n_outs++;
    assert_true(i < MAX_OUTS);
    p->out[i].op = op;
    p->out[i].name = name;
    p->out[i].bound = loose * probe_bound(k); /* the device's: it is built last */
    p->out[i].tid[p->side] = rig_keep(&p->r[p->side], t);
}

/* ---- running and comparing */

static void run_side(probe *p, double *got[MAX_OUTS], dnri_state *state)
{
    rig *r = &p->r[p->side];
    rig_plan(r, true, false);
    rig_bind(r);
    OK(dnri_store_write_state(r->store, &p->state));
    rig_header(r, 0, p->first);
    for (int i = 0; i < p->n_leaves; i++)
        rig_write(r, p->leaf[i].tid[p->side], p->leaf[i].v);
    rig_run(r);
    for (int i = 0; i < p->n_outs; i++) {
        const dnr_tid t = p->out[i].tid[p->side];
        got[i] = malloc((size_t)rig_count(r, t) * sizeof *got[i]);
        rig_read(r, t, got[i]);
    }
    OK(dnri_store_read_state(r->store, state));
}

/* What loss.fprop counts; and where the reference says how far means are from 0, that. */
static int compare_state(const dnri_state *a, const dnri_state *b)
{
    const double counts[] = {(double)a->correct1, (double)a->correct5, (double)a->samples,
                             (double)a->forwards};
    const double want[] = {(double)b->correct1, (double)b->correct5, (double)b->samples,
                           (double)b->forwards};
    const double ratio = a->algbn_ratio, wanted = b->algbn_ratio;
    return !probe_judge("state", "loss_sum", rig_error(&a->loss_sum, &b->loss_sum, 1),
                        probe_bound(SUM)) +
           !probe_judge("state", "counts", rig_error(counts, want, 4), 0) +
           (b->algbn_ratio > 0 &&
            !probe_judge("state", "algbn_ratio", rig_error(&ratio, &wanted, 1), 1e-5));
}

static int compare(probe *p, double *got[SIDES][MAX_OUTS], const dnri_state state[SIDES])
{
    int bad = compare_state(&state[DEVICE], &state[REF]);
    for (int i = 0; i < p->n_outs; i++) {
        const int64_t n = rig_count(&p->r[REF], p->out[i].tid[REF]);
        bad += !probe_judge(p->out[i].op, p->out[i].name, rig_error(got[DEVICE][i], got[REF][i], n),
                            p->out[i].bound);
    }
    return bad;
}

static void print_shape(const shape *c)
{
    print_error("  with n %d, h %d, w %d, c %d, k %d, kernel %d, stride %d, pad %d, smoothing %g, "
                "shift %g%s%s%s%s%s%s\n",
                (int)c->n, (int)c->h, (int)c->w, (int)c->c, (int)c->k, c->kernel, c->stride, c->pad,
                c->smoothing, c->shift, c->relu ? ", relu" : "", c->residual ? ", residual" : "",
                c->dy2 ? ", dy2" : "", c->soft ? ", soft" : "", c->special ? ", special" : "",
                c->later ? ", later" : "");
}

int probe_run(probe_build build, probe_check check, const shape *c)
{
    probe p = {.seed = 1, .first = true, .state = {.loss_scale = 1}};
    double *got[SIDES][MAX_OUTS];
    dnri_state state[SIDES];
    rig_open(&p.r[REF], probe_ref, DNR_PRECISION_AUTO, true);
    rig_open(&p.r[DEVICE], probe_device, probe_precision, true);
    for (p.side = REF; p.side < SIDES; p.side++) {
        p.n_leaves = p.n_outs = 0;
        build(&p, c);
        run_side(&p, got[p.side], &state[p.side]);
    }
    int bad = compare(&p, got, state);
    if (check)
        bad += check(&p, got[DEVICE]);
    if (bad)
        print_shape(c);
    for (int side = 0; side < SIDES; side++) {
        for (int i = 0; i < p.n_outs; i++)
            free(got[side][i]);
        rig_close(&p.r[side]);
    }
    for (int i = 0; i < p.n_leaves; i++)
        free(p.leaf[i].v);
    return bad;
}
