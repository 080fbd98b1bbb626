/* engine.c: lowers the ops that belong to no layer. */
#include "../engine_ops.h"
#include "../reduce.h"
#include "../slot.h"
#include "device.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>

static dnr_status run_ingest(dnri_cuda_op *s)
{
    const dnri_ingest_attr *a = (const dnri_ingest_attr *)s->op.attr;
    float scale[3], shift[3];
    for (int c = 0; c < 3; c++) {
        scale[c] = (float)a->scale[c];
        shift[c] = (float)a->shift[c];
    }
    if (s->op.def == &dnri_def_packed_ingest) {
        const bool quads = s->op.out[DNRI_QUADS_OUT] >= 0;
        k_packed_ingest(s->stream, (int)s->out[quads ? DNRI_QUADS_OUT : DNRI_BLOCKS_OUT].dtype,
                        s->dev->sms, s->at.in[0], a->n, a->h, a->w, (int64_t)dnri_slot_pixels(a->n),
                        scale, shift, s->at.out[DNRI_QUADS_OUT], s->at.out[DNRI_BLOCKS_OUT],
                        s->at.out[1], s->at.out[2]);
        return DNR_OK;
    }
    k_ingest(s->stream, (int)s->out[0].dtype, s->dev->sms, s->at.in[0], a->n,
             a->n * a->h * a->w * 3, (int64_t)dnri_slot_pixels(a->n), scale, shift, s->at.out[0],
             s->at.out[1], s->at.out[2]);
    return DNR_OK;
}

static dnr_status lower_ingest(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                               const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_ingest, 1, "k_ingest", out, NULL);
}

static bool takes_packed(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    const dnri_ingest_attr *a = (const dnri_ingest_attr *)op->attr;
    return a->h % 2 == 0 && a->w % 2 == 0 && dnri_dtype_size(dnri_graph_numerics(g)->compute) == 2;
}

static dnr_status lower_packed_ingest(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                      const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_ingest, 1, "k_packed_ingest", out, NULL);
}

static dnr_status run_add(dnri_cuda_op *s)
{
    k_add(s->stream, (int)s->out[0].dtype, s->dev->sms, s->at.in[0], s->at.in[1], s->at.out[0],
          dnri_count(&s->out[0]));
    return DNR_OK;
}

static dnr_status lower_add(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_add, 1, "k_add", out, NULL));
    out->in_place = true;
    return DNR_OK;
}

static dnr_status run_fold(dnri_cuda_op *s)
{
    const dnri_grad_fold_attr *a = (const dnri_grad_fold_attr *)s->op.attr;
    k_fold(s->stream, s->dev->sms, (const float *)s->at.in[0] + a->offset, s->at.in[1],
           (float *)s->at.out[0] + a->offset, a->count);
    return DNR_OK;
}

static dnr_status lower_fold(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_fold, 1, "k_fold", out, NULL);
}

static dnr_status run_wire(dnri_cuda_op *s)
{
    const dnri_wire_attr *a = (const dnri_wire_attr *)s->op.attr;
    if (s->op.def == &dnri_def_wire_pack)
        k_wire_pack(s->stream, (int)a->type, s->dev->sms, (const float *)s->at.in[0] + a->offset,
                    s->at.out[0], a->count);
    else
        k_wire_unpack(s->stream, (int)a->type, s->dev->sms, s->at.in[0],
                      (float *)s->at.out[0] + a->offset, a->count);
    return DNR_OK;
}

static dnr_status lower_wire(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_wire, 1,
                           op->def == &dnri_def_wire_pack ? "k_wire_pack" : "k_wire_unpack", out,
                           NULL);
}

static dnr_status run_stat(dnri_cuda_op *s)
{
    k_stat(s->stream, s->dev->sms, s->at.in[0], dnri_count(&s->in[0]), s->at.workspace,
           s->at.out[0]);
    return DNR_OK;
}

static dnr_status lower_stat(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(dnri_cuda_lower(dev, g, op, run_stat, 2, "k_stat in two stages", out, NULL));
    out->workspace = K_STAT_BLOCKS * sizeof(k_stat_part);
    return DNR_OK;
}

static dnr_status run_sgd(dnri_cuda_op *s)
{
    const dnri_sgd_attr *a = (const dnri_sgd_attr *)s->op.attr;
    k_sgd_args args = {.grad = s->at.in[0],
                       .header = s->at.in[1],
                       .state = s->at.in[2],
                       .master = s->at.out[0],
                       .momentum = s->at.out[1],
                       .weight = s->at.out[2],
                       .decay = s->own,
                       .n = dnri_count(&s->in[0]),
                       .mu = (float)a->momentum,
                       .weight_decay = (float)a->weight_decay,
                       .clip = a->clip_norm,
                       .nesterov = a->nesterov};
    k_sgd(s->stream, (int)(s->op.out[2] < 0 ? DNR_F32 : s->out[2].dtype), s->dev->sms, &args);
    return DNR_OK;
}

static void release_sgd(dnri_cuda_op *s)
{
    dnri_cuda_mfree(s->dev, s->own);
}

static dnr_status lower_sgd(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_params *params = dnri_graph_params(g);
    const dnri_sgd_attr *a = (const dnri_sgd_attr *)op->attr;
    size_t bytes = (size_t)(dnri_params_flat(params) / DNRI_PARAM_ALIGN);
    unsigned char *map = dnri_decay_map(params, a->decay_norm_bias);
    if (!map)
        return DNR_FAIL_NOMEM();
    dnri_cuda_op *s;
    dnr_status st = dnri_cuda_lower(dev, g, op, run_sgd, 1, "k_sgd", out, &s);
    if (st == DNR_OK) {
        s->release = release_sgd;
        st = dnri_cuda_malloc(s->dev, bytes, "the decay flags", &s->own);
        if (st == DNR_OK)
            st = dnri_copy_now(dev, s->own, map, bytes);
    }
    free(map);
    return st;
}

static dnr_status run_ema(dnri_cuda_op *s)
{
    const dnri_ema_attr *a = (const dnri_ema_attr *)s->op.attr;
    for (int k = 0; k < 2; k++)
        k_ema(s->stream, s->dev->sms, (float)(1 - a->decay), s->at.in[2], s->at.in[k], s->at.out[k],
              dnri_count(&s->in[k]));
    return DNR_OK;
}

static dnr_status lower_ema(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_ema, 2, "k_ema", out, NULL);
}

static dnr_status run_scaler(dnri_cuda_op *s)
{
    k_scaler(s->stream, ((const dnri_scaler_attr *)s->op.attr)->scaled, s->at.out[0]);
    return DNR_OK;
}

static dnr_status lower_scaler(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                               const dnri_lower_opts *o, dnri_step *out)
{
    return dnri_cuda_lower(dev, g, op, run_scaler, 1, "k_scaler", out, NULL);
}

const dnri_lowering dnri_cuda_engine[] = {
    {&dnri_def_ingest, NULL, lower_ingest},
    {&dnri_def_packed_ingest, takes_packed, lower_packed_ingest},
    {&dnri_def_add, NULL, lower_add},
    {&dnri_def_grad_fold, NULL, lower_fold},
    {&dnri_def_grad_stat, NULL, lower_stat},
    {&dnri_def_sgd, NULL, lower_sgd},
    {&dnri_def_ema, NULL, lower_ema},
    {&dnri_def_scaler, NULL, lower_scaler},
    {&dnri_def_wire_pack, NULL, lower_wire},
    {&dnri_def_wire_unpack, NULL, lower_wire},
    {0},
};
