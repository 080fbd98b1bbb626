/* norm_pool.cuh: how the stem's kernels share out a tensor of windows of 3x3 at every second pixel, padded by 1, over
 * even sides. A thread has N channels of one column of windows, over some rows of them, and walks up: what a row of
 * windows shares with the next stays in its registers. Threads, too, go from memory's end to its start (norm.cuh). */
#ifndef DNR_NORM_POOL_CUH
#define DNR_NORM_POOL_CUH

#include "norm.cuh"

#define THREADS 128
#define NONE    255 /* an index that names no pixel */

/* Windows [n,p,q] as n pictures of `count` strips of `tall` rows, of which the last may be less tall. */
struct strips {
    int tall, count;
};

/* As tall as leaves every multiprocessor its blocks four times over; 4 rows at least. */
static inline strips strips_of(const k_pool_args *g, int vecs, int per_sm)
{
    const int64_t threads = (int64_t)g->n * g->q * vecs, most = (g->p + 3) / 4;
    int64_t count = (int64_t)4 * per_sm * g->sms * THREADS / threads;
    count = count < 1 ? 1 : count < most ? count : most;
    const int tall = (int)((g->p + count - 1) / count);
    return {tall, (g->p + tall - 1) / tall};
}

static inline dim3 strips_grid(const k_pool_args *g, int vecs, strips s)
{
    return k_tile_grid((int64_t)g->n * s.count * g->q, vecs, THREADS, 1, INT32_MAX);
}

/* A thread's windows: rows [top, end) of column q of picture n. */
struct column {
    bool any;
    int n, q, top, end;
    __device__ column(const k_tile &t, const k_pool_args &g, const strips &s)
    {
        const int64_t all = (int64_t)g.n * s.count * g.q;
        any = !t.idle() && t.row < all;
        const unsigned me = any ? (unsigned)(all - 1 - t.row) : 0;
        unsigned rest = me / (unsigned)g.q;
        q = (int)(me - rest * (unsigned)g.q);
        n = (int)(rest / (unsigned)s.count);
        top = (int)(rest - (unsigned)n * (unsigned)s.count) * s.tall;
        end = top + s.tall < g.p ? top + s.tall : g.p;
    }
};

/* Values of its channels that a block has in shared memory, [vector][which][N]: a vector's lie so many floats behind
 * its neighbour's, in other banks. */
template <int N> constexpr int APART = 4 * N + 4;
template <int N> static size_t channels_bytes(int vecs)
{
    return (size_t)(vecs < THREADS ? vecs : THREADS) * APART<N> * sizeof(float);
}

__device__ __forceinline__ int64_t offset(int n, int i, int j, int rows, int cols)
{
    return ((int64_t)n * rows + i) * cols + j;
}

#endif
