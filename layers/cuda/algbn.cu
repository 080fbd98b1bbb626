/* algbn.cu: algebraic batch norm's sums of partial products, and its coefficients.
 *
 * Products of w with fp32 matrices run on tensor cores in TF32 and lose next to nothing: a 16-bit w is a TF32 number
 * as it is, an fp32 one is the sum of two but for its last bits, as is the other factor. What a tensor core has
 * added up is moved to fp32 registers after each 32 terms, since it rounds towards zero as it adds. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

/* ---------------------------------------------------------------- merging */

#define MERGE_THREADS 512

/* Σ over `parts` of [parts][n], 4 · X columns a block, in a fixed order. */
template <int X>
__device__ __forceinline__ void merge(const float *__restrict__ part, int parts, int64_t n,
                                      float *out, bool add, int64_t block)
{
    constexpr int Y = MERGE_THREADS / X;
    __shared__ double sm[Y][4 * X + 1];
    const int x = (int)threadIdx.x % X, y = (int)threadIdx.x / X;
    const int64_t i = (block * X + x) * 4;
    double s[4] = {0, 0, 0, 0};
    if (i < n)
#pragma unroll 4
        for (int j = y; j < parts; j += Y) {
            const float4 v = __ldcs((const float4 *)(part + j * n + i));
            s[0] += v.x;
            s[1] += v.y;
            s[2] += v.z;
            s[3] += v.w;
        }
#pragma unroll
    for (int q = 0; q < 4; q++)
        sm[y][4 * x + q] = s[q];
    __syncthreads();
#pragma unroll
    for (int half = Y / 2; half > 0; half /= 2) {
        if (y < half)
#pragma unroll
            for (int q = 0; q < 4; q++)
                sm[y][4 * x + q] += sm[y + half][4 * x + q];
        __syncthreads();
    }
    if (y == 0 && i < n)
#pragma unroll
        for (int q = 0; q < 4; q++)
            out[i + q] = (float)(add ? out[i + q] + sm[0][4 * x + q] : sm[0][4 * x + q]);
}

/* The first `columns` blocks merge the column sums, the rest p. */
template <int X>
__global__ void __launch_bounds__(MERGE_THREADS)
    k_gram_merge_kernel(k_gram_merge_args a, unsigned columns)
{
    if (blockIdx.x < columns)
        merge<8>(a.columns, a.blocks, a.c, a.sum, false, blockIdx.x);
    else
        merge<X>(a.part, a.parts, a.n, a.p, a.add, blockIdx.x - columns);
}

template <int X> static void launch_merge(cudaStream_t s, const k_gram_merge_args *a)
{
    const unsigned columns = a->sum ? (unsigned)((a->c + 31) / 32) : 0;
    const unsigned p = (unsigned)((a->n + 4 * X - 1) / (4 * X));
    k_gram_merge_kernel<X><<<columns + p, MERGE_THREADS, 0, s>>>(*a, columns);
}

void k_gram_merge(cudaStream_t s, const k_gram_merge_args *a)
{
    if (a->parts >= 64)
        launch_merge<8>(s, a);
    else if (a->parts >= 16)
        launch_merge<32>(s, a);
    else
        launch_merge<128>(s, a);
}

/* ---------------------------------------------------------------- coefficients of a row of w */

template <class T> __device__ __forceinline__ float4 load4(const T *p)
{
    const k_vec<T, 4> v = *(const k_vec<T, 4> *)p;
    float f[4];
    k_unpack(v, f);
    return make_float4(f[0], f[1], f[2], f[3]);
}

/* A warp for each row k: dgamma and dbeta; A, B, C0 to coef; wa. */
template <class T>
__global__ void __launch_bounds__(256) k_algbn_rows(k_algbn_args a, float4 *__restrict__ coef)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t k = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (k >= a.k)
        return;
    const T *w = (const T *)a.w + k * a.c;
    const float *p = a.p + k * a.c;
    double dot = 0;
    for (int64_t j = lane * 4; j < a.c; j += 128) {
        const float4 u = load4(w + j), v = *(const float4 *)(p + j);
        dot += (double)u.x * v.x + (double)u.y * v.y + (double)u.z * v.z + (double)u.w * v.w;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
        dot += __shfl_xor_sync(0xffffffffu, dot, i);
    const double invstd = a.invstd[k], A = a.gamma[k] * invstd, sum = a.sum_dz[k];
    const double dgamma = invstd * (dot - a.mean[k] * sum);
    const double B = -A * invstd * dgamma / (double)a.rows;
    if (lane == 0) {
        a.dgamma[k] = (float)dgamma;
        a.dbeta[k] = (float)sum;
        coef[k] =
            make_float4((float)A, (float)B, (float)(-A * sum / (double)a.rows - B * a.mean[k]), 0);
    }
    for (int64_t j = lane * 4; j < a.c; j += 128) {
        const float4 u = load4(w + j);
        const float f[4] = {(float)A * u.x, (float)A * u.y, (float)A * u.z, (float)A * u.w};
        k_vec<T, 4> v;
        k_pack(f, v);
        *(k_vec<T, 4> *)((T *)a.wa + k * a.c + j) = v;
    }
}

/* ---------------------------------------------------------------- products with w */

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

/* One tile of w·gram, or with M of wᵀ·(B∘w) over rows [first, last) of w: w is the factor X, the other is Y. X lies in
 * shared memory as [TILE][X_PITCH], with M as [DEPTH][Y_PITCH]; Y as the latter. Four warps have a quarter each. */
template <class T, bool M> struct product_tile {
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

    __device__ void run(int64_t first, float *sm, float *m_part)
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
#pragma unroll
        for (int mi = 0; mi < 2; mi++)
#pragma unroll
            for (int ni = 0; ni < 4; ni++) {
                put(i + mi * 16, j + ni * 8, &total[mi][ni][0], m_part);
                put(i + mi * 16 + 8, j + ni * 8, &total[mi][ni][2], m_part);
            }
    }
};

static_assert(TILE * X_PITCH == TILE_FLOATS, "X takes as much memory either way");

/* First the tiles of dw, then those of m, each for `span` of the K rows of w: m_part [part][c][c]. */
template <class T>
__global__ void __launch_bounds__(128)
    k_algbn_products(k_algbn_args a, const float4 *__restrict__ coef, float *__restrict__ m_part,
                     int64_t span)
{
    __shared__ __align__(16) float sm[(sizeof(T) == 2 ? 3 : 4) * TILE_FLOATS];
    const int64_t across = (a.c + TILE - 1) / TILE, down = (a.k + TILE - 1) / TILE;
    int64_t tile = blockIdx.x;
    if (tile < across * down) {
        product_tile<T, false> w_gram(a, coef, tile / across * TILE, tile % across * TILE, a.c);
        w_gram.run(0, sm, NULL);
        return;
    }
    tile -= across * down;
    const int64_t part = tile / (across * across), first = part * span;
    tile %= across * across;
    product_tile<T, true> m(a, coef, tile / across * TILE, tile % across * TILE,
                            first + span < a.k ? first + span : a.k);
    m.run(first, sm, m_part + part * a.c * a.c);
}

/* ---------------------------------------------------------------- m and c */

#define FINISH_COLS 8
#define FINISH_ROWS 64

/* A block has FINISH_COLS columns: m from its parts, and c = −(Σ sum_dz · wa + Σ sum_a · m)/M in two halves. */
template <class T>
__global__ void __launch_bounds__(FINISH_COLS *FINISH_ROWS)
    k_algbn_finish(k_algbn_args a, const float *__restrict__ m_part, int parts)
{
    __shared__ double sm[FINISH_ROWS][FINISH_COLS + 1];
    const int x = (int)threadIdx.x, y = (int)threadIdx.y;
    const int64_t j = (int64_t)blockIdx.x * FINISH_COLS + x;
    double s = 0;
    if (j < a.c) {
#pragma unroll 4
        for (int64_t i = y; i < a.c; i += FINISH_ROWS) {
            float v = 0;
            for (int q = 0; q < parts; q++)
                v += m_part[(q * a.c + i) * a.c + j];
            const T m = k_type<T>::store(v);
            ((T *)a.m)[i * a.c + j] = m;
            s += (double)a.sum_a[i] * k_type<T>::load(m);
        }
#pragma unroll 4
        for (int64_t k = y; k < a.k; k += FINISH_ROWS)
            s += (double)a.sum_dz[k] * k_type<T>::load(((const T *)a.wa)[k * a.c + j]);
    }
    sm[y][x] = s;
    __syncthreads();
#pragma unroll
    for (int half = FINISH_ROWS / 2; half > 0; half /= 2) {
        if (y < half)
            sm[y][x] += sm[y + half][x];
        __syncthreads();
    }
    if (y == 0 && j < a.c) {
        const double c = -sm[0][x] / (double)a.rows;
        const T high = k_type<T>::store((float)c);
        T *out = (T *)a.constant;
        out[j] = high;
        out[a.c + j] = k_type<T>::store((float)(c - k_type<T>::load(high)));
    }
}

/* ---------------------------------------------------------------- launches */

/* Parts of the K rows over which m is summed: each about as long as a sum of w·gram. */
static int parts_of(int64_t k, int64_t c)
{
    const int64_t n = k / c;
    return (int)(n < 1 ? 1 : n > 8 ? 8 : n);
}

static size_t coef_bytes(int64_t k)
{
    return ((size_t)k * sizeof(float4) + 255) & ~(size_t)255;
}

size_t k_algbn_workspace(int64_t k, int64_t c)
{
    return coef_bytes(k) + (size_t)parts_of(k, c) * (size_t)(c * c) * sizeof(float);
}

void k_algbn_coef(cudaStream_t s, const k_algbn_args *a, void *workspace)
{
    float4 *coef = (float4 *)workspace;
    float *m_part = (float *)((char *)workspace + coef_bytes(a->k));
    const int parts = parts_of(a->k, a->c);
    const int64_t span = ((a->k + parts - 1) / parts + DEPTH - 1) / DEPTH * DEPTH;
    const int64_t across = (a->c + TILE - 1) / TILE, down = (a->k + TILE - 1) / TILE;
    const unsigned tiles = (unsigned)(across * down + parts * across * across);
    const unsigned cols = (unsigned)((a->c + FINISH_COLS - 1) / FINISH_COLS);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_algbn_rows<T><<<(unsigned)((a->k + 7) / 8), 256, 0, s>>>(*a, coef);
        k_algbn_products<T><<<tiles, 128, 0, s>>>(*a, coef, m_part, span);
        k_algbn_finish<T><<<cols, dim3(FINISH_COLS, FINISH_ROWS), 0, s>>>(*a, m_part, parts);
    });
}
