/* conv.cu: widening weight gradients to fp32, and convolutions as plain loops for the shapes that cuDNN does not take. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 256

/* A block has CHUNK elements of one tensor. */
#define CHUNK (THREADS * 16)

struct widen_args {
    k_widen_args a;
    int first[K_WIDEN_MOST + 1]; /* block of each tensor */
};

template <class T>
__global__ void __launch_bounds__(THREADS) k_widen_kernel(const __grid_constant__ widen_args w)
{
    constexpr int N = k_type<T>::wide;
    int i = 0;
    while ((int)blockIdx.x >= w.first[i + 1])
        i++;
    const int64_t begin = (int64_t)((int)blockIdx.x - w.first[i]) * CHUNK, n = w.a.count[i];
    const T *x = (const T *)w.a.x[i];
    float *y = w.a.y[i];
#pragma unroll
    for (int u = 0; u < CHUNK / THREADS / N; u++) {
        const int64_t at = begin + (int64_t)(u * THREADS + (int)threadIdx.x) * N;
        if (at + N <= n) {
            float f[N];
            k_unpack(k_load_last<T, N>(x + at), f);
            k_put_floats(y + at, f);
        } else {
            for (int64_t e = at; e < n; e++)
                y[e] = k_type<T>::load(x[e]);
        }
    }
}

void k_widen(cudaStream_t s, const k_widen_args *a)
{
    widen_args w = {*a, {0}};
    for (int i = 0; i < a->n; i++)
        w.first[i + 1] = w.first[i] + (int)((a->count[i] + CHUNK - 1) / CHUNK);
    k_by_type(a->type, [&](auto t) {
        k_widen_kernel<decltype(t)><<<(unsigned)w.first[a->n], THREADS, 0, s>>>(w);
    });
}

/* A thread for each output. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_fprop_kernel(k_conv_args a, const T *__restrict__ x, const T *__restrict__ w, T *y)
{
    int64_t items = (int64_t)a.n * a.p * a.q * a.k;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        int64_t k = it % a.k, r = it / a.k, q = r % a.q, p = r / a.q % a.p, n = r / a.q / a.p;
        float sum = 0;
        for (int u = 0; u < a.kernel; u++)
            for (int v = 0; v < a.kernel; v++) {
                int64_t h = p * a.stride - a.pad + u, b = q * a.stride - a.pad + v;
                if (h < 0 || h >= a.h || b < 0 || b >= a.w)
                    continue;
                const T *xp = x + ((n * a.h + h) * a.w + b) * a.c;
                const T *wp = w + ((k * a.kernel + u) * a.kernel + v) * a.c;
                for (int c = 0; c < a.c; c++)
                    sum += k_type<T>::load(xp[c]) * k_type<T>::load(wp[c]);
            }
        y[it] = k_type<T>::store(sum);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_dgrad_kernel(k_conv_args a, const T *__restrict__ dy, const T *__restrict__ w, T *dx)
{
    int64_t items = (int64_t)a.n * a.h * a.w * a.c;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        int64_t c = it % a.c, r = it / a.c, b = r % a.w, h = r / a.w % a.h, n = r / a.w / a.h;
        float sum = 0;
        for (int u = 0; u < a.kernel; u++)
            for (int v = 0; v < a.kernel; v++) {
                int64_t p = h + a.pad - u, q = b + a.pad - v;
                if (p < 0 || q < 0 || p % a.stride || q % a.stride)
                    continue;
                p /= a.stride;
                q /= a.stride;
                if (p >= a.p || q >= a.q)
                    continue;
                const T *dp = dy + ((n * a.p + p) * a.q + q) * a.k;
                for (int64_t k = 0; k < a.k; k++)
                    sum += k_type<T>::load(dp[k]) *
                           k_type<T>::load(w[((k * a.kernel + u) * a.kernel + v) * a.c + c]);
            }
        dx[it] = k_type<T>::store(sum);
    }
}

/* A warp for each weight: lanes share the pixels out and merge in a fixed order. */
template <class T, class W>
__global__ void __launch_bounds__(THREADS)
    k_wgrad_kernel(k_conv_args a, const T *__restrict__ x, const T *__restrict__ dy, W *dw)
{
    int64_t items = (int64_t)a.k * a.kernel * a.kernel * a.c, pixels = (int64_t)a.n * a.p * a.q;
    int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    int lane = (int)threadIdx.x % 32;
    for (int64_t it = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; it < items;
         it += warps) {
        int64_t c = it % a.c, r = it / a.c, v = r % a.kernel, u = r / a.kernel % a.kernel;
        int64_t k = r / a.kernel / a.kernel;
        float sum = 0;
        for (int64_t i = lane; i < pixels; i += 32) {
            int64_t q = i % a.q, p = i / a.q % a.p, n = i / a.q / a.p;
            int64_t h = p * a.stride - a.pad + u, b = q * a.stride - a.pad + v;
            if (h >= 0 && h < a.h && b >= 0 && b < a.w)
                sum += k_type<T>::load(x[((n * a.h + h) * a.w + b) * a.c + c]) *
                       k_type<T>::load(dy[i * a.k + k]);
        }
        for (int half = 16; half > 0; half /= 2)
            sum += __shfl_down_sync(~0u, sum, half);
        if (lane == 0)
            dw[it] = k_type<W>::store(sum);
    }
}

void k_conv_fprop(cudaStream_t s, const k_conv_args *a, const void *x, const void *w, void *y)
{
    unsigned grid = k_blocks((int64_t)a->n * a->p * a->q * a->k, THREADS, 32 * a->sms);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_fprop_kernel<T><<<grid, THREADS, 0, s>>>(*a, (const T *)x, (const T *)w, (T *)y);
    });
}

void k_conv_dgrad(cudaStream_t s, const k_conv_args *a, const void *dy, const void *w, void *dx)
{
    unsigned grid = k_blocks((int64_t)a->n * a->h * a->w * a->c, THREADS, 32 * a->sms);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_dgrad_kernel<T><<<grid, THREADS, 0, s>>>(*a, (const T *)dy, (const T *)w, (T *)dx);
    });
}

void k_conv_wgrad(cudaStream_t s, const k_conv_args *a, const void *x, const void *dy, int dw_type,
                  void *dw)
{
    unsigned grid =
        k_blocks((int64_t)a->k * a->kernel * a->kernel * a->c, THREADS / 32, 64 * a->sms);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        if (dw_type == a->type)
            k_wgrad_kernel<T, T><<<grid, THREADS, 0, s>>>(*a, (const T *)x, (const T *)dy, (T *)dw);
        else
            k_wgrad_kernel<T, float>
                <<<grid, THREADS, 0, s>>>(*a, (const T *)x, (const T *)dy, (float *)dw);
    });
}
