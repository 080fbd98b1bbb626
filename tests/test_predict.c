/* test_predict.c: dnnrun predict from outside: what it sees, where it takes the model from, and its errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clirig.h"

#define WEIGHTS "run/checkpoints/last/model.safetensors"

/* A short run on the digits, made once, and the digits as files. */
static void need_run(void)
{
    if (access("run", F_OK) == 0)
        return;
    sh("mkdir digits && tar -xf " DNRI_TEST_DIR "/../data/digits.tar -C digits");
    if (dnnrun("train quickstart.cfg device=cpu train.epochs=4 optim.warmup=1 --out run") != 0)
        fail_msg("%s", err_text);
}

/* The lines of the last output as a JSON array. */
static json_t *lines(void)
{
    char *save = NULL;
    json_t *list = json_array();
    for (char *line = strtok_r(out_text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        json_array_append_new(list, parse(line));
    return list;
}

/* Copies the weights with every `from` of the header made `to`, which is as long. */
static void doctor(const char *file, const char *from, const char *to)
{
    assert_int_equal(strlen(from), strlen(to));
    sh("LC_ALL=C sed 's/%s/%s/' " WEIGHTS " >%s", from, to, file);
}

static void sees_what_eval_sees(void **state)
{
    NEEDS_CPU();
    need_run();
    assert_int_equal(dnnrun("eval run --weights " WEIGHTS " --json"), 0);
    json_t *j = parse(out_text);
    double correct1 = number_of(j, "correct1"), images = number_of(j, "images");
    json_decref(j);
    assert_int_equal(dnnrun("predict --weights " WEIGHTS " digits/test --json device=cpu --top 10"),
                     0);
    json_t *list = lines(), *one;
    size_t i;
    int right = 0;
    char last[256] = "";
    assert_int_equal(json_array_size(list), (int)images);
    json_array_foreach(list, i, one)
    {
        const char *image = text_of(one, "image");
        const json_t *top = json_object_get(one, "top");
        double sum = 0, before = 1;
        assert_true(strcmp(last, image) < 0); /* sorted */
        snprintf(last, sizeof last, "%s", image);
        assert_int_equal(json_array_size(top), 10);
        for (size_t k = 0; k < 10; k++) {
            const json_t *guess = json_array_get(top, k);
            double p = number_of(guess, "probability");
            char name[8];
            snprintf(name, sizeof name, "%d", (int)number_of(guess, "class"));
            assert_string_equal(text_of(guess, "name"), name);
            assert_true(p >= 0 && p <= before);
            before = p;
            sum += p;
        }
        assert_true(sum > 0.9999 && sum < 1.0001);
        /* digits/test/CLASS/… */
        right += image[strlen("digits/test/")] == *text_of(json_array_get(top, 0), "name");
    }
    assert_int_equal(right, (int)correct1);
    assert_true(right > 0.8 * images);
    json_decref(list);
}

static void shows_pictures_where_asked(void **state)
{
    NEEDS_CPU();
    need_run();
    sh("cp \"$(ls digits/test/7/*.png | head -1)\" 'a=7.png'");
    assert_int_equal(dnnrun("predict 'a=7.png' --weights " WEIGHTS " device=cpu"), 0);
    assert_false(strstr(out_text, "▀"));
    has(out_text, "a=7.png: 7 ");
    char *same = strdup(out_text); /* a run stands for its last weights */
    assert_int_equal(dnnrun("predict run 'a=7.png' device=cpu"), 0);
    assert_string_equal(out_text, same);
    free(same);
    assert_int_equal(dnnrun("predict 'a=7.png' --weights " WEIGHTS " device=cpu --show --top 1"),
                     0);
    int rows = 0;
    for (const char *p = out_text; (p = strstr(p, "\033[0m\n")); p++)
        rows++;
    assert_int_equal(rows, 8); /* 8 pixels, enlarged to 16, two a row */
    has(out_text, "a=7.png: 7 ");
    assert_null(strchr(strstr(out_text, "a=7.png"), ','));
}

static void takes_the_model_from_the_file_or_the_cfg(void **state)
{
    NEEDS_CPU();
    need_run();
    doctor("anonymous.safetensors", "\"architecture\"", "\"xrchitecture\"");
    fails(2, "predict --weights anonymous.safetensors digits/test/7 device=cpu",
          "does not say which model", "predict resnet50.cfg --weights");
    assert_int_equal(
        dnnrun("predict --weights anonymous.safetensors digits/test/7 model.name=resnet8 "
               "device=cpu"),
        0);
    has(out_text, "digits/test/7/");
    doctor("nameless.safetensors", "\"class_names\"", "\"xlass_names\"");
    assert_int_equal(dnnrun("predict --weights nameless.safetensors digits/test/7 device=cpu"), 0);
    has(out_text, ": class 7 ");
    assert_int_equal(
        dnnrun("predict quickstart.cfg --weights nameless.safetensors digits/test/7 device=cpu"),
        0);
    has(out_text, ": 7 "); /* the names of its data */
    fails(3, "predict --weights " WEIGHTS " digits/test/7 device=cpu model.name=resnet20",
          "does not fit resnet20", "weights of this model");
    /* a key on the command line holds before the file's names of classes are looked at */
    assert_int_equal(dnnrun("predict resnet50.cfg --weights " WEIGHTS
                            " digits/test/7 device=cpu model.classes=10"),
                     0);
    has(out_text, ": 7 ");
}

static void odd_metadata_is_refused(void **state)
{
    NEEDS_CPU();
    need_run();
    doctor("classes.safetensors", "\"classes\":\"10\"", "\"classes\":\"-1\"");
    fails(3, "predict --weights classes.safetensors digits/test/7 device=cpu",
          "its metadata classes cannot be used", "command line");
    sh("LC_ALL=C sed 's/\\\\\"8\\\\\",/      /' " WEIGHTS " >names.safetensors");
    fails(3, "predict --weights names.safetensors digits/test/7 device=cpu",
          "its metadata class_names cannot be used", "command line");
}

static void bad_pictures_do_not_stop_the_others(void **state)
{
    NEEDS_CPU();
    need_run();
    sh("mkdir -p mixed/deep; cp digits/test/3/*.png mixed/deep; echo no >mixed/a.png; echo no "
       ">mixed/notes.txt");
    fails(3, "predict --weights " WEIGHTS " mixed --json device=cpu", "1 of ", "JPEG, PNG and BMP");
    json_t *list = lines();
    const json_t *first = json_array_get(list, 0);
    assert_true(json_array_size(list) > 20);
    assert_string_equal(text_of(first, "image"), "mixed/a.png");
    has(text_of(first, "error"), "not a picture");
    text_of(json_array_get(json_object_get(json_array_get(list, 1), "top"), 0), "name");
    json_decref(list);
}

static void wrong_usage(void **state)
{
    NEEDS_CPU();
    need_run();
    fails(2, "predict digits/test/7", "which weights", "--weights FILE");
    fails(2, "predict --weights " WEIGHTS, "needs pictures", "name pictures");
    fails(2, "predict --weights " WEIGHTS " digits/test/7 --top 0", "--top 0", "whole number");
    fails(2, "predict --weights " WEIGHTS " digits/test/7 --tpo 3", "has no option --tpo",
          "did you mean --top?");
    fails(2, "predict nothere.cfg --weights " WEIGHTS " digits/test/7", "there is no cfg", "");
    fails(3, "predict --weights none.safetensors digits/test/7", "none.safetensors", "");
    fails(3, "predict --weights " WEIGHTS " digits/none.png", "digits/none.png: No such file", "");
    sh("mkdir -p hollow");
    fails(3, "predict --weights " WEIGHTS " hollow", "hollow holds no pictures", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sees_what_eval_sees),
        cmocka_unit_test(shows_pictures_where_asked),
        cmocka_unit_test(takes_the_model_from_the_file_or_the_cfg),
        cmocka_unit_test(odd_metadata_is_refused),
        cmocka_unit_test(bad_pictures_do_not_stop_the_others),
        cmocka_unit_test(wrong_usage),
    };
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
