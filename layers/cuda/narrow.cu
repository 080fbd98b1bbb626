/* narrow.cu: products of a long matrix and a small one, which are as fast as memory: the small one stays in shared
 * memory, the long one streams by once, and what follows the product happens before it is written.
 *
 * A block has a tile of columns for good and strides over tiles of rows. Slices of 64 columns come through a ring of
 * stages: those of a, then those of the residual, then the next tile's, so that loads never wait for a tile to end. */
#include "kernels.h"
#include "wide.h"

#include "../../runtime/cuda/vec.cuh"
#include "mma.cuh"

#define ROWS    128 /* of a tile */
#define DEPTH   64  /* of a slice */
#define THREADS 256 /* 4 x 2 warps */
#define STAGE   (ROWS * DEPTH * 2)

/* Vector v, 16 bytes, of row r of a slice lies where 8 rows of a column of vectors meet different banks. */
__device__ __forceinline__ int in_slice(int r, int v)
{
    return r * 128 + (v ^ (r & 7)) * 16;
}
/* The same of b, of which 8 rows are read that make a thread's columns neighbours (column_of). */
__device__ __forceinline__ int in_b(int n, int v)
{
    return n * 128 + (v ^ ((n >> 3 & 3) << 1 | (n & 1))) * 16;
}
/* Of 32 columns, the one that is column r of the i-th of four products: thread t of a group of four has columns 2t and
 * 2t + 1 of each product, so 8·t to 8·t + 7. */
__device__ __forceinline__ int column_of(int i, int r)
{
    return r / 2 * 8 + i * 2 + r % 2;
}

/* Which slice a block loads next, and to where. */
template <class T, int COLS, int STAGES> struct loader {
    const k_narrow_args &a;
    const uint32_t ring; /* this thread's vector of its first stage */
    const int of_a, per_tile, step, n0;
    int tile, slice, stage;

    __device__ loader(const k_narrow_args &args, const unsigned char *r, int first, int stride,
                      int col)
        : a(args), ring(k_shared(r + in_slice((int)threadIdx.x / 8, (int)threadIdx.x % 8))),
          of_a((args.depth[0] + args.depth[1]) / DEPTH),
          per_tile(of_a + (args.residual ? COLS / DEPTH : 0)), step(stride), n0(col), tile(first),
          slice(0), stage(0)
    {
    }

    __device__ void load()
    {
        constexpr int AT_ONCE = THREADS / 8;
        int64_t row = (int64_t)tile * ROWS + threadIdx.x / 8;
        if ((int64_t)tile * ROWS < a.rows) {
            const bool of_first = slice < a.depth[0] / DEPTH, of_residual = slice >= of_a;
            const int pitch = of_first ? a.depth[0] : of_residual ? a.n : a.depth[1];
            const int col = of_first      ? slice * DEPTH
                            : of_residual ? n0 + (slice - of_a) * DEPTH
                                          : slice * DEPTH - a.depth[0];
            const T *from = (const T *)(of_first      ? a.a[0]
                                        : of_residual ? a.residual
                                                      : a.a[1]) +
                            col + threadIdx.x % 8 * 8;
            const uint32_t to = ring + (uint32_t)(stage * STAGE);
#pragma unroll
            for (int i = 0; i < ROWS / AT_ONCE; i++, row += AT_ONCE)
                k_copy16(to + i * AT_ONCE * 128, row < a.rows ? from + row * pitch : from,
                         row < a.rows);
            slice++;
            if (slice == per_tile) {
                slice = 0;
                tile += step;
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        k_copies_end();
    }
};

/* b's columns n0 to n0 + COLS: [slice of depth][column][DEPTH]. */
template <class T, int COLS>
__device__ void load_b(const k_narrow_args &a, unsigned char *b, int n0)
{
    int first = 0; /* slice */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const T *from = (const T *)a.b[m];
        const int depth = a.depth[m];
        if (a.b_t) /* as it is */
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < COLS * depth / 8; i += THREADS) {
                const int n = i / (depth / 8), v = i % (depth / 8);
                *(int4 *)(b + (first + v / 8) * COLS * 128 + in_b(n, v % 8)) =
                    *(const int4 *)(from + (int64_t)(n0 + n) * depth + v * 8);
            }
        else
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < depth * (COLS / 8); i += THREADS) {
                const int l = i / (COLS / 8), n = i % (COLS / 8) * 8;
                const k_vec<T, 8> v = *(const k_vec<T, 8> *)(from + (int64_t)l * a.n + n0 + n);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    *((T *)(b + (first + l / DEPTH) * COLS * 128 + in_b(n + j, l % DEPTH / 8)) +
                      l % 8) = v.v[j];
            }
        first += depth / DEPTH;
    }
}

template <class T, int COLS> struct tile_product {
    static constexpr int GROUPS = COLS / 64; /* of 32 columns, a warp's */
    const k_narrow_args &a;
    const float *shift; /* of the block's columns */
    const int n0, lane, wm, wn;
    uint32_t a_row, b_row, a_flip, b_flip; /* where this lane's rows of matrices begin */
    float acc[2][4 * GROUPS][4];

    __device__ tile_product(const k_narrow_args &args, const float *s, int col)
        : a(args), shift(s), n0(col), lane((int)threadIdx.x % 32), wm((int)threadIdx.x / 64),
          wn((int)threadIdx.x / 32 % 2)
    {
        const int r = lane % 8;
        a_row = (uint32_t)(wm * 32 + lane % 16) * 128;
        a_flip = (uint32_t)(lane / 16 ^ r) * 16;
        b_row = (uint32_t)(wn * 32 * GROUPS + column_of(lane / 16, r)) * 128;
        b_flip = (uint32_t)(lane / 8 % 2 ^ r) * 16;
        clear();
    }

    __device__ void clear()
    {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 4 * GROUPS; n++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    acc[m][n][q] = 0;
    }

    __device__ void multiply(uint32_t slice, uint32_t b)
    {
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t x[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
                k_matrices<false>(x[m], slice + a_row + m * 16 * 128 + (k * 32 ^ a_flip));
#pragma unroll
            for (int n = 0; n < 4 * GROUPS; n += 2) {
                uint32_t y[4];
                k_matrices<false>(y, b + b_row + (n / 4 * 32 + column_of(n % 4, 0)) * 128 +
                                         (k * 32 ^ b_flip));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    k_mma(T(), acc[m][n], x[m], y[0], y[1]);
                    k_mma(T(), acc[m][n + 1], x[m], y[2], y[3]);
                }
            }
        }
    }

    /* Of these columns the ones of a slice of the residual, or all where there is none. */
    __device__ void put(int tile, const unsigned char *residual, int slice)
    {
        const int first = wm * 32 + lane / 4, t = lane % 4, left = wn * 32 * GROUPS + t * 8;
        if (GROUPS > 1 && residual && wn != slice) /* a slice is a warp's columns */
            return;
        const int64_t row = (int64_t)tile * ROWS + first;
        int64_t at = row * a.n + n0 + left;
        const int rows = a.rows - row < 32 ? (int)(a.rows - row) : 32;
#pragma unroll
        for (int i = 0; i < 4; i++, at += 8 * a.n)
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float f[8], more[8];
                k_vec<T, 8> v;
                k_get_floats(shift + left + group * 32, more);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    f[j] = acc[i / 2][group * 4 + j / 2][i % 2 * 2 + j % 2] + more[j];
                if (residual) {
                    const int vec = (left + group * 32) % DEPTH / 8;
                    k_unpack(*(const k_vec<T, 8> *)(residual + in_slice(first + i * 8, vec)), more);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        f[j] += more[j];
                }
                if (a.mask)
                    put_bits(f, t == 0 && i * 8 < rows ? a.mask + (at + group * 32) / 8 : NULL);
                if (a.relu)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        f[j] = k_relu_value(f[j]);
                k_pack(f, v);
                if (i * 8 < rows)
                    k_put((T *)a.d + at + group * 32, v);
            }
    }

    /* Four lanes have 32 neighbours. */
    __device__ void put_bits(const float (&f)[8], uint8_t *to)
    {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < 8; j++)
            bits |= (uint32_t)(f[j] > k_type<T>::vanish) << j;
        bits <<= lane % 4 * 8;
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
        bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
        if (to)
            *(uint32_t *)to = bits;
    }
};

template <class T, int COLS, int STAGES>
__global__ void __launch_bounds__(THREADS, 2)
    k_narrow_kernel(const __grid_constant__ k_narrow_args a)
{
    extern __shared__ __align__(128) unsigned char sm[];
    float *shift = (float *)sm;
    unsigned char *b = sm + COLS * sizeof(float);
    unsigned char *ring = b + (a.depth[0] + a.depth[1]) / DEPTH * COLS * 128;
    const int tiles = a.n / COLS, n0 = (int)blockIdx.x % tiles * COLS;
    const int step = (int)gridDim.x / tiles;
    int tile = (int)blockIdx.x / tiles, stage = 0;
    loader<T, COLS, STAGES> next(a, ring, tile, step, n0);
    for (int i = 0; i < STAGES - 1; i++)
        next.load();
    load_b<T, COLS>(a, b, n0);
    if ((int)threadIdx.x < COLS) {
        const int n = n0 + (int)threadIdx.x;
        shift[threadIdx.x] = a.shift ? a.shift[n]
                                     : k_type<T>::load(((const T *)a.halves)[n]) +
                                           k_type<T>::load(((const T *)a.halves)[a.n + n]);
    }
    tile_product<T, COLS> p(a, shift, n0);
    const auto arrived = [&]() {
        const unsigned char *slice = ring + stage * STAGE;
        k_copies_wait<STAGES - 2>();
        __syncthreads(); /* it is there for all, and all are done with the one before it */
        next.load();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        return slice;
    };
    for (; (int64_t)tile * ROWS < a.rows; tile += step) {
        p.clear();
        for (int i = 0; i < next.of_a; i++)
            p.multiply(k_shared(arrived()), k_shared(b + i * COLS * 128));
        if (!a.residual)
            p.put(tile, NULL, 0);
        for (int i = next.of_a; i < next.per_tile; i++)
            p.put(tile, arrived(), i - next.of_a);
    }
}

/* ---------------------------------------------------------------- launches */

/* Shared memory that a block may have; a multiprocessor has 1 KB more, and takes 1 KB for each block. */
static int room_of(int cc)
{
    return (cc == 80 || cc == 87 ? 163 : cc == 90 || cc == 100 || cc == 103 ? 227 : 99) << 10;
}

static int bytes_of(const k_narrow_args *a, int cols, int stages)
{
    return cols * (int)sizeof(float) + (a->depth[0] + a->depth[1]) * cols * 2 + stages * STAGE;
}

/* Columns of a tile, stages and blocks of a multiprocessor. */
typedef struct shape {
    int cols, stages, blocks;
} shape;

static bool shape_of(const k_narrow_args *a, shape *out)
{
    static const shape all[] = {{128, 4, 2}, {128, 3, 2}, {128, 4, 1}, {128, 3, 1},
                                {64, 4, 2},  {64, 3, 2},  {64, 4, 1},  {64, 3, 1}};
    const int room = room_of(a->cc);
    for (const shape &s : all) {
        const int bytes = bytes_of(a, s.cols, s.stages);
        if (a->n % s.cols == 0 && bytes <= room &&
            s.blocks * (bytes + (1 << 10)) <= room + (1 << 10)) {
            *out = s;
            return true;
        }
    }
    return false;
}

bool k_narrow_takes(const k_narrow_args *a)
{
    shape s;
    return a->cc >= 80 && a->type != DNR_F32 && a->n % 64 == 0 && a->depth[0] > 0 &&
           a->depth[0] % DEPTH == 0 && a->depth[1] % DEPTH == 0 &&
           (shape_of(a, &s) || k_wide_takes(a));
}

template <class T, int COLS, int STAGES>
static void launch(cudaStream_t s, const k_narrow_args *a, int blocks)
{
    const int bytes = bytes_of(a, COLS, STAGES), tiles = a->n / COLS;
    const int64_t down = (a->rows + ROWS - 1) / ROWS;
    const int64_t most = blocks * a->sms / tiles > 1 ? blocks * a->sms / tiles : 1;
    const int64_t grid = (down < most ? down : most) * tiles;
    (void)cudaFuncSetAttribute(k_narrow_kernel<T, COLS, STAGES>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    k_narrow_kernel<T, COLS, STAGES><<<(unsigned)grid, THREADS, bytes, s>>>(*a);
}

template <class T> static void launch_shape(cudaStream_t s, const k_narrow_args *a, const shape &z)
{
    if (z.cols == 128 && z.stages == 4)
        launch<T, 128, 4>(s, a, z.blocks);
    else if (z.cols == 128)
        launch<T, 128, 3>(s, a, z.blocks);
    else if (z.stages == 4)
        launch<T, 64, 4>(s, a, z.blocks);
    else
        launch<T, 64, 3>(s, a, z.blocks);
}

cudaError_t k_narrow(cudaStream_t s, const k_narrow_args *a)
{
    shape z;
    if (k_wide_takes(a))
        return k_wide(s, a);
    if (!shape_of(a, &z))
        return cudaErrorNotSupported;
    if (a->type == DNR_F16)
        launch_shape<__half>(s, a, z);
    else
        launch_shape<__nv_bfloat16>(s, a, z);
    return cudaSuccess;
}
