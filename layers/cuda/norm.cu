/* norm.cu: batch norm forwards: statistics, and y. */
#include "norm.cuh"

/* ---------------------------------------------------------------- statistics */

struct moments { /* of n values: mean, and the sum of squared distances from it */
    float n, mean, m2;
};
/* Chan, Golub & LeVeque 1979: no cancellation, however large the mean. */
__device__ __forceinline__ void merge(moments &a, const moments &b)
{
    float n = a.n + b.n;
    if (b.n == 0)
        return;
    float delta = b.mean - a.mean, part = b.n / n;
    a.mean += delta * part;
    a.m2 += b.m2 + delta * delta * a.n * part;
    a.n = n;
}

/* part: [block][mean, m2][c]. A thread sums distances from the first value it sees, which lies among the others. */
template <class T, int N>
__global__ void __launch_bounds__(SUM_THREADS)
    k_norm_stats_kernel(const T *__restrict__ x, int64_t rows, int vecs, float *__restrict__ part)
{
    __shared__ float sm_mean[N][SUM_THREADS], sm_m2[N][SUM_THREADS], sm_n[SUM_THREADS];
    const k_tile t(vecs, SUM_THREADS);
    float first[N], sum[N], sq[N];
    int64_t step = t.stride * vecs * N, count = 0;
    if (!t.idle() && t.row < rows) {
        const T *p = x + (t.row * vecs + t.col) * N;
        k_unpack(k_load<T, N>(p), first);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = sq[j] = 0;
        for (int64_t r = t.row; r < rows; r += t.stride * UNROLL, p += step * UNROLL) {
            k_vec<T, N> v[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows)
                    v[u] = k_load<T, N>(p + u * step);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (r + u * t.stride < rows) {
                    float f[N];
                    k_unpack(v[u], f);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        float d = f[j] - first[j];
                        sum[j] += d;
                        sq[j] += d * d;
                    }
                }
        }
        count = (rows - t.row + t.stride - 1) / t.stride;
    }
    sm_n[threadIdx.x] = (float)count;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float n = (float)count, m2 = count ? sq[j] - sum[j] * sum[j] / n : 0;
        sm_mean[j][threadIdx.x] = count ? first[j] + sum[j] / n : 0;
        sm_m2[j][threadIdx.x] = m2 > 0     ? m2
                                : m2 == m2 ? 0
                                           : m2; /* rounding apart it is no less; NaN stays */
    }
    __syncthreads();
    for (int left = t.groups; left > 1;) { /* groups t.group and t.group + half merge */
        int half = (left + 1) / 2;
        if (!t.idle() && t.group < left - half) {
            int me = threadIdx.x, other = me + half * t.cols;
            float n = sm_n[me];
#pragma unroll
            for (int j = 0; j < N; j++) {
                moments a = {n, sm_mean[j][me], sm_m2[j][me]};
                merge(a, {sm_n[other], sm_mean[j][other], sm_m2[j][other]});
                sm_mean[j][me] = a.mean;
                sm_m2[j][me] = a.m2;
            }
            /* sm_n is per thread, so nobody else reads what is written here before the barrier */
            sm_n[me] = n + sm_n[other];
        }
        left = half;
        __syncthreads();
    }
    if (!t.idle() && t.group == 0) {
        int64_t c = (int64_t)vecs * N;
        float *o = part + (int64_t)blockIdx.x * 2 * c + (int64_t)t.col * N;
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum[j] = sm_mean[j][threadIdx.x];
            sq[j] = sm_m2[j][threadIdx.x];
        }
        k_put_floats(o, sum);
        k_put_floats(o + c, sq);
    }
}

struct finish_args {
    const float *part;
    int blocks, vecs, width; /* of the grid that made the partials */
    int64_t rows, c;
    k_norm_args a;
};

__global__ void __launch_bounds__(32 * FINISH) k_norm_stats_finish(finish_args f)
{
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    double sum = 0, sq = 0;
    if (c < f.c) {
        int first = (int)(c / f.width) / SUM_THREADS * SUM_THREADS;
        int cols = f.vecs - first < SUM_THREADS ? f.vecs - first : SUM_THREADS;
        for (int b = threadIdx.y; b < f.blocks; b += FINISH) {
            const float *p = f.part + (int64_t)b * 2 * f.c + c;
            double n = (double)rows_of(f.rows, f.blocks, SUM_THREADS / cols, b), mean = p[0];
            sum += n * mean;
            sq += p[f.c] + n * mean * mean;
        }
    }
    sum = finish_sum(sum);
    sq = finish_sum(sq);
    if (c >= f.c || threadIdx.y > 0)
        return;
    if (f.a.sum) {
        f.a.sum[c] = (float)sum;
        f.a.sqsum[c] = (float)sq;
        return;
    }
    float mean, invstd;
    keep_statistics(f.a, c, sum, sq, mean, invstd, true);
}

/* ---------------------------------------------------------------- y */

enum source { /* what a channel is normalised by */
              FROM_SAVED,
              FROM_RUNNING, /* a.mean and a.invstd are running mean and variance */
              FROM_SUMS
};

/* y = act((x − mean) · gamma · invstd + beta + residual); y may be x or residual */
template <class T, int N, bool RELU, bool ADD>
__global__ void __launch_bounds__(APPLY_THREADS)
    k_norm_apply_kernel(k_norm_args a, int vecs, source from, const T *x, const T *residual, T *y)
{
    const k_tile t(vecs, APPLY_THREADS);
    if (t.idle())
        return;
    float mean[N], scale[N], beta[N], spread[N];
    if (from == FROM_SUMS) {
        from_sums(a, t, mean, spread);
    } else {
        k_get_floats(a.mean + t.col * N, mean);
        k_get_floats(a.invstd + t.col * N, spread);
    }
    k_get_floats(a.gamma + t.col * N, scale);
    k_get_floats(a.beta + t.col * N, beta);
#pragma unroll
    for (int j = 0; j < N; j++)
        scale[j] *= from == FROM_RUNNING ? 1 / sqrtf(spread[j] + (float)a.eps) : spread[j];
    int64_t step = -t.stride * vecs * N, at = ((a.rows - 1 - t.row) * vecs + t.col) * N;
    for (int64_t r = t.row; r < a.rows; r += t.stride * UNROLL, at += step * UNROLL) {
        k_vec<T, N> v[UNROLL], z[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows) {
                v[u] = k_load_last<T, N>(x + at + u * step);
                if (ADD)
                    z[u] = k_load_last<T, N>(residual + at + u * step);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (r + u * t.stride < a.rows)
                put_y<T, N, RELU, ADD>(a, y, at + u * step, v[u], z[u], mean, scale, beta);
    }
}

/* ---------------------------------------------------------------- launches */

/* For the most blocks that a grid can have. */
size_t k_norm_workspace(int type, int sms, int64_t c)
{
    return (size_t)sms * 2 * (size_t)c * sizeof(float);
}

void k_norm_stats(cudaStream_t s, const k_norm_args *a, void *workspace)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        dim3 grid = sum_grid<T, N>(a->sms, a->rows, a->c);
        finish_args f = {(float *)workspace, (int)grid.x, (int)(a->c / N), N, a->rows, a->c, *a};
        k_norm_stats_kernel<T, N>
            <<<grid, SUM_THREADS, 0, s>>>((const T *)a->x, a->rows, f.vecs, (float *)workspace);
        k_norm_stats_finish<<<(unsigned)((a->c + 31) / 32), dim3(32, FINISH), 0, s>>>(f);
    });
}

template <class T, int N, bool RELU, bool ADD>
static void launch_apply(cudaStream_t s, const k_norm_args *a, source from)
{
    k_norm_apply_kernel<T, N, RELU, ADD>
        <<<apply_grid<T, N>(a->sms, a->rows, a->c), APPLY_THREADS, 0, s>>>(
            *a, (int)(a->c / N), from, (const T *)a->x, (const T *)a->residual, (T *)a->y);
}

static void apply(cudaStream_t s, const k_norm_args *a, source from)
{
    k_by_width(a->type, a->c, [&](auto t, auto n) {
        using T = decltype(t);
        constexpr int N = decltype(n)::value;
        if (a->relu && a->residual)
            launch_apply<T, N, true, true>(s, a, from);
        else if (a->relu)
            launch_apply<T, N, true, false>(s, a, from);
        else if (a->residual)
            launch_apply<T, N, false, true>(s, a, from);
        else
            launch_apply<T, N, false, false>(s, a, from);
    });
}

void k_norm_apply(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_SAVED);
}

void k_norm_eval(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_RUNNING);
}

void k_norm_train(cudaStream_t s, const k_norm_args *a)
{
    apply(s, a, FROM_SUMS);
}
