/* test_bad_samples.c: bad pictures are named, counted, replaced the same way each time, or stop the run. */
#include "fakesource.h"

#include <stdlib.h>
#include <string.h>

static void replaced(void **state)
{
    fake f = fake_source(200, true);
    uint64_t hash[3];
    for (int i = 0; i < 3; i++) {
        f.bad = bad_tenth;
        hash[i] = stream_hash(&f.base, train(i == 2 ? 50 : 32, 1 + 3 * i), 600);
    }
    assert_true(hash[0] == hash[1] && hash[0] == hash[2]);
    dnr_loader_opts o = train(100, 3);
    dnr_loader *l;
    OK(dnr_loader_open(&f.base, NULL, &o, &l));
    int64_t times = 0, total = 0;
    for (int k = 0; k < 40; k++) {
        dnr_batch b;
        OK(dnr_loader_next(l, &b, NULL));
        for (int i = 0; i < 100; i++) {
            assert_int_not_equal(b.labels[i], 3); /* a bad one's */
            assert_int_equal(b.labels[i], b.pixels[48 * i] % 10);
        }
        dnr_loader_release(l, &b);
    }
    dnr_loader_stats st;
    dnr_loader_get_stats(l, &st);
    assert_int_equal(st.bad, 20);
    for (int i = 0; i < 20; i++) {
        assert_string_equal(st.bad_list[i].name, "pic3");
        assert_string_equal(st.bad_list[i].reason, "bad on purpose");
        times += st.bad_list[i].times;
    }
    for (int i = 0; i < 20; i++)
        total += st.bad_list[i].times >= 20; /* once in each of 20 epochs at least */
    assert_int_equal(total, 20);
    assert_true(times < 600); /* 20 · 20, a tenth more as substitutes, and what is prefetched */
    dnr_loader_close(l);
}

static void left_out_of_validation(void **state)
{
    fake f = fake_source(50, false);
    f.bad = bad_tenth;
    dnr_loader_opts o = pass(50, 2);
    dnr_loader *l;
    dnr_batch b;
    OK(dnr_loader_open(&f.base, NULL, &o, &l));
    OK(dnr_loader_next(l, &b, NULL));
    assert_int_equal(b.count, 45);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(b.labels[i], i % 10 == 3 ? -1 : i % 10);
        assert_int_equal(b.pixels[48 * i], i % 10 == 3 ? 0 : i);
    }
    dnr_loader_release(l, &b);
    dnr_loader_close(l);
}

/* The first failure of a loader. */
static dnr_status first_failure(dnr_source *s, dnr_loader_opts o, int batches)
{
    dnr_loader *l;
    DNR_TRY(dnr_loader_open(s, NULL, &o, &l));
    dnr_status st = DNR_OK;
    for (int k = 0; k < batches && st == DNR_OK; k++) {
        dnr_batch b;
        bool more;
        st = dnr_loader_next(l, &b, &more);
        if (st == DNR_OK && more)
            dnr_loader_release(l, &b);
    }
    if (st != DNR_OK) { /* and it stays */
        dnr_batch b;
        dnr_error e = *dnr_last_error();
        assert_int_equal(dnr_loader_next(l, &b, NULL), st);
        assert_string_equal(dnr_last_error()->what, e.what);
        assert_int_equal(dnr_loader_rewind(l), st);
    }
    dnr_loader_close(l);
    return st;
}

static void stopped(void **state)
{
    fake f = fake_source(200, true);
    f.bad = bad_five;
    dnr_loader_opts o = train(32, 3);
    o.on_error = DNR_ON_ERROR_STOP;
    FAILS(first_failure(&f.base, o, 1000), DNR_EDATA, "set/pic5: bad on purpose");
    f.bad = bad_tenth;
    o = train(32, 3);
    o.max_bad = 19;
    FAILS(first_failure(&f.base, o, 1000), DNR_EDATA,
          "20 bad pictures, more than data.max_bad = 19");
    o.max_bad = 20;
    OK(first_failure(&f.base, o, 100));
    o = pass(10, 2);
    o.max_bad = 0;
    FAILS(first_failure(&f.base, o, 1000), DNR_EDATA, "set/pic3");
    f.bad = bad_all;
    FAILS(first_failure(&f.base, train(32, 2), 1000), DNR_EDATA, "65 pictures in a row are bad");
    OK(first_failure(&f.base, pass(32, 2), 100)); /* an evaluation of nothing */
    f.bad_status = DNR_EMEM;                      /* not the picture's fault: no substitute */
    FAILS(first_failure(&f.base, train(32, 2), 1000), DNR_EMEM, "no memory on purpose");
}

/* Real bad files in a folder. */
static void bad_files(void **state)
{
    bytes good = rig_bmp(9, 9, 9, 9, 9);
    for (int i = 0; i < 20; i++)
        rig_put(rig_path("set/c%d/%d.bmp", i % 2, i), good.p, i == 7 ? 100 : good.n);
    rig_put(rig_path("set/c0/no.png"), "text", 4);
    free(good.p);
    dnr_source *s;
    OK(dnr_source_open(rig_path("set"), NULL, &s));
    dnr_loader_opts o = pass(30, 2);
    dnr_loader *l;
    dnr_batch b;
    OK(dnr_loader_open(s, NULL, &o, &l));
    OK(dnr_loader_next(l, &b, NULL));
    assert_int_equal(b.count, 19);
    dnr_loader_release(l, &b);
    dnr_loader_stats st;
    dnr_loader_get_stats(l, &st);
    assert_int_equal(st.bad, 2);
    assert_string_equal(st.bad_list[0].name, "c0/no.png");
    assert_non_null(strstr(st.bad_list[0].reason, "not a picture"));
    assert_string_equal(st.bad_list[1].name, "c1/7.bmp");
    assert_non_null(strstr(st.bad_list[1].reason, "truncated BMP: 100 bytes"));
    dnr_loader_close(l);
    o.on_error = DNR_ON_ERROR_STOP;
    FAILS(first_failure(s, o, 1), DNR_EDATA, "c");
    assert_non_null(strstr(dnr_last_error()->what, rig_path("set/c")));
    dnr_source_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replaced),
        cmocka_unit_test(left_out_of_validation),
        cmocka_unit_test(stopped),
        cmocka_unit_test(bad_files),
    };
    return cmocka_run_group_tests(tests, rig_folder_make, rig_folder_remove);
}
