/* algbn_stats.cu: batch norm's statistics from a Gram matrix, and the norm folded into the weights. */
#include "algbn.cuh"

#define FINISH_THREADS 256

static __host__ __device__ int shares_of(int64_t c)
{
    return (int)((c + 31) / 32);
}

/* blockIdx.y: which `span` of the sums over gram's rows, that share after share of squares are made of */
template <class T>
__global__ void __launch_bounds__(128)
    k_algbn_squares(k_algbn_args a, float *__restrict__ square, int64_t span, bool first,
                    const dnri_header *header, dnri_state *state)
{
    __shared__ __align__(16) float sm[(sizeof(T) == 2 ? 3 : 4) * TILE_FLOATS];
    const int64_t across = (a.c + TILE - 1) / TILE, from = blockIdx.y * span;
    if (blockIdx.y == 0)
        begin_ratios(first, header, state);
    product_tile<T, TILE_SQUARE> tile(a, NULL, blockIdx.x / across * TILE,
                                      blockIdx.x % across * TILE,
                                      from + span < a.c ? from + span : a.c);
    tile.run(from, sm, square + blockIdx.y * shares_of(a.c) * a.k);
}

__device__ __forceinline__ double block_sum(double v)
{
    __shared__ double sm[FINISH_THREADS / 32];
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, i);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sm[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < FINISH_THREADS / 32; i++)
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
    for (int64_t j = threadIdx.x; j < s.c; j += FINISH_THREADS) {
        mean[j] = (float)((double)s.sum_a[j] / (double)s.rows);
        weight[j] = k_type<T>::load(w[j]);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < s.rows; i += FINISH_THREADS) {
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

/* A block for each channel. */
template <class T>
__global__ void __launch_bounds__(FINISH_THREADS)
    k_algbn_stats_finish(k_algbn_stats_args s, const float *__restrict__ square, int shares,
                         dnri_state *state)
{
    extern __shared__ __align__(128) unsigned char sm[];
    const int64_t k = blockIdx.x;
    const T *w = (const T *)s.w + k * s.c;
    const double m = (double)s.rows;
    double v = 0, u = 0;
    for (int64_t j = threadIdx.x; j < s.c; j += FINISH_THREADS) {
        const double f = k_type<T>::load(w[j]);
        v += f * s.sum_a[j];
        u += f * f * s.gram[j * (s.c + 1)];
    }
    const double mean = block_sum(v) / m, apart = block_sum(u) / m;
    v = 0;
    for (int i = (int)threadIdx.x; i < shares; i += FINISH_THREADS)
        v += square[i * s.k + k];
    double var = block_sum(v) / m - mean * mean;
    if (var < 0)
        var = 0;
    const double far = mean * mean <= apart ? apart : mean * mean; /* NaN stays */
    const double ratio = sqrt(far / (var + s.eps));
    const bool exact = !(ratio <= s.guard); /* the same in all threads */
    if (exact)
        var = exact_squares(s, w, (float *)sm) / m;
    if (threadIdx.x > 0)
        return;
    s.mean[k] = (float)mean;
    s.invstd[k] = (float)(1 / sqrt(var + s.eps));
    s.running_mean[k] = (float)((1 - s.momentum) * s.running_mean[k] + s.momentum * mean);
    s.running_var[k] =
        (float)((1 - s.momentum) * s.running_var[k] + s.momentum * var * m / (m - 1));
    note_ratio(state, (float)ratio);
    if (exact)
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

/* Rows of gram that a block has: fewer where there are few tiles for a device. */
static int64_t span_of(int64_t k, int64_t c)
{
    const int64_t tiles = ((c + TILE - 1) / TILE) * ((k + TILE - 1) / TILE);
    const int64_t steps = (c + DEPTH - 1) / DEPTH, spans = 256 / tiles < 1 ? 1 : 256 / tiles;
    return (steps + spans - 1) / spans * DEPTH;
}

static int spans_of(int64_t k, int64_t c)
{
    return (int)((c + span_of(k, c) - 1) / span_of(k, c));
}

size_t k_algbn_stats_workspace(int64_t k, int64_t c)
{
    return (size_t)(spans_of(k, c) * shares_of(c)) * (size_t)k * sizeof(float);
}

void k_algbn_stats(cudaStream_t s, const k_algbn_stats_args *a, const dnri_header *header,
                   dnri_state *state, void *workspace)
{
    const int64_t across = (a->c + TILE - 1) / TILE, down = (a->k + TILE - 1) / TILE;
    const size_t bytes = 2 * (size_t)a->c * sizeof(float);
    const int spans = spans_of(a->k, a->c);
    float *square = (float *)workspace;
    k_algbn_args w = {};
    w.rows = a->rows;
    w.k = a->k;
    w.c = a->c;
    w.w = a->w;
    w.gram = a->gram;
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        const dim3 grid((unsigned)(across * down), (unsigned)spans);
        k_algbn_squares<T>
            <<<grid, 128, 0, s>>>(w, square, span_of(a->k, a->c), a->first, header, state);
        k_algbn_stats_finish<T><<<(unsigned)a->k, FINISH_THREADS, bytes, s>>>(
            *a, square, spans * shares_of(a->c), state);
    });
}

void k_algbn_fold(cudaStream_t s, const k_algbn_fold_args *a)
{
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_algbn_fold_kernel<T><<<(unsigned)((a->k + 7) / 8), 256, 0, s>>>(*a);
    });
}
