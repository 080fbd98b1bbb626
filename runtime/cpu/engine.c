/* engine.c: the ops that belong to no layer: ingest, add, and the optimizer's. */
#include "kernel.h"

#include "../engine_ops.h"
#include "../reduce.h"
#include "../slot.h"

#include <math.h>
#include <stdlib.h>

/* ---- ingest */

#define PERIOD 48 /* channels repeat every 3, vectors every 16 */

typedef struct ingest {
    dnri_binding b;
    dnri_ingest_attr a;
    bool bf16;
    int slices;
    const uint8_t *pixels; /* of the slot being read */
    float scale[PERIOD], shift[PERIOD];
} ingest;

/* begin and end count pixels */
DNRI_INLINE void ingest_pixels(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const ingest *s = ctx;
    const uint8_t *px = s->pixels;
    void *x = s->b.out[0];
    int64_t i = 3 * begin;
    for (; i + PERIOD <= 3 * end; i += PERIOD)
        DNRI_EACH (j, 0, PERIOD)
            dnri_st(x, i + j, (float)px[i + j] * s->scale[j] + s->shift[j], bf16);
    for (int j = 0; i + j < 3 * end; j++)
        dnri_st(x, i + j, (float)px[i + j] * s->scale[j] + s->shift[j], bf16);
}
DNRI_KERNEL(ingest_pixels);

static dnr_status ingest_run(void *ctx)
{
    ingest *s = ctx;
    const char *slot = *(const char *const *)s->b.in[0];
    if (s->b.out[1]) { /* else it is a clone */
        memcpy(s->b.out[2], slot, sizeof(dnri_header));
        memcpy(s->b.out[1], slot + dnri_slot_labels(), (size_t)s->a.n * sizeof(int32_t));
    }
    s->pixels = (const uint8_t *)slot + dnri_slot_pixels(s->a.n);
    dnri_slices(s->slices, s->a.n * s->a.h * s->a.w, ingest_pixels_k[s->bf16], s);
    return DNR_OK;
}

static dnr_status ingest_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                               const dnri_lower_opts *o, dnri_step *out)
{
    ingest *s = dnri_cpu_step(out, sizeof *s, ingest_run, 1);
    if (!s)
        return DNR_EMEM;
    memcpy(&s->a, op->attr, sizeof s->a);
    s->bf16 = dnri_desc(g, op->out[0])->dtype == DNR_BF16;
    s->slices = dnri_slices_for(dev, dnri_count(dnri_desc(g, op->out[0])));
    for (int j = 0; j < PERIOD; j++) {
        s->scale[j] = (float)s->a.scale[j % 3];
        s->shift[j] = (float)s->a.shift[j % 3];
    }
    return DNR_OK;
}

/* ---- add */

typedef struct add {
    dnri_binding b;
    int64_t n;
    bool bf16;
    int slices;
} add;

DNRI_INLINE void add_slice(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const add *s = ctx;
    const void *a = s->b.in[0], *b = s->b.in[1];
    void *y = s->b.out[0];
    DNRI_EACH (i, begin, end)
        dnri_st(y, i, dnri_ld(a, i, bf16) + dnri_ld(b, i, bf16), bf16);
}
DNRI_KERNEL(add_slice);

static dnr_status add_run(void *ctx)
{
    add *s = ctx;
    dnri_slices(s->slices, s->n, add_slice_k[s->bf16], s);
    return DNR_OK;
}

static dnr_status add_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    add *s = dnri_cpu_step(out, sizeof *s, add_run, 1);
    if (!s)
        return DNR_EMEM;
    out->in_place = true;
    s->n = dnri_count(dnri_desc(g, op->out[0]));
    s->bf16 = dnri_desc(g, op->out[0])->dtype == DNR_BF16;
    s->slices = dnri_slices_for(dev, s->n);
    return DNR_OK;
}

/* ---- the optimizer: flat slabs, cut at multiples of DNRI_PARAM_ALIGN (slices count such blocks) */

typedef struct flat {
    dnri_binding b;
    int64_t blocks;
    int slices;
} flat;

static dnr_status flat_lower(dnr_device *dev, const dnr_graph *g, size_t size,
                             dnr_status (*run)(void *), dnri_step *out)
{
    flat *s = dnri_cpu_step(out, size, run, 1);
    if (!s)
        return DNR_EMEM;
    int64_t n = dnri_params_flat(dnri_graph_params(g));
    s->blocks = n / DNRI_PARAM_ALIGN;
    s->slices = dnri_slices_for(dev, n);
    return DNR_OK;
}

typedef struct fold {
    flat f;
    int64_t first; /* block */
} fold;

DNRI_CLONES static void fold_add(void *ctx, int slice, int64_t begin, int64_t end)
{
    const fold *s = ctx;
    const float *grad = s->f.b.in[0];
    float *sum = s->f.b.out[0];
    DNRI_EACH (i, (s->first + begin) * DNRI_PARAM_ALIGN, (s->first + end) * DNRI_PARAM_ALIGN)
        sum[i] += grad[i];
}

static void fold_copy(void *ctx, int slice, int64_t begin, int64_t end)
{
    const fold *s = ctx;
    int64_t i = (s->first + begin) * DNRI_PARAM_ALIGN;
    memcpy((float *)s->f.b.out[0] + i, (const float *)s->f.b.in[0] + i,
           (size_t)((end - begin) * DNRI_PARAM_ALIGN) * sizeof(float));
}

static dnr_status fold_run(void *ctx)
{
    fold *s = ctx;
    const dnri_header *h = s->f.b.in[1];
    dnri_slices(s->f.slices, s->f.blocks, h->first ? fold_copy : fold_add, s);
    return DNR_OK;
}

static dnr_status fold_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_grad_fold_attr *a = (const dnri_grad_fold_attr *)op->attr;
    DNR_TRY(flat_lower(dev, g, sizeof(fold), fold_run, out));
    fold *s = out->ctx;
    s->first = a->offset / DNRI_PARAM_ALIGN;
    s->f.blocks = a->count / DNRI_PARAM_ALIGN;
    s->f.slices = dnri_slices_for(dev, a->count);
    return DNR_OK;
}

/* To and from the type in which gradients travel; at[0]: of the tensor that is read, at[1]: written. */
typedef struct wire {
    flat f;
    int64_t at[2];
} wire;

DNRI_CLONES static void wire_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wire *s = ctx;
    const float *in = (const float *)s->f.b.in[0] + s->at[0];
    uint16_t *out = s->f.b.out[0];
    DNRI_EACH (i, begin * DNRI_PARAM_ALIGN, end * DNRI_PARAM_ALIGN)
        dnri_st(out, i, in[i], true);
}

DNRI_CLONES static void unwire_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wire *s = ctx;
    const uint16_t *in = s->f.b.in[0];
    float *out = (float *)s->f.b.out[0] + s->at[1];
    DNRI_EACH (i, begin * DNRI_PARAM_ALIGN, end * DNRI_PARAM_ALIGN)
        out[i] = dnri_ld(in, i, true);
}

static dnr_status pack_run(void *ctx)
{
    wire *s = ctx;
    dnri_slices(s->f.slices, s->f.blocks, wire_slice, s);
    return DNR_OK;
}

static dnr_status unpack_run(void *ctx)
{
    wire *s = ctx;
    dnri_slices(s->f.slices, s->f.blocks, unwire_slice, s);
    return DNR_OK;
}

/* No loss is scaled on a CPU, so nothing travels as fp16. */
static bool wire_supports(dnr_device *dev, const dnr_graph *g, const dnri_op *op)
{
    return ((const dnri_wire_attr *)op->attr)->type == DNR_BF16;
}

static dnr_status wire_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    const dnri_wire_attr *a = (const dnri_wire_attr *)op->attr;
    bool pack = op->def == &dnri_def_wire_pack;
    DNR_TRY(flat_lower(dev, g, sizeof(wire), pack ? pack_run : unpack_run, out));
    wire *s = out->ctx;
    s->at[pack ? 0 : 1] = a->offset;
    s->f.blocks = a->count / DNRI_PARAM_ALIGN;
    s->f.slices = dnri_slices_for(dev, a->count);
    return DNR_OK;
}

/* workspace: double[slices], each slice's Σ g² */
DNRI_CLONES static void stat_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const flat *s = ctx;
    const float *g = s->b.in[0];
    double sum[DNRI_PARAM_ALIGN] = {0}, total = 0;
    for (int64_t i = begin * DNRI_PARAM_ALIGN; i < end * DNRI_PARAM_ALIGN; i += DNRI_PARAM_ALIGN)
        DNRI_EACH (j, 0, DNRI_PARAM_ALIGN)
            sum[j] += (double)g[i + j] * (double)g[i + j];
    for (int j = 0; j < DNRI_PARAM_ALIGN; j++)
        total += sum[j];
    ((double *)s->b.workspace)[slice] = total;
}

static dnr_status stat_run(void *ctx)
{
    flat *s = ctx;
    dnri_state *state = s->b.out[0];
    dnri_slices(s->slices, s->blocks, stat_slice, s);
    double sum = 0;
    for (int i = 0; i < s->slices; i++)
        sum += ((const double *)s->b.workspace)[i];
    if (!isfinite(sum)) /* the square of a finite float is finite in double */
        state->found_inf = 1;
    else if (state->loss_scale > 1)
        state->found_inf = 0;
    state->grad_sqsum = sum / ((double)state->loss_scale * (double)state->loss_scale);
    return DNR_OK;
}

static dnr_status stat_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                             const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(flat_lower(dev, g, sizeof(flat), stat_run, out));
    out->workspace = (size_t)((flat *)out->ctx)->slices * sizeof(double);
    return DNR_OK;
}

typedef struct sgd {
    flat f;
    dnri_sgd_attr a;
    bool bf16;             /* of the low-precision weights */
    float scale, lr;       /* of this step: gradients are multiplied by scale */
    unsigned char *decays; /* one byte for each block */
} sgd;

DNRI_INLINE void sgd_slice(void *ctx, int slice, int64_t begin, int64_t end, bool bf16)
{
    const sgd *s = ctx;
    const float *grad = s->f.b.in[0];
    float *master = s->f.b.out[0], *momentum = s->f.b.out[1];
    void *weight = s->f.b.out[2];
    const float mu = (float)s->a.momentum, lr = s->lr, scale = s->scale;
    const bool nesterov = s->a.nesterov;
    for (int64_t k = begin; k < end; k++) {
        const float decay = s->decays[k] ? (float)s->a.weight_decay : 0;
        DNRI_EACH (i, k * DNRI_PARAM_ALIGN, (k + 1) * DNRI_PARAM_ALIGN) {
            float w = master[i], d = grad[i] * scale + decay * w;
            float v = mu * momentum[i] + d;
            w -= lr * (nesterov ? d + mu * v : v);
            momentum[i] = v;
            master[i] = w;
            if (bf16)
                dnri_st(weight, i, w, true);
        }
    }
}
DNRI_KERNEL(sgd_slice);

static dnr_status sgd_run(void *ctx)
{
    sgd *s = ctx;
    const dnri_header *h = s->f.b.in[1];
    const dnri_state *state = s->f.b.in[2];
    if (state->found_inf)
        return DNR_OK;
    double scale = 1 / (double)state->loss_scale;
    if (s->a.clip_norm > 0)
        scale *= fmin(1, s->a.clip_norm / (sqrt(state->grad_sqsum) + 1e-6));
    s->scale = (float)scale;
    s->lr = (float)h->lr;
    dnri_slices(s->f.slices, s->f.blocks, sgd_slice_k[s->bf16], s);
    return DNR_OK;
}

static void sgd_drop(void *ctx)
{
    free(((sgd *)ctx)->decays);
    free(ctx);
}

static dnr_status sgd_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(flat_lower(dev, g, sizeof(sgd), sgd_run, out));
    sgd *s = out->ctx;
    out->drop = sgd_drop;
    memcpy(&s->a, op->attr, sizeof s->a);
    s->bf16 = op->out[2] != DNRI_NONE && dnri_desc(g, op->out[2])->dtype == DNR_BF16;
    s->decays = dnri_decay_map(dnri_graph_params(g), s->a.decay_norm_bias);
    return s->decays ? DNR_OK : DNR_FAIL_NOMEM(); /* the plan drops the step */
}

/* ---- ema: weights in slices, then the few running statistics */

typedef struct ema {
    flat f;
    dnri_ema_attr a;
    int64_t buffer_blocks;
} ema;

DNRI_INLINE void average(float *e, const float *w, int64_t begin, int64_t end, float share)
{
    DNRI_EACH (i, begin * DNRI_PARAM_ALIGN, end * DNRI_PARAM_ALIGN)
        e[i] += share * (w[i] - e[i]);
}

DNRI_CLONES static void ema_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const ema *s = ctx;
    average(s->f.b.out[0], s->f.b.in[0], begin, end, (float)(1 - s->a.decay));
}

DNRI_CLONES static void ema_buffers(void *ctx, int slice, int64_t begin, int64_t end)
{
    const ema *s = ctx;
    average(s->f.b.out[1], s->f.b.in[1], begin, end, (float)(1 - s->a.decay));
}

static dnr_status ema_run(void *ctx)
{
    ema *s = ctx;
    const dnri_state *state = s->f.b.in[2];
    if (state->found_inf)
        return DNR_OK;
    dnri_slices(s->f.slices, s->f.blocks, ema_slice, s);
    dnri_slices(1, s->buffer_blocks, ema_buffers, s);
    return DNR_OK;
}

static dnr_status ema_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                            const dnri_lower_opts *o, dnri_step *out)
{
    DNR_TRY(flat_lower(dev, g, sizeof(ema), ema_run, out));
    ema *s = out->ctx;
    memcpy(&s->a, op->attr, sizeof s->a);
    s->buffer_blocks = dnri_count(dnri_desc(g, op->in[1])) / DNRI_PARAM_ALIGN;
    return DNR_OK;
}

/* ---- scaler */

typedef struct scaler {
    dnri_binding b;
    bool scaled;
} scaler;

static dnr_status scaler_run(void *ctx)
{
    const scaler *s = ctx;
    dnri_state *state = s->b.out[0];
    state->steps++;
    if (!s->scaled)
        return DNR_OK;
    if (state->found_inf) {
        state->loss_scale *= DNRI_SCALE_BACKOFF;
        state->growth = 0;
        state->skipped++;
    } else if (++state->growth == DNRI_SCALE_INTERVAL) {
        if (isfinite(state->loss_scale * DNRI_SCALE_GROWTH))
            state->loss_scale *= DNRI_SCALE_GROWTH;
        state->growth = 0;
    }
    return DNR_OK;
}

static dnr_status scaler_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                               const dnri_lower_opts *o, dnri_step *out)
{
    scaler *s = dnri_cpu_step(out, sizeof *s, scaler_run, 1);
    if (!s)
        return DNR_EMEM;
    s->scaled = ((const dnri_scaler_attr *)op->attr)->scaled;
    return DNR_OK;
}

const dnri_lowering dnri_cpu_engine[] = {{&dnri_def_ingest, NULL, ingest_lower},
                                         {&dnri_def_add, NULL, add_lower},
                                         {&dnri_def_grad_fold, NULL, fold_lower},
                                         {&dnri_def_grad_stat, NULL, stat_lower},
                                         {&dnri_def_sgd, NULL, sgd_lower},
                                         {&dnri_def_ema, NULL, ema_lower},
                                         {&dnri_def_scaler, NULL, scaler_lower},
                                         {&dnri_def_wire_pack, wire_supports, wire_lower},
                                         {&dnri_def_wire_unpack, wire_supports, wire_lower},
                                         {0}};
