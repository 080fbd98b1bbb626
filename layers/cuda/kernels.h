/* kernels.h: the layers' own kernels. Read by C and by CUDA C++. Tensors are NHWC and dense; `type` is a
 * dnr_dtype (F16, BF16, F32) of the activations, everything else is fp32. `sms`: multiprocessors. */
#ifndef DNR_LAYERS_CUDA_KERNELS_H
#define DNR_LAYERS_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "../../runtime/cuda/kernels.h"
#include "../../runtime/state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- norm.cu: batch norm over `rows` = N·H·W of `c` channels. */
typedef struct k_norm_args {
    int type, sms;
    int64_t rows, c;
    const void *x, *residual; /* residual may be NULL */
    const float *gamma, *beta;
    float *mean, *invstd; /* k_norm_eval: running mean and variance */
    float *running_mean, *running_var;
    float *sum, *sqsum; /* of x; else NULL */
    int64_t all_rows;   /* of all ranks, where sum and sqsum are theirs; else 0 */
    uint8_t
        *mask; /* a bit for each element of y, where wanted: relu, residual, 16 bits, c % 8 == 0 */
    void *y;
    double eps, momentum;
    bool relu;
} k_norm_args;

/* Bytes of workspace of k_norm_stats and k_norm_bwd. */
size_t k_norm_workspace(int type, int sms, int64_t c);
/* mean, invstd and the running statistics from x, in a fixed order; or only sum and sqsum, where there is room
 * for them */
void k_norm_stats(cudaStream_t s, const k_norm_args *a, void *workspace);
/* mean, invstd, the running statistics and y from sum and sqsum */
void k_norm_train(cudaStream_t s, const k_norm_args *a);
/* y from mean and invstd; or from running statistics */
void k_norm_apply(cudaStream_t s, const k_norm_args *a);
void k_norm_eval(cudaStream_t s, const k_norm_args *a);

typedef struct k_norm_bwd_args {
    int type, sms;
    int64_t rows, c;
    const void *x, *y, *dy,
        *dy2;            /* y: mask of a norm with residual; NULL: mask from x. dy2 may be NULL */
    const uint8_t *mask; /* in the place of y */
    const float *gamma, *beta, *mean, *invstd;
    void *dx, *dz; /* dz: gradient of the residual; may be NULL */
    float *dgamma, *dbeta;
    float *sum, *dot; /* dbeta and dgamma once more, to be summed over ranks; may be NULL */
    int64_t all_rows; /* of all ranks, where dbeta and dgamma are theirs; else 0 */
    bool relu;
    int h, w; /* of dy where dy2 has every second row and column alone, k_norm_dz only; else 0 */
} k_norm_bwd_args;
void k_norm_bwd(cudaStream_t s, const k_norm_bwd_args *a, void *workspace);
/* Its two halves, for several ranks: dgamma, dbeta and dz (where wanted), with the workspace; dx from dgamma, dbeta and y
 * (relu) */
void k_norm_sync_sums(cudaStream_t s, const k_norm_bwd_args *a, void *workspace);
void k_norm_sync_dx(cudaStream_t s, const k_norm_bwd_args *a);
/* dz (where wanted) and dbeta from dy, dy2, and y or mask where given; the same workspace */
void k_norm_dz(cudaStream_t s, const k_norm_bwd_args *a, void *workspace);
/* Column sums of x [rows,c] by blocks, part [block][c]; returns how many, at most k_norm_workspace bytes */
int k_column_parts(cudaStream_t s, int type, int sms, const void *x, int64_t rows, int64_t c,
                   float *part);
/* dbeta and dgamma from part: [block][Σ dz, Σ dz·(x − mean)][c]; or dbeta alone from [block][Σ dz][c], dgamma NULL.
 * invstd NULL: both sums as they are */
void k_norm_bwd_merge(cudaStream_t s, const float *part, int blocks, int64_t c, const float *invstd,
                      float *dgamma, float *dbeta);

/* ---- norm_once.cu: the same in one launch, for what shared memory holds a good part of. */
/* How much of its tensors such a launch keeps, of 1; 0: it does not take them */
double k_norm_once_share(const k_device *d, int type, int64_t rows, int64_t c, bool backward);
size_t k_norm_once_workspace(const k_device *d);
/* mean, invstd, the running statistics and y from x */
cudaError_t k_norm_train_once(cudaStream_t s, const k_device *d, const k_norm_args *a,
                              void *workspace);
/* as k_norm_bwd, but dz comes rounded to the type where there are dy and dy2 */
cudaError_t k_norm_bwd_once(cudaStream_t s, const k_device *d, const k_norm_bwd_args *a,
                            void *workspace);

/* ---- act.cu: n elements */
void k_relu(cudaStream_t s, int type, int sms, const void *x, void *y, int64_t n);
void k_relu_bwd(cudaStream_t s, int type, int sms, const void *y, const void *dy, void *dx,
                int64_t n);

/* ---- pool.cu */
typedef struct k_pool_args {
    int type, sms;
    int n, h, w, c, p, q; /* x [n,h,w,c], y [n,p,q,c] */
    int kernel, stride, pad;
    bool positive; /* max pool: index 255 unless y > 0 */
} k_pool_args;
void k_max_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y, uint8_t *index);
void k_max_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, const uint8_t *index,
                    void *dx);
void k_avg_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y);
void k_avg_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, void *dx);
/* averages over h·w pixels */
void k_global_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y);
void k_global_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, void *dx);

/* ---- norm_pool.cu: norm with ReLU, and max pool of windows that k_norm_pool_takes. */
bool k_norm_pool_takes(const k_pool_args *g);
size_t k_norm_pool_bwd_workspace(const k_pool_args *g);
/* y [n,p,q,c] from x [n,h,w,c], mean and invstd; these and the running statistics from sum and sqsum where they are
 * there */
void k_norm_pool_apply(cudaStream_t s, const k_norm_args *a, const k_pool_args *g, uint8_t *index);
/* a->y, a->dy and a->dy2: of windows; a->x and a->dx: of pixels */
void k_norm_pool_bwd(cudaStream_t s, const k_norm_bwd_args *a, const k_pool_args *g,
                     const uint8_t *index, void *workspace);

/* ---- algbn.cu: algebraic batch norm (layers.h). All channels are multiples of 8, those of a at most so many. */
#define K_ALGBN_CHANNELS 1024

/* ---- gram_merge.cu */

typedef struct k_gram_merge_args {
    const float *part; /* [parts][n] */
    float *p;          /* [n] = their sum, added up in fp64 but for eights */
    int parts;
    bool add; /* to what p was */
    int64_t n;
    const float *columns; /* [blocks][c] */
    float *sum;           /* [c] = their sum; or NULL */
    int blocks;
    int64_t c;
    /* p is [c,c] and symmetric: of a part only tiles of 16 x 16 on and below the diagonal are there */
    bool lower;
} k_gram_merge_args;
void k_gram_merge(cudaStream_t s, const k_gram_merge_args *a);

/* ---- gram.cu: parts of aᵀ·a and of a's column sums, for k_gram_merge with `lower`. F16 and BF16, on sm_80 and later;
 * c is 64, 128 or 256. */
typedef struct k_gram_args {
    int type, sms, cc;
    int64_t rows;
    int c;
    const void *a;  /* [rows,c] */
    float *part;    /* [parts][c][c] */
    float *columns; /* [parts][c] */
} k_gram_args;
bool k_gram_takes(const k_gram_args *a); /* these from type, sms, cc, rows and c */
int k_gram_parts(const k_gram_args *a);
void k_gram(cudaStream_t s, const k_gram_args *a);

typedef struct k_algbn_args {
    int type;
    int64_t rows, k, c;                     /* M; w [k,c] */
    const void *w;                          /* of `type`, as are wa, m and constant */
    const float *p, *gram, *sum_a, *sum_dz; /* [k,c], [c,c], [c], [k] */
    const float *gamma, *mean, *invstd;     /* [k] */
    float *dw, *dgamma, *dbeta;             /* [k,c], [k], [k] */
    void *wa, *m, *constant;                /* [k,c], [c,c], [2·c] */
    bool first;
} k_algbn_args;
size_t k_algbn_workspace(int64_t k, int64_t c);
/* State's algbn_… are set anew where `first` and header->first. */
void k_algbn_coef(cudaStream_t s, const k_algbn_args *a, const dnri_header *header,
                  dnri_state *state, void *workspace);

/* ---- algbn_stats.cu: its forward pass. The state likewise. */
typedef struct k_algbn_stats_args {
    int type;
    int64_t rows, k, c;                                /* M; w [k,c] */
    const void *a, *w;                                 /* a [rows,c] */
    const float *gram, *sum_a;                         /* [c,c], [c] */
    float *running_mean, *running_var, *mean, *invstd; /* [k] */
    double eps, momentum, guard; /* from which r on (layers.h) the variance is made of a */
    bool first;
} k_algbn_stats_args;
void k_algbn_stats(cudaStream_t s, const k_algbn_stats_args *a, const dnri_header *header,
                   dnri_state *state);

typedef struct k_algbn_fold_args {
    int type;
    int64_t rows, k, c;
    const void *w;
    const float *sum_a, *gamma, *beta, *invstd;
    void *wf;
    float *shift;
    void *low; /* of `type`, [k]; or NULL */
} k_algbn_fold_args;
void k_algbn_fold(cudaStream_t s, const k_algbn_fold_args *a);

/* ---- narrow.cu, and on sm_90 wide.cu where it may: d [rows,n] = act([a0 | a1] · [b0 ; b1] + shift + residual), sums in
 * fp32, rounded once. F16 and BF16, on sm_80 and later. d may lie over the residual. */
typedef struct k_narrow_args {
    int type, sms, cc;
    int64_t rows;
    int n;        /* a multiple of 64 */
    int depth[2]; /* columns of a0 and a1, multiples of 64; the second may be 0 */
    const void *a[2], *b[2];
    bool b_t;             /* b is stored [n,depth], else [depth,n] */
    const float *shift;   /* [n]; or NULL: */
    const void *halves;   /* of `type`, [2·n]: what to add up to it */
    const void *residual; /* [rows,n], or NULL */
    uint8_t *mask;        /* a bit for each element of d, where wanted: d > 0 */
    void *d;
    bool relu;
} k_narrow_args;
bool k_narrow_takes(const k_narrow_args *a); /* from cc, type, n and depth */
/* What cannot be launched, and is not: cudaErrorNotSupported. Errors of a launch are the stream's. */
cudaError_t k_narrow(cudaStream_t s, const k_narrow_args *a);

/* ---- loss.cu: softmax cross-entropy of n rows of k logits; soft may be NULL */
typedef struct k_loss_args {
    int type;
    int n, k;
    const void *logits;
    const int32_t *labels;
    const float *soft;
    double smoothing, grad_scale;
    bool training;
} k_loss_args;
/* workspace: n bytes */
void k_loss(cudaStream_t s, const k_loss_args *a, const dnri_header *header, float *loss,
            dnri_state *state, uint8_t *workspace);
void k_loss_bwd(cudaStream_t s, const k_loss_args *a, const dnri_state *state, void *dlogits);

/* ---- shortcut.cu: x [n,h,w,c], y [n,p,q,k], `before` zero channels before x's */
typedef struct k_shortcut_args {
    int type, sms;
    int n, h, w, c, p, q, k, stride, before;
} k_shortcut_args;
void k_shortcut(cudaStream_t s, const k_shortcut_args *a, const void *x, void *y);
void k_shortcut_bwd(cudaStream_t s, const k_shortcut_args *a, const void *dy, void *dx);

/* ---- dense.cu */
/* db[j] = Σ dy[i,j] over n rows of k columns */
void k_column_sum(cudaStream_t s, int type, const void *dy, float *db, int n, int k);
/* ---- conv.cu */
/* fp32 from `type`: count[i] elements of each of n tensors, in one launch */
enum { K_WIDEN_MOST = 24 };
typedef struct k_widen_args {
    int type, n;
    const void *x[K_WIDEN_MOST];
    float *y[K_WIDEN_MOST];
    int64_t count[K_WIDEN_MOST];
} k_widen_args;
void k_widen(cudaStream_t s, const k_widen_args *a);
/* Weights [k,kernel,kernel,3] of a layer over packed pictures: QUADS [k,m,m,4], m = kernel; BLOCKS [k,m,m,16], whose
 * first block begins `lead` pixels before the window. */
typedef struct k_packed_args {
    int type, k, kernel, m, lead;
    bool blocks;
} k_packed_args;
void k_pack_weight(cudaStream_t s, const k_packed_args *a, const void *w, void *packed);
/* dw, fp32, from its packed form in a->type */
void k_unpack_dw(cudaStream_t s, const k_packed_args *a, const void *packed, float *dw);
/* ---- stem.cu: convolution 7x7, stride 2, pad 3 of QUADS to 64 channels, sums in fp32. F16 and BF16. */
typedef struct k_stem_args {
    int type, sms, cc;
    size_t shared;  /* bytes of shared memory that one block can have */
    int n, h, w, k; /* x [n,h,w,4], y [n,h/2,w/2,k] */
    int channels;   /* of the weights [k,7,7,channels]: 3, or 4 of which the last is not read */
    const void *x, *weights, *dy;
    void *y;
    float *dw;          /* [k,7,7,3] */
    float *sum, *sqsum; /* [k]: Σ y and Σ y² of y as written, in a fixed order; or NULL */
} k_stem_args;
bool k_stem_takes(const k_stem_args *a);       /* from cc, shared, type and shapes */
size_t k_stem_workspace(const k_stem_args *a); /* for sums */
void k_stem(cudaStream_t s, const k_stem_args *a, void *workspace);
bool k_stem_wgrad_takes(const k_stem_args *a);
size_t k_stem_wgrad_workspace(const k_stem_args *a);
/* dw, not rounded, in a fixed order */
void k_stem_wgrad(cudaStream_t s, const k_stem_args *a, void *workspace);
/* Plain loops, for what cuDNN lacks. x [n,h,w,c], w [k,kernel,kernel,c], y [n,p,q,k]; dw in dw_type. */
typedef struct k_conv_args {
    int type, sms;
    int n, h, w, c, p, q, k, kernel, stride, pad;
} k_conv_args;
void k_conv_fprop(cudaStream_t s, const k_conv_args *a, const void *x, const void *w, void *y);
void k_conv_dgrad(cudaStream_t s, const k_conv_args *a, const void *dy, const void *w, void *dx);
void k_conv_wgrad(cudaStream_t s, const k_conv_args *a, const void *x, const void *dy, int dw_type,
                  void *dw);

/* ---- conv_act.cu: what evaluation has beside convolutions */
/* y = act(y + bias + residual), rows of c channels; residual may be NULL */
typedef struct k_bias_act_args {
    int type, sms;
    int64_t rows, c;
    const float *bias;
    const void *residual;
    void *y;
    bool relu;
} k_bias_act_args;
void k_bias_act(cudaStream_t s, const k_bias_act_args *a);
/* y [n,p,q,c] = max(0, bias + the window's maximum) */
void k_max_pool_act(cudaStream_t s, const k_pool_args *a, const void *x, const float *bias,
                    void *y);
/* A norm folded into weights w [k,each]; `low`, the bias in `type`, may be NULL. */
typedef struct k_fold_norm_args {
    int type, k, each;
    double eps;
    const float *w, *gamma, *beta, *mean, *var;
    void *folded, *low;
    float *bias;
} k_fold_norm_args;
void k_fold_norm(cudaStream_t s, const k_fold_norm_args *a);
/* likewise, w [k,kernel,kernel,3] becoming packed weights; in conv_packed.cu */
void k_fold_norm_packed(cudaStream_t s, const k_fold_norm_args *a, const k_packed_args *p);

#ifdef __cplusplus
}
#endif
#endif
