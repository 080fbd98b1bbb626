#include "datarig.h"

#include <errno.h>
#include <ftw.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[256];

void rig_fails(dnr_status st, dnr_status want, const char *text, const char *expr, const char *file,
               int line)
{
    const dnr_error *e = dnr_last_error();
    if (st == want && strstr(e->what, text) && e->remedy[0] && e->where[0])
        return;
    print_error("%s:%d: %s: status %d, wanted %d with \"%s\"\n", file, line, expr, st, want, text);
    if (st != DNR_OK)
        print_error("  it says: %s — remedy: %s\n", e->what, e->remedy);
    _fail(file, line);
}

int rig_folder_make(void **state)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dnrtest-XXXXXX", base && *base ? base : P_tmpdir);
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *sb, int type, struct FTW *ftw)
{
    return remove(path);
}

int rig_folder_remove(void **state)
{
    return nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

const char *rig_path(const char *fmt, ...)
{
    static char ring[8][1024];
    static int next;
    char *s = ring[next++ % 8];
    int n = snprintf(s, sizeof ring[0], "%s/", folder);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s + n, sizeof ring[0] - (size_t)n, fmt, ap);
    va_end(ap);
    return s;
}

void rig_put(const char *path, const void *body, size_t size)
{
    char up[1024];
    snprintf(up, sizeof up, "%s", path);
    for (char *c = up + strlen(folder) + 1; (c = strchr(c, '/')); *c++ = '/') {
        *c = 0;
        if (mkdir(up, 0777) && errno != EEXIST)
            fail_msg("%s: %s", up, strerror(errno));
    }
    FILE *f = fopen(path, "wb");
    if (!f || (size && fwrite(body, 1, size, f) != size) || fclose(f))
        fail_msg("%s: %s", path, strerror(errno));
}

bytes rig_slurp(const char *path)
{
    bytes b = {0};
    FILE *f = fopen(path, "rb");
    if (!f)
        return b;
    for (size_t cap = 65536, k;
         (b.p = realloc(b.p, b.n + cap)) && (k = fread(b.p + b.n, 1, cap, f)) > 0;)
        b.n += k;
    fclose(f);
    return b;
}

static void append(bytes *t, const void *p, size_t n)
{
    if (!n)
        return;
    t->p = realloc(t->p, t->n + n);
    assert_non_null(t->p);
    memcpy(t->p + t->n, p, n);
    t->n += n;
}

void rig_tar_sum(uint8_t *h)
{
    unsigned sum = 0;
    memset(h + 148, ' ', 8);
    for (int i = 0; i < 512; i++)
        sum += h[i];
    snprintf((char *)h + 148, 8, "%06o", sum);
}

void rig_tar_add(bytes *t, char type, const char *name, const void *body, size_t size)
{
    static const uint8_t zeros[512];
    uint8_t h[512] = {0};
    memcpy(h, name, strlen(name) < 100 ? strlen(name) : 100);
    memcpy(h + 100, "0000644", 8);
    snprintf((char *)h + 124, 12, "%011zo", size);
    h[156] = (uint8_t)type;
    memcpy(h + 257, "ustar\00000", 8);
    rig_tar_sum(h);
    append(t, h, sizeof h);
    append(t, body, size);
    append(t, zeros, (512 - size % 512) % 512);
}

void rig_tar_end(bytes *t)
{
    static const uint8_t zeros[1024];
    append(t, zeros, sizeof zeros);
}

dnri_picture rig_formula(int w, int h)
{
    dnri_picture p = {0};
    OK(dnri_picture_fit(&p, w, h));
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            for (int c = 0; c < 3; c++)
                p.rgb[(y * w + x) * 3 + c] =
                    (uint8_t)((3 * x * x + 5 * y * y + 2 * x * y * (c + 1) + 90 * c) / 16);
    return p;
}

bytes rig_bmp(int w, int h, uint8_t r, uint8_t g, uint8_t b)
{
    size_t row = ((size_t)w * 3 + 3) / 4 * 4;
    bytes f = {NULL, 54 + row * (size_t)h};
    assert_non_null(f.p = calloc(1, f.n));
    uint32_t field[] = {(uint32_t)f.n, 0, 54, 40, (uint32_t)w, (uint32_t)h, 1 | 24u << 16};
    memcpy(f.p, "BM", 2);
    memcpy(f.p + 2, field, sizeof field); /* little-endian, as the machines that run this are */
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            memcpy(f.p + 54 + row * (size_t)y + 3 * (size_t)x, (uint8_t[]){b, g, r}, 3);
    return f;
}

const char *rig_shared(void)
{
    static char path[1024];
    const char *env = getenv("DNR_TEST_DATA");
    snprintf(path, sizeof path, "%s", env && *env ? env : DNRI_SOURCE_DIR "/../shared/data");
    if (!access(path, R_OK))
        return path;
    print_message("skipped: no shared test pictures at %s (set DNR_TEST_DATA)\n", path);
    return NULL;
}

json_t *rig_golden(const char *name)
{
    char path[1024];
    json_error_t e;
    snprintf(path, sizeof path, "%s/tests/golden/%s", DNRI_SOURCE_DIR, name);
    json_t *root = json_load_file(path, 0, &e);
    if (!root)
        fail_msg("%s: %s", path, e.text);
    return root;
}

bytes rig_unhex(const char *hex)
{
    bytes b = {malloc(strlen(hex) / 2 + 1), 0};
    unsigned v;
    for (assert_non_null(b.p); sscanf(hex + 2 * b.n, "%2x", &v) == 1; b.n++)
        b.p[b.n] = (uint8_t)v;
    return b;
}

const char *rig_listing(const dnr_source *s)
{
    static char out[4096];
    size_t n = 0;
    for (int64_t i = 0; i < dnr_source_count(s); i++)
        n += (size_t)snprintf(out + n, sizeof out - n, "%s%s=%d", i ? " " : "",
                              dnr_source_sample_name(s, i), dnr_source_label(s, i));
    return out;
}
