/* test_decode.c: decoding against Pillow, resizing against torchvision, damaged and odd files. */
#include "datarig.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PILLOW_LIMIT 178956970

static const char *text(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key));
}

static int integer(const json_t *o, const char *key)
{
    return (int)json_integer_value(json_object_get(o, key));
}

/* Mean and largest difference of two pictures of n values. */
static double mean_difference(const uint8_t *a, const uint8_t *b, size_t n, int *max)
{
    int64_t sum = 0;
    *max = 0;
    for (size_t i = 0; i < n; i++) {
        int d = abs(a[i] - b[i]);
        sum += d;
        *max = d > *max ? d : *max;
    }
    return (double)sum / (double)n;
}

/* PNG and BMP are exact. JPEG decoders may differ by their transforms and by how they enlarge chroma:
 * libjpeg-turbo must be exact too in the mean below 1; stb_image differs more at edges of chroma. */
static void as_pillow(void **state)
{
    json_t *root = rig_golden("pictures.json"), *o;
    size_t i;
    json_array_foreach(json_object_get(root, "decode"), i, o)
    {
        bytes file = rig_unhex(text(o, "bytes")), want = rig_unhex(text(o, "rgb"));
        dnri_picture p = {0};
        int max;
        OK(dnri_decode(file.p, file.n, PILLOW_LIMIT, &p));
        assert_int_equal(p.w, integer(o, "w"));
        assert_int_equal(p.h, integer(o, "h"));
        assert_int_equal(want.n, p.w * p.h * 3);
        double mean = mean_difference(p.rgb, want.p, want.n, &max);
        print_message("%-18s mean %.3f max %d\n", text(o, "name"), mean, max);
        if (strncmp(text(o, "name"), "jpeg", 4))
            assert_int_equal(max, 0);
        assert_true(mean <= 3);
        free(file.p);
        free(want.p);
        free(p.rgb);
    }
    json_decref(root);
}

/* No beginning of a file passes for the whole, and no changed byte crashes; a changed byte of a PNG is noticed. */
static void damaged(void **state)
{
    json_t *root = rig_golden("pictures.json"), *o;
    size_t i;
    json_array_foreach(json_object_get(root, "decode"), i, o)
    {
        bytes file = rig_unhex(text(o, "bytes"));
        bool png = !strncmp(text(o, "name"), "png", 3);
        dnri_picture p = {0};
        for (size_t n = 0; n < file.n; n++) {
            uint8_t *cut =
                malloc(n + 1); /* of its exact size, so that a sanitizer sees reads past the end */
            assert_non_null(cut = realloc(cut, n ? n : 1));
            memcpy(cut, file.p, n);
            if (dnri_decode(cut, n, PILLOW_LIMIT, &p) != DNR_EDATA)
                fail_msg("%s: %zu of %zu bytes pass", text(o, "name"), n, file.n);
            free(cut);
        }
        dnri_rng r = DNRI_RNG(i);
        for (int k = 0; k < 2000; k++) {
            size_t at = dnri_rng_below(&r, file.n);
            uint8_t was = file.p[at];
            file.p[at] ^= (uint8_t)(1 + dnri_rng_below(&r, 255));
            dnr_status st = dnri_decode(file.p, file.n, 1 << 20, &p);
            assert_true(st == DNR_OK || st == DNR_EDATA);
            if (png)
                assert_int_equal(st, DNR_EDATA);
            file.p[at] = was;
        }
        free(p.rgb);
        free(file.p);
    }
    json_decref(root);
}

static void refused(void **state)
{
    dnri_picture p = {0};
    bytes bmp = rig_bmp(40, 30, 1, 2, 3);
    FAILS(dnri_decode(bmp.p, bmp.n, 1199, &p), DNR_EDATA, "40×30 pixels, more than 1199");
    OK(dnri_decode(bmp.p, bmp.n, 1200, &p));
    memcpy(bmp.p + 18, (uint8_t[]){0, 0, 1, 0}, 4); /* 65,536 wide */
    FAILS(dnri_decode(bmp.p, bmp.n, PILLOW_LIMIT, &p), DNR_EDATA, "65536×30");
    FAILS(dnri_decode((const uint8_t *)"", 0, 1, &p), DNR_EDATA, "empty file");
    FAILS(dnri_decode((const uint8_t *)"hello", 5, 1, &p), DNR_EDATA, "not a picture");
    FAILS(dnri_decode((const uint8_t *)"GIF89a", 6, 1, &p), DNR_EDATA, "a GIF picture");
    FAILS(dnri_decode((const uint8_t *)"RIFF....WEBPVP8 ", 16, 1, &p), DNR_EDATA, "a WebP picture");
    FAILS(dnri_decode((const uint8_t *)"\xff\xd8\xff", 3, 1, &p), DNR_EDATA, "JPEG");
    free(bmp.p);
    free(p.rgb);
}

/* Each file of odd-images as its manifest says. */
static void odd_images(void **state)
{
    if (!rig_shared())
        skip();
    char path[2048], line[1024];
    snprintf(path, sizeof path, "%s/odd-images/manifest.tsv", rig_shared());
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f)); /* headings */
    int files = 0, decoded = 0;
    while (fgets(line, sizeof line, f)) {
        char *field[7], *at = line;
        for (int i = 0; i < 7; i++) {
            field[i] = strsep(&at, "\t\n");
            assert_non_null(field[i]);
        }
        snprintf(path, sizeof path, "%s/odd-images/%s", rig_shared(), field[0]);
        bytes b = rig_slurp(path);
        assert_non_null(b.p);
        dnri_picture p = {0};
        dnr_status st = dnri_decode(b.p, b.n, PILLOW_LIMIT, &p);
        if (st != DNR_OK)
            print_message("%s: %s\n", field[0], dnr_last_error()->what);
        if (!strcmp(field[1], "ok") && st != DNR_OK)
            fail_msg("%s must be decoded: %s", field[0], dnr_last_error()->what);
        if (!strcmp(field[1], "reject") && st != DNR_EDATA)
            fail_msg("%s must be refused", field[0]);
        if (st == DNR_OK) {
            assert_int_equal(p.w, atoi(field[2]));
            assert_int_equal(p.h, atoi(field[3]));
            for (int c = 0; c < 3 && *field[4] != '-'; c++) {
                double sum = 0;
                for (int64_t i = 0; i < (int64_t)p.w * p.h; i++)
                    sum += p.rgb[3 * i + c];
                if (fabs(sum / p.w / p.h - atof(field[4 + c])) > 3)
                    fail_msg("%s: mean of channel %d is %.1f, not %s", field[0], c, sum / p.w / p.h,
                             field[4 + c]);
            }
            decoded++;
        }
        files++;
        free(b.p);
        free(p.rgb);
    }
    fclose(f);
    print_message("%d of %d odd pictures are decoded\n", decoded, files);
    assert_true(files >= 25);
}

/* ---- resizing */

static dnri_picture source_of(const json_t *o, dnr_source *digits)
{
    dnri_picture p = {0};
    int i;
    if (sscanf(text(o, "source"), "digit %d", &i) != 1)
        return rig_formula(integer(o, "w"), integer(o, "h"));
    dnri_buffer b = {0};
    OK(digits->ops->read(digits, i, &b));
    OK(dnri_decode(b.data, b.size, PILLOW_LIMIT, &p));
    free(b.data);
    return p;
}

/* Goldens are exact here: same weights, same rounding. The contract is a mean of 1 and a maximum of 3. */
static void as_torchvision(void **state)
{
    dnr_source *digits;
    OK(dnr_source_open(DNRI_SOURCE_DIR "/data/digits.tar:train", NULL, &digits));
    json_t *root = rig_golden("pictures.json"), *o;
    dnri_scratch scratch = {0};
    size_t i;
    int cases = 0;
    json_array_foreach(json_object_get(root, "resize"), i, o)
    {
        dnri_picture p = source_of(o, digits);
        bytes want = rig_unhex(text(o, "rgb"));
        const json_t *box = json_object_get(o, "box");
        dnr_loader_opts opts = {.image = integer(o, "image"), .resize = integer(o, "resize")};
        int side = opts.image, max;
        dnri_view v;
        if (box) {
            int b[4];
            for (size_t k = 0; k < 4; k++)
                b[k] = (int)json_integer_value(json_array_get(box, k));
            v = (dnri_view){b[1], b[0], b[3], b[2], side, side, 0, 0, false};
        } else
            v = dnri_augment(&opts, p.w, p.h, 0, 0);
        uint8_t *got = malloc(want.n), *flipped = malloc(want.n);
        assert_int_equal(want.n, side * side * 3);
        OK(dnri_resize(&p, &v, side, &scratch, got));
        double mean = mean_difference(got, want.p, want.n, &max);
        if (mean > 0)
            fail_msg("case %zu (%s, %dx%d): mean %.3f, max %d", i, text(o, "source"), p.w, p.h,
                     mean, max);
        v.flip = true;
        OK(dnri_resize(&p, &v, side, &scratch, flipped));
        for (int y = 0; y < side; y++)
            for (int x = 0; x < side; x++)
                assert_memory_equal(flipped + (y * side + x) * 3,
                                    got + (y * side + side - 1 - x) * 3, 3);
        free(got);
        free(flipped);
        free(want.p);
        free(p.rgb);
        cases++;
    }
    assert_true(cases >= 20);
    dnri_scratch_free(&scratch);
    json_decref(root);
    dnr_source_close(digits);
}

/* A window of a resized picture is that part of the whole resized picture, and black outside it. */
static void windows(void **state)
{
    dnri_scratch scratch = {0};
    dnri_rng r = DNRI_RNG(5);
    for (int k = 0; k < 200; k++) {
        int w = 1 + (int)dnri_rng_below(&r, 60), h = 1 + (int)dnri_rng_below(&r, 60), side = 48;
        dnri_picture p = rig_formula(w, h);
        bool same = dnri_rng_below(&r, 4) == 0;
        dnri_view v = {0,
                       0,
                       w,
                       h,
                       same ? w : 1 + (int64_t)dnri_rng_below(&r, 48),
                       same ? h : 1 + (int64_t)dnri_rng_below(&r, 48),
                       0,
                       0,
                       false};
        if (v.rw > side || v.rh > side)
            v.rw = v.rh = side;
        uint8_t whole[48 * 48 * 3], part[20 * 20 * 3];
        OK(dnri_resize(&p, &v, side, &scratch, whole));
        v.ox = (int64_t)dnri_rng_below(&r, 60) - 25;
        v.oy = (int64_t)dnri_rng_below(&r, 60) - 25;
        OK(dnri_resize(&p, &v, 20, &scratch, part));
        for (int y = 0; y < 20; y++)
            for (int x = 0; x < 20; x++)
                for (int c = 0; c < 3; c++) {
                    int64_t X = v.ox + x, Y = v.oy + y;
                    bool in = X >= 0 && Y >= 0 && X < v.rw && Y < v.rh;
                    assert_int_equal(part[(y * 20 + x) * 3 + c],
                                     in ? whole[(Y * side + X) * 3 + c] : 0);
                }
        free(p.rgb);
    }
    dnri_scratch_free(&scratch);
}

/* ---- augmentation */

static void random_crops(void **state)
{
    dnr_loader_opts o = {.train = true,
                         .crop = DNR_CROP_RANDOM,
                         .image = 24,
                         .flip = true,
                         .seed = 3,
                         .area_min = 0.08,
                         .area_max = 1,
                         .aspect_min = 0.75,
                         .aspect_max = 4. / 3};
    double area = 0;
    int flips = 0, n = 20000;
    for (int i = 0; i < n; i++) {
        dnri_view v = dnri_augment(&o, 400, 300, i % 7, i),
                  again = dnri_augment(&o, 400, 300, i % 7, i);
        assert_true(v.x == again.x && v.y == again.y && v.w == again.w && v.h == again.h &&
                    v.flip == again.flip);
        assert_true(v.x >= 0 && v.y >= 0 && v.w > 0 && v.h > 0 && v.x + v.w <= 400 &&
                    v.y + v.h <= 300);
        double share = (double)v.w * v.h / 120000, aspect = (double)v.w / v.h;
        assert_true(share > 0.078 && share <= 1 && aspect > 0.74 && aspect < 1.35);
        assert_true(v.rw == 24 && v.rh == 24 && v.ox == 0 && v.oy == 0);
        area += share;
        flips += v.flip;
    }
    /* Without refused tries the mean would be 0.54; torchvision's get_params gives 0.434 ± 0.001 here. */
    print_message("mean area %.4f, flipped %.3f\n", area / n, (double)flips / n);
    assert_true(fabs(area / n - 0.434) < 0.007);
    assert_true(abs(flips - n / 2) < 4 * sqrt(n / 4.));
    for (int i = 0; i < 100;
         i++) { /* too narrow for any try: the middle, as far as the aspect goes */
        dnri_view v = dnri_augment(&o, 5000, 20, 0, i), w = dnri_augment(&o, 1, 1, 0, i);
        assert_true(v.h == 20 && v.w == 27 && v.x == (5000 - 27) / 2 && v.y == 0);
        assert_true(w.x == 0 && w.y == 0 && w.w == 1 && w.h == 1);
    }
}

static void padded_crops(void **state)
{
    dnr_loader_opts o = {.train = true, .crop = DNR_CROP_PAD, .image = 32, .resize = 32, .pad = 4};
    int seen[9][9] = {{0}};
    for (int i = 0; i < 8100; i++) {
        dnri_view v = dnri_augment(&o, 32, 32, 1, i);
        assert_true(v.rw == 32 && v.rh == 32 && !v.flip);
        seen[v.oy + 4][v.ox + 4]++; /* −4 … 4 */
    }
    for (int i = 0; i < 81; i++)
        assert_true(seen[i / 9][i % 9] > 50 && seen[i / 9][i % 9] < 160); /* 100 ± 5 or 6 σ */
    dnri_view v = dnri_augment(&o, 64, 128, 0, 0);
    assert_true(v.rw == 32 && v.rh == 64 && v.oy >= -4 && v.oy <= 36);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_pillow),    cmocka_unit_test(damaged),        cmocka_unit_test(refused),
        cmocka_unit_test(odd_images),   cmocka_unit_test(as_torchvision), cmocka_unit_test(windows),
        cmocka_unit_test(random_crops), cmocka_unit_test(padded_crops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
