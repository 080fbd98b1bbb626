/* plan_internal.h: the plan's inside, shared by plan.c and explain.c. */
#ifndef DNR_PLAN_INTERNAL_H
#define DNR_PLAN_INTERNAL_H

#include "arena.h"
#include "plan.h"

#define DNRI_ARENA_ALIGN 256

/* What is run by itself. A training pass is all FORWARD; another one ends before its loss. */
enum { DNRI_PART_PREPARE, DNRI_PART_FORWARD, DNRI_PART_LOSS, DNRI_PARTS };

struct dnri_plan {
    char name[16];
    dnr_device *dev;
    dnr_graph *g;
    int n;            /* ops */
    dnri_step *steps; /* one for each op */
    dnri_span *spans; /* one for each tensor (size 0: not in the arena), then one for each op's
                         workspace */
    int n_tensors;
    dnr_tid *
        takes; /* by tensor: the one whose place it takes as that one dies (dnri_op_def.takes), or −1 */
    size_t arena, activations;
    void *base; /* the arena's address, once bound */
    dnri_store *store;
    int *
        join; /* by op: 0, or it runs on a lane of its own, and this op is the first that waits for it */
    bool forks;                /* some do */
    int end[DNRI_PARTS];       /* where the ops of each part end: the next one begins there */
    void *program[DNRI_PARTS]; /* captured; NULL: run step by step */
    double *us;                /* microseconds of each op, where measured */
    /* with them: what the device does in a second at best, as the same measurement found */
    double copy_rate, flop_rate; /* bytes read and written, operations */
    size_t bucket_bytes;
};

/* explain.c: bytes that an op must move at least, each tensor it names once; operations */
double dnri_op_bytes(const dnri_plan *p, const dnri_op *op);
double dnri_op_flops(const dnri_plan *p, const dnri_op *op);

static inline const dnri_span *dnri_workspace_span(const dnri_plan *p, int op)
{
    return &p->spans[p->n_tensors + op];
}

/* Is span k that of a tensor which op i writes in the place of another, which counts until then? */
static inline bool dnri_taken_over(const dnri_plan *p, int k, int i)
{
    return k < p->n_tensors && p->takes[k] >= 0 && p->spans[k].first == i;
}

#endif
