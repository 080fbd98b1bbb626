/* source.c: which kind of data set a path names, and the getters. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data.h"

dnr_status dnri_buffer_fit(dnri_buffer *b, size_t size)
{
    if (size > b->cap) {
        size_t cap = size + size / 2;
        void *p = realloc(b->data, cap);
        if (!p)
            return DNR_FAIL_NOMEM();
        b->data = p;
        b->cap = cap;
    }
    b->size = size;
    return DNR_OK;
}

dnr_status dnri_picture_fit(dnri_picture *p, int w, int h)
{
    size_t size = (size_t)w * (size_t)h * 3;
    if (size > p->cap) {
        free(p->rgb); /* the old pixels are not wanted */
        p->cap = 0;
        if (!(p->rgb = malloc(size)))
            return DNR_FAIL_NOMEM();
        p->cap = size;
    }
    p->w = w;
    p->h = h;
    return DNR_OK;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && !strcmp(s + n - m, tail);
}

dnr_status dnr_source_open(const char *path, const dnr_source_opts *opts, dnr_source **out)
{
    static const dnr_source_opts none;
    const dnr_source_opts *o = opts ? opts : &none;
    struct stat sb;
    if (!path || !*path || !out)
        return DNR_FAIL(DNR_EUSAGE, "set data.train and data.val",
                        "no path of a data set is given");
    if (o->classes < 0 || o->synthetic_n < 0 || o->synthetic_image < 0)
        return DNR_FAIL(DNR_EUSAGE, "use 0 for the default",
                        "classes %d, synthetic_n %lld, synthetic_image %d: none may be negative",
                        o->classes, (long long)o->synthetic_n, o->synthetic_image);
    bool synthetic = !strcmp(path, "synthetic"), found = !stat(path, &sb);
    bool folder = !synthetic && found && S_ISDIR(sb.st_mode);
    if (o->class_map && !folder)
        return DNR_FAIL(DNR_EUSAGE, "leave out data.class_map, or give a flat folder of pictures",
                        "class map %s: %s is not a folder", o->class_map, path);
    if (synthetic)
        return dnri_synthetic_open(o, out);
    if (folder)
        return dnri_folder_open(path, o, out);
    if (found || strchr(path, '{') || strstr(path, ".tar:") ||
        (ends_with(path, ".tar") && !strpbrk(path, "*?")))
        return dnri_tar_open(path, o, out);
    if (strstr(path, ".tar.") && strchr(path, ':'))
        return DNR_FAIL(DNR_EDATA,
                        "unpack it to a plain .tar first: pictures are read at random places",
                        "data set %s: only FILE.tar:FOLDER names a folder in an archive", path);
    if (strpbrk(path, "*?"))
        return DNR_FAIL(DNR_EDATA, "write a range: x-{000000..000009}.tar",
                        "data set %s: there is no such file, and patterns are not expanded", path);
    return DNR_FAIL(
        DNR_EDATA,
        "give a folder of class folders, x.tar, x-{000000..000009}.tar, x.tar:FOLDER or synthetic; "
        "relative paths count from the current folder",
        "data set %s: %s", path, strerror(errno));
}

void dnr_source_close(dnr_source *src)
{
    if (src)
        src->ops->close(src);
}

int64_t dnr_source_count(const dnr_source *src)
{
    return src->count;
}

int dnr_source_classes(const dnr_source *src)
{
    return src->classes;
}

const char *dnr_source_class_name(const dnr_source *src, int label)
{
    return src->class_names && label >= 0 && label < src->classes ? src->class_names[label] : NULL;
}

const char *dnr_source_sample_name(const dnr_source *src, int64_t i)
{
    return i >= 0 && i < src->count ? src->ops->name(src, i) : NULL;
}

int dnr_source_label(const dnr_source *src, int64_t i)
{
    return i >= 0 && i < src->count ? src->ops->label(src, i) : -1;
}

uint64_t dnr_source_hash(const dnr_source *src)
{
    return src->hash;
}
