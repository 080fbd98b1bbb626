/* winograd.h: 3 × 3 convolutions of stride 1 by Winograd's method. */
#ifndef DNR_CPU_WINOGRAD_H
#define DNR_CPU_WINOGRAD_H

#include "../../runtime/cpu/cpu.h"

/* fp32, 3 × 3, stride 1, channels in sixteens? */
bool dnri_winograd_fits(const dnri_dnn_desc *d);
/* As dnri_cpu_dnn_step. The relative error is about four times a direct convolution's. */
dnr_status dnri_winograd_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                              dnri_step *out);

#endif
