/* stem.cu: the convolution 7x7, stride 2, padded by 3, of pictures in QUADS to 64 channels, on tensor cores (sm_80 and
 * later), with the sums that batch norm wants.
 *
 * Of output pixel q, a row of the kernel sees the pixels 2q - 4 to 2q + 3, the first of which has weight 0: 32 values
 * that begin 16·q bytes behind the start of a picture's row. So rows of 8x8 matrices, one for each output pixel, lie in
 * shared memory as the picture does, overlapping, 16 bytes apart: free of bank conflicts, and nothing is unfolded.
 * The depth of the product is 7 · 32. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"
#include "mma.cuh"

#define THREADS 128
#define WARPS   (THREADS / 32)
#define PER_SM  2
#define K       64          /* output channels */
#define KERNEL  7           /* rows of the kernel */
#define LINE    (8 * 4)     /* values of a row of the kernel */
#define LEFT    (4 * 4 * 2) /* bytes of padding before a row of a picture */
#define FULL    0xffffffffu

/* Output rows of a step of fprop, two for each warp; input rows that they see, and that the next step adds. */
#define ROWS 4
#define RING (2 * (2 * ROWS + KERNEL - 2))
#define W_PITCH                                                                                    \
    ((KERNEL * LINE + 8) * 2) /* of an output channel's weights: an odd number of 16 bytes */

struct stem_geometry {
    int n, h, w, p, q, tiles,
        pitch; /* tiles: of 16 output pixels, a row; pitch: bytes of a row of a picture */
};

static stem_geometry geometry_of(const k_stem_args *a)
{
    const int tiles = (a->w / 2 + 15) / 16;
    return {a->n, a->h, a->w, a->h / 2, a->w / 2, tiles, (tiles * 16 + 3) * 16};
}

/* Rows of pictures on their way to a ring of `SLOTS` in shared memory. What lies left and right of a picture is 0 for
 * good. */
template <class T, int SLOTS> struct row_ring {
    const stem_geometry &g;
    const T *x;
    const uint32_t at;
    int next; /* slot */

    __device__ row_ring(const stem_geometry &geometry, const void *pictures, unsigned char *ring)
        : g(geometry), x((const T *)pictures), at(k_shared(ring)), next(0)
    {
        const int data = g.w / 2, zeros = g.pitch / 16 - data; /* of 16 bytes */
        for (int i = (int)threadIdx.x; i < SLOTS * zeros; i += THREADS) {
            const int c = i % zeros;
            *(int4 *)(ring + i / zeros * g.pitch + (c < LEFT / 16 ? c : c + data) * 16) =
                make_int4(0, 0, 0, 0);
        }
    }

    /* `count` rows of a picture from row `first` on; those above and below it are 0. Returns the slot of the first. */
    __device__ int load(int picture, int first, int count)
    {
        const int lane = (int)threadIdx.x % 32, start = next;
        for (int r = (int)threadIdx.x / 32; r < count; r += WARPS) {
            const int row = first + r, slot = start + r < SLOTS ? start + r : start + r - SLOTS;
            const bool there = row >= 0 && row < g.h;
            const T *from = x + ((int64_t)picture * g.h + (there ? row : 0)) * g.w * 4;
            const uint32_t to = at + (uint32_t)(slot * g.pitch + LEFT);
            for (int c = lane; c < g.w / 2; c += 32)
                k_copy16(to + c * 16, from + c * 8, there);
        }
        next = start + count < SLOTS ? start + count : start + count - SLOTS;
        return start;
    }

    __device__ uint32_t slot(int s) const
    {
        return at + (uint32_t)((s < SLOTS ? s : s - SLOTS) * g.pitch);
    }
};

/* ---------------------------------------------------------------- fprop */

/* Of 32 channels, the one that is column r of the i-th of four products: thread t of a group of four has columns 2t and
 * 2t + 1 of each product, so channels 8·t to 8·t + 7. */
__device__ __forceinline__ int channel_of(int i, int r)
{
    return r / 2 * 8 + i * 2 + r % 2;
}

/* w [K,7,7,channels], 3 or 4 of them, to [K][7][8 pixels][4]. */
template <class T> __device__ void spread_weights(const T *w, int channels, unsigned char *to)
{
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < K * KERNEL * 8; i += THREADS) {
        const int s = i % 8 - 1, line = i / 8; /* line: channel · 7 + row */
        k_vec<T, 4> v;
#pragma unroll
        for (int c = 0; c < 4; c++)
            v.v[c] = s >= 0 && c < 3 ? w[(line * KERNEL + s) * channels + c] : k_type<T>::store(0);
        *(k_vec<T, 4> *)(to + line / KERNEL * W_PITCH + (line % KERNEL * 8 + i % 8) * 8) = v;
    }
}

/* A warp has 32 channels for good, all of whose weights lie in registers, and two output rows at a time, which share
 * five of the nine rows of the picture that they see. */
template <class T, bool SUMS> struct stem_warp {
    const stem_geometry &g;
    T *y;
    const int lane, n0;
    uint32_t b[KERNEL][2][4][2];
    float acc[2][4][4], sum[8], sq[8];

    __device__ stem_warp(const stem_geometry &geometry, void *out, int half)
        : g(geometry), y((T *)out), lane((int)threadIdx.x % 32), n0(half * 32)
    {
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum[j] = sq[j] = 0;
    }

    __device__ void load_weights(uint32_t w)
    {
        const int r = lane % 8, i = lane / 16;
        const uint32_t row = w + (n0 + channel_of(i, r)) * W_PITCH + lane / 8 % 2 * 16;
#pragma unroll
        for (int l = 0; l < KERNEL; l++)
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    uint32_t v[4];
                    k_matrices<false>(v,
                                      row + channel_of(n, 0) * W_PITCH + (l * LINE + s * 16) * 2);
                    b[l][s][n][0] = v[0];
                    b[l][s][n][1] = v[1];
                    b[l][s][n + 1][0] = v[2];
                    b[l][s][n + 1][1] = v[3];
                }
    }

    __device__ void multiply(int e, int line, const uint32_t (&a)[2][4])
    {
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                k_mma(T(), acc[e][n], a[s], b[line][s][n][0], b[line][s][n][1]);
    }

    /* Output rows p and p + 1 of a picture, the second only where `two`; row[]: the rows of the picture from 2p - 3 on. */
    __device__ void run(const uint32_t (&row)[KERNEL + 2], int picture, int p, bool two)
    {
        const uint32_t mine = (uint32_t)(lane % 16 + lane / 16) * 16;
        T *out = y + (((int64_t)picture * g.p + p) * g.q + lane / 4) * K + n0 + lane % 4 * 8;
        for (int tile = 0; tile < g.tiles; tile++) {
            const uint32_t col = mine + (uint32_t)tile * 256;
            uint32_t a[2][2][4];
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        acc[e][n][i] = 0;
            k_matrices<false>(a[0][0], row[0] + col);
            k_matrices<false>(a[0][1], row[0] + col + 32);
#pragma unroll
            for (int r = 0; r < KERNEL + 2; r++) {
                if (r < KERNEL + 1) {
                    k_matrices<false>(a[(r + 1) % 2][0], row[r + 1] + col);
                    k_matrices<false>(a[(r + 1) % 2][1], row[r + 1] + col + 32);
                }
                if (r < KERNEL)
                    multiply(0, r, a[r % 2]);
                if (r >= 2)
                    multiply(1, r - 2, a[r % 2]);
            }
            put(tile, out + tile * 16 * K, two);
        }
    }

    __device__ void put(int tile, T *out, bool two)
    {
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float f[8];
                k_vec<T, 8> v;
                if (tile * 16 + lane / 4 + h * 8 >= g.q || (e && !two))
                    continue;
#pragma unroll
                for (int j = 0; j < 8; j++)
                    f[j] = acc[e][j / 2][h * 2 + j % 2];
                k_pack(f, v);
                k_put(out + (e * g.q + h * 8) * K, v);
                if constexpr (SUMS) { /* of what is written */
                    k_unpack(v, f);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        sum[j] += f[j];
                        sq[j] += f[j] * f[j];
                    }
                }
            }
    }

    /* Σ y and Σ y² of its 32 channels. */
    __device__ void put_sums(float (*to)[32])
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 4; i < 32; i *= 2) {
                sum[j] += __shfl_xor_sync(FULL, sum[j], i);
                sq[j] += __shfl_xor_sync(FULL, sq[j], i);
            }
            if (lane < 4) {
                to[0][lane * 8 + j] = sum[j];
                to[1][lane * 8 + j] = sq[j];
            }
        }
    }
};

/* A block takes ROWS output rows at a time, going down, and the warps two of them each, in two halves of the channels.
 * part: [block][Σ y, Σ y²][K]. */
template <class T, bool SUMS>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_stem_kernel(const __grid_constant__ stem_geometry g, const T *__restrict__ x,
                  const T *__restrict__ w, int channels, T *__restrict__ y,
                  float *__restrict__ part)
{
    static_assert(ROWS * 2 * K / 64 == 2 * WARPS, "two rows for each pair of warps");
    extern __shared__ __align__(128) unsigned char sm[];
    const int warp = (int)threadIdx.x / 32, down = (g.p + ROWS - 1) / ROWS;
    const int64_t steps = (int64_t)g.n * down, blocks = gridDim.x;
    int64_t at = steps * blockIdx.x / blocks;
    const int64_t last = steps * (blockIdx.x + 1) / blocks;
    row_ring<T, RING> ring(g, x, sm);
    unsigned char *weights = sm + RING * g.pitch;
    stem_warp<T, SUMS> mine(g, y, warp % 2);
    int top = 0, next = 0; /* slots of the first row that this step sees, and the next one */
    const auto load = [&](int64_t step, bool anew) {
        const int picture = (int)(step / down), p = (int)(step % down) * ROWS;
        if (anew || p == 0) {
            next = ring.load(picture, 2 * p - 3, 2 * ROWS + KERNEL - 2);
        } else {
            ring.load(picture, 2 * p + KERNEL - 5, 2 * ROWS);
            next += 2 * ROWS;
            next -= next < RING ? 0 : RING;
        }
    };
    if (at < last)
        load(at, true);
    k_copies_end();
    spread_weights(w, channels, weights);
    __syncthreads();
    mine.load_weights(k_shared(weights));
    for (; at < last; at++) {
        const int picture = (int)(at / down), p = (int)(at % down) * ROWS + warp / 2 * 2;
        k_copies_wait<0>();
        __syncthreads(); /* the rows are there for all, and all are done with those before */
        top = next;
        if (at + 1 < last)
            load(at + 1, false);
        k_copies_end();
        if (p < g.p) {
            uint32_t row[KERNEL + 2];
#pragma unroll
            for (int r = 0; r < KERNEL + 2; r++)
                row[r] = ring.slot(top + warp / 2 * 4 + r);
            mine.run(row, picture, p, p + 1 < g.p);
        }
    }
    if constexpr (SUMS) {
        __shared__ float sums[WARPS][2][32];
        mine.put_sums(sums[warp]);
        __syncthreads();
        const int which = (int)threadIdx.x / K, c = (int)threadIdx.x % K;
        part[((int64_t)blockIdx.x * 2 + which) * K + c] =
            sums[c / 32][which][c % 32] + sums[c / 32 + 2][which][c % 32];
    }
}

/* ---------------------------------------------------------------- wgrad */

/* Of output pixels q, dw = Σ dyᵀ·x, both transposed on their way to registers. A step is an output row. A tensor core
 * rounds towards zero as it adds, so it adds up at most RUN pixels; then its sums join those in shared memory. */
#define W_RING  (2 * KERNEL)
#define RUN     1568
#define M_TILES (K / 16)
#define W_SUMS  (M_TILES * KERNEL * THREADS) /* of 4 values: each thread's one after another */
#define DY_TILE (16 * K * 2)                 /* bytes of 16 pixels */

/* Vector v, 16 bytes, of pixel q of dy lies where 8 pixels of a column of vectors meet different banks. */
__device__ __forceinline__ uint32_t in_dy(int q, int v)
{
    return (uint32_t)(q * K * 2 + (v ^ (q & 7)) * 16);
}

/* A warp has 8 of the 32 values of each row of the kernel, and all channels of dy. */
template <class T> struct wgrad_warp {
    const int lane, warp;
    float acc[M_TILES][KERNEL][4];
    struct operands {
        uint32_t dy[M_TILES][4], x[KERNEL / 2 + 1][4];
    };

    __device__ wgrad_warp() : lane((int)threadIdx.x % 32), warp((int)threadIdx.x / 32)
    {
        clear();
    }

    __device__ void clear()
    {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int r = 0; r < KERNEL; r++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[m][r][i] = 0;
    }

    __device__ void multiply(const operands &o)
    {
#pragma unroll
        for (int r = 0; r < KERNEL; r++)
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
                k_mma(T(), acc[m][r], o.dy[m], o.x[r / 2][r % 2 * 2], o.x[r / 2][r % 2 * 2 + 1]);
    }

    /* An output row; `top`: slot of the first row that it sees. */
    __device__ void run(const row_ring<T, W_RING> &ring, int top, uint32_t dy)
    {
        const int i = lane / 8, q = lane % 8;
        const uint32_t col = (uint32_t)(warp + i % 2 * 8 + q) * 16;
        const uint32_t mine = dy + (uint32_t)(i / 2 * 8 + q) * K * 2;
        const uint32_t flip = (uint32_t)(i % 2 ^ q) * 16;
        uint32_t row[KERNEL / 2 + 1];
        operands even, odd;
#pragma unroll
        for (int r = 0; r < KERNEL; r += 2)
            row[r / 2] = ring.slot(top + (r + 1 < KERNEL ? r + i / 2 : r)) + col;
        const auto load = [&](operands &o, int tile) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
                k_matrices<true>(o.dy[m], mine + (uint32_t)tile * DY_TILE + (flip ^ m * 32));
#pragma unroll
            for (int r = 0; r < KERNEL / 2 + 1; r++)
                k_matrices<true>(o.x[r], row[r] + (uint32_t)tile * 256);
        };
        load(even, 0);
        for (int tile = 0; tile < ring.g.tiles; tile += 2) {
            const bool two = tile + 1 < ring.g.tiles;
            if (two)
                load(odd, tile + 1);
            multiply(even);
            if (two) {
                if (tile + 2 < ring.g.tiles)
                    load(even, tile + 2);
                multiply(odd);
            }
        }
    }

    __device__ void flush(float4 *sums)
    {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int r = 0; r < KERNEL; r++) {
                float4 &to = sums[(m * KERNEL + r) * THREADS + threadIdx.x];
                float4 v = to;
                v.x += acc[m][r][0];
                v.y += acc[m][r][1];
                v.z += acc[m][r][2];
                v.w += acc[m][r][3];
                to = v;
            }
        clear();
    }
};

/* part: [block][W_SUMS]; `run`: output rows between two flushes. */
template <class T>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_stem_wgrad_kernel(const __grid_constant__ stem_geometry g, const T *__restrict__ x,
                        const T *__restrict__ dy, int run, float4 *__restrict__ part)
{
    extern __shared__ __align__(128) unsigned char sm[];
    const int64_t rows = (int64_t)g.n * g.p, blocks = gridDim.x, first = rows * blockIdx.x / blocks;
    const int64_t last = rows * (blockIdx.x + 1) / blocks;
    row_ring<T, W_RING> ring(g, x, sm);
    unsigned char *const two = sm + W_RING * g.pitch; /* rows of dy */
    float4 *sums = (float4 *)(two + 2 * g.tiles * DY_TILE);
    for (int i = (int)threadIdx.x; i < 2 * (g.tiles * 16 - g.q) * 8; i += THREADS) {
        const int q = g.q + i / 16; /* beyond a row dy is 0 */
        *(int4 *)(two + i / 8 % 2 * g.tiles * DY_TILE + q * K * 2 + i % 8 * 16) =
            make_int4(0, 0, 0, 0);
    }
    for (int i = (int)threadIdx.x; i < W_SUMS; i += THREADS)
        sums[i] = make_float4(0, 0, 0, 0);
    int top = 0, next = 0, count = 0;
    const auto load = [&](int64_t row, bool anew) {
        const int picture = (int)(row / g.p), p = (int)(row % g.p);
        if (anew || p == 0) {
            next = ring.load(picture, 2 * p - 3, KERNEL);
        } else {
            ring.load(picture, 2 * p + KERNEL - 5, 2);
            next = next + 2 < W_RING ? next + 2 : next + 2 - W_RING;
        }
        const T *from = dy + row * g.q * K;
        const uint32_t to = k_shared(two + (row - first) % 2 * g.tiles * DY_TILE);
        for (int i = (int)threadIdx.x; i < g.q * 8; i += THREADS)
            k_copy16(to + in_dy(i / 8, i % 8), from + i * 8, true);
    };
    wgrad_warp<T> mine;
    if (first < last)
        load(first, true);
    k_copies_end();
    for (int64_t at = first; at < last; at++) {
        k_copies_wait<0>();
        __syncthreads(); /* the rows are there for all, and all are done with those before */
        top = next;
        if (at + 1 < last)
            load(at + 1, false);
        k_copies_end();
        mine.run(ring, top, k_shared(two + (at - first) % 2 * g.tiles * DY_TILE));
        if (++count == run || at + 1 == last) {
            mine.flush(sums);
            count = 0;
        }
    }
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < W_SUMS; i += THREADS)
        part[(int64_t)blockIdx.x * W_SUMS + i] = sums[i];
}

#define AT_ONCE 16 /* of W_SUMS, by as many threads each */

/* Adds up the blocks' parts in a fixed order, and sorts them: dw [K,7,7,3]. */
__global__ void __launch_bounds__(AT_ONCE *AT_ONCE)
    k_stem_merge_kernel(const float4 *__restrict__ part, int blocks, float *__restrict__ dw)
{
    __shared__ double sm[AT_ONCE][AT_ONCE][4];
    const int x = (int)threadIdx.x % AT_ONCE, y = (int)threadIdx.x / AT_ONCE;
    const int first = (int)blockIdx.x * AT_ONCE;
    double s[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int b = y; b < blocks; b += AT_ONCE) {
        const float4 v = __ldcs(part + (int64_t)b * W_SUMS + first + x);
        s[0] += v.x;
        s[1] += v.y;
        s[2] += v.z;
        s[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sm[y][x][i] = s[i];
    __syncthreads();
    if (threadIdx.x >= AT_ONCE * 4)
        return;
    const int i = (int)threadIdx.x % 4, at = first + (int)threadIdx.x / 4;
    double sum = 0;
    for (int b = 0; b < AT_ONCE; b++)
        sum += sm[b][threadIdx.x / 4][i];
    /* of thread 32·warp + 4·group + t of the block, sum [m][row][i] */
    const int thread = at % THREADS, m = at / THREADS / KERNEL, row = at / THREADS % KERNEL;
    const int k = m * 16 + thread % 32 / 4 + i / 2 * 8,
              n = thread / 32 * 8 + thread % 4 * 2 + i % 2;
    if (n >= 4 && n % 4 < 3)
        dw[((k * KERNEL + row) * KERNEL + n / 4 - 1) * 3 + n % 4] = (float)sum;
}

/* ---------------------------------------------------------------- launches */

static size_t fprop_bytes(const stem_geometry &g)
{
    return (size_t)RING * (size_t)g.pitch + K * W_PITCH;
}

static size_t wgrad_bytes(const stem_geometry &g)
{
    return (size_t)W_RING * (size_t)g.pitch + 2 * (size_t)g.tiles * DY_TILE +
           W_SUMS * sizeof(float4);
}

static unsigned blocks_of(const k_stem_args *a, int64_t steps)
{
    return k_blocks(steps, 1, PER_SM * a->sms);
}

/* Sums that stand in shared memory beside it; a block is charged 1 KB more. */
#define OTHER_BYTES 2048

bool k_stem_takes(const k_stem_args *a)
{
    return a->cc >= 80 && a->type != DNR_F32 && a->k == K && a->h % 2 == 0 && a->w % 2 == 0 &&
           fprop_bytes(geometry_of(a)) + OTHER_BYTES <= a->shared;
}

bool k_stem_wgrad_takes(const k_stem_args *a)
{
    return k_stem_takes(a) && wgrad_bytes(geometry_of(a)) <= a->shared;
}

size_t k_stem_wgrad_workspace(const k_stem_args *a)
{
    return (size_t)PER_SM * (size_t)a->sms * W_SUMS * sizeof(float4);
}

size_t k_stem_workspace(const k_stem_args *a)
{
    return (size_t)PER_SM * (size_t)a->sms * 2 * K * sizeof(float);
}

template <class T, bool SUMS>
static void launch_fprop(cudaStream_t s, const k_stem_args *a, const stem_geometry &g,
                         unsigned blocks, float *part)
{
    const size_t bytes = fprop_bytes(g);
    (void)cudaFuncSetAttribute(k_stem_kernel<T, SUMS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               (int)bytes);
    k_stem_kernel<T, SUMS><<<blocks, THREADS, bytes, s>>>(g, (const T *)a->x, (const T *)a->weights,
                                                          a->channels, (T *)a->y, part);
}

template <class T> static void fprop(cudaStream_t s, const k_stem_args *a, float *part)
{
    const stem_geometry g = geometry_of(a);
    const unsigned blocks = blocks_of(a, (int64_t)g.n * ((g.p + ROWS - 1) / ROWS));
    if (!a->sum) {
        launch_fprop<T, false>(s, a, g, blocks, NULL);
        return;
    }
    launch_fprop<T, true>(s, a, g, blocks, part);
    k_norm_bwd_merge(s, part, (int)blocks, K, NULL, a->sqsum, a->sum);
}

void k_stem(cudaStream_t s, const k_stem_args *a, void *workspace)
{
    if (a->type == DNR_F16)
        fprop<__half>(s, a, (float *)workspace);
    else
        fprop<__nv_bfloat16>(s, a, (float *)workspace);
}

template <class T> static void wgrad(cudaStream_t s, const k_stem_args *a, float4 *part)
{
    const stem_geometry g = geometry_of(a);
    const size_t bytes = wgrad_bytes(g);
    const unsigned blocks = blocks_of(a, (int64_t)g.n * g.p);
    (void)cudaFuncSetAttribute(k_stem_wgrad_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               (int)bytes);
    k_stem_wgrad_kernel<T><<<blocks, THREADS, bytes, s>>>(g, (const T *)a->x, (const T *)a->dy,
                                                          g.q < RUN ? RUN / g.q : 1, part);
    k_stem_merge_kernel<<<W_SUMS / AT_ONCE, AT_ONCE * AT_ONCE, 0, s>>>(part, (int)blocks, a->dw);
}

void k_stem_wgrad(cudaStream_t s, const k_stem_args *a, void *workspace)
{
    if (a->type == DNR_F16)
        wgrad<__half>(s, a, (float4 *)workspace);
    else
        wgrad<__nv_bfloat16>(s, a, (float4 *)workspace);
}
