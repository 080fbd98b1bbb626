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

/* Rows that block b of `blocks` saw, of the `groups` rows that a block takes at a time. */
__device__ __forceinline__ int64_t rows_of(int64_t rows, int blocks, int groups, int b)
{
    int64_t round = (int64_t)blocks * groups, full = rows / round;
    int64_t rest = rows - full * round - (int64_t)b * groups;
    return full * groups + (rest < 0 ? 0 : rest < groups ? rest : groups);
}

/* What is kept of a channel, from the sums of its x and x². */
__device__ __forceinline__ void keep_statistics(const k_norm_args &a, int64_t c, double sum,
                                                double sq, float &mean, float &invstd, bool write)
{
    double n = (double)a.rows, m = sum / n, var = sq / n - m * m;
    if (var < 0)
        var = 0; /* rounding apart it is no less; NaN stays */
    mean = (float)m;
    invstd = (float)(1 / sqrt(var + a.eps));
    if (!write)
        return;
    double momentum = a.momentum, unbiased = var * (a.rows > 1 ? n / (n - 1) : 1);
    a.mean[c] = mean;
    a.invstd[c] = invstd;
    a.running_mean[c] = (float)((1 - momentum) * a.running_mean[c] + momentum * m);
    a.running_var[c] = (float)((1 - momentum) * a.running_var[c] + momentum * unbiased);
}

/* mean and invstd of a thread's channels from their sums; one thread for each channel keeps them. Only the
 * difference of squares needs fp64. */
template <int N>
__device__ __forceinline__ void from_sums(const k_norm_args &a, const k_tile &t, float (&mean)[N],
                                          float (&invstd)[N])
{
    const int64_t rows = a.all_rows ? a.all_rows : a.rows;
    double over_m = 1 / (double)rows, m[N], var[N];
    k_get_floats(a.sum + t.col * N, mean);
    k_get_floats(a.sqsum + t.col * N, invstd);
#pragma unroll
    for (int j = 0; j < N; j++) {
        m[j] = mean[j] * over_m;
        var[j] = invstd[j] * over_m - m[j] * m[j];
        var[j] = var[j] < 0 ? 0 : var[j]; /* rounding apart it is no less; NaN stays */
        mean[j] = (float)m[j];
        invstd[j] = 1 / sqrtf((float)(var[j] + a.eps));
    }
    if (t.row > 0)
        return;
    k_put_floats(a.mean + t.col * N, mean);
    k_put_floats(a.invstd + t.col * N, invstd);
    double unbiased = rows > 1 ? (double)rows / (double)(rows - 1) : 1;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float *rm = &a.running_mean[t.col * N + j], *rv = &a.running_var[t.col * N + j];
        *rm = (float)((1 - a.momentum) * *rm + a.momentum * m[j]);
        *rv = (float)((1 - a.momentum) * *rv + a.momentum * var[j] * unbiased);
    }
}

/* y, and its mask where there is one, of the x in v and the residual in z: one access at element `at` */
template <class T, int N, bool RELU, bool ADD>
__device__ __forceinline__ void put_y(const k_norm_args &a, T *y, int64_t at, k_vec<T, N> &v,
                                      const k_vec<T, N> &z, const float (&mean)[N],
                                      const float (&scale)[N], const float (&beta)[N])
{
    float f[N], g[N];
    k_unpack(v, f);
    if (ADD)
        k_unpack(z, g);
#pragma unroll
    for (int j = 0; j < N; j++) {
        f[j] = __fmaf_rn(f[j] - mean[j], scale[j], beta[j]);
        if (ADD)
            f[j] += g[j];
        if (RELU)
            f[j] = k_relu_value(f[j]);
    }
    k_pack(f, v);
    k_put(y + at, v);
    if constexpr (N == 8 && RELU && ADD)
        if (a.mask) {
            unsigned bits = 0;
#pragma unroll
            for (int j = 0; j < 8; j++)
                bits |= (f[j] > k_type<T>::vanish ? 1u : 0u) << j;
            a.mask[at / 8] = (uint8_t)bits;
        }
}

/* part ← [block][SUMS][c]: s of all threads of a block that share channels, added up in pairs. All threads call it. */
template <int N, int SUMS>
__device__ __forceinline__ void put_sums(const k_tile &t, float (&s)[SUMS][N],
                                         float *__restrict__ part)
{
    __shared__ float sm[SUMS][N][SUM_THREADS];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            sm[i][j][threadIdx.x] = s[i][j];
    __syncthreads();
    for (int left = t.groups; left > 1;) { /* groups t.group and t.group + half merge */
        int half = (left + 1) / 2;
        if (!t.idle() && t.group < left - half) {
#pragma unroll
            for (int i = 0; i < SUMS; i++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sm[i][j][threadIdx.x] += sm[i][j][threadIdx.x + half * t.cols];
        }
        left = half;
        __syncthreads();
    }
    if (!t.idle() && t.group == 0) {
        int64_t c = (int64_t)t.vecs * N;
        float *o = part + (int64_t)blockIdx.x * SUMS * c + (int64_t)t.col * N;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
#pragma unroll
            for (int j = 0; j < N; j++)
                s[i][j] = sm[i][j][threadIdx.x];
            k_put_floats(o + i * c, s[i]);
        }
    }
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
