/* launch.h: what a launcher says of this process, in its environment. */
#ifndef DNR_LAUNCH_H
#define DNR_LAUNCH_H

#include "../runtime/status.h"

typedef struct dnri_launch {
    const char
        *launcher; /* "DNR_RANK", "Open MPI", "MPICH", "Slurm"; NULL: none, this process is alone */
    int rank, world;
    int local_rank, local_world; /* on this host; local_world 0: unknown */
    char master[256]; /* "HOST:PORT" of rank 0; empty: all are on this host, and meet by `job` */
    char job[128];    /* the same in all ranks of a job; empty: the launcher gives none */
} dnri_launch;

/* Reads the environment. DNR_EUSAGE where it makes no sense. */
dnr_status dnri_launch_read(dnri_launch *out);
/* The first host of Slurm's "a[03-05,7]b,c": "a03b". False where there is none, or it does not fit. */
bool dnri_first_host(const char *list, char *buf, size_t size);

#endif
