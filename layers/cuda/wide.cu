/* wide.cu: the product of narrow.cu by Hopper's means (hopper.cuh), for more columns at a time.
 *
 * A block has a tile of columns for good and strides over tiles of rows. Its part of b lies in shared memory; one thread
 * has slices of a copied through a ring; two warpgroups multiply 64 rows each, and have their residual in registers before
 * the sums are there. So copies, products and stores of different tiles overlap. */
#include "kernels.h"
#include "wide.h"

#include <cudaTypedefs.h>

#include "../../runtime/cuda/vec.cuh"
#include "hopper.cuh"
#include "mma.cuh"

#define ROWS       128 /* of a tile */
#define DEPTH      64  /* of a slice */
#define SLICE      (ROWS * DEPTH * 2)
#define GROUP      128 /* threads of a warpgroup */
#define THREADS    (3 * GROUP)
#define MOST       8 /* stages */
#define FEW        24
#define MANY       240
#define HEAD_BYTES 1024 /* to begin at a multiple of it */

typedef struct wide_args {
    CUtensorMap a[2];
    k_narrow_args of;
    int stages;
} wide_args;

/* Row of a slice of b where column n lies: so that thread t of a group of four, which has columns 2t and 2t + 1 of each
 * eight, has 8t to 8t + 7 of 32. */
__device__ __forceinline__ int row_of(int n)
{
    return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}
__device__ __forceinline__ int in_slice(int r, int v)
{
    return r * 128 + (v ^ (r & 7)) * 16;
}

/* b's columns n0 to n0 + COLS: [slice of depth][row_of(column)][DEPTH]. */
template <class T, int COLS>
__device__ void load_b(const k_narrow_args &a, unsigned char *b, int n0)
{
    int first = 0; /* slice */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const T *from = (const T *)a.b[m];
        const int depth = a.depth[m];
        if (a.b_t) /* as it is */
#pragma unroll 4
            for (int i = (int)threadIdx.x; i < COLS * depth / 8; i += THREADS) {
                const int n = i / (depth / 8), v = i % (depth / 8);
                *(int4 *)(b + (first + v / 8) * COLS * 128 + in_slice(row_of(n), v % 8)) =
                    *(const int4 *)(from + (int64_t)(n0 + n) * depth + v * 8);
            }
        else /* eight by eight, turned */
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < COLS / 8 * (depth / 8); i += THREADS) {
                const int n = i % (COLS / 8) * 8, l = i / (COLS / 8);
                k_vec<T, 8> in[8], out;
#pragma unroll
                for (int k = 0; k < 8; k++)
                    in[k] = *(const k_vec<T, 8> *)(from + (int64_t)(l * 8 + k) * a.n + n0 + n);
#pragma unroll
                for (int j = 0; j < 8; j++) {
#pragma unroll
                    for (int k = 0; k < 8; k++)
                        out.v[k] = in[k].v[j];
                    *(int4 *)(b + (first + l / 8) * COLS * 128 + in_slice(row_of(n + j), l % 8)) =
                        *(const int4 *)&out;
                }
            }
        first += depth / DEPTH;
    }
}

/* Two of T: whether each is above 0, in all of its bits; and max(v, 0), NaN staying NaN. */
__device__ __forceinline__ uint32_t positive(__half2 v)
{
    return __hgt2_mask(v, __half2());
}
__device__ __forceinline__ uint32_t positive(__nv_bfloat162 v)
{
    return __hgt2_mask(v, __nv_bfloat162());
}
template <class P> __device__ __forceinline__ P relu(P v)
{
    return __hmax2_nan(v, P());
}
template <class T> struct two_of;
template <> struct two_of<__half> {
    using type = __half2;
};
template <> struct two_of<__nv_bfloat16> {
    using type = __nv_bfloat162;
};

/* What a warpgroup makes of its 64 rows of a tile: this lane has 8 columns of each 32, in row `first` and 8 rows below. */
template <class T, int COLS, bool MORE> struct wide_tile {
    static constexpr int HALVES = COLS / 128, GROUPS = COLS / 32;
    const k_narrow_args &a;
    const float *shift; /* of the block's columns */
    const int n0, lane, first;
    float acc[HALVES][64];
    k_vec<T, 8> more[MORE ? GROUPS : 1][2];

    __device__ wide_tile(const k_narrow_args &args, const float *s, int col)
        : a(args), shift(s), n0(col), lane((int)threadIdx.x % 32),
          first(((int)threadIdx.x - GROUP) / 32 * 16 + lane / 4)
    {
    }

    /* Where this lane's first 8 columns of a tile lie, and how many rows are left there. */
    struct place {
        int64_t at;
        int64_t left;
    };
    __device__ place of(int tile) const
    {
        const int64_t row = (int64_t)tile * ROWS + first;
        return {row * a.n + n0 + lane % 4 * 8, a.rows - row};
    }
    __device__ void fetch(const place &p, int group)
    {
        const T *from = (const T *)a.residual + p.at + group * 32;
        if (p.left > 0)
            *(int4 *)&more[group][0] = __ldcg((const int4 *)from);
        if (p.left > 8)
            *(int4 *)&more[group][1] = __ldcg((const int4 *)(from + 8 * a.n));
    }
    /* The first tile's residual. */
    __device__ void fetch(int tile)
    {
        const place p = of(tile);
        if (MORE)
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                fetch(p, group);
    }

    __device__ void multiply(uint32_t slice, uint32_t b, bool add)
    {
        const uint64_t x = h_operand(slice), y = h_operand(b);
        h_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                h_multiply(T(), acc[h], x + k * 2, y + h * (128 * 128 >> 4) + k * 2, add || k);
        h_end();
    }

    /* Writes a tile; of the next one the residual comes into the registers that are done with. */
    __device__ void put(int tile, int next)
    {
        const place p = of(tile), q = of(next);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            h_sums(acc[h]);
        uint32_t mask[2] = {0, 0};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float g[8];
            k_get_floats(shift + group * 32 + lane % 4 * 8, g);
            k_vec<T, 8> v[2];
#pragma unroll
            for (int down = 0; down < 2; down++) {
                float f[8], r[8];
#pragma unroll
                for (int j = 0; j < 8; j++)
                    f[j] = acc[group / 4][group % 4 * 16 + j / 2 * 4 + down * 2 + j % 2] + g[j];
                if (MORE) {
                    k_unpack(more[group][down], r);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        f[j] += r[j];
                }
                k_pack(f, v[down]);
                if (a.mask)
                    keep_bits(v[down], group, mask[down]);
                if (a.relu)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        pairs(v[down])[j] = relu(pairs(v[down])[j]);
            }
            if (MORE)
                fetch(q, group);
            T *to = (T *)a.d + p.at + group * 32;
            if (p.left > 0)
                k_put(to, v[0]);
            if (p.left > 8)
                k_put(to + 8 * a.n, v[1]);
            if (a.mask && group % 4 == 3) { /* four lanes write 128 neighbours */
                uint8_t *bits = a.mask + (p.at >> 3) + (group - 3) * 4 + lane % 4 * 3;
                if (p.left > 0)
                    *(uint32_t *)bits = mask[0];
                if (p.left > 8)
                    *(uint32_t *)(bits + a.n) = mask[1];
            }
        }
    }

    static __device__ typename two_of<T>::type *pairs(k_vec<T, 8> &v)
    {
        return (typename two_of<T>::type *)&v;
    }
    /* Four lanes have 32 neighbours, a word of bits; each keeps one word of four. */
    __device__ void keep_bits(k_vec<T, 8> &v, int group, uint32_t &word)
    {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) /* even columns below, odd ones above */
            bits |= positive(pairs(v)[j]) & (0x20001u << 2 * j);
        bits = ((bits | bits >> 16) & 0xff) << lane % 4 * 8;
        bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
        bits |= __shfl_xor_sync(0xffffffffu, bits, 2);
        if (group % 4 == lane % 4)
            word = bits;
    }
};

template <class T, int COLS, bool MORE>
__global__ void __launch_bounds__(THREADS, 1) k_wide_kernel(const __grid_constant__ wide_args w)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char dynamic[];
    const k_narrow_args &a = w.of;
    const int slices = (a.depth[0] + a.depth[1]) / DEPTH, stages = w.stages;
    unsigned char *b = dynamic + (-k_shared(dynamic) & (HEAD_BYTES - 1));
    unsigned char *ring = b + slices * COLS * 128;
    float *shift = (float *)(ring + stages * SLICE);
    const uint32_t full = k_shared(shift + COLS), empty = full + MOST * 8;
    const int tiles = a.n / COLS, n0 = (int)blockIdx.x % tiles * COLS;
    const int first = (int)blockIdx.x / tiles, step = (int)gridDim.x / tiles;
    const int down = (int)((a.rows + ROWS - 1) / ROWS);
    const auto load = [&](int stage, int tile, int slice) {
        const bool second = slice * DEPTH >= a.depth[0];
        h_expect(full + stage * 8, SLICE);
        h_load(k_shared(ring + stage * SLICE), &w.a[second], full + stage * 8,
               slice * DEPTH - (second ? a.depth[0] : 0), tile * ROWS);
    };
    int tile = first, slice = 0, stage = 0;
    if (threadIdx.x == 0) { /* all stages at once, while b comes */
        for (int i = 0; i < stages; i++) {
            h_barrier(full + i * 8, 1);
            h_barrier(empty + i * 8, 2 * GROUP / 32);
        }
        h_publish();
        for (; stage < stages && tile < down; stage++) {
            load(stage, tile, slice);
            if (++slice == slices) {
                slice = 0;
                tile += step;
            }
        }
    }
    load_b<T, COLS>(a, b, n0);
    for (int i = (int)threadIdx.x; i < COLS; i += THREADS) {
        const int n = n0 + i;
        shift[i] = a.shift ? a.shift[n]
                           : k_type<T>::load(((const T *)a.halves)[n]) +
                                 k_type<T>::load(((const T *)a.halves)[a.n + n]);
    }
    h_publish();
    __syncthreads();
    if (threadIdx.x < GROUP) {
        h_fewer_registers<FEW>();
        if (threadIdx.x == 0) {
            uint32_t parity = 0;
            for (stage = 0; tile < down;) {
                h_wait(empty + stage * 8, parity);
                load(stage, tile, slice);
                if (++slice == slices) {
                    slice = 0;
                    tile += step;
                }
                if (++stage == stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
        }
        return;
    }
    h_more_registers<MANY>();
    wide_tile<T, COLS, MORE> p(a, shift, n0);
    const uint32_t rows = ((threadIdx.x - GROUP) / GROUP) * 64 * 128, of_b = k_shared(b);
    uint32_t parity = 0;
    int before = 0; /* the stage that is multiplied still */
    const auto release = [&]() {
        if (threadIdx.x % 32 == 0)
            h_arrive(empty + before * 8);
    };
    p.fetch(tile = first);
    for (stage = 0; tile < down; tile += step) {
        for (int i = 0; i < slices; i++) {
            h_wait(full + stage * 8, parity);
            p.multiply(k_shared(ring + stage * SLICE) + rows, of_b + i * COLS * 128, i > 0);
            if (i) {
                h_finish<1>();
                release();
            }
            before = stage;
            if (++stage == stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        h_finish<0>();
        release();
        p.put(tile, tile + step);
    }
#endif
}

/* ---------------------------------------------------------------- launches */

static int columns_of(const k_narrow_args *a)
{
    return a->n % 256 == 0 && a->depth[0] + a->depth[1] <= 256 ? 256 : 128;
}

/* Stages that there is shared memory for, of the 227 KB that a block may have. */
static int stages_of(const k_narrow_args *a)
{
    const int cols = columns_of(a);
    const int rest =
        (227 << 10) - HEAD_BYTES - cols * ((a->depth[0] + a->depth[1]) * 2 + 4) - 2 * MOST * 8;
    const int stages = rest < 0 ? 0 : rest / SLICE;
    return stages < MOST ? stages : MOST;
}

static PFN_cuTensorMapEncodeTiled_v12000 encoder()
{
    void *f = nullptr;
    cudaDriverEntryPointQueryResult r;
#if CUDART_VERSION >= 12050
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                           cudaEnableDefault, &r);
#else
    const cudaError_t e =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &r);
#endif
    const bool there = e == cudaSuccess && r == cudaDriverEntryPointSuccess;
    return there ? (PFN_cuTensorMapEncodeTiled_v12000)f : nullptr;
}

bool k_wide_takes(const k_narrow_args *a)
{
#ifdef DNR_SM90A
    return a->cc == 90 && a->type != DNR_F32 && a->n % 128 == 0 && a->depth[0] > 0 &&
           a->depth[0] % DEPTH == 0 && a->depth[1] % DEPTH == 0 && stages_of(a) >= 4;
#else
    return false;
#endif
}

/* A matrix of `cols` columns in slices. */
static bool describe(CUtensorMap *map, int type, const void *at, int64_t rows, int cols)
{
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
    const cuuint64_t size[] = {(cuuint64_t)cols, (cuuint64_t)rows}, pitch[] = {2ull * cols};
    const cuuint32_t box[] = {DEPTH, ROWS}, step[] = {1, 1};
    return encode && encode(map,
                            type == DNR_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            2, (void *)at, size, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int COLS, bool MORE> static void launch(cudaStream_t s, const wide_args *w)
{
    const k_narrow_args *a = &w->of;
    const int bytes = HEAD_BYTES + COLS * ((a->depth[0] + a->depth[1]) * 2 + 4) +
                      w->stages * SLICE + 2 * MOST * 8;
    const int tiles = a->n / COLS;
    const int64_t down = (a->rows + ROWS - 1) / ROWS,
                  most = a->sms / tiles > 1 ? a->sms / tiles : 1;
    (void)cudaFuncSetAttribute(k_wide_kernel<T, COLS, MORE>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    k_wide_kernel<T, COLS, MORE>
        <<<(unsigned)((down < most ? down : most) * tiles), THREADS, bytes, s>>>(*w);
}

template <class T> static void launch_columns(cudaStream_t s, const wide_args *w)
{
    const bool all = columns_of(&w->of) == 256;
    if (w->of.residual)
        all ? launch<T, 256, true>(s, w) : launch<T, 128, true>(s, w);
    else
        all ? launch<T, 256, false>(s, w) : launch<T, 128, false>(s, w);
}

cudaError_t k_wide(cudaStream_t s, const k_narrow_args *a)
{
    wide_args w = {{}, *a, stages_of(a)};
    for (int m = 0; m < 2; m++)
        if (a->depth[m] && !describe(&w.a[m], a->type, a->a[m], a->rows, a->depth[m]))
            return cudaErrorNotSupported;
    if (a->type == DNR_F16)
        launch_columns<__half>(s, &w);
    else
        launch_columns<__nv_bfloat16>(s, &w);
    return cudaSuccess;
}
