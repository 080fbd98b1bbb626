/* act.cu: ReLU on its own. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 256

/* n / N whole accesses, then the rest one by one. BWD: dx = dy · [y > 0], else y = max(x, 0). */
template <class T, bool BWD>
__global__ void __launch_bounds__(THREADS)
    k_relu_kernel(const T *a, const T *dy, T *out, int64_t n) /* out may be a or dy */
{
    constexpr int N = k_type<T>::wide;
    int64_t whole = n / N, first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t stride = (int64_t)gridDim.x * THREADS;
    for (int64_t i = first; i < whole; i += stride) {
        float f[N], g[N];
        k_vec<T, N> v = k_load_last<T, N>(a + i * N), w = v;
        if (BWD)
            w = k_load_last<T, N>(dy + i * N);
        k_unpack(v, f);
        k_unpack(w, g);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] = BWD ? (f[j] > 0 ? g[j] : 0) : k_relu_value(f[j]);
        k_pack(f, v);
        k_put(out + i * N, v);
    }
    for (int64_t i = whole * N + first; i < n; i += stride) {
        float f = k_type<T>::load(a[i]);
        out[i] = k_type<T>::store(BWD ? (f > 0 ? k_type<T>::load(dy[i]) : 0) : k_relu_value(f));
    }
}

template <bool BWD>
static void launch(cudaStream_t s, int type, int sms, const void *a, const void *dy, void *out,
                   int64_t n)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        unsigned grid = k_blocks(n, THREADS * k_type<T>::wide, 8 * sms);
        k_relu_kernel<T, BWD><<<grid, THREADS, 0, s>>>((const T *)a, (const T *)dy, (T *)out, n);
    });
}

void k_relu(cudaStream_t s, int type, int sms, const void *x, void *y, int64_t n)
{
    launch<false>(s, type, sms, x, nullptr, y, n);
}

void k_relu_bwd(cudaStream_t s, int type, int sms, const void *y, const void *dy, void *dx,
                int64_t n)
{
    launch<true>(s, type, sms, y, dy, dx, n);
}
