/* norm_once.cu: batch norm in one launch, forwards and backwards, for what shared memory holds: a block sums its pixels
 * and keeps them, waits for the sums of the blocks that share its channels, and goes on with what it kept. So a tensor
 * is read once, and nothing starts or drains between the passes. What does not fit is read twice, as it would be by
 * two kernels. The sums are added in a fixed order: the same bits every time. */
#include "norm_bwd.cuh"

#define THREADS 512
#define WARPS   (THREADS / 32)
/* Accesses of neighbouring channels that a block has: 128 bytes, one line of the cache. */
#define COLS 8
/* Loads of each tensor in flight, and of partial sums. */
#define LOADS 4
#define PARTS 12
/* Bytes of shared memory before what is kept: the sums of each warp, or of each thread in fp64; a value a channel. */
#define SUMS_BYTES   (WARPS * 2 * COLS * 8 * sizeof(float))
#define VALUES_BYTES (2 * COLS * 8 * sizeof(float))
#define HEAD_BYTES   (SUMS_BYTES + VALUES_BYTES)
static_assert(SUMS_BYTES == 2 * THREADS * sizeof(double), "both use the same place");
/* Polls, of about a microsecond, after which blocks that are all running can no longer be waited for. */
#define PATIENCE (1u << 26)

struct once {       /* blockIdx.x: which rows, blockIdx.y: which channels */
    int vecs, cols; /* accesses of a row; of a block's part of it: a power of two */
    int keep;       /* rows that a thread keeps */
    float *part;    /* [blockIdx.y][blockIdx.x][2][cols · N] */
    unsigned *gates;
};

extern __shared__ int4 once_shared[];

/* A thread's place: its channels, the first of its rows, and how many it has. */
template <int N> struct once_place {
    int col, lanes,
        values; /* channels from col · N on; accesses, and values of two sums, of the block */
    int64_t row, stride, at, step;
    int count;
    __device__ once_place(const once &o, int64_t rows)
    {
        const int groups = THREADS / o.cols;
        lanes = o.cols;
        values = 2 * o.cols * N;
        col = (int)blockIdx.y * o.cols + ((int)threadIdx.x & (o.cols - 1));
        row = (int64_t)blockIdx.x * groups + (int)threadIdx.x / o.cols;
        stride = (int64_t)gridDim.x * groups;
        at = (row * o.vecs + col) * N;
        step = stride * o.vecs * N;
        count = row < rows ? (int)((rows - 1 - row) / stride) + 1 : 0;
    }
};

__device__ __forceinline__ float *sums()
{
    return (float *)once_shared;
}
__device__ __forceinline__ double *wide_sums()
{
    return (double *)once_shared;
}
/* The block's channels: one value of each of two kinds. */
__device__ __forceinline__ float *values()
{
    return (float *)((char *)once_shared + SUMS_BYTES);
}
/* Kept access i of the thread; neighbours' lie beside it. */
template <class T, int N> __device__ __forceinline__ k_vec<T, N> &kept(int i)
{
    return *(k_vec<T, N> *)((char *)once_shared + HEAD_BYTES +
                            ((size_t)i * THREADS + threadIdx.x) * sizeof(k_vec<T, N>));
}

/* Reads of what this launch has written: past the first cache, and not before what comes before them. */
__device__ __forceinline__ float load_fresh(const float *p)
{
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ int4 load_fresh16(const void *p)
{
    int4 v;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ unsigned load_gate(const unsigned *p)
{
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Until all blocks of these channels have come here. The top bit of a gate turns over as the last one comes, and the
 * rest of it is 0 then: it need not be reset. All blocks of a launch run at once, so the wait ends. */
__device__ __forceinline__ void wait_for_blocks(const once &o)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned *gate = o.gates + blockIdx.y * (K_GATE_BYTES / sizeof(unsigned));
        __threadfence();
        const unsigned before =
            atomicAdd(gate, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
        for (unsigned polls = 0; !((load_gate(gate) ^ before) & 0x80000000u);)
            if (++polls == PATIENCE)
                __trap();
        __threadfence();
    }
    __syncthreads();
}

/* The sum of s over the threads of a warp that have the same channels. */
__device__ __forceinline__ float over_warp(float s, int lanes)
{
    for (int m = lanes; m < 32; m *= 2)
        s += __shfl_xor_sync(~0u, s, m);
    return s;
}

/* s of each warp to sums()[warp][2][lanes · N] */
template <int N>
__device__ __forceinline__ void put_warp(const once_place<N> &t, const float (&s)[2][N])
{
    const int lane = (int)threadIdx.x % 32;
    if (lane >= t.lanes)
        return;
    float *to = sums() + (int)threadIdx.x / 32 * t.values + lane * N;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            to[i * t.values / 2 + j] = s[i][j];
}

/* Where block b of the same channels has its values. */
__device__ __forceinline__ float *part_of(const once &o, int n, unsigned b)
{
    return o.part + ((int64_t)blockIdx.y * gridDim.x + b) * n;
}

/* ---------------------------------------------------------------- backwards */

/* values() ← dbeta, dgamma of the block's channels, which one block of them also writes. */
template <int N>
__device__ void finish_bwd(const once &o, const k_norm_bwd_args &a, const once_place<N> &t)
{
    const int me = (int)threadIdx.x, n = t.values, i = me & (n - 1), shares = THREADS / n;
    double sum = 0;
    for (unsigned b = (unsigned)(me / n); b < gridDim.x; b += PARTS * shares) {
        float p[PARTS];
#pragma unroll
        for (int u = 0; u < PARTS; u++)
            p[u] = b + u * shares < gridDim.x ? load_fresh(part_of(o, n, b + u * shares) + i) : 0;
#pragma unroll
        for (int u = 0; u < PARTS; u++)
            sum += p[u];
    }
    wide_sums()[me] = sum;
    __syncthreads();
    if (me >= n)
        return;
    for (int q = 1; q < shares; q++)
        sum += wide_sums()[q * n + me];
    const bool beta = me < n / 2;
    const int c = (int)blockIdx.y * n / 2 + (beta ? me : me - n / 2);
    const float v = (float)(beta ? sum : sum * a.invstd[c]);
    values()[me] = v;
    if (blockIdx.x == 0)
        (beta ? a.dbeta : a.dgamma)[c] = v;
}

template <class T, int N, int MASK, bool TWO>
__global__ void __launch_bounds__(THREADS, 1) k_bwd_once_kernel(k_norm_bwd_args a, once o)
{
    constexpr int U = TWO || MASK == MASK_Y ? LOADS / 2 : LOADS;
    const once_place<N> t(o, a.rows);
    bwd_channels<T, N, MASK, TWO> ch;
    ch.read(a, t.col);
    const bool write_dz = MASK >= MASK_Y && a.dz; /* without a residual nobody wants it */
    const int keep = t.count < o.keep ? t.count : o.keep;
    float s[2][N];
#pragma unroll
    for (int j = 0; j < N; j++)
        s[0][j] = s[1][j] = 0;
    for (int i = 0; i < t.count; i += U) {
        bwd_in<T, N> in[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < t.count)
                ch.template load<false>(a, t.at + (i + u) * t.step, in[u]);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u < t.count) {
                float dz[N], xc[N];
                ch.compute(in[u], dz, xc);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    s[0][j] += dz[j];
                    s[1][j] += dz[j] * xc[j];
                }
                k_vec<T, N> out;
                k_pack(dz, out);
                if (write_dz)
                    k_put((T *)a.dz + t.at + (i + u) * t.step, out);
                if (i + u < keep) {
                    kept<T, N>(2 * (i + u)) = in[u].x;
                    kept<T, N>(2 * (i + u) + 1) = out;
                }
            }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            s[i][j] = over_warp(s[i][j], t.lanes);
    put_warp<N>(t, s);
    __syncthreads();
    if ((int)threadIdx.x < t.values) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += sums()[w * t.values + threadIdx.x];
        part_of(o, t.values, blockIdx.x)[threadIdx.x] = sum;
    }
    wait_for_blocks(o);
    finish_bwd<N>(o, a, t);
    __syncthreads();

    const float over_m = 1.0f / (float)a.rows;
    const int first = (t.col - (int)blockIdx.y * o.cols) * N;
    float k1[N], k2[N], invstd[N];
    k_get_floats(a.invstd + t.col * N, invstd);
#pragma unroll
    for (int j = 0; j < N; j++) {
        k1[j] = values()[first + j] * over_m;
        k2[j] = values()[t.values / 2 + first + j] * invstd[j] * over_m;
    }
    auto put = [&](int i, const float(&dz)[N], const float(&xc)[N]) {
        float dx[N];
        k_vec<T, N> out;
#pragma unroll
        for (int j = 0; j < N; j++)
            dx[j] = ch.scale[j] * (dz[j] - k1[j] - xc[j] * k2[j]);
        k_pack(dx, out);
        k_put((T *)a.dx + t.at + i * t.step, out);
    };
    auto centred = [&](const k_vec<T, N> &x, float(&xc)[N]) {
        k_unpack(x, xc);
#pragma unroll
        for (int j = 0; j < N; j++)
            xc[j] -= ch.mean[j];
    };
    for (int i = t.count - 1; i >= keep; i -= U) { /* what was not kept, latest first */
        bwd_in<T, N> in[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i - u >= keep) {
                const int64_t at = t.at + (i - u) * t.step;
                if (write_dz) {
                    in[u].x = ch.template get<true>(a.x, at);
                    *(int4 *)&in[u].dy = load_fresh16((const T *)a.dz + at);
                } else {
                    ch.template load<true>(a, at, in[u]);
                }
            }
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i - u >= keep) {
                float dz[N], xc[N];
                if (write_dz) {
                    k_unpack(in[u].dy, dz);
                    centred(in[u].x, xc);
                } else {
                    ch.compute(in[u], dz, xc);
                }
                put(i - u, dz, xc);
            }
    }
#pragma unroll 2
    for (int i = keep - 1; i >= 0; i--) {
        float dz[N], xc[N];
        centred(kept<T, N>(2 * i), xc);
        k_unpack(kept<T, N>(2 * i + 1), dz);
        put(i, dz, xc);
    }
}

/* ---------------------------------------------------------------- forwards */

/* Mean and squared distances over a warp's values, of n each thread's; returns how many the warp has. The threads'
 * distances are from their own means: no cancellation, however large the mean (Chan, Golub & LeVeque 1979). */
template <int N>
__device__ __forceinline__ float moments_of_warp(float n, float (&s)[2][N], int lanes)
{
    const float all = over_warp(n, lanes), over_all = all > 0 ? 1 / all : 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float mean = over_warp(n * s[0][j], lanes) * over_all, d = s[0][j] - mean;
        s[1][j] = over_warp(s[1][j] + n * d * d, lanes);
        s[0][j] = mean;
    }
    return all;
}

/* values() ← mean, invstd of the block's channels, which one block of them also writes. */
template <int N>
__device__ void finish_stats(const once &o, const k_norm_args &a, const once_place<N> &t)
{
    const int me = (int)threadIdx.x, n = t.values / 2, i = me & (n - 1), shares = THREADS / n;
    double sum = 0, sq = 0;
    for (unsigned b = (unsigned)(me / n); b < gridDim.x; b += PARTS * shares) {
        float p[PARTS][2];
#pragma unroll
        for (int u = 0; u < PARTS; u++)
            if (b + u * shares < gridDim.x) {
                p[u][0] = load_fresh(part_of(o, 2 * n, b + u * shares) + i);
                p[u][1] = load_fresh(part_of(o, 2 * n, b + u * shares) + n + i);
            }
#pragma unroll
        for (int u = 0; u < PARTS; u++)
            if (b + u * shares < gridDim.x) {
                const double rows = (double)rows_of(a.rows, (int)gridDim.x, THREADS / t.lanes,
                                                    (int)b + u * shares),
                             mean = p[u][0];
                sum += rows * mean;
                sq += p[u][1] + rows * mean * mean;
            }
    }
    wide_sums()[me] = sum;
    wide_sums()[THREADS + me] = sq;
    __syncthreads();
    if (me >= n)
        return;
    for (int q = 1; q < shares; q++) {
        sum += wide_sums()[q * n + me];
        sq += wide_sums()[THREADS + q * n + me];
    }
    keep_statistics(a, (int64_t)blockIdx.y * n + me, sum, sq, values()[me], values()[n + me],
                    blockIdx.x == 0);
}

template <class T, int N, bool RELU, bool ADD>
__global__ void __launch_bounds__(THREADS, 1)
    k_train_once_kernel(k_norm_args a, once o, const T *x, const T *residual, T *y)
{
    const once_place<N> t(o, a.rows);
    const int keep = t.count < o.keep ? t.count : o.keep;
    float first[N], s[2][N];
#pragma unroll
    for (int j = 0; j < N; j++)
        first[j] = s[0][j] = s[1][j] = 0;
    if (t.count > 0)
        k_unpack(k_load<T, N>(x + t.at), first);
    for (int i = 0; i < t.count; i += LOADS) {
        k_vec<T, N> v[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i + u < t.count)
                v[u] = k_load<T, N>(x + t.at + (i + u) * t.step);
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i + u < t.count) {
                float f[N];
                k_unpack(v[u], f);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const float d = f[j] - first[j];
                    s[0][j] += d;
                    s[1][j] += d * d;
                }
                if (i + u < keep)
                    kept<T, N>(i + u) = v[u];
            }
    }
    const float n = (float)t.count, over_n = t.count ? 1 / n : 0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float m2 = s[1][j] - s[0][j] * s[0][j] * over_n;
        s[0][j] = first[j] + s[0][j] * over_n;
        s[1][j] = m2 < 0 ? 0 : m2; /* rounding apart it is no less; NaN stays */
    }
    const float of_warp = moments_of_warp<N>(n, s, t.lanes);
    put_warp<N>(t, s);
    if (threadIdx.x % 32 == 0)
        values()[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if ((int)threadIdx.x < t.values / 2) {
        const int half = t.values / 2;
        const float *p = sums() + threadIdx.x;
        float all = 0, mean = 0, m2 = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            all += values()[w];
            mean += values()[w] * p[w * t.values];
        }
        mean /= all;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float d = p[w * t.values] - mean;
            m2 += p[w * t.values + half] + values()[w] * d * d;
        }
        float *to = part_of(o, t.values, blockIdx.x) + threadIdx.x;
        to[0] = mean;
        to[half] = m2;
    }
    wait_for_blocks(o);
    finish_stats<N>(o, a, t);
    __syncthreads();

    const int from = (t.col - (int)blockIdx.y * o.cols) * N;
    float mean[N], scale[N], beta[N];
    k_get_floats(a.gamma + t.col * N, scale);
    k_get_floats(a.beta + t.col * N, beta);
#pragma unroll
    for (int j = 0; j < N; j++) {
        mean[j] = values()[from + j];
        scale[j] *= values()[t.values / 2 + from + j];
    }
    for (int i = t.count - 1; i >= 0; i -= LOADS) { /* from memory's end, as the other passes */
        k_vec<T, N> v[LOADS], z[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i - u >= 0) {
                const int64_t at = t.at + (i - u) * t.step;
                if (ADD)
                    z[u] = k_load_last<T, N>(residual + at);
                if (i - u < keep)
                    v[u] = kept<T, N>(i - u);
                else
                    v[u] = k_load_last<T, N>(x + at);
            }
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i - u >= 0)
                put_y<T, N, RELU, ADD>(a, y, t.at + (i - u) * t.step, v[u], z[u], mean, scale,
                                       beta);
    }
}

/* ---------------------------------------------------------------- launches */

struct once_shape {
    int cols, keep, need; /* of the rows that a thread has, how many it keeps */
    unsigned blocks, parts;
    size_t shared;
};

/* kept: tensors of which rows are kept */
static bool shape_of(const k_device *d, int type, int64_t rows, int64_t c, int kept, once_shape *s)
{
    const int width = type == DNR_F32 ? 4 : 8;
    const int64_t vecs = c / width;
    if (c % width || d->shared < HEAD_BYTES)
        return false;
    int cols = COLS;
    while (vecs % cols)
        cols /= 2;
    const int64_t parts = vecs / cols, groups = THREADS / cols;
    if (parts > d->sms)
        return false;
    const size_t slot = (size_t)kept * THREADS * 16;
    const int64_t blocks = k_blocks(rows, groups, d->sms / parts);
    const int64_t need = (rows + blocks * groups - 1) / (blocks * groups);
    const int64_t room = (int64_t)((d->shared - HEAD_BYTES) / slot);
    if (need > 1 << 20)
        return false;
    *s = (once_shape){
        cols, (int)(need < room ? need : room), (int)need, (unsigned)blocks, (unsigned)parts, 0};
    s->shared = HEAD_BYTES + (size_t)s->keep * slot;
    return true;
}

double k_norm_once_share(const k_device *d, int type, int64_t rows, int64_t c, bool backward)
{
    once_shape s;
    return shape_of(d, type, rows, c, backward ? 2 : 1, &s) ? (double)s.keep / s.need : 0;
}

size_t k_norm_once_workspace(const k_device *d)
{
    return (size_t)d->sms * VALUES_BYTES;
}

/* All blocks at once, or not at all. */
template <class... P, class... A>
static cudaError_t launch(void (*kernel)(P...), cudaStream_t stream, const once_shape &s, A... args)
{
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(s.blocks, s.parts);
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = s.shared;
    c.stream = stream;
    c.attrs = &together;
    c.numAttrs = 1;
    cudaError_t e = cudaFuncSetAttribute(
        (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)s.shared);
    return e != cudaSuccess ? e : cudaLaunchKernelEx(&c, kernel, args...);
}

template <class A>
static once once_of(const k_device *d, const A *a, const once_shape &s, int width, void *workspace)
{
    return {(int)(a->c / width), s.cols, s.keep, (float *)workspace, d->gates};
}

cudaError_t k_norm_train_once(cudaStream_t stream, const k_device *d, const k_norm_args *a,
                              void *workspace)
{
    cudaError_t e = cudaErrorInvalidConfiguration;
    once_shape s;
    if (!shape_of(d, a->type, a->rows, a->c, 1, &s))
        return e;
    k_by_type(a->type, [&](auto type) {
        using T = decltype(type);
        constexpr int N = k_type<T>::wide;
        const once o = once_of(d, a, s, N, workspace);
        const auto go = [&](auto kernel) {
            e = launch(kernel, stream, s, *a, o, (const T *)a->x, (const T *)a->residual,
                       (T *)a->y);
        };
        if (a->relu && a->residual)
            go(k_train_once_kernel<T, N, true, true>);
        else if (a->relu)
            go(k_train_once_kernel<T, N, true, false>);
        else if (a->residual)
            go(k_train_once_kernel<T, N, false, true>);
        else
            go(k_train_once_kernel<T, N, false, false>);
    });
    return e;
}

template <class T, int N, int MASK>
static cudaError_t launch_bwd(cudaStream_t stream, const once_shape &s, const k_norm_bwd_args *a,
                              once o)
{
    return a->dy2 ? launch(k_bwd_once_kernel<T, N, MASK, true>, stream, s, *a, o)
                  : launch(k_bwd_once_kernel<T, N, MASK, false>, stream, s, *a, o);
}

cudaError_t k_norm_bwd_once(cudaStream_t stream, const k_device *d, const k_norm_bwd_args *a,
                            void *workspace)
{
    cudaError_t e = cudaErrorInvalidConfiguration;
    once_shape s;
    if (!shape_of(d, a->type, a->rows, a->c, 2, &s))
        return e;
    k_by_type(a->type, [&](auto type) {
        using T = decltype(type);
        constexpr int N = k_type<T>::wide;
        const once o = once_of(d, a, s, N, workspace);
        if (!a->relu)
            e = launch_bwd<T, N, MASK_NONE>(stream, s, a, o);
        else if (a->y)
            e = launch_bwd<T, N, MASK_Y>(stream, s, a, o);
        else if (!a->mask)
            e = launch_bwd<T, N, MASK_X>(stream, s, a, o);
        else if constexpr (N == 8)
            e = launch_bwd<T, N, MASK_BITS>(stream, s, a, o);
    });
    return e;
}
