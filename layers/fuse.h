/* fuse.h: rewrites that join layers' ops, after the gradient walk. Each leaves an equal graph. */
#ifndef DNR_FUSE_H
#define DNR_FUSE_H

#include "layers.h"

/* An add read by nothing but the dy of one norm.bwd becomes that norm.bwd's dy and dy2: the sum of
 * a residual gradient is then never written. */
dnr_status dnri_fuse_gradient_add(dnr_graph *g);

#endif
