/* probe.h: one op on the device under test against the reference device.
 *
 * A case is built twice, by the same function: leaves (inputs), ops, results (outputs). The reference's
 * leaves get random values, rounded to what the other device's types hold, and both devices get the
 * same, so that what is left is the device's own rounding. */
#ifndef DNR_PROBE_H
#define DNR_PROBE_H

#include "rig.h"

extern dnr_device *probe_ref, *probe_device;
extern dnr_precision probe_precision;

/* Opens both. 0, or the exit code of a program that cannot go on: "PROGRAM DEVICE PRECISION". */
int probe_open(int argc, char **argv);
void probe_close(void);
/* Prints the error of each kind of output beside its bound, and closes. The exit code of a program of which so many
 * tests failed. */
int probe_end(int failed);

typedef enum probe_kind {
    EXACT,   /* values are only moved, or are whole numbers */
    POINT,   /* element by element, one rounding to the compute type */
    SUM,     /* a sum in the master type */
    PRODUCT, /* a matrix product, rounded to the compute type */
    WGRAD,   /* a matrix product in the master type, possibly by way of the compute type */
    PROBE_KINDS
} probe_kind;
double probe_bound(probe_kind k);
/* Records an error under "op name"; false, and a line about it, where it misses its bound. */
bool probe_judge(const char *op, const char *name, double error, double bound);

typedef struct shape {
    int64_t n, h, w, c, k;
    int kernel, stride, pad;
    double smoothing, shift;
    bool relu, residual, dy2, soft, special, later;
} shape;
#define NHWC(n_, h_, w_, c_)           .n = n_, .h = h_, .w = w_, .c = c_
#define WINDOW(kernel_, stride_, pad_) .kernel = kernel_, .stride = stride_, .pad = pad_
#define COUNT(a)                       (sizeof(a) / sizeof(a)[0])

enum { REF, DEVICE, SIDES, MAX_LEAVES = 10, MAX_OUTS = 12 };

typedef struct probe {
    rig r[SIDES];
    int side; /* being built */
    uint64_t seed;
    int n_leaves, n_outs;
    struct {
        dnr_tid tid[SIDES];
        double *v;
        int64_t count;
    } leaf[MAX_LEAVES];
    struct {
        const char *op, *name;
        double bound;
        dnr_tid tid[SIDES];
    } out[MAX_OUTS];
    dnri_state state; /* before the run */
    bool first;       /* the header's */
} probe;

typedef void (*probe_build)(probe *p, const shape *c);
typedef int (*probe_check)(const probe *p, double *got[MAX_OUTS]); /* more to check on the device */
/* The number of outputs that miss their bounds; each is reported. `check` may be NULL. */
int probe_run(probe_build build, probe_check check, const shape *c);

/* For build functions: */
dnr_graph *probe_graph(probe *p);
dnr_dtype probe_compute(const probe *p);
dnr_dtype probe_master(const probe *p);
/* A leaf with values `scale` · normal + `shift`. */
dnr_tid probe_leaf(probe *p, const char *name, dnr_desc d, double scale, double shift);
dnr_tid probe_tensor(probe *p, const char *name, int64_t n, int64_t h, int64_t w, int64_t c);
dnr_tid probe_vector(probe *p, const char *name, int64_t c, double scale, double shift);
/* Values of a leaf, to be edited while the first side is built; NULL on the other. */
double *probe_values(probe *p, dnr_tid t);
void probe_emit(probe *p, const dnri_op_def *def, const void *attr, size_t size, int n_in,
                const dnr_tid *in, int n_out, dnr_tid *out);
/* How much rounding the op emitted last has over a fused one's: split ones round between their parts. */
double probe_split(probe *p);
/* An output to compare, with `loose` times its usual bound. */
void probe_result(probe *p, const char *op, const char *name, dnr_tid t, probe_kind k,
                  double loose);

#endif
