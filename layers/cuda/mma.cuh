/* mma.cuh: tensor cores as a warp sees them (sm_80 and later): tiles come to shared memory asynchronously, from there
 * to registers as 8x8 matrices, and are multiplied 16 x 8 x 16. 16-bit types, sums in fp32. */
#ifndef DNR_MMA_CUH
#define DNR_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define DNR_MMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define DNR_MMA_ASM(...) ((void)0) /* never launched there */
#endif

/* An address in shared memory, of which registers need hold only half as much. */
__device__ __forceinline__ uint32_t k_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes to shared memory; zeros unless `there`. */
__device__ __forceinline__ void k_copy16(uint32_t to, const void *from, bool there)
{
    DNR_MMA_ASM("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                "r"(there ? 16 : 0)
                : "memory");
}
/* Copies since the last call are a group; waits until all but the last N groups are there, for this thread. */
__device__ __forceinline__ void k_copies_end()
{
    DNR_MMA_ASM("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void k_copies_wait()
{
    DNR_MMA_ASM("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four matrices of 8 rows of 16 bytes; lane 8·i + r names row r of matrix i. Lane 4·g + t gets of matrix i in r[i]
 * elements (g, 2t) and (g, 2t + 1); with TURN (2t, g) and (2t + 1, g). */
template <bool TURN> __device__ __forceinline__ void k_matrices(uint32_t (&r)[4], uint32_t row)
{
    r[0] = r[1] = r[2] = r[3] = 0;
    if (TURN)
        DNR_MMA_ASM("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                    : "r"(row)
                    : "memory");
    else
        DNR_MMA_ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                    : "r"(row)
                    : "memory");
}

/* d [16,8] += a [16,16] · b [16,8]. Lane 4·g + t has pairs along 2t: of a at (g, 2t) (g + 8, 2t) (g, 2t + 8)
 * (g + 8, 2t + 8); of b at (2t, g) (2t + 8, g), down a column; of d d[0], d[1] at (g, 2t), d[2], d[3] at (g + 8, 2t). */
__device__ __forceinline__ void k_mma(__half, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1)
{
    DNR_MMA_ASM("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void k_mma(__nv_bfloat16, float (&d)[4], const uint32_t (&a)[4],
                                      uint32_t b0, uint32_t b1)
{
    DNR_MMA_ASM("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
