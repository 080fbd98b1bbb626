/* test_safetensors.c: files go round, hostile ones are refused, and a full disk leaves nothing behind. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "safetensors.h"

static char folder[200];

static const char *in_folder(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int files_in(const char *path)
{
    int n = 0;
    DIR *d = opendir(path);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static int make_folder(void **unused)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder - 8, "%s/dnnrun-safetensors-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **unused)
{
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.')
            unlink(in_folder(e->d_name));
    if (d)
        closedir(d);
    return rmdir(folder);
}

static void put(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static size_t get(const char *path, char *buf, size_t room)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(buf, 1, room, f);
    fclose(f);
    return n;
}

/* A file of a header text and `data` bytes of zeros; returns its path. */
static const char *made(const char *header, size_t data)
{
    char buf[4096] = {0};
    uint64_t n = strlen(header);
    assert_true(8 + n + data <= sizeof buf);
    memcpy(buf, &n, 8);
    memcpy(buf + 8, header, n);
    put(in_folder("made"), buf, 8 + n + data);
    return in_folder("made");
}

/* ---- going round */

static const double D[] = {1.5, -2.25, 1e300};
static const float F[] = {1, 2, 3, 4, 5, -0.0f};
static const uint16_t H[] = {0x3c00, 0xc000, 0x7c00}; /* 1, -2, inf in fp16 */
static const uint16_t B[] = {0x3f80, 0xc000, 0x7f80}; /* the same in bf16 */
static const int64_t I[] = {7};

static dnr_status write_sample(const char *path)
{
    static const char *const meta[] = {"format", "pt", "architecture", "résnet", NULL};
    dnri_st_tensor t[] = {
        dnri_st_make("half", DNRI_ST_F16, 1, (int64_t[]){3}, H),
        dnri_st_make("float", DNRI_ST_F32, 2, (int64_t[]){2, 3}, F),
        dnri_st_make("brain", DNRI_ST_BF16, 1, (int64_t[]){3}, B),
        dnri_st_make("count", DNRI_ST_I64, 0, NULL, I),
        dnri_st_make("empty", DNRI_ST_F32, 2, (int64_t[]){0, 5}, F),
        dnri_st_make("double", DNRI_ST_F64, 1, (int64_t[]){3}, D),
    };
    return dnri_st_write(path, meta, t, sizeof t / sizeof *t);
}

static void check_values(const dnri_st_file *f, const char *name, int n, const double *want)
{
    double got[8];
    const dnri_st_tensor *t = dnri_st_find(f, name);
    assert_non_null(t);
    assert_int_equal(t->count, n);
    assert_int_equal(dnri_st_read(f, t, got), DNR_OK);
    for (int i = 0; i < n; i++)
        assert_true(got[i] == want[i]);
}

static void goes_round(void **unused)
{
    dnri_st_file *f;
    assert_int_equal(write_sample(in_folder("round")), DNR_OK);
    assert_int_equal(dnri_st_open(in_folder("round"), &f), DNR_OK);
    assert_int_equal(dnri_st_count(f), 6);
    check_values(f, "double", 3, D);
    check_values(f, "float", 6, (double[]){1, 2, 3, 4, 5, 0});
    check_values(f, "half", 3, (double[]){1, -2, INFINITY});
    check_values(f, "brain", 3, (double[]){1, -2, INFINITY});
    check_values(f, "count", 1, (double[]){7});
    check_values(f, "empty", 0, NULL);
    assert_int_equal(dnri_st_find(f, "count")->ndim, 0);
    assert_int_equal(dnri_st_find(f, "float")->dim[1], 3);
    for (int i = 0; i < 6; i++) { /* each aligned to its type */
        const dnri_st_tensor *t = dnri_st_at(f, i);
        assert_int_equal(t->offset % (t->count ? t->bytes / (size_t)t->count : 1), 0);
    }
    assert_string_equal(dnri_st_metadata(f, "architecture"), "résnet");
    assert_null(dnri_st_metadata(f, "other"));
    assert_null(dnri_st_find(f, "other"));
    dnri_st_close(f);
    dnri_st_close(NULL);
}

/* More values than are converted at a time. */
static void reads_long_tensors(void **unused)
{
    enum { N = 150001 };
    float *v = malloc(N * sizeof *v);
    double *back = malloc(N * sizeof *back);
    dnri_st_file *f;
    for (int i = 0; i < N; i++)
        v[i] = (float)i;
    dnri_st_tensor t = dnri_st_make("long", DNRI_ST_F32, 1, (int64_t[]){N}, v);
    assert_int_equal(dnri_st_write(in_folder("long"), NULL, &t, 1), DNR_OK);
    assert_int_equal(dnri_st_open(in_folder("long"), &f), DNR_OK);
    assert_int_equal(dnri_st_read(f, dnri_st_at(f, 0), back), DNR_OK);
    for (int i = 0; i < N; i++)
        assert_true(back[i] == i);
    dnri_st_close(f);
    free(v);
    free(back);
}

/* What the reference writer makes: metadata first or absent, spaces behind. */
static void reads_the_reference_form(void **unused)
{
    dnri_st_file *f;
    assert_int_equal(
        dnri_st_open(made("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                          "\"m\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[8,9]}}   ",
                          9),
                     &f),
        DNR_OK);
    check_values(f, "a", 2, (double[]){0, 0});
    double x;
    assert_int_equal(dnri_st_read(f, dnri_st_find(f, "m"), &x), DNR_EDATA); /* no weight is BOOL */
    assert_non_null(strstr(dnr_last_error()->what, "'m'"));
    dnri_st_close(f);
}

/* ---- hostile files */

static void refused(const char *path, const char *because)
{
    dnri_st_file *f;
    assert_int_equal(dnri_st_open(path, &f), DNR_EDATA);
    assert_null(f);
    const dnr_error *e = dnr_last_error();
    if (!strstr(e->what, because) || !strstr(e->what, path) || !e->remedy[0])
        fail_msg("'%s' should name %s and say '%s'", e->what, path, because);
}

#define ONE(shape, span) "{\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" span "}}"
#define TWO(a, b)                                                                                  \
    "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" a "},"                             \
    "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" b "}}"

static void refuses_bad_headers(void **unused)
{
    static const struct {
        const char *header;
        size_t data;
        const char *because;
    } CASES[] = {
        {"", 0, "no JSON object"},
        {"[]", 0, "no JSON object"},
        {"{", 0, "no JSON object"},
        {"{} x", 0, "no JSON object"},
        {"{\"a\":1}", 0, "dtype"},
        {"{\"a\":{},\"a\":{}}", 0, "repeated keys"},
        {"{\"a\\u0000b\":{}}", 0, "no JSON object"},
        {"{\"__metadata__\":3}", 0, "metadata"},
        {"{\"__metadata__\":{\"a\":3}}", 0, "metadata"},
        {"{}", 4, "4 bytes follow"},
        {"{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "name"},
        {"{\"a\\u001b[31m\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "name"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype"},
        {ONE("1", "[0,4]"), 4, "shape"},
        {ONE("[1.0]", "[0,4]"), 4, "shape"},
        {ONE("[-1]", "[0,4]"), 4, "shape"},
        {ONE("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "dimensions"},
        {ONE("[4611686018427387904,4]", "[0,0]"), 0,
         "not possible"}, /* 2^64 elements: 0 if it wrapped */
        {ONE("[4611686018427387904]", "[0,0]"), 0, "not possible"}, /* 2^64 bytes */
        {ONE("[99999999999999999999]", "[0,4]"), 4, "no JSON object"},
        {ONE("[2]", "[0,4]"), 4, "need 8"},
        {ONE("[1]", "[0,8]"), 8, "need 4"},
        {ONE("[1]", "[0]"), 4, "offsets"},
        {ONE("[1]", "[4,0]"), 4, "offsets"},
        {ONE("[1]", "[-4,0]"), 4, "offsets"},
        {ONE("[1]", "[0,\"4\"]"), 4, "offsets"},
        {ONE("[1]", "[4,8]"), 4, "offsets"},
        {ONE("[1]", "[9223372036854775803,9223372036854775807]"), 4, "offsets"},
        {ONE("[1]", "[4,8]"), 8, "hole"},
        {ONE("[1]", "[0,4]"), 8, "4 bytes follow"},
        {TWO("[0,8]", "[0,8]"), 16, "overlaps"},
        {TWO("[0,8]", "[4,12]"), 12, "overlaps"},
        {TWO("[0,8]", "[12,20]"), 20, "hole"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        refused(made(CASES[i].header, CASES[i].data), CASES[i].because);
}

static void refuses_bad_lengths(void **unused)
{
    static const uint64_t LENGTHS[] = {3,          1u << 20,       (100u << 20) + 1,
                                       UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    char buf[10] = "01234567{}";
    for (size_t i = 0; i < sizeof LENGTHS / sizeof *LENGTHS; i++) {
        memcpy(buf, &LENGTHS[i], 8);
        put(in_folder("length"), buf, sizeof buf);
        refused(in_folder("length"), "header claims");
    }
    put(in_folder("length"), buf, 7);
    refused(in_folder("length"), "only 7 bytes");
}

static void refuses_other_things(void **unused)
{
    put(in_folder("torch"), "PK\3\4xxxxxxxxxxxx", 16);
    refused(in_folder("torch"), "PyTorch archive");
    refused(in_folder("absent"), "No such file");
    refused(folder, "not an ordinary file");
    assert_int_equal(mkfifo(in_folder("fifo"), 0600), 0);
    refused(in_folder("fifo"), "not an ordinary file"); /* and does not wait for a writer */
}

/* Cut at every byte: refused. Any byte changed: refused, or read without harm. */
static void survives_cuts_and_changes(void **unused)
{
    char whole[2048], bad[2048];
    assert_int_equal(write_sample(in_folder("whole")), DNR_OK);
    size_t n = get(in_folder("whole"), whole, sizeof whole);
    assert_true(n > 100 && n < sizeof whole);
    for (size_t i = 0; i < n; i++) {
        put(in_folder("cut"), whole, i);
        refused(in_folder("cut"), "is damaged");
    }
    memcpy(bad, whole, n);
    bad[n] = 0;
    put(in_folder("cut"), bad, n + 1);
    refused(in_folder("cut"), "1 bytes follow");
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            dnri_st_file *f;
            memcpy(bad, whole, n);
            bad[i] ^= (char)(1 << bit);
            put(in_folder("cut"), bad, n);
            if (dnri_st_open(in_folder("cut"), &f) != DNR_OK)
                continue;
            for (int k = 0; k < dnri_st_count(f); k++) {
                const dnri_st_tensor *t = dnri_st_at(f, k);
                double *v = malloc(((size_t)t->count + 1) * sizeof *v);
                dnri_st_read(f, t, v);
                free(v);
            }
            dnri_st_close(f);
        }
}

/* A file that shrinks after it was opened. */
static void survives_shrinking(void **unused)
{
    dnri_st_file *f;
    double v[8];
    assert_int_equal(write_sample(in_folder("shrink")), DNR_OK);
    assert_int_equal(dnri_st_open(in_folder("shrink"), &f), DNR_OK);
    const dnri_st_tensor *last = dnri_st_at(f, dnri_st_count(f) - 1);
    assert_int_equal(truncate(in_folder("shrink"), (off_t)last->offset), 0);
    assert_int_equal(dnri_st_read(f, last, v), DNR_EDATA);
    assert_non_null(strstr(dnr_last_error()->what, "ends early"));
    dnri_st_close(f);
}

/* ---- disks */

static void refuses_places(void **unused)
{
    const char *const PLACES[] = {"/dev/full", "/proc/x.safetensors", "/nowhere/x.safetensors",
                                  folder};
    for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; i++) {
        assert_int_equal(write_sample(PLACES[i]), DNR_EDISK);
        assert_non_null(strstr(dnr_last_error()->what, PLACES[i]));
        assert_true(dnr_last_error()->remedy[0]);
    }
    struct stat st; /* the device is still one */
    assert_int_equal(stat("/dev/full", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
}

/* Runs `body` in a child, which may change what the process may do. Its exit code; 77 is a skip. */
static int in_child(int (*body)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        _exit(body());
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* The file that was there is still whole, and nothing lies beside it. */
static bool untouched(const char *path, int files)
{
    dnri_st_file *f;
    if (dnri_st_open(path, &f) != DNR_OK)
        return false;
    dnri_st_close(f);
    return files_in(folder) == files;
}

static float big[1 << 18];

static int write_too_much(void)
{
    const char *path = in_folder("kept");
    int files = files_in(folder);
    dnri_st_tensor t = dnri_st_make("big", DNRI_ST_F32, 1, (int64_t[]){1 << 18}, big);
    if (dnri_st_write(path, NULL, &t, 1) != DNR_EDISK)
        return 1;
    return untouched(path, files) ? 0 : 2;
}

static int past_file_limit(void)
{
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {65536, 65536};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        return 77;
    return write_too_much();
}

static void keeps_the_old_file(void **unused)
{
    assert_int_equal(write_sample(in_folder("kept")), DNR_OK);
    assert_int_equal(in_child(past_file_limit), 0);
}

/* A disk of 64 KiB, and then one that is read-only, in a mount name space of its own. */
static int on_small_disk(void)
{
    char disk[256];
    snprintf(disk, sizeof disk, "%s", in_folder("disk"));
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", disk, "tmpfs", 0, "size=64k") != 0)
        return 77;
    strcat(folder, "/disk");
    if (write_sample(in_folder("kept")) != DNR_OK)
        return 3;
    int bad = write_too_much();
    if (bad || !strstr(dnr_last_error()->what, strerror(ENOSPC)))
        return bad ? bad : 4;
    if (mount("none", disk, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL) != 0)
        return 77;
    bad = write_too_much();
    return bad ? bad : strstr(dnr_last_error()->what, strerror(EROFS)) ? 0 : 5;
}

static void survives_a_full_disk(void **unused)
{
    assert_int_equal(mkdir(in_folder("disk"), 0700), 0);
    int result = in_child(on_small_disk);
    assert_int_equal(rmdir(in_folder("disk")), 0);
    if (result == 77) {
        print_message("cannot mount a small disk here\n");
        skip();
    }
    assert_int_equal(result, 0);
}

static void replaces_an_old_file(void **unused)
{
    put(in_folder("old"), "something else", 14);
    int files = files_in(folder);
    assert_int_equal(write_sample(in_folder("old")), DNR_OK);
    assert_true(untouched(in_folder("old"), files));
    struct stat st;
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat(in_folder("old"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0666 & ~mask);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goes_round),
        cmocka_unit_test(reads_long_tensors),
        cmocka_unit_test(reads_the_reference_form),
        cmocka_unit_test(refuses_bad_headers),
        cmocka_unit_test(refuses_bad_lengths),
        cmocka_unit_test(refuses_other_things),
        cmocka_unit_test(survives_cuts_and_changes),
        cmocka_unit_test(survives_shrinking),
        cmocka_unit_test(refuses_places),
        cmocka_unit_test(keeps_the_old_file),
        cmocka_unit_test(survives_a_full_disk),
        cmocka_unit_test(replaces_an_old_file),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
