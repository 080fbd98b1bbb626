/* host.h: reductions in a step: what all communicators share, and those of host memory. */
#ifndef DNR_DIST_HOST_H
#define DNR_DIST_HOST_H

#include "../runtime/comm.h"
#include "../runtime/reduce.h"

/* What the ctx of a reduction's step begins with. */
typedef struct dnri_reduce_step {
    dnri_reduce_attr a; /* zero for a reduce.wait */
    char *data;
} dnri_reduce_step;

/* Makes `out` the step of a reduce, which runs `reduce`, or of a reduce.wait, which runs `wait`. ctx is zeroed, of `size`
 * bytes. NULL: out of memory (the failure is recorded). */
void *dnri_reduce_step_new(const dnri_op *op, size_t size, const char *impl,
                           dnr_status (*reduce)(void *), dnr_status (*wait)(void *),
                           dnri_step *out);

/* Lowers a reduce to begin_sum, a reduce.wait to end_sums, of devices whose memory the host sees. */
dnr_status dnri_host_lower(dnr_comm *c, const dnri_op *op, dnri_step *out);

#endif
