/* datarig.h: files for tests of data/: a folder that vanishes, tars byte by byte, pictures by formula. */
#ifndef DNR_DATARIG_H
#define DNR_DATARIG_H

#include "rig.h"
#include "../data/data.h"

/* Expects failure `status` with `text` in its message. */
#define FAILS(expr, status, text) rig_fails((expr), (status), (text), #expr, __FILE__, __LINE__)
void rig_fails(dnr_status st, dnr_status want, const char *text, const char *expr, const char *file,
               int line);

/* Names and labels of a source as "name=label name=label …". */
const char *rig_listing(const dnr_source *s);

/* Group fixtures: an empty temporary folder, and its removal. */
int rig_folder_make(void **state);
int rig_folder_remove(void **state);
/* "FOLDER/…" as printf makes it; good until eight calls later. */
const char *rig_path(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Writes a file, and the folders above it. */
void rig_put(const char *path, const void *bytes, size_t size);

/* Bytes that grow. */
typedef struct bytes {
    uint8_t *p;
    size_t n;
} bytes;
bytes rig_slurp(const char *path); /* p = NULL: no such file */

/* A tar, member by member: ustar headers; `type` '0' and others. */
void rig_tar_add(bytes *t, char type, const char *name, const void *body, size_t size);
void rig_tar_sum(uint8_t *header); /* sets the checksum anew */
void rig_tar_end(bytes *t);

/* The picture that tests/golden/pictures.py calls formula. */
dnri_picture rig_formula(int w, int h);
/* A w × h BMP of one colour. */
bytes rig_bmp(int w, int h, uint8_t r, uint8_t g, uint8_t b);

/* The folder of shared test pictures ($DNR_TEST_DATA, or shared/data beside the source folder); NULL where
 * there is none. */
const char *rig_shared(void);

/* tests/golden/NAME */
typedef struct json_t json_t;
json_t *rig_golden(const char *name);
/* Hexadecimal text to bytes. */
bytes rig_unhex(const char *hex);

#endif
