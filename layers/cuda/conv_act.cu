/* conv_act.cu: what evaluation has beside convolutions: bias, residual and ReLU where no engine has them in its epilogue;
 * the stem's pool with bias and ReLU; and norms folded into weights. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"
#include "fold.cuh"

#define THREADS 256
#define PER_SM  4
#define UNROLL  4

template <class T, int N>
__global__ void __launch_bounds__(THREADS) k_bias_act_kernel(k_bias_act_args a, int vecs)
{
    const k_tile t(vecs, THREADS);
    if (t.idle())
        return;
    const T *residual = (const T *)a.residual;
    T *y = (T *)a.y;
    float bias[N];
    k_get_floats(a.bias + t.col * N, bias);
    int64_t step = -t.stride * vecs * N, at = ((a.rows - 1 - t.row) * vecs + t.col) * N;
    for (int64_t r = t.row; r < a.rows; r += t.stride * UNROLL, at += step * UNROLL) {
        k_vec<T, N> v[UNROLL], z[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows) {
                v[u] = *(const k_vec<T, N> *)(y + at + u * step);
                if (residual)
                    z[u] = k_load_last<T, N>(residual + at + u * step);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows) {
                float f[N], g[N];
                k_unpack(v[u], f);
                if (residual)
                    k_unpack(z[u], g);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    f[j] += bias[j];
                    if (residual)
                        f[j] += g[j];
                    if (a.relu)
                        f[j] = k_relu_value(f[j]);
                }
                k_pack(f, v[u]);
                k_put(y + at + u * step, v[u]);
            }
    }
}

/* W: the kernel itself, whose loads are then all in flight, or 1 for any. */
template <class T, int N, int W>
__global__ void __launch_bounds__(THREADS, W > 1 ? 2 : 1)
    k_max_pool_act_kernel(k_pool_args a, int vecs, const T *__restrict__ x,
                          const float *__restrict__ bias, T *__restrict__ y)
{
    const k_tile t(vecs, THREADS);
    if (t.idle())
        return;
    float b[N];
    k_get_floats(bias + t.col * N, b);
    const int64_t rows = (int64_t)a.n * a.p * a.q;
    for (int64_t row = t.row; row < rows; row += t.stride) {
        const int q = (int)(row % a.q), p = (int)(row / a.q % a.p);
        const int64_t n = row / a.q / a.p;
        const int h0 = p * a.stride - a.pad, w0 = q * a.stride - a.pad;
        float best[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            best[j] = -INFINITY;
        auto at = [&](int h, int w) { return x + (((n * a.h + h) * a.w + w) * vecs + t.col) * N; };
        auto take = [&](const k_vec<T, N> &v) {
            float f[N];
            k_unpack(v, f);
#pragma unroll
            for (int j = 0; j < N; j++) /* NaN wins and stays */
                best[j] = f[j] > best[j] || f[j] != f[j] ? f[j] : best[j];
        };
        if constexpr (W > 1) {
            k_vec<T, N> v[W][W];
#pragma unroll
            for (int r = 0; r < W; r++)
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (h0 + r >= 0 && h0 + r < a.h && w0 + s >= 0 && w0 + s < a.w)
                        v[r][s] = k_load<T, N>(at(h0 + r, w0 + s));
#pragma unroll
            for (int r = 0; r < W; r++)
#pragma unroll
                for (int s = 0; s < W; s++)
                    if (h0 + r >= 0 && h0 + r < a.h && w0 + s >= 0 && w0 + s < a.w)
                        take(v[r][s]);
        } else {
            for (int r = 0; r < a.kernel; r++)
                for (int s = 0; s < a.kernel; s++)
                    if (h0 + r >= 0 && h0 + r < a.h && w0 + s >= 0 && w0 + s < a.w)
                        take(k_load<T, N>(at(h0 + r, w0 + s)));
        }
        k_vec<T, N> out;
#pragma unroll
        for (int j = 0; j < N; j++)
            best[j] = k_relu_value(best[j] + b[j]);
        k_pack(best, out);
        k_put(y + (row * vecs + t.col) * N, out);
    }
}

/* A block for each output channel. */
template <class T> __global__ void __launch_bounds__(THREADS) k_fold_norm_kernel(k_fold_norm_args a)
{
    const int k = (int)blockIdx.x;
    const double factor = fold_factor(a, k);
    const float f = (float)factor;
    const float *w = a.w + (int64_t)k * a.each;
    T *folded = (T *)a.folded + (int64_t)k * a.each;
    if (threadIdx.x == 0)
        fold_bias<T>(a, k, factor);
    for (int i = threadIdx.x; i < a.each; i += THREADS)
        folded[i] = k_type<T>::store(w[i] * f);
}

/* ---------------------------------------------------------------- launches */

void k_bias_act(cudaStream_t s, const k_bias_act_args *a)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        const dim3 grid = k_tile_grid(a->rows, a->c / N, THREADS, UNROLL, PER_SM * a->sms);
        k_bias_act_kernel<T, N><<<grid, THREADS, 0, s>>>(*a, (int)(a->c / N));
    });
}

void k_max_pool_act(cudaStream_t s, const k_pool_args *a, const void *x, const float *bias, void *y)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        const int vecs = a->c / N;
        const dim3 grid =
            k_tile_grid((int64_t)a->n * a->p * a->q, vecs, THREADS, 1, PER_SM * a->sms);
        if (a->kernel == 3)
            k_max_pool_act_kernel<T, N, 3>
                <<<grid, THREADS, 0, s>>>(*a, vecs, (const T *)x, bias, (T *)y);
        else
            k_max_pool_act_kernel<T, N, 1>
                <<<grid, THREADS, 0, s>>>(*a, vecs, (const T *)x, bias, (T *)y);
    });
}

void k_fold_norm(cudaStream_t s, const k_fold_norm_args *a)
{
    k_by_type(a->type, [&](auto t) {
        k_fold_norm_kernel<decltype(t)><<<(unsigned)a->k, THREADS, 0, s>>>(*a);
    });
}
