/* norm.cuh: what batch norm's forward and backward kernels share: launch shapes, and sums in two stages, block partials
 * and a finish in fp64, without atomics: the same bits every time. */
#ifndef DNR_NORM_CUH
#define DNR_NORM_CUH

#include "../../runtime/cuda/vec.cuh"
#include "kernels.h"

/* Convolutions and sums go through memory from its start, elementwise passes from its end: what was touched last is
 * still in the L2 cache (50 MB on an H200, a good part of most layers), and the convolution that follows begins where
 * the pass ended.
 *
 * The sums run one large block on each multiprocessor, the elementwise passes two small ones: enough bytes in
 * flight, and the fewest partials. */
#define SUM_THREADS   512
#define APPLY_THREADS 256
#define UNROLL        4

/* Blocks of 32 channels by FINISH partials at a time. */
#define FINISH 16

__device__ __forceinline__ double finish_sum(double v)
{
    __shared__ double sm[FINISH][33];
    sm[threadIdx.y][threadIdx.x] = v;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < FINISH; i++)
        sum += sm[i][threadIdx.x];
    __syncthreads();
    return sum;
}

template <class T, int N> static dim3 sum_grid(int sms, int64_t rows, int64_t c)
{
    return k_tile_grid(rows, c / N, SUM_THREADS, UNROLL, sms);
}
template <class T, int N> static dim3 apply_grid(int sms, int64_t rows, int64_t c)
{
    return k_tile_grid(rows, c / N, APPLY_THREADS, UNROLL, 2 * sms);
}

#endif
