/* wide.h: k_narrow's product on sm_90 (kernels.h), where n is a multiple of 128 and b fits beside a ring. */
#ifndef DNR_WIDE_H
#define DNR_WIDE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

bool k_wide_takes(const k_narrow_args *a);
/* cudaErrorNotSupported, and nothing is launched, where the driver cannot describe a. */
cudaError_t k_wide(cudaStream_t s, const k_narrow_args *a);

#ifdef __cplusplus
}
#endif

#endif
