/* test_config.c: the cfg parser: every key's bad values, nearest names, line numbers, checks over several keys. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "../tools/config.h"

static cfg c;
static dnr_error err;

static dnr_status read_bytes(const char *text, size_t n)
{
    FILE *f = fmemopen((void *)(uintptr_t)text, n ? n : 1, "r");
    assert_non_null(f);
    if (!n)
        fgetc(f);
    err = (dnr_error){0};
    cfg_init(&c);
    dnr_status st = cfg_read(&c, f, "dir/t.cfg", &err);
    fclose(f);
    return st;
}

static dnr_status read_text(const char *text)
{
    return read_bytes(text, strlen(text));
}

static void assert_has(const char *text, const char *part)
{
    if (!strstr(text, part))
        fail_msg("\"%s\" does not contain \"%s\"", text, part);
}

/* The text is refused with this place, and these parts of message and remedy. */
static void refused(const char *text, const char *where, const char *what, const char *remedy)
{
    assert_int_equal(read_text(text), DNR_EUSAGE);
    assert_int_equal(err.status, DNR_EUSAGE);
    assert_string_equal(err.where, where);
    assert_has(err.what, what);
    assert_has(err.remedy, remedy);
}

/* "[section]\nkey = value\n": the value stands in line 2, or 1 for a key without a section. */
static void one_key(const cfg_key *k, const char *value, char *buf, size_t size)
{
    const char *dot = strchr(k->name, '.');
    if (dot)
        snprintf(buf, size, "[%.*s]\n%s = %s\n", (int)(dot - k->name), k->name, dot + 1, value);
    else
        snprintf(buf, size, "%s = %s\n", k->name, value);
}

static void bad(const cfg_key *k, const char *value)
{
    char text[2048];
    one_key(k, value, text, sizeof text);
    if (read_text(text) != DNR_EUSAGE)
        fail_msg("%s = %s was accepted", k->name, value);
    assert_string_equal(err.where, strchr(k->name, '.') ? "dir/t.cfg:2" : "dir/t.cfg:1");
    assert_has(err.what, k->name);
    assert_has(err.remedy, k->type == CFG_PATH || k->type == CFG_STRING ? "" : "allowed: ");
    assert_true(strlen(err.remedy) > 8);
}

static void good(const cfg_key *k, const char *value, const char *reads)
{
    char text[2048], back[CFG_TEXT];
    one_key(k, value, text, sizeof text);
    if (read_text(text) != DNR_OK)
        fail_msg("%s = %s was refused: %s", k->name, value, err.what);
    assert_string_equal(cfg_value(&c, k, back), reads);
}

static const char *number(double v)
{
    static char buf[64];
    snprintf(buf, sizeof buf, "%.17g", v);
    return buf;
}

static void every_default_is_allowed(void **state)
{
    for (int i = 0; i < cfg_n_keys; i++) {
        const cfg_key *k = &cfg_keys[i];
        char assignment[256];
        assert_true(strlen(k->doc) > 20);
        snprintf(assignment, sizeof assignment, "%s=%s", k->name, k->unset);
        cfg_init(&c);
        if (cfg_set(&c, assignment, &err) != DNR_OK)
            fail_msg("%s: %s", assignment, err.what);
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(k->name, cfg_keys[j].name);
            assert_true(k->offset != cfg_keys[j].offset);
        }
    }
}

static void every_key_refuses_bad_values(void **state)
{
    for (int i = 0; i < cfg_n_keys; i++) {
        const cfg_key *k = &cfg_keys[i];
        char buf[CFG_TEXT + 16], list[512];
        switch (k->type) {
        case CFG_BOOL:
            for (const char *const *v = (const char *[]){"yes", "1", "True", "", "truee", NULL}; *v;
                 v++)
                bad(k, *v);
            good(k, "true", "true");
            good(k, "false", "false");
            break;
        case CFG_INT:
            for (const char *const *v = (const char *[]){"x", "", "1.5", "1e3", "0x10", "12 13",
                                                         "99999999999999999999", "nan", NULL};
                 *v; v++)
                bad(k, *v);
            snprintf(buf, sizeof buf, "%.0f", k->min - 1);
            bad(k, buf);
            snprintf(buf, sizeof buf, "%.0f", k->min);
            good(k, buf, buf);
            snprintf(buf, sizeof buf, "%.0f", k->max);
            good(k, buf, buf);
            if (k->max < 1e15) {
                snprintf(buf, sizeof buf, "%.0f", k->max + 1);
                bad(k, buf);
            }
            break;
        case CFG_REAL:
            for (const char *const *v = (const char *[]){"x", "", "0.1x", "nan", "inf", "-inf",
                                                         "1e999", "0,1", "1 2", NULL};
                 *v; v++)
                bad(k, *v);
            bad(k, number(k->min - 1));
            bad(k, number(k->max * 1.001));
            if (k->above)
                bad(k, number(k->min));
            else
                good(k, number(k->min), number(k->min));
            snprintf(buf, sizeof buf, "%g", k->max);
            good(k, buf, buf);
            break;
        case CFG_REALS:
            bad(k, "1 x");
            bad(k, "nan");
            bad(k, number(k->max + 1));
            bad(k, "1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1");
            if (k->count)
                bad(k, "0.5 0.5");
            good(k, "0.25, 0.5 1", "0.25 0.5 1");
            break;
        case CFG_CHOICE:
            bad(k, "nonsense");
            bad(k, "");
            cfg_choices(k, list);
            for (char *save = NULL, *p = strtok_r(list, "|", &save); p;
                 p = strtok_r(NULL, "|", &save)) {
                good(k, p, p);
                snprintf(buf, sizeof buf, "%.*s", (int)strlen(p) - 1,
                         p); /* the last letter forgotten */
                bad(k, buf);
                snprintf(buf, sizeof buf, "%sx", p);
                bad(k, buf);
                assert_has(err.remedy, "did you mean ");
            }
            break;
        case CFG_STRING:
        case CFG_PATH:
            good(k, "", "");
            break;
        }
    }
}

static void model_names_are_the_librarys(void **state)
{
    for (const char *const *m = dnr_model_names(); *m; m++) {
        char text[128];
        snprintf(text, sizeof text, "[model]\nname = %s\n", *m);
        assert_int_equal(read_text(text), DNR_OK);
        assert_string_equal(c.model.name, *m);
    }
    refused("[model]\nname = resnet5O\n", "dir/t.cfg:2", "model.name = resnet5O",
            "did you mean resnet50?");
    refused("[model]\nname = vgg\n", "dir/t.cfg:2", "vgg", "resnet18 | ");
}

static void unknown_keys_name_the_nearest(void **state)
{
    static const struct {
        const char *text, *where, *what, *near;
    } t[] = {
        {"[train]\nbatchs = 4\n", "dir/t.cfg:2", "unknown key train.batchs",
         "did you mean train.batch?"},
        {"[train]\n\n# x\nlr = 4\n", "dir/t.cfg:4", "unknown key train.lr",
         "did you mean optim.lr?"},
        {"[optimizer]\nlr = 4\n", "dir/t.cfg:2", "unknown key optimizer.lr",
         "did you mean optim.lr?"},
        {"[optim]\nwieght_decay = 4\n", "dir/t.cfg:2", "optim.wieght_decay",
         "did you mean optim.weight_decay?"},
        {"[Train]\nBatch = 4\n", "dir/t.cfg:2", "unknown key Train.Batch",
         "did you mean train.batch?"},
        {"[train]\ndevice = cpu\n", "dir/t.cfg:2", "train.device",
         "did you mean device? (It stands before"},
        {"[train]\ntrain.batch = 4\n", "dir/t.cfg:2", "train.train.batch",
         "did you mean train.batch?"},
        {"divice = cpu\n", "dir/t.cfg:1", "unknown key divice", "did you mean device?"},
        {"[train]\nzzzzzzzzzzzzzz = 4\n", "dir/t.cfg:2", "train.zzzzzzzzzzzzzz",
         "all keys: docs/cfg.md"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++)
        refused(t[i].text, t[i].where, t[i].what, t[i].near);
}

static void lines_are_counted(void **state)
{
    refused("\xEF\xBB\xBF# mark\r\n\r\n[train]\r\n  batch = 4 ; c\r\n\tepochs = x\r\n",
            "dir/t.cfg:5", "train.epochs = x", "allowed");
    refused("[train]\nbatch = 4\n   seed = -1\n", "dir/t.cfg:3", "train.seed = -1",
            "allowed: 0 … ");
    refused("[train]\nbatch\n", "dir/t.cfg:2", "neither [section] nor key = value", "docs/cfg.md");
    refused("[train\nbatch = 3\n", "dir/t.cfg:1", "neither [section]", "docs/cfg.md");
    refused("[train] batch = 3\n", "dir/t.cfg:1", "text after a section's name", "line of its own");
    refused("[train]\nbatch = 3\nseed = 1\nbatch = 4\n", "dir/t.cfg:4",
            "train.batch is given twice, first at dir/t.cfg:2", "remove one");
    /* the first error is the one reported */
    refused("[train]\nbatch = x\nseed = y\nnonsense\n", "dir/t.cfg:2", "train.batch = x",
            "allowed: 1 … 65536 pictures");
}

static void odd_files(void **state)
{
    char text[4096];
    snprintf(text, sizeof text, "[data]\n%0*d = x\n", 400, 1);
    refused(text, "dir/t.cfg:2", "name longer than 190", "names of all keys");
    snprintf(text, sizeof text, "[data]\ntrain = %0*d\n", CFG_TEXT, 1);
    refused(text, "dir/t.cfg:2", "the path is too long", "docs/cfg.md");
    snprintf(text, sizeof text, "[data]\ntrain = %0*d # c\n", CFG_TEXT - 1, 1);
    assert_int_equal(read_text(text), DNR_OK);
    assert_int_equal(strlen(c.data.train), CFG_TEXT - 1);
    snprintf(text, sizeof text, "[data]\n# %0*d\ntrain = a # %0*d\n", 1500, 1, 1500,
             1); /* comments may be long */
    assert_int_equal(read_text(text), DNR_OK);
    assert_string_equal(c.data.train, "a");
    assert_int_equal(read_bytes("[train]\nba\0tch = 3\n", 19), DNR_EUSAGE);
    assert_string_equal(err.where, "dir/t.cfg:2");
    assert_has(err.what, "zero byte");
    assert_int_equal(read_text(""), DNR_OK);
    assert_int_equal(read_text("# nothing"), DNR_OK);
    assert_int_equal(read_text("[train]\nbatch = 8"), DNR_OK); /* no newline at the end */
    assert_int_equal(c.train.batch, 8);
    assert_int_equal(
        read_text("device = cuda:1\n[data]\ntrain = a b#c;d\n[train]\nseed=3\n[data]\nval : x=y\n"),
        DNR_OK);
    assert_string_equal(c.device, "cuda:1");
    assert_string_equal(c.data.train, "a b#c;d"); /* a comment begins after a blank */
    assert_string_equal(c.data.val, "x=y");
    assert_string_equal(c.name, "t");
}

static void command_line_wins(void **state)
{
    char where[96];
    assert_int_equal(read_text("[train]\nbatch = 8\nseed = 5\n"), DNR_OK);
    assert_int_equal(cfg_set(&c, "train.batch=16", &err), DNR_OK);
    assert_int_equal(cfg_set(&c, "data.train=a=b", &err), DNR_OK);
    assert_int_equal(cfg_set(&c, "data.val = x y", &err), DNR_OK);
    assert_string_equal(c.data.val, "x y");
    assert_int_equal(
        cfg_set(&c, "optim.milestones=1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17", &err),
        DNR_EUSAGE);
    assert_has(err.what, "more than 16 numbers");
    assert_int_equal(c.train.batch, 16);
    assert_string_equal(c.data.train, "a=b");
    assert_string_equal(cfg_origin(&c, "train.batch", where), "command line");
    assert_string_equal(cfg_origin(&c, "train.seed", where), "dir/t.cfg:3");
    assert_string_equal(cfg_origin(&c, "train.epochs", where), "default");
    assert_int_equal(cfg_set(&c, "train.batch=32", &err), DNR_EUSAGE);
    assert_has(err.what, "train.batch is given twice");
    assert_int_equal(cfg_set(&c, "train.epochs=0", &err), DNR_EUSAGE);
    assert_string_equal(err.where, "command line");
    assert_has(err.remedy, "allowed: 1 … 1000000 epochs");
    assert_int_equal(cfg_set(&c, "other.cfg", &err), DNR_EUSAGE);
    assert_has(err.what, "not of the form section.key=value");
    assert_int_equal(cfg_set(&c, "=3", &err), DNR_EUSAGE);
    assert_int_equal(cfg_set(&c, "trian.batch=3", &err), DNR_EUSAGE);
    assert_has(err.remedy, "did you mean train.batch?");
}

static void checks_over_several_keys(void **state)
{
    static const struct {
        const char *text, *where, *what;
    } t[] = {
        {"[train]\nseed = 1\n", "default", "model.name is missing"},
        {"[model]\nname = resnet20\n[data]\nresize = 200\n", "dir/t.cfg:4",
         "data.resize = 200 is less than data.image = 224"},
        {"[model]\nname = resnet20\n[data]\ncrop = pad\n", "dir/t.cfg:4",
         "crop = pad needs data.pad"},
        {"[model]\nname = resnet20\n[data]\npad = 4\n", "dir/t.cfg:4", "only with data.crop = pad"},
        {"[model]\nname = resnet20\n[data]\narea_min = 0.9\narea_max = 0.8\n", "dir/t.cfg:4",
         "data.area_min"},
        {"[model]\nname = resnet20\n[data]\naspect_min = 2\n", "dir/t.cfg:4", "data.aspect_min"},
        {"[model]\nname = resnet18\nstem = imagenet\n[data]\nimage = 31\n", "dir/t.cfg:5",
         "31 pixels are too small"},
        {"[model]\nname = resnet50\n[data]\nimage = 8\n", "dir/t.cfg:4",
         "8 pixels are too small for resnet50"},
        {"[model]\nname = resnet20\n[optim]\nwarmup = 90\n", "dir/t.cfg:4",
         "leaves nothing of train.epochs = 90"},
        {"[model]\nname = resnet20\n[optim]\nschedule = onecycle\nwarmup = 1\n", "dir/t.cfg:5",
         "a warm-up of its own"},
        {"[model]\nname = resnet20\n[optim]\nschedule = multistep\n", "dir/t.cfg:4",
         "needs optim.milestones"},
        {"[model]\nname = resnet20\n[optim]\nmilestones = 3 2\n", "dir/t.cfg:4", "2 comes after 3"},
        {"[model]\nname = resnet20\n[optim]\nnesterov = true\nmomentum = 0\n", "dir/t.cfg:4",
         "needs optim.momentum"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        assert_int_equal(read_text(t[i].text), DNR_OK);
        assert_int_equal(cfg_check(&c, &err), DNR_EUSAGE);
        assert_string_equal(err.where, t[i].where);
        assert_has(err.what, t[i].what);
        assert_true(strlen(err.remedy) > 3);
    }
    assert_int_equal(read_text("[model]\nname = resnet50\n"), DNR_OK);
    assert_int_equal(cfg_check(&c, &err), DNR_OK);
}

static void pins(void **state)
{
    static const char *const bad[][2] = {
        {"[cudnn]\npin.conv1 = eng3\n", "names no pass of a layer"},
        {"[cudnn]\npin.fprop = eng3\n", "names no pass of a layer"},
        {"[cudnn]\npin.conv1.fprop =\n", "is no engine"},
        {"[cudnn]\npin.conv1.fprop = eng3\npin.conv1.fprop = eng4\n", "given twice"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(read_text(bad[i][0]), DNR_EUSAGE);
        assert_non_null(strstr(err.what, bad[i][1]));
        assert_true(err.remedy[0]);
    }
    assert_int_equal(read_text("[cudnn]\npin.conv1.fprop = eng3\npin.conv1.dgrad = eng5\n"),
                     DNR_OK);
    assert_int_equal(cfg_set(&c, "cudnn.pin.conv1.fprop=eng4 k2=4", &err), DNR_OK); /* wins */
    assert_int_equal(cfg_set(&c, "cudnn.pin.conv1.fprop=eng5", &err), DNR_EUSAGE);
    assert_int_equal(c.n_pins, 2);
    assert_string_equal(c.pins[0].name, "conv1.fprop");
    assert_string_equal(c.pins[0].engine, "eng4 k2=4");
}

/* What cfg_write writes reads back as the same values. */
static void written_cfgs_read_back(void **state)
{
    char *text = NULL;
    size_t size;
    assert_int_equal(
        read_text("device = cpu\n[model]\nname = resnet44\nzero_init_residual = "
                  "true\n[data]\ntrain = x y\n"
                  "mean = 0.1\n[train]\nclip_norm = 0.3\n[optim]\nlr = 0.1000000000000001\n"
                  "milestones = 1.5,3,1e3\nschedule = poly\n[memory]\nrecompute = auto:1.5\n"
                  "[cudnn]\npin.conv1.fprop = eng3 k2=4,13=0\npin.a.b.wgrad = sums+eng4\n"),
        DNR_OK);
    cfg first = c;
    FILE *f = open_memstream(&text, &size);
    cfg_write(&c, f);
    fclose(f);
    assert_int_equal(read_text(text), DNR_OK);
    memset(c.origin, 0, sizeof c.origin);
    memset(first.origin, 0, sizeof first.origin);
    for (int i = 0; i < 2; i++)
        c.pins[i].line = first.pins[i].line = 0;
    for (int i = 0; i < cfg_n_keys; i++) {
        char a[CFG_TEXT], b[CFG_TEXT];
        assert_string_equal(cfg_value(&c, &cfg_keys[i], a), cfg_value(&first, &cfg_keys[i], b));
    }
    assert_memory_equal(&c, &first, sizeof c);
    assert_true(c.optim.lr == 0.1000000000000001);
    free(text);
}

static void shipped_cfgs_load(void **state)
{
    static const char *const names[] = {"resnet50.cfg", "resnet18-cifar10.cfg",
                                        "resnet20-cifar10.cfg", "quickstart.cfg"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (cfg_load(&c, names[i], NULL, 0, &err) != DNR_OK)
            fail_msg("%s: %s (%s)", names[i], err.what, err.where);
    /* "@cfg/" of the last one */
    assert_int_equal(c.data.train[0], '/');
    assert_has(c.data.train, "/models/../data/digits.tar:train");
    assert_int_equal(cfg_load(&c, "resnet5.cfg", NULL, 0, &err), DNR_EUSAGE);
    assert_has(err.what, "there is no cfg resnet5.cfg");
    assert_has(err.remedy, "did you mean resnet50.cfg?");
    assert_int_equal(cfg_load(&c, "/nonexistent/x.cfg", NULL, 0, &err), DNR_EUSAGE);
    assert_int_equal(cfg_load(&c, "/", NULL, 0, &err), DNR_EUSAGE); /* a folder */
    assert_true(strlen(err.remedy) > 3);
}

/* What cfg_write writes reads back as it was, whatever a path holds. */
static void odd_paths(void **state)
{
    static const char *const paths[] = {"a # b", "a ;b", "# a",     "\"a\"", "\"a",         " a ",
                                        "a\"b",  "a=b",  "[a] = b", "a\tb",  "a\xe9\xff #", "\"",
                                        "\"\"",  "a\"",  "a#b",     "a, b:c"};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        char assignment[64], text[16384] = "";
        FILE *f = fmemopen(text, sizeof text, "w");
        cfg_init(&c);
        snprintf(assignment, sizeof assignment, "data.train=%s", paths[i]);
        assert_int_equal(cfg_set(&c, assignment, &err), DNR_OK);
        cfg_write(&c, f);
        fclose(f);
        if (read_text(text) != DNR_OK)
            fail_msg("%s: %s", paths[i], err.what);
        assert_string_equal(c.data.train, paths[i]);
    }
    assert_int_equal(read_text("[data]\ntrain = \"a # b\" # \"c\"\n# x = \"y\" z\n"), DNR_OK);
    assert_string_equal(c.data.train, "a # b");
    cfg_init(&c);
    assert_int_equal(cfg_set(&c, "data.train=a\nb", &err), DNR_EUSAGE);
    assert_has(err.what, "line break");
}

static void paths_from_home(void **state)
{
    char *home = strdup(getenv("HOME") ? getenv("HOME") : "");
    setenv("HOME", "/home/me", 1);
    cfg_init(&c);
    assert_int_equal(cfg_set(&c, "data.train=~/x.tar:train", &err), DNR_OK);
    assert_string_equal(c.data.train, "/home/me/x.tar:train");
    assert_int_equal(read_text("[data]\ntrain = ~/a b\nval = ~\nclass_map = x/~/y\n"), DNR_OK);
    assert_string_equal(c.data.train, "/home/me/a b");
    assert_string_equal(c.data.val, "~");
    assert_string_equal(c.data.class_map, "x/~/y");
    unsetenv("HOME");
    assert_int_equal(read_text("[run]\nout = ~/runs\n"), DNR_EUSAGE);
    assert_has(err.what, "run.out = ~/runs: HOME is not set");
    if (*home)
        setenv("HOME", home, 1);
    free(home);
}

static void distances(void **state)
{
    assert_int_equal(tool_distance("", ""), 0);
    assert_int_equal(tool_distance("", "abc"), 3);
    assert_int_equal(tool_distance("kitten", "sitting"), 3);
    assert_int_equal(tool_distance("train", "trian"), 1); /* a transposition */
    assert_int_equal(tool_distance("TRAIN", "train"), 0);
    assert_int_equal(tool_distance("ca", "abc"), 3); /* the restricted distance */
    const char *names[] = {"train", "eval", "plan"};
    assert_string_equal(tool_nearest("trian", names, 3), "train");
    assert_string_equal(tool_nearest("evla", names, 3), "eval");
    assert_null(tool_nearest("benchmark", names, 3));
    assert_null(tool_nearest("x", names, 0));
    char longer[300];
    memset(longer, 'q', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    assert_int_equal(tool_distance(longer, "q"), 62); /* only the first 63 letters count */
}

/* Random edits of a good cfg: each is taken, or refused with place and remedy. */
static void hostile_text(void **state)
{
    static const char base[] =
        "device = auto\n[model]\nname = resnet20\n[data]\nmean = 0.1 0.2 0.3\ntrain = @cfg/x\n"
        "[train]\nbatch = 32 # c\n[optim]\nmilestones = 1, 2\nschedule = cosine\n";
    static const char alphabet[] = "[]=:;#\n\r\t \"\\@.,-+0123456789eExXnatrib\xff\xc3%s";
    uint32_t r = 12345;
    char text[sizeof base + 64];
    int refusals = 0;
    for (int round = 0; round < 20000; round++) {
        size_t n = sizeof base - 1;
        memcpy(text, base, n);
        for (int e = 0; e < 1 + round % 6; e++) {
            r = r * 1664525u + 1013904223u;
            size_t at = (r >> 8) % n;
            r = r * 1664525u + 1013904223u;
            char new = alphabet[(r >> 8) % sizeof alphabet]; /* the terminating zero too */
            if (r >> 30 == 0 && n > 2)
                memmove(text + at, text + at + 1, --n - at);
            else
                text[at] = new;
        }
        if (read_bytes(text, n) != DNR_OK) {
            refusals++;
            assert_int_equal(err.status, DNR_EUSAGE);
            assert_has(err.where, "dir/t.cfg:");
            assert_true(err.what[0] && err.remedy[0]);
        }
    }
    assert_in_range(refusals, 1000, 19999);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_default_is_allowed),
        cmocka_unit_test(every_key_refuses_bad_values),
        cmocka_unit_test(model_names_are_the_librarys),
        cmocka_unit_test(unknown_keys_name_the_nearest),
        cmocka_unit_test(lines_are_counted),
        cmocka_unit_test(odd_files),
        cmocka_unit_test(command_line_wins),
        cmocka_unit_test(checks_over_several_keys),
        cmocka_unit_test(pins),
        cmocka_unit_test(written_cfgs_read_back),
        cmocka_unit_test(shipped_cfgs_load),
        cmocka_unit_test(odd_paths),
        cmocka_unit_test(paths_from_home),
        cmocka_unit_test(distances),
        cmocka_unit_test(hostile_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
