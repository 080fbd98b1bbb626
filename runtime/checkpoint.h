/* checkpoint.h: the folder of a checkpoint as it appears and disappears: never half of one.
 *
 *     .step-000000100.partial-4711   being written
 *     step-000000100                 whole: renamed into place after everything in it was synced
 *     .step-000000100.old-4711       being removed
 *     superseded-step-000000100      of a future that a resume has left behind; kept, never read
 *
 * A name with a leading dot is rubbish left by a process that was killed. */
#ifndef DNR_CHECKPOINT_H
#define DNR_CHECKPOINT_H

#include "status.h"

#define DNRI_CHECKPOINT_NAME 64

typedef struct dnri_step_name {
    int64_t steps;
    char name[DNRI_CHECKPOINT_NAME]; /* "step-000000100" */
} dnri_step_name;

/* "step-…" in `folder`, most steps first; from malloc. None, and no such folder: *n = 0. */
dnr_status dnri_checkpoint_list(const char *folder, dnri_step_name **out, int *n);

/* A new empty folder beside `folder`; its name from malloc. */
dnr_status dnri_checkpoint_begin(const char *folder, char **temp);
/* Puts `temp` into the place of `folder`, whose former contents are removed. */
dnr_status dnri_checkpoint_commit(const char *temp, const char *folder);
/* Removes `temp` and what is in it, as far as that is possible. The last error stays. */
void dnri_checkpoint_abandon(const char *temp);

#endif
