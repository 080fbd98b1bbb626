/* session.h: what a cfg describes, opened: device, data, model. */
#ifndef SESSION_H
#define SESSION_H

#include "config.h"

/* Data to open; SESSION_INFER: none, and the trainer only evaluates. */
enum { SESSION_TRAIN = 1, SESSION_VAL = 2, SESSION_INFER = 4 };

typedef struct session {
    cfg cfg;
    dnr_comm *comm; /* ranks.h; NULL: a command that is always alone */
    dnr_device *dev;
    dnr_source *train, *val; /* NULL where not asked for, or data.val is empty */
    dnr_loader *train_loader, *val_loader;
    dnr_trainer *trainer;
    double lr;            /* peak, scaled to the global batch */
    int64_t global_batch; /* samples of a step, of all ranks */
    int64_t epoch_samples, total_samples;
    int64_t steps; /* of the whole run */
    dnr_tune_fn
        tuned; /* opening times the run's convolutions and makes no trainer; set before; NULL: not so */
    void *tuned_user;
    int64_t profile; /* steps to trace; 0: none */
    int64_t start;   /* samples seen before, where a run goes on; set before opening */
} session;

/* Opens what s->cfg describes. With SESSION_VAL alone the trainer only evaluates; without SESSION_TRAIN an epoch counts
 * as one step. A device that is open already stays. On failure, close it all the same. */
dnr_status session_open(session *s, int data, dnr_error *err);
void session_close(session *s); /* all but the communicator */
static inline int session_world(const session *s)
{
    return s->comm ? dnr_comm_world(s->comm) : 1;
}
static inline bool session_speaks(const session *s) /* is rank 0, or alone */
{
    return !s->comm || dnr_comm_rank(s->comm) == 0;
}

#endif
