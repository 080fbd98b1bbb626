/* rundir.h: the folder that a training run leaves behind:
 *
 *     resolved.cfg                        every key with its value
 *     manifest.json                       versions, device, plan and data hashes, command line, start time
 *     metrics.jsonl                       a record a logged step ("train"), an evaluation ("eval") …
 *     checkpoints/last, best, epoch-NNNN  each with model.safetensors
 */
#ifndef RUNDIR_H
#define RUNDIR_H

#include "session.h"

struct json_t;

typedef struct rundir {
    char path[CFG_TEXT];
    FILE *metrics;
} rundir;

/* Makes the folder: `out`, else run.out, else runs/<cfg>-<date>-<time>. One that holds a run is DNR_EUSAGE. */
dnr_status rundir_make(rundir *r, const cfg *c, const char *out, dnr_error *err);
/* Writes resolved.cfg and manifest.json and opens metrics.jsonl. */
dnr_status rundir_begin(rundir *r, const session *s, int argc, char **argv, dnr_error *err);
/* Appends one record to metrics.jsonl and flushes it. Takes the reference over. */
dnr_status rundir_record(rundir *r, struct json_t *record, dnr_error *err);
/* checkpoints/NAME/model.safetensors */
dnr_status rundir_save(rundir *r, dnr_trainer *t, const char *name, dnr_error *err);
/* An empty folder (nothing was begun) is removed. */
void rundir_close(rundir *r);

/* A name in a record; bytes that are not UTF-8 become "?". */
struct json_t *rundir_text(const char *s);
/* A number of a record: null where JSON has none (not finite). */
struct json_t *rundir_real(double v);

#endif
