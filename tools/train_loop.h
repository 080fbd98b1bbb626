/* train_loop.h: the steps of a run: progress, records, evaluations, checkpoints, stopping. */
#ifndef TRAIN_LOOP_H
#define TRAIN_LOOP_H

#include "rundir.h"

/* Runs to the end, or until SIGINT, SIGTERM or SIGUSR1 (checkpoint saved; DNR_STOPPED). `from`: the checkpoint that
 * the trainer was restored from, or NULL. */
dnr_status train_loop(session *s, rundir *dir, const dnr_checkpoint *from, dnr_error *err);

#endif
