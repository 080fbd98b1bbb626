/* state.h: the two small blocks that the host and every back end share by layout.
 *
 * Replay freezes arguments, so each scalar that changes from step to step lives in device memory:
 * the host writes a header into each slot, the ingest op copies it into the store, and the other
 * ops read it there. All counters live in the state block, which is copied to the host after each
 * step. */
#ifndef DNR_STATE_H
#define DNR_STATE_H

#include <assert.h> /* static_assert, in C and in CUDA C++ */
#include <stdint.h>

/* 64 bytes at the start of each slot; written by the trainer just before the slot is fed. */
typedef struct dnri_header {
    double lr;     /* learning rate of this step */
    int32_t first; /* 1: first micro-batch of a step, or first batch of an evaluation: sums start
                      anew */
    int32_t unused;
    int64_t stop; /* 1: this rank asks all to stop (summed over ranks by the `last` program) */
    int64_t reserved[5];
} dnri_header;

typedef struct dnri_state {
    /* sums over the micro-batches of a step, or over an evaluation; loss.fprop starts them anew
     * when header.first is set */
    double loss_sum; /* unscaled; of samples with label >= 0 */
    int64_t correct1, correct5, samples;
    /* optimizer: grad.stat writes, sgd reads, scaler.update advances */
    double grad_sqsum; /* of the unscaled gradients, when clipping */
    float loss_scale;  /* 1 where unused. PyTorch's GradScaler */
    int32_t found_inf; /* a gradient of this step is not finite; sticks where loss_scale ≤ 1 */
    int32_t growth;    /* good steps since the scale last changed */
    int32_t unused;
    int64_t steps;    /* optimizer steps attempted */
    int64_t skipped;  /* of them, skipped for overflow */
    int64_t forwards; /* training forward passes: torchvision's num_batches_tracked */
    /* algbn.stats and algbn.coef of a step's micro-batches (layers.h): the largest r of a channel, and how many took
     * the long way to their variance */
    float algbn_ratio;
    int32_t algbn_exact;
    int64_t reserved[5];
} dnri_state; /* 128 bytes */

static_assert(sizeof(dnri_header) == 64, "the header is shared with device code");
static_assert(sizeof(dnri_state) == 128, "the state is shared with device code");

/* GradScaler's constants */
#define DNRI_SCALE_INIT     65536.0f
#define DNRI_SCALE_GROWTH   2.0f
#define DNRI_SCALE_BACKOFF  0.5f
#define DNRI_SCALE_INTERVAL 2000

#endif
