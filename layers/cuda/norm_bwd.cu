/* norm_bwd.cu: batch norm backwards: sums over pixels, then dx. */
#include "norm_bwd.cuh"

/* part: [block][Σ dz, Σ dz·(x − mean) where X][c]; dz is written where it is wanted. Without X this is the only pass,
 * and goes from memory's end, where the convolutions that made dy and dy2 stopped, to its start, where products begin. */
template <class T, int N, int MASK, int TWO, bool X>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_bwd_sums(k_norm_bwd_args a, int vecs, float *__restrict__ part)
{
    constexpr int U = X                  ? TWO || MASK == MASK_Y ? 2 : UNROLL
                      : TWO == OTHER_ALL ? UNROLL
                                         : 2 * UNROLL; /* as many bytes in flight with one input */
    constexpr int SUMS = X ? 2 : 1;
    const k_tile t(vecs, SUM_THREADS);
    bwd_channels<T, N, MASK, TWO, X> ch;
    float s[SUMS][N];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            s[i][j] = 0;
    if (!t.idle()) {
        ch.read(a, t.col);
        const int64_t way = X ? 1 : -1, step = way * t.stride * vecs * N;
        const int64_t begin = X ? 0 : a.rows - 1;
        int64_t at = ((begin + way * t.row) * vecs + t.col) * N;
        even_way even(TWO == OTHER_EVEN ? a.w : 1, TWO == OTHER_EVEN ? a.h : 1, begin - t.row,
                      t.stride);
        for (int64_t r = t.row; r < a.rows; r += t.stride * U, at += step * U) {
            bwd_in<T, N> in[U];
#pragma unroll
            for (int u = 0; u < U; u++) {
                int64_t half = 0;
                if (TWO == OTHER_EVEN) {
                    half = even.half();
                    half = half < 0 ? half : (half * vecs + t.col) * N;
                    even.back();
                }
                if (r + u * t.stride < a.rows)
                    ch.template load<false>(a, at + u * step, in[u], half);
            }
#pragma unroll
            for (int u = 0; u < U; u++)
                if (r + u * t.stride < a.rows) {
                    float dz[N], xc[N];
                    k_vec<T, N> o;
                    ch.compute(in[u], dz, xc);
                    k_pack(dz, o);
                    if (!X && TWO) /* of dz as it is rounded, for what else is made from that */
                        k_unpack(o, dz);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        s[0][j] += dz[j];
                        if (X)
                            s[SUMS - 1][j] += dz[j] * xc[j];
                    }
                    if ((MASK >= MASK_Y || !X) && a.dz) /* without a residual nobody wants it */
                        k_put((T *)a.dz + at + u * step, o);
                }
        }
    }
    put_sums<N>(t, s, part);
}

/* dgamma may be NULL: then part has Σ dz alone; sum and dot, too */
__global__ void __launch_bounds__(32 * FINISH)
    k_norm_bwd_finish(const float *part, int blocks, int64_t channels, const float *invstd,
                      float *dgamma, float *dbeta, float *sum, float *dot)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double s1 = 0, s2 = 0;
    if (c < channels)
        for (int b = threadIdx.y; b < blocks; b += FINISH) {
            const float *p = part + (int64_t)b * (dgamma ? 2 : 1) * channels + c;
            s1 += p[0];
            if (dgamma)
                s2 += p[channels];
        }
    s1 = finish_sum(s1);
    s2 = finish_sum(s2);
    if (c < channels && threadIdx.y == 0) {
        dbeta[c] = (float)s1;
        if (dgamma)
            dgamma[c] = (float)(invstd ? s2 * invstd[c] : s2);
        if (sum) {
            sum[c] = dbeta[c];
            dot[c] = dgamma[c];
        }
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
    float k1[N], k2[N], invstd[N];
    const float over_m = 1.0f / (float)(a.all_rows ? a.all_rows : a.rows);
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

static void finish(cudaStream_t s, const float *part, int blocks, const k_norm_bwd_args *a)
{
    k_norm_bwd_finish<<<(unsigned)((a->c + 31) / 32), dim3(32, FINISH), 0, s>>>(
        part, blocks, a->c, a->invstd, a->dgamma, a->dbeta, a->sum, a->dot);
}

void k_norm_bwd_merge(cudaStream_t s, const float *part, int blocks, int64_t c, const float *invstd,
                      float *dgamma, float *dbeta)
{
    k_norm_bwd_args a = {};
    a.c = c;
    a.invstd = invstd;
    a.dgamma = dgamma;
    a.dbeta = dbeta;
    finish(s, part, blocks, &a);
}

template <class T, int N, int MASK, bool TWO>
static void launch_sums(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
    k_norm_bwd_sums<T, N, MASK, TWO, true><<<grid, SUM_THREADS, 0, s>>>(*a, (int)(a->c / N), part);
    finish(s, part, (int)grid.x, a);
}
template <class T, int N, int MASK, bool TWO>
static void launch_bwd_apply(cudaStream_t s, const k_norm_bwd_args *a)
{
    k_norm_bwd_apply<T, N, MASK, TWO>
        <<<apply_grid<T, N>(a->sms, a->rows, a->c), APPLY_THREADS, 0, s>>>(*a, (int)(a->c / N));
}

enum { HALF_SUMS = 1, HALF_DX = 2 }; /* of the work */

template <class T, int N, int MASK>
static void launch_bwd(cudaStream_t s, const k_norm_bwd_args *a, float *part, int halves)
{
    if (halves & HALF_SUMS) {
        if (a->dy2)
            launch_sums<T, N, MASK, true>(s, a, part);
        else
            launch_sums<T, N, MASK, false>(s, a, part);
    }
    if (!(halves & HALF_DX))
        return;
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

static void by_mask(cudaStream_t s, const k_norm_bwd_args *a, float *part, int halves)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (!a->relu)
            launch_bwd<T, N, MASK_NONE>(s, a, part, halves);
        else if (a->y)
            launch_bwd<T, N, MASK_Y>(s, a, part, halves);
        else if (!a->mask)
            launch_bwd<T, N, MASK_X>(s, a, part, halves);
        else if constexpr (N == 8)
            launch_bwd<T, N, MASK_BITS>(s, a, part, halves);
    });
}

void k_norm_bwd(cudaStream_t s, const k_norm_bwd_args *a, void *workspace)
{
    by_mask(s, a, (float *)workspace, HALF_SUMS | HALF_DX);
}

void k_norm_sync_sums(cudaStream_t s, const k_norm_bwd_args *a, void *workspace)
{
    by_mask(s, a, (float *)workspace, HALF_SUMS);
}

void k_norm_sync_dx(cudaStream_t s, const k_norm_bwd_args *a)
{
    by_mask(s, a, NULL, HALF_DX);
}

/* ---------------------------------------------------------------- without x */

template <class T, int N, int MASK>
static int launch_dz(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
    const int vecs = (int)(a->c / N);
    if (a->dy2 && a->w)
        k_norm_bwd_sums<T, N, MASK, OTHER_EVEN, false><<<grid, SUM_THREADS, 0, s>>>(*a, vecs, part);
    else if (a->dy2)
        k_norm_bwd_sums<T, N, MASK, OTHER_ALL, false><<<grid, SUM_THREADS, 0, s>>>(*a, vecs, part);
    else
        k_norm_bwd_sums<T, N, MASK, OTHER_NONE, false><<<grid, SUM_THREADS, 0, s>>>(*a, vecs, part);
    return (int)grid.x;
}

static int dz_parts(cudaStream_t s, const k_norm_bwd_args *a, float *part)
{
    int blocks = 0;
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (a->y)
            blocks = launch_dz<T, N, MASK_Y>(s, a, part);
        else if (!a->mask)
            blocks = launch_dz<T, N, MASK_NONE>(s, a, part);
        else if constexpr (N == 8)
            blocks = launch_dz<T, N, MASK_BITS>(s, a, part);
    });
    return blocks;
}

void k_norm_dz(cudaStream_t s, const k_norm_bwd_args *a, void *workspace)
{
    const int blocks = dz_parts(s, a, (float *)workspace);
    k_norm_bwd_merge(s, (const float *)workspace, blocks, a->c, NULL, NULL, a->dbeta);
}

int k_column_parts(cudaStream_t s, int type, int sms, const void *x, int64_t rows, int64_t c,
                   float *part)
{
    k_norm_bwd_args a = {};
    a.type = type;
    a.sms = sms;
    a.rows = rows;
    a.c = c;
    a.dy = x;
    return dz_parts(s, &a, part);
}
