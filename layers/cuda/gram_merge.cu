/* gram_merge.cu: what blocks and products made of parts of the rows of a long matrix, added up. */
#include "kernels.h"

#define MERGE_THREADS 256
#define MERGE_BLOCKS  768 /* as many as a large device takes at once */

/* Σ over `parts` of [parts][n], 4 · X columns a block, in a fixed order: eights in fp32, which takes fewer conversions, and
 * these in fp64. lower: of a symmetric matrix of so many columns those on and below the diagonal, which the others are
 * copies of; or 0. */
template <int X>
__device__ __forceinline__ void merge(const float *__restrict__ part, int parts, int64_t n,
                                      float *out, bool add, int64_t block, int lower)
{
    constexpr int Y = MERGE_THREADS / X, AT_ONCE = 8;
    __shared__ double sm[Y][4][X];
    const int x = (int)threadIdx.x % X, y = (int)threadIdx.x / X;
    const int64_t i = (block * X + x) * 4;
    const int row = lower ? (int)i / lower : 0, col = lower ? (int)i % lower : 0;
    const bool there = i < n && col / 16 <= row / 16;
    if (!__syncthreads_or(there))
        return;
    double s[4] = {0, 0, 0, 0};
    for (int first = y; there && first < parts; first += AT_ONCE * Y) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int j = first + k * Y;
            v[k] = __ldcs((const float4 *)(part + (j < parts ? j : y) * n + i));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (first + k * Y >= parts)
                v[k] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int half = AT_ONCE / 2; half > 0; half /= 2)
#pragma unroll
            for (int k = 0; k < half; k++) {
                v[k].x += v[k + half].x;
                v[k].y += v[k + half].y;
                v[k].z += v[k + half].z;
                v[k].w += v[k + half].w;
            }
        s[0] += v[0].x;
        s[1] += v[0].y;
        s[2] += v[0].z;
        s[3] += v[0].w;
    }
#pragma unroll
    for (int q = 0; q < 4; q++)
        sm[y][q][x] = s[q];
    __syncthreads();
#pragma unroll
    for (int half = Y / 2; half > 1; half /= 2) {
        if (y < half)
#pragma unroll
            for (int q = 0; q < 4; q++)
                sm[y][q][x] += sm[y + half][q][x];
        __syncthreads();
    }
    if (y > 0 || !there)
        return;
#pragma unroll
    for (int q = 0; q < 4; q++)
        s[q] = sm[0][q][x] + sm[1][q][x];
    if (!lower) {
        float4 *to = (float4 *)(out + i);
        const float4 old = add ? *to : make_float4(0, 0, 0, 0);
        *to = make_float4((float)(old.x + s[0]), (float)(old.y + s[1]), (float)(old.z + s[2]),
                          (float)(old.w + s[3]));
        return;
    }
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (col + q <= row)
            out[i + q] = out[(int64_t)(col + q) * lower + row] = (float)s[q];
}

/* The first `columns` blocks merge the column sums, the rest p. */
template <int X>
__global__ void __launch_bounds__(MERGE_THREADS)
    k_gram_merge_kernel(k_gram_merge_args a, unsigned columns)
{
    if (blockIdx.x < columns)
        merge<8>(a.columns, a.blocks, a.c, a.sum, false, blockIdx.x, 0);
    else
        merge<X>(a.part, a.parts, a.n, a.p, a.add, blockIdx.x - columns, a.lower ? (int)a.c : 0);
}

template <int X> static void launch_merge(cudaStream_t s, const k_gram_merge_args *a)
{
    const unsigned columns = a->sum ? (unsigned)((a->c + 31) / 32) : 0;
    const unsigned p = (unsigned)((a->n + 4 * X - 1) / (4 * X));
    k_gram_merge_kernel<X><<<columns + p, MERGE_THREADS, 0, s>>>(*a, columns);
}

/* Few blocks where threads have much to add up, so that all begin at once and each has many loads on its way; narrow
 * ones where there would be too few for a device. */
void k_gram_merge(cudaStream_t s, const k_gram_merge_args *a)
{
    const int64_t columns = a->n / (4 * MERGE_BLOCKS);
    if (columns <= 8)
        launch_merge<8>(s, a);
    else if (columns <= 16)
        launch_merge<16>(s, a);
    else if (columns <= 32)
        launch_merge<32>(s, a);
    else if (columns <= 64)
        launch_merge<64>(s, a);
    else
        launch_merge<128>(s, a);
}
