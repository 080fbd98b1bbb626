/* choices.h: what was chosen by timing, kept in a file for later starts: a text for each key, by machine.
 *
 * The file is a cache. Missing, unreadable, damaged or of another version, it counts as empty, with a remark, and is
 * replaced by the next save. A save merges with what the file holds by then and replaces it whole, so that a
 * reader never sees half of one; of two savers at the same moment the later wins, and what the other
 * added is timed again some day. */
#ifndef DNR_CHOICES_H
#define DNR_CHOICES_H

#include "status.h"

typedef struct dnri_choices dnri_choices;

/* `machine`: all that a choice depends on beside its key: device and versions. `path` NULL: without a file. Fails only for
 * want of memory. */
dnr_status dnri_choices_open(const char *path, const char *machine, dnri_choices **out);
void dnri_choices_free(dnri_choices *c); /* does not save */
/* NULL: not chosen yet. Valid until the next set or save. */
const char *dnri_choices_get(const dnri_choices *c, const char *key);
dnr_status dnri_choices_set(dnri_choices *c, const char *key, const char *text);
/* Writes what was set since, if anything, making folders as needed. Where that fails a remark is made, once. */
void dnri_choices_save(dnri_choices *c);

/* All of them as text, from malloc, for a device elsewhere; NULL: out of memory. */
char *dnri_choices_text(const dnri_choices *c);
/* Takes another's for its own, where its machine is the same, and never saves them. Returns whether it did. */
bool dnri_choices_take(dnri_choices *c, const char *text);

#endif
