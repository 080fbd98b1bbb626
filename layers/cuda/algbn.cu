/* algbn.cu: algebraic batch norm's sums of partial products, and its coefficients. */
#include "algbn.cuh"

/* ---------------------------------------------------------------- merging */

#define MERGE_THREADS 512

/* Σ over `parts` of [parts][n], 4 · X columns a block, in a fixed order. lower: of a symmetric matrix of so many columns
 * those on and below the diagonal, which the others are copies of; or 0. */
template <int X>
__device__ __forceinline__ void merge(const float *__restrict__ part, int parts, int64_t n,
                                      float *out, bool add, int64_t block, int lower)
{
    constexpr int Y = MERGE_THREADS / X;
    __shared__ double sm[Y][4 * X + 1];
    const int x = (int)threadIdx.x % X, y = (int)threadIdx.x / X;
    const int64_t i = (block * X + x) * 4;
    const int row = lower ? (int)i / lower : 0, col = lower ? (int)i % lower : 0;
    double s[4] = {0, 0, 0, 0};
    if (i < n && col / 16 <= row / 16)
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
        for (int q = 0; q < 4; q++) {
            const double v = sm[0][4 * x + q];
            if (!lower)
                out[i + q] = (float)(add ? out[i + q] + v : v);
            else if (col + q <= row)
                out[i + q] = out[(int64_t)(col + q) * lower + row] = (float)v;
        }
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

void k_gram_merge(cudaStream_t s, const k_gram_merge_args *a)
{
    if (a->parts >= 64)
        launch_merge<8>(s, a);
    else if (a->parts >= 16)
        launch_merge<32>(s, a);
    else
        launch_merge<128>(s, a);
}

/* ---------------------------------------------------------------- the state */

static __global__ void k_algbn_begin_kernel(const dnri_header *header, dnri_state *state)
{
    if (header->first) {
        state->algbn_ratio = 0;
        state->algbn_exact = 0;
    }
}

void k_algbn_begin(cudaStream_t s, const dnri_header *header, dnri_state *state)
{
    k_algbn_begin_kernel<<<1, 1, 0, s>>>(header, state);
}

/* ---------------------------------------------------------------- coefficients of a row of w */

/* A warp for each row k: dgamma and dbeta; A, B, C0 and r to coef; wa. */
template <class T>
__global__ void __launch_bounds__(256) k_algbn_rows(k_algbn_args a, const dnri_header *header,
                                                    dnri_state *state, float4 *__restrict__ coef)
{
    begin_ratios(a.first, header, state);
    const int lane = (int)threadIdx.x % 32;
    const int64_t k = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (k >= a.k)
        return;
    const T *w = (const T *)a.w + k * a.c;
    const float *p = a.p + k * a.c;
    double dot = 0;
    float apart = 0;
    for (int64_t j = lane * 4; j < a.c; j += 128) {
        const float4 u = load4(w + j), v = *(const float4 *)(p + j);
        const float *g = a.gram + j * (a.c + 1);
        dot += (double)u.x * v.x + (double)u.y * v.y + (double)u.z * v.z + (double)u.w * v.w;
        apart += u.x * u.x * g[0] + u.y * u.y * g[a.c + 1] + u.z * u.z * g[2 * (a.c + 1)] +
                 u.w * u.w * g[3 * (a.c + 1)];
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        dot += __shfl_xor_sync(0xffffffffu, dot, i);
        apart += __shfl_xor_sync(0xffffffffu, apart, i);
    }
    const double invstd = a.invstd[k], A = a.gamma[k] * invstd, sum = a.sum_dz[k];
    const double dgamma = invstd * (dot - a.mean[k] * sum);
    const double B = -A * invstd * dgamma / (double)a.rows;
    if (lane == 0) {
        a.dgamma[k] = (float)dgamma;
        a.dbeta[k] = (float)sum;
        coef[k] =
            make_float4((float)A, (float)B, (float)(-A * sum / (double)a.rows - B * a.mean[k]),
                        (float)invstd * fmaxf(fabsf(a.mean[k]), sqrtf(apart / (float)a.rows)));
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
        product_tile<T, TILE_DW> w_gram(a, coef, tile / across * TILE, tile % across * TILE, a.c);
        w_gram.run(0, sm, NULL);
        return;
    }
    tile -= across * down;
    const int64_t part = tile / (across * across), first = part * span;
    tile %= across * across;
    product_tile<T, TILE_M> m(a, coef, tile / across * TILE, tile % across * TILE,
                              first + span < a.k ? first + span : a.k);
    m.run(first, sm, m_part + part * a.c * a.c);
}

/* ---------------------------------------------------------------- m and c */

#define FINISH_COLS 8
#define FINISH_ROWS 64

/* A block has FINISH_COLS columns: m from its parts, and c = −(Σ sum_dz · wa + Σ sum_a · m)/M in two halves. All have a
 * share of the rows' r. */
template <class T>
__global__ void __launch_bounds__(FINISH_COLS *FINISH_ROWS)
    k_algbn_finish(k_algbn_args a, const float4 *__restrict__ coef,
                   const float *__restrict__ m_part, int parts, dnri_state *state)
{
    __shared__ double sm[FINISH_ROWS][FINISH_COLS + 1];
    const int x = (int)threadIdx.x, y = (int)threadIdx.y;
    const int64_t j = (int64_t)blockIdx.x * FINISH_COLS + x;
    double s = 0;
    for (int64_t k = ((int64_t)blockIdx.x * FINISH_ROWS + y) * FINISH_COLS + x; k < a.k;
         k += (int64_t)gridDim.x * FINISH_ROWS * FINISH_COLS)
        note_ratio(state, coef[k].w);
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

void k_algbn_coef(cudaStream_t s, const k_algbn_args *a, const dnri_header *header,
                  dnri_state *state, void *workspace)
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
        k_algbn_rows<T><<<(unsigned)((a->k + 7) / 8), 256, 0, s>>>(*a, header, state, coef);
        k_algbn_products<T><<<tiles, 128, 0, s>>>(*a, coef, m_part, span);
        k_algbn_finish<T>
            <<<cols, dim3(FINISH_COLS, FINISH_ROWS), 0, s>>>(*a, coef, m_part, parts, state);
    });
}
