/* algbn.cuh: products of w with itself or with a Gram matrix, by tiles; what algebraic batch norm's coefficients and
 * statistics are made of.
 *
 * They run on tensor cores in TF32 and lose next to nothing: a 16-bit w is a TF32 number as it is, an fp32 one is the
 * sum of two but for its last bits, as is the other factor. What a tensor core has added up is moved to fp32 registers
 * after each 32 terms, since it rounds towards zero as it adds. */
#ifndef DNR_ALGBN_CUH
#define DNR_ALGBN_CUH

#include "../../runtime/cuda/vec.cuh"
#include "kernels.h"

/* The state's sums begin anew; by one thread, before others add to them. */
__device__ __forceinline__ void begin_ratios(bool first, const dnri_header *header,
                                             dnri_state *state)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && first && header->first) {
        state->algbn_ratio = 0;
        state->algbn_exact = 0;
    }
}

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

#define TILE        64          /* of the output */
#define DEPTH       32          /* of the sum at a time */
#define X_PITCH     (DEPTH + 4) /* floats between rows, so that a warp's reads meet no bank twice */
#define Y_PITCH     (TILE + 8)
#define TILE_FLOATS (DEPTH * Y_PITCH) /* = TILE · X_PITCH */

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

__device__ __forceinline__ void split4(float4 v, float *high, float *low)
{
    float4 h, l;
    split(v.x, h.x, l.x);
    split(v.y, h.y, l.y);
    split(v.z, h.z, l.z);
    split(v.w, h.w, l.w);
    *(float4 *)high = h;
    *(float4 *)low = l;
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

/* What becomes of a tile: w·gram goes on to dw, or with w to shares of the rows' squares; wᵀ·(B∘w) is a part of m. */
enum tile_use { TILE_DW, TILE_SQUARE, TILE_M };

/* One tile of w·gram, or for m of wᵀ·(B∘w) over rows [first, last) of w: w is the factor X, the other is Y. X lies in
 * shared memory as [TILE][X_PITCH], for m as [DEPTH][Y_PITCH]; Y as the latter. Four warps have a quarter each. */
template <class T, tile_use USE> struct product_tile {
    static constexpr bool M = USE == TILE_M;
    static constexpr bool whole = sizeof(T) == 2; /* w is TF32 as it is */
    const k_algbn_args &a;
    const float4 *coef;
    const int64_t i0, j0, last;
    float4 x[4], y[4];
    float total[2][4][4];

    __device__ product_tile(const k_algbn_args &args, const float4 *c, int64_t i, int64_t j,
                            int64_t end)
        : a(args), coef(c), i0(i), j0(j), last(end)
    {
    }

    /* The next slices on their way to registers. */
    __device__ void load(int64_t l0)
    {
        const T *w = (const T *)a.w;
        const float4 zero = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int v = (int)threadIdx.x + 128 * q;
            const int64_t l = l0 + v / (TILE / 4), col = v % (TILE / 4) * 4;
            const int64_t xi = M ? l : i0 + v / (DEPTH / 4);
            const int64_t xj = M ? i0 + col : l0 + v % (DEPTH / 4) * 4;
            x[q] = xi < (M ? last : a.k) && xj < a.c ? load4(w + xi * a.c + xj) : zero;
            y[q] = zero;
            if (l < last && j0 + col < a.c) {
                if (M) {
                    const float B = coef[l].y;
                    const float4 u = load4(w + l * a.c + j0 + col);
                    y[q] = make_float4(B * u.x, B * u.y, B * u.z, B * u.w);
                } else {
                    y[q] = *(const float4 *)(a.gram + l * a.c + j0 + col);
                }
            }
        }
    }

    __device__ void store(float *xs, float *xs_low, float *ys, float *ys_low) const
    {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int v = (int)threadIdx.x + 128 * q;
            const int at_y = v / (TILE / 4) * Y_PITCH + v % (TILE / 4) * 4;
            const int at_x = M ? at_y : v / (DEPTH / 4) * X_PITCH + v % (DEPTH / 4) * 4;
            if (whole)
                *(float4 *)(xs + at_x) = x[q];
            else
                split4(x[q], xs + at_x, xs_low + at_x);
            split4(y[q], ys + at_y, ys_low + at_y);
        }
    }

    static __device__ void get_x(const float *xs, int i, int l, float (&f)[4])
    {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int row = i + q % 2 * 8, at = l + q / 2 * 4;
            f[q] = M ? xs[at * Y_PITCH + row] : xs[row * X_PITCH + at];
        }
    }

    __device__ void compute(const float *xs, const float *xs_low, const float *ys,
                            const float *ys_low)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int g = lane / 4, t = lane % 4, wi = warp / 2 * 32, wj = warp % 2 * 32;
        float acc[2][4][4] = {};
#pragma unroll
        for (int step = 0; step < DEPTH / 8; step++) {
            const int l = step * 8 + t;
            float ax[2][4], ax_low[2][4];
#pragma unroll
            for (int mi = 0; mi < 2; mi++) {
                get_x(xs, wi + mi * 16 + g, l, ax[mi]);
                if (!whole)
                    get_x(xs_low, wi + mi * 16 + g, l, ax_low[mi]);
            }
#pragma unroll
            for (int ni = 0; ni < 4; ni++) {
                const int at = l * Y_PITCH + wj + ni * 8 + g;
                const float b[2] = {ys[at], ys[at + 4 * Y_PITCH]};
                const float b_low[2] = {ys_low[at], ys_low[at + 4 * Y_PITCH]};
#pragma unroll
                for (int mi = 0; mi < 2; mi++) {
                    mma(acc[mi][ni], ax[mi], b_low);
                    if (!whole)
                        mma(acc[mi][ni], ax_low[mi], b);
                    mma(acc[mi][ni], ax[mi], b);
                }
            }
        }
#pragma unroll
        for (int mi = 0; mi < 2; mi++)
#pragma unroll
            for (int ni = 0; ni < 4; ni++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    total[mi][ni][q] += acc[mi][ni][q];
    }

    /* Two neighbours (row, j), (row, j + 1): w·gram goes on to dw, the other to its part. */
    __device__ void put(int64_t row, int64_t j, const float *v, float *m_part) const
    {
        if (row >= (M ? a.c : a.k) || j >= a.c)
            return;
        const int64_t at = row * a.c + j;
        if (M) {
            *(float2 *)(m_part + at) = make_float2(v[0], v[1]);
            return;
        }
        const float4 c = coef[row];
        const float2 p = *(const float2 *)(a.p + at), sum = *(const float2 *)(a.sum_a + j);
        *(float2 *)(a.dw + at) =
            make_float2(c.x * p.x + c.y * v[0] + c.z * sum.x, c.x * p.y + c.y * v[1] + c.z * sum.y);
    }

    /* Σ over the tile's columns of (w·gram)_ij · w_ij, for rows of w: square [share of 32 columns][k]. */
    __device__ void put_squares(int64_t i, int64_t j, float *square) const
    {
#pragma unroll
        for (int q = 0; q < 4; q++) { /* rows i, i + 8, i + 16, i + 24 */
            const int64_t row = i + q * 8;
            float s = 0;
#pragma unroll
            for (int ni = 0; ni < 4; ni++)
                if (row < a.k && j + ni * 8 < a.c) {
                    const T *w = (const T *)a.w + row * a.c + j + ni * 8;
                    const float *v = &total[q / 2][ni][q % 2 * 2];
                    s += v[0] * k_type<T>::load(w[0]) + v[1] * k_type<T>::load(w[1]);
                }
            s += __shfl_xor_sync(0xffffffffu, s, 1);
            s += __shfl_xor_sync(0xffffffffu, s, 2);
            if (threadIdx.x % 4 == 0 && row < a.k && j / 32 * 32 < a.c)
                square[j / 32 * a.k + row] = s;
        }
    }

    __device__ void run(int64_t first, float *sm, float *out)
    {
        float *ys = sm, *ys_low = sm + TILE_FLOATS, *xs = sm + 2 * TILE_FLOATS;
        float *xs_low = whole ? xs : sm + 3 * TILE_FLOATS;
#pragma unroll
        for (int mi = 0; mi < 2; mi++)
#pragma unroll
            for (int ni = 0; ni < 4; ni++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    total[mi][ni][q] = 0;
        load(first);
        for (int64_t l = first; l < last; l += DEPTH) {
            store(xs, xs_low, ys, ys_low);
            __syncthreads();
            if (l + DEPTH < last)
                load(l + DEPTH);
            compute(xs, xs_low, ys, ys_low);
            __syncthreads();
        }
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int64_t i = i0 + warp / 2 * 32 + lane / 4, j = j0 + warp % 2 * 32 + lane % 4 * 2;
        if constexpr (USE == TILE_SQUARE) {
            put_squares(i, j, out);
        } else {
#pragma unroll
            for (int mi = 0; mi < 2; mi++)
#pragma unroll
                for (int ni = 0; ni < 4; ni++) {
                    put(i + mi * 16, j + ni * 8, &total[mi][ni][0], out);
                    put(i + mi * 16 + 8, j + ni * 8, &total[mi][ni][2], out);
                }
        }
    }
};

static_assert(TILE * X_PITCH == TILE_FLOATS, "X takes as much memory either way");

#endif
