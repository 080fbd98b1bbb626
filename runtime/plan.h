/* plan.h: a graph lowered for one device: a flat list of steps over planned memory.
 *
 * build: split what the back end lacks → lower → lifetimes to offsets. Takes no device memory.
 * bind:  addresses into every step, one warm-up run, capture. The warm-up runs on the store as it
 * is, so bind before the weights are initialised or loaded, and with the CELL pointing at a staged
 * slot. */
#ifndef DNR_PLAN_H
#define DNR_PLAN_H

#include "backend.h"
#include "bucket.h"

typedef struct dnri_plan dnri_plan;

/* Takes the graph over (frees it with the plan, or at once when it fails). `name`: "micro", "last",
 * "eval". */
dnr_status dnri_plan_build(dnr_graph *g, dnr_device *dev, const char *name,
                           const dnri_lower_opts *o, dnri_plan **out);
void dnri_plan_free(dnri_plan *p);
size_t dnri_plan_arena(const dnri_plan *p);       /* bytes at the peak, workspaces included */
size_t dnri_plan_activations(const dnri_plan *p); /* the same without workspaces */
dnr_status dnri_plan_bind(dnri_plan *p, dnri_store *store, void *arena, bool capture);
/* Enqueue: the ops of phase PREPARE, to be run once the weights have changed, or others have used the arena; a whole
 * pass; a pass of a graph that does not train, up to its loss. */
dnr_status dnri_plan_prepare(dnri_plan *p);
dnr_status dnri_plan_run(dnri_plan *p);
dnr_status dnri_plan_forward(dnri_plan *p);
void *dnri_plan_address(const dnri_plan *p, dnr_tid t); /* of a bound plan; NULL: not part of it */
/* A kept tensor after a run, as doubles; waits for the device. */
dnr_status dnri_plan_read(dnri_plan *p, dnr_tid t, double *host);
dnr_status dnri_plan_write(dnri_plan *p, dnr_tid t,
                           const double *host); /* before a run, likewise */
const dnr_graph *dnri_plan_graph(const dnri_plan *p);
/* What clones cost: bytes through memory, and operations at 150 for a byte, near what devices balance. */
double dnri_plan_recomputed(const dnri_plan *p);
/* The hash of ops, shapes, attributes and buckets. */
uint64_t dnri_plan_hash(const dnri_plan *p);
/* The hash of the implementations chosen, following `seed`. */
uint64_t dnri_plan_choices(const dnri_plan *p, uint64_t seed);

/* explain.c */
struct json_t;
void dnri_plan_explain(const dnri_plan *p, FILE *out);
struct json_t *dnri_plan_json(const dnri_plan *p); /* a new reference */

#endif
