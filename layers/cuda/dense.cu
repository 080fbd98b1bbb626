/* dense.cu: what surrounds the fully connected layer's products: sums of columns. */
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
