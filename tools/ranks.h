/* ranks.h: a command as one of several ranks: opens the communicator, speaks for it, ends with it. */
#ifndef RANKS_H
#define RANKS_H

#include "session.h"

/* The others may wait so many seconds for a rank that reads or writes files, or times its plan. */
enum { RANKS_SLOW_S = 900 };

/* Waits until all ranks are there; s->comm is then set, alone or not. From now on this rank's screen knows it (screen.h),
 * and a lost rank ends the process with code 5 and one message. */
dnr_status ranks_open(session *s, bool log_all, dnr_error *err);
/* `err`: what ended this rank early, else NULL. */
void ranks_close(session *s, const dnr_error *err);

/* Every rank was started with the same cfg (what may differ excepted), on the same data, for the same steps. */
dnr_status ranks_compare(const session *s, dnr_error *err);
/* Returns in no rank before rank 0 has come here: a launcher ends the ranks that are left when one exits. */
dnr_status ranks_wait_for_0(const session *s, dnr_error *err);

/* The device for this rank: "cuda:<local rank>" where the cfg says auto or cuda and several ranks share the host. */
dnr_status ranks_open_device(session *s);

#endif
