/* onednn.h: convolutions and dense layers through oneDNN, whatever its version (2.6 … 3.x). */
#ifndef DNR_CPU_ONEDNN_H
#define DNR_CPU_ONEDNN_H

#include "../tensor.h"

typedef struct dnri_dnn dnri_dnn; /* oneDNN's CPU engine and stream */
typedef struct dnri_dnn_op dnri_dnn_op;

dnr_status dnri_dnn_open(dnri_dnn **out);
void dnri_dnn_close(dnri_dnn *e);
void dnri_dnn_version(char *buf, size_t size); /* of the library loaded: "2.6.3" */
bool dnri_dnn_native_bf16(void);               /* does the CPU multiply bf16 itself? */
bool dnri_dnn_amx(void);                       /* in tiles? As far as DNNL_MAX_CPU_ISA allows */

/* FPROP: dst = act(src ⋆ weights (+ bias) (+ residual)). DGRAD: src is written, dst and weights are read. WGRAD: weights (and bias)
 * are written, src and dst are read. */
typedef enum dnri_dnn_pass { DNRI_DNN_FPROP, DNRI_DNN_DGRAD, DNRI_DNN_WGRAD } dnri_dnn_pass;
enum { DNRI_DNN_SRC, DNRI_DNN_WEIGHTS, DNRI_DNN_BIAS, DNRI_DNN_DST };

typedef struct dnri_dnn_desc {
    dnri_dnn_pass pass;
    bool dense;    /* a dense layer: pictures and kernels are 1 × 1; else a convolution */
    bool biased;   /* of a convolution FPROP only */
    bool relu;     /* FPROP of a convolution: act */
    bool added;    /* likewise: with a residual of dst's shape; */
    bool in_place; /* dst has to hold it before the run, else oneDNN reads it where it is */
    int residual;  /* the op's input that has it (see dnri_cpu_dnn_step) */
    bool training; /* FPROP: a backward pass will follow */
    bool deterministic;
    int candidate;     /* 0: oneDNN's first choice; n: the n-th after it */
    int stride, pad;   /* convolution */
    dnr_desc shape[4]; /* src and dst NHWC, weights [K,R,S,C], bias [1,1,1,K] */
} dnri_dnn_desc;

/* DNR_OK with *out NULL: there is no such candidate. Weights are reordered inside the op where the implementation packs them. */
dnr_status dnri_dnn_create(dnri_dnn *e, const dnri_dnn_desc *d, dnri_dnn_op **out);
void dnri_dnn_drop(dnri_dnn_op *op);
size_t dnri_dnn_workspace(const dnri_dnn_op *op);
/* 0: the candidate was made for older CPUs and cannot be run. */
int dnri_dnn_launches(const dnri_dnn_op *op);
const char *dnri_dnn_impl(const dnri_dnn_op *op); /* "brgconv:avx512_core" */
/* False for plain loops, which may take minutes, and for what adds a residual from elsewhere through a matrix product:
 * oneDNN 2.6 adds another one. */
bool dnri_dnn_is_good(const dnri_dnn_op *op);
/* `workspace` may be NULL when its size is 0; residual, where there is none. */
dnr_status dnri_dnn_bind(dnri_dnn_op *op, void *const address[4], void *residual, void *workspace);
dnr_status dnri_dnn_run(dnri_dnn_op *op);

#endif
