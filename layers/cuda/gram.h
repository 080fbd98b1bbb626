/* gram.h: a row of algbn.c's table that is a file of its own. */
#ifndef DNR_GRAM_H
#define DNR_GRAM_H

#include "../../runtime/cuda/device.h"

dnr_status dnri_cuda_lower_gram(dnr_device *dev, const dnr_graph *g, const dnri_op *op,
                                const dnri_lower_opts *o, dnri_step *out);

#endif
