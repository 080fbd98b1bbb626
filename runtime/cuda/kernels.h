/* kernels.h: the engine's kernels: batches in, sums and the optimizer. Read by C and by CUDA C++.
 * `type` is a dnr_dtype: F16, BF16 or F32. `sms`: multiprocessors of the device. */
#ifndef DNR_CUDA_KERNELS_H
#define DNR_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "../state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What kernels need to know of the device. */
#define K_GATE_BYTES 64
typedef struct k_device {
    int sms;       /* multiprocessors */
    size_t shared; /* bytes of shared memory that one block can have */
    unsigned *
        gates; /* [sms · K_GATE_BYTES], for blocks that wait for each other; one launch at a time */
} k_device;

/* Blocks of k_stat's first stage: its workspace is K_STAT_BLOCKS k_stat_part. */
#define K_STAT_BLOCKS 512
typedef struct k_stat_part {
    double sqsum;
    int64_t bad;
} k_stat_part;

typedef struct k_sgd_args {
    const float *grad;
    const dnri_header *header;
    const dnri_state *state;
    float *master, *momentum;
    void *weight;               /* NULL where it is the master copy */
    const unsigned char *decay; /* a flag for each DNRI_PARAM_ALIGN elements */
    int64_t n;                  /* elements, a multiple of DNRI_PARAM_ALIGN */
    float mu, weight_decay;
    double clip; /* 0 = off */
    bool nesterov;
} k_sgd_args;

/* cudaSuccess when this build has code for the current device. */
cudaError_t k_usable(void);

/* x[i] = pixel[i] · scale[i mod 3] + shift[i mod 3], labels and header, from the slot whose address lies in
 * `cell`; a null address (nothing fed yet) leaves all untouched. */
void k_ingest(cudaStream_t s, int type, int sms, const void *cell, int64_t batch, int64_t pixels,
              int64_t pixels_at, const float scale[3], const float shift[3], void *x,
              int32_t *labels, dnri_header *header);
/* The same, packed: quads [batch,h,w,4] and blocks [batch,h/2,w/2,16] (engine_ops.h), either NULL; h and w even, 16-bit
 * types */
void k_packed_ingest(cudaStream_t s, int type, int sms, const void *cell, int64_t batch, int64_t h,
                     int64_t w, int64_t pixels_at, const float scale[3], const float shift[3],
                     void *quads, void *blocks, int32_t *labels, dnri_header *header);
/* y = a + b, n elements */
void k_add(cudaStream_t s, int type, int sms, const void *a, const void *b, void *y, int64_t n);
/* gsum = first ? grad : gsum + grad */
void k_fold(cudaStream_t s, int sms, const float *grad, const dnri_header *h, float *gsum,
            int64_t n);
/* Gradients to and from the 16-bit type in which they travel; n: a multiple of DNRI_PARAM_ALIGN */
void k_wire_pack(cudaStream_t s, int type, int sms, const float *grad, void *wire, int64_t n);
void k_wire_unpack(cudaStream_t s, int type, int sms, const void *wire, float *grad, int64_t n);
void k_stat(cudaStream_t s, int sms, const float *grad, int64_t n, k_stat_part *part,
            dnri_state *state);
void k_sgd(cudaStream_t s, int type, int sms, const k_sgd_args *a);
/* e += share · (w − e), n elements (a multiple of 4); nothing where the step overflowed. */
void k_ema(cudaStream_t s, int sms, float share, const dnri_state *state, const float *w, float *e,
           int64_t n);
void k_scaler(cudaStream_t s, bool scaled, dnri_state *state);
/* d[i,j] = act(Σ_l a[i·a_row + l·a_col] · b[l·b_row + j·b_col] + bias[j] (+ c[i,j])), c, d [m,n] and bias of type d_type,
 * c may be d; for each of a batch: for what cuBLASLt lacks. `step_…`: elements from one matrix to the next */
typedef struct k_matmul_args {
    int type, d_type, sms;
    int64_t m, n, l;
    int64_t a_row, a_col, b_row, b_col;
    int64_t batch, step_a, step_b, step_d;
    bool add, relu;
} k_matmul_args;
void k_matmul(cudaStream_t s, const k_matmul_args *g, const void *a, const void *b, const void *c,
              const void *bias, void *d);
/* Uniform values in (−1, 1) · scale, for the tuner. */
void k_noise(cudaStream_t s, int type, int sms, void *x, int64_t n, float scale);
/* Partial sums of (a − b)² and b² over n elements, to be added up by the host. */
#define K_DISTANCE_BLOCKS 256
void k_distance(cudaStream_t s, int type, const void *a, const void *b, int64_t n,
                double part[K_DISTANCE_BLOCKS][2]);

#ifdef __cplusplus
}
#endif
#endif
