/* slot.h: layout of one batch in pinned host memory, and, byte for byte, in its device staging:
 *
 *     [ dnri_header, 64 B | labels int32[batch], padded to 64 B | pixels uint8[batch, h, w, 3] ] */
#ifndef DNR_SLOT_H
#define DNR_SLOT_H

#include <stddef.h>
#include "state.h"

static inline size_t dnri_slot_labels(void)
{
    return sizeof(dnri_header);
}
static inline size_t dnri_slot_pixels(int64_t batch)
{
    return dnri_slot_labels() + (((size_t)batch * 4 + 63) & ~(size_t)63);
}
static inline size_t dnri_slot_bytes(int64_t batch, int64_t h, int64_t w)
{
    return dnri_slot_pixels(batch) + (size_t)batch * (size_t)h * (size_t)w * 3;
}

#endif
