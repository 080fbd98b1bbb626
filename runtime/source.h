/* source.h: the seam to where samples come from. A source is an implementation's struct that begins
 * with dnr_source; everything it knows is found when it is opened, and its functions may be called
 * by any thread. */
#ifndef DNR_SOURCE_H
#define DNR_SOURCE_H

#include "status.h"

/* Memory that is kept from one sample to the next; all zero to begin with. */
typedef struct dnri_buffer {
    uint8_t *data;
    size_t size, cap;
} dnri_buffer;

/* An RGB picture, rows without gaps. */
typedef struct dnri_picture {
    uint8_t *rgb; /* from malloc */
    int w, h;
    size_t cap; /* bytes at rgb */
} dnri_picture;

/* Makes room for `size` bytes and sets buffer->size. */
dnr_status dnri_buffer_fit(dnri_buffer *b, size_t size);
/* Makes room for w × h pixels and sets the size. */
dnr_status dnri_picture_fit(dnri_picture *p, int w, int h);

typedef struct dnri_source_ops {
    /* The encoded bytes of sample i; NULL where `render` gives the picture itself. */
    dnr_status (*read)(const dnr_source *s, int64_t i, dnri_buffer *out);
    dnr_status (*render)(const dnr_source *s, int64_t i, dnri_picture *out);
    const char *(*name)(const dnr_source *s, int64_t i);
    int (*label)(const dnr_source *s, int64_t i);
    void (*close)(dnr_source *s); /* frees s */
} dnri_source_ops;

struct dnr_source {
    const dnri_source_ops *ops;
    char *root;               /* stands before each sample's name in messages: "data/train/" */
    int64_t count;            /* samples; at least 1 */
    int64_t bytes;            /* encoded, all samples together; 0 where there is no encoded form */
    int classes;              /* labels are 0 … classes − 1 */
    const char **class_names; /* [classes], or NULL where unknown */
    uint64_t hash;
};

#endif
