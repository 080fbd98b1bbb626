/* safetensors.c: see safetensors.h. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "safetensors.h"
#include "tensor.h"
#include "wholefile.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "the format's bytes are taken as they are");

#define HEADER_MAX (100u << 20) /* the reference reader's limit */
#define CHUNK      (1u << 16)   /* values converted at a time */

struct dnri_st_file {
    char *path;
    int fd;
    json_t *root; /* owns the tensors' names */
    dnri_st_tensor *tensors;
    int n;
};

static const struct st_type {
    const char *name;
    unsigned bytes;
    dnri_st_type type;
} TYPES[] = {
    {"F64", 8, DNRI_ST_F64},    {"F32", 4, DNRI_ST_F32},       {"F16", 2, DNRI_ST_F16},
    {"BF16", 2, DNRI_ST_BF16},  {"I64", 8, DNRI_ST_I64},       {"I32", 4, DNRI_ST_OTHER},
    {"I16", 2, DNRI_ST_OTHER},  {"I8", 1, DNRI_ST_OTHER},      {"U64", 8, DNRI_ST_OTHER},
    {"U32", 4, DNRI_ST_OTHER},  {"U16", 2, DNRI_ST_OTHER},     {"U8", 1, DNRI_ST_OTHER},
    {"BOOL", 1, DNRI_ST_OTHER}, {"F8_E4M3", 1, DNRI_ST_OTHER}, {"F8_E5M2", 1, DNRI_ST_OTHER},
};
#define N_TYPES (sizeof TYPES / sizeof *TYPES)

/* The row of a type that can be read and written: these come first, in the order of the enum. */
static const struct st_type *type_row(dnri_st_type t)
{
    return t < DNRI_ST_OTHER ? &TYPES[t] : NULL;
}

#define DAMAGED(f, ...)                                                                            \
    (DNR_FAIL(DNR_EDATA, "get the file anew, or write it again with safetensors", __VA_ARGS__),    \
     dnri_fail_context("'%s' is damaged", (f)->path))

/* ---- reading */

static dnr_status read_at(const dnri_st_file *f, void *to, size_t bytes, uint64_t offset)
{
    char *p = to;
    while (bytes > 0) {
        ssize_t n = pread(f->fd, p, bytes < (1u << 30) ? bytes : (1u << 30), (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return DNR_FAIL(DNR_EDATA, "check the disk that holds the file", "cannot read '%s': %s",
                            f->path, strerror(errno));
        if (n == 0)
            return DAMAGED(f, "it ends early, at byte %llu", (unsigned long long)offset);
        p += n;
        bytes -= (size_t)n;
        offset += (uint64_t)n;
    }
    return DNR_OK;
}

static bool printable(const char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < ' ' || *s == 0x7f)
            return false;
    return true;
}

/* `v` as an integer >= 0 */
static bool natural(const json_t *v, int64_t *out)
{
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= 0;
}

static dnr_status parse_tensor(dnri_st_file *f, const char *name, json_t *entry,
                               uint64_t data_start, uint64_t data_bytes, dnri_st_tensor *t)
{
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *span = json_object_get(entry, "data_offsets");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const struct st_type *type = NULL;
    int64_t begin, end;

    if (!*name || !printable(name))
        return DAMAGED(f, "a tensor's name is empty or holds control characters");
    for (size_t i = 0; dtype && i < N_TYPES; i++)
        if (strcmp(dtype, TYPES[i].name) == 0)
            type = &TYPES[i];
    if (!type)
        return DAMAGED(f, "tensor '%.95s' has no known dtype", name);
    if (!json_is_array(shape) || json_array_size(shape) > DNRI_ST_DIMS)
        return DAMAGED(f, "tensor '%.95s' has no shape, or one of more than %d dimensions", name,
                       DNRI_ST_DIMS);
    *t = (dnri_st_tensor){
        .name = name, .type = type->type, .ndim = (int)json_array_size(shape), .count = 1};
    int64_t bytes = type->bytes;
    for (int i = 0; i < t->ndim; i++)
        if (!natural(json_array_get(shape, (size_t)i), &t->dim[i]) ||
            __builtin_mul_overflow(t->count, t->dim[i], &t->count))
            return DAMAGED(f, "the shape of tensor '%.95s' is not possible", name);
    if (__builtin_mul_overflow(bytes, t->count, &bytes))
        return DAMAGED(f, "the shape of tensor '%.95s' is not possible", name);
    if (!json_is_array(span) || json_array_size(span) != 2 ||
        !natural(json_array_get(span, 0), &begin) || !natural(json_array_get(span, 1), &end) ||
        begin > end || (uint64_t)end > data_bytes)
        return DAMAGED(f,
                       "the offsets of tensor '%.95s' do not lie in the file's %llu bytes of data",
                       name, (unsigned long long)data_bytes);
    if (end - begin != bytes)
        return DAMAGED(f, "tensor '%.95s' has %lld bytes, its shape and dtype need %lld", name,
                       (long long)(end - begin), (long long)bytes);
    t->bytes = (size_t)bytes;
    t->offset = data_start + (uint64_t)begin;
    return DNR_OK;
}

static int by_offset(const void *a, const void *b)
{
    const dnri_st_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static dnr_status check_cover(const dnri_st_file *f, uint64_t at, uint64_t size)
{
    for (int i = 0; i < f->n; i++) {
        const dnri_st_tensor *t = &f->tensors[i];
        if (t->offset != at)
            return DAMAGED(f, "tensor '%.95s' %s", t->name,
                           t->offset < at ? "overlaps another one" : "follows a hole in the data");
        at += t->bytes;
    }
    if (at != size)
        return DAMAGED(f, "%llu bytes follow the last tensor", (unsigned long long)(size - at));
    return DNR_OK;
}

static bool texts_only(json_t *metadata)
{
    bool ok = json_is_object(metadata);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        ok = ok && json_is_string(value);
    }
    return ok;
}

static dnr_status parse_header(dnri_st_file *f, uint64_t data_start, uint64_t size)
{
    const char *name;
    json_t *entry;

    if (!json_is_object(f->root))
        return DAMAGED(f, "its header is no JSON object without repeated keys");
    f->tensors = calloc(json_object_size(f->root) + 1, sizeof *f->tensors);
    if (!f->tensors)
        return DNR_FAIL_NOMEM();
    json_object_foreach(f->root, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            if (!texts_only(entry))
                return DAMAGED(f, "its metadata is no JSON object of texts");
            continue;
        }
        DNR_TRY(parse_tensor(f, name, entry, data_start, size - data_start, &f->tensors[f->n]));
        f->n++;
    }
    qsort(f->tensors, (size_t)f->n, sizeof *f->tensors, by_offset);
    return check_cover(f, data_start, size);
}

/* Where memory runs out while jansson keeps a token that is longer than any before, it drops a byte of it and goes on. So
 * the header is read as [padding, header]: the padding is as long as any token can be, and tells whether it is whole. */
static char *put_padding(char *text, size_t length)
{
    memcpy(text, "[\"", 2);
    memset(text + 2, 'x', length);
    memcpy(text + 2 + length, "\",", 2);
    return text + length + 4;
}

static dnr_status load_padded(dnri_st_file *f, const char *text, size_t length)
{
    errno = 0;
    json_t *both = json_loadb(text, 2 * length + 5, JSON_REJECT_DUPLICATES, NULL);
    const bool lacked = both ? json_string_length(json_array_get(both, 0)) != length
                             : errno == ENOMEM; /* jansson cannot tell it from damage */
    if (json_array_size(both) == 2)
        f->root = json_incref(json_array_get(both, 1));
    json_decref(both);
    return lacked ? DNR_FAIL_NOMEM() : DNR_OK;
}

static dnr_status read_header(dnri_st_file *f)
{
    struct stat st;
    unsigned char first[8];
    uint64_t length;

    if (fstat(f->fd, &st) != 0 || !S_ISREG(st.st_mode))
        return DNR_FAIL(DNR_EDATA,
                        "name a .safetensors file, such as RUN/checkpoints/best/model.safetensors",
                        "'%s' is not an ordinary file", f->path);
    uint64_t size = (uint64_t)st.st_size;
    if (size < sizeof first)
        return DAMAGED(f, "it has only %llu bytes", (unsigned long long)size);
    DNR_TRY(read_at(f, first, sizeof first, 0));
    if (memcmp(first, "PK\3\4", 4) == 0)
        return DNR_FAIL(DNR_EDATA,
                        "convert it in Python: safetensors.torch.save_file(torch.load(FILE), OUT)",
                        "'%s' is a PyTorch archive, not a safetensors file", f->path);
    memcpy(&length, first, sizeof length);
    if (length > size - sizeof first || length > HEADER_MAX)
        return DAMAGED(
            f,
            "its header claims %llu bytes, the file has %llu: it was cut short, or is no "
            "safetensors file",
            (unsigned long long)length, (unsigned long long)size);
    char *text = malloc(2 * (size_t)length + 8);
    if (!text)
        return DNR_FAIL_NOMEM();
    char *header = put_padding(text, (size_t)length);
    dnr_status s = read_at(f, header, (size_t)length, sizeof first);
    header[length] = ']';
    if (s == DNR_OK)
        s = load_padded(f, text, (size_t)length);
    if (s == DNR_OK)
        s = parse_header(f, sizeof first + length, size);
    free(text);
    return s;
}

dnr_status dnri_st_open(const char *path, dnri_st_file **out)
{
    *out = NULL;
    dnri_st_file *f = calloc(1, sizeof *f);
    if (!f)
        return DNR_FAIL_NOMEM();
    f->path = strdup(path);
    /* O_NONBLOCK: opening a FIFO must not wait for a writer */
    f->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    dnr_status s;
    if (f->fd < 0)
        s = DNR_FAIL(DNR_EDATA, "check the path and its permissions", "cannot open '%s': %s", path,
                     strerror(errno));
    else
        s = f->path ? read_header(f) : DNR_FAIL_NOMEM();
    if (s == DNR_OK)
        *out = f;
    else
        dnri_st_close(f);
    return s;
}

void dnri_st_close(dnri_st_file *f)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    json_decref(f->root);
    free(f->tensors);
    free(f->path);
    free(f);
}

int dnri_st_count(const dnri_st_file *f)
{
    return f->n;
}

const dnri_st_tensor *dnri_st_at(const dnri_st_file *f, int i)
{
    return &f->tensors[i];
}

const dnri_st_tensor *dnri_st_find(const dnri_st_file *f, const char *name)
{
    for (int i = 0; i < f->n; i++)
        if (strcmp(f->tensors[i].name, name) == 0)
            return &f->tensors[i];
    return NULL;
}

const char *dnri_st_metadata(const dnri_st_file *f, const char *key)
{
    return json_string_value(json_object_get(json_object_get(f->root, "__metadata__"), key));
}

static void to_double(dnri_st_type type, const void *src, double *dst, size_t n)
{
    static const dnr_dtype DTYPES[] = {DNR_F64, DNR_F32, DNR_F16, DNR_BF16};
    if (type != DNRI_ST_I64) {
        dnri_to_double(DTYPES[type], src, dst, n);
        return;
    }
    const int64_t *v = src;
    for (size_t i = 0; i < n; i++)
        dst[i] = (double)v[i];
}

dnr_status dnri_st_read(const dnri_st_file *f, const dnri_st_tensor *t, double *host)
{
    const struct st_type *type = type_row(t->type);
    if (!type)
        return DNR_FAIL(DNR_EDATA, "store weights as F32, F16, BF16 or F64",
                        "tensor '%.95s' of '%s' has a dtype that weights cannot have", t->name,
                        f->path);
    void *chunk = malloc((size_t)CHUNK * type->bytes);
    dnr_status s = chunk ? DNR_OK : DNR_FAIL_NOMEM();
    for (int64_t i = 0; s == DNR_OK && i < t->count; i += CHUNK) {
        size_t n = (size_t)(t->count - i < CHUNK ? t->count - i : CHUNK);
        s = read_at(f, chunk, n * type->bytes, t->offset + (uint64_t)i * type->bytes);
        if (s == DNR_OK)
            to_double(t->type, chunk, host + i, n);
    }
    free(chunk);
    return s;
}

dnr_status dnri_st_read_raw(const dnri_st_file *f, const dnri_st_tensor *t, void *host)
{
    return read_at(f, host, t->bytes, t->offset);
}

/* ---- writing */

dnri_st_tensor dnri_st_make(const char *name, dnri_st_type type, int ndim, const int64_t *dim,
                            const void *data)
{
    dnri_st_tensor t = {.name = name, .type = type, .ndim = ndim, .count = 1, .data = data};
    for (int i = 0; i < ndim; i++) {
        t.dim[i] = dim[i];
        t.count *= dim[i];
    }
    t.bytes = (size_t)t.count * type_row(type)->bytes;
    return t;
}

/* The header's text, padded with spaces so that the data start at a multiple of 8. NULL: out of memory. */
static char *header_text(const char *const *metadata, const dnri_st_tensor *const *t, int n)
{
    json_t *root = json_object(), *meta = json_object();
    uint64_t at = 0;
    bool ok = root && meta;

    for (; ok && metadata && metadata[0]; metadata += 2)
        ok = json_object_set_new(meta, metadata[0], json_string(metadata[1])) == 0;
    ok = ok && json_object_set(root, "__metadata__", meta) == 0;
    for (int i = 0; ok && i < n; i++) {
        json_t *shape = json_array();
        for (int k = 0; ok && k < t[i]->ndim; k++)
            ok = json_array_append_new(shape, json_integer(t[i]->dim[k])) == 0;
        uint64_t end = at + t[i]->bytes;
        if (!ok) {
            json_decref(shape);
            break;
        }
        ok = json_object_set_new(root, t[i]->name,
                                 json_pack("{s:s, s:o, s:[I, I]}", "dtype",
                                           type_row(t[i]->type)->name, "shape", shape,
                                           "data_offsets", (json_int_t)at, (json_int_t)end)) == 0;
        at = end;
    }
    errno = 0;
    char *json = ok ? json_dumps(root, JSON_COMPACT) : NULL;
    if (errno == ENOMEM) { /* jansson leaves out the key that it lacked memory for, and goes on */
        free(json);
        json = NULL;
    }
    json_decref(meta);
    json_decref(root);
    if (!json)
        return NULL;
    size_t length = strlen(json), padded = (length + 7) & ~(size_t)7;
    char *text = malloc(padded + 1);
    if (text) {
        memcpy(text, json, length);
        memset(text + length, ' ', padded - length);
        text[padded] = 0;
    }
    free(json);
    return text;
}

/* Writes, and adds to the sum. */
static dnr_status put(dnri_wholefile *f, XXH64_state_t *sum, const void *data, size_t bytes)
{
    XXH64_update(sum, data, bytes);
    return dnri_wholefile_write(f, data, bytes);
}

dnr_status dnri_st_write_sum(const char *path, const char *const *metadata, const dnri_st_tensor *t,
                             int n, uint64_t *sum)
{
    /* widest type first, so that every tensor is aligned to its type */
    const dnri_st_tensor **order = malloc(((size_t)n + 1) * sizeof *order);
    int k = 0;
    for (unsigned bytes = 8; order && bytes > 0; bytes /= 2)
        for (int i = 0; i < n; i++)
            if (type_row(t[i].type)->bytes == bytes)
                order[k++] = &t[i];
    for (int i = 0; metadata && metadata[i]; i++) {
        errno = 0;
        json_t *utf8 = json_string(metadata[i]);
        json_decref(utf8);
        if (!utf8) {
            free(order);
            return errno == ENOMEM
                       ? DNR_FAIL_NOMEM()
                       : DNR_FAIL(DNR_EUSAGE, "write metadata and notes in UTF-8",
                                  "%s: its metadata %s is not UTF-8", path, metadata[i & ~1]);
        }
    }
    char *text = order ? header_text(metadata, order, n) : NULL;
    XXH64_state_t *state = XXH64_createState();
    dnri_wholefile f;
    dnr_status s = text && state ? dnri_wholefile_open(&f, path) : DNR_FAIL_NOMEM();
    if (s == DNR_OK) {
        uint64_t length = strlen(text);
        XXH64_reset(state, 0);
        s = put(&f, state, &length, sizeof length);
        if (s == DNR_OK)
            s = put(&f, state, text, (size_t)length);
        for (int i = 0; s == DNR_OK && i < n; i++)
            s = put(&f, state, order[i]->data, order[i]->bytes);
        if (s == DNR_OK)
            s = dnri_wholefile_commit(&f);
    }
    if (s == DNR_OK && sum)
        *sum = XXH64_digest(state);
    XXH64_freeState(state);
    free(text);
    free(order);
    return s;
}

dnr_status dnri_st_write(const char *path, const char *const *metadata, const dnri_st_tensor *t,
                         int n)
{
    return dnri_st_write_sum(path, metadata, t, n, NULL);
}
