/* trainer.h: the inside of dnr_trainer, shared by trainer*.c and weights.c, and what tests need of it. */
#ifndef DNR_TRAINER_H
#define DNR_TRAINER_H

#include "comm.h"
#include "plan.h"

#include <stdatomic.h>

/* One optimizer step is accumulate − 1 runs of `micro` and one of `last`. */
enum { DNRI_MICRO, DNRI_LAST, DNRI_EVAL, DNRI_PROGRAMS };

enum { DNRI_NOTES = 16 };

typedef struct dnri_program {
    dnri_plan *plan; /* NULL: not needed by this run */
    dnr_tid logits;
} dnri_program;

/* What only tests ask for. */
typedef struct dnri_trainer_extra {
    bool keep;          /* logits and the samples' losses stay readable (dnri_plan_read) */
    bool scaled;        /* loss scaling in any precision */
    int64_t algbn_rows; /* of dnri_fuse_opts */
    bool apart;         /* no output over an input: dnri_lower_opts */
    bool planned;       /* plans alone: nothing can be run */
    dnr_tune_fn tried;  /* of dnri_lower_opts */
    void *tried_user;
} dnri_trainer_extra;

/* Pinned host memory that copies read and write while the host goes on. */
typedef struct dnri_pinned {
    void *cell[2];       /* addresses of the staging buffers */
    dnri_state state[2]; /* of the last two steps */
    dnri_state eval;
    dnri_header header[2]; /* of the last two steps, of several ranks: who asked to stop */
} dnri_pinned;

/* A step that was enqueued, and where its batches came from. */
typedef struct dnri_issued {
    int64_t samples; /* seen with it */
    double lr;
    dnr_loader *loader; /* NULL: batches of the caller's */
    int64_t position;   /* of its first batch in the loader's stream */
    int64_t fed;        /* batches fed with it */
} dnri_issued;

struct dnr_trainer {
    dnr_device *dev;
    dnr_trainer_opts
        o; /* defaults filled in; owns model.name and model.stem; batch 0: evaluates only */
    dnri_trainer_extra extra;
    dnri_numerics num;
    dnri_params *params;
    dnri_store *store;
    dnri_program program[DNRI_PROGRAMS];
    void *arena;
    size_t arena_bytes; /* the largest program's */
    size_t remake;      /* of dnri_rewrite_remake, with o.recompute NONE; 0: as o.recompute says */

    void *staging[2]; /* device copies of slots, filled in turn */
    size_t staging_bytes;
    dnri_pinned *pinned;
    void *logits; /* pinned, for dnr_trainer_predict; made when it first asks for them */
    char *notes[DNRI_NOTES][2]; /* key and text, for files of weights; a missing key ends them */
    int64_t fed;                /* batches so far, of any program */
    uint64_t
        prepared; /* what dnri_store_changes said when the evaluation was prepared; 0: it is not */

    int64_t steps, samples; /* enqueued */
    dnri_issued issued[2];  /* the last two steps */
    bool pins_checked, pins_told;
    struct dnri_profile *profile; /* of the steps to come; NULL: none */
    dnr_error *lost;              /* why training cannot go on; NULL: it can */

    dnr_comm *comm; /* NULL: alone */
    int world;
    bool shared; /* all ranks hold the same weights */
    atomic_bool ask_stop;
};

/* Checks the options, fills in defaults and copies the names. */
dnr_status dnri_trainer_options(const dnr_trainer_opts *in, dnr_trainer_opts *out);

/* trainer_plan.c: settles `recompute`, builds the programs and sets the bytes of arena and staging; fails where they do
 * not fit, naming the largest batch that does. */
dnr_status dnri_trainer_plan(dnr_trainer *t);
void dnri_trainer_free_plans(dnr_trainer *t);
unsigned dnri_trainer_store_holds(const dnr_trainer_opts *o);
size_t dnri_trainer_store_bytes(const dnr_trainer *t);
size_t dnri_trainer_bytes(const dnr_trainer *t); /* store, arena and staging */
/* To be said after the name of the mode of recomputation. */
static inline const char *dnri_trainer_in_part(const dnr_trainer *t)
{
    return t->remake ? " in part" : "";
}

dnr_status dnri_trainer_create(dnr_device *dev, const dnr_trainer_opts *opts,
                               const dnri_trainer_extra *extra, dnr_trainer **out);
/* A step on `accumulate` slots of the caller's (ordinary memory will do; the headers are written); waits
 * for it. */
dnr_status dnri_trainer_step_on(dnr_trainer *t, void *const *slots, dnr_metrics *out);
/* Collective: the others take what rank 0's device has chosen by timing, where theirs is like it. */
dnr_status dnri_trainer_share_choices(dnr_trainer *t);
/* Takes up a run after its step `state->steps` and that many samples: the next step follows. */
dnr_status dnri_trainer_go_on(dnr_trainer *t, const dnri_state *state, int64_t samples);
/* Step `step` (from 0), whose state is `s`, had gradients that are not finite: runs it again op by op, says
 * which was the first, and fails. */
dnr_status dnri_trainer_diagnose(dnr_trainer *t, int64_t step, const dnri_state *s);
/* Samples of a step, of all ranks. */
static inline int64_t dnri_trainer_global_batch(const dnr_trainer *t)
{
    return t->o.batch * t->o.accumulate * t->world;
}
/* Of several ranks: all take over rank 0's running statistics; the counts and the loss of all are added up. */
dnr_status dnri_trainer_begin_eval(dnr_trainer *t);
dnr_status dnri_trainer_sum_eval(dnr_trainer *t, dnri_state *s);
/* Adds a batch of the caller's to an evaluation, or starts one; waits for it. */
dnr_status dnri_trainer_eval_on(dnr_trainer *t, void *slot, bool first, dnr_eval_result *out);

#endif
