/* norm_pool.cu: batch norm, ReLU and max pool in one pass, and their gradients, for windows of 3x3 at every second
 * pixel, padded by 1, over even sides: the stem's. What lies between norm and pool exists in registers only. */
#include "norm.cuh"

#define THREADS 256
/* Blocks of a multiprocessor: a thread has nine (forward) or twelve (backward) loads in flight. */
#define PER_SM 2
#define NONE   255 /* an index that names no pixel */

/* Row r of [n·p·q] as picture and window; fewer than 2^31 rows. */
struct window {
    unsigned n, p, q;
    __device__ window(int64_t r, const k_pool_args &g)
    {
        unsigned rest = (unsigned)r / (unsigned)g.q;
        q = (unsigned)r % (unsigned)g.q;
        p = rest % (unsigned)g.p;
        n = rest / (unsigned)g.p;
    }
};
__device__ __forceinline__ int64_t offset(unsigned n, unsigned i, unsigned j, int rows, int cols)
{
    return ((int64_t)n * rows + i) * cols + j;
}

__device__ __forceinline__ float max_or_nan(float a, float b)
{
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

/* y is monotonic in x: rising or falling with the sign of gamma, constant where that is 0. So the maximum is taken
 * of sign · x, which is exact, and only the winner is normalised; equal x tie, as in exact arithmetic. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_norm_pool_kernel(k_norm_args a, k_pool_args g, int vecs, const T *__restrict__ x,
                       T *__restrict__ y, uint8_t *__restrict__ index)
{
    const k_tile t(vecs, THREADS);
    if (t.idle())
        return;
    float mean[N], scale[N], beta[N], sign[N];
    if (a.sum) {
        from_sums(a, t, mean, sign);
    } else {
        k_get_floats(a.mean + t.col * N, mean);
        k_get_floats(a.invstd + t.col * N, sign);
    }
    k_get_floats(a.gamma + t.col * N, scale);
    k_get_floats(a.beta + t.col * N, beta);
#pragma unroll
    for (int j = 0; j < N; j++) {
        scale[j] *= sign[j];
        sign[j] = scale[j] > 0 ? 1 : scale[j] < 0 ? -1 : scale[j]; /* 0 or NaN */
    }
    int64_t rows = (int64_t)g.n * g.p * g.q;
    for (int64_t r = t.row; r < rows; r += t.stride) {
        const window o(r, g);
        k_vec<T, N> v[3][3];
#pragma unroll
        for (int e = 0; e < 3; e++)
#pragma unroll
            for (int f = 0; f < 3; f++) /* only the first row and column can lie in the padding */
                if ((e || o.p) && (f || o.q))
                    v[e][f] = k_load<T, N>(
                        x +
                        (offset(o.n, 2 * o.p + e - 1, 2 * o.q + f - 1, g.h, g.w) * vecs + t.col) *
                            N);
        float best[N];
        int at[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            best[j] = -INFINITY;
            at[j] = NONE;
        }
#pragma unroll
        for (int e = 0; e < 3; e++)
#pragma unroll
            for (int f = 0; f < 3; f++)
                if ((e || o.p) && (f || o.q)) {
                    float key[N];
                    k_unpack(v[e][f], key);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        key[j] *= sign[j];
                        at[j] = key[j] > best[j] ? e * 3 + f : at[j];
                        best[j] = max_or_nan(best[j], key[j]);
                    }
                }
        k_vec<T, N> out;
        k_vec<uint8_t, N> where;
#pragma unroll
        for (int j = 0; j < N; j++) {
            best[j] = k_relu_value(__fmaf_rn(best[j] * sign[j] - mean[j], scale[j], beta[j]));
            where.v[j] = (uint8_t)(best[j] > k_type<T>::vanish ? at[j] : NONE);
        }
        k_pack(best, out);
        k_put(y + (r * vecs + t.col) * N, out);
        *(k_vec<uint8_t, N> *)(index + (r * vecs + t.col) * N) = where;
    }
}

/* A thread has the 2x2 pixels at (2p, 2q), which four windows cover. dz of a pixel is the sum of dy over those
 * windows whose index names it. Twice over the same inputs: APPLY false: part ← [block][Σ dz, Σ dz·(x − mean)][c];
 * true: dx = gamma · invstd · (dz − dbeta/M − (x − mean) · invstd · dgamma/M). */
template <class T, int N, bool TWO, bool APPLY>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_norm_pool_bwd_kernel(k_norm_bwd_args a, k_pool_args g, int vecs,
                           const uint8_t *__restrict__ index, float *__restrict__ part)
{
    const k_tile t(vecs, THREADS);
    const T *x = (const T *)a.x, *dy = (const T *)a.dy, *dy2 = (const T *)a.dy2;
    float mean[N], s1[N], s2[N]; /* the sums; for APPLY dbeta/M and invstd · dgamma/M */
    float scale[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        s1[j] = s2[j] = 0;
    if (!t.idle()) {
        k_get_floats(a.mean + t.col * N, mean);
        if (APPLY) {
            float invstd[N], over_m = 1.0f / (float)a.rows;
            k_get_floats(a.gamma + t.col * N, scale);
            k_get_floats(a.invstd + t.col * N, invstd);
            k_get_floats(a.dbeta + t.col * N, s1);
            k_get_floats(a.dgamma + t.col * N, s2);
#pragma unroll
            for (int j = 0; j < N; j++) {
                scale[j] *= invstd[j];
                s1[j] *= over_m;
                s2[j] *= invstd[j] * over_m;
            }
        }
    }
    int64_t rows = t.idle() ? 0 : (int64_t)g.n * g.p * g.q;
    for (int64_t r = t.row; r < rows; r += t.stride) {
        const window o(r, g);
        k_vec<T, N> v[2][2], d[2][2], d2[2][2];
        k_vec<uint8_t, N> k[2][2];
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++) { /* pixel (2p + e, 2q + f), window (p + e, q + f) */
                const T *px =
                    x + (offset(o.n, 2 * o.p + e, 2 * o.q + f, g.h, g.w) * vecs + t.col) * N;
                v[e][f] = APPLY ? k_load_last<T, N>(px) : k_load<T, N>(px);
                bool there = (!e || (int)o.p + 1 < g.p) && (!f || (int)o.q + 1 < g.q);
                int64_t at = ((there ? r + e * g.q + f : r) * vecs + t.col) * N;
                d[e][f] = k_load<T, N>(dy + at);
                if (TWO)
                    d2[e][f] = k_load<T, N>(dy2 + at);
                k[e][f] = *(const k_vec<uint8_t, N> *)(index + at);
#pragma unroll
                for (int j = 0; j < N; j++)
                    k[e][f].v[j] = there ? k[e][f].v[j] : NONE;
            }
        float dz[2][2][N];
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    dz[e][f][j] = 0;
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++) {
                float w[N];
                k_unpack(d[e][f], w);
                if (TWO) {
                    float w2[N];
                    k_unpack(d2[e][f], w2);
#pragma unroll
                    for (int j = 0; j < N; j++)
                        w[j] += w2[j];
                }
#pragma unroll
                for (int i = e; i < 2; i++)
#pragma unroll
                    for (int l = f; l < 2;
                         l++) { /* window (p + e, q + f) has pixel (2p + i, 2q + l) */
                        const int me = (i + 1 - 2 * e) * 3 + (l + 1 - 2 * f);
#pragma unroll
                        for (int j = 0; j < N; j++)
                            dz[i][l][j] += k[e][f].v[j] == me ? w[j] : 0;
                    }
            }
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++) {
                float xc[N];
                k_unpack(v[e][f], xc);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    xc[j] -= mean[j];
                    if (APPLY) {
                        dz[e][f][j] = scale[j] * (dz[e][f][j] - s1[j] - xc[j] * s2[j]);
                    } else {
                        s1[j] += dz[e][f][j];
                        s2[j] += dz[e][f][j] * xc[j];
                    }
                }
                if (APPLY) {
                    k_vec<T, N> out;
                    k_pack(dz[e][f], out);
                    k_put((T *)a.dx +
                              (offset(o.n, 2 * o.p + e, 2 * o.q + f, g.h, g.w) * vecs + t.col) * N,
                          out);
                }
            }
    }
    if constexpr (!APPLY) {
        __shared__ float sm[2][N][THREADS];
#pragma unroll
        for (int j = 0; j < N; j++) {
            sm[0][j][threadIdx.x] = s1[j];
            sm[1][j][threadIdx.x] = s2[j];
        }
        __syncthreads();
        for (int left = t.groups; left > 1;) { /* groups t.group and t.group + half merge */
            int half = (left + 1) / 2;
            if (!t.idle() && t.group < left - half) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    sm[0][j][threadIdx.x] += sm[0][j][threadIdx.x + half * t.cols];
                    sm[1][j][threadIdx.x] += sm[1][j][threadIdx.x + half * t.cols];
                }
            }
            left = half;
            __syncthreads();
        }
        if (!t.idle() && t.group == 0) {
            float *o = part + ((int64_t)blockIdx.x * 2 * vecs + t.col) * N;
#pragma unroll
            for (int j = 0; j < N; j++) {
                s1[j] = sm[0][j][threadIdx.x];
                s2[j] = sm[1][j][threadIdx.x];
            }
            k_put_floats(o, s1);
            k_put_floats(o + vecs * N, s2);
        }
    }
}

/* ---------------------------------------------------------------- launches */

static dim3 grid_of(const k_pool_args *g, int vecs)
{
    return k_tile_grid((int64_t)g->n * g->p * g->q, vecs, THREADS, 1, PER_SM * g->sms);
}

bool k_norm_pool_takes(const k_pool_args *g)
{
    int wide = g->type == DNR_F32 ? 4 : 8;
    return g->kernel == 3 && g->stride == 2 && g->pad == 1 && g->h == 2 * g->p &&
           g->w == 2 * g->q && g->c % wide == 0 && (int64_t)g->n * g->p * g->q < (1u << 31);
}

size_t k_norm_pool_bwd_workspace(const k_pool_args *g)
{
    return (size_t)PER_SM * (size_t)g->sms * 2 * (size_t)g->c * sizeof(float);
}

void k_norm_pool_apply(cudaStream_t s, const k_norm_args *a, const k_pool_args *g, uint8_t *index)
{
    k_by_type(g->type, [&](auto t) {
        using T = decltype(t);
        constexpr int N = k_type<T>::wide;
        int vecs = g->c / N;
        k_norm_pool_kernel<T, N>
            <<<grid_of(g, vecs), THREADS, 0, s>>>(*a, *g, vecs, (const T *)a->x, (T *)a->y, index);
    });
}

template <class T, bool TWO>
static void launch_bwd(cudaStream_t s, const k_norm_bwd_args *a, const k_pool_args *g,
                       const uint8_t *index, float *part)
{
    constexpr int N = k_type<T>::wide;
    int vecs = g->c / N;
    dim3 grid = grid_of(g, vecs);
    k_norm_pool_bwd_kernel<T, N, TWO, false><<<grid, THREADS, 0, s>>>(*a, *g, vecs, index, part);
    k_norm_bwd_merge(s, part, (int)grid.x, g->c, a->invstd, a->dgamma, a->dbeta);
    k_norm_pool_bwd_kernel<T, N, TWO, true><<<grid, THREADS, 0, s>>>(*a, *g, vecs, index, NULL);
}

void k_norm_pool_bwd(cudaStream_t s, const k_norm_bwd_args *a, const k_pool_args *g,
                     const uint8_t *index, void *workspace)
{
    k_by_type(g->type, [&](auto t) {
        using T = decltype(t);
        if (a->dy2)
            launch_bwd<T, true>(s, a, g, index, (float *)workspace);
        else
            launch_bwd<T, false>(s, a, g, index, (float *)workspace);
    });
}
