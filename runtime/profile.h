/* profile.h: a Chrome trace of some training steps: device times of each launch by lane, and what the host did. */
#ifndef DNR_PROFILE_H
#define DNR_PROFILE_H

#include "plan.h"

typedef struct dnri_profile dnri_profile;

/* A trace of `steps` training steps, to be written to `path` (chrome://tracing, Perfetto). */
dnr_status dnri_profile_new(dnr_device *dev, int64_t steps, const char *path, dnri_profile **out);
void dnri_profile_free(dnri_profile *p); /* writes nothing */

double dnri_profile_now(void); /* seconds, as dnri_profile_host takes them */
/* The host did `name` from `begin` until now. */
void dnri_profile_host(dnri_profile *p, const char *name, double begin);
/* Runs the whole program, op by op, each between two stamps of its lane. */
dnr_status dnri_profile_run(dnri_profile *p, dnri_plan *plan);
/* A step was enqueued: waits for it and takes its times. After the last one the file is written and *done set. */
dnr_status dnri_profile_step(dnri_profile *p, bool *done);

#endif
