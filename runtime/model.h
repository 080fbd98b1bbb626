/* model.h: the seam between the trainer and models/: a model is a function that writes forward ops.
 */
#ifndef DNR_MODEL_H
#define DNR_MODEL_H

#include "graph.h"

/* Writes the model from picture tensor `x` [n,h,w,3] to logits [n,1,1,classes]. The graph keeps the
 * first error. */
typedef dnr_tid (*dnri_model_fn)(dnr_graph *g, dnr_tid x, const dnr_model_opts *o);

/* In models/. DNR_EUSAGE, naming the known ones, when there is no model of that name. */
dnr_status dnri_model_find(const char *name, dnri_model_fn *out);

/* In layers/loss.c: emits the loss over logits and labels (see layers.h). */
dnr_status dnri_model_loss(dnr_graph *g, dnr_tid logits, dnr_tid labels, double smoothing,
                           double grad_scale);

/* In layers/sync_norm.c: rewrites a training graph, after its gradient walk, so that batch norms work on the batches of all
 * ranks, or of `group` ranks each where that is not 0. */
dnr_status dnri_model_sync_norms(dnr_graph *g, int ranks, int group);

/* In layers/fuse.c: rewrites a training graph, after its gradient walk and before recomputation, into an equal
 * one with fewer passes over memory. */
typedef struct dnri_fuse_opts {
    dnr_fusion fusion;
    dnr_recompute recompute;
    int64_t algbn_rows;  /* see dnri_fuse_algbn; 0 = what pays */
    size_t bucket_bytes; /* of communication; 0 = the default */
} dnri_fuse_opts;
dnr_status dnri_model_fuse(dnr_graph *g, dnr_device *dev, const dnri_fuse_opts *o);

/* In layers/fuse_eval.c: the same for a graph that evaluates. Norms are folded into convolutions, by ops of phase
 * PREPARE. */
dnr_status dnri_model_fuse_eval(dnr_graph *g, dnr_device *dev, dnr_fusion fusion);

#endif
