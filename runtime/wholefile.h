/* wholefile.h: a file that appears complete or not at all: written under a temporary name in the
 * same folder, fsynced, renamed over its name, and the folder fsynced. */
#ifndef DNR_WHOLEFILE_H
#define DNR_WHOLEFILE_H

#include "status.h"

typedef struct dnri_wholefile {
    const char *path; /* borrowed */
    char *temp;
    int fd;
} dnri_wholefile;

/* DNR_EDISK, with the path and the reason, where the disk or folder does not let us write. A failed
 * _open or _write needs no _abandon: it has cleaned up. `path` must not name anything but a regular
 * file. */
dnr_status dnri_wholefile_open(dnri_wholefile *f, const char *path);
dnr_status dnri_wholefile_write(dnri_wholefile *f, const void *data, size_t bytes);
dnr_status dnri_wholefile_commit(dnri_wholefile *f);
void dnri_wholefile_abandon(dnri_wholefile *f); /* after _open, instead of _commit; idempotent */

/* The remedy for an errno of writing. */
const char *dnri_disk_remedy(int err);
/* fsyncs the folder that holds `path`. 0, or errno. */
int dnri_sync_folder_of(const char *path);

#endif
