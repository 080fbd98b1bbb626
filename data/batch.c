/* batch.c: batches of the caller's own. */
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "slot.h"

dnr_status dnr_batch_new(dnr_device *dev, int64_t batch, int image, dnr_batch *out)
{
    *out = (dnr_batch){0};
    if (batch < 1 || batch > 1 << 24 || image < 1 || image > 16384)
        return DNR_FAIL(DNR_EUSAGE, "use a batch of 1 or more and pictures of 1 … 16384 pixels",
                        "batch %lld, image %d", (long long)batch, image);
    size_t bytes = dnri_slot_bytes(batch, image, image);
    void *slot = NULL;
    if (dev)
        DNR_TRY(dev->be->alloc_host(dev, bytes, &slot));
    else if (!posix_memalign(&slot, 256, bytes))
        memset(slot, 0, bytes);
    if (!slot)
        return DNR_FAIL(DNR_EMEM, "lower train.batch", "no memory for a batch of %zu MiB",
                        bytes >> 20);
    *out = (dnr_batch){.slot = slot,
                       .labels = (int32_t *)((char *)slot + dnri_slot_labels()),
                       .pixels = (uint8_t *)slot + dnri_slot_pixels(batch),
                       .bytes = bytes};
    for (int64_t i = 0; i < batch; i++)
        out->labels[i] = -1;
    return DNR_OK;
}

void dnr_batch_free(dnr_device *dev, dnr_batch *b)
{
    if (dev && b->slot)
        dev->be->free_host(dev, b->slot);
    else
        free(b->slot);
    *b = (dnr_batch){0};
}
