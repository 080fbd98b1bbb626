/* product.cu: products for which cuBLASLt has no algorithm: plain loops. */
#include "kernels.h"
#include "vec.cuh"

template <class T, class D>
__global__ void __launch_bounds__(256)
    k_matmul_kernel(k_matmul_args g, const T *__restrict__ a, const T *__restrict__ b, const D *c,
                    const D *__restrict__ bias, D *d)
{
    int64_t items = g.m * g.n;
    a += blockIdx.y * g.step_a;
    b += blockIdx.y * g.step_b;
    c += blockIdx.y * g.step_d;
    d += blockIdx.y * g.step_d;
    for (int64_t it = (int64_t)blockIdx.x * 256 + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * 256) {
        int64_t i = it / g.n, j = it % g.n;
        float sum = bias ? k_type<D>::load(bias[j]) : 0;
        if (g.add)
            sum += k_type<D>::load(c[it]);
        for (int64_t l = 0; l < g.l; l++)
            sum += k_type<T>::load(a[i * g.a_row + l * g.a_col]) *
                   k_type<T>::load(b[l * g.b_row + j * g.b_col]);
        d[it] = k_type<D>::store(g.relu ? k_relu_value(sum) : sum);
    }
}

void k_matmul(cudaStream_t s, const k_matmul_args *g, const void *a, const void *b, const void *c,
              const void *bias, void *d)
{
    dim3 grid(k_blocks(g->m * g->n, 256, 32 * g->sms), (unsigned)g->batch);
    k_by_type(g->type, [&](auto t) {
        using T = decltype(t);
        if (g->d_type == DNR_F32)
            k_matmul_kernel<T, float><<<grid, 256, 0, s>>>(
                *g, (const T *)a, (const T *)b, (const float *)c, (const float *)bias, (float *)d);
        else
            k_matmul_kernel<T, T><<<grid, 256, 0, s>>>(*g, (const T *)a, (const T *)b, (const T *)c,
                                                       (const T *)bias, (T *)d);
    });
}
