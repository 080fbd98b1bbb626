/* loader.h: the loader's state, shared by loader.c (what the caller sees) and worker.c (the threads). */
#ifndef DNR_LOADER_H
#define DNR_LOADER_H

#include <pthread.h>
#include <stdatomic.h>

#include "backend.h"
#include "data.h"
#include "slot.h"

typedef enum dnri_slot_state { SLOT_FREE, SLOT_FILLING, SLOT_READY, SLOT_TAKEN } dnri_slot_state;

/* One batch: claimed in chunks by the workers, delivered in order of `batch`. */
typedef struct dnri_slot {
    uint8_t *memory;
    dnri_slot_state state;
    int64_t batch;           /* of this rank, from 0 */
    int64_t position;        /* of its first sample in the stream */
    int64_t *epoch, *sample; /* [opts.batch]; sample −1: none */
    int64_t claimed, done;   /* samples given out, and finished */
} dnri_slot;

typedef enum dnri_stage { STAGE_IDLE, STAGE_READ, STAGE_DECODE, STAGE_AUGMENT } dnri_stage;

typedef struct dnri_worker {
    struct dnr_loader *l;
    pthread_t thread;
    dnri_buffer bytes;
    dnri_picture picture;
    dnri_scratch scratch;
    /* for the watchdog */
    _Atomic int stage;
    _Atomic int64_t sample;
} dnri_worker;

struct dnr_loader {
    dnr_source *src;
    dnr_device *dev;
    dnr_loader_opts o; /* with defaults filled in */
    dnri_cache *cache;
    int64_t rounds; /* batches of this rank in a validation pass */
    int64_t chunk;  /* samples claimed at once */
    double wait_s;
    _Atomic bool stop; /* workers leave as soon as they see it */

    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work;  /* a slot became free, or the workers are to leave */
    pthread_cond_t event; /* a slot became ready, a worker failed, went idle or left */
    dnri_order order;
    dnri_slot *slot;
    int slots;
    int64_t begun;     /* batches handed to the workers so far */
    int64_t delivered; /* batches handed to the caller so far */
    bool drain;        /* no new claims: a rewind waits for the workers */
    int busy, alive;   /* workers inside a chunk; workers not yet gone */
    bool failed;
    dnr_error error; /* the first failure */
    dnri_badlist bad;

    dnri_worker *worker;
};

void *dnri_worker_main(void *worker);
const char *dnri_stage_name(dnri_stage s);

#endif
