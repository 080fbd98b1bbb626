/* test_packed.c: pictures in packed form and the first convolution over them, on one device against the plain ops
 * on the reference device; and the rewrite that makes them.
 *
 *     test_packed DEVICE PRECISION        test_packed: all packings on ref, where they equal the plain graph
 *
 * Exit code 77: this machine has no such device or precision. A device that has no packed ops passes idly.
 */
#include "probe.h"
#include "../layers/fuse.h"
#include "../runtime/model.h"
#include "../runtime/slot.h"

#include <stdlib.h>
#include <string.h>

enum { CLASSES = 3 };

static dnr_device *ref, *device;
static dnr_precision precision;

/* A picture net's first layer and its gradients; `packing` 0: plain. */
typedef struct net {
    rig r;
    dnr_tid y;
    void *slot;
} net;

/* The stem's window, to k channels. */
static void net_open(net *t, dnr_device *dev, dnr_precision p, int64_t n, int64_t h, int64_t w,
                     int k)
{
    const dnri_ingest_attr in = {n, h, w, {0.017, 0.018, 0.017}, {-2.1, -2.0, -1.8}};
    dnr_tid x, labels;
    t->slot = NULL;
    rig_open(&t->r, dev, p, true);
    OK(dnri_ingest(t->r.g, &in, &x, &labels));
    t->y = dnr_conv(t->r.g, "conv1", x, &(dnr_conv_opts){k, 7, 2, 3});
    dnr_tid a = dnr_dense(t->r.g, "fc", dnr_global_avg_pool(t->r.g, "pool", t->y), CLASSES);
    OK(dnri_model_loss(t->r.g, a, labels, 0.1, 1.0 / (double)n));
    OK(dnri_graph_backward(t->r.g));
    rig_keep(&t->r, t->y);
}

static void net_close(net *t)
{
    if (t->slot)
        t->r.dev->be->free(t->r.dev, t->slot);
    rig_close(&t->r);
}

typedef struct result {
    double *y, *dw;
    int64_t n_y, n_dw;
} result;

static void result_free(result *o)
{
    free(o->y);
    free(o->dw);
}

/* Weights and pictures are the same on each device. */
static result run(net *t, int64_t n, int64_t h, int64_t w)
{
    rig *r = &t->r;
    const size_t bytes = dnri_slot_bytes(n, h, w);
    unsigned char *slot = calloc(1, bytes);
    const dnri_header head = {.first = 1};
    uint64_t seed = 4;
    rig_plan(r, true, false);
    OK(r->dev->be->alloc(r->dev, bytes, &t->slot));
    memcpy(slot, &head, sizeof head);
    for (int64_t i = 0; i < n; i++)
        ((int32_t *)(void *)(slot + dnri_slot_labels()))[i] = (int32_t)(i % CLASSES);
    for (size_t i = dnri_slot_pixels(n); i < bytes; i++)
        slot[i] = (unsigned char)(i * 131 + i / 256 * 7);
    OK(dnri_copy_now(r->dev, t->slot, slot, bytes));
    OK(dnri_copy_now(r->dev, dnri_store_ptr(r->store, DNRI_CELL, -1), &t->slot, sizeof t->slot));
    free(slot);
    rig_bind(r);
    OK(dnri_store_init(r->store, 3));
    OK(dnri_store_write_state(r->store, &(dnri_state){.loss_scale = 1}));
    const int conv = dnri_params_find(r->params, "conv1.weight");
    result o = {.n_y = rig_count(r, t->y), .n_dw = dnri_params_at(r->params, conv)->count};
    o.y = malloc((size_t)o.n_y * sizeof *o.y);
    o.dw = malloc((size_t)o.n_dw * sizeof *o.dw);
    for (int64_t i = 0; i < o.n_dw; i++)
        o.dw[i] = 0.1 * rig_normal(&seed);
    rig_round(device->be == ref->be             ? DNR_F64
              : precision == DNR_PRECISION_BF16 ? DNR_BF16
                                                : DNR_F16,
              o.dw, o.n_dw);
    OK(dnri_store_write(r->store, DNRI_MASTER, conv, o.dw));
    if (r->num.compute != r->num.master)
        OK(dnri_store_write(r->store, DNRI_WEIGHT, conv, o.dw));
    rig_run(r);
    rig_read(r, t->y, o.y);
    OK(dnri_store_read(r->store, DNRI_GRAD, conv, o.dw));
    return o;
}

static int packed_ops(const dnr_graph *g)
{
    return rig_count_ops(g, &dnri_def_packed_ingest) + rig_count_ops(g, &dnri_def_packed_conv) +
           rig_count_ops(g, &dnri_def_packed_conv_wgrad);
}

/* Bounds: pictures and weights are rounded to the compute type alike in both forms, so that on the device only the
 * order of sums differs; against ref their rounding shows, and that of y and dw. */
static void test_equals_plain(void **state)
{
    static const int64_t sizes[][4] = {
        {2, 16, 16, 8}, {3, 32, 20, 8}, {1, 8, 10, 8}, {2, 36, 42, 64}, {3, 4, 2, 64}};
    const bool exact = device->be == ref->be;
    const double unit = precision == DNR_PRECISION_BF16 ? 3.92e-3 : 4.9e-4;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        const int64_t n = sizes[i][0], h = sizes[i][1], w = sizes[i][2];
        const int k = (int)sizes[i][3];
        net plain, own;
        net_open(&plain, ref, DNR_PRECISION_AUTO, n, h, w, k);
        net_open(&own, device, precision, n, h, w, k);
        result want = run(&plain, n, h, w), same = run(&own, n, h, w);
        assert_int_equal(packed_ops(plain.r.g), 0);
        for (int form = 0; form < 4; form++) {
            const dnri_packing fprop = form & 1 ? DNRI_BLOCKS : DNRI_QUADS;
            const dnri_packing wgrad = form & 2 ? DNRI_BLOCKS : DNRI_QUADS;
            net t;
            net_open(&t, device, precision, n, h, w, k);
            OK(dnri_fuse_input(t.r.g, device, fprop, wgrad));
            if (packed_ops(t.r.g) == 0) {
                assert_false(exact); /* ref has all */
                net_close(&t);
                continue;
            }
            assert_int_equal(packed_ops(t.r.g), 3);
            assert_int_equal(rig_count_ops(t.r.g, &dnri_def_ingest), 0);
            result got = run(&t, n, h, w);
            const double y = rig_error(got.y, want.y, got.n_y);
            const double dw = rig_error(got.dw, want.dw, got.n_dw);
            const double y_plain = rig_error(same.y, want.y, got.n_y);
            const double dw_plain = rig_error(same.dw, want.dw, got.n_dw);
            print_message(
                "packings %d and %d, %dx%dx%d to %d: y %.1e (plain %.1e), dw %.1e (plain %.1e)\n",
                fprop, wgrad, (int)n, (int)h, (int)w, k, y, y_plain, dw, dw_plain);
            assert_true(y <= (exact ? 1e-13 : 2 * unit));
            assert_true(dw <= (exact ? 1e-13 : y_plain + dw_plain + unit));
            result_free(&got);
            net_close(&t);
        }
        result_free(&want);
        result_free(&same);
        net_close(&plain);
        net_close(&own);
    }
}

/* The graph stays as it is where another op reads the picture, it is kept, or has no whole blocks. */
static void test_limits(void **state)
{
    enum { READ, KEPT, ODD, MODES };
    for (int mode = 0; mode < MODES; mode++) {
        net t;
        dnr_tid z = DNRI_NONE;
        net_open(&t, ref, DNR_PRECISION_AUTO, 2, mode == ODD ? 15 : 16, 16, 8);
        const dnr_tid x = dnri_graph_op(t.r.g, 0)->out[0];
        if (mode == READ)
            OK(dnri_emit(t.r.g, &dnri_def_relu, "l", NULL, 0, 1, &x, 1, &z));
        if (mode == KEPT)
            dnri_keep(t.r.g, x);
        OK(dnri_fuse_input(t.r.g, ref, DNRI_QUADS, DNRI_BLOCKS));
        assert_int_equal(packed_ops(t.r.g), 0);
        net_close(&t);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest both[] = {cmocka_unit_test(test_equals_plain)};
    const struct CMUnitTest rules[] = {cmocka_unit_test(test_equals_plain),
                                       cmocka_unit_test(test_limits)};
    int failed;
    if (argc == 1) {
        OK(dnr_device_open("ref", &ref));
        device = ref;
        precision = DNR_PRECISION_AUTO;
        failed = cmocka_run_group_tests(rules, NULL, NULL);
        dnr_device_close(ref);
        return failed ? 1 : 0;
    }
    const int rc = probe_open(argc, argv);
    if (rc)
        return rc;
    ref = probe_ref;
    device = probe_device;
    precision = probe_precision;
    failed = cmocka_run_group_tests(both, NULL, NULL);
    probe_close();
    return failed ? 1 : 0;
}
