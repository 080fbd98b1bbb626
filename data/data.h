/* data.h: from a path to batches. Each stage is a function of its inputs alone:
 *
 *     source.c     path → samples      (folder.c, tar.c over index.c; synthetic.c)
 *     order.c      position → epoch, sample
 *     decode.c     bytes → RGB picture
 *     augment.c    (picture size, seed, epoch, sample) → view
 *     resize.c     picture, view → pixels
 *     loader.c     threads that carry samples through these into slots; badlist.c, cache.c beside it */
#ifndef DNR_DATA_H
#define DNR_DATA_H

#include "rng.h"
#include "source.h"

/* ---- sources */

/* Tables of the sources that read files: samples are ranges of files. */
typedef struct dnri_entry {
    int64_t offset, size; /* in its file; size at the time of indexing */
    size_t name;          /* in text */
    uint32_t skip;        /* bytes of the name before "CLASS/…/FILE" */
    int32_t file;         /* shard; -1 = the name is the file's path */
    int32_t label;
} dnri_entry;

typedef struct dnri_index {
    dnr_source base;
    char *text; /* all strings, each ended by 0 */
    size_t text_size, text_cap;
    dnri_entry *entry;
    int64_t n, cap;
    char **shard; /* paths */
    int shards;
} dnri_index;

/* `root` ends in '/' or is empty. */
dnr_status dnri_index_new(const char *root, size_t root_length, dnri_index **out);
void dnri_index_free(dnri_index *x);
/* Appends a string and gives its place in text. */
dnr_status dnri_index_text(dnri_index *x, const char *s, size_t length, size_t *at);
/* Appends an entry named prefix + name; label −1. Control characters of the name become '?'. */
dnr_status dnri_index_add(dnri_index *x, const char *prefix, const char *name, int64_t offset,
                          int64_t size, int file);
const char *dnri_index_name(const dnri_index *x, const dnri_entry *e); /* after `skip` bytes */
/* Labels by the first folder of each name, sorted by code point, as torchvision's ImageFolder; sets the
 * order of the samples and the class names. */
dnr_status dnri_index_by_folder(dnri_index *x);
/* Checks labels and classes (`o->classes` > 0: folders must match it, numbers must lie below it),
 * hashes, and turns the index into a source. On failure the index is freed. */
dnr_status dnri_index_finish(dnri_index *x, const dnr_source_opts *o, dnr_source **out);

/* Has the name an extension that torchvision's ImageFolder takes for a picture? */
bool dnri_is_picture_name(const char *name);

dnr_status dnri_folder_open(const char *path, const dnr_source_opts *o, dnr_source **out);
/* `path`: "x.tar", "x-{000..123}.tar", each with or without ":folder". */
dnr_status dnri_tar_open(const char *path, const dnr_source_opts *o, dnr_source **out);
dnr_status dnri_synthetic_open(const dnr_source_opts *o, dnr_source **out);

/* One member of a tar. `type` is '0' (file), '1' or '2' (links); others are not reported. */
typedef dnr_status (*dnri_tar_member_fn)(void *user, int fd, const char *name, char type,
                                         int64_t offset, int64_t size);
/* Walks the headers of a tar (v7, ustar, GNU, pax). Anything wrong in it is DNR_EDATA. */
dnr_status dnri_tar_scan(const char *path, dnri_tar_member_fn fn, void *user);
/* "x-{00..12}.tar" → 13 strings; also "{a,b}". Free each and the list. */
dnr_status dnri_brace_expand(const char *pattern, char ***list, int *n);

/* ---- order */

typedef struct dnri_order {
    int64_t n;
    uint64_t seed;
    bool shuffle;
    uint32_t *perm[2]; /* permutations of even and odd epochs */
    int64_t epoch[2];  /* which; −1 = none yet */
} dnri_order;

dnr_status dnri_order_open(int64_t n, uint64_t seed, bool shuffle, dnri_order *out);
void dnri_order_close(dnri_order *o);
/* Position p of the stream is element p mod n of permutation p div n. Not for several threads at once. */
void dnri_order_at(dnri_order *o, int64_t position, int64_t *epoch, int64_t *sample);
/* The sample that stands in for a bad one at the given attempt (from 0). */
int64_t dnri_order_substitute(const dnri_order *o, int64_t epoch, int64_t sample, int attempt);

/* What random numbers are drawn for: the first word of their key. */
enum { DNRI_DRAW_ORDER = 1, DNRI_DRAW_SUBSTITUTE, DNRI_DRAW_AUGMENT, DNRI_DRAW_SYNTHETIC };

/* ---- pictures */

/* JPEG, PNG or BMP by its first bytes to 8-bit RGB: gray is copied to three channels, alpha dropped,
 * 16-bit samples keep their high byte, CMYK is converted as Pillow does, EXIF orientation is not applied.
 * Anything doubtful is DNR_EDATA: there are no half-decoded pictures. */
dnr_status dnri_decode(const uint8_t *bytes, size_t size, int64_t max_pixels, dnri_picture *out);
dnr_status dnri_decode_jpeg(const uint8_t *bytes, size_t size, int64_t max_pixels,
                            dnri_picture *out);
/* Is a picture of this size allowed? */
dnr_status dnri_decode_check(int64_t w, int64_t h, int64_t max_pixels);

/* A rectangle of a picture, resized, seen through a window that may stick out (black there). */
typedef struct dnri_view {
    int x, y, w, h; /* rectangle of the picture */
    int64_t rw, rh; /* size it is resized to */
    int64_t ox, oy; /* upper left corner of the window in the resized rectangle */
    bool flip;      /* mirror the window */
} dnri_view;

/* How sample `sample` of `epoch` is seen, given its size. A pure function. */
dnri_view dnri_augment(const dnr_loader_opts *o, int w, int h, int64_t epoch, int64_t sample);

/* Scratch memory of one thread. */
typedef struct dnri_scratch {
    dnri_buffer weights, rows, sums;
} dnri_scratch;
void dnri_scratch_free(dnri_scratch *s);

/* Renders a side × side window. The filter is Pillow's antialiased bilinear: two 8-bit passes. */
dnr_status dnri_resize(const dnri_picture *p, const dnri_view *v, int side, dnri_scratch *s,
                       uint8_t *out);

/* ---- beside the loader */

/* Decoded pictures of a small data set. */
typedef struct dnri_cache dnri_cache;
/* *out = NULL where the data set is too large to be worth it. */
dnr_status dnri_cache_open(const dnr_source *src, int64_t budget, dnri_cache **out);
void dnri_cache_close(dnri_cache *c);
const dnri_picture *dnri_cache_get(dnri_cache *c, int64_t i); /* NULL: not there. Any thread */
void dnri_cache_put(dnri_cache *c, int64_t i, const dnri_picture *p); /* copies; any thread */

/* Bad samples met, sorted by sample. The caller locks. */
typedef struct dnri_bad {
    int64_t sample, times;
    char *reason;
} dnri_bad;
typedef struct dnri_badlist {
    dnri_bad *bad;
    int64_t n, cap;
    dnr_bad_sample *report;
} dnri_badlist;
/* Counts one; *fresh: met for the first time. */
dnr_status dnri_badlist_add(dnri_badlist *b, int64_t sample, const char *reason, bool *fresh);
/* A copy for the user; NULL when empty or out of memory. */
const dnr_bad_sample *dnri_badlist_report(dnri_badlist *b, const dnr_source *src);
void dnri_badlist_free(dnri_badlist *b);

#endif
