/* conv.cu: widening dw to fp32, and convolutions as plain loops for the shapes that cuDNN does not take. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 256

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_widen_kernel(const T *__restrict__ x, float *__restrict__ y, int64_t n)
{
    int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t stride = (int64_t)gridDim.x * THREADS, whole = n / 4;
    for (int64_t i = first; i < whole; i += stride) {
        float f[4];
        k_vec<float, 4> v;
        k_unpack(*(const k_vec<T, 4> *)(x + i * 4), f);
        k_pack(f, v);
        k_put(y + i * 4, v);
    }
    for (int64_t i = whole * 4 + first; i < n; i += stride)
        y[i] = k_type<T>::load(x[i]);
}

void k_widen(cudaStream_t s, int type, int sms, const void *x, float *y, int64_t n)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_widen_kernel<T><<<k_blocks(n, THREADS * 4, 8 * sms), THREADS, 0, s>>>((const T *)x, y, n);
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
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_wgrad_kernel(k_conv_args a, const T *__restrict__ x, const T *__restrict__ dy, float *dw)
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
            dw[it] = sum;
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

void k_conv_wgrad(cudaStream_t s, const k_conv_args *a, const void *x, const void *dy, float *dw)
{
    unsigned grid =
        k_blocks((int64_t)a->k * a->kernel * a->kernel * a->c, THREADS / 32, 64 * a->sms);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_wgrad_kernel<T><<<grid, THREADS, 0, s>>>(*a, (const T *)x, (const T *)dy, dw);
    });
}
