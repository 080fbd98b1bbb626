/* safetensors.h: reader and writer of the safetensors format:
 *
 *     [ header length, u64 little-endian | header, JSON | tensors, little-endian ]
 *     {"name": {"dtype": "F32", "shape": [64, 3, 7, 7], "data_offsets": [begin, end]}, …,
 *      "__metadata__": {"key": "text"}}
 *
 * A file is trusted for nothing: lengths, shapes, offsets and types are checked before anything is
 * read. As in the reference reader, the tensors must cover the bytes after the header without hole
 * or overlap. */
#ifndef DNR_SAFETENSORS_H
#define DNR_SAFETENSORS_H

#include "status.h"

#define DNRI_ST_DIMS 8

typedef enum dnri_st_type {
    DNRI_ST_F64,
    DNRI_ST_F32,
    DNRI_ST_F16,
    DNRI_ST_BF16,
    DNRI_ST_I64,
    DNRI_ST_OTHER, /* a type of the format that dnri_st_read does not convert */
} dnri_st_type;

typedef struct dnri_st_tensor {
    const char *name;
    dnri_st_type type;
    int ndim;
    int64_t dim[DNRI_ST_DIMS];
    int64_t count; /* elements */
    size_t bytes;
    const void *data; /* writing: the values; reading: NULL */
    uint64_t offset;  /* reading: from the start of the file */
} dnri_st_tensor;

/* ---- reading */
typedef struct dnri_st_file dnri_st_file;

/* DNR_EDATA, naming the file and what is wrong with it, where it is missing or damaged. */
dnr_status dnri_st_open(const char *path, dnri_st_file **out);
void dnri_st_close(dnri_st_file *f);
int dnri_st_count(const dnri_st_file *f);
const dnri_st_tensor *dnri_st_at(const dnri_st_file *f, int i); /* in the order of the data */
const dnri_st_tensor *dnri_st_find(const dnri_st_file *f, const char *name); /* NULL: none */
const char *dnri_st_metadata(const dnri_st_file *f, const char *key);        /* NULL: none */
/* All values of a tensor as doubles. */
dnr_status dnri_st_read(const dnri_st_file *f, const dnri_st_tensor *t, double *host);
/* Its bytes as they are. */
dnr_status dnri_st_read_raw(const dnri_st_file *f, const dnri_st_tensor *t, void *host);

/* ---- writing */
/* Fills the derived fields of a tensor. */
dnri_st_tensor dnri_st_make(const char *name, dnri_st_type type, int ndim, const int64_t *dim,
                            const void *data);
/* Writes whole or not at all. `metadata`: pairs of key and text, NULL-terminated; may be NULL. */
dnr_status dnri_st_write(const char *path, const char *const *metadata, const dnri_st_tensor *t,
                         int n);
/* The same; `*sum` (may be NULL) ← XXH64 of all that was written. */
dnr_status dnri_st_write_sum(const char *path, const char *const *metadata, const dnri_st_tensor *t,
                             int n, uint64_t *sum);

#endif
