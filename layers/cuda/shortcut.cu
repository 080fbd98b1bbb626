/* shortcut.cu: the parameter-free shortcut: every stride-th pixel, zero channels around x's. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 256

template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_shortcut_kernel(k_shortcut_args a, const T *__restrict__ x, T *__restrict__ y)
{
    int vecs = a.k / N;
    int64_t items = (int64_t)a.n * a.p * a.q * vecs;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        int64_t r = it / vecs;
        int c = (int)(it % vecs) * N - a.before, q = (int)(r % a.q), p = (int)(r / a.q % a.p);
        int64_t n = r / a.q / a.p;
        k_vec<T, N> v;
        if (c >= 0 && c < a.c) {
            v = k_load<T, N>(x + ((n * a.h + p * a.stride) * a.w + q * a.stride) * a.c + c);
        } else {
            float zero[N] = {};
            k_pack(zero, v);
        }
        k_put(y + it * N, v);
    }
}

template <class T, int N>
__global__ void __launch_bounds__(THREADS)
    k_shortcut_bwd_kernel(k_shortcut_args a, const T *__restrict__ dy, T *__restrict__ dx)
{
    int vecs = a.c / N;
    int64_t items = (int64_t)a.n * a.h * a.w * vecs;
    for (int64_t it = (int64_t)blockIdx.x * THREADS + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * THREADS) {
        int64_t r = it / vecs;
        int c = (int)(it % vecs) * N, w = (int)(r % a.w), h = (int)(r / a.w % a.h);
        int64_t n = r / a.w / a.h;
        k_vec<T, N> v;
        if (h % a.stride == 0 && w % a.stride == 0) {
            v = k_load<T, N>(dy + ((n * a.p + h / a.stride) * a.q + w / a.stride) * a.k + a.before +
                             c);
        } else {
            float zero[N] = {};
            k_pack(zero, v);
        }
        k_put(dx + it * N, v);
    }
}

/* Whole accesses need x's channels to begin and end on their bounds in y, too. */
static int64_t multiple(const k_shortcut_args *a)
{
    return a->before % 8 == 0 && a->c % 8 == 0 && a->k % 8 == 0 ? 8 : 1;
}

void k_shortcut(cudaStream_t s, const k_shortcut_args *a, const void *x, void *y)
{
    k_by_width(a->type, multiple(a), [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        unsigned grid = k_blocks((int64_t)a->n * a->p * a->q * a->k / N, THREADS, 32 * a->sms);
        k_shortcut_kernel<T, N><<<grid, THREADS, 0, s>>>(*a, (const T *)x, (T *)y);
    });
}

void k_shortcut_bwd(cudaStream_t s, const k_shortcut_args *a, const void *dy, void *dx)
{
    k_by_width(a->type, multiple(a), [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        unsigned grid = k_blocks((int64_t)a->n * a->h * a->w * a->c / N, THREADS, 32 * a->sms);
        k_shortcut_bwd_kernel<T, N><<<grid, THREADS, 0, s>>>(*a, (const T *)dy, (T *)dx);
    });
}
