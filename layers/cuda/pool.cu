/* pool.cu: maximum and average over windows, and the average over whole pictures. Backward gathers, so that
 * no two threads write one element. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 256

/* One access of `vecs` channel groups at pixel (n, i, j) of an [n, rows, cols] picture. */
struct k_at {
    int v, i, j, n;
    __device__ k_at(int64_t item, int vecs, int rows, int cols)
    {
        v = (int)(item % vecs);
        item /= vecs;
        j = (int)(item % cols);
        item /= cols;
        i = (int)(item % rows);
        n = (int)(item / rows);
    }
};
__device__ __forceinline__ int64_t offset(int n, int i, int j, int v, int rows, int cols, int vecs)
{
    return (((int64_t)n * rows + i) * cols + j) * vecs + v;
}

/* Windows that cover pixel i: those from *lo up to, and without, *hi. */
__device__ __forceinline__ void windows(int i, int kernel, int stride, int pad, int outputs,
                                        int *lo, int *hi)
{
    int first = i + pad - kernel + 1;
    *lo = first > 0 ? (first + stride - 1) / stride : 0;
    *hi = (i + pad) / stride + 1;
    *hi = *hi < outputs ? *hi : outputs;
}

/* N indices of a byte each, in one access */
template <int N> struct alignas(N) k_bytes {
    uint8_t v[N];
};

/* W columns of the window are loaded at once; W is the kernel itself where that is 3. */
template <class T, int N, int W>
__global__ void __launch_bounds__(THREADS)
    k_max_pool_kernel(k_pool_args a, int vecs, const T *__restrict__ x, T *__restrict__ y,
                      uint8_t *__restrict__ index)
{
    const int kernel = W > 1 ? W : a.kernel;
    int64_t items = (int64_t)a.n * a.p * a.q * vecs;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        k_at o(it, vecs, a.p, a.q);
        float best[N];
        k_bytes<N> at;
        bool any = false;
#pragma unroll
        for (int r = 0; r < kernel; r++) {
            int h = o.i * a.stride - a.pad + r;
            if (h < 0 || h >= a.h)
                continue;
            for (int s0 = 0; s0 < kernel; s0 += W) {
                k_vec<T, N> v[W];
                bool inside[W];
#pragma unroll
                for (int s = 0; s < W; s++) {
                    int w = o.j * a.stride - a.pad + s0 + s;
                    inside[s] = w >= 0 && w < a.w;
                    if (inside[s])
                        v[s] = k_load<T, N>(x + offset(o.n, h, w, o.v, a.h, a.w, vecs) * N);
                }
#pragma unroll
                for (int s = 0; s < W; s++) {
                    float f[N];
                    if (!inside[s])
                        continue;
                    k_unpack(v[s], f);
#pragma unroll
                    for (int j = 0; j < N; j++)
                        if (!any || f[j] > best[j] || (f[j] != f[j] && best[j] == best[j])) {
                            best[j] = f[j];
                            at.v[j] = (uint8_t)(r * kernel + s0 + s);
                        }
                    any = true;
                }
            }
        }
        if (a.positive)
#pragma unroll
            for (int j = 0; j < N; j++)
                at.v[j] = best[j] > 0 ? at.v[j] : 255;
        k_vec<T, N> v;
        k_pack(best, v);
        k_put(y + it * N, v);
        *(k_bytes<N> *)(index + it * N) = at;
    }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_max_pool_bwd_kernel(k_pool_args a, int vecs, const T *__restrict__ dy,
                          const uint8_t *__restrict__ index, T *__restrict__ dx)
{
    int64_t items = (int64_t)a.n * a.h * a.w * vecs;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        k_at o(it, vecs, a.h, a.w);
        float sum[N];
        int p0, p1, q0, q1;
        windows(o.i, a.kernel, a.stride, a.pad, a.p, &p0, &p1);
        windows(o.j, a.kernel, a.stride, a.pad, a.q, &q0, &q1);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = 0;
        for (int p = p0; p < p1; p++)
            for (int q = q0; q < q1; q++) {
                int64_t at = offset(o.n, p, q, o.v, a.p, a.q, vecs) * N;
                int me = (o.i + a.pad - p * a.stride) * a.kernel + (o.j + a.pad - q * a.stride);
                k_bytes<N> k = *(const k_bytes<N> *)(index + at);
                float f[N];
                k_unpack(k_load<T, N>(dy + at), f);
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum[j] += k.v[j] == me ? f[j] : 0;
            }
        k_vec<T, N> v;
        k_pack(sum, v);
        k_put(dx + it * N, v);
    }
}

/* The same for kernel 3, stride 2, pad 1 and even sides, the one that matters: a thread has 2×2 pixels, which
 * four windows cover, so that each dy is read by four threads rather than by nine. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_max_pool_bwd_322(k_pool_args a, int vecs, const T *__restrict__ dy,
                       const uint8_t *__restrict__ index, T *__restrict__ dx)
{
    int64_t items = (int64_t)a.n * a.p * a.q * vecs;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        k_at o(it, vecs, a.p, a.q);
        k_vec<T, N> d[2][2];
        k_bytes<N> k[2][2];
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++) { /* windows (i + e, j + f); past the edge none matches */
                bool there = o.i + e < a.p && o.j + f < a.q;
                int64_t at =
                    offset(o.n, o.i + (there ? e : 0), o.j + (there ? f : 0), o.v, a.p, a.q, vecs) *
                    N;
                d[e][f] = k_load<T, N>(dy + at);
                k[e][f] = *(const k_bytes<N> *)(index + at);
#pragma unroll
                for (int j = 0; j < N; j++)
                    k[e][f].v[j] = there ? k[e][f].v[j] : 255;
            }
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++) { /* pixel (2i + e, 2j + f) */
                float sum[N];
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum[j] = 0;
#pragma unroll
                for (int r = 0; r <= e; r++)
#pragma unroll
                    for (int s = 0; s <= f; s++) {
                        int me = (e + 1 - 2 * r) * 3 + (f + 1 - 2 * s);
                        float g[N];
                        k_unpack(d[r][s], g);
#pragma unroll
                        for (int j = 0; j < N; j++)
                            sum[j] += k[r][s].v[j] == me ? g[j] : 0;
                    }
                k_vec<T, N> v;
                k_pack(sum, v);
                k_put(dx + offset(o.n, 2 * o.i + e, 2 * o.j + f, o.v, a.h, a.w, vecs) * N, v);
            }
    }
}

/* dst ← `over` times the sum of src [n, height, width, c] over rows [r0, r1) and columns [s0, s1) of picture and vector
 * of o. */
template <class T, int N>
__device__ void sum_part(const T *__restrict__ src, const k_at &o, int r0, int r1, int s0, int s1,
                         int height, int width, int vecs, float over, T *__restrict__ dst)
{
    float sum[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        sum[j] = 0;
    for (int r = r0; r < r1; r++)
        for (int s = s0; s < s1; s++) {
            float f[N];
            k_unpack(k_load<T, N>(src + offset(o.n, r, s, o.v, height, width, vecs) * N), f);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] += f[j];
        }
    k_vec<T, N> v;
#pragma unroll
    for (int j = 0; j < N; j++)
        sum[j] *= over;
    k_pack(sum, v);
    k_put(dst, v);
}

/* The padding counts as zeros, so the divisor is always kernel². */
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_avg_pool_kernel(k_pool_args a, int vecs, const T *__restrict__ x, T *__restrict__ y)
{
    int64_t items = (int64_t)a.n * a.p * a.q * vecs;
    float over = 1.0f / (float)(a.kernel * a.kernel);
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        k_at o(it, vecs, a.p, a.q);
        int h = o.i * a.stride - a.pad, w = o.j * a.stride - a.pad;
        sum_part<T, N>(x, o, max(h, 0), min(h + a.kernel, a.h), max(w, 0), min(w + a.kernel, a.w),
                       a.h, a.w, vecs, over, y + it * N);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_avg_pool_bwd_kernel(k_pool_args a, int vecs, const T *__restrict__ dy, T *__restrict__ dx)
{
    int64_t items = (int64_t)a.n * a.h * a.w * vecs;
    float over = 1.0f / (float)(a.kernel * a.kernel);
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        k_at o(it, vecs, a.h, a.w);
        int p0, p1, q0, q1;
        windows(o.i, a.kernel, a.stride, a.pad, a.p, &p0, &p1);
        windows(o.j, a.kernel, a.stride, a.pad, a.q, &q0, &q1);
        sum_part<T, N>(dy, o, p0, p1, q0, q1, a.p, a.q, vecs, over, dx + it * N);
    }
}

/* ---------------------------------------------------------------- whole pictures */

/* A block for each picture (x) and part of its channels (y); threads share the pixels out and merge in pairs. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_global_pool_kernel(int pixels, int vecs, int width, const T *__restrict__ x,
                         T *__restrict__ y)
{
    __shared__ float sm[N][THREADS];
    int first = (int)blockIdx.y * width, cols = vecs - first < width ? vecs - first : width;
    int groups = THREADS / cols, group = (int)threadIdx.x / cols;
    int col = first + (int)threadIdx.x % cols;
    float sum[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        sum[j] = 0;
    if (group < groups) {
        const T *p = x + ((int64_t)blockIdx.x * pixels * vecs + col) * N;
#pragma unroll 4
        for (int i = group; i < pixels; i += groups) {
            float f[N];
            k_unpack(k_load_last<T, N>(p + (int64_t)i * vecs * N), f);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] += f[j];
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        sm[j][threadIdx.x] = sum[j];
    __syncthreads();
    for (int left = groups; left > 1;) {
        int half = (left + 1) / 2;
        if (group < left - half) {
#pragma unroll
            for (int j = 0; j < N; j++)
                sm[j][threadIdx.x] += sm[j][threadIdx.x + half * cols];
        }
        left = half;
        __syncthreads();
    }
    if (group == 0) {
        k_vec<T, N> v;
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = sm[j][threadIdx.x] / (float)pixels;
        k_pack(sum, v);
        k_put(y + ((int64_t)blockIdx.x * vecs + col) * N, v);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_global_pool_bwd_kernel(int64_t items, int pixels, int vecs, const T *__restrict__ dy,
                             T *__restrict__ dx)
{
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        int64_t picture = it / vecs / pixels;
        float f[N];
        k_vec<T, N> v = k_load<T, N>(dy + (picture * vecs + it % vecs) * N);
        k_unpack(v, f);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] /= (float)pixels;
        k_pack(f, v);
        k_put(dx + it * N, v);
    }
}

/* ---------------------------------------------------------------- launches */

template <class F> static void widths(const k_pool_args *a, F f)
{
    k_by_width(a->type, a->c, f);
}
static unsigned grid_of(const k_pool_args *a, int64_t items)
{
    return k_blocks(items, THREADS, 32 * a->sms);
}

void k_max_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y, uint8_t *index)
{
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        unsigned grid = grid_of(a, (int64_t)a->n * a->p * a->q * vecs);
        if (a->kernel == 3)
            k_max_pool_kernel<T, N, 3>
                <<<grid, THREADS, 0, s>>>(*a, vecs, (const T *)x, (T *)y, index);
        else
            k_max_pool_kernel<T, N, 1>
                <<<grid, THREADS, 0, s>>>(*a, vecs, (const T *)x, (T *)y, index);
    });
}

void k_max_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, const uint8_t *index,
                    void *dx)
{
    bool quads =
        a->kernel == 3 && a->stride == 2 && a->pad == 1 && a->h == 2 * a->p && a->w == 2 * a->q;
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        if (quads)
            k_max_pool_bwd_322<T, N>
                <<<grid_of(a, (int64_t)a->n * a->p * a->q * vecs), THREADS, 0, s>>>(
                    *a, vecs, (const T *)dy, index, (T *)dx);
        else
            k_max_pool_bwd_kernel<T, N>
                <<<grid_of(a, (int64_t)a->n * a->h * a->w * vecs), THREADS, 0, s>>>(
                    *a, vecs, (const T *)dy, index, (T *)dx);
    });
}

void k_avg_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y)
{
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        k_avg_pool_kernel<T, N><<<grid_of(a, (int64_t)a->n * a->p * a->q * vecs), THREADS, 0, s>>>(
            *a, vecs, (const T *)x, (T *)y);
    });
}

void k_avg_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, void *dx)
{
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        k_avg_pool_bwd_kernel<T, N>
            <<<grid_of(a, (int64_t)a->n * a->h * a->w * vecs), THREADS, 0, s>>>(
                *a, vecs, (const T *)dy, (T *)dx);
    });
}

void k_global_pool(cudaStream_t s, const k_pool_args *a, const void *x, void *y)
{
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        /* channels of a block: few pictures leave its threads to share the pixels out */
        const int width = (int64_t)a->n * vecs < (int64_t)a->sms * THREADS ? 16 : THREADS;
        dim3 grid((unsigned)a->n, (unsigned)((vecs + width - 1) / width));
        k_global_pool_kernel<T, N>
            <<<grid, THREADS, 0, s>>>(a->h * a->w, vecs, width, (const T *)x, (T *)y);
    });
}

void k_global_pool_bwd(cudaStream_t s, const k_pool_args *a, const void *dy, void *dx)
{
    widths(a, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        int vecs = a->c / N;
        int64_t items = (int64_t)a->n * a->h * a->w * vecs;
        k_global_pool_bwd_kernel<T, N><<<grid_of(a, items), THREADS, 0, s>>>(
            items, a->h * a->w, vecs, (const T *)dy, (T *)dx);
    });
}
