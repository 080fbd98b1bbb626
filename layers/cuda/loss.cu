/* loss.cu: softmax cross-entropy: a block for each sample, then one block that adds to the state. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define THREADS 128
#define TOTAL   256

/* Sums and maxima over the block in a fixed order; every thread gets the result. */
template <class T, class F> __device__ T block_reduce(T v, F op)
{
    __shared__ T sm[THREADS];
    sm[threadIdx.x] = v;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            sm[threadIdx.x] = op(sm[threadIdx.x], sm[threadIdx.x + half]);
        __syncthreads();
    }
    T r = sm[0];
    __syncthreads();
    return r;
}
template <class T> __device__ T block_sum(T v)
{
    return block_reduce(v, [](T a, T b) { return a + b; });
}
__device__ __forceinline__ float block_max(float v)
{
    return block_reduce(v, [](float a, float b) { return a > b ? a : b; });
}

/* Row i of the logits, with its maximum taken off so that no exponential overflows. */
template <class T> struct row {
    const T *z;
    int k;
    float max, sum; /* Σ exp(z − max) */

    __device__ row(const k_loss_args &a, int64_t i) : z((const T *)a.logits + i * a.k), k(a.k)
    {
        float m = -INFINITY, s = 0;
        for (int j = threadIdx.x; j < k; j += THREADS)
            m = fmaxf(m, value(j));
        max = block_max(m);
        for (int j = threadIdx.x; j < k; j += THREADS)
            s += expf(value(j) - max);
        sum = block_sum(s);
    }
    __device__ float value(int j) const
    {
        return k_type<T>::load(z[j]);
    }
};

/* The target of class j: label or soft row, smoothed. */
__device__ __forceinline__ float target(const k_loss_args &a, int64_t i, int j, int label)
{
    float eps = (float)a.smoothing, hard = a.soft ? a.soft[i * a.k + j] : j == label ? 1.0f : 0.0f;
    return (1 - eps) * hard + eps / (float)a.k;
}

/* correct: bit 0 counted, bit 1 right at 1, bit 2 right at 5 */
template <class T>
__global__ void __launch_bounds__(THREADS) k_loss_rows(k_loss_args a, float *loss, uint8_t *correct)
{
    int64_t i = blockIdx.x;
    int label = a.labels[i];
    if (label < 0) {
        if (threadIdx.x == 0) {
            loss[i] = 0;
            correct[i] = 0;
        }
        return;
    }
    row<T> z(a, i);
    float mine = z.value(label < a.k ? label : 0);
    float weights = 0, products = 0;
    int above = 0;
    for (int j = threadIdx.x; j < a.k; j += THREADS) {
        float v = z.value(j), t = target(a, i, j, label);
        weights += t;
        products += t != 0 ? t * (v - z.max) : 0;
        above += v != v ? 5 : v > mine || (v == mine && j < label); /* a NaN spoils all */
    }
    weights = block_sum(weights);
    products = block_sum(products);
    above = block_sum(above);
    if (threadIdx.x == 0) {
        bool known = label < a.k;
        loss[i] =
            known ? weights * logf(z.sum) - products : NAN; /* no such class: let it be seen */
        correct[i] = (uint8_t)(1 | (known && above < 1) << 1 | (known && above < 5) << 2);
    }
}

__global__ void __launch_bounds__(TOTAL)
    k_loss_total(int n, bool training, const float *loss, const uint8_t *correct,
                 const dnri_header *header, dnri_state *state)
{
    __shared__ double sm_loss[TOTAL];
    __shared__ int sm_count[3][TOTAL];
    double sum = 0;
    int count[3] = {0, 0, 0};
    for (int i = threadIdx.x; i < n; i += TOTAL) {
        sum += loss[i];
        for (int b = 0; b < 3; b++)
            count[b] += correct[i] >> b & 1;
    }
    sm_loss[threadIdx.x] = sum;
    for (int b = 0; b < 3; b++)
        sm_count[b][threadIdx.x] = count[b];
    __syncthreads();
    for (int half = TOTAL / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            sm_loss[threadIdx.x] += sm_loss[threadIdx.x + half];
            for (int b = 0; b < 3; b++)
                sm_count[b][threadIdx.x] += sm_count[b][threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x > 0)
        return;
    bool first = header->first != 0;
    state->loss_sum = (first ? 0 : state->loss_sum) + sm_loss[0];
    state->samples = (first ? 0 : state->samples) + sm_count[0][0];
    state->correct1 = (first ? 0 : state->correct1) + sm_count[1][0];
    state->correct5 = (first ? 0 : state->correct5) + sm_count[2][0];
    state->forwards += training;
}

void k_loss(cudaStream_t s, const k_loss_args *a, const dnri_header *header, float *loss,
            dnri_state *state, uint8_t *workspace)
{
    k_by_type(a->type, [&](auto t) {
        k_loss_rows<decltype(t)><<<(unsigned)a->n, THREADS, 0, s>>>(*a, loss, workspace);
    });
    k_loss_total<<<1, TOTAL, 0, s>>>(a->n, a->training, loss, workspace, header, state);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    k_loss_bwd_rows(k_loss_args a, const dnri_state *state, T *dlogits)
{
    int64_t i = blockIdx.x;
    int label = a.labels[i];
    T *d = dlogits + i * a.k;
    if (label < 0) {
        for (int j = threadIdx.x; j < a.k; j += THREADS)
            d[j] = k_type<T>::store(0);
        return;
    }
    row<T> z(a, i);
    float weights = 0, factor = (float)a.grad_scale * state->loss_scale;
    for (int j = threadIdx.x; j < a.k; j += THREADS)
        weights += target(a, i, j, label);
    weights = block_sum(weights);
    for (int j = threadIdx.x; j < a.k; j += THREADS)
        d[j] = k_type<T>::store(
            (expf(z.value(j) - z.max) / z.sum * weights - target(a, i, j, label)) * factor);
}

void k_loss_bwd(cudaStream_t s, const k_loss_args *a, const dnri_state *state, void *dlogits)
{
    k_by_type(a->type, [&](auto t) {
        using T = decltype(t);
        k_loss_bwd_rows<T><<<(unsigned)a->n, THREADS, 0, s>>>(*a, state, (T *)dlogits);
    });
}
