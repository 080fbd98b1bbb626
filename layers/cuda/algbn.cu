/* algbn.cu: algebraic batch norm's coefficients. */
#include "algbn.cuh"
#include "mma.cuh"

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

/* ---------------------------------------------------------------- rows of w */

#define THREADS 256
#define WARPS   (THREADS / 32)
#define ROWS    32 /* of a tile of dw */
#define COLS    64
#define SLICE   64 /* of the sum for it, at a time */
#define SIDE    16 /* of a tile of m */

/* What the two kernels have between them. */
typedef struct between {
    float *b; /* [k] */
    double *
        shares; /* of c, [c / SIDE + k / ROWS][c]: Σ sum_a·m over SIDE rows, Σ sum_dz·wa over ROWS of them */
    int *arrived; /* [c / SIDE]: tiles whose share there is of these columns */
} between;

static __host__ __device__ int64_t parts(int64_t n, int64_t part)
{
    return (n + part - 1) / part;
}

/* Of a slice the rows of w, ROWS x SLICE, and of gram, SLICE x COLS. */
template <class T> struct row_slices {
    static constexpr int STAGES = sizeof(T) == 2 ? 4 : 3;
    static constexpr int W_PITCH = SLICE + 16 / sizeof(T), G_PITCH = COLS + 8;
    static constexpr int W_BYTES = ROWS * W_PITCH * sizeof(T);
    static constexpr int BYTES = W_BYTES + SLICE * G_PITCH * 4;

    static __device__ void load(const k_algbn_args &a, uint32_t to, int64_t k0, int64_t j0,
                                int64_t l0)
    {
        constexpr int W_VECS = SLICE * sizeof(T) / 16, N = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < ROWS * W_VECS / THREADS; i++) {
            const int v = (int)threadIdx.x + i * THREADS, r = v / W_VECS, l = v % W_VECS * N;
            const bool there = k0 + r < a.k && l0 + l < a.c;
            k_copy16(to + (r * W_PITCH + l) * sizeof(T),
                     (const T *)a.w + (there ? (k0 + r) * a.c + l0 + l : 0), there);
        }
        to += W_BYTES;
#pragma unroll
        for (int i = 0; i < SLICE * (COLS / 4) / THREADS; i++) {
            const int v = (int)threadIdx.x + i * THREADS, l = v / (COLS / 4),
                      j = v % (COLS / 4) * 4;
            const bool there = l0 + l < a.c && j0 + j < a.c;
            k_copy16(to + (l * G_PITCH + j) * 4, a.gram + (there ? (l0 + l) * a.c + j0 + j : 0),
                     there);
        }
    }
};

/* What a row's coefficients are made of, loaded long before they are. */
typedef struct channel {
    float gamma, mean, invstd, sum_dz;
} channel;

/* A, B, C0 and sum_dz of row k. One block of those that have it (`write`) hands on what goes further. */
__device__ float4 coefficients(const k_algbn_args &a, const between &z, int64_t k, const channel &x,
                               double dot, double apart, bool write, dnri_state *state)
{
    const double m = (double)a.rows, invstd = x.invstd, mean = x.mean, sum = x.sum_dz;
    const double dgamma = invstd * (dot - mean * sum), A = x.gamma * invstd;
    const double B = -A * invstd * dgamma / m;
    if (write) {
        z.b[k] = (float)B;
        a.dgamma[k] = (float)dgamma;
        a.dbeta[k] = x.sum_dz;
        note_ratio(state, x.invstd * fmaxf(fabsf(x.mean), sqrtf((float)(apart / m))));
    }
    return make_float4((float)A, (float)B, (float)(-A * sum / m - B * mean), x.sum_dz);
}

/* A block has a tile of dw, and for that needs whole rows of w and p. Its warps have 16 x 16 of it each. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_algbn_rows(k_algbn_args a, between z, dnri_state *state)
{
    using S = row_slices<T>;
    extern __shared__ __align__(128) unsigned char sm[];
    __shared__ double dots[ROWS][2];
    __shared__ double column[2][COLS];
    __shared__ float4 coef[ROWS];
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int across = (int)parts(a.c, COLS), row_of_tiles = (int)blockIdx.x / across;
    const int64_t k0 = row_of_tiles * ROWS, j0 = (int)blockIdx.x % across * COLS;
    const T *w = (const T *)a.w;
    if (blockIdx.x == 0)
        for (int i = tid; i < parts(a.c, SIDE); i += THREADS)
            z.arrived[i] = 0;
    const bool has_row = tid < ROWS && k0 + tid < a.k;
    const int64_t own =
        has_row ? k0 + tid : k0; /* no branch, which loads would be waited for behind */
    const channel x = {a.gamma[own], a.mean[own], a.invstd[own], a.sum_dz[own]};
    const uint32_t ring = k_shared(sm);
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) {
        if (i * SLICE < a.c)
            S::load(a, ring + i * S::BYTES, k0, j0, i * SLICE);
        k_copies_end();
    }
    /* this warp's four rows of p and w, by which gamma's gradient and r come; no branch, which loads would wait for */
    constexpr int N = ROWS / WARPS;
    double sums[2 * N] = {};
#pragma unroll 2
    for (int64_t j = lane * 4; j < a.c; j += 128) {
        const float *g = a.gram + j * (a.c + 1);
        const float d[4] = {g[0], g[a.c + 1], g[2 * (a.c + 1)], g[3 * (a.c + 1)]};
        float4 u[N], v[N];
#pragma unroll
        for (int r = 0; r < N; r++) {
            const int64_t k = k0 + warp * N + r, at = (k < a.k ? k : a.k - 1) * a.c + j;
            u[r] = load4(w + at);
            v[r] = *(const float4 *)(a.p + at);
        }
#pragma unroll
        for (int r = 0; r < N; r++) {
            sums[r] += u[r].x * v[r].x + u[r].y * v[r].y + u[r].z * v[r].z + u[r].w * v[r].w;
            sums[N + r] += u[r].x * u[r].x * d[0] + u[r].y * u[r].y * d[1] +
                           u[r].z * u[r].z * d[2] + u[r].w * u[r].w * d[3];
        }
    }
    const double sum = sum_rows(sums);
    if (lane % (32 / (2 * N)) == 0) {
        const int i = lane / (32 / (2 * N));
        dots[warp * N + i % N][i / N] = sum;
    }
    const int g = lane / 4, t = lane % 4, wi = warp / 4 * 16, wj = warp % 4 * 16;
    /* this thread's places in dw, (n·8 + {0,1}, half·8), and what they need */
    float2 p[2][2], sum_a[2];
    k_vec<T, 2> u[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int64_t j = j0 + wj + n * 8 + t * 2;
        sum_a[n] = j < a.c ? *(const float2 *)(a.sum_a + j) : make_float2(0, 0);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t k = k0 + wi + g + half * 8;
            const bool there = k < a.k && j < a.c;
            p[n][half] = *(const float2 *)(a.p + (there ? k * a.c + j : 0));
            u[n][half] = *(const k_vec<T, 2> *)(w + (there ? k * a.c + j : 0));
        }
    }
    __syncthreads();
    if (has_row)
        coef[tid] = coefficients(a, z, own, x, dots[tid][0], dots[tid][1], j0 == 0, state);
    /* w·gram */
    float total[2][4] = {};
    int read = 0, fill = S::STAGES - 1;
    for (int64_t l0 = 0; l0 < a.c; l0 += SLICE) {
        k_copies_wait<S::STAGES - 2>();
        __syncthreads(); /* it is there for all, and all are done with the one before it */
        const int64_t next = l0 + (S::STAGES - 1) * SLICE;
        if (next < a.c)
            S::load(a, ring + fill * S::BYTES, k0, j0, next);
        k_copies_end();
        const T *ws = (const T *)(sm + read * S::BYTES);
        const float *gs = (const float *)(sm + read * S::BYTES + S::W_BYTES);
        read = read + 1 == S::STAGES ? 0 : read + 1;
        fill = fill + 1 == S::STAGES ? 0 : fill + 1;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float acc[2][4] = {};
#pragma unroll
            for (int i = 0; i < SLICE / 16; i++) {
                const int l = half * (SLICE / 2) + i * 8 + t;
                float x[4], x_low[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    x[q] = k_type<T>::load(ws[(wi + g + q % 2 * 8) * S::W_PITCH + l + q / 2 * 4]);
                    if (sizeof(T) == 4)
                        split(x[q], x[q], x_low[q]);
                }
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float y[2], y_low[2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        split(gs[(l + q * 4) * S::G_PITCH + wj + n * 8 + g], y[q], y_low[q]);
                    mma(acc[n], x, y_low);
                    if (sizeof(T) == 4)
                        mma(acc[n], x_low, y);
                    mma(acc[n], x, y);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    total[n][q] += acc[n][q];
        }
    }
    /* dw, wa and its sums by column */
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int64_t j = j0 + wj + n * 8 + t * 2;
        float s[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = wi + g + half * 8;
            const int64_t at = (k0 + r) * a.c + j;
            if (k0 + r >= a.k || j >= a.c)
                continue;
            const float4 f = coef[r];
            const float *v = &total[n][half * 2];
            *(float2 *)(a.dw + at) =
                make_float2(f.x * p[n][half].x + f.y * v[0] + f.z * sum_a[n].x,
                            f.x * p[n][half].y + f.y * v[1] + f.z * sum_a[n].y);
            k_vec<T, 2> wa;
#pragma unroll
            for (int q = 0; q < 2; q++) {
                wa.v[q] = k_type<T>::store(f.x * k_type<T>::load(u[n][half].v[q]));
                s[q] += f.w * k_type<T>::load(wa.v[q]);
            }
            *(k_vec<T, 2> *)((T *)a.wa + at) = wa;
        }
#pragma unroll
        for (int q = 0; q < 2; q++) {
            double sum = s[q];
#pragma unroll
            for (int i = 4; i < 32; i *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, i);
            if (g == 0)
                column[warp / 4][wj + n * 8 + t * 2 + q] = sum;
        }
    }
    __syncthreads();
    if (tid < COLS && j0 + tid < a.c)
        z.shares[(parts(a.c, SIDE) + row_of_tiles) * a.c + j0 + tid] =
            column[0][tid] + column[1][tid];
}

/* ---------------------------------------------------------------- m and c */

/* Of a warp's share of w's rows, some at a time: SIDE columns of each side of a tile, and the rows' B. */
template <class T> struct side_slices {
    static constexpr int DEPTH = 128 / sizeof(T), COLUMNS = DEPTH * SIDE * 2 * sizeof(T);
    static constexpr int BYTES = COLUMNS + DEPTH * 4;
    static constexpr int VECS = SIDE * sizeof(T) / 16; /* of a row and side */

    static __device__ void load(const k_algbn_args &a, const float *b, uint32_t to, int64_t i0,
                                int64_t j0, int64_t first, int64_t last)
    {
        const int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < DEPTH * 2 * VECS / 32; i++) {
            const int v = lane + i * 32, l = v / VECS % DEPTH, col = v % VECS * (16 / sizeof(T));
            const int64_t j = (v < DEPTH * VECS ? i0 : j0) + col;
            const bool there = first + l < last && j < a.c;
            k_copy16(to + v * 16, (const T *)a.w + (there ? (first + l) * a.c + j : 0), there);
        }
        if (lane < DEPTH / 4) {
            const bool there = first + lane * 4 < last;
            k_copy16(to + COLUMNS + lane * 16, b + (there ? first + lane * 4 : 0), there);
        }
    }
};

/* The last block to have a tile of SIDE columns j: c_j = −(Σ sum_dz·wa + Σ sum_a·m)/M, in two halves. */
template <class T> __device__ void constants(const k_algbn_args &a, const between &z, int64_t side)
{
    constexpr int DOWN = THREADS / SIDE, AT_ONCE = 4;
    __shared__ double sm[DOWN][SIDE + 1];
    const int x = (int)threadIdx.x % SIDE, y = (int)threadIdx.x / SIDE;
    const int64_t j = side * SIDE + x, n = parts(a.c, SIDE) + parts(a.k, ROWS);
    double s = 0;
    for (int64_t i = y; i < n && j < a.c; i += AT_ONCE * DOWN) {
        double v[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++)
            v[q] = i + q * DOWN < n ? __ldcg(z.shares + (i + q * DOWN) * a.c + j) : 0;
        s += v[0] + v[1] + (v[2] + v[3]);
    }
    __syncthreads();
    sm[y][x] = s;
    __syncthreads();
    if (y > 0 || j >= a.c)
        return;
    for (int i = 1; i < DOWN; i++)
        s += sm[i][x];
    s /= -(double)a.rows;
    const T high = k_type<T>::store((float)s);
    T *out = (T *)a.constant;
    out[j] = high;
    out[a.c + j] = k_type<T>::store((float)(s - k_type<T>::load(high)));
}

/* A block has a tile of m on or below the diagonal, of which the one above is the mirror image; its warps have shares of
 * the sum over w's rows. */
template <class T>
__global__ void __launch_bounds__(THREADS) k_algbn_sides(k_algbn_args a, between z)
{
    using S = side_slices<T>;
    extern __shared__ __align__(128) unsigned char sm[];
    __shared__ float part[WARPS][SIDE * SIDE];
    __shared__ float tile[SIDE][SIDE + 1];
    __shared__ float sums[2][SIDE]; /* of a: of this tile's rows, of its columns */
    __shared__ bool last[2];
    const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, t = lane % 4;
    const int tiles = (int)blockIdx.x, sides = (int)parts(a.c, SIDE);
    int down = (int)((sqrtf(8.0f * (float)tiles + 1) - 1) / 2); /* rows of tiles above */
    down += (down + 1) * (down + 2) / 2 <= tiles ? 1 : down * (down + 1) / 2 > tiles ? -1 : 0;
    const int right = tiles - down * (down + 1) / 2;
    const int64_t i0 = down * SIDE, j0 = right * SIDE;
    const int64_t span = parts(a.k, 8 * WARPS) * 8, first = warp * span;
    const int64_t end = first + span < a.k ? first + span : a.k;
    const uint32_t ring = k_shared(sm) + warp * 2 * S::BYTES;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (first + i * S::DEPTH < end)
            S::load(a, z.b, ring + i * S::BYTES, i0, j0, first + i * S::DEPTH, end);
        k_copies_end();
    }
    if (tid < 2 * SIDE) {
        const int64_t i = (tid < SIDE ? i0 : j0) + tid % SIDE;
        sums[tid / SIDE][tid % SIDE] = i < a.c ? a.sum_a[i] : 0;
    }
    float total[2][4] = {};
    int stage = 0;
    for (int64_t l0 = first; l0 < end; l0 += S::DEPTH) {
        k_copies_wait<1>();
        __syncwarp();
        const T *xs = (const T *)(sm + (warp * 2 + stage) * S::BYTES), *ys = xs + S::DEPTH * SIDE;
        const float *bs = (const float *)(ys + S::DEPTH * SIDE);
#pragma unroll 1
        for (int l1 = 0; l1 < S::DEPTH; l1 += 32) {
            float acc[2][4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int l = l1 + i * 8 + t;
                float x[4], x_low[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    x[q] = k_type<T>::load(xs[(l + q / 2 * 4) * SIDE + g + q % 2 * 8]);
                    if (sizeof(T) == 4)
                        split(x[q], x[q], x_low[q]);
                }
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float y[2], y_low[2];
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        split(bs[l + q * 4] * k_type<T>::load(ys[(l + q * 4) * SIDE + n * 8 + g]),
                              y[q], y_low[q]);
                    mma(acc[n], x, y_low);
                    if (sizeof(T) == 4)
                        mma(acc[n], x_low, y);
                    mma(acc[n], x, y);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    total[n][q] += acc[n][q];
        }
        __syncwarp(); /* all are done with it */
        if (l0 + 2 * S::DEPTH < end)
            S::load(a, z.b, ring + stage * S::BYTES, i0, j0, l0 + 2 * S::DEPTH, end);
        k_copies_end();
        stage = 1 - stage;
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int q = 0; q < 4; q++)
            part[warp][(g + q / 2 * 8) * SIDE + n * 8 + t * 2 + q % 2] = total[n][q];
    __syncthreads();
    {
        float v = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            v += part[i][tid];
        const int r = tid / SIDE, c = tid % SIDE;
        const T m = k_type<T>::store(v);
        tile[r][c] = k_type<T>::load(m);
        if (i0 + r < a.c && j0 + c < a.c)
            ((T *)a.m)[(i0 + r) * a.c + j0 + c] = m;
    }
    __syncthreads();
    if (down != right) {
        const int r = tid / SIDE, c = tid % SIDE;
        if (j0 + r < a.c && i0 + c < a.c)
            ((T *)a.m)[(j0 + r) * a.c + i0 + c] = k_type<T>::store(tile[c][r]);
    }
    /* this tile's share of c, by column; that of its mirror image, by row */
    if (tid < 2 * SIDE) {
        const bool by_column = tid < SIDE;
        const int x = tid % SIDE;
        const int64_t at = (by_column ? j0 : i0) + x;
        if (at < a.c && (by_column || down != right)) {
            double s = 0;
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                s += (double)sums[!by_column][i] * (by_column ? tile[i][x] : tile[x][i]);
            z.shares[(by_column ? down : right) * a.c + at] = s;
        }
        __threadfence();
    }
    __syncthreads();
    if (tid < 2) {
        const int side = tid ? down : right;
        last[tid] = (tid == 0 || down != right) && atomicAdd(&z.arrived[side], 1) == sides - 1;
        if (last[tid])
            __threadfence();
    }
    __syncthreads();
    if (last[0])
        constants<T>(a, z, right);
    if (last[1])
        constants<T>(a, z, down);
}

/* ---------------------------------------------------------------- launches */

/* What is between the kernels, and how many bytes it takes. */
static size_t divide(between *z, char *at, int64_t k, int64_t c)
{
    size_t bytes = 0;
    const auto take = [&](int64_t n, size_t size) {
        char *p = at ? at + bytes : NULL;
        bytes += ((size_t)n * size + 255) & ~(size_t)255;
        return p;
    };
    z->b = (float *)take(k, sizeof(float));
    z->shares = (double *)take((parts(c, SIDE) + parts(k, ROWS)) * c, sizeof(double));
    z->arrived = (int *)take(parts(c, SIDE), sizeof(int));
    return bytes;
}

size_t k_algbn_workspace(int64_t k, int64_t c)
{
    between z;
    return divide(&z, NULL, k, c);
}

void k_algbn_coef(cudaStream_t s, const k_algbn_args *a, const dnri_header *header,
                  dnri_state *state, void *workspace)
{
    between z;
    (void)divide(&z, (char *)workspace, a->k, a->c);
    const int64_t sides = parts(a->c, SIDE);
    const unsigned tiles = (unsigned)(parts(a->k, ROWS) * parts(a->c, COLS));
    const unsigned squares = (unsigned)(sides * (sides + 1) / 2);
    if (a->first)
        k_algbn_begin(s, header, state);
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        constexpr int rows = row_slices<T>::BYTES * row_slices<T>::STAGES;
        constexpr int both = side_slices<T>::BYTES * 2 * WARPS;
        (void)cudaFuncSetAttribute(k_algbn_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   rows);
        (void)cudaFuncSetAttribute(k_algbn_sides<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   both);
        k_algbn_rows<T><<<tiles, THREADS, rows, s>>>(*a, z, state);
        k_algbn_sides<T><<<squares, THREADS, both, s>>>(*a, z);
    });
}
