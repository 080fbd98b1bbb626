/* device.h: what the files of the CUDA back end share: the device, errors that name what was being done,
 * and the frame of a lowered op. */
#ifndef DNR_CUDA_DEVICE_H
#define DNR_CUDA_DEVICE_H

#include "../backend.h"
#include "kernels.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

struct dnri_conv_plan;
struct dnri_product;
struct dnri_choices;

typedef struct dnri_cuda {
    struct dnr_device base;
    int index; /* of the device: cuda:INDEX */
    int sms;   /* multiprocessors */
    k_device k;
    int cc; /* compute capability: 90 */
    cudaStream_t lane[DNRI_LANES];
    cudaEvent_t mark[DNRI_MARKS], fence;
    int64_t allocs, syncs;
    /* made when first needed, since they take time */
    cudnnHandle_t cudnn;
    cublasLtHandle_t lt;
    struct dnri_conv_plan *plans;  /* chosen so far: equal convolutions share one */
    struct dnri_product *products; /* likewise */
    struct dnri_choices *choices;  /* the base's */
    cudaEvent_t clock[2];          /* of the tuner */
    cudaEvent_t *stamps;           /* of profiles */
    int n_stamps;
    void *scratch; /* of the tuner; given back before anything else is allocated */
    size_t scratch_bytes;
    bool said_refused; /* remarks that are made once */
    cudnnBackendDescriptor_t
        paper;           /* properties of a device that is not there; NULL: it is there */
    size_t paper_memory; /* its bytes */
} dnri_cuda;

static inline dnri_cuda *dnri_cuda_of(dnr_device *dev)
{
    return (dnri_cuda *)dev;
}

/* ---- paper.c: a GPU that is not there, for plans alone: whole programs are lowered and placed for it, as cuDNN plans
 * for the device that `properties` (its JSON) describe. Its memory is `memory` bytes of nothing: nothing can be run. For
 * tests. */
dnr_status dnri_cuda_paper(const char *properties, int sms, int cc, size_t memory,
                           dnr_device **out);

/* ---- device.c */
extern const dnri_backend dnri_backend_cuda; /* the module's one entry */
/* Device memory for the back end's own use, not zeroed. `what` for the error. */
dnr_status dnri_cuda_malloc(dnri_cuda *d, size_t bytes, const char *what, void **out);
void dnri_cuda_mfree(dnri_cuda *d, void *p);
dnr_status dnri_cuda_sync(dnri_cuda *d, dnr_lane lane);
dnr_status dnri_cuda_cudnn(dnri_cuda *d, cudnnHandle_t *out);
dnr_status dnri_cuda_lt(dnri_cuda *d, cublasLtHandle_t *out);

/* ---- fail.c: a library's status as an error: what was being done, the status, its likely cause, the remedy. */
dnr_status dnri_cuda_fail(const char *where, cudaError_t e, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
dnr_status dnri_cudnn_fail(const char *where, cudnnStatus_t s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
dnr_status dnri_cublas_fail(const char *where, cublasStatus_t s, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* DNRI_CUDA(cudaFree(p), "freeing %s", name); forwards a failure to the caller. */
#define DNRI_CUDA(call, ...)                                                                       \
    do {                                                                                           \
        cudaError_t dnri_e_ = (call);                                                              \
        if (dnri_e_ != cudaSuccess)                                                                \
            return dnri_cuda_fail(DNRI_HERE, dnri_e_, __VA_ARGS__);                                \
    } while (0)
#define DNRI_CUDNN(call, ...)                                                                      \
    do {                                                                                           \
        cudnnStatus_t dnri_e_ = (call);                                                            \
        if (dnri_e_ != CUDNN_STATUS_SUCCESS)                                                       \
            return dnri_cudnn_fail(DNRI_HERE, dnri_e_, __VA_ARGS__);                               \
    } while (0)
#define DNRI_CUBLAS(call, ...)                                                                     \
    do {                                                                                           \
        cublasStatus_t dnri_e_ = (call);                                                           \
        if (dnri_e_ != CUBLAS_STATUS_SUCCESS)                                                      \
            return dnri_cublas_fail(DNRI_HERE, dnri_e_, __VA_ARGS__);                              \
    } while (0)

/* ---- step.c: the context of a lowered op. A layer's file supplies `launch`, which enqueues kernels on `stream`
 * and need not look for launch errors: the frame does, and adds the shapes to every error. */
typedef struct dnri_cuda_op {
    dnri_cuda *dev;
    cudaStream_t stream;
    dnri_op op; /* a copy: attributes, and which operands are there */
    dnr_desc in[DNRI_MAX_IN], out[DNRI_MAX_OUT];
    dnri_binding at;
    dnr_status (*launch)(struct dnri_cuda_op *s);
    dnr_status (*prepare)(struct dnri_cuda_op *s); /* after each bind; may be NULL */
    void (*release)(struct dnri_cuda_op *s);       /* frees `own`; may be NULL */
    void *own;                                     /* the layer's */
    char range[DNRI_NAME + 32]; /* what profilers show: "conv.fprop layer1.0.conv1" */
    size_t own_bytes;           /* offset of a library's part in the workspace */
} dnri_cuda_op;

/* Fills `out` for `op`, with `launches` kernels of implementation `impl`. `*s` may be NULL where the caller
 * has nothing to add. */
dnr_status dnri_cuda_lower(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                           dnr_status (*launch)(dnri_cuda_op *), int launches, const char *impl,
                           dnri_step *out, dnri_cuda_op **s);
/* supports: every tensor in the arena or the store has a type that our kernels know. */
bool dnri_cuda_types(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
/* "fp16[…] fp16[…] → fp16[…]" */
const char *dnri_cuda_shapes(const dnri_cuda_op *s, char *buf, size_t size);
/* "fp16 x 8": type and elements of one access, where `c` channels allow 16 bytes. */
const char *dnri_cuda_access(dnr_dtype t, int64_t c, char buf[32]);

/* ---- lowering tables, each ended by a row without def */
extern const dnri_lowering dnri_cuda_engine[], dnri_cuda_conv[], dnri_cuda_conv_act[],
    dnri_cuda_norm[], dnri_cuda_pool[], dnri_cuda_norm_pool[], dnri_cuda_algbn[],
    dnri_cuda_algbn_fwd[], dnri_cuda_packed_conv[], dnri_cuda_dense[], dnri_cuda_loss[],
    dnri_cuda_shortcut[];

/* ---- conv.c: an op that does not always pay */
typedef struct dnri_cuda_pays {
    const dnri_op_def *def;
    bool (*pays)(dnr_device *dev, const dnr_graph *g, const dnri_op *op);
} dnri_cuda_pays;
extern const dnri_cuda_pays dnri_cuda_conv_pays;

#endif
