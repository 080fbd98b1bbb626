/* amx.h: convolutions and their gradients in bf16 by the matrix units of AMX. */
#ifndef DNR_CPU_AMX_H
#define DNR_CPU_AMX_H

#include "../../runtime/cpu/cpu.h"

/* Channels in thirty-twos, nothing behind the convolution, all bf16 but for a weight gradient in fp32, on a CPU with AMX that
 * oneDNN may use as well? */
bool dnri_amx_fits(const dnri_dnn_desc *d);
/* As dnri_cpu_dnn_step, for a description that fits. Products are summed in fp32, in the same order every time. */
dnr_status dnri_amx_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                         dnri_step *out);

/* amx.c: has Linux granted this process the tiles? */
bool dnri_amx_ready(void);
/* amx_conv.c: these two of convolutions and their input gradients. */
bool dnri_amx_conv_fits(const dnri_dnn_desc *d);
dnr_status dnri_amx_conv_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                              dnri_step *out);

#endif
