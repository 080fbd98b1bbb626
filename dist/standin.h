/* standin.h: a transport for one rank that adds nothing, but takes the time that sums over many would: for measuring how
 * much of it a step hides. Sums travel one after the other, each for
 *     latency + bytes · 2 (ranks − 1)/ranks / bandwidth
 * as in a ring (Patarasuk & Yuan 2009). It notes what it was asked for, in that order. */
#ifndef DNR_STANDIN_H
#define DNR_STANDIN_H

#include "../runtime/comm.h"

enum { DNRI_STANDIN_NOTES = 256 };

typedef struct dnri_standin {
    int ranks;
    double bandwidth, latency; /* bytes a second; seconds */
    double free_at;            /* when the last sum will be there, by dnri_clock */
    int64_t n;                 /* sums begun; the first DNRI_STANDIN_NOTES are noted */
    int64_t waits;             /* times that all begun so far were waited for */
    struct {
        int64_t bytes;
        double begun, done; /* done: when it is due */
    } note[DNRI_STANDIN_NOTES];
} dnri_standin;

/* `spec`: "RANKS:GB/S:MICROSECONDS". DNR_EUSAGE where it makes no sense, or the world is not of one rank. */
dnr_status dnri_standin_open(dnr_comm *c, const char *spec);
/* Seconds that a sum of `bytes` travels. */
double dnri_standin_takes(const dnri_standin *s, int64_t bytes);

#endif
