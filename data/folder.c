/* folder.c: folders of class folders, and flat folders with a class map. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data.h"

#define LABEL_MAX 16777215

/* The folders that are open above one, to notice a link back to any of them. */
typedef struct above {
    const struct above *up;
    dev_t dev;
    ino_t ino;
} above;

typedef struct walk {
    dnri_index *x;
    char path[4096]; /* of what is being looked at */
    size_t root;     /* length of the root in it */
    int64_t ignored; /* files that are not pictures */
    char first[256]; /* name of the first of them */
} walk;

#define FOLDER_REMEDY "check the path and its permissions"

/* Appends "/name" (or "name" after a slash) to w->path at `length`; the new length, 0 where too long. */
static size_t push(walk *w, size_t length, const char *name)
{
    const char *slash = length && w->path[length - 1] != '/' ? "/" : "";
    int n = snprintf(w->path + length, sizeof w->path - length, "%s%s", slash, name);
    return n < 0 || (size_t)n >= sizeof w->path - length ? 0 : length + (size_t)n;
}

/* Adds all pictures at and below w->path. Names that begin with a dot are passed over. */
static dnr_status scan(walk *w, size_t length, const above *up)
{
    struct stat sb;
    DIR *d = opendir(w->path);
    if (!d || fstat(dirfd(d), &sb)) {
        dnr_status st = DNR_FAIL(DNR_EDATA, FOLDER_REMEDY, "%s: %s", w->path, strerror(errno));
        if (d)
            closedir(d);
        return st;
    }
    above here = {up, sb.st_dev, sb.st_ino};
    dnr_status st = DNR_OK;
    for (const above *a = up; a && st == DNR_OK; a = a->up)
        if (a->dev == here.dev && a->ino == here.ino)
            st = DNR_FAIL(DNR_EDATA, "remove the link", "%s is a link to a folder above it",
                          w->path);
    struct dirent *e;
    int64_t found = 0;
    while (st == DNR_OK && (errno = 0, e = readdir(d))) {
        if (e->d_name[0] == '.')
            continue;
        size_t n = push(w, length, e->d_name);
        if (!n)
            st =
                DNR_FAIL(DNR_EDATA, "use shorter folder names", "%.1000s…: path too long", w->path);
        else if (stat(w->path, &sb))
            st = errno == ENOENT && !lstat(w->path, &sb)
                     ? DNR_FAIL(DNR_EDATA, "remove the link, or restore what it points to",
                                "%s is a link to nothing", w->path)
                     : DNR_FAIL(DNR_EDATA, FOLDER_REMEDY, "%s: %s", w->path, strerror(errno));
        else if (S_ISDIR(sb.st_mode)) {
            int64_t before = w->x->n;
            st = scan(w, n, &here);
            if (st == DNR_OK && !up && w->x->n == before)
                st = DNR_FAIL(DNR_EDATA, "fill the class folder or remove it",
                              "class folder %s has no pictures", w->path);
        } else if (S_ISREG(sb.st_mode) && dnri_is_picture_name(e->d_name)) {
            st = dnri_index_add(w->x, "", w->path + w->root, 0, sb.st_size, -1);
            found++;
        } else if (!w->ignored++)
            snprintf(w->first, sizeof w->first, "%.255s", e->d_name);
        w->path[length] = 0;
    }
    if (st == DNR_OK && errno)
        st = DNR_FAIL(DNR_EDATA, FOLDER_REMEDY, "%s: %s", w->path, strerror(errno));
    closedir(d);
    return st;
}

/* ---- class maps */

/* Classes by name: their numbers are their places in the sorted list. `token[i]` is the class of entry i. */
static dnr_status number_by_name(dnri_index *x, const size_t *token);

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static dnr_status number_by_name(dnri_index *x, const size_t *token)
{
    const char **name = malloc(((size_t)x->n + 1) * sizeof *name);
    if (!name)
        return DNR_FAIL_NOMEM();
    for (int64_t i = 0; i < x->n; i++)
        name[i] = x->text + token[i];
    qsort(name, (size_t)x->n, sizeof *name, by_text);
    size_t n = 0;
    for (int64_t i = 0; i < x->n; i++)
        if (!n || strcmp(name[n - 1], name[i]))
            name[n++] = name[i];
    for (int64_t i = 0; i < x->n; i++) {
        const char *key = x->text + token[i];
        x->entry[i].label =
            (int32_t)((const char **)bsearch(&key, name, n, sizeof *name, by_text) - name);
    }
    x->base.class_names = name;
    x->base.classes = (int)n;
    return DNR_OK;
}

static bool is_number(const char *s)
{
    return *s && strspn(s, "0123456789") == strlen(s);
}

/* Lines "FILE CLASS": the class is the last word, so a file's name may have blanks. FILE may also be a
 * folder of pictures. Reads into x and gives each entry's class as a place in text. */
static dnr_status read_map(walk *w, FILE *f, const char *map, size_t **token, bool *numbers)
{
    char line[4096];
    int64_t cap = 0;
    *numbers = true;
    for (int number = 1; fgets(line, sizeof line, f); number++) {
        size_t n = strlen(line), at;
        if (n + 1 == sizeof line)
            return DNR_FAIL(DNR_EDATA, "a line is FILE CLASS", "%s:%d: the line is too long", map,
                            number);
        while (n && strchr(" \t\r\n", line[n - 1]))
            line[--n] = 0;
        if (!n || line[0] == '#')
            continue;
        char *class = line + n;
        while (class > line && !strchr(" \t", class[-1]))
            class --;
        char *end = class;
        while (end > line && strchr(" \t", end[-1]))
            end--;
        if (end == line)
            return DNR_FAIL(DNR_EDATA, "a line is FILE CLASS, such as: img_0001.jpg 65",
                            "%s:%d: \"%.200s\" has no class", map, number, class);
        *end = 0;
        size_t length = push(w, w->root, line);
        struct stat sb;
        if (!length || stat(w->path, &sb))
            return DNR_FAIL(DNR_EDATA, "correct the class map, or complete the folder",
                            "%s:%d: %s: %s", map, number, w->path,
                            length ? strerror(errno) : "path too long");
        *numbers = *numbers && is_number(class);
        DNR_TRY(dnri_index_text(w->x, class, strlen(class), &at));
        int64_t from = w->x->n;
        if (S_ISDIR(sb.st_mode))
            DNR_TRY(scan(w, length, &(above){0}));
        else
            DNR_TRY(dnri_index_add(w->x, "", w->path + w->root, 0, sb.st_size, -1));
        if (w->x->n > cap) {
            cap = 2 * w->x->n;
            size_t *more = realloc(*token, (size_t)cap * sizeof **token);
            if (!more)
                return DNR_FAIL_NOMEM();
            *token = more;
        }
        for (int64_t i = from; i < w->x->n; i++) {
            (*token)[i] = at;
            long long label = is_number(class) ? strtoll(class, NULL, 10) : -1; /* saturates */
            if (label > LABEL_MAX)
                return DNR_FAIL(DNR_EDATA, "number the classes from 0",
                                "%s:%d: class %s is out of range", map, number, class);
            w->x->entry[i].label = (int32_t)label;
        }
    }
    return ferror(f) ? DNR_FAIL(DNR_EDATA, FOLDER_REMEDY, "%s: cannot be read", map) : DNR_OK;
}

static dnr_status by_map(walk *w, const char *map)
{
    FILE *f = fopen(map, "re");
    if (!f)
        return DNR_FAIL(DNR_EDATA, "give the class map's path: a text file of lines FILE CLASS",
                        "class map %s: %s", map, strerror(errno));
    size_t *token = NULL;
    bool numbers;
    dnr_status st = read_map(w, f, map, &token, &numbers);
    if (st == DNR_OK && !numbers)
        st = number_by_name(w->x, token);
    free(token);
    fclose(f);
    return st;
}

dnr_status dnri_folder_open(const char *path, const dnr_source_opts *o, dnr_source **out)
{
    walk *w = calloc(1, sizeof *w);
    if (!w)
        return DNR_FAIL_NOMEM();
    dnr_status st = DNR_OK;
    int n =
        snprintf(w->path, sizeof w->path, "%s%s", path, path[strlen(path) - 1] == '/' ? "" : "/");
    if (n < 0 || (size_t)n >= sizeof w->path) {
        st = DNR_FAIL(DNR_EDATA, "use a shorter path", "%.200s…: path too long", path);
        goto out;
    }
    w->root = (size_t)n;
    DNR_GOTO(st, dnri_index_new(w->path, w->root, &w->x));
    DNR_GOTO(st, o->class_map ? by_map(w, o->class_map) : scan(w, w->root, NULL));
    if (!w->x->n) {
        st = DNR_FAIL(DNR_EDATA,
                      "point data.train and data.val at a folder of class folders with pictures; "
                      "tar shards are named: FOLDER/x-{000000..000009}.tar",
                      "%s holds no pictures%s%s%s", path, w->ignored ? " (but " : "", w->first,
                      w->ignored ? " …)" : "");
        goto out;
    }
    if (!o->class_map)
        DNR_GOTO(st, dnri_index_by_folder(w->x));
    if (w->ignored)
        dnri_log(DNR_LOG_INFO, "%s: left out, as no pictures by their names: %lld file%s (%s%s)",
                 path, (long long)w->ignored, w->ignored > 1 ? "s" : "", w->first,
                 w->ignored > 1 ? " …" : "");
    dnri_index *x = w->x;
    w->x = NULL;
    st = dnri_index_finish(x, o, out);
out:
    dnri_index_free(w->x);
    free(w);
    return st;
}

/* ---- pictures without labels */

static int by_name(const void *a, const void *b, void *user)
{
    return strcmp(dnri_index_name(user, a), dnri_index_name(user, b));
}

/* One path of dnr_source_files. */
static dnr_status add_path(walk *w, const char *path)
{
    struct stat sb;
    int64_t from = w->x->n;
    w->path[0] = 0;
    size_t n = push(w, 0, path);
    if (!n || stat(path, &sb))
        return DNR_FAIL(DNR_EDATA, FOLDER_REMEDY, "%.1000s: %s", path,
                        n ? strerror(errno) : "path too long");
    if (!S_ISDIR(sb.st_mode))
        return dnri_index_add(w->x, "", path, 0, sb.st_size, -1);
    DNR_TRY(scan(w, n, &(above){0}));
    if (w->x->n == from)
        return DNR_FAIL(DNR_EDATA, "give pictures, or a folder that has some",
                        "%s holds no pictures", path);
    qsort_r(w->x->entry + from, (size_t)(w->x->n - from), sizeof *w->x->entry, by_name, w->x);
    return DNR_OK;
}

dnr_status dnr_source_files(const char *const *paths, int n, dnr_source **out)
{
    walk *w = calloc(1, sizeof *w);
    if (!w)
        return DNR_FAIL_NOMEM();
    dnr_status st;
    DNR_GOTO(st, dnri_index_new("", 0, &w->x));
    for (int i = 0; i < n; i++)
        DNR_GOTO(st, add_path(w, paths[i]));
    if (!w->x->n) {
        st = DNR_FAIL(DNR_EUSAGE, "name at least one picture", "no pictures are given");
        goto out;
    }
    for (int64_t i = 0; i < w->x->n; i++)
        w->x->entry[i].label = 0;
    dnri_index *x = w->x;
    w->x = NULL;
    st = dnri_index_finish(x, &(dnr_source_opts){0}, out);
out:
    dnri_index_free(w->x);
    free(w);
    return st;
}
