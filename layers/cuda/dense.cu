/* dense.cu: what surrounds cuBLASLt's products: sums of columns, and products for which it has no
 * algorithm. */
#include "kernels.h"

#include "../../runtime/cuda/vec.cuh"

#define ROWS 8

/* A block sums 32 columns; its rows of threads take every ROWS-th row and merge in order. */
template <class T>
__global__ void __launch_bounds__(32 * ROWS)
    k_column_sum_kernel(const T *__restrict__ dy, float *__restrict__ db, int n, int k)
{
    __shared__ float sm[ROWS][33];
    int j = (int)blockIdx.x * 32 + (int)threadIdx.x;
    float sum = 0;
    if (j < k)
#pragma unroll 4
        for (int i = (int)threadIdx.y; i < n; i += ROWS)
            sum += k_type<T>::load(dy[(int64_t)i * k + j]);
    sm[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && j < k) {
        for (int r = 1; r < ROWS; r++)
            sum += sm[r][threadIdx.x];
        db[j] = sum;
    }
}

void k_column_sum(cudaStream_t s, int type, const void *dy, float *db, int n, int k)
{
    k_by_type(type, [&](auto t) {
        using T = decltype(t);
        k_column_sum_kernel<T>
            <<<(unsigned)((k + 31) / 32), dim3(32, ROWS), 0, s>>>((const T *)dy, db, n, k);
    });
}

template <class T, class D>
__global__ void __launch_bounds__(256)
    k_matmul_kernel(k_matmul_args g, const T *__restrict__ a, const T *__restrict__ b,
                    const D *__restrict__ bias, D *__restrict__ d)
{
    int64_t items = (int64_t)g.m * g.n;
    for (int64_t it = (int64_t)blockIdx.x * 256 + threadIdx.x; it < items;
         it += (int64_t)gridDim.x * 256) {
        int64_t i = it / g.n, j = it % g.n;
        float sum = bias ? k_type<D>::load(bias[j]) : 0;
        for (int64_t l = 0; l < g.l; l++)
            sum += k_type<T>::load(a[i * g.a_row + l * g.a_col]) *
                   k_type<T>::load(b[l * g.b_row + j * g.b_col]);
        d[it] = k_type<D>::store(sum);
    }
}

void k_matmul(cudaStream_t s, const k_matmul_args *g, const void *a, const void *b,
              const void *bias, void *d)
{
    unsigned grid = k_blocks((int64_t)g->m * g->n, 256, 32 * g->sms);
    k_by_type(g->type, [&](auto t) {
        using T = decltype(t);
        if (g->d_type == DNR_F32)
            k_matmul_kernel<T, float><<<grid, 256, 0, s>>>(*g, (const T *)a, (const T *)b,
                                                           (const float *)bias, (float *)d);
        else
            k_matmul_kernel<T, T>
                <<<grid, 256, 0, s>>>(*g, (const T *)a, (const T *)b, (const T *)bias, (T *)d);
    });
}
