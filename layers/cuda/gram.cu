/* gram.cu: aᵀ·a of a long matrix of 64, 128 or 256 columns, and its column sums, while it streams by once.
 *
 * A block has a range of rows, which come through a ring of stages. Of a stage a group of warps has 32 rows. What lies
 * in 16 of them and 16 columns is a factor on the left as it comes from shared memory, and its halves are factors on the
 * right; of the product, which is symmetric, only tiles on and below the diagonal are made: a warp has rows of tiles `high`
 * and `low`, which together are as many tiles for each. On sm_90 gram_hopper.cuh takes its place. */
#include "gram_hopper.cuh"

#define THREADS 256
#define STAGE   (16 << 10) /* bytes */
#define STAGES  5
/* Stages that a tensor core may add up, 32 rows each: algbn.coef in layers.h says why. */
#define RUN 49

template <class T, int C> struct square {
    static constexpr int TILES = C / 16, SHARES = TILES / 2, GROUPS = 8 / SHARES;
    static constexpr int ROWS = STAGE / (2 * C), PITCH = C + 4, N = 2 * TILES + 2;
    const int lane, low, high, group;
    const uint32_t at, flip; /* of this lane's row of a matrix, in a stage */
    float acc[N][4];         /* tiles of `high` from the start, of `low` from the end */
    float sum[4];            /* of columns lane/4 and lane/4 + 8 of `high`, of `low` */

    __device__ square()
        : lane((int)threadIdx.x % 32), low((int)threadIdx.x / 32 % SHARES), high(TILES - 1 - low),
          group((int)threadIdx.x / 32 / SHARES),
          at((uint32_t)(group * 32 + lane / 16 * 8 + lane % 8) * 2 * C),
          flip((uint32_t)(lane / 8 % 2 ^ lane % 8) * 16)
    {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int q = 0; q < 4; q++)
                acc[i][q] = sum[q] = 0;
    }

    /* The two columns of a tile that this lane has of 16 rows. */
    static __device__ void add(const uint32_t (&tile)[4], float &s, float &t)
    {
        float f[8];
        k_vec<T, 8> v;
        memcpy(&v, tile, sizeof v);
        k_unpack(v, f);
        s += f[0] + f[1] + (f[4] + f[5]);
        t += f[2] + f[3] + (f[6] + f[7]);
    }

    /* 16 rows, of which row 0 of group 0 lies at `rows`. */
    __device__ void multiply(uint32_t rows)
    {
        uint32_t h[4], l[4], next[4];
        rows += at;
        k_matrices<true>(h, rows + ((uint32_t)high * 32 ^ flip));
        k_matrices<true>(l, rows + ((uint32_t)low * 32 ^ flip));
        k_matrices<true>(next, rows + flip);
        add(h, sum[0], sum[1]);
        add(l, sum[2], sum[3]);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (i > high)
                continue;
            const uint32_t b[4] = {next[0], next[1], next[2], next[3]};
            if (i < high)
                k_matrices<true>(next, rows + ((uint32_t)(i + 1) * 32 ^ flip));
            k_mma(T(), acc[2 * i], h, b[0], b[2]);
            k_mma(T(), acc[2 * i + 1], h, b[1], b[3]);
            if (i < SHARES && i <= low) {
                k_mma(T(), acc[N - 1 - 2 * i], l, b[0], b[2]);
                k_mma(T(), acc[N - 2 - 2 * i], l, b[1], b[3]);
            }
        }
    }

    /* To a matrix of `pitch` floats a row. */
    __device__ void put(float *to, int pitch, bool more) const
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const bool of_high = i < 2 * high + 2;
            const int row = (of_high ? high : low) * 16 + lane / 4;
            const int col = (of_high ? i : N - 1 - i) * 8 + lane % 4 * 2;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 *p = (float2 *)(to + (row + half * 8) * pitch + col);
                float2 v = make_float2(acc[i][2 * half], acc[i][2 * half + 1]);
                if (more) {
                    v.x += p->x;
                    v.y += p->y;
                }
                *p = v;
            }
        }
    }

    /* Sums over the rows that a lane does not have. */
    __device__ void put_sums(float *to)
    {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            sum[q] += __shfl_xor_sync(0xffffffffu, sum[q], 1);
            sum[q] += __shfl_xor_sync(0xffffffffu, sum[q], 2);
            if (lane % 4 == 0)
                to[(q < 2 ? high : low) * 16 + q % 2 * 8 + lane / 4] = sum[q];
        }
    }
};

template <class T, int C>
__global__ void __launch_bounds__(THREADS, C < 256 ? 2 : 1) k_gram_kernel(k_gram_args a)
{
    using S = square<T, C>;
    constexpr int PER_ROW = C / 8, AT_ONCE = THREADS / PER_ROW; /* vectors; rows */
    extern __shared__ __align__(1024) unsigned char sm[];
    const int64_t stages = (a.rows + S::ROWS - 1) / S::ROWS;
    const int64_t first = stages * blockIdx.x / gridDim.x;
    const int64_t last = stages * (blockIdx.x + 1) / gridDim.x;
    const int row = (int)threadIdx.x / PER_ROW, vec = (int)threadIdx.x % PER_ROW;
    const uint32_t ring = k_shared(sm), to = ring + row * 2 * C + (vec ^ (row & 7)) * 16;
    const T *from = (const T *)a.a + vec * 8;
    int filled = 0, read = 0; /* places in the ring */
    const auto load = [&](int64_t stage) {
        if (stage < last)
#pragma unroll
            for (int i = 0; i < S::ROWS / AT_ONCE; i++) {
                const int64_t r = stage * S::ROWS + row + i * AT_ONCE;
                const bool there = r < a.rows;
                k_copy16(to + filled * STAGE + i * AT_ONCE * 2 * C, from + (there ? r : 0) * C,
                         there);
            }
        k_copies_end();
        filled = filled + 1 == STAGES ? 0 : filled + 1;
    };
    for (int i = 0; i < STAGES - 1; i++)
        load(first + i);
    S p;
    for (int64_t stage = first; stage < last; stage++) {
        k_copies_wait<STAGES - 2>();
        __syncthreads(); /* it is there for all, and all are done with the one before it */
        load(stage + STAGES - 1);
        p.multiply(ring + read * STAGE);
        p.multiply(ring + read * STAGE + 16 * 2 * C);
        read = read + 1 == STAGES ? 0 : read + 1;
    }
    k_copies_wait<0>();
    __syncthreads();
    float *part = a.part + (int64_t)blockIdx.x * C * C;
    float *all = (float *)sm, *sums = all + (S::GROUPS > 1 ? C * S::PITCH : 0);
    p.put_sums(sums + p.group * C);
    if (S::GROUPS == 1)
        p.put(part, C, false);
    else
        for (int g = 0; g < S::GROUPS; g++) {
            if (p.group == g)
                p.put(all, S::PITCH, g > 0);
            __syncthreads();
        }
    __syncthreads();
    for (int i = (int)threadIdx.x; S::GROUPS > 1 && i < C * C / 4; i += THREADS) {
        const int r = i / (C / 4), c = i % (C / 4) * 4;
        if (c / 16 <= r / 16)
            *(float4 *)(part + r * C + c) = *(const float4 *)(all + r * S::PITCH + c);
    }
    if ((int)threadIdx.x < C) {
        float s = 0;
        for (int g = 0; g < S::GROUPS; g++)
            s += sums[g * C + threadIdx.x];
        a.columns[blockIdx.x * C + threadIdx.x] = s;
    }
}

/* ---------------------------------------------------------------- launches */

bool k_gram_takes(const k_gram_args *a)
{
    return a->cc >= 80 && a->type != DNR_F32 && (a->c == 64 || a->c == 128 || a->c == 256);
}

int k_gram_parts(const k_gram_args *a)
{
    if (h_gram_takes(a))
        return h_gram_parts(a);
    const int64_t rows = STAGE / (2 * a->c), stages = (a->rows + rows - 1) / rows;
    const int64_t at_once = a->sms * (a->c < 256 ? 2 : 1),
                  waves = (stages + RUN * at_once - 1) / (RUN * at_once);
    return (int)(stages < at_once * waves ? stages : at_once * waves);
}

template <class T, int C> static void launch(cudaStream_t s, const k_gram_args *a)
{
    constexpr int bytes = STAGE * STAGES;
    if (h_gram_takes(a)) {
        h_launch<T, C>(s, a);
        return;
    }
    static_assert(C == 256 || (C * (C + 4) + square<T, C>::GROUPS * C) * 4 <= bytes,
                  "room to add up groups");
    (void)cudaFuncSetAttribute(k_gram_kernel<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes);
    k_gram_kernel<T, C><<<(unsigned)k_gram_parts(a), THREADS, bytes, s>>>(*a);
}

template <class T> static void launch_type(cudaStream_t s, const k_gram_args *a)
{
    if (a->c == 64)
        launch<T, 64>(s, a);
    else if (a->c == 128)
        launch<T, 128>(s, a);
    else
        launch<T, 256>(s, a);
}

void k_gram(cudaStream_t s, const k_gram_args *a)
{
    if (a->type == DNR_F16)
        launch_type<__half>(s, a);
    else
        launch_type<__nv_bfloat16>(s, a);
}
