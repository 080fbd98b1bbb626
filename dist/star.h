/* star.h: who is there, who is lost, and where everybody stands.
 *
 * Each rank keeps two connections to rank 0. One carries small messages between side threads: heartbeats with the
 * rank's stage, farewells, and rank 0's word that someone is lost. A process that dies closes its connection, which is
 * noticed at once; one that is stopped, or a host that vanishes, falls silent; one that hangs goes on beating but does
 * not come to where the others wait. The other connection is for data (tcp.c). Neither MPI nor NCCL can name a stopped
 * peer: hence a star of our own beside them. */
#ifndef DNR_STAR_H
#define DNR_STAR_H

#include "launch.h"

typedef struct dnri_star dnri_star;

typedef struct dnri_star_opts {
    double timeout_s;
    const char *build; /* ranks of other builds are refused */
    /* Called once from the side thread when a rank is lost; may end the process. */
    void (*on_loss)(void *user, const dnr_error *why);
    void *user;
} dnri_star_opts;

/* Collective; all ranks are there when it returns, in rank 0 and elsewhere. Fills in what the launch left open
 * (local_rank, local_world). DNR_EPEER, naming the ranks that did not come, after timeout_s. */
dnr_status dnri_star_open(dnri_launch *l, const dnri_star_opts *o, dnri_star **out);
/* `why`: NULL, or what ended this rank: then the others are told that it is lost. */
void dnri_star_close(dnri_star *s, const dnr_error *why);

/* Stage of this rank: `text` is copied. Others may wait for it for timeout_s, or `allow_s` where that is more. */
void dnri_star_stage(dnri_star *s, double allow_s, const char *text);
/* What it does within the stage: static text, shown after it. */
void dnri_star_doing(dnri_star *s, const char *what);
/* This rank has come to its next common point. */
void dnri_star_advance(dnri_star *s);

/* From now on this rank counts as lost, if this is not called again within `seconds`; 0: no limit. For what may hang in a
 * library. `what`: static text. */
void dnri_star_limit(dnri_star *s, double seconds, const char *what);

/* DNR_OK, or the loss, as this thread's error. */
dnr_status dnri_star_check(dnri_star *s);
/* A data connection with `rank` failed (this thread's last error says how): waits a moment for what the star knows of
 * it, and fails with that, else with the connection's error. */
dnr_status dnri_star_verdict(dnri_star *s, int rank);
/* Longest time that a wait for others may take, all that they are allowed included. */
double dnri_star_patience(dnri_star *s);

int dnri_star_data(const dnri_star *s,
                   int rank); /* the data connection: rank 0's to each, the others' to rank 0 */
const char *dnri_star_host(const dnri_star *s, int rank);

#endif
