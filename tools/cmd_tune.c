/* cmd_tune.c: dnnrun tune: times the convolutions of a run ahead of it, and shows what was timed. */
#include "session.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static const char help[] = "dnnrun tune CFG [section.key=value ...] [--export] [--json]: times the "
                           "convolutions of a run ahead of it.\n"
                           "\n"
                           "  dnnrun tune resnet50.cfg                 each convolution's "
                           "candidates: time, workspace, which was taken\n"
                           "  dnnrun tune resnet50.cfg --export        the choices as lines of a "
                           "cfg, to keep them whatever is timed later\n"
                           "  dnnrun tune resnet50.cfg --json          for a program\n"
                           "\n"
                           "On CUDA the choices are kept in cudnn.cache, so that runs of this cfg "
                           "on this kind of GPU start without timing.\n"
                           "What is there already is timed anew. On the CPU nothing is kept: a run "
                           "times again:\n"
                           "seconds for small batches, minutes for large ones.\n"
                           "No pictures are read.\n";

/* Contests told, those of equal ops once. */
typedef struct tuned {
    json_t *list;
    bool failed;
} tuned;

static json_t *ways_json(const dnr_tune_contest *c)
{
    json_t *ways = json_array();
    for (int i = 0; i < c->n; i++) {
        const dnr_tune_way *w = &c->ways[i];
        json_array_append_new(ways,
                              json_pack("{s:s, s:o, s:I}", "implementation", w->implementation,
                                        "us", w->us < 0 ? json_null() : json_real(w->us),
                                        "workspace", (json_int_t)w->workspace));
    }
    return ways;
}

static bool is(const json_t *item, const char *key, const char *text)
{
    return !strcmp(json_string_value(json_object_get(item, key)), text);
}

/* Takes note of a contest. Layers are told once for each program that has them. */
static void note(void *user, const dnr_tune_contest *c)
{
    tuned *t = user;
    json_t *item;
    size_t i;
    json_array_foreach(t->list, i, item)
    {
        json_t *layers = json_object_get(item, "layers"), *name;
        size_t k;
        if (!is(item, "problem", c->problem) || !is(item, "op", c->op) ||
            json_is_true(json_object_get(item, "training")) != c->training)
            continue;
        json_array_foreach(layers, k, name) if (!strcmp(json_string_value(name), c->layer)) return;
        json_array_append_new(layers, json_string(c->layer));
        return;
    }
    item = json_pack("{s:[s], s:s, s:s, s:b, s:s, s:o, s:i, s:s?}", "layers", c->layer, "pass",
                     c->pass, "op", c->op, "training", c->training, "problem", c->problem, "ways",
                     ways_json(c), "chosen", c->chosen, "pin", c->pin);
    t->failed |= !item || json_array_append_new(t->list, item) != 0;
}

static void print_layers(const json_t *layers)
{
    const json_t *name;
    size_t i;
    json_array_foreach(layers, i, name) printf("%s%s", i ? ", " : "", json_string_value(name));
}

static void print_contest(const json_t *item)
{
    const json_t *ways = json_object_get(item, "ways"), *w;
    size_t i;
    char work[32];
    printf("%s of ", json_string_value(json_object_get(item, "op")));
    print_layers(json_object_get(item, "layers"));
    printf("%s: %s\n", json_is_true(json_object_get(item, "training")) ? "" : " (evaluation)",
           json_string_value(json_object_get(item, "problem")));
    json_array_foreach(ways, i, w)
    {
        const json_t *us = json_object_get(w, "us");
        printf("  %c ",
               (json_int_t)i == json_integer_value(json_object_get(item, "chosen")) ? '*' : ' ');
        if (json_is_null(us))
            printf("%9s   ", "left out");
        else
            printf("%9.1f us", json_real_value(us));
        printf("  %9s  %s\n",
               tool_bytes((double)json_integer_value(json_object_get(w, "workspace")), work),
               json_string_value(json_object_get(w, "implementation")));
    }
    if (json_array_size(ways) == 0)
        printf("    not timed; takes %s\n", json_string_value(json_object_get(item, "pin"))
                                                ? json_string_value(json_object_get(item, "pin"))
                                                : "plain loops");
}

static void export_pins(const json_t *list)
{
    const json_t *item, *name;
    size_t i, k;
    puts("[cudnn]");
    json_array_foreach(list, i, item)
    {
        const char *pin = json_string_value(json_object_get(item, "pin"));
        if (!pin || !json_is_true(json_object_get(item, "training")))
            continue;
        json_array_foreach(json_object_get(item, "layers"), k, name)
            printf("pin.%s.%s = %s\n", json_string_value(name),
                   json_string_value(json_object_get(item, "pass")), pin);
    }
}

static dnr_status show(const session *s, const tool_args *a, const json_t *list, dnr_error *err)
{
    const json_t *item;
    size_t i, n = json_array_size(list);
    const bool cuda = !strncmp(dnr_device_name(s->dev), "cuda", 4);
    if (a->export && !cuda) {
        tool_fail(err, DNR_EUSAGE, "command line", "%s has no engines that a cfg could name",
                  dnr_device_name(s->dev));
        return tool_remedy(err, "use --export with device = cuda");
    }
    if (a->json) {
        json_t *root = json_pack("{s:s, s:s, s:O}", "device", dnr_device_description(s->dev),
                                 "model", s->cfg.model.name, "contests", list);
        json_dumpf(root, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
        putchar('\n');
        json_decref(root);
        return DNR_OK;
    }
    if (a->export) {
        export_pins(list);
        return DNR_OK;
    }
    json_array_foreach(list, i, item) print_contest(item);
    printf("\n%zu kinds of convolution timed on %s; * was taken\n", n,
           dnr_device_description(s->dev));
    if (!strcmp(dnr_device_name(s->dev), "cpu"))
        puts("(on the CPU only those of some size in fp32 and bf16 are, and a later way must save "
             "3 %)");
    return DNR_OK;
}

dnr_status cmd_tune(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    session s = {0};
    tuned t = {.list = json_array()};
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, ARG_JSON | ARG_EXPORT, &a, err));
    if (a.help) {
        fputs(help, stdout);
        goto out;
    }
    TOOL_TRY(st, tool_need_cfg(&a, "tune", err));
    TOOL_TRY(st, cfg_load(&s.cfg, a.cfg, a.set, a.n_set, err));
    s.tuned = note;
    s.tuned_user = &t;
    TOOL_TRY(st, session_open(&s, 0, err));
    if (t.failed) {
        st = tool_fail(err, DNR_EMEM, "tune", "out of host memory");
        tool_remedy(err, "free some");
        goto out;
    }
    st = show(&s, &a, t.list, err);
out:
    session_close(&s);
    json_decref(t.list);
    return st;
}
