/* norm_bwd.cu: batch norm backwards: sums over pixels, then dx. */
#include "norm.cuh"

/* Where y > 0 is read: nowhere, recomputed from x, from y, from its mask. */
enum mask { MASK_NONE, MASK_X, MASK_Y, MASK_BITS };

template <class T, int N> struct bwd_in { /* one access of all inputs */
    k_vec<T, N> x, dy, dy2, y;
    unsigned bits;
};

/* Per-channel values of a thread, and dz = (dy + dy2) · [y > 0]. */
template <class T, int N, int MASK, bool TWO> struct bwd_channels {
    float mean[N], scale[N], beta[N];

    __device__ void read(const k_norm_bwd_args &a, int col)
    {
        float invstd[N];
        k_get_floats(a.mean + col * N, mean);
        k_get_floats(a.gamma + col * N, scale);
        k_get_floats(a.invstd + col * N, invstd);
        if (MASK == MASK_X)
            k_get_floats(a.beta + col * N, beta);
#pragma unroll
        for (int j = 0; j < N; j++)
            scale[j] *= invstd[j];
    }
    /* LAST: nobody reads these again. Where dz is written, only x is. */
    template <bool LAST>
    __device__ void load(const k_norm_bwd_args &a, int64_t at, bwd_in<T, N> &in) const
    {
        constexpr bool once = LAST || MASK >= MASK_Y;
        in.x = get<LAST>(a.x, at);
        in.dy = get<once>(a.dy, at);
        if (TWO)
            in.dy2 = get<once>(a.dy2, at);
        if (MASK == MASK_Y)
            in.y = get<once>(a.y, at);
        if (MASK == MASK_BITS)
            in.bits = __ldg(a.mask + at / 8);
    }
    template <bool ONCE> static __device__ k_vec<T, N> get(const void *p, int64_t i)
    {
        return ONCE ? k_load_last<T, N>((const T *)p + i) : k_load<T, N>((const T *)p + i);
    }
    /* dz, and x less its mean. The forward pass is repeated operation by operation, so that the mask is that
     * of y as it was rounded. */
    __device__ void compute(const bwd_in<T, N> &in, float (&dz)[N], float (&xc)[N]) const
    {
        float g[N];
        k_unpack(in.x, xc);
        k_unpack(in.dy, dz);
        if (TWO)
            k_unpack(in.dy2, g);
#pragma unroll
        for (int j = 0; j < N; j++) {
            xc[j] -= mean[j];
            if (TWO)
                dz[j] += g[j];
        }
        if (MASK == MASK_Y)
            k_unpack(in.y, g);
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((MASK == MASK_X && !(__fmaf_rn(xc[j], scale[j], beta[j]) > k_type<T>::vanish)) ||
                (MASK == MASK_Y && !(g[j] > 0)) || (MASK == MASK_BITS && !(in.bits >> j & 1)))
                dz[j] = 0;
    }
};

/* part: [block][Σ dz, Σ dz·(x − mean)][c]; dz is written where it is wanted. */
template <class T, int N, int MASK, bool TWO>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_bwd_sums(k_norm_bwd_args a, int vecs, float *__restrict__ part)
{
    constexpr int U = TWO || MASK == MASK_Y ? 2 : UNROLL;
    __shared__ float sm[2][N][SUM_THREADS];
    const k_tile t(vecs, SUM_THREADS);
    bwd_channels<T, N, MASK, TWO> ch;
    float s1[N], s2[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        s1[j] = s2[j] = 0;
    if (!t.idle()) {
        ch.read(a, t.col);
        int64_t step = t.stride * vecs * N, at = (t.row * vecs + t.col) * N;
        for (int64_t r = t.row; r < a.rows; r += t.stride * U, at += step * U) {
            bwd_in<T, N> in[U];
#pragma unroll
            for (int u = 0; u < U; u++)
                if (r + u * t.stride < a.rows)
                    ch.template load<false>(a, at + u * step, in[u]);
#pragma unroll
            for (int u = 0; u < U; u++)
                if (r + u * t.stride < a.rows) {
                    float dz[N], xc[N];
                    ch.compute(in[u], dz, xc);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        s1[j] += dz[j];
                        s2[j] += dz[j] * xc[j];
                    }
                    if (MASK >= MASK_Y && a.dz) { /* without a residual nobody wants it */
                        k_vec<T, N> o;
                        k_pack(dz, o);
                        k_put((T *)a.dz + at + u * step, o);
                    }
                }
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        sm[0][j][threadIdx.x] = s1[j];
        sm[1][j][threadIdx.x] = s2[j];
    }
    __syncthreads();
    for (int left = t.groups; left > 1;) {
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
        int64_t c = (int64_t)vecs * N;
        float *o = part + (int64_t)blockIdx.x * 2 * c + (int64_t)t.col * N;
#pragma unroll
        for (int j = 0; j < N; j++) {
            s1[j] = sm[0][j][threadIdx.x];
            s2[j] = sm[1][j][threadIdx.x];
        }
        k_put_floats(o, s1);
        k_put_floats(o + c, s2);
    }
}

__global__ void __launch_bounds__(32 * FINISH)
    k_norm_bwd_finish(const float *part, int blocks, int64_t channels, const float *invstd,
                      float *dgamma, float *dbeta)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double s1 = 0, s2 = 0;
    if (c < channels)
        for (int b = threadIdx.y; b < blocks; b += FINISH) {
            const float *p = part + (int64_t)b * 2 * channels + c;
            s1 += p[0];
            s2 += p[channels];
        }
    s1 = finish_sum(s1);
    s2 = finish_sum(s2);
    if (c < channels && threadIdx.y == 0) {
        dbeta[c] = (float)s1;
        dgamma[c] = (float)(s2 * invstd[c]);
    }
}

/* dx = gamma · invstd · (dz − dbeta/M − (x − mean) · invstd · dgamma/M) */
template <class T, int N, int MASK, bool TWO>
__global__ void __launch_bounds__(APPLY_THREADS) k_norm_bwd_apply(k_norm_bwd_args a, int vecs)
{
    constexpr int U = TWO || MASK == MASK_Y ? 2 : UNROLL;
    const k_tile t(vecs, APPLY_THREADS);
    if (t.idle())
        return;
    bwd_channels<T, N, MASK, TWO> ch;
    float k1[N], k2[N], invstd[N], over_m = 1.0f / (float)a.rows;
    ch.read(a, t.col);
    k_get_floats(a.dbeta + t.col * N, k1);
    k_get_floats(a.dgamma + t.col * N, k2);
    k_get_floats(a.invstd + t.col * N, invstd);
#pragma unroll
    for (int j = 0; j < N; j++) {
        k1[j] *= over_m;
        k2[j] *= invstd[j] * over_m;
    }
    int64_t step = -t.stride * vecs * N, at = ((a.rows - 1 - t.row) * vecs + t.col) * N;
    for (int64_t r = t.row; r < a.rows; r += t.stride * U, at += step * U) {
        bwd_in<T, N> in[U];
#pragma unroll
        for (int u = 0; u < U; u++)
            if (r + u * t.stride < a.rows)
                ch.template load<true>(a, at + u * step, in[u]);
#pragma unroll
        for (int u = 0; u < U; u++)
            if (r + u * t.stride < a.rows) {
                float dz[N], xc[N];
                ch.compute(in[u], dz, xc);
#pragma unroll
                for (int j = 0; j < N; j++)
                    dz[j] = ch.scale[j] * (dz[j] - k1[j] - xc[j] * k2[j]);
                k_vec<T, N> o;
                k_pack(dz, o);
                k_put((T *)a.dx + at + u * step, o);
            }
    }
}

void k_norm_bwd_merge(cudaStream_t s, const float *part, int blocks, int64_t c, const float *invstd,
                      float *dgamma, float *dbeta)
{
    k_norm_bwd_finish<<<(unsigned)((c + 31) / 32), dim3(32, FINISH), 0, s>>>(part, blocks, c,
                                                                             invstd, dgamma, dbeta);
}

template <class T, int N, int MASK, bool TWO>
static void launch_sums(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
    k_norm_bwd_sums<T, N, MASK, TWO><<<grid, SUM_THREADS, 0, s>>>(*a, (int)(a->c / N), part);
    k_norm_bwd_merge(s, part, (int)grid.x, a->c, a->invstd, a->dgamma, a->dbeta);
}
template <class T, int N, int MASK, bool TWO>
static void launch_bwd_apply(cudaStream_t s, const k_norm_bwd_args *a)
{
    k_norm_bwd_apply<T, N, MASK, TWO>
        <<<apply_grid<T, N>(a->sms, a->rows, a->c), APPLY_THREADS, 0, s>>>(*a, (int)(a->c / N));
}

template <class T, int N, int MASK>
static void launch_bwd(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    if (a->dy2)
        launch_sums<T, N, MASK, true>(s, a, part);
    else
        launch_sums<T, N, MASK, false>(s, a, part);
    if (a->dz) { /* added and masked already */
        k_norm_bwd_args b = *a;
        b.dy = a->dz;
        launch_bwd_apply<T, N, MASK_NONE, false>(s, &b);
    } else if (a->dy2) {
        launch_bwd_apply<T, N, MASK, true>(s, a);
    } else {
        launch_bwd_apply<T, N, MASK, false>(s, a);
    }
}

void k_norm_bwd(cudaStream_t s, const k_norm_bwd_args *a, void *workspace)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (!a->relu)
            launch_bwd<T, N, MASK_NONE>(s, a, (float *)workspace);
        else if (a->y)
            launch_bwd<T, N, MASK_Y>(s, a, (float *)workspace);
        else if (!a->mask)
            launch_bwd<T, N, MASK_X>(s, a, (float *)workspace);
        else if constexpr (N == 8)
            launch_bwd<T, N, MASK_BITS>(s, a, (float *)workspace);
    });
}
