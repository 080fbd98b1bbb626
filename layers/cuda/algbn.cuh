/* algbn.cuh: what the small kernels of algebraic batch norm share.
 *
 * Their products of w with itself or with a Gram matrix run on tensor cores in TF32 and lose next to nothing: a 16-bit w is
 * a TF32 number as it is, an fp32 one is the sum of two but for its last bits, as is the other factor. What a tensor core
 * has added up is moved to fp32 registers after each 32 terms, since it rounds towards zero as it adds. */
#ifndef DNR_ALGBN_CUH
#define DNR_ALGBN_CUH

#include "../../runtime/cuda/vec.cuh"
#include "kernels.h"

/* A launch where the state's sums may begin anew, before others add to them. */
void k_algbn_begin(cudaStream_t s, const dnri_header *header, dnri_state *state);

/* A maximum does not depend on the order: bits of floats >= 0 compare as integers. */
__device__ __forceinline__ void note_ratio(dnri_state *state, float ratio)
{
    if (ratio > state->algbn_ratio)
        atomicMax((int *)&state->algbn_ratio, __float_as_int(ratio));
}

template <class T> __device__ __forceinline__ float4 load4(const T *p)
{
    const k_vec<T, 4> v = *(const k_vec<T, 4> *)p;
    float f[4];
    k_unpack(v, f);
    return make_float4(f[0], f[1], f[2], f[3]);
}

/* Sums over a warp of N values, a power of two: lane i gets that of value i / (32 / N). */
template <int N> __device__ __forceinline__ double sum_rows(double (&v)[N])
{
    const int lane = (int)threadIdx.x % 32;
    int width = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2, width /= 2) {
        const bool upper = lane & width;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const double away = upper ? v[i] : v[i + half];
            v[i] = (upper ? v[i + half] : v[i]) + __shfl_xor_sync(0xffffffffu, away, width);
        }
    }
    double sum = v[0];
#pragma unroll
    for (; width > 0; width /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, width);
    return sum;
}

/* v as the sum of two TF32 numbers */
__device__ __forceinline__ void split(float v, float &high, float &low)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    uint32_t u;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(v));
    high = __uint_as_float(u & 0xffffe000u);
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(v - high));
    low = __uint_as_float(u & 0xffffe000u);
#endif
}

/* d [16,8] += a [16,8] · b [8,8]; lane 4·g + t has of a: (g,t) (g+8,t) (g,t+4) (g+8,t+4); of b: (t,g) (t+4,g); of d:
 * (g,2t) (g,2t+1) (g+8,2t) (g+8,2t+1) */
__device__ __forceinline__ void mma(float (&d)[4], const float (&a)[4], const float (&b)[2])
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])),
                   "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#endif
}

#endif
