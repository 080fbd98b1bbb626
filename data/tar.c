/* tar.c: sources in tar files: WebDataset shards (KEY.jpg + KEY.cls) and tars of class folders. The
 * headers are read once; pictures are then read in place, in any order. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "data.h"

#define SHARDS_MAX 100000
#define LABEL_MAX  16777215
#define COMPOUND   (-2) /* label of a picture with two extensions, until the form is known */

/* ---- x-{000..012}.tar */

static dnr_status append(char ***list, int *n, const char *a, size_t na, const char *b, size_t nb,
                         const char *c)
{
    if (!(*n & (*n - 1))) { /* room for 1, 2, 4 … */
        char **more = realloc(*list, (*n ? 2 * (size_t)*n : 1) * sizeof **list);
        if (!more)
            return DNR_FAIL_NOMEM();
        *list = more;
    }
    char *s = malloc(na + nb + strlen(c) + 1);
    if (!s)
        return DNR_FAIL_NOMEM();
    memcpy(s, a, na);
    memcpy(s + na, b, nb);
    strcpy(s + na + nb, c);
    (*list)[(*n)++] = s;
    return DNR_OK;
}

#define BRACE_REMEDY "write {FIRST..LAST}, such as x-{000000..000009}.tar, or {a,b}"

/* Each thing that the braces at `open` … `close` stand for, between what is before and after them. */
static dnr_status expand(const char *s, const char *open, const char *close, char ***list, int *n)
{
    size_t before = (size_t)(open - s);
    const char *dots = strstr(open, "..");
    if (!dots || dots > close) {
        for (const char *a = open + 1; a <= close;) {
            size_t length = strcspn(a, ",}");
            DNR_TRY(append(list, n, s, before, a, length, close + 1));
            a += length + 1;
        }
        return DNR_OK;
    }
    int width = (int)(dots - open) - 1, last = (int)(close - dots) - 2;
    size_t digits = strspn(open + 1, "0123456789"), digits2 = strspn(dots + 2, "0123456789");
    if (!width || width > 18 || last < 1 || last > 18 || digits != (size_t)width ||
        digits2 != (size_t)last)
        return DNR_FAIL(DNR_EUSAGE, BRACE_REMEDY, "%s: cannot read the range in braces", s);
    long long from = strtoll(open + 1, NULL, 10), to = strtoll(dots + 2, NULL, 10);
    if (to < from || to - from >= SHARDS_MAX)
        return DNR_FAIL(DNR_EUSAGE, BRACE_REMEDY,
                        "%s: %lld to %lld is not a range of 1 … %d shards", s, from, to,
                        SHARDS_MAX);
    if (open[1] != '0') /* {1..12}: no padding */
        width = 1;
    for (long long i = from; i <= to; i++) {
        char text[24];
        int length = snprintf(text, sizeof text, "%0*lld", width, i);
        DNR_TRY(append(list, n, s, before, text, (size_t)length, close + 1));
    }
    return DNR_OK;
}

static void free_list(char **list, int n)
{
    for (int i = 0; i < n; i++)
        free(list[i]);
    free(list);
}

dnr_status dnri_brace_expand(const char *pattern, char ***list, int *n)
{
    char **all = NULL;
    int count = 0;
    dnr_status st;
    DNR_GOTO(st, append(&all, &count, pattern, strlen(pattern), "", 0, ""));
    while (strpbrk(all[0], "{}")) { /* the first pair of braces in each string */
        char **next = NULL;
        int m = 0;
        for (int i = 0; i < count && st == DNR_OK; i++) {
            const char *open = strchr(all[i], '{'), *close = open ? strchr(open, '}') : NULL;
            if (!close || memchr(open + 1, '{', (size_t)(close - open - 1)))
                st = DNR_FAIL(DNR_EUSAGE, BRACE_REMEDY, "%s: unmatched brace", pattern);
            else
                st = expand(all[i], open, close, &next, &m);
            if (st == DNR_OK && m > SHARDS_MAX)
                st = DNR_FAIL(DNR_EUSAGE, BRACE_REMEDY, "%s: more than %d shards", pattern,
                              SHARDS_MAX);
        }
        free_list(all, count);
        all = next;
        count = m;
        if (st != DNR_OK)
            goto out;
    }
    *list = all;
    *n = count;
    return DNR_OK;
out:
    free_list(all, count);
    return st;
}

/* ---- from members to samples */

typedef struct gather {
    dnri_index *x;
    int shard;
    char prefix[4096];  /* of the names in this shard: "x-000.tar:" */
    const char *folder; /* only what lies in it; "" = everything */
    size_t folder_length;
    char key[4096];    /* of the group of members at hand: "000123" */
    int64_t picture;   /* its picture, an entry; −1 = none yet */
    int label;         /* from its .cls; −1 = none yet */
    int64_t labels;    /* .cls members so far */
    char orphan[4400]; /* the first .cls without a picture */
    int64_t twin;      /* an entry that is the second picture of its group; −1 = none */
    char seen[128];    /* a member outside `folder` */
} gather;

/* Ends a group: its label goes to its picture. */
static void finish_group(gather *g)
{
    if (g->picture >= 0)
        g->x->entry[g->picture].label = g->label;
    else if (g->label >= 0 && !g->orphan[0])
        snprintf(g->orphan, sizeof g->orphan, "%.300s%.4000s", g->prefix, g->key);
    g->key[0] = 0;
    g->picture = -1;
    g->label = -1;
}

static dnr_status read_label(gather *g, int fd, const char *name, int64_t offset, int64_t size)
{
    char text[24] = "", *end;
    ssize_t n =
        size > 0 && size < (int64_t)sizeof text ? pread(fd, text, (size_t)size, (off_t)offset) : 0;
    text[n > 0 ? n : 0] = 0;
    long long v = strtoll(text, &end, 10);
    while (*end && strchr(" \r\n", *end))
        end++;
    if (n != (ssize_t)size || end == text || *end || v < 0 || v > LABEL_MAX)
        return DNR_FAIL(DNR_EDATA, "a .cls member holds the class as digits, 0 or more",
                        "%s%s%.300s: \"%s\" is not a class", g->x->base.root, g->prefix, name,
                        text);
    if (g->label >= 0)
        return DNR_FAIL(DNR_EDATA, "give each sample one .cls", "%s%s%.300s: a second label",
                        g->x->base.root, g->prefix, name);
    g->label = (int)v;
    g->labels++;
    return DNR_OK;
}

static dnr_status on_member(void *user, int fd, const char *name, char type, int64_t offset,
                            int64_t size)
{
    gather *g = user;
    if (strncmp(name, g->folder, g->folder_length)) {
        if (!g->seen[0])
            snprintf(g->seen, sizeof g->seen, "%.127s", name);
        return DNR_OK;
    }
    const char *base = strrchr(name, '/');
    base = base ? base + 1 : name;
    const char *dot = strchr(base, '.');
    if (!dot || dot == base) /* no extension, or a hidden file */
        return DNR_OK;
    bool cls = !strcasecmp(dot, ".cls"), picture = dnri_is_picture_name(base);
    if (!cls && !picture)
        return DNR_OK;
    if (type != '0')
        return DNR_FAIL(DNR_EDATA, "pack with: tar --dereference --hard-dereference",
                        "%s%s%.300s is a link, not a file", g->x->base.root, g->prefix, name);
    size_t length = (size_t)(dot - name);
    if (length >= sizeof g->key)
        return DNR_FAIL(DNR_EDATA, "use shorter names", "%s%s%.300s…: name too long",
                        g->x->base.root, g->prefix, name);
    if (strncmp(g->key, name, length) || g->key[length]) {
        finish_group(g);
        memcpy(g->key, name, length);
        g->key[length] = 0;
    }
    if (cls)
        return read_label(g, fd, name, offset, size);
    int64_t i = g->x->n;
    DNR_TRY(dnri_index_add(g->x, g->prefix, name, offset, size, g->shard));
    g->x->entry[i].skip += (uint32_t)g->folder_length;
    if (strrchr(base, '.') != dot) /* KEY.mask.png is no sample of a WebDataset */
        g->x->entry[i].label = COMPOUND;
    else if (g->picture < 0)
        g->picture = i;
    else if (g->twin < 0) /* KEY.jpg and KEY.png: well in a class folder, but not with one label */
        g->twin = i;
    return DNR_OK;
}

/* With any .cls member it is a WebDataset; otherwise the folders are the classes. */
static dnr_status settle(gather *g, const char *path)
{
    dnri_index *x = g->x;
    if (!x->n && g->folder_length && g->seen[0])
        return DNR_FAIL(DNR_EDATA, "name a folder that is in the archive, as in x.tar:train",
                        "%s: no picture lies in %s (the archive has %s …)", path, g->folder,
                        g->seen);
    if (!x->n && !g->labels)
        return DNR_FAIL(DNR_EDATA, "a shard holds pairs of KEY.jpg and KEY.cls, or class folders",
                        "%s holds no pictures", path);
    if (!g->labels)
        return dnri_index_by_folder(x);
    if (g->twin >= 0)
        return DNR_FAIL(DNR_EDATA, "give each KEY one picture", "%s%s: a second picture of its key",
                        x->base.root, x->text + x->entry[g->twin].name);
    int64_t n = 0;
    for (int64_t i = 0; i < x->n; i++)
        if (x->entry[i].label != COMPOUND)
            x->entry[n++] = x->entry[i];
    x->n = n;
    for (int64_t i = 0; i < x->n; i++)
        if (x->entry[i].label < 0)
            return DNR_FAIL(
                DNR_EDATA, "each KEY.jpg needs its KEY.cls beside it; pack with tar --sort=name",
                "%s%s has no .cls member next to it", x->base.root, x->text + x->entry[i].name);
    if (g->orphan[0])
        return DNR_FAIL(DNR_EDATA,
                        "each KEY.cls needs its KEY.jpg beside it; pack with tar --sort=name",
                        "%s%.500s.cls has no picture next to it", x->base.root, g->orphan);
    return DNR_OK;
}

dnr_status dnri_tar_open(const char *path, const dnr_source_opts *o, dnr_source **out)
{
    dnr_status st;
    gather *g = calloc(1, sizeof *g);
    char *pattern = strdup(path), folder[1024] = "";
    if (!g || !pattern) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    char *colon = strstr(pattern, ".tar:"); /* "x.tar:train" */
    if (colon) {
        const char *f = colon + 5;
        size_t n = strlen(f);
        while (n && f[n - 1] == '/')
            n--;
        if (!n || n + 2 > sizeof folder) {
            st = DNR_FAIL(DNR_EUSAGE, "write FILE.tar:FOLDER", "%s: no folder after the colon",
                          path);
            goto out;
        }
        snprintf(folder, sizeof folder, "%.*s/", (int)n, f);
        colon[4] = 0;
    }
    /* the root is the longest folder that all shards share by name */
    size_t root = strcspn(pattern, "{");
    while (root && pattern[root - 1] != '/')
        root--;
    DNR_GOTO(st, dnri_index_new(pattern, root, &g->x));
    DNR_GOTO(st, dnri_brace_expand(pattern, &g->x->shard, &g->x->shards));
    g->folder = folder;
    g->folder_length = strlen(folder);
    g->picture = g->twin = -1;
    g->label = -1;
    for (g->shard = 0; g->shard < g->x->shards; g->shard++) {
        int n = snprintf(g->prefix, sizeof g->prefix, "%s:", g->x->shard[g->shard] + root);
        if (n < 0 || (size_t)n >= sizeof g->prefix) {
            st = DNR_FAIL(DNR_EDATA, "use shorter names", "%.200s…: path too long", path);
            goto out;
        }
        DNR_GOTO(st, dnri_tar_scan(g->x->shard[g->shard], on_member, g));
        finish_group(g);
    }
    DNR_GOTO(st, settle(g, path));
    dnri_index *x = g->x;
    g->x = NULL;
    st = dnri_index_finish(x, o, out);
out:
    if (g)
        dnri_index_free(g->x);
    free(g);
    free(pattern);
    return st;
}
