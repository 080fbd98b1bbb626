/* rig.h: tiny graphs for tests: leaf tensors that the test writes, a few ops, tensors that it reads. */
#ifndef DNR_RIG_H
#define DNR_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "../layers/layers.h"
#include "../runtime/engine_ops.h"
#include "../runtime/plan.h"

#define RIG_SKIP 77 /* exit code of a test program that cannot run here */

/* Fails the test with the library's own error unless the call succeeds. */
#define OK(expr) rig_ok((expr), #expr, __FILE__, __LINE__)
void rig_ok(dnr_status st, const char *expr, const char *file, int line);

typedef struct rig {
    dnr_device *dev;
    dnri_numerics num;
    dnri_params *params;
    dnr_graph *g; /* the plan's, once there is one */
    dnri_plan *plan;
    dnri_store *store;
    void *arena;
    size_t workspace_cap; /* of the plan */
    bool timed;           /* the plan takes what is fastest; else what is deterministic */
    bool first;           /* neither: what the device proposes first */
    bool apart;           /* likewise: dnri_lower_opts */
} rig;

/* An empty graph; then the test emits ops. The device is borrowed. */
void rig_open(rig *r, dnr_device *dev, dnr_precision precision, bool training);
void rig_close(rig *r);
/* A kept tensor that no op writes. */
dnr_tid rig_leaf(rig *r, const char *name, dnr_desc d);
dnr_tid rig_keep(rig *r, dnr_tid t); /* returns t */

/* The plan, its store (`train`: with gradients; `sums`: with GSUM) and its arena; the state's loss scale
 * is 1 and the header says lr 0, first. rig_bind makes it ready to run. */
void rig_plan(rig *r, bool train, bool sums);
void rig_bind(rig *r);
void rig_header(rig *r, double lr, bool first);
void rig_write(rig *r, dnr_tid t, const double *v);
void rig_run(rig *r); /* and wait */
void rig_read(rig *r, dnr_tid t, double *v);
int64_t rig_count(const rig *r, dnr_tid t);
/* How many ops of a kind a graph has. */
int rig_count_ops(const dnr_graph *g, const dnri_op_def *def);

/* The reference device, and the set-up and tear-down of a group of tests on it. */
extern dnr_device *rig_ref;
int rig_open_ref(void **state);
int rig_close_ref(void **state);

/* ‖a − b‖ / ‖b‖, or ‖a‖ where b is 0; a NaN agrees with a NaN, and with nothing else (gives infinity). */
double rig_error(const double *a, const double *b, int64_t n);

/* Normally distributed values in a fixed order; `*seed` advances. */
double rig_normal(uint64_t *seed);
/* Rounds to what type `t` can hold. */
void rig_round(dnr_dtype t, double *v, int64_t n);

#endif
