/* fold.cuh: what a norm in evaluation does to channel k of the convolution before it. */
#ifndef DNR_FOLD_CUH
#define DNR_FOLD_CUH

#include "../../runtime/cuda/vec.cuh"
#include "kernels.h"

/* Its weights are multiplied by this. */
__device__ __forceinline__ double fold_factor(const k_fold_norm_args &a, int k)
{
    return a.gamma[k] / sqrt(a.var[k] + a.eps);
}

template <class T>
__device__ __forceinline__ void fold_bias(const k_fold_norm_args &a, int k, double factor)
{
    a.bias[k] = (float)(a.beta[k] - a.mean[k] * factor);
    if (a.low)
        ((T *)a.low)[k] = k_type<T>::store(a.bias[k]);
}

#endif
