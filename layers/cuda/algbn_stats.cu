/* algbn_stats.cu: batch norm's statistics from a Gram matrix, and the norm folded into the weights.
 *
 * These are small kernels, and most of their time is latency: each has all it reads on its way at once, and ends in the
 * block that began. */
#include "algbn.cuh"

#define THREADS 256
#define WARPS   (THREADS / 32)

__device__ __forceinline__ double warp_sum(double v)
{
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, i);
    return v;
}

__device__ __forceinline__ double block_sum(double v)
{
    __shared__ double sm[WARPS];
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sm[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < WARPS; i++)
        v += sm[i];
    return v;
}

/* The long way: Σ (w·(a − mean of a))² over all rows, of one channel. `sm`: 2·c floats. Slow, for channels that hardly
 * vary; one block for each has all of a to read. */
template <class T>
__device__ double exact_squares(const k_algbn_stats_args &s, const T *w, float *sm)
{
    constexpr int N = k_type<T>::wide;
    float *mean = sm, *weight = sm + s.c;
    double sum = 0;
    for (int64_t j = threadIdx.x; j < s.c; j += THREADS) {
        mean[j] = (float)((double)s.sum_a[j] / (double)s.rows);
        weight[j] = k_type<T>::load(w[j]);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < s.rows; i += THREADS) {
        const T *row = (const T *)s.a + i * s.c;
        float x = 0;
#pragma unroll 4
        for (int64_t j = 0; j < s.c; j += N) {
            float f[N];
            k_unpack(k_load<T, N>(row + j), f);
#pragma unroll
            for (int q = 0; q < N; q++)
                x += weight[j + q] * (f[q] - mean[j + q]);
        }
        sum += (double)x * x;
    }
    return block_sum(sum);
}

/* w_k·gram·w_kᵀ of ROWS channels k, as this thread's share: it has four columns of gram, from `col` on, and every
 * `step`-th four of its rows from `first` on, down from the diagonal; what is below that counts twice. While some are
 * multiplied, the next are on their way. `rows`: these of w, in shared memory. */
template <int ROWS>
__device__ void squares(const float *gram, int c, const float *rows, int col, int first, int step,
                        double (&q)[ROWS])
{
    constexpr int AT_ONCE = 2;
    float sum[ROWS][4] = {};
    float4 now[AT_ONCE][4], next[AT_ONCE][4];
    const float4 zero = make_float4(0, 0, 0, 0);
    const auto load = [&](float4(&g)[AT_ONCE][4], int l) {
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++, l += step)
#pragma unroll
            for (int i = 0; i < 4; i++)
                g[n][i] =
                    l >= col && l < c ? *(const float4 *)(gram + (int64_t)(l + i) * c + col) : zero;
    };
    /* a warp begins where its first column needs it */
    int l = (col - first > 0 ? (col - first) / step : 0) * step + first;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, l - first, i) + first;
        l = other < l ? other : l;
    }
    load(now, l);
    for (; l < c; l += AT_ONCE * step) {
        load(next, l + AT_ONCE * step);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int at = l + n * step;
            if (at >= c)
                break;
            if (at == col)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    now[n][i].x *= 0.5f;
                    now[n][i].y *= 0.5f;
                    now[n][i].z *= 0.5f;
                    now[n][i].w *= 0.5f;
                }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 v = *(const float4 *)(rows + r * c + at);
                const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[r][0] += f[i] * now[n][i].x;
                    sum[r][1] += f[i] * now[n][i].y;
                    sum[r][2] += f[i] * now[n][i].z;
                    sum[r][3] += f[i] * now[n][i].w;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                now[n][i] = next[n][i];
    }
    if (col >= c)
        return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float4 v = *(const float4 *)(rows + r * c + col);
        q[r] = 2 * (sum[r][0] * v.x + sum[r][1] * v.y + sum[r][2] * v.z + sum[r][3] * v.w);
    }
}

/* A block for ROWS channels. Dynamic shared memory: ROWS·c floats. */
template <class T, int ROWS>
__global__ void __launch_bounds__(THREADS)
    k_algbn_stats_kernel(k_algbn_stats_args s, dnri_state *state)
{
    constexpr int SHARES = WARPS / ROWS; /* warps that share a row */
    extern __shared__ __align__(128) unsigned char sm[];
    __shared__ double means[SHARES][ROWS], apart[SHARES][ROWS], square[WARPS][ROWS];
    __shared__ bool far[ROWS];
    float *rows = (float *)sm;
    const int c = (int)s.c, tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int row = warp % ROWS, share = warp / ROWS, columns = c / 4, step = THREADS / columns;
    const bool mine = tid < ROWS;
    const int64_t k0 = (int64_t)blockIdx.x * ROWS, k = mine ? k0 + tid : k0;
    const T *w = (const T *)s.w + k0 * c;
    const double m = (double)s.rows;
    const float running_mean = s.running_mean[k], running_var = s.running_var[k];
    double v = 0, u = 0;
#pragma unroll 2
    for (int j = (share * 32 + lane) * 4; j < c; j += SHARES * 128) {
        const float4 f = load4(w + row * c + j), a = *(const float4 *)(s.sum_a + j);
        const float *g = s.gram + (int64_t)j * (c + 1);
        *(float4 *)(rows + row * c + j) = f;
        v += f.x * a.x + f.y * a.y + f.z * a.z + f.w * a.w; /* conversions to fp64 are slow */
        u += f.x * f.x * g[0] + f.y * f.y * g[c + 1] + f.z * f.z * g[2 * (c + 1)] +
             f.w * f.w * g[3 * (c + 1)];
    }
    v = warp_sum(v);
    u = warp_sum(u);
    if (lane == 0) {
        means[share][row] = v;
        apart[share][row] = u;
    }
    __syncthreads();
    double q[ROWS] = {};
    const bool idle = tid >= columns * step;
    squares<ROWS>(s.gram, c, rows, idle ? c : tid % columns * 4, tid / columns * 4, step * 4, q);
    const double one = sum_rows(q);
    if (lane % (32 / ROWS) == 0)
        square[warp][lane / (32 / ROWS)] = one;
    __syncthreads();
    double mean = 0, var = 0, ratio = 0;
    if (mine) {
        double by_itself = 0;
        for (int i = 0; i < SHARES; i++) {
            mean += means[i][tid];
            by_itself += apart[i][tid];
        }
        for (int i = 0; i < WARPS; i++)
            var += square[i][tid];
        mean /= m;
        by_itself /= m;
        var = var / m - mean * mean;
        if (var < 0)
            var = 0;
        ratio = sqrt((mean * mean <= by_itself ? by_itself : mean * mean) /
                     (var + s.eps)); /* NaN stays */
        far[tid] = !(ratio <= s.guard);
    }
    __syncthreads();
    for (int r = 0; r < ROWS; r++)
        if (far[r]) {
            const double e = exact_squares(s, w + r * c, (float *)sm) / m;
            if (tid == r)
                var = e;
        }
    if (!mine)
        return;
    s.mean[k] = (float)mean;
    s.invstd[k] = (float)(1 / sqrt(var + s.eps));
    s.running_mean[k] = (float)((1 - s.momentum) * running_mean + s.momentum * mean);
    s.running_var[k] = (float)((1 - s.momentum) * running_var + s.momentum * var * m / (m - 1));
    note_ratio(state, (float)ratio);
    if (far[tid])
        atomicAdd(&state->algbn_exact, 1);
}

/* A warp for each row of w. */
template <class T> __global__ void __launch_bounds__(256) k_algbn_fold_kernel(k_algbn_fold_args a)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t k = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (k >= a.k)
        return;
    const T *w = (const T *)a.w + k * a.c;
    const float scale = a.gamma[k] * a.invstd[k];
    double sum = 0;
    for (int64_t j = lane * 4; j < a.c; j += 128) {
        const float4 u = load4(w + j), s = *(const float4 *)(a.sum_a + j);
        float f[4] = {scale * u.x, scale * u.y, scale * u.z, scale * u.w};
        k_vec<T, 4> v;
        k_pack(f, v);
        *(k_vec<T, 4> *)((T *)a.wf + k * a.c + j) = v;
        k_unpack(v, f);
        sum += (double)f[0] * s.x + (double)f[1] * s.y + (double)f[2] * s.z + (double)f[3] * s.w;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane > 0)
        return;
    a.shift[k] = (float)(a.beta[k] - sum / (double)a.rows);
    if (a.low) {
        const T low = k_type<T>::store(a.shift[k]);
        ((T *)a.low)[k] = k_type<T>::load(low) == 0 ? k_type<T>::store(-0x1p-24f) : low;
    }
}

/* ---------------------------------------------------------------- launches */

template <class T, int ROWS>
static void launch_stats(cudaStream_t s, const k_algbn_stats_args *a, dnri_state *state)
{
    const size_t bytes = (size_t)(ROWS * a->c) * sizeof(float);
    k_algbn_stats_kernel<T, ROWS><<<(unsigned)(a->k / ROWS), THREADS, bytes, s>>>(*a, state);
}

/* Few channels are dealt to as many blocks. */
void k_algbn_stats(cudaStream_t s, const k_algbn_stats_args *a, const dnri_header *header,
                   dnri_state *state)
{
    if (a->first)
        k_algbn_begin(s, header, state);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        if (a->k > 512)
            launch_stats<T, 8>(s, a, state);
        else
            launch_stats<T, 4>(s, a, state);
    });
}

void k_algbn_fold(cudaStream_t s, const k_algbn_fold_args *a)
{
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_algbn_fold_kernel<T><<<(unsigned)((a->k + 7) / 8), 256, 0, s>>>(*a);
    });
}
