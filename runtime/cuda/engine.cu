/* engine.cu: ingest, sums, gradients between ranks, gradient statistics, the optimizer and the loss scaler. */
#include "kernels.h"
#include "vec.cuh"

#define THREADS 256

__device__ __forceinline__ int64_t first_item()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t item_stride()
{
    return (int64_t)gridDim.x * blockDim.x;
}

/* ---------------------------------------------------------------- ingest */

struct ingest_args {
    const uint8_t *const *cell;
    int64_t batch, pixels, pixels_at;
    float scale[3], shift[3];
    int32_t *labels;
    dnri_header *header;
};

/* Labels and header. */
__device__ __forceinline__ void ingest_rest(const ingest_args &a, const uint8_t *slot)
{
    if (blockIdx.x > 0 || !a.labels) /* a clone has none */
        return;
    const int32_t *labels = (const int32_t *)(slot + sizeof(dnri_header));
    for (int64_t i = threadIdx.x; i < a.batch; i += blockDim.x)
        a.labels[i] = labels[i];
    if (threadIdx.x < sizeof(dnri_header) / 4)
        ((int32_t *)a.header)[threadIdx.x] = ((const int32_t *)slot)[threadIdx.x];
}

/* A thread turns 16 bytes into 16 values; 16 mod 3 = 1, so its first channel is its index mod 3. */
template <class T> __global__ void __launch_bounds__(THREADS) k_ingest_kernel(ingest_args a, T *x)
{
    const uint8_t *slot = *a.cell;
    if (!slot)
        return;
    ingest_rest(a, slot);
    const uint8_t *px = slot + a.pixels_at;
    for (int64_t i = first_item(); i * 16 < a.pixels; i += item_stride()) {
        int c = (int)(i % 3);
        /* scale and shift from channel c on; constant indices keep them in registers */
        float sc[3], sh[3];
#pragma unroll
        for (int k = 0; k < 3; k++) {
            int at = c + k >= 3 ? c + k - 3 : c + k;
            sc[k] = at == 0 ? a.scale[0] : at == 1 ? a.scale[1] : a.scale[2];
            sh[k] = at == 0 ? a.shift[0] : at == 1 ? a.shift[1] : a.shift[2];
        }
        if (i * 16 + 16 <= a.pixels) {
            uint4 raw = __ldcs((const uint4 *)(px + i * 16));
            const uint8_t *b = (const uint8_t *)&raw;
            constexpr int W = k_type<T>::wide;
#pragma unroll
            for (int part = 0; part < 16; part += W) {
                float f[W];
                k_vec<T, W> v;
#pragma unroll
                for (int j = 0; j < W; j++)
                    f[j] = (float)b[part + j] * sc[(part + j) % 3] + sh[(part + j) % 3];
                k_pack(f, v);
                k_put(x + i * 16 + part, v);
            }
        } else {
            for (int64_t e = i * 16, k = 0; e < a.pixels; e++, k++)
                x[e] = k_type<T>::store((float)px[e] * (k % 3 == 0   ? sc[0]
                                                        : k % 3 == 1 ? sc[1]
                                                                     : sc[2]) +
                                        (k % 3 == 0   ? sh[0]
                                         : k % 3 == 1 ? sh[1]
                                                      : sh[2]));
        }
    }
}

/* A thread has a block of 2 x 2 pixels: two pairs, each 6 bytes in and 8 values out. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_packed_ingest_kernel(ingest_args a, int64_t rows, int w, T *quads, T *blocks)
{
    const uint8_t *slot = *a.cell;
    if (!slot)
        return;
    ingest_rest(a, slot);
    const int half = w / 2;
    for (int64_t i = first_item(); i < rows / 2 * half; i += item_stride()) {
        int64_t row = i / half * 2, col = i % half * 2;
        uint16_t raw[2][3]; /* rows begin at even addresses */
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int k = 0; k < 3; k++)
                raw[u][k] =
                    __ldcs((const uint16_t *)(slot + a.pixels_at + ((row + u) * w + col) * 3) + k);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint8_t *b = (const uint8_t *)raw[u];
            float f[8];
            k_vec<T, 8> v;
#pragma unroll
            for (int j = 0; j < 8; j++)
                f[j] =
                    j % 4 == 3 ? 0 : (float)b[j / 4 * 3 + j % 4] * a.scale[j % 4] + a.shift[j % 4];
            k_pack(f, v);
            if (quads)
                k_put(quads + ((row + u) * w + col) * 4, v);
            if (blocks)
                k_put(blocks + i * 16 + u * 8, v);
        }
    }
}

void k_packed_ingest(cudaStream_t s, int type, int sms, const void *cell, int64_t batch, int64_t h,
                     int64_t w, int64_t pixels_at, const float scale[3], const float shift[3],
                     void *quads, void *blocks, int32_t *labels, dnri_header *header)
{
    ingest_args a = {(const uint8_t *const *)cell, batch, 0, pixels_at, {}, {}, labels, header};
    for (int c = 0; c < 3; c++) {
        a.scale[c] = scale[c];
        a.shift[c] = shift[c];
    }
    unsigned grid = k_blocks(batch * h * w / 4, THREADS, 16 * sms);
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_packed_ingest_kernel<T>
            <<<grid, THREADS, 0, s>>>(a, batch * h, (int)w, (T *)quads, (T *)blocks);
    });
}

void k_ingest(cudaStream_t s, int type, int sms, const void *cell, int64_t batch, int64_t pixels,
              int64_t pixels_at, const float scale[3], const float shift[3], void *x,
              int32_t *labels, dnri_header *header)
{
    ingest_args a = {
        (const uint8_t *const *)cell, batch, pixels, pixels_at, {}, {}, labels, header};
    for (int c = 0; c < 3; c++) {
        a.scale[c] = scale[c];
        a.shift[c] = shift[c];
    }
    unsigned grid = k_blocks((pixels + 15) / 16, THREADS, 16 * sms);
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_ingest_kernel<T><<<grid, THREADS, 0, s>>>(a, (T *)x);
    });
}

/* ---------------------------------------------------------------- sums */

/* n / N whole accesses, then the rest one by one. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    k_add_kernel(const T *a, const T *b, T *y, int64_t n) /* y may be a or b */
{
    constexpr int N = k_type<T>::wide;
    int64_t whole = n / N;
    for (int64_t i = first_item(); i < whole; i += item_stride()) {
        float f[N], g[N];
        k_vec<T, N> v = k_load_last<T, N>(a + i * N), w = k_load_last<T, N>(b + i * N);
        k_unpack(v, f);
        k_unpack(w, g);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] += g[j];
        k_pack(f, v);
        k_put(y + i * N, v);
    }
    for (int64_t i = whole * N + first_item(); i < n; i += item_stride())
        y[i] = k_type<T>::store(k_type<T>::load(a[i]) + k_type<T>::load(b[i]));
}

void k_add(cudaStream_t s, int type, int sms, const void *a, const void *b, void *y, int64_t n)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        unsigned grid = k_blocks(n, THREADS * k_type<T>::wide, 16 * sms);
        k_add_kernel<T><<<grid, THREADS, 0, s>>>((const T *)a, (const T *)b, (T *)y, n);
    });
}

__global__ void __launch_bounds__(THREADS)
    k_fold_kernel(const float4 *__restrict__ grad, const dnri_header *h, float4 *gsum, int64_t n)
{
    bool first = h->first != 0;
    for (int64_t i = first_item(); i < n; i += item_stride()) {
        float4 g = __ldcs(grad + i);
        if (!first) {
            float4 s = gsum[i];
            g = make_float4(s.x + g.x, s.y + g.y, s.z + g.z, s.w + g.w);
        }
        gsum[i] = g;
    }
}

void k_fold(cudaStream_t s, int sms, const float *grad, const dnri_header *h, float *gsum,
            int64_t n)
{
    k_fold_kernel<<<k_blocks(n / 4, THREADS, 16 * sms), THREADS, 0, s>>>((const float4 *)grad, h,
                                                                         (float4 *)gsum, n / 4);
}

/* ---------------------------------------------------------------- gradients between ranks */

enum { WIRE = 8 }; /* elements of a thread: 16 bytes of the wire */

template <class T>
__global__ void __launch_bounds__(THREADS) k_wire_pack_kernel(const float *grad, T *wire, int64_t n)
{
    for (int64_t i = first_item(); i * WIRE < n; i += item_stride()) {
        float f[WIRE];
        k_vec<T, WIRE> v;
        k_get_floats(grad + i * WIRE, f);
        k_pack(f, v);
        k_put(wire + i * WIRE, v);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_wire_unpack_kernel(const T *wire, float *grad, int64_t n)
{
    for (int64_t i = first_item(); i * WIRE < n; i += item_stride()) {
        float f[WIRE];
        k_unpack(k_load_last<T, WIRE>(wire + i * WIRE), f);
        k_put_floats(grad + i * WIRE, f);
    }
}

void k_wire_pack(cudaStream_t s, int type, int sms, const float *grad, void *wire, int64_t n)
{
    unsigned grid = k_blocks(n, THREADS * WIRE, 16 * sms);
    if (type == DNR_F16)
        k_wire_pack_kernel<<<grid, THREADS, 0, s>>>(grad, (__half *)wire, n);
    else
        k_wire_pack_kernel<<<grid, THREADS, 0, s>>>(grad, (__nv_bfloat16 *)wire, n);
}

void k_wire_unpack(cudaStream_t s, int type, int sms, const void *wire, float *grad, int64_t n)
{
    unsigned grid = k_blocks(n, THREADS * WIRE, 16 * sms);
    if (type == DNR_F16)
        k_wire_unpack_kernel<<<grid, THREADS, 0, s>>>((const __half *)wire, grad, n);
    else
        k_wire_unpack_kernel<<<grid, THREADS, 0, s>>>((const __nv_bfloat16 *)wire, grad, n);
}

/* ---------------------------------------------------------------- gradient statistics */

/* Sum over the block in a fixed order; thread 0 gets it. */
static __device__ k_stat_part block_sum(k_stat_part p)
{
    __shared__ k_stat_part sm[THREADS];
    sm[threadIdx.x] = p;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sm[threadIdx.x].sqsum += sm[threadIdx.x + half].sqsum;
            sm[threadIdx.x].bad += sm[threadIdx.x + half].bad;
        }
        __syncthreads();
    }
    return sm[0];
}

__global__ void __launch_bounds__(THREADS) k_stat_kernel(const float4 *__restrict__ grad, int64_t n,
                                                         k_stat_part *part, const dnri_state *state)
{
    float inv = 1.0f / state->loss_scale;
    k_stat_part p = {0, 0};
    for (int64_t i = first_item(); i < n; i += item_stride()) {
        float4 g = grad[i];
        p.bad |= !(isfinite(g.x) && isfinite(g.y) && isfinite(g.z) && isfinite(g.w));
        g = make_float4(g.x * inv, g.y * inv, g.z * inv, g.w * inv);
        p.sqsum += g.x * g.x + g.y * g.y + (g.z * g.z + g.w * g.w);
    }
    p = block_sum(p);
    if (threadIdx.x == 0)
        part[blockIdx.x] = p;
}

__global__ void __launch_bounds__(THREADS)
    k_stat_final_kernel(const k_stat_part *part, int n, dnri_state *state)
{
    k_stat_part p = {0, 0};
    for (int i = threadIdx.x; i < n; i += THREADS) {
        p.sqsum += part[i].sqsum;
        p.bad += part[i].bad;
    }
    p = block_sum(p);
    if (threadIdx.x == 0) {
        state->grad_sqsum = p.sqsum;
        state->found_inf = p.bad != 0 || (state->found_inf && state->loss_scale <= 1);
    }
}

void k_stat(cudaStream_t s, int sms, const float *grad, int64_t n, k_stat_part *part,
            dnri_state *state)
{
    unsigned grid = k_blocks(n / 4, THREADS * 4, K_STAT_BLOCKS);
    k_stat_kernel<<<grid, THREADS, 0, s>>>((const float4 *)grad, n / 4, part, state);
    k_stat_final_kernel<<<1, THREADS, 0, s>>>(part, (int)grid, state);
}

/* ---------------------------------------------------------------- optimizer */

template <class T, bool WEIGHT>
__global__ void __launch_bounds__(THREADS) k_sgd_kernel(k_sgd_args a)
{
    if (a.state->found_inf)
        return;
    float lr = (float)a.header->lr, factor = 1.0f / a.state->loss_scale;
    if (a.clip > 0) {
        double c = a.clip / (sqrt(a.state->grad_sqsum) + 1e-6);
        factor *= (float)(c < 1 ? c : 1);
    }
    for (int64_t i = first_item(); i * 4 < a.n; i += item_stride()) {
        k_vec<float, 4> g = k_load_last<float, 4>(a.grad + i * 4);
        k_vec<float, 4> w = *(const k_vec<float, 4> *)(a.master + i * 4);
        k_vec<float, 4> v = *(const k_vec<float, 4> *)(a.momentum + i * 4);
        float decay = a.decay[i / 16] ? a.weight_decay : 0.0f; /* 64 elements share a flag */
        float f[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float d = g.v[j] * factor + decay * w.v[j];
            v.v[j] = a.mu * v.v[j] + d;
            w.v[j] -= lr * (a.nesterov ? d + a.mu * v.v[j] : v.v[j]);
            f[j] = w.v[j];
        }
        k_put(a.master + i * 4, w);
        k_put(a.momentum + i * 4, v);
        if (WEIGHT) {
            k_vec<T, 4> low;
            k_pack(f, low);
            k_put((T *)a.weight + i * 4, low);
        }
    }
}

void k_sgd(cudaStream_t s, int type, int sms, const k_sgd_args *a)
{
    unsigned grid = k_blocks(a->n / 4, THREADS, 16 * sms);
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        if (a->weight)
            k_sgd_kernel<T, true><<<grid, THREADS, 0, s>>>(*a);
        else
            k_sgd_kernel<T, false><<<grid, THREADS, 0, s>>>(*a);
    });
}

__global__ void __launch_bounds__(THREADS)
    k_ema_kernel(float share, const dnri_state *state, const float *w, float *e, int64_t n)
{
    if (state->found_inf)
        return;
    for (int64_t i = first_item(); i * 4 < n; i += item_stride()) {
        k_vec<float, 4> from = *(const k_vec<float, 4> *)(w + i * 4);
        k_vec<float, 4> to = *(const k_vec<float, 4> *)(e + i * 4);
#pragma unroll
        for (int j = 0; j < 4; j++)
            to.v[j] += share * (from.v[j] - to.v[j]);
        k_put(e + i * 4, to);
    }
}

void k_ema(cudaStream_t s, int sms, float share, const dnri_state *state, const float *w, float *e,
           int64_t n)
{
    unsigned grid = k_blocks(n / 4, THREADS, 16 * sms);
    k_ema_kernel<<<grid, THREADS, 0, s>>>(share, state, w, e, n);
}

__global__ void k_scaler_kernel(bool scaled, dnri_state *state)
{
    state->steps += 1;
    if (!scaled)
        return;
    if (state->found_inf) {
        state->loss_scale *= DNRI_SCALE_BACKOFF;
        state->growth = 0;
        state->skipped += 1;
    } else if (++state->growth == DNRI_SCALE_INTERVAL) {
        float scale = state->loss_scale * DNRI_SCALE_GROWTH;
        if (isfinite(scale))
            state->loss_scale = scale;
        state->growth = 0;
    }
}

void k_scaler(cudaStream_t s, bool scaled, dnri_state *state)
{
    k_scaler_kernel<<<1, 1, 0, s>>>(scaled, state);
}

/* ---------------------------------------------------------------- for the host's part */

template <class T> __global__ void k_noise_kernel(T *x, int64_t n, float scale)
{
    for (int64_t i = first_item(); i < n; i += item_stride()) {
        uint32_t h = (uint32_t)i * 2654435761u + (uint32_t)(i >> 32);
        h = (h ^ h >> 16) * 0x7feb352du;
        h = (h ^ h >> 15) * 0x846ca68bu;
        h ^= h >> 16;
        x[i] = k_type<T>::store(((float)h * 0x1p-31f - 1.0f) * scale);
    }
}

void k_noise(cudaStream_t s, int type, int sms, void *x, int64_t n, float scale)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_noise_kernel<T><<<k_blocks(n, THREADS * 8, 16 * sms), THREADS, 0, s>>>((T *)x, n, scale);
    });
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_distance_kernel(const T *a, const T *b, int64_t n, double (*part)[2])
{
    __shared__ double sm[2][THREADS];
    double diff = 0, norm = 0;
    for (int64_t i = first_item(); i < n; i += item_stride()) {
        double x = (double)k_type<T>::load(a[i]), y = (double)k_type<T>::load(b[i]);
        diff += (x - y) * (x - y);
        norm += y * y;
    }
    sm[0][threadIdx.x] = diff;
    sm[1][threadIdx.x] = norm;
    __syncthreads();
    if (threadIdx.x < 2) {
        double sum = 0;
        for (int i = 0; i < THREADS; i++)
            sum += sm[threadIdx.x][i];
        part[blockIdx.x][threadIdx.x] = sum;
    }
}

void k_distance(cudaStream_t s, int type, const void *a, const void *b, int64_t n,
                double part[K_DISTANCE_BLOCKS][2])
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_distance_kernel<T>
            <<<K_DISTANCE_BLOCKS, THREADS, 0, s>>>((const T *)a, (const T *)b, n, part);
    });
}

cudaError_t k_usable(void)
{
    cudaFuncAttributes attr;
    return cudaFuncGetAttributes(&attr, (const void *)k_scaler_kernel);
}
