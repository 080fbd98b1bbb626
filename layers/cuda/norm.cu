/* norm.cu: batch norm. Statistics and gradients of parameters are sums over pixels in two stages, block
 * partials and a finish in fp64, without atomics: the same bits every time. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

/* Convolutions and sums go through memory from its start, elementwise passes from its end: what was touched last is
 * still in the L2 cache (50 MB on an H200, a good part of most layers), and the convolution that follows begins where
 * the pass ended.
 *
 * The sums run one large block on each multiprocessor, the elementwise passes two small ones: enough bytes in
 * flight, and the fewest partials. */
#define SUM_THREADS   512
#define APPLY_THREADS 256
#define UNROLL        4

/* ---------------------------------------------------------------- statistics */

struct moments { /* of n values: mean, and the sum of squared distances from it */
    float n, mean, m2;
};
/* Chan, Golub & LeVeque 1979: no cancellation, however large the mean. */
__device__ __forceinline__ void merge(moments &a, const moments &b)
{
    float n = a.n + b.n;
    if (b.n == 0)
        return;
    float delta = b.mean - a.mean, part = b.n / n;
    a.mean += delta * part;
    a.m2 += b.m2 + delta * delta * a.n * part;
    a.n = n;
}

/* part: [block][mean, m2][c]. A thread sums distances from the first value it sees, which lies among the others. */
template <class T, int N>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_stats_kernel(const T *__restrict__ x, int64_t rows, int vecs, float *__restrict__ part)
{
    __shared__ float sm_mean[N][SUM_THREADS], sm_m2[N][SUM_THREADS], sm_n[SUM_THREADS];
    const k_tile t(vecs, SUM_THREADS);
    float first[N], sum[N], sq[N];
    int64_t step = t.stride * vecs * N, count = 0;
    if (!t.idle() && t.row < rows) {
        const T *p = x + (t.row * vecs + t.col) * N;
        k_unpack(k_load<T, N>(p), first);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = sq[j] = 0;
        for (int64_t r = t.row; r < rows; r += t.stride * UNROLL, p += step * UNROLL) {
            k_vec<T, N> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows)
                    v[u] = k_load<T, N>(p + u * step);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows) {
                    float f[N];
                    k_unpack(v[u], f);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        float d = f[j] - first[j];
                        sum[j] += d;
                        sq[j] += d * d;
                    }
                }
        }
        count = (rows - t.row + t.stride - 1) / t.stride;
    }
    sm_n[threadIdx.x] = (float)count;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float n = (float)count, m2 = count ? sq[j] - sum[j] * sum[j] / n : 0;
        sm_mean[j][threadIdx.x] = count ? first[j] + sum[j] / n : 0;
        sm_m2[j][threadIdx.x] = m2 > 0     ? m2
                                : m2 == m2 ? 0
                                           : m2; /* rounding apart it is no less; NaN stays */
    }
    __syncthreads();
    for (int left = t.groups; left > 1;) { /* groups t.group and t.group + half merge */
        int half = (left + 1) / 2;
        if (!t.idle() && t.group < left - half) {
            int me = threadIdx.x, other = me + half * t.cols;
            float n = sm_n[me];
#pragma unroll
            for (int j = 0; j < N; j++) {
                moments a = {n, sm_mean[j][me], sm_m2[j][me]};
                merge(a, {sm_n[other], sm_mean[j][other], sm_m2[j][other]});
                sm_mean[j][me] = a.mean;
                sm_m2[j][me] = a.m2;
            }
            /* sm_n is per thread, so nobody else reads what is written here before the barrier */
            sm_n[me] = n + sm_n[other];
        }
        left = half;
        __syncthreads();
    }
    if (!t.idle() && t.group == 0) {
        int64_t c = (int64_t)vecs * N;
        float *o = part + (int64_t)blockIdx.x * 2 * c + (int64_t)t.col * N;
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum[j] = sm_mean[j][threadIdx.x];
            sq[j] = sm_m2[j][threadIdx.x];
        }
        k_put_floats(o, sum);
        k_put_floats(o + c, sq);
    }
}

/* Blocks of 32 channels by FINISH partials at a time. */
#define FINISH 16

/* Rows that block b of `blocks` saw, of the `groups` rows that a block takes at a time. */
__device__ __forceinline__ int64_t rows_of(int64_t rows, int blocks, int groups, int b)
{
    int64_t round = (int64_t)blocks * groups, full = rows / round;
    int64_t rest = rows - full * round - (int64_t)b * groups;
    return full * groups + (rest < 0 ? 0 : rest < groups ? rest : groups);
}

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

struct finish_args {
    const float *part;
    int blocks, vecs, width; /* of the grid that made the partials */
    int64_t rows, c;
    k_norm_args a;
};

__global__ void __launch_bounds__(32 * FINISH) k_norm_stats_finish(finish_args f)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double sum = 0, sq = 0;
    if (c < f.c) {
        int first = (int)(c / f.width) / SUM_THREADS * SUM_THREADS;
        int cols = f.vecs - first < SUM_THREADS ? f.vecs - first : SUM_THREADS;
        for (int b = threadIdx.y; b < f.blocks; b += FINISH) {
            const float *p = f.part + (int64_t)b * 2 * f.c + c;
            double n = (double)rows_of(f.rows, f.blocks, SUM_THREADS / cols, b), mean = p[0];
            sum += n * mean;
            sq += p[f.c] + n * mean * mean;
        }
    }
    sum = finish_sum(sum);
    sq = finish_sum(sq);
    if (c >= f.c || threadIdx.y > 0)
        return;
    if (f.a.sum) {
        f.a.sum[c] = (float)sum;
        f.a.sqsum[c] = (float)sq;
        return;
    }
    double n = (double)f.rows, mean = sum / n, var = sq / n - mean * mean;
    if (var < 0)
        var = 0;
    f.a.mean[c] = (float)mean;
    f.a.invstd[c] = (float)(1 / sqrt(var + f.a.eps));
    double m = f.a.momentum, unbiased = var * (f.rows > 1 ? n / (n - 1) : 1);
    f.a.running_mean[c] = (float)((1 - m) * f.a.running_mean[c] + m * mean);
    f.a.running_var[c] = (float)((1 - m) * f.a.running_var[c] + m * unbiased);
}

/* ---------------------------------------------------------------- y */

enum source { /* what a channel is normalised by */
              FROM_SAVED,
              FROM_RUNNING, /* a.mean and a.invstd are running mean and variance */
              FROM_SUMS
};

/* mean and invstd of a thread's channels from their sums; one thread for each channel keeps them. Only the
 * difference of squares needs fp64. */
template <int N>
__device__ void from_sums(const k_norm_args &a, const k_tile &t, float (&mean)[N],
                          float (&invstd)[N])
{
    double over_m = 1 / (double)a.rows, m[N], var[N];
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
    double unbiased = (double)a.rows / (double)(a.rows - 1);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float *rm = &a.running_mean[t.col * N + j], *rv = &a.running_var[t.col * N + j];
        *rm = (float)((1 - a.momentum) * *rm + a.momentum * m[j]);
        *rv = (float)((1 - a.momentum) * *rv + a.momentum * var[j] * unbiased);
    }
}

/* y = act((x − mean) · gamma · invstd + beta + residual) */
template <class T, int N, bool RELU, bool ADD>
__global__ void __launch_bounds__(APPLY_THREADS)
    k_norm_apply_kernel(k_norm_args a, int vecs, source from, const T *__restrict__ x,
                        const T *__restrict__ residual, T *__restrict__ y)
{
    const k_tile t(vecs, APPLY_THREADS);
    if (t.idle())
        return;
    float mean[N], scale[N], beta[N], spread[N];
    if (from == FROM_SUMS) {
        from_sums(a, t, mean, spread);
    } else {
        k_get_floats(a.mean + t.col * N, mean);
        k_get_floats(a.invstd + t.col * N, spread);
    }
    k_get_floats(a.gamma + t.col * N, scale);
    k_get_floats(a.beta + t.col * N, beta);
#pragma unroll
    for (int j = 0; j < N; j++)
        scale[j] *= from == FROM_RUNNING ? 1 / sqrtf(spread[j] + (float)a.eps) : spread[j];
    int64_t step = -t.stride * vecs * N, at = ((a.rows - 1 - t.row) * vecs + t.col) * N;
    for (int64_t r = t.row; r < a.rows; r += t.stride * UNROLL, at += step * UNROLL) {
        k_vec<T, N> v[UNROLL], z[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows) {
                v[u] = k_load_last<T, N>(x + at + u * step);
                if (ADD)
                    z[u] = k_load_last<T, N>(residual + at + u * step);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows) {
                float f[N], g[N];
                k_unpack(v[u], f);
                if (ADD)
                    k_unpack(z[u], g);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    f[j] = __fmaf_rn(f[j] - mean[j], scale[j], beta[j]);
                    if (ADD)
                        f[j] += g[j];
                    if (RELU)
                        f[j] = k_relu_value(f[j]);
                }
                k_pack(f, v[u]);
                k_put(y + at + u * step, v[u]);
                if constexpr (N == 8 && RELU && ADD)
                    if (a.mask) {
                        unsigned bits = 0;
#pragma unroll
                        for (int j = 0; j < 8; j++)
                            bits |= (f[j] > k_type<T>::vanish ? 1u : 0u) << j;
                        a.mask[(at + u * step) / 8] = (uint8_t)bits;
                    }
            }
    }
}

/* ---------------------------------------------------------------- backward */

enum mask { /* where y > 0 is read: nowhere, recomputed from x, from y, from its mask */
            MASK_NONE,
            MASK_X,
            MASK_Y,
            MASK_BITS
};

template <class T, int N> struct bwd_in { /* one access of all inputs */
    k_vec<T, N> x, dy, dy2, y;
    unsigned bits;
};

/* Per-channel values of a thread, and dz = (dy + dy2) · [y > 0]. */
template <class T, int N, int MASK, bool TWO> struct bwd_channels {
    float mean[N], scale[N], beta[N];

    __device__ void read(const k_norm_bwd_args &a, int col)
    {
        float invstd[N];
        k_get_floats(a.mean + col * N, mean);
        k_get_floats(a.gamma + col * N, scale);
        k_get_floats(a.invstd + col * N, invstd);
        if (MASK == MASK_X)
            k_get_floats(a.beta + col * N, beta);
#pragma unroll
        for (int j = 0; j < N; j++)
            scale[j] *= invstd[j];
    }
    /* LAST: nobody reads these again. Where dz is written, only x is. */
    template <bool LAST>
    __device__ void load(const k_norm_bwd_args &a, int64_t at, bwd_in<T, N> &in) const
    {
        constexpr bool once = LAST || MASK >= MASK_Y;
        in.x = get<LAST>(a.x, at);
        in.dy = get<once>(a.dy, at);
        if (TWO)
            in.dy2 = get<once>(a.dy2, at);
        if (MASK == MASK_Y)
            in.y = get<once>(a.y, at);
        if (MASK == MASK_BITS)
            in.bits = __ldg(a.mask + at / 8);
    }
    template <bool ONCE> static __device__ k_vec<T, N> get(const void *p, int64_t i)
    {
        return ONCE ? k_load_last<T, N>((const T *)p + i) : k_load<T, N>((const T *)p + i);
    }
    /* dz, and x less its mean. The forward pass is repeated operation by operation, so that the mask is that
     * of y as it was rounded. */
    __device__ void compute(const bwd_in<T, N> &in, float (&dz)[N], float (&xc)[N]) const
    {
        float g[N];
        k_unpack(in.x, xc);
        k_unpack(in.dy, dz);
        if (TWO)
            k_unpack(in.dy2, g);
#pragma unroll
        for (int j = 0; j < N; j++) {
            xc[j] -= mean[j];
            if (TWO)
                dz[j] += g[j];
        }
        if (MASK == MASK_Y)
            k_unpack(in.y, g);
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((MASK == MASK_X && !(__fmaf_rn(xc[j], scale[j], beta[j]) > k_type<T>::vanish)) ||
                (MASK == MASK_Y && !(g[j] > 0)) || (MASK == MASK_BITS && !(in.bits >> j & 1)))
                dz[j] = 0;
    }
};

/* part: [block][Σ dz, Σ dz·(x − mean)][c]; dz is written where it is wanted. */
template <class T, int N, int MASK, bool TWO>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_bwd_sums(k_norm_bwd_args a, int vecs, float *__restrict__ part)
{
    constexpr int U = TWO || MASK == MASK_Y ? 2 : UNROLL;
    __shared__ float sm[2][N][SUM_THREADS];
    const k_tile t(vecs, SUM_THREADS);
    bwd_channels<T, N, MASK, TWO> ch;
    float s1[N], s2[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        s1[j] = s2[j] = 0;
    if (!t.idle()) {
        ch.read(a, t.col);
        int64_t step = t.stride * vecs * N, at = (t.row * vecs + t.col) * N;
        for (int64_t r = t.row; r < a.rows; r += t.stride * U, at += step * U) {
            bwd_in<T, N> in[U];
#pragma unroll
            for (int u = 0; u < U; u++)
                if (r + u * t.stride < a.rows)
                    ch.template load<false>(a, at + u * step, in[u]);
#pragma unroll
            for (int u = 0; u < U; u++)
                if (r + u * t.stride < a.rows) {
                    float dz[N], xc[N];
                    ch.compute(in[u], dz, xc);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        s1[j] += dz[j];
                        s2[j] += dz[j] * xc[j];
                    }
                    if (MASK >= MASK_Y && a.dz) { /* without a residual nobody wants it */
                        k_vec<T, N> o;
                        k_pack(dz, o);
                        k_put((T *)a.dz + at + u * step, o);
                    }
                }
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        sm[0][j][threadIdx.x] = s1[j];
        sm[1][j][threadIdx.x] = s2[j];
    }
    __syncthreads();
    for (int left = t.groups; left > 1;) {
        int half = (left + 1) / 2;
        if (!t.idle() && t.group < left - half) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                sm[0][j][threadIdx.x] += sm[0][j][threadIdx.x + half * t.cols];
                sm[1][j][threadIdx.x] += sm[1][j][threadIdx.x + half * t.cols];
            }
        }
        left = half;
        __syncthreads();
    }
    if (!t.idle() && t.group == 0) {
        int64_t c = (int64_t)vecs * N;
        float *o = part + (int64_t)blockIdx.x * 2 * c + (int64_t)t.col * N;
#pragma unroll
        for (int j = 0; j < N; j++) {
            s1[j] = sm[0][j][threadIdx.x];
            s2[j] = sm[1][j][threadIdx.x];
        }
        k_put_floats(o, s1);
        k_put_floats(o + c, s2);
    }
}

__global__ void __launch_bounds__(32 * FINISH)
    k_norm_bwd_finish(const float *part, int blocks, int64_t channels, const float *invstd,
                      float *dgamma, float *dbeta)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double s1 = 0, s2 = 0;
    if (c < channels)
        for (int b = threadIdx.y; b < blocks; b += FINISH) {
            const float *p = part + (int64_t)b * 2 * channels + c;
            s1 += p[0];
            s2 += p[channels];
        }
    s1 = finish_sum(s1);
    s2 = finish_sum(s2);
    if (c < channels && threadIdx.y == 0) {
        dbeta[c] = (float)s1;
        dgamma[c] = (float)(s2 * invstd[c]);
    }
}

/* dx = gamma · invstd · (dz − dbeta/M − (x − mean) · invstd · dgamma/M) */
template <class T, int N, int MASK, bool TWO>
__global__ void __launch_bounds__(APPLY_THREADS) k_norm_bwd_apply(k_norm_bwd_args a, int vecs)
{
    constexpr int U = TWO || MASK == MASK_Y ? 2 : UNROLL;
    const k_tile t(vecs, APPLY_THREADS);
    if (t.idle())
        return;
    bwd_channels<T, N, MASK, TWO> ch;
    float k1[N], k2[N], invstd[N], over_m = 1.0f / (float)a.rows;
    ch.read(a, t.col);
    k_get_floats(a.dbeta + t.col * N, k1);
    k_get_floats(a.dgamma + t.col * N, k2);
    k_get_floats(a.invstd + t.col * N, invstd);
#pragma unroll
    for (int j = 0; j < N; j++) {
        k1[j] *= over_m;
        k2[j] *= invstd[j] * over_m;
    }
    int64_t step = -t.stride * vecs * N, at = ((a.rows - 1 - t.row) * vecs + t.col) * N;
    for (int64_t r = t.row; r < a.rows; r += t.stride * U, at += step * U) {
        bwd_in<T, N> in[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (r + u * t.stride < a.rows)
                ch.template load<true>(a, at + u * step, in[u]);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (r + u * t.stride < a.rows) {
                float dz[N], xc[N];
                ch.compute(in[u], dz, xc);
#pragma unroll
                for (int j = 0; j < N; j++)
                    dz[j] = ch.scale[j] * (dz[j] - k1[j] - xc[j] * k2[j]);
                k_vec<T, N> o;
                k_pack(dz, o);
                k_put((T *)a.dx + at + u * step, o);
            }
    }
}

/* ---------------------------------------------------------------- launches */

template <class T, int N> static dim3 sum_grid(int sms, int64_t rows, int64_t c)
{
    return k_tile_grid(rows, c / N, SUM_THREADS, UNROLL, sms);
}
template <class T, int N> static dim3 apply_grid(int sms, int64_t rows, int64_t c)
{
    return k_tile_grid(rows, c / N, APPLY_THREADS, UNROLL, 2 * sms);
}

/* For the most blocks that a grid can have. */
size_t k_norm_workspace(int type, int sms, int64_t c)
{
    return (size_t)sms * 2 * (size_t)c * sizeof(float);
}

void k_norm_stats(cudaStream_t s, const k_norm_args *a, void *workspace)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
        finish_args f = {(float *)workspace, (int)grid.x, (int)(a->c / N), N, a->rows, a->c, *a};
        k_norm_stats_kernel<T, N>
            <<<grid, SUM_THREADS, 0, s>>>((const T *)a->x, a->rows, f.vecs, (float *)workspace);
        k_norm_stats_finish<<<(unsigned)((a->c + 31) / 32), dim3(32, FINISH), 0, s>>>(f);
    });
}

template <class T, int N, bool RELU, bool ADD>
static void launch_apply(cudaStream_t s, const k_norm_args *a, source from)
{
    k_norm_apply_kernel<T, N, RELU, ADD>
        <<<apply_grid<T, N>(a->sms, a->rows, a->c), APPLY_THREADS, 0, s>>>(
            *a, (int)(a->c / N), from, (const T *)a->x, (const T *)a->residual, (T *)a->y);
}

static void apply(cudaStream_t s, const k_norm_args *a, source from)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (a->relu && a->residual)
            launch_apply<T, N, true, true>(s, a, from);
        else if (a->relu)
            launch_apply<T, N, true, false>(s, a, from);
        else if (a->residual)
            launch_apply<T, N, false, true>(s, a, from);
        else
            launch_apply<T, N, false, false>(s, a, from);
    });
}

void k_norm_apply(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_SAVED);
}

void k_norm_eval(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_RUNNING);
}

void k_norm_train(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_SUMS);
}

void k_norm_bwd_merge(cudaStream_t s, const float *part, int blocks, int64_t c, const float *invstd,
                      float *dgamma, float *dbeta)
{
    k_norm_bwd_finish<<<(unsigned)((c + 31) / 32), dim3(32, FINISH), 0, s>>>(part, blocks, c,
                                                                             invstd, dgamma, dbeta);
}

template <class T, int N, int MASK, bool TWO>
static void launch_sums(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
    k_norm_bwd_sums<T, N, MASK, TWO><<<grid, SUM_THREADS, 0, s>>>(*a, (int)(a->c / N), part);
    k_norm_bwd_merge(s, part, (int)grid.x, a->c, a->invstd, a->dgamma, a->dbeta);
}
template <class T, int N, int MASK, bool TWO>
static void launch_bwd_apply(cudaStream_t s, const k_norm_bwd_args *a)
{
    k_norm_bwd_apply<T, N, MASK, TWO>
        <<<apply_grid<T, N>(a->sms, a->rows, a->c), APPLY_THREADS, 0, s>>>(*a, (int)(a->c / N));
}

template <class T, int N, int MASK>
static void launch_bwd(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    if (a->dy2)
        launch_sums<T, N, MASK, true>(s, a, part);
    else
        launch_sums<T, N, MASK, false>(s, a, part);
    if (a->dz) { /* added and masked already */
        k_norm_bwd_args b = *a;
        b.dy = a->dz;
        launch_bwd_apply<T, N, MASK_NONE, false>(s, &b);
    } else if (a->dy2) {
        launch_bwd_apply<T, N, MASK, true>(s, a);
    } else {
        launch_bwd_apply<T, N, MASK, false>(s, a);
    }
}

void k_norm_bwd(cudaStream_t s, const k_norm_bwd_args *a, void *workspace)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (!a->relu)
            launch_bwd<T, N, MASK_NONE>(s, a, (float *)workspace);
        else if (a->y)
            launch_bwd<T, N, MASK_Y>(s, a, (float *)workspace);
        else if (!a->mask)
            launch_bwd<T, N, MASK_X>(s, a, (float *)workspace);
        else if constexpr (N == 8)
            launch_bwd<T, N, MASK_BITS>(s, a, (float *)workspace);
    });
}
