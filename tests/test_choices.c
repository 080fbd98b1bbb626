/* test_choices.c: the file of choices: kept, merged, by machine, and safe when damaged, unwritable or shared. */
#include "rig.h"
#include "../runtime/choices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/dnnrun-choices-XXXXXX", path[128];

static dnri_choices *open_as(const char *machine)
{
    dnri_choices *c;
    OK(dnri_choices_open(path, machine, &c));
    return c;
}

static void keep(const char *machine, const char *key, const char *text)
{
    dnri_choices *c = open_as(machine);
    OK(dnri_choices_set(c, key, text));
    assert_string_equal(dnri_choices_get(c, key), text);
    dnri_choices_save(c);
    dnri_choices_free(c);
}

static void expect(const char *machine, const char *key, const char *text)
{
    dnri_choices *c = open_as(machine);
    const char *got = dnri_choices_get(c, key);
    if (text)
        assert_non_null(got);
    if (text)
        assert_string_equal(got, text);
    else
        assert_null(got);
    dnri_choices_free(c);
}

static void put_file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void test_keeps(void **state)
{
    expect("a", "k", NULL);
    keep("a", "k", "67 2=4");
    expect("a", "k", "67 2=4");
    expect("b", "k", NULL); /* another GPU, driver or cuDNN */
    keep("b", "k", "12");
    keep("a", "l", "\"odd\" text\n\xc3\xa9");
    expect("a", "k", "67 2=4");
    expect("a", "l", "\"odd\" text\n\xc3\xa9");
    expect("b", "k", "12");
    keep("a", "k", "5"); /* chosen anew */
    expect("a", "k", "5");
    dnri_choices *c = open_as("a"); /* never saved */
    OK(dnri_choices_set(c, "lost", "1"));
    dnri_choices_free(c);
    expect("a", "lost", NULL);
}

/* What another process added meanwhile stays; an unchanged set of choices writes nothing. */
static void test_merges(void **state)
{
    dnri_choices *c = open_as("a"), *d = open_as("a");
    struct stat before, after;
    OK(dnri_choices_set(c, "from c", "1"));
    OK(dnri_choices_set(d, "from d", "2"));
    dnri_choices_save(c);
    dnri_choices_save(d);
    expect("a", "from c", "1");
    expect("a", "from d", "2");
    assert_int_equal(stat(path, &before), 0);
    OK(dnri_choices_set(d, "from d", "2"));
    dnri_choices_save(d);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino); /* not replaced */
    dnri_choices_free(c);
    dnri_choices_free(d);
}

static int warnings;
static void count_warning(void *ctx, dnr_log_level level, const char *message)
{
    warnings += level == DNR_LOG_WARN && strstr(message, path);
}

static void test_damage(void **state)
{
    static const char *const bad[] = {
        "",
        "{",
        "[]",
        "nonsense",
        "{\"kind\": \"dnnrun choices\", \"version\": 2, \"machines\": {}}",
        "{\"kind\": \"other\", \"version\": 1, \"machines\": {}}",
        "{\"kind\": \"dnnrun choices\", \"version\": 1}",
        "{\"kind\": \"dnnrun choices\", \"version\": 1, \"machines\": []}",
        "{\"kind\": \"dnnrun choices\", \"version\": 1, \"machines\": {\"a\": 3}}",
        "{\"kind\": \"dnnrun choices\", \"version\": 1, \"machines\": {\"a\": {\"k\": [1]}}}",
        "{\"kind\": \"dnnrun choices\", \"version\": 1, \"machines\": {\"a\": {\"k\": \"1\"",
    };
    dnr_set_log(count_warning, NULL);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put_file(bad[i]);
        warnings = 0;
        expect("a", "k", NULL);
        assert_int_equal(warnings, 1);
        keep("a", "k", "7"); /* and is whole again */
        warnings = 0;
        expect("a", "k", "7");
        assert_int_equal(warnings, 0);
    }
    dnr_set_log(NULL, NULL);
}

/* Bytes lost or changed anywhere never do worse than lose choices. */
static void test_every_byte(void **state)
{
    char text[1024];
    unlink(path);
    keep("a", "k", "67 2=4");
    FILE *f = fopen(path, "r");
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    dnr_set_log(count_warning, NULL);
    for (size_t i = 0; i < n; i++) {
        const char was = text[i];
        text[i] = 0; /* cut */
        put_file(text);
        dnri_choices_free(open_as("a"));
        text[i] = (char)(was ^ 1);
        put_file(text);
        dnri_choices_free(open_as("a"));
        text[i] = was;
    }
    put_file(text);
    dnr_set_log(NULL, NULL);
    expect("a", "k", "67 2=4");
}

static void test_unwritable(void **state)
{
    char was[sizeof path];
    memcpy(was, path, sizeof path);
    snprintf(path, sizeof path, "%s/file/below/choices.json", folder);
    char file[sizeof folder + 8];
    snprintf(file, sizeof file, "%s/file", folder);
    FILE *f = fopen(file, "w");
    fclose(f);
    dnr_set_log(count_warning, NULL);
    warnings = 0;
    dnri_choices *c = open_as("a");
    OK(dnri_choices_set(c, "k", "1"));
    dnri_choices_save(c);
    dnri_choices_save(c);
    assert_int_equal(warnings, 1); /* once, and training goes on */
    assert_string_equal(dnri_choices_get(c, "k"), "1");
    dnri_choices_free(c);
    dnr_set_log(NULL, NULL);
    unlink(file);
    memcpy(path, was, sizeof path);
}

/* Another device takes them, if its machine is the same; they stay in memory. */
static void test_travels(void **state)
{
    unlink(path);
    dnri_choices *a = open_as("a"), *b = open_as("b"), *mine, *none;
    OK(dnri_choices_open(NULL, "a", &none));
    OK(dnri_choices_set(a, "k", "1 \"odd\"\n"));
    OK(dnri_choices_set(a, "l", "2"));
    char *text = dnri_choices_text(a);
    assert_non_null(text);
    OK(dnri_choices_set(none, "l", "3"));
    assert_true(dnri_choices_take(none, text));
    assert_string_equal(dnri_choices_get(none, "k"), "1 \"odd\"\n");
    assert_string_equal(dnri_choices_get(none, "l"), "2");
    dnri_choices_save(none); /* nowhere */
    assert_false(dnri_choices_take(b, text));
    assert_null(dnri_choices_get(b, "k"));
    mine = open_as("a");
    assert_true(dnri_choices_take(mine, text));
    dnri_choices_save(mine);
    assert_true(access(path, F_OK) != 0); /* rank 0's are saved by rank 0 */
    static const char *const bad[] = {"", "{", "[]", "{\"machine\": \"a\"}",
                                      "{\"machine\": \"a\", \"choices\": {\"k\": 1}}"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(dnri_choices_take(mine, bad[i]));
    for (size_t i = 0; text[i]; i++) { /* cut anywhere */
        char *cut = strndup(text, i);
        assert_false(dnri_choices_take(mine, cut));
        free(cut);
    }
    free(text);
    dnri_choices_free(a);
    dnri_choices_free(b);
    dnri_choices_free(mine);
    dnri_choices_free(none);
}

/* Several processes write: the file is whole at every moment, and the last of each has all of its own keys. */
static void test_shared(void **state)
{
    enum { PROCESSES = 4, ROUNDS = 25 };
    unlink(path);
    keep("a", "k", "1");
    warnings = 0;
    for (int p = 0; p < PROCESSES; p++)
        if (fork() == 0) {
            char key[32];
            dnr_set_log(count_warning, NULL);
            for (int i = 0; i < ROUNDS; i++) {
                snprintf(key, sizeof key, "%d %d", p, i);
                dnri_choices *c;
                if (dnri_choices_open(path, "a", &c) != DNR_OK ||
                    dnri_choices_set(c, key, "2") != DNR_OK)
                    _exit(1);
                dnri_choices_save(c);
                dnri_choices_free(c);
            }
            _exit(warnings ? 2 : 0); /* it never read half a file */
        }
    for (int p = 0; p < PROCESSES; p++) {
        int status;
        assert_true(wait(&status) > 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    expect("a", "k", "1");
    char left[256];
    snprintf(left, sizeof left, "test $(ls %s | wc -l) = 1", folder); /* no temporary file stays */
    assert_int_equal(system(left), 0);
}

static int make_folder(void **state)
{
    if (!mkdtemp(folder))
        return 1;
    snprintf(path, sizeof path, "%s/deep/er/choices.json", folder);
    return 0;
}

static int remove_folder(void **state)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps),      cmocka_unit_test(test_merges),
        cmocka_unit_test(test_damage),     cmocka_unit_test(test_every_byte),
        cmocka_unit_test(test_unwritable), cmocka_unit_test(test_travels),
        cmocka_unit_test(test_shared),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
