/* graph.h: the mini-IR. A graph is a list of ops in order of execution over numbered tensors.
 *
 * A model writes the forward ops through layers/; everything else is a pass over the list: the
 * gradient walk (grad.c) appends backward ops, rewrites (rewrite.h) edit the list, the plan
 * (plan.h) lowers it. The first error sticks to the graph: later emits do nothing and return -1, so
 * builders need not check; dnri_graph_status (and every pass) reports it. */
#ifndef DNR_GRAPH_H
#define DNR_GRAPH_H

#include "store.h"

typedef int32_t dnr_tid; /* a tensor of a graph; < 0: none */
#define DNRI_NONE (-1)   /* an absent optional input, or an output that infer shall create */

typedef struct dnr_graph dnr_graph;
typedef struct dnri_op dnri_op;
typedef struct dnri_op_def dnri_op_def;

#define DNRI_MAX_IN  24
#define DNRI_MAX_OUT 24
#define DNRI_ATTR    96

typedef enum dnri_home { DNRI_ARENA, DNRI_STORE } dnri_home;

typedef struct dnri_tensor {
    char name[DNRI_NAME];
    dnr_desc desc;
    dnri_home home;
    dnri_role role; /* STORE: which slab, and */
    int param;      /* which parameter; -1 = the whole slab */
    bool wants_grad;
    bool keep; /* ARENA: stays readable after the program has run */
} dnri_tensor;

/* PREPARE: before the first pass over new weights, not in each; such ops stand first in the list and read the
 * store alone, and what they write lives as long as the plan. */
typedef enum dnri_phase { DNRI_FORWARD, DNRI_BACKWARD, DNRI_UPDATE, DNRI_PREPARE } dnri_phase;

struct dnri_op {
    const dnri_op_def *def;
    char name[DNRI_NAME]; /* of the layer: "layer1.0.conv1" */
    int n_in, n_out;
    dnr_tid in[DNRI_MAX_IN];   /* DNRI_NONE where an optional one is absent */
    dnr_tid out[DNRI_MAX_OUT]; /* likewise */
    int stage, block;          /* scope in the model, for recompute; -1 outside */
    dnri_phase phase;
    bool clone;                                /* made by the recompute rewrite */
    _Alignas(8) unsigned char attr[DNRI_ATTR]; /* the layer's own */
};

/* One kind of op, described once, for all back ends. */
struct dnri_op_def {
    const char *name; /* "conv.fprop" */
    /* Checks the inputs and attributes; sets the outputs through dnri_out. */
    dnr_status (*infer)(dnr_graph *g, dnri_op *op);
    /* Emits the backward ops. dy[i]: gradient of out[i], or DNRI_NONE. Must set dx[j] for each
     * input j that wants a gradient and is no parameter; gradients of parameters go to
     * dnri_grad_of. NULL: none. */
    dnr_status (*grad)(dnr_graph *g, const dnri_op *op, const dnr_tid dy[], dnr_tid dx[]);
    /* Rewrites the op into simpler ones for a back end that lacks it: emits them in its place (the
     * graph routes emits there), writing to the same outputs. NULL: cannot be split. */
    dnr_status (*expand)(dnr_graph *g, const dnri_op *op);
    /* For recompute: turns the copy `op` of a forward op into one without side effects that gives
     * the same bits. `from` is the original (a norm reads the statistics that it saved). NULL: a
     * copy will do. */
    void (*reclone)(const dnri_op *from, dnri_op *op);
    /* Floating-point operations (a multiply-add is two). NULL: counts as 0. */
    double (*flops)(const dnr_graph *g, const dnri_op *op);
    /* Bytes of the inputs that are not read: what strides pass over. NULL: all are. */
    double (*unread)(const dnr_graph *g, const dnri_op *op);
    /* Bit j of takes[k]: element i of output k needs input j at element i alone (beside sums over it), so that it may
     * be written over that input where it dies, by a back end that can (dnri_step.in_place). */
    unsigned takes[DNRI_MAX_OUT];
    bool cheap;     /* bound by memory: DNR_RECOMPUTE_CHEAP may clone it */
    bool small;     /* what it makes is small beside what it reads: kept, never made again */
    unsigned spare; /* bit k: output k of a clone may be absent, where nothing reads it */
    bool is_loss;   /* the gradient walk starts here */
};

/* `training` chooses what layers emit (norm.train or norm.eval). The graph borrows `params`. */
dnr_graph *dnri_graph_new(dnri_params *params, const dnri_numerics *num, bool training);
void dnri_graph_free(dnr_graph *g);

bool dnri_graph_training(const dnr_graph *g);
const dnri_numerics *dnri_graph_numerics(const dnr_graph *g);
dnri_params *dnri_graph_params(const dnr_graph *g);
/* DNR_OK, or the first failure, which it makes this thread's last error again. */
dnr_status dnri_graph_status(const dnr_graph *g);

int dnri_graph_ops(const dnr_graph *g);
dnri_op *dnri_graph_op(dnr_graph *g, int i); /* valid until the next emit */
const dnri_op *dnri_graph_op_c(const dnr_graph *g, int i);
int dnri_graph_tensors(const dnr_graph *g);
const dnri_tensor *dnri_graph_tensor(const dnr_graph *g, dnr_tid t);
/* The op that writes t, or −1. */
int dnri_graph_writer(const dnr_graph *g, dnr_tid t);
/* The only op but `besides` (−1: none) that reads t, which it does once; −1 where there is none, or others do, or t is
 * read after the program. */
int dnri_graph_reader(const dnr_graph *g, dnr_tid t, int besides);
static inline const dnr_desc *dnri_desc(const dnr_graph *g, dnr_tid t)
{
    return &dnri_graph_tensor(g, t)->desc;
}

/* Scope of the ops emitted from now on: stage and block of the model, or -1, -1. */
void dnri_graph_scope(dnr_graph *g, int stage, int block);
/* Phase of the ops emitted from now on; a new graph is in FORWARD, the gradient walk leaves it in
 * UPDATE. */
void dnri_graph_phase(dnr_graph *g, dnri_phase phase);
/* Keeps this thread's last error as the graph's (if it is the first); for builders that check by
 * themselves. */
dnr_status dnri_graph_fail(dnr_graph *g);

/* A store tensor: a parameter (declared on first use) or a whole slab. Their types follow the role.
 */
dnr_tid dnri_param_tensor(dnr_graph *g, dnri_role role, const dnri_param *proto);
dnr_tid dnri_slab_tensor(dnr_graph *g, dnri_role role);
/* The gradient slot of parameter tensor `w`; fails the graph where it was taken before. */
dnr_tid dnri_grad_of(dnr_graph *g, dnr_tid w);
bool dnri_wants_grad(const dnr_graph *g, dnr_tid t); /* false for DNRI_NONE */
void dnri_keep(dnr_graph *g, dnr_tid t);

/* Emits an op and infers its outputs. `attr` is copied (attr_size <= DNRI_ATTR). out[i] = DNRI_NONE
 * asks for a new arena tensor (infer may leave it out), another value for an existing one; the tids
 * are written back. */
dnr_status dnri_emit(dnr_graph *g, const dnri_op_def *def, const char *name, const void *attr,
                     size_t attr_size, int n_in, const dnr_tid *in, int n_out, dnr_tid *out);

/* In infer: output i has shape `d`. Creates the tensor "NAME.suffix", or checks an existing one. */
dnr_status dnri_out(dnr_graph *g, dnri_op *op, int i, dnr_desc d, const char *suffix);

/* Appends the backward ops of the whole graph (grad.c). Exactly one op must be a loss. */
dnr_status dnri_graph_backward(dnr_graph *g);

/* a + b of equal shape, the engine's own: where a tensor has several consumers, gradients add. */
extern const dnri_op_def dnri_def_add;
dnr_tid dnri_add(dnr_graph *g, const char *name, dnr_tid a, dnr_tid b);

/* The plan's and rewrites' access: replaces the op list. Takes ownership of `ops` (from malloc). */
void dnri_graph_replace_ops(dnr_graph *g, dnri_op *ops, int n);
dnr_tid dnri_graph_new_tensor(dnr_graph *g, const dnri_tensor *proto);

#endif
