/* vec.cuh: element types, 16-byte accesses and launch shapes of our kernels.
 *
 * A kernel is a template over the element type T and the elements N of one access: 16 bytes where the
 * channels allow it, one element otherwise. Arithmetic is in fp32. */
#ifndef DNR_VEC_CUH
#define DNR_VEC_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../tensor.h"

template <class T> struct k_type;
template <> struct k_type<float> {
    static constexpr int wide = 4;
    /* a value above this stays positive when rounded to T */
    static constexpr float vanish = 0.0f;
    static __device__ float load(float v)
    {
        return v;
    }
    static __device__ float store(float v)
    {
        return v;
    }
};
template <> struct k_type<__half> {
    static constexpr int wide = 8;
    static constexpr float vanish = 0x1p-25f; /* a tie, which goes to even: 0 */
    static __device__ float load(__half v)
    {
        return __half2float(v);
    }
    static __device__ __half store(float v)
    {
        return __float2half_rn(v);
    }
};
template <> struct k_type<__nv_bfloat16> {
    static constexpr int wide = 8;
    static constexpr float vanish = 0x1p-134f;
    static __device__ float load(__nv_bfloat16 v)
    {
        return __bfloat162float(v);
    }
    static __device__ __nv_bfloat16 store(float v)
    {
        return __float2bfloat16_rn(v);
    }
};

/* N elements as they lie in memory; loads come as one access and are unpacked when used, so that several
 * fit in flight. */
template <class T, int N> struct alignas(sizeof(T) * N) k_vec {
    T v[N];
};

template <class T, int N> __device__ __forceinline__ k_vec<T, N> k_load(const T *p)
{
    k_vec<T, N> r;
    if constexpr (sizeof r == 16)
        *(int4 *)&r = __ldg((const int4 *)p);
    else
        r = *(const k_vec<T, N> *)p;
    return r;
}
/* The same for data that is not read again: it leaves the caches first. */
template <class T, int N> __device__ __forceinline__ k_vec<T, N> k_load_last(const T *p)
{
    k_vec<T, N> r;
    if constexpr (sizeof r == 16)
        *(int4 *)&r = __ldcs((const int4 *)p);
    else
        r = *(const k_vec<T, N> *)p;
    return r;
}
/* One store: the compiler splits some assignments of 16 bytes into four. */
__device__ __forceinline__ void k_store16(void *p, int4 v)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
template <class T, int N> __device__ __forceinline__ void k_put(T *p, const k_vec<T, N> &v)
{
    if constexpr (sizeof v == 16)
        k_store16(p, *(const int4 *)&v);
    else
        *(k_vec<T, N> *)p = v;
}

template <class T, int N>
__device__ __forceinline__ void k_unpack(const k_vec<T, N> &v, float (&f)[N])
{
#pragma unroll
    for (int j = 0; j < N; j++)
        f[j] = k_type<T>::load(v.v[j]);
}
/* A word's halves, each in one instruction. */
template <int N>
__device__ __forceinline__ void k_unpack(const k_vec<__nv_bfloat16, N> &v, float (&f)[N])
{
    if constexpr (N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const unsigned two = *(const unsigned *)&v.v[j];
            f[j] = __uint_as_float(two << 16);
            f[j + 1] = __uint_as_float(two & 0xffff0000u);
        }
    } else {
        f[0] = __bfloat162float(v.v[0]);
    }
}
/* Pairs are converted by one instruction. */
template <int N> __device__ __forceinline__ void k_pack(const float (&f)[N], k_vec<float, N> &v)
{
#pragma unroll
    for (int j = 0; j < N; j++)
        v.v[j] = f[j];
}
template <int N> __device__ __forceinline__ void k_pack(const float (&f)[N], k_vec<__half, N> &v)
{
    if constexpr (N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2)
            *(__half2 *)&v.v[j] = __floats2half2_rn(f[j], f[j + 1]);
    } else {
        v.v[0] = __float2half_rn(f[0]);
    }
}
template <int N>
__device__ __forceinline__ void k_pack(const float (&f)[N], k_vec<__nv_bfloat16, N> &v)
{
    if constexpr (N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2)
            *(__nv_bfloat162 *)&v.v[j] = __floats2bfloat162_rn(f[j], f[j + 1]);
    } else {
        v.v[0] = __float2bfloat16_rn(f[0]);
    }
}

/* N per-channel values, from or to an address that is a multiple of 16 bytes where N is of 4 */
template <int N> __device__ __forceinline__ void k_get_floats(const float *p, float (&f)[N])
{
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 4)
            *(float4 *)&f[j] = *(const float4 *)(p + j);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] = p[j];
    }
}
template <int N> __device__ __forceinline__ void k_put_floats(float *p, const float (&f)[N])
{
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 4)
            k_store16(p + j, *(const int4 *)&f[j]);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            p[j] = f[j];
    }
}

/* max(v, 0), NaN staying NaN as in PyTorch */
__device__ __forceinline__ float k_relu_value(float v)
{
    return v < 0.0f ? 0.0f : v;
}

/* Calls f(T()) for the type. */
template <class F> static inline void k_by_type(int type, F f)
{
    if (type == DNR_F16)
        f(__half());
    else if (type == DNR_BF16)
        f(__nv_bfloat16());
    else
        f(float());
}

/* Calls f(T(), N) with N as a constant: 16 bytes where `multiple` (channels, usually) allows it. */
template <int N> struct k_width {
    static constexpr int value = N;
};
template <class F> static inline void k_by_width(int type, int64_t multiple, F f)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        if (multiple % k_type<T>::wide == 0)
            f(t, k_width<k_type<T>::wide>());
        else
            f(t, k_width<1>());
    });
}

/* Blocks for `work` items of `per_block` each, at most `limit`. */
static inline unsigned k_blocks(int64_t work, int64_t per_block, int64_t limit)
{
    int64_t n = (work + per_block - 1) / per_block;
    n = n < limit ? n : limit;
    return (unsigned)(n < 1 ? 1 : n);
}

/* A matrix of `rows` pixels by `vecs` accesses of channels, dealt to blocks of `threads`: a thread keeps its channels,
 * so that per-channel values stay in registers, and strides over rows. blockIdx.y: part of the channels where
 * they do not fit in one block. */
struct k_tile {
    int vecs, col, cols, group, groups;
    int64_t row, stride;
    __device__ k_tile(int v, int threads)
    {
        int first = (int)blockIdx.y * threads;
        vecs = v;
        cols = v - first < threads ? v - first : threads;
        groups = threads / cols;
        group = (int)threadIdx.x / cols;
        col = first + (int)threadIdx.x % cols;
        row = (int64_t)blockIdx.x * groups + group;
        stride = (int64_t)gridDim.x * groups;
    }
    __device__ bool idle() const /* threads left over where cols does not divide the block */
    {
        return group >= groups;
    }
};
/* Its grid: about `per_sm` blocks for each multiprocessor, `unroll` rows for each thread at a time. */
static inline dim3 k_tile_grid(int64_t rows, int64_t vecs, int threads, int unroll, int limit)
{
    unsigned parts = (unsigned)((vecs + threads - 1) / threads);
    int64_t cols = vecs < threads ? vecs : threads;
    int64_t at_most = limit / parts > 1 ? limit / parts : 1;
    return dim3(k_blocks(rows, threads / cols * unroll, at_most), parts);
}

#endif
