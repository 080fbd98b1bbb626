/* tcp.h: collectives over the star's data connections, for host memory. Rank 0 sums in the order of ranks, so all ranks
 * get the same bits, and each run the same ones. */
#ifndef DNR_TCP_H
#define DNR_TCP_H

#include "../runtime/comm.h"
#include "star.h"

/* Makes c->ops these. c->star must be open. */
dnr_status dnri_tcp_open(dnr_comm *c);

#endif
