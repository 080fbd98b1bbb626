/* conv_packed.cu: weights to and from the layouts of packed pictures. A few thousand elements. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"
#include "fold.cuh"

#define THREADS 256

/* Element [k,r,s,c] of w in its packed form. */
__device__ __forceinline__ int64_t packed_at(const k_packed_args &a, int k, int r, int s, int c)
{
    if (!a.blocks)
        return ((int64_t)(k * a.kernel + r) * a.kernel + s) * 4 + c;
    r += a.lead;
    s += a.lead;
    return ((int64_t)(k * a.m + r / 2) * a.m + s / 2) * 16 + (r % 2 * 2 + s % 2) * 4 + c;
}

/* Where element i of the packed form comes from in w; −1: w lacks it. Sets its output channel. */
__device__ __forceinline__ int unpacked_at(const k_packed_args &a, int i, int *k)
{
    int r, s, c = i % 4, pixel = i / (a.blocks ? 16 : 4);
    *k = pixel / a.m / a.m;
    r = pixel / a.m % a.m;
    s = pixel % a.m;
    if (a.blocks) {
        r = 2 * r + i / 8 % 2 - a.lead;
        s = 2 * s + i / 4 % 2 - a.lead;
    }
    bool there = c < 3 && r >= 0 && r < a.kernel && s >= 0 && s < a.kernel;
    return there ? ((*k * a.kernel + r) * a.kernel + s) * 3 + c : -1;
}

/* A thread for each element of the packed form: those that w lacks are 0. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_pack_weight_kernel(k_packed_args a, int items, const T *__restrict__ w,
                         T *__restrict__ packed)
{
    int i = (int)(blockIdx.x * THREADS + threadIdx.x), k;
    if (i >= items)
        return;
    int at = unpacked_at(a, i, &k);
    packed[i] = at >= 0 ? w[at] : k_type<T>::store(0);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_fold_norm_packed_kernel(k_fold_norm_args f, k_packed_args a, int items)
{
    int i = (int)(blockIdx.x * THREADS + threadIdx.x), k;
    if (i >= items)
        return;
    int at = unpacked_at(a, i, &k);
    const double factor = fold_factor(f, k);
    ((T *)f.folded)[i] = k_type<T>::store(at >= 0 ? f.w[at] * (float)factor : 0.0f);
    if (i % (items / f.k) == 0)
        fold_bias<T>(f, k, factor);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_unpack_dw_kernel(k_packed_args a, int items, const T *__restrict__ packed,
                       float *__restrict__ dw)
{
    int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (i >= items)
        return;
    int c = i % 3, s = i / 3 % a.kernel, r = i / 3 / a.kernel % a.kernel;
    dw[i] = k_type<T>::load(packed[packed_at(a, i / 3 / a.kernel / a.kernel, r, s, c)]);
}

void k_pack_weight(cudaStream_t s, const k_packed_args *a, const void *w, void *packed)
{
    int items = a->k * a->m * a->m * (a->blocks ? 16 : 4);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_pack_weight_kernel<T><<<(unsigned)((items + THREADS - 1) / THREADS), THREADS, 0, s>>>(
            *a, items, (const T *)w, (T *)packed);
    });
}

void k_fold_norm_packed(cudaStream_t s, const k_fold_norm_args *f, const k_packed_args *a)
{
    int items = a->k * a->m * a->m * (a->blocks ? 16 : 4);
    k_by_type(f->type, [&](auto t) {
        k_fold_norm_packed_kernel<decltype(t)>
            <<<(unsigned)((items + THREADS - 1) / THREADS), THREADS, 0, s>>>(*f, *a, items);
    });
}

void k_unpack_dw(cudaStream_t s, const k_packed_args *a, const void *packed, float *dw)
{
    int items = a->k * a->kernel * a->kernel * 3;
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_unpack_dw_kernel<T><<<(unsigned)((items + THREADS - 1) / THREADS), THREADS, 0, s>>>(
            *a, items, (const T *)packed, dw);
    });
}
