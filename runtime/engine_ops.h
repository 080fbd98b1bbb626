/* engine_ops.h: the ops that belong to no layer: feeding a batch, adding gradients, the optimizer.
 * Lowered in runtime/cpu, runtime/cuda and tests/ref. */
#ifndef DNR_ENGINE_OPS_H
#define DNR_ENGINE_OPS_H

#include "graph.h"

/* ingest: in {CELL}, out {x, labels, HEADER}; a recompute clone makes x alone. The cell holds the address of a fed slot (slot.h).
 *   header ← the slot's; labels int32[n,1,1,1]; x[n,h,w,3] = pixel · scale[c] + shift[c], that is
 *   (pixel/255 − mean)/std, in the compute type. */
typedef struct dnri_ingest_attr {
    int64_t n, h, w;
    double scale[3], shift[3];
} dnri_ingest_attr;
extern const dnri_op_def dnri_def_ingest;
dnr_status dnri_ingest(dnr_graph *g, const dnri_ingest_attr *a, dnr_tid *x, dnr_tid *labels);

/* ingest.packed: in {CELL}, out {quads?, labels, HEADER, blocks?}: the same, but x lies as the first layer's ops on a
 * device like it, with zeros as fourth channel, in one or both of two ways:
 *   QUADS  x[n,h,w,4]
 *   BLOCKS x[n,h/2,w/2,16]: channel (u·2 + v)·4 + c at (i, j) is channel c at (2i + u, 2j + v) */
typedef enum dnri_packing { DNRI_QUADS = 1, DNRI_BLOCKS = 2 } dnri_packing;
enum { DNRI_QUADS_OUT = 0, DNRI_BLOCKS_OUT = 3 };
typedef struct dnri_packed_ingest_attr {
    dnri_ingest_attr in; /* first */
    int64_t packings;    /* a set of dnri_packing */
} dnri_packed_ingest_attr;
extern const dnri_op_def dnri_def_packed_ingest;
/* The shape of packed pictures, n of h x w. */
dnr_desc dnri_packed_desc(dnr_dtype t, int64_t n, int64_t h, int64_t w, int64_t packing);

/* grad.fold: in {GRAD, HEADER}, out {GSUM}. gsum ← first ? grad : gsum + grad, of `count` elements from `offset`,
 * both multiples of DNRI_PARAM_ALIGN. */
typedef struct dnri_grad_fold_attr {
    int64_t offset, count;
} dnri_grad_fold_attr;
extern const dnri_op_def dnri_def_grad_fold;

/* grad.stat: in {GRAD or GSUM}, out {STATE}. state.found_inf ← any element not finite (0 or 1); once
 * set it stays so where state.loss_scale ≤ 1: then no step is left that could be better (diagnose.c).
 * state.grad_sqsum ← Σ (g / loss_scale)², in double or by pairwise fp32 sums, in a fixed order. */
extern const dnri_op_def dnri_def_grad_stat;

/* sgd: in {GRAD or GSUM, HEADER, STATE}, out {MASTER, MOMENTUM, WEIGHT or NONE where it aliases
 * MASTER}. PyTorch's SGD (dampening 0), skipped whole when state.found_inf: g ←
 * grad / loss_scale; if clip: g ← g · min(1, clip / (sqrt(grad_sqsum) + 1e-6)) d ← g + decay·w
 * (parameters that decay); v ← momentum·v + d; w ← w − lr·(nesterov ? d + momentum·v : v) weight ←
 * w in the compute type */
typedef struct dnri_sgd_attr {
    double momentum, weight_decay, clip_norm; /* clip_norm 0 = off */
    bool nesterov, decay_norm_bias;
    bool scaled; /* the loss is: for the scaler */
} dnri_sgd_attr;
extern const dnri_op_def dnri_def_sgd;

/* ema: in {MASTER, BUFFER, STATE}, out {EMA, EMA_BUFFER}; after sgd, skipped with it. For weights and
 * running statistics alike e ← e + (1 − decay)·(w − e): timm's ModelEmaV2, torch's AveragedModel with
 * use_buffers. */
typedef struct dnri_ema_attr {
    double decay; /* 0 = off */
} dnri_ema_attr;
extern const dnri_op_def dnri_def_ema;

/* scaler: in {}, out {STATE}; after sgd. steps += 1; when attr.scaled, GradScaler.update:
 *   found_inf: scale ← scale/2, growth ← 0, skipped += 1; else growth += 1, and at 2000 scale ←
 * 2·scale where that is finite, growth ← 0. */
typedef struct dnri_scaler_attr {
    bool scaled;
} dnri_scaler_attr;
extern const dnri_op_def dnri_def_scaler;

/* Emits what follows backward in the `last` program: fold (accumulate > 1) or the wait for sums over ranks, stat, sgd, ema (where it has a decay), scaler. In the `micro` program only the fold. */
typedef struct dnri_update_opts {
    dnri_sgd_attr sgd;
    bool sums; /* accumulate > 1 */
    bool last;
    bool reduced; /* by dnri_rewrite_reduce, which folds, too */
    double ema;   /* decay of the averages; 0 = none */
} dnri_update_opts;
dnr_status dnri_emit_update(dnr_graph *g, const dnri_update_opts *o);

/* The decay flag of each DNRI_PARAM_ALIGN elements of the flat slab, one byte each, for sgd. From
 * malloc. */
unsigned char *dnri_decay_map(const dnri_params *p, bool decay_norm_bias);

#endif
