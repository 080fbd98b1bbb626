/* norm_bwd.cuh: what a thread of batch norm's backward kernels reads of its channels, and dz from that. */
#ifndef DNR_NORM_BWD_CUH
#define DNR_NORM_BWD_CUH

#include "norm.cuh"

/* Where y > 0 is read: nowhere, recomputed from x, from y, from its mask. */
enum mask { MASK_NONE, MASK_X, MASK_Y, MASK_BITS };

/* dy2 is added nowhere, everywhere, or to pixels of even row and column, all that it has. */
enum other { OTHER_NONE, OTHER_ALL, OTHER_EVEN };

/* A thread's way back through pixels for OTHER_EVEN, `stride` at a time: their coordinates without a division each. */
struct even_way {
    const int w, h;
    int x, y, image;          /* of the pixel; */
    int step_x, step_y, step; /* of the stride */

    __device__ even_way(int width, int height, int64_t row, int64_t stride)
        : w(width), h(height), x((int)(row % w)), y((int)(row / w % h)), image((int)(row / w / h)),
          step_x((int)(stride % w)), step_y((int)(stride / w % h)), step((int)(stride / w / h))
    {
    }
    __device__ void back()
    {
        x -= step_x;
        y -= step_y;
        image -= step;
        if (x < 0) {
            x += w;
            y--;
        }
        if (y < 0) {
            y += h;
            image--;
        }
    }
    /* Its pixel of dy2, or −1. */
    __device__ int64_t half() const
    {
        return (x | y) & 1 ? -1 : ((int64_t)image * ((h + 1) / 2) + y / 2) * ((w + 1) / 2) + x / 2;
    }
};

template <class T, int N> struct bwd_in { /* one access of all inputs */
    k_vec<T, N> x, dy, dy2, y;
    unsigned bits;
};

/* Per-channel values of a thread, and dz = (dy + dy2) · [y > 0]. X: x is read as well. */
template <class T, int N, int MASK, int TWO, bool X = true> struct bwd_channels {
    float mean[N], scale[N], beta[N];

    __device__ void read(const k_norm_bwd_args &a, int col)
    {
        float invstd[N];
        if (!X)
            return;
        k_get_floats(a.mean + col * N, mean);
        k_get_floats(a.gamma + col * N, scale);
        k_get_floats(a.invstd + col * N, invstd);
        if (MASK == MASK_X)
            k_get_floats(a.beta + col * N, beta);
#pragma unroll
        for (int j = 0; j < N; j++)
            scale[j] *= invstd[j];
    }
    /* LAST: nobody reads these again. Where dz is written, only x is. `even`: where dy2 lies for OTHER_EVEN, < 0 for
     * nowhere. */
    template <bool LAST>
    __device__ void load(const k_norm_bwd_args &a, int64_t at, bwd_in<T, N> &in,
                         int64_t even = 0) const
    {
        constexpr bool once = LAST || MASK >= MASK_Y;
        if (X)
            in.x = get<LAST>(a.x, at);
        in.dy = get<once>(a.dy, at);
        if (TWO == OTHER_ALL)
            in.dy2 = get<once>(a.dy2, at);
        if (TWO == OTHER_EVEN)
            in.dy2 = get_even(a.dy2, even);
        if (MASK == MASK_Y)
            in.y = get<once>(a.y, at);
        if (MASK == MASK_BITS)
            in.bits = __ldg(a.mask + at / 8);
    }
    /* Zeros for i < 0. The compiler would branch, and wait for one load before it begins the next. */
    static __device__ k_vec<T, N> get_even(const void *p, int64_t i)
    {
        const T *at = (const T *)p + i;
        k_vec<T, N> v;
        if constexpr (sizeof v == 16) {
            int4 r;
            asm volatile("{\n.reg .pred p;\nsetp.ge.s64 p, %5, 0;\n"
                         "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                         "@p ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                         : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w)
                         : "l"(at), "l"(i));
            *(int4 *)&v = r;
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                v.v[j] = i < 0 ? k_type<T>::store(0) : at[j];
        }
        return v;
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
        if (X)
            k_unpack(in.x, xc);
        k_unpack(in.dy, dz);
        if (TWO)
            k_unpack(in.dy2, g);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (X)
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

#endif
