/* hopper.cuh: what sm_90a alone has: boxes that come to shared memory by themselves and report to a barrier, and products
 * that four warps start together on operands in shared memory (PTX ISA: cp.async.bulk.tensor, mbarrier, wgmma).
 *
 * Slices are rows of 128 bytes; 16-byte vector v of row r lies at r·128 + (v ^ r mod 8)·16, the "128-byte swizzle"; a
 * slice begins at a multiple of 1024 bytes. */
#ifndef DNR_HOPPER_CUH
#define DNR_HOPPER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DNR_HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define DNR_HOPPER_ASM(...) ((void)0) /* never launched there */
#endif

/* ---- barriers: a phase ends with the last of `count` arrivals and of the bytes that are expected */

__device__ __forceinline__ void h_barrier(uint32_t bar, int count)
{
    DNR_HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void h_arrive(uint32_t bar)
{
    DNR_HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void h_expect(uint32_t bar, int bytes)
{
    DNR_HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                   : "memory");
}
/* Until the phase of this parity has ended. */
__device__ __forceinline__ void h_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done = 1;
    do
        DNR_HOPPER_ASM("{\n.reg .pred p;\n"
                       "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                       "selp.u32 %0, 1, 0, p;\n}"
                       : "=r"(done)
                       : "r"(bar), "r"(parity)
                       : "memory");
    while (!done);
}
/* What this thread wrote to shared memory is seen by copies and products that come after it. */
__device__ __forceinline__ void h_publish()
{
    DNR_HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The box of `map` at column x, row y; `bar` gets its bytes, those outside the matrix (zeros) too. */
__device__ __forceinline__ void h_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int x,
                                       int y)
{
    DNR_HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                   "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                   "l"(map), "r"(bar), "r"(x), "r"(y)
                   : "memory");
}

/* ---- registers: a warpgroup gives some of its own to the others */

template <int N> __device__ __forceinline__ void h_fewer_registers()
{
    DNR_HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void h_more_registers()
{
    DNR_HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- products */

/* An operand whose rows of 64 elements along the depth are a slice; +2: the next 16 elements. */
__device__ __forceinline__ uint64_t h_operand(uint32_t slice)
{
    return (uint64_t)(slice >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
__device__ __forceinline__ void h_begin()
{
    DNR_HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void h_end()
{
    DNR_HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All but the last N of what was begun are done. */
template <int N> __device__ __forceinline__ void h_finish()
{
    DNR_HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Sums are read or changed by other means only here. */
template <int N> __device__ __forceinline__ void h_sums(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

#define H_8(d, i)                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
/* turned: "1" where operands are h_turned's, "0" where they are h_operand's */
#define H_MULTIPLY_128(type, turned, d, a, b, add)                                                 \
    DNR_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                    \
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                \
                   "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"   \
                   "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"  \
                   "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"  \
                   "%59,%60,%61,%62,%63}, %64, %65, p, 1, 1, " turned ", " turned ";\n}"           \
                   : H_8(d, 0), H_8(d, 8), H_8(d, 16), H_8(d, 24), H_8(d, 32), H_8(d, 40),         \
                     H_8(d, 48), H_8(d, 56)                                                        \
                   : "l"(a), "l"(b), "r"((int)(add)))
#define H_MULTIPLY_64(type, turned, d, a, b, add)                                                  \
    DNR_HOPPER_ASM("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                    \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                 \
                   "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"   \
                   "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, " turned      \
                   ", " turned ";\n}"                                                              \
                   : H_8(d, 0), H_8(d, 8), H_8(d, 16), H_8(d, 24)                                  \
                   : "l"(a), "l"(b), "r"((int)(add)))

/* d [64,128] = a [64,16] · b [128,16]ᵀ, added to d or in its place. Lane 4·g + t of warp w has d[4·j], d[4·j + 1] at
 * row 16·w + g, columns 8·j + 2·t and one more, and d[4·j + 2], d[4·j + 3] eight rows below. */
__device__ __forceinline__ void h_multiply(__half, float (&d)[64], uint64_t a, uint64_t b, bool add)
{
    H_MULTIPLY_128("f16", "0", d, a, b, add);
}
__device__ __forceinline__ void h_multiply(__nv_bfloat16, float (&d)[64], uint64_t a, uint64_t b,
                                           bool add)
{
    H_MULTIPLY_128("bf16", "0", d, a, b, add);
}

/* An operand whose rows of 64 elements across the depth are a slice, 16 of them a factor; the next 64 elements across lie
 * `slab` bytes on. +128: the next 16 rows. */
__device__ __forceinline__ uint64_t h_turned(uint32_t rows, int slab)
{
    return (uint64_t)(rows >> 4 & 0x3fff) | (uint64_t)(slab >> 4) << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
/* d [64, 2·N] = aᵀ·b of 16 such rows, added to d or in its place; registers as h_multiply's. */
__device__ __forceinline__ void h_multiply_turned(__half, float (&d)[64], uint64_t a, uint64_t b,
                                                  bool add)
{
    H_MULTIPLY_128("f16", "1", d, a, b, add);
}
__device__ __forceinline__ void h_multiply_turned(__nv_bfloat16, float (&d)[64], uint64_t a,
                                                  uint64_t b, bool add)
{
    H_MULTIPLY_128("bf16", "1", d, a, b, add);
}
__device__ __forceinline__ void h_multiply_turned(__half, float (&d)[32], uint64_t a, uint64_t b,
                                                  bool add)
{
    H_MULTIPLY_64("f16", "1", d, a, b, add);
}
__device__ __forceinline__ void h_multiply_turned(__nv_bfloat16, float (&d)[32], uint64_t a,
                                                  uint64_t b, bool add)
{
    H_MULTIPLY_64("bf16", "1", d, a, b, add);
}

#endif
