/* distrig.h: a test that is several processes. A test program runs itself once a rank; in a rank it runs one test of its
 * list of cases instead, as any test program runs its tests. */
#ifndef DNR_DISTRIG_H
#define DNR_DISTRIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <cmocka.h>

#include "../runtime/comm.h"
#include "rig.h"

enum { RANKS_MOST = 8 };

typedef struct ranks {
    int n;
    pid_t pid[RANKS_MOST]; /* 0: not started, or ended */
    int code
        [RANKS_MOST]; /* exit code; 128 + signal; -1: still running when time was up, and killed then */
    double took[RANKS_MOST]; /* seconds from the start of all */
    char *said[RANKS_MOST];  /* stdout and stderr */
    double begun;
} ranks;

/* In main: runs a rank's one case and returns its exit code; -1: this process is no rank. */
int dist_case(const struct CMUnitTest *cases, size_t n);

/* Starts ranks 0 … n − 1 of `world`, rank k on the shell's command[k]. `extra`: "NAME=VALUE" pairs for their environment,
 * separated by blanks; may be NULL. Without DNR_MASTER there they meet by a local socket. */
void ranks_run(ranks *r, int n, int world, const char *const command[], const char *extra);
/* The same on a case of this program. */
void ranks_start(ranks *r, int n, int world, const char *name, const char *extra);
/* Waits for all of them, at most `limit_s`. */
void ranks_end(ranks *r, double limit_s);
/* Both, and all must succeed. */
void ranks_pass(int world, const char *name, const char *extra);
void ranks_free(ranks *r);
/* What rank k said contains `text`. */
void ranks_say(const ranks *r, int k, const char *text);

/* In a rank: its communicator, opened with this timeout, over $DNR_TEST_TRANSPORT (or TCP); a loss ends the process with
 * code 5 and its message. */
dnr_comm *rank_open(double timeout_s);
/* In a rank: ends it at once with the last error's message and its code. */
void rank_die(dnr_comm *c);

#endif
