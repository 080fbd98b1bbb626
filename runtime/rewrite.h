/* rewrite.h: passes that edit the op list after the gradient walk. Each leaves an equal graph. */
#ifndef DNR_REWRITE_H
#define DNR_REWRITE_H

#include "graph.h"

/* Recomputation (gradient checkpointing, Chen et al. 2016, arXiv:1604.06174): backward ops of a
 * segment (block or stage) read clones of the forward tensors, recomputed just before them from
 * what enters the segment, so that memory falls out of lifetimes. Clones have no side effects and
 * give the same bits. DNR_RECOMPUTE_CHEAP clones single ops, each before its first reader; the
 * other modes do so with pictures, which the slot still has (NONE: where they are in two packings). The segment that backward visits first is left alone: its tensors are still
 * alive then. */
dnr_status dnri_rewrite_recompute(dnr_graph *g, dnr_recompute mode);
/* DNR_RECOMPUTE_NONE, but ops that DNR_RECOMPUTE_CHEAP would clone are cloned until `bytes` that backward kept are
 * remade, or all can be. */
dnr_status dnri_rewrite_remake(dnr_graph *g, size_t bytes);

struct dnri_backend;
/* Splits every op that the back end does not support, through its def's expand. DNR_EUSAGE where an
 * op can be neither lowered nor split. */
dnr_status dnri_rewrite_split(dnr_graph *g, dnr_device *dev);

#endif
