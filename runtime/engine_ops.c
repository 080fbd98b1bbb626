#include "engine_ops.h"
#include "reduce.h"

#include <stdlib.h>
#include <string.h>

static const dnri_ingest_attr *ingest_attr(const dnri_op *op)
{
    return (const dnri_ingest_attr *)op->attr;
}

static dnr_status ingest_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_ingest_attr *a = ingest_attr(op);
    if (a->n < 1 || a->h < 1 || a->w < 1)
        return DNR_FAIL(DNR_EUSAGE, "set train.batch and data.image to positive numbers",
                        "a batch of %lld pictures of %lld x %lld", (long long)a->n, (long long)a->h,
                        (long long)a->w);
    DNR_TRY(
        dnri_out(g, op, 0, dnri_desc4(dnri_graph_numerics(g)->compute, a->n, a->h, a->w, 3), "x"));
    return dnri_out(g, op, 1, dnri_desc4(DNR_I32, a->n, 1, 1, 1), "labels");
}

/* The slot is still there in the backward pass: pictures can be made from it once more. */
static void ingest_reclone(const dnri_op *from, dnri_op *op)
{
    op->out[1] = op->out[2] = DNRI_NONE;
}

const dnri_op_def dnri_def_ingest = {
    .name = "ingest", .infer = ingest_infer, .reclone = ingest_reclone, .cheap = true};

dnr_desc dnri_packed_desc(dnr_dtype t, int64_t n, int64_t h, int64_t w, int64_t packing)
{
    return packing == DNRI_QUADS ? dnri_desc4(t, n, h, w, 4) : dnri_desc4(t, n, h / 2, w / 2, 16);
}

static dnr_status packed_infer(dnr_graph *g, dnri_op *op)
{
    const dnri_ingest_attr *a = ingest_attr(op);
    const int64_t packings = ((const dnri_packed_ingest_attr *)op->attr)->packings;
    const dnr_dtype t = dnri_graph_numerics(g)->compute;
    if (packings & DNRI_BLOCKS && (a->h % 2 || a->w % 2))
        return DNR_FAIL(DNR_EUSAGE, "use pictures of even sides",
                        "blocks of pictures of %lld x %lld", (long long)a->h, (long long)a->w);
    if (packings & DNRI_QUADS)
        DNR_TRY(dnri_out(g, op, DNRI_QUADS_OUT, dnri_packed_desc(t, a->n, a->h, a->w, DNRI_QUADS),
                         "quads"));
    if (packings & DNRI_BLOCKS)
        DNR_TRY(dnri_out(g, op, DNRI_BLOCKS_OUT, dnri_packed_desc(t, a->n, a->h, a->w, DNRI_BLOCKS),
                         "blocks"));
    return dnri_out(g, op, 1, dnri_desc4(DNR_I32, a->n, 1, 1, 1), "labels");
}

const dnri_op_def dnri_def_packed_ingest = {.name = "ingest.packed",
                                            .infer = packed_infer,
                                            .reclone = ingest_reclone,
                                            .cheap = true,
                                            .spare = 1u << DNRI_QUADS_OUT | 1u << DNRI_BLOCKS_OUT};

dnr_status dnri_ingest(dnr_graph *g, const dnri_ingest_attr *a, dnr_tid *x, dnr_tid *labels)
{
    dnr_tid in = dnri_slab_tensor(g, DNRI_CELL);
    dnr_tid out[] = {DNRI_NONE, DNRI_NONE, dnri_slab_tensor(g, DNRI_HEADER)};
    DNR_TRY(dnri_emit(g, &dnri_def_ingest, "input", a, sizeof *a, 1, &in, 3, out));
    *x = out[0];
    *labels = out[1];
    return DNR_OK;
}

/* The optimizer's ops work in place on slabs: nothing to infer. */
static dnr_status in_place(dnr_graph *g, dnri_op *op)
{
    return DNR_OK;
}

static double flat_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2.0 * (double)dnri_count(dnri_desc(g, op->in[0]));
}

static double fold_flops(const dnr_graph *g, const dnri_op *op)
{
    return 2.0 * (double)((const dnri_grad_fold_attr *)op->attr)->count;
}

static double sgd_flops(const dnr_graph *g, const dnri_op *op)
{
    return 8.0 * (double)dnri_count(dnri_desc(g, op->in[0]));
}

static double ema_flops(const dnr_graph *g, const dnri_op *op)
{
    return 3.0 *
           (double)(dnri_count(dnri_desc(g, op->in[0])) + dnri_count(dnri_desc(g, op->in[1])));
}

const dnri_op_def dnri_def_grad_fold = {
    .name = "grad.fold", .infer = in_place, .flops = fold_flops};
const dnri_op_def dnri_def_grad_stat = {
    .name = "grad.stat", .infer = in_place, .flops = flat_flops};
const dnri_op_def dnri_def_sgd = {.name = "sgd", .infer = in_place, .flops = sgd_flops};
const dnri_op_def dnri_def_ema = {.name = "ema", .infer = in_place, .flops = ema_flops};
const dnri_op_def dnri_def_scaler = {.name = "scaler", .infer = in_place};

dnr_status dnri_emit_update(dnr_graph *g, const dnri_update_opts *o)
{
    dnri_params_seal(dnri_graph_params(g));
    dnri_graph_phase(g, DNRI_UPDATE);
    dnr_tid grad = dnri_slab_tensor(g, DNRI_GRAD), header = dnri_slab_tensor(g, DNRI_HEADER);
    dnr_tid state = dnri_slab_tensor(g, DNRI_STATE);
    if (o->sums) {
        dnr_tid sum = dnri_slab_tensor(g, DNRI_GSUM);
        dnri_grad_fold_attr all = {0, dnri_params_flat(dnri_graph_params(g))};
        if (!o->reduced)
            DNR_TRY(dnri_emit(g, &dnri_def_grad_fold, "update", &all, sizeof all, 2,
                              (dnr_tid[]){grad, header}, 1, &sum));
        grad = sum;
    }
    if (!o->last)
        return DNR_OK;
    if (o->reduced)
        DNR_TRY(dnri_emit_reduced(g, grad));
    DNR_TRY(dnri_emit(g, &dnri_def_grad_stat, "update", NULL, 0, 1, &grad, 1, (dnr_tid[]){state}));
    const dnri_numerics *num = dnri_graph_numerics(g);
    dnr_tid out[] = {dnri_slab_tensor(g, DNRI_MASTER), dnri_slab_tensor(g, DNRI_MOMENTUM),
                     num->compute == num->master ? DNRI_NONE : dnri_slab_tensor(g, DNRI_WEIGHT)};
    DNR_TRY(dnri_emit(g, &dnri_def_sgd, "update", &o->sgd, sizeof o->sgd, 3,
                      (dnr_tid[]){grad, header, state}, 3, out));
    if (o->ema > 0) {
        dnri_ema_attr ema = {o->ema};
        dnr_tid from[] = {out[0], dnri_slab_tensor(g, DNRI_BUFFER), state};
        dnr_tid to[] = {dnri_slab_tensor(g, DNRI_EMA), dnri_slab_tensor(g, DNRI_EMA_BUFFER)};
        DNR_TRY(dnri_emit(g, &dnri_def_ema, "update", &ema, sizeof ema, 3, from, 2, to));
    }
    dnri_scaler_attr scaler = {o->sgd.scaled};
    return dnri_emit(g, &dnri_def_scaler, "update", &scaler, sizeof scaler, 0, NULL, 1, &state);
}

unsigned char *dnri_decay_map(const dnri_params *p, bool decay_norm_bias)
{
    unsigned char *map = calloc((size_t)(dnri_params_flat(p) / DNRI_PARAM_ALIGN) + 1, 1);
    if (!map)
        return NULL;
    for (int i = 0; i < dnri_params_count(p); i++) {
        const dnri_param *x = dnri_params_at(p, i);
        if (x->kind != DNRI_RUNNING && dnri_param_decays(x, decay_norm_bias))
            memset(map + x->offset / DNRI_PARAM_ALIGN, 1,
                   (size_t)((x->count + DNRI_PARAM_ALIGN - 1) / DNRI_PARAM_ALIGN));
    }
    return map;
}
