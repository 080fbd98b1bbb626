/* card.h: what weights say of their model in their metadata: enough to use them without a cfg. */
#ifndef CARD_H
#define CARD_H

#include "session.h"

struct json_t;

/* Adds what the tool knows to the files that the trainer will save: the size that pictures are resized to before the
 * crop, and the names of the classes. */
dnr_status card_write(session *s, dnr_error *err);

/* Sets the keys of the model and its pictures to what the file says, except those that `set` will assign. `*names`: a
 * JSON list of the classes' names, or NULL. `*model`: does it say which model it is of? */
dnr_status card_read(const char *path, cfg *c, char *const set[], int n_set, struct json_t **names,
                     bool *model, dnr_error *err);

#endif
