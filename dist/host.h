/* host.h: reductions in a step: what all communicators share, and those of host memory. */
#ifndef DNR_DIST_HOST_H
#define DNR_DIST_HOST_H

#include "../runtime/comm.h"
#include "../runtime/reduce.h"

/* What the ctx of a reduction's step begins with. */
typedef struct dnri_reduce_step {
    dnri_reduce_attr a; /* zero for a reduce.wait */
    char *data;
    dnr_device *dev; /* that has lanes; NULL: the host's memory */
} dnri_reduce_step;

/* Makes `out` the step of a reduce, which runs `reduce`, or of a reduce.wait, which runs `wait`. ctx is zeroed, of `size`
 * bytes. NULL: out of memory (the failure is recorded). */
void *dnri_reduce_step_new(const dnri_op *op, size_t size, const char *impl,
                           dnr_status (*reduce)(void *), dnr_status (*wait)(void *),
                           dnri_step *out);

/* On a device with lanes. Where a sum is enqueued: on its lane, which then waits for what was computed so far. */
dnr_status dnri_reduce_queue(const dnri_reduce_step *s, void **queue);
/* What a reduce.wait runs: computing waits for the comm lane. */
dnr_status dnri_reduce_wait(void *ctx);

/* Lowers a reduce to begin_sum, a reduce.wait to end_sums, of devices whose memory the host sees. */
dnr_status dnri_host_lower(dnr_comm *c, const dnri_op *op, dnri_step *out);

#endif
