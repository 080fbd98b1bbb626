/* index.c: the table behind sources that read files. folder.c and tar.c fill it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "data.h"

#define SAMPLE_MAX ((int64_t)1 << 30) /* bytes of one encoded picture */

bool dnri_is_picture_name(const char *name)
{
    static const char *const ext[] = {".jpg", ".jpeg", ".png",  ".ppm", ".bmp",
                                      ".pgm", ".tif",  ".tiff", ".webp"};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < sizeof ext / sizeof *ext; i++)
        if (!strcasecmp(dot, ext[i]))
            return true;
    return false;
}

static dnr_status grow(void **p, size_t need, size_t *cap, size_t elem)
{
    if (need <= *cap)
        return DNR_OK;
    size_t c = *cap ? *cap : 64;
    while (c < need)
        c *= 2;
    void *q = realloc(*p, c * elem);
    if (!q)
        return DNR_FAIL_NOMEM();
    *p = q;
    *cap = c;
    return DNR_OK;
}

dnr_status dnri_index_new(const char *root, size_t root_length, dnri_index **out)
{
    dnri_index *x = calloc(1, sizeof *x);
    char *copy = strndup(root, root_length);
    if (!x || !copy) {
        free(x);
        free(copy);
        return DNR_FAIL_NOMEM();
    }
    x->base.root = copy;
    *out = x;
    return DNR_OK;
}

void dnri_index_free(dnri_index *x)
{
    if (!x)
        return;
    for (int i = 0; i < x->shards; i++)
        free(x->shard[i]);
    free(x->shard);
    free(x->entry);
    free(x->text);
    free(x->base.class_names);
    free(x->base.root);
    free(x);
}

dnr_status dnri_index_text(dnri_index *x, const char *s, size_t length, size_t *at)
{
    DNR_TRY(grow((void **)&x->text, x->text_size + length + 1, &x->text_cap, 1));
    *at = x->text_size;
    memcpy(x->text + *at, s, length);
    x->text[*at + length] = 0;
    x->text_size += length + 1;
    return DNR_OK;
}

dnr_status dnri_index_add(dnri_index *x, const char *prefix, const char *name, int64_t offset,
                          int64_t size, int file)
{
    size_t cap = (size_t)x->cap, at, more;
    DNR_TRY(grow((void **)&x->entry, (size_t)x->n + 1, &cap, sizeof *x->entry));
    x->cap = (int64_t)cap;
    DNR_TRY(dnri_index_text(x, prefix, strlen(prefix), &at));
    x->text_size--; /* the name goes on where the prefix ends */
    DNR_TRY(dnri_index_text(x, name, strlen(name), &more));
    if (file >= 0) /* the names of a folder's files must stay as they are to be opened */
        for (char *c = x->text + at; *c; c++)
            if ((unsigned char)*c < 32 || *c == 127)
                *c = '?';
    x->entry[x->n++] = (dnri_entry){offset, size, at, (uint32_t)strlen(prefix), file, -1};
    return DNR_OK;
}

const char *dnri_index_name(const dnri_index *x, const dnri_entry *e)
{
    return x->text + e->name + e->skip;
}

/* strcmp of a and b taken as strings of these lengths */
static int compare(const char *a, size_t na, const char *b, size_t nb)
{
    int c = memcmp(a, b, na < nb ? na : nb);
    return c ? c : (na > nb) - (na < nb);
}

static size_t dir_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) : 0;
}

/* By class, then by folder, then by file. */
static int by_class(const void *pa, const void *pb, void *user)
{
    const char *a = dnri_index_name(user, pa), *b = dnri_index_name(user, pb);
    int c = compare(a, strcspn(a, "/"), b, strcspn(b, "/"));
    size_t na = dir_length(a), nb = dir_length(b);
    if (!c)
        c = compare(a, na, b, nb);
    return c ? c : strcmp(a + na, b + nb);
}

dnr_status dnri_index_by_folder(dnri_index *x)
{
    bool nested = x->n > 0;
    for (int64_t i = 0; i < x->n; i++) {
        const char *name = dnri_index_name(x, &x->entry[i]), *slash = strchr(name, '/');
        if (!slash)
            return DNR_FAIL(
                DNR_EDATA,
                "put each picture into a folder named after its class; else a flat folder needs "
                "data.class_map, and a tar KEY.cls beside each KEY.jpg",
                "%s%s lies in no class folder", x->base.root, x->text + x->entry[i].name);
        nested = nested && strchr(slash + 1, '/');
    }
    if (x->n)
        qsort_r(x->entry, (size_t)x->n, sizeof *x->entry, by_class, x);
    /* class names stand in text while it grows, so places first and pointers at the end */
    size_t *place = NULL, cap = 0, n = 0;
    dnr_status st = DNR_OK;
    for (int64_t i = 0; i < x->n; i++) {
        const char *name = dnri_index_name(x, &x->entry[i]);
        size_t length = strcspn(name, "/"), at;
        if (!n || strncmp(x->text + place[n - 1], name, length) || x->text[place[n - 1] + length]) {
            char folder[4096];
            snprintf(folder, sizeof folder, "%.*s", (int)length, name);
            DNR_GOTO(st, grow((void **)&place, n + 1, &cap, sizeof *place));
            DNR_GOTO(st, dnri_index_text(x, folder, strlen(folder), &at));
            place[n++] = at;
        }
        x->entry[i].label = (int32_t)n - 1;
    }
    if (nested && n <= 3) { /* "train", "val", "test" */
        st = DNR_FAIL(
            DNR_EDATA,
            "name the folder that holds the class folders, such as DATA/train (in a tar: "
            "x.tar:train)",
            "%s holds %s, and every picture lies at least one folder deeper: is this the folder "
            "above the class folders?",
            x->shards ? x->shard[0] : x->base.root, x->text + place[0]);
        goto out;
    }
    if (!(x->base.class_names = calloc(n + 1, sizeof *x->base.class_names))) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    for (size_t i = 0; i < n; i++)
        x->base.class_names[i] = x->text + place[i];
    x->base.classes = (int)n;
out:
    free(place);
    return st;
}

/* ---- the source made of it */

static const dnri_index *of(const dnr_source *s)
{
    return (const dnri_index *)s;
}

static const char *entry_name(const dnr_source *s, int64_t i)
{
    return of(s)->text + of(s)->entry[i].name;
}

static int entry_label(const dnr_source *s, int64_t i)
{
    return of(s)->entry[i].label;
}

static void entry_close(dnr_source *s)
{
    dnri_index_free((dnri_index *)s);
}

#define READ_REMEDY "check the disk and the file's permissions, or make the data set anew"

static dnr_status read_range(int fd, int64_t offset, int64_t size, dnri_buffer *out)
{
    if (size > SAMPLE_MAX)
        return DNR_FAIL(DNR_EDATA, "remove or shrink the picture", "%lld bytes in one picture",
                        (long long)size);
    DNR_TRY(dnri_buffer_fit(out, (size_t)size));
    for (int64_t done = 0; done < size;) {
        ssize_t r = pread(fd, out->data + done, (size_t)(size - done), (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return DNR_FAIL(DNR_EDATA, READ_REMEDY, "cannot be read: %s", strerror(errno));
        if (r == 0)
            return DNR_FAIL(DNR_EDATA, "do not change a data set while it is in use",
                            "the file has become shorter: %lld of %lld bytes are there",
                            (long long)done, (long long)size);
        done += r;
    }
    return DNR_OK;
}

static dnr_status entry_read(const dnr_source *s, int64_t i, dnri_buffer *out)
{
    const dnri_index *x = of(s);
    const dnri_entry *e = &x->entry[i];
    char path[4096];
    const char *file = path;
    if (e->file >= 0)
        file = x->shard[e->file];
    else if ((size_t)snprintf(path, sizeof path, "%s%s", s->root, x->text + e->name) >= sizeof path)
        return DNR_FAIL(DNR_EDATA, "use shorter folder names", "the path is too long");
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) /* not the picture's fault */
        return DNR_FAIL(DNR_EFAIL, "raise the limit on open files (ulimit -n)",
                        "cannot be opened: %s", strerror(errno));
    if (fd < 0)
        return DNR_FAIL(DNR_EDATA, READ_REMEDY, "cannot be opened: %s", strerror(errno));
    int64_t size = e->size;
    struct stat sb;
    if (e->file < 0 && !fstat(fd, &sb)) /* a picture may have been replaced since it was indexed */
        size = sb.st_size;
    dnr_status st = read_range(fd, e->offset, size, out);
    close(fd);
    return st;
}

dnr_status dnri_index_finish(dnri_index *x, const dnr_source_opts *o, dnr_source **out)
{
    static const dnri_source_ops ops = {entry_read, NULL, entry_name, entry_label, entry_close};
    dnr_status st = DNR_OK;
    dnr_source *s = &x->base;
    s->ops = &ops;
    s->count = x->n;
    if (s->class_names && o->classes > 0 && s->classes != o->classes) {
        char names[160];
        snprintf(names, sizeof names, s->classes > 1 ? "%.64s … %.64s" : "%.64s", s->class_names[0],
                 s->class_names[s->classes - 1]);
        st = DNR_FAIL(
            DNR_EDATA,
            "set model.classes to the number of class folders, 2 or more, which data.train and "
            "data.val must both have",
            "%s has %d class%s (%s), but %d are expected", x->shards ? x->shard[0] : s->root,
            s->classes, s->classes > 1 ? "es" : "", names, o->classes);
        goto out;
    }
    XXH3_state_t *h = XXH3_createState();
    if (!h) {
        st = DNR_FAIL_NOMEM();
        goto out;
    }
    XXH3_64bits_reset(h);
    int top = 0;
    for (int64_t i = 0; i < x->n; i++) {
        const dnri_entry *e = &x->entry[i];
        const char *name = entry_name(s, i);
        if (e->label < 0 || (o->classes > 0 && e->label >= o->classes)) {
            st = DNR_FAIL(DNR_EDATA, "correct the label, or set model.classes",
                          "%s%s has label %d, out of range for %d classes", s->root, name, e->label,
                          o->classes);
            XXH3_freeState(h);
            goto out;
        }
        top = e->label > top ? e->label : top;
        s->bytes += e->size;
        XXH3_64bits_update(h, name, strlen(name) + 1);
        XXH3_64bits_update(h, &e->size, sizeof e->size);
        XXH3_64bits_update(h, &e->label, sizeof e->label);
    }
    s->hash = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    if (!s->class_names)
        s->classes = o->classes > 0 ? o->classes : top + 1;
    *out = s;
    return DNR_OK;
out:
    dnri_index_free(x);
    return st;
}
