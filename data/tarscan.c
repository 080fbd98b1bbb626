/* tarscan.c: walks the headers of a tar file. It trusts nothing in them. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data.h"

#define BLOCK  512
#define EXTRA  65536 /* longest GNU long name or pax header that is accepted, bytes */
#define REMEDY "give a folder or a tar; tar --format=pax -cf x.tar FOLDER makes one anew"

typedef struct header { /* POSIX ustar; all text */
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, linkname[100];
    char magic[6], version[2], uname[32], gname[32], major[8], minor[8], prefix[155], pad[12];
} header;
_Static_assert(sizeof(header) == BLOCK, "a tar header is one block");

typedef struct reader {
    int fd;
    const char *path;
    int64_t size;        /* of the file */
    uint8_t chunk[8192]; /* small members need one read for several blocks */
    int64_t at;          /* where the chunk lies in the file */
    size_t have;
} reader;

static dnr_status read_at(reader *r, int64_t at, void *dst, size_t n)
{
    if (at < r->at || at + (int64_t)n > r->at + (int64_t)r->have) {
        r->at = at;
        for (r->have = 0; r->have < sizeof r->chunk;) {
            ssize_t k = pread(r->fd, r->chunk + r->have, sizeof r->chunk - r->have,
                              (off_t)(at + (int64_t)r->have));
            if (k < 0 && errno != EINTR)
                return DNR_FAIL(DNR_EDATA, "check the disk", "%s: cannot be read: %s", r->path,
                                strerror(errno));
            if (k == 0)
                break;
            r->have += k > 0 ? (size_t)k : 0;
        }
        if (r->have < n)
            return DNR_FAIL(DNR_EDATA, REMEDY, "%s: truncated at byte %lld", r->path,
                            (long long)r->size);
    }
    memcpy(dst, r->chunk + (at - r->at), n);
    return DNR_OK;
}

/* Octal digits, or a big-endian number after a byte 0x80 (GNU). −1 where it is neither. */
static int64_t number(const char *field, size_t n)
{
    const uint8_t *p = (const uint8_t *)field;
    int64_t v = 0;
    if (p[0] & 0x80) {
        if (p[0] != 0x80)
            return -1;
        for (size_t i = 1; i < n; i++) {
            if (v >> 55)
                return -1;
            v = v << 8 | p[i];
        }
        return v;
    }
    size_t i = 0, digits = 0;
    while (i < n && p[i] == ' ')
        i++;
    for (; i < n && p[i] >= '0' && p[i] <= '7'; i++, digits++)
        v = v << 3 | (p[i] - '0');
    return digits && (i == n || p[i] == ' ' || p[i] == 0) ? v : -1;
}

/* The sum of all bytes with those of the sum itself taken as blanks; some old tars sum signed bytes. */
static bool sum_is_right(const header *h)
{
    const uint8_t *p = (const uint8_t *)h;
    int64_t u = 0, s = 0, want = number(h->sum, sizeof h->sum);
    for (size_t i = 0; i < BLOCK; i++) {
        bool blank = i >= offsetof(header, sum) && i < offsetof(header, type);
        u += blank ? ' ' : p[i];
        s += blank ? ' ' : (int8_t)p[i];
    }
    return want == u || want == s;
}

/* The body of a 'L', 'K' or 'x' header as a string. */
static dnr_status body(reader *r, int64_t at, int64_t size, char **out)
{
    *out = NULL;
    if (size > EXTRA)
        return DNR_FAIL(DNR_EDATA, REMEDY, "%s: a name of %lld bytes at byte %lld", r->path,
                        (long long)size, (long long)at);
    char *s = malloc((size_t)size + 1);
    if (!s)
        return DNR_FAIL_NOMEM();
    for (int64_t done = 0; done < size;) {
        int64_t n = size - done < BLOCK ? size - done : BLOCK;
        dnr_status st = read_at(r, at + done, s + done, (size_t)n);
        if (st != DNR_OK) {
            free(s);
            return st;
        }
        done += n;
    }
    s[size] = 0;
    *out = s;
    return DNR_OK;
}

/* Records "LENGTH key=value\n": takes path and size, and notes sparse files. False where malformed. */
static bool pax(char *s, size_t n, char **path, int64_t *size, bool *sparse)
{
    while (n) {
        char *end;
        if (*s < '1' || *s > '9')
            return false;
        errno = 0;
        unsigned long length = strtoul(s, &end, 10);
        size_t used = (size_t)(end - s);
        if (errno || *end != ' ' || length > n || length < used + 4 || s[length - 1] != '\n')
            return false;
        s[length - 1] = 0;
        char *key = end + 1, *value = memchr(key, '=', length - used - 2);
        if (!value)
            return false;
        *value++ = 0;
        if (!strcmp(key, "path")) {
            free(*path);
            if (!(*path = strdup(value)))
                return false;
        } else if (!strcmp(key, "size")) {
            if (*value < '0' || *value > '9')
                return false;
            *size = strtoll(value, &end, 10); /* saturates: beyond the end of any file */
            if (*end)
                return false;
        } else if (!strncmp(key, "GNU.sparse.", 11))
            *sparse = true;
        s += length;
        n -= length;
    }
    return true;
}

static dnr_status check_magic(reader *r)
{
    static const struct {
        uint8_t magic[4], n;
        const char *text;
    } packed[] = {{{0x1f, 0x8b}, 2, "gzip: unpack it with gzip -dk"},
                  {{0x28, 0xb5, 0x2f, 0xfd}, 4, "zstd: unpack it with zstd -dk"},
                  {{0xfd, '7', 'z', 'X'}, 4, "xz: unpack it with xz -dk"},
                  {{'B', 'Z', 'h'}, 3, "bzip2: unpack it with bzip2 -dk"},
                  {{'P', 'K', 3, 4}, 4, "zip: make a tar of it"}};
    uint8_t head[4] = {0};
    if (r->size >= 4)
        DNR_TRY(read_at(r, 0, head, 4));
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (!memcmp(head, packed[i].magic, packed[i].n))
            return DNR_FAIL(
                DNR_EDATA,
                "unpack the archive to a plain .tar first: pictures are read at random places",
                "%s is compressed (%s)", r->path, packed[i].text);
    if (r->size < BLOCK)
        return DNR_FAIL(DNR_EDATA, REMEDY, "%s: not a tar file (%lld bytes)", r->path,
                        (long long)r->size);
    return DNR_OK;
}

/* What the headers before a member say about it. */
typedef struct extra {
    char *name;
    int64_t size; /* −1: nothing */
    bool sparse;
} extra;

/* A name from its field, which need not be ended. */
static void plain_name(const header *h, char name[272])
{
    if (!memcmp(h->magic, "ustar", 6) &&
        h->prefix[0]) /* GNU's magic is "ustar " and has no prefix */
        snprintf(name, 272, "%.155s/%.100s", h->prefix, h->name);
    else
        snprintf(name, 272, "%.100s", h->name);
}

static dnr_status member(reader *r, const header *h, int64_t at, int64_t size, const extra *more,
                         dnri_tar_member_fn fn, void *user)
{
    char field[272];
    plain_name(h, field);
    const char *name = more->name ? more->name : field;
    while (name[0] == '.' && name[1] == '/')
        name += 2;
    size_t n = strlen(name);
    if (h->type == 'S' || more->sparse)
        return DNR_FAIL(DNR_EDATA, "pack without tar's --sparse",
                        "%s: %.200s is stored as a sparse file", r->path, name);
    if (!n || name[n - 1] == '/') /* old tars mark folders so */
        return DNR_OK;
    if (h->type == '0' || h->type == 0 || h->type == '7')
        return fn(user, r->fd, name, '0', at, size);
    if (h->type == '1' || h->type == '2')
        return fn(user, r->fd, name, h->type, at, 0);
    return DNR_OK;
}

static dnr_status scan(reader *r, extra *more, dnri_tar_member_fn fn, void *user)
{
    DNR_TRY(check_magic(r));
    int64_t at = 0;
    while (at < r->size) {
        header h;
        DNR_TRY(read_at(r, at, &h, BLOCK));
        if (!h.name[0] && !memcmp(&h, (char *)&h + 1, BLOCK - 1))
            return DNR_OK; /* a block of zeros ends the archive */
        if (!sum_is_right(&h))
            return DNR_FAIL(DNR_EDATA, REMEDY, "%s: %s at byte %lld", r->path,
                            at ? "damaged header" : "not a tar file: no header", (long long)at);
        int64_t size = number(h.size, sizeof h.size);
        bool file = h.type == '0' || h.type == 0 || h.type == '7' || h.type == 'S';
        if (file && more->size >= 0)
            size = more->size;
        if (h.type >= '1' && h.type <= '6')
            size = 0; /* links, devices and folders have no data, whatever the field says */
        at += BLOCK;
        if (size < 0 || size > r->size - at)
            return DNR_FAIL(DNR_EDATA, "copy or make the archive anew: it is truncated or damaged",
                            "%s: the member at byte %lld says %lld bytes, but %lld are left",
                            r->path, (long long)at - BLOCK, (long long)size,
                            (long long)(r->size - at));
        if (h.type == 'L' || h.type == 'x') {
            char *text = NULL;
            DNR_TRY(body(r, at, size, &text));
            if (h.type == 'L') {
                free(more->name);
                more->name = text;
            } else {
                bool good = pax(text, (size_t)size, &more->name, &more->size, &more->sparse);
                free(text);
                if (!good)
                    return DNR_FAIL(DNR_EDATA, REMEDY, "%s: malformed pax header at byte %lld",
                                    r->path, (long long)at - BLOCK);
            }
        } else if (h.type != 'K' && h.type != 'g') {
            DNR_TRY(member(r, &h, at, size, more, fn, user));
            free(more->name);
            *more = (extra){NULL, -1, false};
        }
        at += (size + BLOCK - 1) / BLOCK * BLOCK;
    }
    if (at > r->size)
        return DNR_FAIL(DNR_EDATA, "copy or make the archive anew",
                        "%s: truncated within its last block", r->path);
    dnri_log(DNR_LOG_WARN, "%s: no end mark; was the archive cut off?", r->path);
    return DNR_OK;
}

dnr_status dnri_tar_scan(const char *path, dnri_tar_member_fn fn, void *user)
{
    reader *r = calloc(1, sizeof *r);
    if (!r)
        return DNR_FAIL_NOMEM();
    struct stat sb;
    extra more = {NULL, -1, false};
    dnr_status st;
    r->path = path;
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &sb))
        st = DNR_FAIL(DNR_EDATA, "check the path", "%s: %s", path, strerror(errno));
    else if (!S_ISREG(sb.st_mode))
        st = DNR_FAIL(DNR_EDATA, "give a tar file or a folder", "%s is not a regular file", path);
    else {
        r->size = sb.st_size;
        st = scan(r, &more, fn, user);
    }
    if (r->fd >= 0)
        close(r->fd);
    free(more.name);
    free(r);
    return st;
}
