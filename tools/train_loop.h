/* train_loop.h: the steps of a run: progress, records, evaluations, saves, stopping. */
#ifndef TRAIN_LOOP_H
#define TRAIN_LOOP_H

#include "rundir.h"

/* Runs to the end, or until SIGINT, SIGTERM or SIGUSR1 (weights saved; DNR_STOPPED). */
dnr_status train_loop(session *s, rundir *dir, dnr_error *err);

#endif
