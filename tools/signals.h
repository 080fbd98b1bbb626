/* signals.h: the signals that ask a run to save and stop. */
#ifndef SIGNALS_H
#define SIGNALS_H

#include "dnnrun.h"

/* From now on SIGINT, SIGTERM, SIGUSR1, SIGHUP (unless under nohup) and SIGPIPE ask `t` to stop (dnr_trainer_ask_stop),
 * until it is NULL. The second one of a kind kills, but for SIGPIPE. */
void signals_ask(dnr_trainer *t);
int signals_seen(void); /* the last one; 0: none */

#endif
