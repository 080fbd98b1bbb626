/* norm_pool.cu: batch norm, ReLU and max pool in one pass: the stem's. What lies between norm and pool exists in
 * registers only. */
#include "norm_pool.cuh"

/* Blocks of a multiprocessor: a thread has six loads in flight. */
#define PER_SM 8

/* 16 bytes of a tensor as they lie in registers: words of two values of 16 bits, or of one float, that are multiplied
 * and compared together. What counts them has lanes of as many bits. */
#define WORDS 4
template <class T> struct word;
template <> struct word<float> {
    static constexpr unsigned lowest = 0xff800000u, ones = 1;
    static __device__ unsigned times(unsigned a, unsigned b)
    {
        return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
    }
    static __device__ unsigned larger(unsigned a, unsigned b) /* NaN where one is */
    {
        unsigned r;
        asm("max.NaN.f32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ unsigned is_larger(unsigned a, unsigned b) /* all bits of a lane, or none */
    {
        return __uint_as_float(a) > __uint_as_float(b) ? ~0u : 0u;
    }
};
template <class T, class PAIR> struct word_of_pairs {
    static constexpr unsigned ones = 0x10001u;
    static __device__ PAIR pair(unsigned a)
    {
        return *(PAIR *)&a;
    }
    static __device__ unsigned bits(PAIR a)
    {
        return *(unsigned *)&a;
    }
    static __device__ unsigned times(unsigned a, unsigned b)
    {
        return bits(__hmul2(pair(a), pair(b)));
    }
    static __device__ unsigned larger(unsigned a, unsigned b)
    {
        return bits(__hmax2_nan(pair(a), pair(b)));
    }
    static __device__ unsigned is_larger(unsigned a, unsigned b)
    {
        return __hgt2_mask(pair(a), pair(b));
    }
};
template <> struct word<__half> : word_of_pairs<__half, __half2> {
    static constexpr unsigned lowest = 0xfc00fc00u;
};
template <> struct word<__nv_bfloat16> : word_of_pairs<__nv_bfloat16, __nv_bfloat162> {
    static constexpr unsigned lowest = 0xff80ff80u;
};

/* The lanes of four words as bytes */
__device__ __forceinline__ void put_bytes(uint8_t *p, const unsigned (&at)[WORDS], k_width<8>)
{
    *(uint2 *)p = make_uint2(__byte_perm(at[0], at[1], 0x6420), __byte_perm(at[2], at[3], 0x6420));
}
__device__ __forceinline__ void put_bytes(uint8_t *p, const unsigned (&at)[WORDS], k_width<4>)
{
    *(unsigned *)p =
        __byte_perm(__byte_perm(at[0], at[1], 0x0040), __byte_perm(at[2], at[3], 0x0040), 0x5410);
}

/* The largest value so far, and the pixel that has it: the first of equal ones. */
template <class T> struct best {
    unsigned v[WORDS], at[WORDS];
    __device__ void none()
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            v[i] = word<T>::lowest;
            at[i] = 0;
        }
    }
    /* Pixels of the window's row e; `left`: it has a first column, else the second stands there too. */
    template <int N>
    __device__ void row(int e, const k_vec<T, N> (&x)[3], const unsigned (&sign)[WORDS], bool left)
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            v[i] = word<T>::times(((const unsigned *)&x[0])[i], sign[i]);
            at[i] = (unsigned)(left ? e * 3 : e * 3 + 1) * word<T>::ones;
#pragma unroll
            for (int f = 1; f < 3; f++)
                take(i, word<T>::times(((const unsigned *)&x[f])[i], sign[i]),
                     (unsigned)(e * 3 + f) * word<T>::ones);
        }
    }
    __device__ void take(int i, unsigned other, unsigned other_at)
    {
        const unsigned mask = word<T>::is_larger(other, v[i]);
        at[i] = (other_at & mask) | (at[i] & ~mask);
        v[i] = word<T>::larger(v[i], other);
    }
};

template <class T, int N>
__device__ __forceinline__ void load_row(const T *x, int left, int right, k_vec<T, N> (&v)[3])
{
    v[0] = k_load<T, N>(x - left);
    v[1] = k_load<T, N>(x);
    v[2] = k_load<T, N>(x + right);
}

/* k_relu_value in one instruction */
__device__ __forceinline__ float relu_value(float v)
{
    return __uint_as_float(word<float>::larger(__float_as_uint(v), 0));
}

/* y is monotonic in x: rising or falling with the sign of gamma, constant where that is 0. So the maximum is taken
 * of sign · x, which is exact, and only the winner is normalised; equal x tie, as in exact arithmetic.
 *
 * Each row of pixels gives its maxima of three once, and a window is the maximum of three rows'. */
template <class T, int N>
__global__ void __launch_bounds__(THREADS, PER_SM)
    k_norm_pool_kernel(k_norm_args a, k_pool_args g, int vecs, strips s, const T *__restrict__ x,
                       T *__restrict__ y, uint8_t *__restrict__ index)
{
    extern __shared__ float of_channels[]; /* sign · mean, |scale|, beta, sign */
    const k_tile t(vecs, THREADS);
    const column o(t, g, s);
    const int pixel = vecs * N, line = g.w * pixel, windows = g.q * pixel;
    const int left = o.q > 0 ? pixel : 0;
    k_vec<T, N> v[2][3];
    /* pixel (2p + 1, 2q), and window (p, q), of the last p */
    x += offset(o.n, 2 * o.end - 1, 2 * o.q, g.h, g.w) * pixel + t.col * N;
    int64_t at = offset(o.n, o.end - 1, o.q, g.p, g.q) * pixel + t.col * N;
    if (o.any)
        load_row<T, N>(x, left, pixel, v[0]);
    const int first = (int)blockIdx.y * THREADS * N;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < t.cols * N; i += THREADS) {
        const int c = first + i;
        float mean[1], invstd[1];
        if (a.sum) {
            k_tile one = t;
            one.col = c;
            one.row = blockIdx.x;
            from_sums<1>(a, one, mean, invstd);
        } else {
            mean[0] = a.mean[c];
            invstd[0] = a.invstd[c];
        }
        const float scale = a.gamma[c] * invstd[0];
        const float sign = scale > 0 ? 1 : scale < 0 ? -1 : scale; /* 0 or NaN */
        float *to = of_channels + i / N * APART<N> + i % N;
        to[0] = sign * mean[0];
        to[N] = fabsf(scale);
        to[2 * N] = a.beta[c];
        to[3 * N] = sign;
    }
    __syncthreads();
    if (!o.any)
        return;
    const float *mine = of_channels + (t.col - (int)blockIdx.y * THREADS) * APART<N>;
    unsigned sign[WORDS];
    {
        float f[N];
        k_get_floats(mine + 3 * N, f);
        k_pack(f, *(k_vec<T, N> *)sign);
    }
    best<T> below;
    below.row(0, v[0], sign, left);
    for (int p = o.end - 1; p >= o.top; p--, x -= 2 * line, at -= windows) {
        load_row<T, N>(p > 0 ? x - 2 * line : x - line, left, pixel, v[0]);
        load_row<T, N>(x - line, left, pixel, v[1]);
        best<T> top, middle, window;
        top.row(0, v[0], sign, left);
        if (p == 0)
            top.none();
        middle.row(1, v[1], sign, left);
        window = top;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            window.take(i, middle.v[i], middle.at[i]);
            window.take(i, below.v[i], below.at[i] + 6 * word<T>::ones);
        }
        below = top;
        float f[N], m[N], scale[N], beta[N];
        k_vec<T, N> out;
        k_unpack(*(k_vec<T, N> *)window.v, f);
        k_get_floats(mine, m);
        k_get_floats(mine + N, scale);
        k_get_floats(mine + 2 * N, beta);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] = relu_value(__fmaf_rn(f[j] - m[j], scale[j], beta[j]));
        k_pack(f, out);
        k_put(y + at, out);
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            window.at[i] |= ~word<T>::is_larger(((const unsigned *)&out)[i], 0);
        put_bytes(index + at, window.at, k_width<N>());
    }
}

bool k_norm_pool_takes(const k_pool_args *g)
{
    int wide = g->type == DNR_F32 ? 4 : 8;
    return g->kernel == 3 && g->stride == 2 && g->pad == 1 && g->h == 2 * g->p &&
           g->w == 2 * g->q && g->c % wide == 0 && (int64_t)g->n * g->p * g->q < (1u << 31);
}

void k_norm_pool_apply(cudaStream_t s, const k_norm_args *a, const k_pool_args *g, uint8_t *index)
{
    k_by_type(g->type, [&](auto t) {
        using T = decltype(t);
        constexpr int N = k_type<T>::wide;
        const int vecs = g->c / N;
        const strips strip = strips_of(g, vecs, PER_SM);
        k_norm_pool_kernel<T, N>
            <<<strips_grid(g, vecs, strip), THREADS, channels_bytes<N>(vecs), s>>>(
                *a, *g, vecs, strip, (const T *)a->x, (T *)a->y, index);
    });
}
