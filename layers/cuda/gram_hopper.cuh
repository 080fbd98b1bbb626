/* gram_hopper.cuh: gram.cu's kernel by sm_90a's own instructions, which read both factors from shared memory, in either
 * order: rows of 64 columns there are slabs as they are (hopper.cuh), of which the sum runs down the rows.
 *
 * Of the product's 64 rows at a time, what is on and below the diagonal is made, in pieces of 64 x 128 and 64 x 64 that two
 * groups of four warps share: with 256 columns each has half of them, with fewer all of them of half of the rows. */
#ifndef DNR_GRAM_HOPPER_CUH
#define DNR_GRAM_HOPPER_CUH

#include "../../runtime/cuda/vec.cuh"
#include "hopper.cuh"
#include "kernels.h"
#include "mma.cuh"

#define H_THREADS 256
#define H_STAGE   (16 << 10) /* bytes */
#define H_STAGES  8

/* A piece of the product: 64 rows from 64·down on, 2·N columns from 64·right on. */
template <int N> struct h_piece {
    float d[N];

    template <class T>
    __device__ void multiply(uint32_t rows, int slab, int down, int right, bool add)
    {
        h_multiply_turned(T(), d, h_turned(rows + down * slab, slab),
                          h_turned(rows + right * slab, slab), add);
    }

    /* `more`: added to what is there. */
    __device__ void put(float *to, int pitch, int down, int right, bool more) const
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
        to += (down * 64 + warp * 16 + lane / 4) * pitch + right * 64 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            float2 *p = (float2 *)(to + i % 4 / 2 * 8 * pitch + i / 4 * 8);
            float2 v = make_float2(d[i], d[i + 1]);
            if (more) {
                v.x += p->x;
                v.y += p->y;
            }
            *p = v;
        }
    }

    __device__ void sums()
    {
        h_sums(d);
    }
    __device__ void clear()
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            d[i] = 0;
    }
    __device__ void add(const h_piece &other)
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            d[i] += other.d[i];
    }
};

/* What a group of warps has. With 256 columns the first has rows 192 to 255 and 0 to 63 of the product, the second 64 to 127
 * and 128 to 191; else both have all. */
template <int C> struct h_share {
    static constexpr bool HAS_X = C > 64, HAS_Y = C == 256;
    h_piece<64> x, y;
    h_piece<32> z;
    const int group;

    __device__ explicit h_share(int g) : group(g)
    {
    }
    __device__ int x_down() const
    {
        return C == 256 ? (group ? 1 : 3) : 1;
    }
    __device__ int y_down() const
    {
        return group ? 2 : 3;
    }
    __device__ int y_right() const
    {
        return group ? 0 : 2;
    }
    __device__ int z_at() const
    {
        return C == 256 && group ? 2 : 0;
    }

    template <class T> __device__ void multiply(uint32_t rows, int slab, bool add)
    {
        if constexpr (HAS_X)
            x.template multiply<T>(rows, slab, x_down(), 0, add);
        if constexpr (HAS_Y)
            y.template multiply<T>(rows, slab, y_down(), y_right(), add);
        z.template multiply<T>(rows, slab, z_at(), z_at(), add);
    }
    __device__ void put(float *to, int pitch, bool more) const
    {
        if constexpr (HAS_X)
            x.put(to, pitch, x_down(), 0, more);
        if constexpr (HAS_Y)
            y.put(to, pitch, y_down(), y_right(), more);
        z.put(to, pitch, z_at(), z_at(), more);
    }
    __device__ void sums()
    {
        if constexpr (HAS_X)
            x.sums();
        if constexpr (HAS_Y)
            y.sums();
        z.sums();
    }
    __device__ void clear()
    {
        x.clear();
        y.clear();
        z.clear();
    }
    __device__ void add(const h_share &other)
    {
        if constexpr (HAS_X)
            x.add(other.x);
        if constexpr (HAS_Y)
            y.add(other.y);
        z.add(other.z);
    }
};

template <int C> struct h_shape {
    static constexpr int ROWS = H_STAGE / (2 * C), SLAB = ROWS * 128;
    static constexpr int GROUPS = C == 256 ? 1 : 2;  /* which have rows of their own */
    static constexpr int STEPS = ROWS / 16 / GROUPS; /* of 16 rows */
    static constexpr int RUN = 1568 / (16 * STEPS);  /* stages that are summed by tensor cores */
    static constexpr int PITCH = C + 4;
};

template <class T, int C>
__global__ void __launch_bounds__(H_THREADS, 1) k_gram_hopper(k_gram_args a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using S = h_shape<C>;
    constexpr int VECS = C / 8, AT_ONCE = H_THREADS / VECS; /* of a row; rows */
    extern __shared__ __align__(1024) unsigned char sm[];
    const int64_t stages = (a.rows + S::ROWS - 1) / S::ROWS;
    const int64_t first = stages * blockIdx.x / gridDim.x;
    const int64_t last = stages * (blockIdx.x + 1) / gridDim.x;
    const int tid = (int)threadIdx.x, row = tid / VECS, vec = tid % VECS, group = tid / 128;
    /* where this thread's vector of a stage's row lies; its other rows are 8·n further */
    const int at = vec / 8 * S::SLAB + row * 128 + (vec % 8 ^ row % 8) * 16;
    const uint32_t ring = k_shared(sm);
    const T *from = (const T *)a.a + vec * 8;
    const auto load = [&](int64_t stage) {
        if (stage < last)
#pragma unroll
            for (int i = 0; i < S::ROWS / AT_ONCE; i++) {
                const int64_t r = stage * S::ROWS + row + i * AT_ONCE;
                const bool there = r < a.rows;
                k_copy16(ring + (uint32_t)((stage - first) % H_STAGES * H_STAGE + at) +
                             i * AT_ONCE * 128,
                         from + (there ? r : 0) * C, there);
            }
        k_copies_end();
    };
    for (int i = 0; i < H_STAGES - 2; i++)
        load(first + i);
    h_share<C> now(group), total(group);
    float sum[8] = {};
    int run = 0; /* stages that `now` has */
    if (C < 256)
        total.clear();
    for (int64_t stage = first; stage < last; stage++) {
        if (C < 256 && run == S::RUN) {
            h_finish<0>();
            now.sums();
            total.add(now);
            run = 0;
        }
        k_copies_wait<H_STAGES - 3>();
        h_publish();
        h_finish<1>();
        __syncthreads(); /* it is there for all, and all are done with the one before the last */
        load(stage + H_STAGES - 2);
        const int place = (int)((stage - first) % H_STAGES) * H_STAGE;
        const uint32_t rows =
            ring + (uint32_t)(place + (S::GROUPS > 1 ? group * (S::SLAB / 2) : 0));
        h_begin();
#pragma unroll
        for (int i = 0; i < S::STEPS; i++)
            now.template multiply<T>(rows + i * 2048, S::SLAB, run > 0 || i > 0);
        h_end();
        run++;
#pragma unroll
        for (int i = 0; i < S::ROWS / AT_ONCE; i++) {
            float f[8];
            k_unpack(*(const k_vec<T, 8> *)(sm + place + at + i * AT_ONCE * 128), f);
#pragma unroll
            for (int q = 0; q < 8; q++)
                sum[q] += f[q];
        }
    }
    h_finish<0>();
    now.sums();
    k_copies_wait<0>();
    __syncthreads();
    float *part = a.part + (int64_t)blockIdx.x * C * C;
    float *all = (float *)sm, *sums = all + (C < 256 ? C * S::PITCH : 0);
#pragma unroll
    for (int q = 0; q < 8; q++)
        sums[row * C + vec * 8 + q] = sum[q];
    if constexpr (C == 256) {
        now.put(part, C, false);
        __syncthreads();
    } else {
        total.add(now);
        if (group == 0)
            total.put(all, S::PITCH, false);
        __syncthreads();
        if (group == 1)
            total.put(all, S::PITCH, true);
        __syncthreads();
        for (int i = tid; i < C * C / 4; i += H_THREADS) {
            const int r = i / (C / 4), c = i % (C / 4) * 4;
            if (c / 16 <= r / 16)
                *(float4 *)(part + r * C + c) = *(const float4 *)(all + r * S::PITCH + c);
        }
    }
    if (tid < C) {
        float s = 0;
        for (int r = 0; r < AT_ONCE; r++)
            s += sums[r * C + tid];
        a.columns[blockIdx.x * C + tid] = s;
    }
#endif
}

static inline bool h_gram_takes(const k_gram_args *a)
{
#ifdef DNR_SM90A
    return a->cc == 90 && k_gram_takes(a);
#else
    return false;
#endif
}

/* A block on each multiprocessor, or more where it would sum more rows than it may. */
static inline int h_gram_parts(const k_gram_args *a)
{
    const int64_t rows = H_STAGE / (2 * a->c), stages = (a->rows + rows - 1) / rows;
    const int64_t run = a->c == 256 ? h_shape<256>::RUN : stages;
    const int64_t waves = (stages + run * a->sms - 1) / (run * a->sms);
    return (int)(stages < a->sms * waves ? stages : a->sms * waves);
}

template <class T, int C> static void h_launch(cudaStream_t s, const k_gram_args *a)
{
    constexpr int bytes = H_STAGE * H_STAGES;
    static_assert(C == 256 || (C * h_shape<C>::PITCH + H_THREADS * 8) * 4 <= bytes,
                  "room to add up groups");
    (void)cudaFuncSetAttribute(k_gram_hopper<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes);
    k_gram_hopper<T, C><<<(unsigned)h_gram_parts(a), H_THREADS, bytes, s>>>(*a);
}

#endif
