/* test_data.c: sources: folders, class maps, the bundled digits, synthetic; the order of samples. */
#include "datarig.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const char dummy[] = "not decoded here";

static void put_dummy(const char *path)
{
    rig_put(path, dummy, sizeof dummy - 1);
}

/* ---- folders */

static void class_folders(void **state)
{
    /* torchvision: classes by name; within one, folders by path, then files; extensions in any case */
    const char *file[] = {"b/2.jpg",       "b/10.JPEG",   "a b/é.png", "Z/x.webp",  "b/sub/0.jpg",
                          "b/sub-x/0.bmp", "b/notes.txt", "stray.txt", ".git/x.jpg"};
    for (size_t i = 0; i < sizeof file / sizeof *file; i++)
        put_dummy(rig_path("folder/%s", file[i]));
    dnr_source *s, *t;
    OK(dnr_source_open(rig_path("folder"), &(dnr_source_opts){.classes = 3}, &s));
    assert_string_equal(
        rig_listing(s),
        "Z/x.webp=0 a b/é.png=1 b/10.JPEG=2 b/2.jpg=2 b/sub/0.jpg=2 b/sub-x/0.bmp=2");
    assert_int_equal(dnr_source_classes(s), 3);
    assert_string_equal(dnr_source_class_name(s, 1), "a b");
    assert_null(dnr_source_class_name(s, 3));
    assert_null(dnr_source_sample_name(s, 6));
    assert_int_equal(dnr_source_label(s, -1), -1);
    /* the hash is of names, sizes and labels, not of the place */
    assert_int_equal(rename(rig_path("folder"), rig_path("moved")), 0);
    OK(dnr_source_open(rig_path("moved/"), NULL, &t));
    assert_true(dnr_source_hash(t) == dnr_source_hash(s));
    dnr_source_close(t);
    rig_put(rig_path("moved/b/2.jpg"), dummy, 3);
    OK(dnr_source_open(rig_path("moved"), NULL, &t));
    assert_true(dnr_source_hash(t) != dnr_source_hash(s));
    dnr_source_close(t);
    dnr_source_close(s);
}

static void bad_folders(void **state)
{
    dnr_source *s;
    FAILS(dnr_source_open(rig_path("nowhere"), NULL, &s), DNR_EDATA, "nowhere: No such file");
    FAILS(dnr_source_open("", NULL, &s), DNR_EUSAGE, "no path");
    FAILS(dnr_source_open(rig_path("x"), &(dnr_source_opts){.classes = -1}, &s), DNR_EUSAGE,
          "classes -1");
    FAILS(dnr_source_open(rig_path("x-*.tar"), NULL, &s), DNR_EDATA, "patterns are not expanded");
    FAILS(dnr_source_open(rig_path("x.tar.gz:train"), NULL, &s), DNR_EDATA, "only FILE.tar:FOLDER");
    put_dummy(rig_path("none/readme.txt"));
    FAILS(dnr_source_open(rig_path("none"), NULL, &s), DNR_EDATA,
          "none holds no pictures (but readme.txt …)");
    put_dummy(rig_path("linked/a/x.jpg"));
    assert_int_equal(symlink("gone.jpg", rig_path("linked/a/y.jpg")), 0);
    FAILS(dnr_source_open(rig_path("linked"), NULL, &s), DNR_EDATA,
          "linked/a/y.jpg is a link to nothing");
    put_dummy(rig_path("flat/x.jpg"));
    FAILS(dnr_source_open(rig_path("flat"), NULL, &s), DNR_EDATA, "x.jpg lies in no class folder");
    put_dummy(rig_path("hole/a/x.jpg"));
    put_dummy(rig_path("hole/b/x.txt"));
    FAILS(dnr_source_open(rig_path("hole"), NULL, &s), DNR_EDATA, "hole/b has no pictures");
    put_dummy(rig_path("two/a/x.jpg"));
    put_dummy(rig_path("two/b/x.jpg"));
    FAILS(dnr_source_open(rig_path("two"), &(dnr_source_opts){.classes = 10}, &s), DNR_EDATA,
          "2 classes (a … b), but 10 are expected");
    put_dummy(rig_path("above/train/a/x.jpg"));
    put_dummy(rig_path("above/val/a/x.jpg"));
    FAILS(dnr_source_open(rig_path("above"), NULL, &s), DNR_EDATA, "is this the folder above");
    assert_int_equal(symlink("..", rig_path("two/a/loop")), 0);
    FAILS(dnr_source_open(rig_path("two"), NULL, &s), DNR_EDATA,
          "two/a/loop is a link to a folder above it");
}

static void class_maps(void **state)
{
    put_dummy(rig_path("val/one.jpg"));
    put_dummy(rig_path("val/two words.jpg"));
    put_dummy(rig_path("val/n01/x.jpg"));
    put_dummy(rig_path("val/n01/y.jpg"));
    const char *val = rig_path("val"), *map = rig_path("map.txt");
    dnr_source_opts o = {.class_map = map};
    dnr_source *s;
#define MAP(text) rig_put(map, text, strlen(text))
    MAP("# a remark\ntwo words.jpg 3\n\none.jpg\t0\r\nn01 7");
    OK(dnr_source_open(val, &o, &s));
    assert_string_equal(rig_listing(s), "two words.jpg=3 one.jpg=0 n01/x.jpg=7 n01/y.jpg=7");
    assert_int_equal(dnr_source_classes(s), 8);
    dnr_source_close(s);
    o.classes = 7;
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA,
          "n01/x.jpg has label 7, out of range for 7 classes");
    o.classes = 2;
    MAP("one.jpg zebra\ntwo words.jpg ant\n");
    OK(dnr_source_open(val, &o, &s));
    assert_string_equal(rig_listing(s), "one.jpg=1 two words.jpg=0");
    assert_string_equal(dnr_source_class_name(s, 0), "ant");
    dnr_source_close(s);
    o.classes = 3;
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "2 classes (ant … zebra), but 3");
    MAP("one.jpg 1\nmissing.jpg 2\n");
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "map.txt:2: ");
    MAP("one.jpg\n");
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "map.txt:1: \"one.jpg\" has no class");
    MAP("one.jpg 99999999999999999999\n");
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "out of range");
    MAP("\n");
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "holds no pictures");
    o.class_map = rig_path("no-map.txt");
    FAILS(dnr_source_open(val, &o, &s), DNR_EDATA, "no-map.txt: No such file");
    FAILS(dnr_source_open("synthetic", &o, &s), DNR_EUSAGE, "not a folder");
}

/* ---- others */

static void digits(void **state)
{
    dnr_source *s;
    for (int test = 0; test < 2; test++) {
        const char *path = test ? DNRI_SOURCE_DIR "/data/digits.tar:test"
                                : DNRI_SOURCE_DIR "/data/digits.tar:train";
        OK(dnr_source_open(path, &(dnr_source_opts){.classes = 10}, &s));
        assert_int_equal(dnr_source_count(s), test ? 359 : 1438);
        dnri_buffer b = {0};
        dnri_picture p = {0};
        for (int64_t i = 0; i < dnr_source_count(s); i++) {
            int digit, index;
            assert_int_equal(sscanf(dnr_source_sample_name(s, i), "digits.tar:%*[a-z]/%d/%d.png",
                                    &digit, &index),
                             2);
            assert_int_equal(digit, dnr_source_label(s, i));
            assert_int_equal(index % 5 == 4, test);
            OK(s->ops->read(s, i, &b));
            OK(dnri_decode(b.data, b.size, 64, &p));
            assert_true(p.w == 8 && p.h == 8);
        }
        free(b.data);
        free(p.rgb);
        dnr_source_close(s);
    }
}

/* No picture is to blame for what a process may not open. */
static void too_many_open_files(void **state)
{
    (void)state;
    struct rlimit old, none;
    dnri_buffer b = {0};
    dnr_source *s;
    OK(dnr_source_open(DNRI_SOURCE_DIR "/data/digits.tar:test", NULL, &s));
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    dnr_status st = s->ops->read(s, 0, &b);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    FAILS(st, DNR_EFAIL, "Too many open files");
    assert_non_null(strstr(dnr_last_error()->remedy, "ulimit -n"));
    OK(s->ops->read(s, 0, &b));
    free(b.data);
    dnr_source_close(s);
}

static void synthetic(void **state)
{
    dnr_source *s;
    OK(dnr_source_open("synthetic", NULL, &s));
    assert_int_equal(dnr_source_count(s), 1281167);
    assert_int_equal(dnr_source_classes(s), 1000);
    dnr_source_close(s);
    OK(dnr_source_open("synthetic",
                       &(dnr_source_opts){.classes = 7, .synthetic_n = 7000, .synthetic_image = 33},
                       &s));
    dnri_picture a = {0}, b = {0};
    int seen[7] = {0};
    for (int i = 0; i < 7000; i++)
        seen[dnr_source_label(s, i)]++;
    for (int c = 0; c < 7; c++)
        assert_true(seen[c] > 850 && seen[c] < 1150); /* 1000 ± 5 σ */
    OK(s->ops->render(s, 5, &a));
    OK(s->ops->render(s, 5, &b));
    assert_true(a.w == 33 && a.h == 33);
    assert_memory_equal(a.rgb, b.rgb, 33 * 33 * 3);
    OK(s->ops->render(s, 6, &b));
    assert_memory_not_equal(a.rgb, b.rgb, 33 * 33 * 3);
    free(a.rgb);
    free(b.rgb);
    dnr_source_close(s);
}

static void order(void **state)
{
    const int64_t n = 1000;
    dnri_order a, b, c;
    OK(dnri_order_open(n, 1, true, &a));
    OK(dnri_order_open(n, 1, true, &b));
    OK(dnri_order_open(n, 2, true, &c));
    int64_t epoch, sample, other, fixed = 0, same_seed = 0;
    for (int64_t e = 0; e < 20; e++) {
        bool seen[1000] = {false};
        for (int64_t k = 0; k < n; k++) {
            dnri_order_at(&a, e * n + k, &epoch, &sample);
            assert_int_equal(epoch, e);
            assert_true(sample >= 0 && sample < n && !seen[sample]);
            seen[sample] = true;
            fixed += sample == k;
            dnri_order_at(&c, e * n + k, &epoch, &other);
            same_seed += sample == other;
        }
    }
    /* 20 fixed points are expected of random permutations, and as many agreements between two seeds */
    assert_true(fixed < 45 && same_seed < 45);
    dnri_rng r = DNRI_RNG(3); /* any position at any time */
    for (int k = 0; k < 300; k++) {
        int64_t p = (int64_t)dnri_rng_below(&r, 50000);
        dnri_order_at(&a, p, &epoch, &sample);
        dnri_order_at(&b, 50000 - p, &epoch, &other);
        dnri_order_at(&b, p, &epoch, &other);
        assert_int_equal(sample, other);
    }
    dnri_order_close(&a);
    dnri_order_close(&b);
    dnri_order_close(&c);
    OK(dnri_order_open(1, 9, true, &a));
    dnri_order_at(&a, 12, &epoch, &sample);
    assert_true(epoch == 12 && sample == 0);
    dnri_order_close(&a);
    FAILS(dnri_order_open(0, 0, true, &a), DNR_EUSAGE, "0 samples");
}

/* CIFAR-10's test shards and the same pictures as class folders are the same data set. */
static void cifar_forms(void **state)
{
    if (!rig_shared())
        skip();
    char command[4096], name[10][32];
    for (int k = 0; k < 2; k++) {
        snprintf(command, sizeof command, "gzip -dc '%s/cifar10/test-00000%d.tar.gz' > '%s'",
                 rig_shared(), k, rig_path("test-00000%d.tar", k));
        assert_int_equal(system(command), 0);
    }
    snprintf(command, sizeof command, "%s/cifar10/classes.txt", rig_shared());
    FILE *f = fopen(command, "r");
    assert_non_null(f);
    for (int c = 0; c < 10; c++)
        assert_int_equal(fscanf(f, "%31s", name[c]), 1);
    fclose(f);
    dnr_source *s, *t;
    OK(dnr_source_open(rig_path("test-{000000..000001}.tar"), &(dnr_source_opts){.classes = 10},
                       &s));
    assert_int_equal(dnr_source_count(s), 10000);
    dnri_buffer a = {0}, b = {0};
    for (int64_t i = 0; i < 10000; i++) {
        OK(s->ops->read(s, i, &a));
        const char *key = strchr(dnr_source_sample_name(s, i), ':') + 1;
        rig_put(rig_path("cifar/%s/%s", name[dnr_source_label(s, i)], key), a.data, a.size);
    }
    OK(dnr_source_open(rig_path("cifar"), &(dnr_source_opts){.classes = 10}, &t));
    assert_int_equal(dnr_source_count(t), 10000);
    for (int64_t i = 0; i < 10000; i++) {
        int number, class = dnr_source_label(t, i);
        assert_string_equal(dnr_source_class_name(t, class), name[class]);
        assert_int_equal(sscanf(strchr(dnr_source_sample_name(t, i), '/'), "/%d.jpg", &number), 1);
        assert_int_equal(dnr_source_label(s, number), class); /* keys count through the shards */
        OK(s->ops->read(s, number, &a));
        OK(t->ops->read(t, i, &b));
        assert_int_equal(a.size, b.size);
        assert_memory_equal(a.data, b.data, a.size);
    }
    free(a.data);
    free(b.data);
    dnr_source_close(s);
    dnr_source_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(class_folders),       cmocka_unit_test(bad_folders),
        cmocka_unit_test(class_maps),          cmocka_unit_test(digits),
        cmocka_unit_test(synthetic),           cmocka_unit_test(order),
        cmocka_unit_test(too_many_open_files), cmocka_unit_test(cifar_forms),
    };
    return cmocka_run_group_tests(tests, rig_folder_make, rig_folder_remove);
}
