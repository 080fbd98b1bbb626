/* faults.h: a shared library that stands before libc and lets one call in a series fail: allocations, or what
 * writes to the file system. Linked by test_faults; other programs take it by LD_PRELOAD, and then
 *
 *     DNR_FAULTS=KIND:N:ERRNO[:sticky]      fs:17:28:sticky
 *
 * arms it from the start. Only calls made by dnnrun's own code and by jansson count (and for allocations by libc
 * on their behalf), not those of oneDNN, OpenMP or the dynamic linker. */
#ifndef DNR_FAULTS_H
#define DNR_FAULTS_H

enum {
    FAULTS_MEMORY = 1, /* malloc calloc realloc posix_memalign aligned_alloc */
    FAULTS_FS =
        2, /* open (for writing, or of a folder) mkdir write fsync rename symlink fopen (for writing)
                          fflush */
};

/* The `nth` call (from 1) of that kind fails with `err`; `sticky`: all later ones too. A failing write first
 * writes half. nth 0: none fails, calls are only counted. */
void faults_arm(int kind, long nth, int err, int sticky);
/* Ends it; calls of the kind seen since. */
long faults_disarm(void);
/* Was the failing allocation one that libc asked for itself? Some it can do without. */
int faults_of_libc(void);
/* Allocations made while armed for FAULTS_MEMORY and not freed since the last call of this. */
long faults_live(void);
void faults_forget(void);

#endif
