/* trainrig.h: a small net under training on drawn pictures, for the tests of the trainer. */
#ifndef DNR_TRAINRIG_H
#define DNR_TRAINRIG_H

#include "../runtime/slot.h"
#include "../runtime/trainer.h"
#include "rig.h"

enum {
    TR_CLASSES = 4,
    TR_IMAGE = 8,
    TR_BATCH = 16,
    TR_SCALE = 1024, /* loss scale at which fp16 does not overflow by itself */
};

typedef struct training {
    dnr_device *dev;
    dnr_trainer *t;
} training;

/* Runs the tests on the device and precision of the command line, or on ref. */
int tr_main(int argc, char **argv, const struct CMUnitTest *tests, size_t n);
dnr_status tr_device(void **state, dnr_device **out);
dnr_trainer_opts tr_options(void **state); /* ResNet-8, TR_BATCH, constant rate, deterministic */

training tr_open(void **state, const dnr_trainer_opts *o); /* with kept logits */
training tr_open_with(void **state, const dnr_trainer_opts *o, const dnri_trainer_extra *extra);
void tr_close(training *r);

/* A slot of `batch` pictures first, first + 1, …, the label of picture i being i mod TR_CLASSES; those from
 * `count` on are absent. From malloc. */
void *tr_slot(int batch, int first, int count);
/* Steps on consecutive pictures from `first`; what the last one says. accumulate is at most 8. */
dnr_metrics tr_train(training *r, int first, int steps);
/* Evaluates pictures 0 … n − 1. */
dnr_eval_result tr_evaluate(training *r, int n);

/* A whole slab, parameter after parameter. From malloc. */
double *tr_slab(training *r, dnri_role role, int64_t *n);
/* ‖a − b‖ / ‖b‖ of a slab in two trainers. */
double tr_distance(training *a, training *b, dnri_role role);
/* A generous bound on it after a few steps that differ in rounding. */
double tr_rounding(const training *r);

/* The last error speaks of `text` and has a remedy. */
void tr_says(const char *text);

#endif
