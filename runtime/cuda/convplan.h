/* convplan.h: convolutions through cuDNN's graph API. */
#ifndef DNR_CONVPLAN_H
#define DNR_CONVPLAN_H

#include "device.h"
#include "problem.h"
#include "../pins.h"

typedef struct dnri_cudnn_keep dnri_cudnn_keep;

/* A configuration of cuDNN's: an engine's global index, and the types and values of its knobs. */
#define DNRI_KNOBS 16
typedef struct dnri_cudnn_config {
    int64_t engine;
    int n; /* knobs; −1: more than there is room for */
    int64_t type[DNRI_KNOBS], value[DNRI_KNOBS];
} dnri_cudnn_config;

enum { DNRI_CANDIDATES = 10 }; /* that are timed, at most */

/* The plan chosen for a problem. */
typedef struct dnri_conv_plan {
    struct dnri_conv_plan *next;
    dnri_conv_problem problem;
    cudnnBackendDescriptor_t plan; /* NULL: cuDNN has none within these bounds */
    size_t workspace;
    float us; /* its time, or FLT_MAX where it was not timed */
    /* Of a problem that splits, the layer's verdict: one plan does it; fprop and a pass of our own do; a matrix product
     * does; not judged yet. Of one for which there is a convolution of our own: that does */
    enum { DNRI_UNJUDGED, DNRI_ONE_PLAN, DNRI_TWO_PASSES, DNRI_PRODUCT, DNRI_OWN } verdict;
    char impl[64]; /* "cudnn eng67 k2=4,13=0": engine and knobs */
    dnri_cudnn_config config;
    char *pin; /* the user's choice that it is; NULL: our own */
    /* what was timed for it, and the time of the other way where that was */
    int n_tried;
    dnr_tune_way tried[DNRI_CANDIDATES];
    char impls[DNRI_CANDIDATES][64]; /* of tried */
    float us_apart;
    dnri_cudnn_keep *keep;
} dnri_conv_plan;

/* ---- tune.c. Chosen once for each problem of a device, which owns the plan. */
dnr_status dnri_cudnn_choose(dnri_cuda *d, const dnri_conv_problem *p, dnri_conv_plan **out);
void dnri_cudnn_drop_plans(dnri_cuda *d);
/* Keeps a timed plan and its verdict for later starts, where there is a file for that. */
dnr_status dnri_cudnn_remember(dnri_cuda *d, const dnri_conv_plan *plan);
/* Times `work`, which enqueues kernels on `s` over `bytes` of noise of `type`: as plans are. FLT_MAX where there
 * is no memory for it. */
dnr_status dnri_cuda_time(dnri_cuda *d, int type, size_t bytes,
                          void (*work)(void *ctx, cudaStream_t s, void *memory), void *ctx,
                          float *us);

/* ---- pin.c */
/* The value of cudnn.pin.LAYER.PASS that gives this plan; `sums`: with a pass of our own for statistics. NULL: none
 * does. */
const char *dnri_cudnn_pin_text(const dnri_conv_plan *plan, bool sums, char text[DNRI_PIN]);
/* A pin that asks for the kernel of our own, of which there is one for the stem (layers/cuda/conv_packed.c); elsewhere it
 * is remarked upon. */
#define DNRI_PIN_OWN "k_stem"
/* The plan that the user has chosen for the op; NULL where there is none, or cuDNN does not make it, which is said
 * once. DNR_EUSAGE where the choice is of the wrong form. */
dnr_status dnri_cudnn_pinned(dnri_cuda *d, const dnri_conv_problem *p, const dnr_graph *g,
                             const dnri_op *op, const dnri_lower_opts *o, dnri_conv_plan **out);
/* That, else dnri_cudnn_choose's. */
dnr_status dnri_cudnn_choose_for(dnri_cuda *d, const dnri_conv_problem *p, const dnr_graph *g,
                                 const dnri_op *op, const dnri_lower_opts *o, dnri_conv_plan **out);
/* Tells o->tried what was timed for the op. `taken` differs from `tried` where a pass of our own does the rest. */
void dnri_cudnn_tell(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                     const dnri_conv_plan *tried, const dnri_conv_plan *taken);

/* ---- cudnn.c */
/* Where plans are built: a handle, or (in tests) the properties of a device that is not there. */
typedef struct dnri_cudnn_target {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t device;
    bool *said_refused; /* the remark was made */
} dnri_cudnn_target;

typedef struct dnri_conv_candidate {
    cudnnBackendDescriptor_t plan;
    size_t workspace;
    bool doubtful; /* may sum in less than fp32 */
    float us;      /* FLT_MAX: not timed, or left out */
    char impl[64];
    dnri_cudnn_config config;
} dnri_conv_candidate;

dnri_cudnn_keep *dnri_cudnn_keep_new(void); /* NULL: out of memory */
void dnri_cudnn_keep_free(dnri_cudnn_keep *k);

/* Up to `max` plans that compute `p` within its bounds, the likeliest to be fast first. They live in `k`. */
dnr_status dnri_cudnn_candidates(dnri_cudnn_keep *k, const dnri_cudnn_target *t,
                                 const dnri_conv_problem *p, int max, dnri_conv_candidate *c,
                                 int *n);

/* The plan of a known configuration; c->plan is NULL where cuDNN no longer makes it, or not within the bounds. */
dnr_status dnri_cudnn_rebuild(dnri_cudnn_keep *k, const dnri_cudnn_target *t,
                              const dnri_conv_problem *p, const dnri_cudnn_config *config,
                              dnri_conv_candidate *c);

/* The addresses of a plan's run; w is dw for DNRI_WGRAD. NULL but for DNRI_FPROP_STATS are the sums, but for
 * DNRI_FPROP_ACT bias and residual. */
typedef struct dnri_conv_at {
    void *x, *w, *y, *sum, *sqsum, *bias, *residual, *workspace;
} dnri_conv_at;
/* Destroy with cudnnBackendDestroyDescriptor, also after a failure where *out is not NULL. */
dnr_status dnri_cudnn_pack(cudnnBackendDescriptor_t *out, const dnri_conv_at *at);

#endif
