/* internal.h: what the layers' files share. */
#ifndef DNR_LAYERS_INTERNAL_H
#define DNR_LAYERS_INTERNAL_H

#include "layers.h"

#include <stdio.h>

/* Parameter "NAME.SUFFIX" of a layer as a tensor. */
static inline dnr_tid dnri_layer_param(dnr_graph *g, dnri_role role, const char *name,
                                       const char *suffix, dnri_param proto)
{
    snprintf(proto.name, sizeof proto.name, "%s.%s", name, suffix);
    return dnri_param_tensor(g, role, &proto);
}

/* Output size of a window that slides over h x w pixels (window.c); fails where it does not fit. */
dnr_status dnri_window(const char *name, int kernel, int stride, int pad, int64_t h, int64_t w,
                       int64_t *p, int64_t *q);

/* Fails unless input i of the op has shape `want`; `what` names it. */
dnr_status dnri_want(const dnr_graph *g, const dnri_op *op, int i, const char *what, dnr_desc want);

/* A bit for each element of x: shape of the mask that norm.train leaves (norm.c). */
dnr_desc dnri_mask_of(const dnr_desc *x);
/* Shape rule of a convolution, in conv.c: checks x and w, makes y. */
dnr_status dnri_conv_infer(dnr_graph *g, dnri_op *op, const dnri_conv_attr *a);
/* unread of an op whose attributes begin with a convolution's: bytes of x between kernels that stride further than they
 * reach. */
double dnri_conv_unread(const dnr_graph *g, const dnri_op *op);

#endif
