/* weights.h: what a model owns, in files with torchvision's names and layouts. */
#ifndef DNR_WEIGHTS_H
#define DNR_WEIGHTS_H

#include "safetensors.h"
#include "trainer.h"

/* One of the sets of values that a trainer keeps for its parameters. */
typedef enum dnri_weights {
    DNRI_OF_MODEL,    /* weights, running statistics, "NAME.num_batches_tracked" */
    DNRI_OF_EMA,      /* their averages, under the same names */
    DNRI_OF_MOMENTUM, /* of the trainable ones, as "momentum.NAME" */
} dnri_weights;

/* Writes a set and, after it, `n` tensors of the caller's; `*sum` ← XXH64 of the file. Metadata as for
 * dnri_st_write. */
dnr_status dnri_weights_write(dnr_trainer *t, dnri_weights of, const char *path,
                              const char *const *metadata, const dnri_st_tensor *more, int n,
                              uint64_t *sum);
/* Does the file hold this set, and nothing else but tensors named in `more` (NULL-terminated; may be
 * NULL)? DNR_EDATA names the first difference. */
dnr_status dnri_weights_check(const dnr_trainer *t, dnri_weights of, const dnri_st_file *f,
                              const char *path, const char *const *more);
/* Takes the values of a file that passed the check. */
dnr_status dnri_weights_read(dnr_trainer *t, dnri_weights of, const dnri_st_file *f);

#endif
