/* faults.c: see faults.h. */
#include "faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* glibc's own */
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

#define CALLER __builtin_return_address(0)

static struct {
    atomic_int kind;
    long nth;
    int err;
    bool sticky, libc; /* libc: so was one that failed */
    atomic_long seen;
} armed;

/* ---- whose calls count */

enum { RANGES = 64 };
static struct {
    uintptr_t from, to;
    bool libc;
} ranges[RANGES];
static int n_ranges;

static int add_range(struct dl_phdr_info *info, size_t size, void *user)
{
    const char *base = strrchr(info->dlpi_name, '/');
    base = base ? base + 1 : info->dlpi_name;
    bool libc = !strncmp(base, "libc.so", 7);
    bool program = !*info->dlpi_name;
    if (!libc && !program && !strstr(base, "dnnrun") && !strstr(base, "jansson"))
        return 0;
    for (int i = 0; i < info->dlpi_phnum && n_ranges < RANGES; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            ranges[n_ranges].from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            ranges[n_ranges].to = ranges[n_ranges].from + info->dlpi_phdr[i].p_memsz;
            ranges[n_ranges++].libc = libc;
        }
    return 0;
}

static bool counts(const void *caller, bool libc_too, bool *libc)
{
    uintptr_t at = (uintptr_t)caller;
    for (int i = 0; i < n_ranges; i++)
        if (at >= ranges[i].from && at < ranges[i].to) {
            *libc = ranges[i].libc;
            return libc_too || !*libc;
        }
    return false;
}

/* Is it this call's turn to fail? Sets errno then. */
static bool fails(int kind, const void *caller, bool libc_too)
{
    bool libc = false;
    if (atomic_load(&armed.kind) != kind || !counts(caller, libc_too, &libc))
        return false;
    long n = atomic_fetch_add(&armed.seen, 1) + 1;
    if (armed.nth == 0 || (armed.sticky ? n < armed.nth : n != armed.nth))
        return false;
    armed.libc = armed.libc || libc;
    errno = armed.err;
    return true;
}

int faults_of_libc(void)
{
    return armed.libc;
}

void faults_arm(int kind, long nth, int err, int sticky)
{
    atomic_store(&armed.kind, 0);
    n_ranges = 0;
    dl_iterate_phdr(add_range, NULL);
    armed.nth = nth;
    armed.err = err;
    armed.sticky = sticky;
    armed.libc = false;
    atomic_store(&armed.seen, 0);
    atomic_store(&armed.kind, kind);
}

long faults_disarm(void)
{
    atomic_store(&armed.kind, 0);
    return atomic_load(&armed.seen);
}

__attribute__((constructor)) static void from_environment(void)
{
    const char *text = getenv("DNR_FAULTS");
    char kind[16], sticky[16] = "";
    long nth;
    int err;
    if (text && sscanf(text, "%15[a-z]:%ld:%d:%15s", kind, &nth, &err, sticky) >= 3)
        faults_arm(!strcmp(kind, "fs") ? FAULTS_FS : FAULTS_MEMORY, nth, err, *sticky != 0);
}

/* Modules loaded later count too. */
__attribute__((visibility("default"))) void *dlopen(const char *file, int mode)
{
    static void *(*real)(const char *, int);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "dlopen");
    int kind = atomic_exchange(&armed.kind, 0);
    void *h = real(file, mode);
    n_ranges = 0;
    dl_iterate_phdr(add_range, NULL);
    atomic_store(&armed.kind, kind);
    return h;
}

/* ---- allocations: a set of those made while armed (open addressing) */

enum { SLOTS = 1 << 20 };
static void *live[SLOTS];
static long n_live;
static atomic_flag busy = ATOMIC_FLAG_INIT;
#define GONE ((void *)1)

static size_t slot_of(const void *p)
{
    return (size_t)(((uintptr_t)p >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 44);
}

static void note(void *p, const void *caller)
{
    bool libc;
    if (!p || atomic_load(&armed.kind) != FAULTS_MEMORY || !counts(caller, true, &libc))
        return;
    while (atomic_flag_test_and_set(&busy)) {
    }
    if (n_live < SLOTS / 2) {
        size_t i = slot_of(p);
        while (live[i] && live[i] != GONE)
            i = (i + 1) % SLOTS;
        live[i] = p;
        n_live++;
    }
    atomic_flag_clear(&busy);
}

static void forget(const void *p)
{
    if (!p || n_live == 0)
        return;
    while (atomic_flag_test_and_set(&busy)) {
    }
    size_t i = slot_of(p);
    while (live[i] && live[i] != p)
        i = (i + 1) % SLOTS;
    if (live[i]) {
        live[i] = GONE;
        n_live--;
    }
    atomic_flag_clear(&busy);
}

long faults_live(void)
{
    return n_live;
}

void faults_forget(void)
{
    memset(live, 0, sizeof live);
    n_live = 0;
}

void *malloc(size_t n)
{
    void *p = fails(FAULTS_MEMORY, CALLER, true) ? NULL : __libc_malloc(n);
    note(p, CALLER);
    return p;
}

void *calloc(size_t n, size_t size)
{
    void *p = fails(FAULTS_MEMORY, CALLER, true) ? NULL : __libc_calloc(n, size);
    note(p, CALLER);
    return p;
}

void *realloc(void *old, size_t n)
{
    if (fails(FAULTS_MEMORY, CALLER, true))
        return NULL;
    forget(old);
    void *p = __libc_realloc(old, n);
    note(p, CALLER);
    return p;
}

void *aligned_alloc(size_t align, size_t n)
{
    void *p = fails(FAULTS_MEMORY, CALLER, true) ? NULL : __libc_memalign(align, n);
    note(p, CALLER);
    return p;
}

int posix_memalign(void **out, size_t align, size_t n)
{
    void *p = fails(FAULTS_MEMORY, CALLER, true) ? NULL : __libc_memalign(align, n);
    note(p, CALLER);
    if (!p)
        return ENOMEM;
    *out = p;
    return 0;
}

void free(void *p)
{
    forget(p);
    __libc_free(p);
}

/* ---- the file system */

/* The next one's function of the same name; `real` keeps it. */
#define NEXT(type, name, ...)                                                                      \
    static type (*real)(__VA_ARGS__);                                                              \
    if (!real)                                                                                     \
    *(void **)&real = dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        va_list ap;                                                                                \
        va_start(ap, flags);                                                                       \
        mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;                                    \
        va_end(ap);                                                                                \
        NEXT(int, #name, const char *, int, ...);                                                  \
        bool syncs = (flags & O_DIRECTORY) && !(flags & O_NOFOLLOW);                               \
        bool writes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) || syncs;                            \
        return writes && fails(FAULTS_FS, CALLER, false) ? -1 : real(path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)

#define FOPEN(name)                                                                                \
    FILE *name(const char *path, const char *mode)                                                 \
    {                                                                                              \
        NEXT(FILE *, #name, const char *, const char *);                                           \
        return *mode != 'r' && fails(FAULTS_FS, CALLER, false) ? NULL : real(path, mode);          \
    }
FOPEN(fopen)
FOPEN(fopen64)

int fflush(FILE *f)
{
    NEXT(int, "fflush", FILE *);
    return f && f != stdout && f != stderr && fails(FAULTS_FS, CALLER, false) ? EOF : real(f);
}

int mkdir(const char *path, mode_t mode)
{
    NEXT(int, "mkdir", const char *, mode_t);
    return fails(FAULTS_FS, CALLER, false) ? -1 : real(path, mode);
}

ssize_t write(int fd, const void *data, size_t n)
{
    NEXT(ssize_t, "write", int, const void *, size_t);
    if (fd <= 2 || !fails(FAULTS_FS, CALLER, false))
        return real(fd, data, n);
    if (n > 1 && real(fd, data, n / 2) < 0)
        return -1;
    errno = armed.err;
    return -1;
}

int fsync(int fd)
{
    NEXT(int, "fsync", int);
    if (atomic_load(&armed.kind) == FAULTS_MEMORY)
        return 0; /* thousands of them would take long */
    return fails(FAULTS_FS, CALLER, false) ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    NEXT(int, "rename", const char *, const char *);
    return fails(FAULTS_FS, CALLER, false) ? -1 : real(from, to);
}

int renameat2(int d1, const char *from, int d2, const char *to, unsigned flags)
{
    NEXT(int, "renameat2", int, const char *, int, const char *, unsigned);
    return fails(FAULTS_FS, CALLER, false) ? -1 : real(d1, from, d2, to, flags);
}

int symlink(const char *to, const char *path)
{
    NEXT(int, "symlink", const char *, const char *);
    return fails(FAULTS_FS, CALLER, false) ? -1 : real(to, path);
}
