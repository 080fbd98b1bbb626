/* test_tar.c: data sets in tars, good, odd and hostile. */
#include "datarig.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void save(bytes *t, const char *path)
{
    rig_put(path, t->p, t->n);
    free(t->p);
    *t = (bytes){0};
}

static void expect_content(const dnr_source *s, int64_t i, const char *want)
{
    dnri_buffer b = {0};
    OK(s->ops->read(s, i, &b));
    assert_int_equal(b.size, strlen(want));
    assert_memory_equal(b.data, want, b.size);
    free(b.data);
}

static void shards(void **state)
{
    for (int k = 8; k <= 10; k++) {
        bytes t = {0};
        char name[64], body[64];
        for (int i = 0; i < 2; i++) {
            snprintf(name, sizeof name, "./%d%d.jpg", k, i);
            snprintf(body, sizeof body, "picture %d/%d", k, i);
            rig_tar_add(&t, '0', name, body, strlen(body));
            snprintf(name, sizeof name, "./%d%d.json", k, i);
            rig_tar_add(&t, '0', name, "{}", 2);
            snprintf(name, sizeof name, "./%d%d.seg.png", k, i);
            rig_tar_add(&t, '0', name, "mask", 4);
            snprintf(name, sizeof name, "./%d%d.cls", k, i);
            rig_tar_add(&t, '0', name, i ? "2" : "0\n", i ? 1 : 2);
        }
        rig_tar_end(&t);
        save(&t, rig_path("x-%03d.tar", k));
    }
    dnr_source *s;
    OK(dnr_source_open(rig_path("x-{008..010}.tar"), &(dnr_source_opts){.classes = 5}, &s));
    assert_string_equal(
        rig_listing(s),
        "x-008.tar:80.jpg=0 x-008.tar:81.jpg=2 x-009.tar:90.jpg=0 x-009.tar:91.jpg=2 "
        "x-010.tar:100.jpg=0 x-010.tar:101.jpg=2");
    assert_int_equal(dnr_source_classes(s), 5);
    expect_content(s, 3, "picture 9/1");
    expect_content(s, 0, "picture 8/0");
    expect_content(s, 5, "picture 10/1");
    assert_int_equal(truncate(rig_path("x-009.tar"), 600), 0);
    dnri_buffer b = {0};
    FAILS(s->ops->read(s, 3, &b), DNR_EDATA, "has become shorter");
    free(b.data);
    assert_int_equal(unlink(rig_path("x-009.tar")), 0);
    FAILS(s->ops->read(s, 2, &b), DNR_EDATA, "cannot be opened: No such file");
    dnr_source_close(s);
    OK(dnr_source_open(rig_path("x-{008,010}.tar"), NULL, &s));
    assert_int_equal(dnr_source_count(s), 4);
    assert_int_equal(dnr_source_classes(s), 3);
    dnr_source_close(s);
    FAILS(dnr_source_open(rig_path("x-{008..010}.tar"), NULL, &s), DNR_EDATA,
          "x-009.tar: No such file");
    FAILS(dnr_source_open(rig_path("x-008.tar"), &(dnr_source_opts){.classes = 2}, &s), DNR_EDATA,
          "x-008.tar:81.jpg has label 2, out of range for 2 classes");
    FAILS(dnr_source_open(rig_path("x-008.tar"), &(dnr_source_opts){.class_map = "m"}, &s),
          DNR_EUSAGE, "is not a folder");
}

static void braces(void **state)
{
    char **list;
    int n;
    OK(dnri_brace_expand("a{0..2}{x,}b", &list, &n));
    assert_int_equal(n, 6);
    assert_string_equal(list[0], "a0xb");
    assert_string_equal(list[5], "a2b");
    for (int i = 0; i < n; i++)
        free(list[i]);
    free(list);
    OK(dnri_brace_expand("{8..11}", &list, &n));
    assert_string_equal(list[3], "11");
    assert_string_equal(list[0], "8");
    for (int i = 0; i < n; i++)
        free(list[i]);
    free(list);
    const char *bad[] = {"{",
                         "}",
                         "a{b",
                         "a}b{",
                         "{1..}",
                         "{..2}",
                         "{5..4}",
                         "{a..c}",
                         "{0..99999999999}",
                         "{{1..2}}",
                         "{0..99999}{0..99999}",
                         "{1..2..3}",
                         "{-1..2}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (dnri_brace_expand(bad[i], &list, &n) != DNR_EUSAGE)
            fail_msg("%s passes", bad[i]);
}

static void class_folders_in_a_tar(void **state)
{
    bytes t = {0};
    rig_tar_add(&t, '5', "set/train/", "", 0);
    rig_tar_add(&t, '0', "set/train/dog/1.v2.jpg", "D1", 2);
    rig_tar_add(&t, '0', "set/train/cat/9.png", "C9", 2);
    rig_tar_add(&t, '0', "set/train/cat/9.jpg", "C9j", 3);
    rig_tar_add(&t, '0', "set/train/README", "hello", 5);
    rig_tar_add(&t, '0', "set/val/cat/5.jpg", "V5", 2);
    rig_tar_end(&t);
    save(&t, rig_path("set.tar"));
    dnr_source *s;
    OK(dnr_source_open(rig_path("set.tar:set/train"), &(dnr_source_opts){.classes = 2}, &s));
    assert_string_equal(rig_listing(s),
                        "set.tar:set/train/cat/9.jpg=0 set.tar:set/train/cat/9.png=0 "
                        "set.tar:set/train/dog/1.v2.jpg=1");
    assert_string_equal(dnr_source_class_name(s, 1), "dog");
    expect_content(s, 2, "D1");
    dnr_source_close(s);
    OK(dnr_source_open(rig_path("set.tar:set/val/"), NULL, &s));
    assert_string_equal(rig_listing(s), "set.tar:set/val/cat/5.jpg=0");
    dnr_source_close(s);
    FAILS(dnr_source_open(rig_path("set.tar"), NULL, &s), DNR_EDATA, "is this the folder above");
    FAILS(dnr_source_open(rig_path("set.tar:tests"), NULL, &s), DNR_EDATA,
          "no picture lies in tests/");
    FAILS(dnr_source_open(rig_path("set.tar:/"), NULL, &s), DNR_EUSAGE,
          "no folder after the colon");
    FAILS(dnr_source_open(rig_path("gone.tar:a"), NULL, &s), DNR_EDATA, "gone.tar: No such file");
}

/* Names too long for a header's 100 bytes: ustar's prefix, GNU's L, pax's path; sizes in pax and base 256. */
static void long_names(void **state)
{
    char name[400], body[600], pax[600];
    bytes t = {0};
    memset(name, 'n', 200);
    strcpy(name + 200, "/1.jpg");
    rig_tar_add(&t, 'L', "././@LongLink", name, strlen(name) + 1);
    rig_tar_add(&t, '0', "short", "gnu", 3);
    memset(name, 'p', 200);
    size_t n =
        strlen(name) + 10; /* "216 path=NAME\n": three digits, a blank, path=, the end of line */
    snprintf(pax, sizeof pax, "%zu path=%s\n20 ctime=1234567890\n9 size=3\n", n, name);
    assert_int_equal(strlen(pax), n + 29);
    rig_tar_add(&t, 'x', "PaxHeader", pax, strlen(pax));
    rig_tar_add(&t, '0', "short", "pax", 3);
    memset(t.p + t.n - 1024 + 124, '7', 11); /* the pax header's size is the one that counts */
    rig_tar_sum(t.p + t.n - 1024);
    rig_tar_add(&t, '0', "u.jpg", "ustar", 5);
    uint8_t *h = t.p + t.n - 1024;
    memset(h + 345, 'q', 155);
    rig_tar_sum(h);
    rig_tar_add(&t, 0, "v7/old.jpg", "v7", 2);
    h = t.p + t.n - 1024;
    memset(h + 124, 0, 12);
    h[124] = 0x80;
    h[135] = 2; /* base 256 */
    memset(h + 257, 0, 8);
    rig_tar_sum(h);
    rig_tar_end(&t);
    save(&t, rig_path("long.tar"));
    dnr_source *s;
    OK(dnr_source_open(rig_path("long.tar"), NULL, &s));
    assert_int_equal(dnr_source_count(s), 4);
    const char *want[] = {"gnu", "pax", "ustar", "v7"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(dnr_source_label(s, i), i);
        expect_content(s, i, want[i]);
    }
    memset(body, 'q', 155);
    body[155] = 0;
    assert_string_equal(dnr_source_class_name(s, 2), body);
    dnr_source_close(s);
}

/* A tar of one member with a change, which must be refused with `text`. */
static void refuse(const char *text, bytes *t)
{
    dnr_source *s;
    save(t, rig_path("bad.tar"));
    FAILS(dnr_source_open(rig_path("bad.tar"), NULL, &s), DNR_EDATA, text);
}

static void hostile_tars(void **state)
{
    bytes t = {0};
    rig_put(rig_path("bad.tar"), "", 0);
    refuse("not a tar file (0 bytes)", &t);
    t = rig_bmp(20, 20, 1, 2, 3);
    refuse("not a tar file: no header", &t);
    t = (bytes){calloc(1, 2048), 2048};
    refuse("holds no pictures", &t);
    const struct {
        const char *magic, *kind;
    } packed[] = {{"\x1f\x8b\b", "gzip"},
                  {"\x28\xb5\x2f\xfd", "zstd"},
                  {"\xfd"
                   "7zXZ",
                   "xz"},
                  {"BZh9", "bzip2"},
                  {"PK\3\4", "zip"}};
    for (size_t i = 0; i < 5; i++) {
        t = (bytes){calloc(1, 999), 999};
        memcpy(t.p, packed[i].magic, strlen(packed[i].magic));
        refuse(packed[i].kind, &t);
    }
    /* sizes: beyond the end, beyond 63 bits, negative, not a number */
    const char *size[] = {"77777777777",
                          "\x80\x7f\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
                          "\xff\xff\xff\xff",
                          "-1",
                          "12x",
                          "",
                          "9"};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        rig_tar_add(&t, '0', "a/x.jpg", "data", 4);
        memset(t.p + 124, 0, 12);
        memcpy(t.p + 124, size[i], strlen(size[i]));
        rig_tar_sum(t.p);
        rig_tar_end(&t);
        refuse("the member at byte 0 says", &t);
    }
    rig_tar_add(&t, '0', "a/x.jpg", "data", 4);
    rig_tar_add(&t, '0', "a/y.jpg", "data", 4);
    t.p[1024 + 3] ^= 1;
    refuse("damaged header at byte 1024", &t);
    /* pax records that lie about their length, or have none */
    const char *pax[] = {"5 a=\n",
                         "999 path=x\n",
                         "0 path=x\n",
                         "11path=xyz\n",
                         "11 path=xyz",
                         "-1 path=x\n",
                         "99999999999999999999999 a=b\n",
                         "3 \n",
                         "9 size=x\n",
                         "10 size=-1\n",
                         "11 path=xyz\n1"};
    for (size_t i = 1; i < sizeof pax / sizeof *pax; i++) {
        rig_tar_add(&t, 'x', "h", pax[i], strlen(pax[i]));
        rig_tar_add(&t, '0', "a/x.jpg", "data", 4);
        rig_tar_end(&t);
        refuse("malformed pax header at byte 0", &t);
    }
    const char *huge = "28 size=9223372036854775807\n", *sparse = "22 GNU.sparse.major=1\n";
    rig_tar_add(&t, 'x', "h", huge, strlen(huge));
    rig_tar_add(&t, '0', "a/x.jpg", "data", 4);
    refuse("says 9223372036854775807 bytes", &t);
    rig_tar_add(&t, 'x', "h", sparse, strlen(sparse));
    rig_tar_add(&t, '0', "a/x.jpg", "data", 4);
    refuse("sparse", &t);
    rig_tar_add(&t, 'S', "a/x.jpg", "data", 4);
    refuse("sparse", &t);
    rig_tar_add(&t, '1', "a/x.jpg", "", 0);
    refuse("a/x.jpg is a link", &t);
    uint8_t *name = calloc(1, 70000);
    rig_tar_add(&t, 'L', "././@LongLink", name, 70000);
    refuse("a name of 70000 bytes", &t);
    free(name);
    /* pictures and labels that do not pair */
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "3x", 2);
    refuse("1.cls: \"3x\" is not a class", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "", 0);
    refuse("1.cls: \"\" is not a class", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "-3", 2);
    refuse("is not a class", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "3", 1);
    rig_tar_add(&t, '0', "2.jpg", "p", 1);
    refuse("bad.tar:2.jpg has no .cls member next to it", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "3", 1);
    rig_tar_add(&t, '0', "2.cls", "3", 1);
    refuse("bad.tar:2.cls has no picture next to it", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.png", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "3", 1);
    refuse("bad.tar:1.png: a second picture", &t);
    rig_tar_add(&t, '0', "1.jpg", "p", 1);
    rig_tar_add(&t, '0', "1.cls", "3", 1);
    rig_tar_add(&t, '0', "1.cls", "4", 1);
    refuse("1.cls: a second label", &t);
    rig_tar_add(&t, '0', "train/a/1.jpg", "p", 1);
    rig_tar_add(&t, '0', "train/b/1.jpg", "p", 1);
    refuse("bad.tar holds train, and every picture lies", &t);
    rig_tar_add(&t, '0', "x\n\x1b[31m.jpg", "p", 1); /* no control characters in messages */
    refuse("x??[31m.jpg lies in no class folder", &t);
}

/* Random damage to a good tar never crashes, and every cut is refused or leaves a shorter whole one. */
static void damaged_tars(void **state)
{
    bytes t = {0};
    rig_tar_add(&t, 'L', "././@LongLink", "a/long.jpg", 11);
    rig_tar_add(&t, '0', "x", "12345", 5);
    rig_tar_add(&t, 'x', "h", "19 path=a/pax.jpg\n", 18);
    memcpy(t.p + t.n - 512, "18", 2);
    rig_tar_add(&t, '0', "x", "12345", 5);
    rig_tar_add(&t, '0', "b/1.jpg", "p", 1);
    rig_tar_end(&t);
    const char *path = rig_path("d.tar");
    dnr_source *s;
    for (size_t n = 0; n <= t.n; n += 64) {
        rig_put(path, t.p, n);
        if (dnr_source_open(path, NULL, &s) == DNR_OK) {
            assert_true(n % 512 == 0 || n > t.n - 512); /* one block of zeros is an end */
            for (int64_t i = 0; i < dnr_source_count(s); i++) {
                dnri_buffer b = {0};
                OK(s->ops->read(s, i, &b));
                free(b.data);
            }
            dnr_source_close(s);
        } else
            assert_int_equal(dnr_last_error()->status, DNR_EDATA);
    }
    dnri_rng r = DNRI_RNG(11);
    for (int k = 0; k < 3000; k++) {
        size_t header = dnri_rng_below(&r, t.n / 512) * 512, at = header + dnri_rng_below(&r, 512);
        uint8_t was[512];
        memcpy(was, t.p + header, 512);
        t.p[at] = (uint8_t)dnri_rng_next(&r);
        if (k & 1)
            rig_tar_sum(t.p + header);
        rig_put(path, t.p, t.n);
        dnr_status st = dnr_source_open(path, NULL, &s);
        assert_true(st == DNR_OK || st == DNR_EDATA);
        if (st == DNR_OK)
            dnr_source_close(s);
        memcpy(t.p + header, was, 512);
    }
    free(t.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards),
        cmocka_unit_test(braces),
        cmocka_unit_test(class_folders_in_a_tar),
        cmocka_unit_test(long_names),
        cmocka_unit_test(hostile_tars),
        cmocka_unit_test(damaged_tars),
    };
    return cmocka_run_group_tests(tests, rig_folder_make, rig_folder_remove);
}
