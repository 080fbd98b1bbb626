/* train_loop.h: the steps of a run: progress, records, evaluations, checkpoints, stopping. */
#ifndef TRAIN_LOOP_H
#define TRAIN_LOOP_H

#include "resume.h"
#include "rundir.h"

/* Runs to the end, or until any rank gets SIGINT, SIGTERM, SIGUSR1, SIGHUP (unless ignored) or SIGPIPE: checkpoint saved,
 * DNR_STOPPED. `r`: where the trainer goes on, if it does. Rank 0 alone has a run directory; the others' records go
 * nowhere. */
dnr_status train_loop(session *s, rundir *dir, const resume *r, dnr_error *err);

#endif
