/* rundir.h: the folder that a training run leaves behind:
 *
 *     resolved.cfg                    every key with its value
 *     manifest.json                   versions, device, plan and data hashes, command line, start time, resumes
 *     metrics.jsonl                   a record a logged step ("train"), an evaluation ("eval") …
 *     plan.json                       what a step runs, and the map of its memory
 *     events.out.tfevents.*           for TensorBoard, where run.tensorboard asks for it
 *     checkpoints/step-NNNNNNNNN      whole checkpoints (dnnrun.h)
 *     checkpoints/last, best          links to two of them
 *
 * A process holds a lock on the folder while it trains. Everything but metrics.jsonl appears whole or not at all;
 * of metrics.jsonl a killed process may leave half a line, which the next resume removes. */
#ifndef RUNDIR_H
#define RUNDIR_H

#include "session.h"

struct json_t;

typedef struct rundir {
    char path[CFG_TEXT];
    FILE *metrics;
    FILE *events; /* NULL without run.tensorboard */
    int lock;     /* descriptor + 1; 0: none */
    bool begun;   /* something of the run lies in it */
} rundir;

/* Makes the folder: `out`, else run.out, else runs/<cfg>-<date>-<time>, and locks it. One that holds a run is
 * DNR_EUSAGE unless `go_on`; so is one that another process trains in. */
dnr_status rundir_make(rundir *r, const cfg *c, const char *out, bool go_on, dnr_error *err);
/* Writes resolved.cfg and manifest.json and opens metrics.jsonl. With a checkpoint `from` of this run, records of
 * later steps are dropped and checkpoints of later steps set aside; without one (NULL), all of them. */
dnr_status rundir_begin(rundir *r, const session *s, const dnr_checkpoint *from, int argc,
                        char **argv, dnr_error *err);
/* Appends one record to metrics.jsonl and flushes it. Takes the reference over. Nothing where the run directory is
 * another rank's. */
dnr_status rundir_record(rundir *r, struct json_t *record, dnr_error *err);

/* checkpoints/step-NNNNNNNNN of `step`; "last" points to it, and "best" too where `best` is the same step. Then all
 * but the newest `keep` (0: none) and the best are removed. `notes` as for dnr_checkpoint_save. */
typedef struct rundir_save_opts {
    int64_t step, best; /* best < 0: none yet */
    int64_t keep;
} rundir_save_opts;
dnr_status rundir_save(rundir *r, dnr_trainer *t, const rundir_save_opts *o,
                       const char *const *notes, dnr_error *err);
/* Points "last" and "best" to where they belong, after a resume. */
dnr_status rundir_link(rundir *r, int64_t step, int64_t best, dnr_error *err);

/* Copies the records up to `step`, dropping lines that are no record; how many those were. */
int rundir_keep_records(FILE *from, FILE *to, int64_t step);

/* An empty folder (nothing was begun) is removed. */
void rundir_close(rundir *r);

/* A name in a record; bytes that are not UTF-8 become "?". */
struct json_t *rundir_text(const char *s);
/* A number of a record: null where JSON has none (not finite). */
struct json_t *rundir_real(double v);

/* Is the folder that of a run? Then `weights` names its last weights. */
bool rundir_weights(const char *folder, char weights[CFG_TEXT]);

#endif
