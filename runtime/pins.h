/* pins.h: implementations that the user has chosen, and the telling of contests (dnr_tune). */
#ifndef DNR_PINS_H
#define DNR_PINS_H

#include "backend.h"

enum { DNRI_PIN = 256 };

/* The pass of a convolution that the op computes: "fprop", "dgrad" or "wgrad"; NULL: it is none. */
const char *dnri_conv_pass(const dnri_op *op);

/* What o->pins (dnr_trainer_opts.pins) has for the op, in a training graph; false: nothing. */
bool dnri_pin_of(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                 char text[DNRI_PIN]);

/* Is each line of `pins` of the right form and of a layer of g? */
dnr_status dnri_pins_check(const char *pins, const dnr_graph *g);
/* Remarks upon those whose pass no op of g computes. */
void dnri_pins_remark(const char *pins, const dnr_graph *g);

/* Tells o->tried, where there is one, of a contest for `op`. */
void dnri_tell_tried(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                     const dnr_tune_way *ways, int n, int chosen, const char *pin);

#endif
