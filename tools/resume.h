/* resume.h: from which checkpoint a run goes on, and whether its cfg lets it. */
#ifndef RESUME_H
#define RESUME_H

#include "session.h"

typedef struct resume {
    dnr_checkpoint *from; /* rank 0's; NULL: a fresh start, or another rank */
    bool in_place;        /* the run directory may hold a run: this one */
    char out[CFG_TEXT];   /* run directory, where --resume decides it; else empty */
    /* in all ranks, after resume_share: */
    bool goes_on;
    int64_t steps, samples, global_batch; /* the checkpoint's */
    char *loop;                           /* its note of that name; NULL: none */
} resume;

/* `how`: NULL (a new run), "auto" (the newest whole checkpoint of the run directory, else a fresh start; says
 * which) or the path of a checkpoint, or of a run (its last one). `out`: --out, may be NULL. For rank 0: only it needs
 * to see the files. */
dnr_status resume_find(resume *r, const char *how, const char *out, const cfg *c, dnr_error *err);
/* The other ranks learn where rank 0 goes on. `comm` may be NULL. */
dnr_status resume_share(resume *r, dnr_comm *comm, dnr_error *err);
/* Compares the cfg with the checkpoint's; shows what differs and refuses it unless `allow`. Another train.batch or number
 * of ranks changes train.accumulate so that the global batch stays. */
dnr_status resume_check_cfg(const resume *r, cfg *c, int world, bool allow, dnr_error *err);
/* The same for what only an open session knows: pictures and precision. */
dnr_status resume_check_session(const resume *r, const session *s, bool allow, dnr_error *err);
/* Is this a key that decides where, how fast and how long, not what is computed; or one whose meaning is compared by
 * hash? */
bool resume_may_change(const char *key);
void resume_close(resume *r);

/* What later resumes compare, as notes of a checkpoint: texts from malloc. */
char *resume_note_cfg(const cfg *c);
char *resume_note_data(const session *s);

#endif
