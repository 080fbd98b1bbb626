/* norm_pool_bwd.cu: the gradients of batch norm, ReLU and max pool in two passes. The sums are over windows and need no
 * x: what a window's winner was before the norm follows from y. Only the pass for dx has all pixels. */
#include "norm_pool.cuh"

/* Blocks of a multiprocessor for dx: a thread has up to ten loads in flight. */
#define PER_SM 5

/* (y − beta)/gamma is the winner's (x − mean) · invstd, but for the rounding of y: it errs by that of y, relative to
 * 1 + |beta/gamma|. Where that could hide it, x is asked. */
__device__ __forceinline__ bool told_by_y(float gamma, float beta)
{
    return fabsf(gamma) >= 0x1p-12f && fabsf(beta) <= 4 * fabsf(gamma);
}

/* What is read of windows: dy + dy2, each once. */
template <class T, int N, bool TWO> struct window_grads {
    k_vec<T, N> d, d2;
    __device__ void load(const k_norm_bwd_args &a, int64_t at)
    {
        d = k_load<T, N>((const T *)a.dy + at);
        if (TWO)
            d2 = k_load<T, N>((const T *)a.dy2 + at);
    }
    __device__ void sums(int j, float (&s)[2]) const /* of channels j and j + 1; j is even */
    {
        k_unpack(*(const k_vec<T, 2> *)&d.v[j], s);
        if (TWO) {
            float w[2];
            k_unpack(*(const k_vec<T, 2> *)&d2.v[j], w);
            s[0] += w[0];
            s[1] += w[1];
        }
    }
};

/* s[1] += Σ dz · (x − mean) of the channels in `ask`. An index may name anything: a step is warmed up before it has its
 * inputs. */
template <class T, int N, bool TWO>
__device__ void ask_x(const k_norm_bwd_args &a, const k_pool_args &g, const k_tile &t,
                      const uint8_t *index, unsigned ask, float (&s)[2][N])
{
    const int64_t rows = (int64_t)g.n * g.p * g.q;
    for (int64_t r = t.row; r < rows; r += t.stride) {
        const int64_t at = (r * t.vecs + t.col) * N;
        const int q = (int)(r % g.q), p = (int)(r / g.q % g.p), n = (int)(r / g.q / g.p);
        const k_vec<uint8_t, N> k = *(const k_vec<uint8_t, N> *)(index + at);
        window_grads<T, N, TWO> w;
        w.load(a, at);
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((ask >> j & 1) && k.v[j] != NONE) {
                const int c = t.col * N + j, h = 2 * p + k.v[j] / 3 - 1, i = 2 * q + k.v[j] % 3 - 1;
                if ((unsigned)h >= (unsigned)g.h || (unsigned)i >= (unsigned)g.w)
                    continue;
                const T *x = (const T *)a.x + offset(n, h, i, g.h, g.w) * g.c + c;
                float dz[2];
                w.sums(j & ~1, dz);
                s[1][j] += dz[j & 1] * (k_type<T>::load(*x) - a.mean[c]);
            }
    }
}

/* part ← [block][Σ dz, Σ dz · (x − mean)][c], where dz of a window is dy + dy2, or 0 where y is. */
template <class T, int N, bool TWO>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_pool_sums(k_norm_bwd_args a, k_pool_args g, int vecs, const uint8_t *__restrict__ index,
                     float *__restrict__ part)
{
    const k_tile t(vecs, SUM_THREADS);
    const T *y = (const T *)a.y;
    float s[2][N];
#pragma unroll
    for (int j = 0; j < N; j++)
        s[0][j] = s[1][j] = 0;
    if (!t.idle()) {
        float gamma[N], beta[N], invstd[N];
        k_get_floats(a.beta + t.col * N, beta);
        const int64_t rows = (int64_t)g.n * g.p * g.q, step = t.stride * vecs * N;
        int64_t at = (t.row * vecs + t.col) * N;
        for (int64_t r = t.row; r < rows; r += t.stride * UNROLL, at += step * UNROLL) {
            window_grads<T, N, TWO> w[UNROLL];
            k_vec<T, N> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows) {
                    w[u].load(a, at + u * step);
                    v[u] = k_load_last<T, N>(y + at + u * step);
                }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows) {
                    float f[N];
                    k_unpack(v[u], f);
#pragma unroll
                    for (int j = 0; j < N; j += 2) {
                        float dz[2];
                        w[u].sums(j, dz);
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            dz[i] = f[j + i] > 0 ? dz[i] : 0;
                            s[0][j + i] += dz[i];
                            s[1][j + i] += dz[i] * (f[j + i] - beta[j + i]);
                        }
                    }
                }
        }
        unsigned ask = 0;
        k_get_floats(a.gamma + t.col * N, gamma);
        k_get_floats(a.invstd + t.col * N, invstd);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const bool told = told_by_y(gamma[j], beta[j]);
            s[1][j] = told ? s[1][j] / (gamma[j] * invstd[j]) : 0;
            ask |= told ? 0 : 1u << j;
        }
        if (ask)
            ask_x<T, N, TWO>(a, g, t, index, ask, s);
    }
    put_sums<N>(t, s, part);
}

/* A thread has the pixels of columns 2q and 2q + 1. dz of a pixel is the sum of dy + dy2 over the windows whose index
 * names it: one or two of row p, and for an odd row of pixels one or two of row p + 1, whose part is kept from the step
 * before. dx = gamma · invstd · (dz − dbeta/M − (x − mean) · invstd · dgamma/M); dx may be x. */
template <class T, int N, bool TWO>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_norm_pool_dx(k_norm_bwd_args a, k_pool_args g, int vecs, strips s,
                   const uint8_t *__restrict__ index)
{
    extern __shared__ float of_channels[]; /* dx = scale · dz + slope · x + shift: these three */
    const k_tile t(vecs, THREADS);
    const column o(t, g, s);
    const float over_m = 1.0f / (float)a.rows;
    for (int i = (int)threadIdx.x; i < t.cols * N; i += THREADS) {
        const int c = (int)blockIdx.y * THREADS * N + i;
        const float scale = a.gamma[c] * a.invstd[c];
        const float slope = -scale * a.invstd[c] * a.dgamma[c] * over_m;
        float *to = of_channels + i / N * APART<N> + i % N;
        to[0] = scale;
        to[N] = slope;
        to[2 * N] = -scale * a.dbeta[c] * over_m - slope * a.mean[c];
    }
    __syncthreads();
    if (!o.any)
        return;
    const float *mine = of_channels + (t.col - (int)blockIdx.y * THREADS) * APART<N>;
    const int pixel = vecs * N, line = g.w * pixel, row = g.q * pixel;
    const bool right = o.q + 1 < g.q;
    const int next = right ? pixel : 0;
    int64_t at = offset(o.n, o.end, o.q, g.p, g.q) * pixel + t.col * N;
    int64_t to = offset(o.n, 2 * o.end, 2 * o.q, g.h, g.w) * pixel + t.col * N;
    window_grads<T, N, TWO> w[2]; /* (p, q) and (p, q + 1) */
    k_vec<uint8_t, N> k[2];
    float below[2][N]; /* what row p + 1 adds to pixels of row 2p + 1 */
    const auto load = [&] {
        w[0].load(a, at);
        w[1].load(a, at + next);
        k[0] = *(const k_vec<uint8_t, N> *)(index + at);
        k[1] = *(const k_vec<uint8_t, N> *)(index + at + next);
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            ((unsigned *)&k[1])[i] |= right ? 0 : ~0u; /* NONE */
    };
    const auto leave = [&](int j, float d0, float d1) {
        below[0][j] = k[0].v[j] == 1 ? d0 : 0;
        below[1][j] = (k[0].v[j] == 2 ? d0 : 0) + (k[1].v[j] == 0 ? d1 : 0);
    };
    if (o.end < g.p) {
        load();
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            float dz[2][2];
            w[0].sums(j, dz[0]);
            w[1].sums(j, dz[1]);
            leave(j, dz[0][0], dz[1][0]);
            leave(j + 1, dz[0][1], dz[1][1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            below[0][j] = below[1][j] = 0;
    }
    for (int p = o.end - 1; p >= o.top; p--) {
        k_vec<T, N> v[2][2];
        at -= row;
        to -= 2 * line;
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++)
                v[e][f] = k_load_last<T, N>((const T *)a.x + to + e * line + f * pixel);
        load();
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            float d[2][2][2], dz[2][2];
            w[0].sums(j, dz[0]);
            w[1].sums(j, dz[1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float g0 = dz[0][i], g1 = dz[1][i];
                const int k0 = k[0].v[j + i], k1 = k[1].v[j + i];
                d[0][0][i] = k0 == 4 ? g0 : 0;
                d[0][1][i] = (k0 == 5 ? g0 : 0) + (k1 == 3 ? g1 : 0);
                d[1][0][i] = below[0][j + i] + (k0 == 7 ? g0 : 0);
                d[1][1][i] = below[1][j + i] + (k0 == 8 ? g0 : 0) + (k1 == 6 ? g1 : 0);
                leave(j + i, g0, g1);
            }
            const float2 scale = *(const float2 *)(mine + j),
                         slope = *(const float2 *)(mine + N + j),
                         shift = *(const float2 *)(mine + 2 * N + j);
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int f = 0; f < 2; f++) {
                    k_vec<T, 2> &two = *(k_vec<T, 2> *)&v[e][f].v[j];
                    float xs[2];
                    k_unpack(two, xs);
                    d[e][f][0] = scale.x * d[e][f][0] + (slope.x * xs[0] + shift.x);
                    d[e][f][1] = scale.y * d[e][f][1] + (slope.y * xs[1] + shift.y);
                    k_pack(d[e][f], two);
                }
        }
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int f = 0; f < 2; f++)
                k_put((T *)a.dx + to + e * line + f * pixel, v[e][f]);
    }
}

/* ---------------------------------------------------------------- launches */

size_t k_norm_pool_bwd_workspace(const k_pool_args *g)
{
    return k_norm_workspace(g->type, g->sms, g->c);
}

template <class T, bool TWO>
static void launch_bwd(cudaStream_t s, const k_norm_bwd_args *a, const k_pool_args *g,
                       const uint8_t *index, float *part)
{
    constexpr int N = k_type<T>::wide;
    const int vecs = g->c / N;
    const dim3 grid = sum_grid<T, N>(g->sms, (int64_t)g->n * g->p * g->q, g->c);
    const strips strip = strips_of(g, vecs, PER_SM);
    k_norm_pool_sums<T, N, TWO><<<grid, SUM_THREADS, 0, s>>>(*a, *g, vecs, index, part);
    k_norm_bwd_merge(s, part, (int)grid.x, g->c, a->invstd, a->dgamma, a->dbeta);
    k_norm_pool_dx<T, N, TWO><<<strips_grid(g, vecs, strip), THREADS, channels_bytes<N>(vecs), s>>>(
        *a, *g, vecs, strip, index);
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
