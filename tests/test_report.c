/* test_report.c: what a run leaves for TensorBoard, and the page of dnnrun report. Two cases use what may be missing,
 * and are then skipped: TensorBoard's own reader ($DNR_TEST_PYTHON, else python3), and Chromium. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wunused-function" /* gcc reports at the file's end: no pop */
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#include <stb/stb_image.h>

#include "clirig.h"

/* Two runs, made once: "first" with events, interrupted and taken up again. */
static void need_runs(void)
{
    if (access("first", F_OK) == 0)
        return;
    const char *const commands[] = {
        "train.epochs=4 train.max_steps=52 run.tensorboard=true --out first",
        "train.epochs=4 run.tensorboard=true --out first --resume auto --allow-changes",
        "train.epochs=2 optim.lr=0.02 train.clip_norm=1 --out second",
    };
    for (int i = 0; i < 3; i++)
        if (dnnrun("train quickstart.cfg device=cpu optim.warmup=1 run.log_every=5 "
                   "run.save_every=0.5 %s",
                   commands[i]) != 0)
            fail_msg("%s: %s", commands[i], err_text);
}

/* ---------------------------------------------------------------- TensorBoard */

/* Frames: length, checksum, that many bytes, checksum. Returns how many of them a file has. */
static int frames(const char *path)
{
    FILE *f = fopen(path, "r");
    uint8_t head[12];
    int n = 0;
    assert_non_null(f);
    while (fread(head, 1, sizeof head, f) == sizeof head) {
        uint64_t length;
        memcpy(&length, head, sizeof length); /* little-endian, as all our machines */
        assert_true(length > 0 && length < 4096);
        assert_int_equal(fseek(f, (long)length, SEEK_CUR), 0);
        assert_int_equal(fread(head, 1, 4, f), 4);
        n++;
    }
    assert_true(feof(f));
    fclose(f);
    return n;
}

static void events_are_framed(void **state)
{
    NEEDS_CPU();
    need_runs();
    sh("ls first/events.out.tfevents.* >events.txt && test $(wc -l <events.txt) = 2");
    sh("! ls second/events.out.tfevents.* 2>/dev/null");
    char *list = slurp("events.txt"), *save = NULL;
    int n = 0;
    for (char *path = strtok_r(list, "\n", &save); path; path = strtok_r(NULL, "\n", &save))
        n += frames(path);
    free(list);
    json_t *records = metrics("first"), *r;
    size_t i;
    int wanted = 3; /* two versions, one start after the resume */
    json_array_foreach(records, i, r)
    {
        const char *event = text_of(r, "event");
        wanted += !strcmp(event, "train") || !strcmp(event, "eval");
    }
    json_decref(records);
    assert_true(n >= wanted && wanted > 20); /* more: the steps that the resume took back */
}

static void tensorboard_reads_them(void **state)
{
    NEEDS_CPU();
    need_runs();
    const char *python = getenv("DNR_TEST_PYTHON");
    char command[2048];
    snprintf(command, sizeof command, "%s " DNRI_TEST_DIR "/events.py first >events.txt 2>&1",
             python ? python : "python3");
    int code = system(command);
    char *said = slurp("events.txt");
    print_message("%s", said);
    if (code == 77 << 8 || code == 127 << 8) {
        free(said);
        skip();
    }
    if (code)
        fail_msg("exit code %d", code >> 8);
    free(said);
}

/* ---------------------------------------------------------------- the page */

/* The data in the page. */
static json_t *data_of(const char *page)
{
    const char *start = strstr(page, "id=\"data\">");
    assert_non_null(start);
    start += strlen("id=\"data\">");
    char *text = strndup(start, (size_t)(strstr(start, "</script>") - start));
    json_t *j = parse(text);
    free(text);
    return j;
}

static void a_page_holds_its_runs(void **state)
{
    NEEDS_CPU();
    need_runs();
    sh("rm -rf odd; cp -r second 'odd'; echo '# </script><b>' >>odd/resolved.cfg; "
       "printf '{\"event\": \"tra' >>odd/metrics.jsonl; rm odd/plan.json");
    assert_int_equal(dnnrun("report first second/ odd -o page.html"), 0);
    assert_string_equal(out_text, "page.html: 3 runs\n");
    char *page = slurp("page.html");
    json_t *data = data_of(page), *runs = json_object_get(data, "runs"), *list = metrics("second");
    assert_int_equal(json_array_size(runs), 3);
    assert_string_equal(text_of(json_array_get(runs, 1), "name"), "second");
    for (size_t i = 1; i < 3; i++) { /* the torn line of "odd" is left out */
        json_t *got = json_object_get(json_array_get(runs, i), "metrics");
        assert_int_equal(json_array_size(got), json_array_size(list));
    }
    has(text_of(json_array_get(runs, 2), "cfg"), "# </script><b>");
    assert_true(json_is_null(json_object_get(json_array_get(runs, 2), "plan")));
    const json_t *plan = json_object_get(json_array_get(runs, 0), "plan");
    assert_true(number_of(json_object_get(plan, "memory"), "arena") > 1e5);
    /* self-contained: nothing is loaded from anywhere */
    const char *own = strstr(page, "</head>"), *rest = strstr(page, "id=\"data\"");
    const char *const loads[] = {" src=", "<link", "@import", "url("};
    for (size_t i = 0; i < 4; i++) {
        const char *p = strstr(page, loads[i]);
        assert_true(!p || (p > own && p < rest)); /* Chart.js speaks of such things */
        assert_null(strstr(rest, loads[i]));
    }
    has(page, "Chart.js v");
    json_decref(data);
    json_decref(list);
    free(page);
}

static void wrong_usage(void **state)
{
    NEEDS_CPU();
    need_runs();
    fails(2, "report", "report of which runs", "dnnrun report runs/*");
    fails(2, "report first none", "none is no run", "dnnrun train");
    fails(2, "report first --json", "report has no option --json", "");
    fails(7, "report first -o none/page.html", "cannot write none/page.html", "-o FILE");
    fails(7, "report first -o first", "cannot write first: Is a directory", "-o FILE");
    if (access("/dev/full", W_OK) == 0)
        fails(7, "report first -o /dev/full", "No space left", "free some space");
    assert_int_not_equal(access("report.html", F_OK), 0);
}

static void a_page_follows_links_and_pipes(void **state)
{
    struct stat sb;
    NEEDS_CPU();
    need_runs();
    assert_int_equal(dnnrun("report first -o plain.html"), 0);
    sh("mkdir elsewhere && echo old >elsewhere/page.html && ln -s elsewhere/page.html link.html");
    assert_int_equal(dnnrun("report first -o link.html"), 0);
    assert_int_equal(lstat("link.html", &sb), 0);
    assert_true(S_ISLNK(sb.st_mode));
    assert_int_equal(dnnrun("report first -o /dev/stdout"), 0);
    char *page = slurp("plain.html"), *linked = slurp("elsewhere/page.html");
    assert_string_equal(linked, page);
    assert_string_equal(out_text, page);
    free(page);
    free(linked);
}

/* The browser's name, or NULL where there is none. */
static const char *browser(void)
{
    static const char *const names[] = {"chromium-headless-shell", "chromium", "chromium-browser",
                                        "google-chrome"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char command[128];
        snprintf(command, sizeof command, "command -v %s >/dev/null", names[i]);
        if (system(command) == 0)
            return names[i];
    }
    print_message("skipped: no Chromium\n");
    return NULL;
}

static void browse(const char *with)
{
    sh("timeout 120 %s --headless --no-sandbox --disable-gpu --hide-scrollbars "
       "--user-data-dir=$PWD/browser "
       "--window-size=1300,2400 --virtual-time-budget=8000 %s \"file://$PWD/page.html\" >dom.html "
       "2>browser.txt",
       browser(), with);
}

/* The attribute in which the page says what it drew. */
static json_t *drawn(const char *dom)
{
    const char *p = strstr(dom, "data-curves=\"");
    char *text = NULL;
    size_t size;
    assert_non_null(p);
    FILE *m = open_memstream(&text, &size);
    for (p += strlen("data-curves=\""); *p != '"'; p++) {
        bool quote = !strncmp(p, "&quot;", 6);
        fputc(quote ? '"' : *p, m);
        p += quote ? 5 : 0;
    }
    fclose(m);
    json_t *j = parse(text);
    free(text);
    return j;
}

static int pixels_of(const uint8_t *rgb, int n, int r, int g, int b)
{
    int count = 0;
    for (int i = 0; i < n; i++)
        count += abs(rgb[3 * i] - r) + abs(rgb[3 * i + 1] - g) + abs(rgb[3 * i + 2] - b) < 12;
    return count;
}

static void the_curves_are_there(void **state)
{
    static const struct {
        const char *title;
        size_t curves;
    } charts[] = {{"Loss", 4},       {"Accuracy", 4},       {"Learning rate", 2}, {"Loss scale", 2},
                  {"Throughput", 2}, {"Time of a step", 4}, {"Gradient norm", 1}};
    NEEDS_CPU();
    need_runs();
    if (!browser())
        skip();
    assert_int_equal(dnnrun("report first second -o page.html"), 0);
    browse("--dump-dom");
    char *dom = slurp("dom.html");
    json_t *list = drawn(dom);
    assert_int_equal(json_array_size(list), 7);
    for (size_t i = 0; i < 7; i++) {
        const json_t *chart = json_array_get(list, i), *curves = json_object_get(chart, "curves");
        assert_string_equal(text_of(chart, "title"), charts[i].title);
        assert_int_equal(json_array_size(curves), charts[i].curves);
        for (size_t k = 0; k < charts[i].curves; k++) {
            assert_true(number_of(json_array_get(curves, k), "points") >= 2);
            assert_true(number_of(json_array_get(curves, k), "width") > 40); /* pixels */
        }
    }
    json_decref(list);
    int rects = 0; /* tensors of the memory maps */
    for (const char *p = dom; (p = strstr(p, "<rect")); p++)
        rects++;
    assert_true(rects > 100);
    has(dom, "<td>second</td>");
    free(dom);

    browse("--screenshot=$PWD/page.png");
    int w, h, c;
    uint8_t *rgb = stbi_load("page.png", &w, &h, &c, 3);
    assert_non_null(rgb);
    assert_true(pixels_of(rgb, w * h, 0x25, 0x63, 0xeb) > 1000); /* the first run's colour */
    assert_true(pixels_of(rgb, w * h, 0xdc, 0x26, 0x26) > 500);  /* the second's */
    stbi_image_free(rgb);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_are_framed),
        cmocka_unit_test(tensorboard_reads_them),
        cmocka_unit_test(a_page_holds_its_runs),
        cmocka_unit_test(wrong_usage),
        cmocka_unit_test(a_page_follows_links_and_pipes),
        cmocka_unit_test(the_curves_are_there),
    };
    return cmocka_run_group_tests(tests, cli_set_up, cli_tear_down);
}
