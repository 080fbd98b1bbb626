/* host.h: reductions of host memory in a step: what every communicator that works on host memory shares. */
#ifndef DNR_DIST_HOST_H
#define DNR_DIST_HOST_H

#include "../runtime/comm.h"
#include "../runtime/reduce.h"

/* Lowers a reduce to begin_sum, a reduce.wait to end_sums, of devices whose memory the host sees. */
dnr_status dnri_host_lower(dnr_comm *c, const dnri_op *op, dnri_step *out);

#endif
