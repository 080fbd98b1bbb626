/* cmd_predict.c: dnnrun predict: what a trained model sees in some pictures. */
#include "card.h"
#include "picture.h"
#include "rundir.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char help[] =
    "dnnrun predict RUN|[CFG] [section.key=value ...] [--weights FILE] IMAGE|FOLDER...: names what "
    "is "
    "in pictures.\n"
    "\n"
    "  dnnrun predict runs/mine cat.jpg holiday/       with the last weights of a run\n"
    "  dnnrun predict --weights runs/mine/checkpoints/best/model.safetensors cat.jpg holiday/\n"
    "  dnnrun predict resnet50.cfg --weights torchvision.safetensors cat.jpg --top 3\n"
    "  dnnrun predict --weights model.safetensors holiday/ --json > seen.jsonl\n"
    "\n"
    "  --top K     the K most likely classes (3)\n"
    "  --show      draw each picture as the model sees it; a terminal gets it unasked\n"
    "  --json      one line a picture:\n"
    "              {\"image\": \"cat.jpg\", \"top\": [{\"class\": 281, \"name\": \"tabby\", "
    "\"probability\": 0.83}, ...]}\n"
    "\n"
    "The model, how it sees pictures and the names of its classes come from the file's metadata, "
    "where "
    "dnnrun wrote\n"
    "it; else from CFG. A folder stands for all pictures below it. A picture that cannot be read "
    "is "
    "reported, the\n"
    "others are still named, and the exit code is 3.\n";

enum { BATCH = 32 }; /* pictures of one pass, at most */

typedef struct prediction {
    session s;
    tool_args a;
    const char **images; /* of the command line */
    char **set;          /* its keys */
    char last[CFG_TEXT]; /* weights of the run that was given */
    int n_images, n_set;
    json_t *names; /* of classes, or NULL */
    dnr_source *src;
    dnr_loader *loader;
    float *logits;
    int *order; /* classes, the likeliest first */
    int64_t bad;
    dnr_error *err;
} prediction;

/* ---------------------------------------------------------------- arguments */

/* "data.image=64", but not a picture whose name has a "=". */
static bool is_key(const char *word)
{
    size_t n = strcspn(word, "=");
    for (int i = 0; word[n] && i < cfg_n_keys; i++)
        if (strlen(cfg_keys[i].name) == n && !strncmp(cfg_keys[i].name, word, n))
            return true;
    return false;
}

static bool is_cfg(const char *word)
{
    size_t n = strlen(word);
    return n > 4 && !strcmp(word + n - 4, ".cfg");
}

/* Sorts the words into RUN or CFG, keys and pictures. */
static dnr_status sort_words(prediction *p)
{
    const tool_args *a = &p->a;
    int n = a->cfg ? a->n_set + 1 : 0;
    p->images = calloc((size_t)n + 1, sizeof *p->images);
    p->set = calloc((size_t)n + 1, sizeof *p->set);
    if (!p->images || !p->set) {
        tool_fail(p->err, DNR_EMEM, "predict", "out of host memory");
        return tool_remedy(p->err, "free some");
    }
    const char *cfg_name = NULL;
    for (int i = 0; i < n; i++) {
        char *word = i ? a->set[i - 1] : (char *)a->cfg;
        if (is_key(word))
            p->set[p->n_set++] = word;
        else if (i == 0 && is_cfg(word))
            cfg_name = word;
        else if (i == 0 && !a->weights && rundir_weights(word, p->last))
            p->a.weights = p->last;
        else
            p->images[p->n_images++] = word;
    }
    p->a.cfg = cfg_name;
    if (!a->weights) {
        tool_fail(p->err, DNR_EUSAGE, "command line", "which weights? predict needs them");
        return tool_remedy(p->err, "begin with the folder of a run, or add --weights FILE, such as "
                                   "RUN/checkpoints/best/model.safetensors");
    }
    if (!p->n_images) {
        tool_fail(p->err, DNR_EUSAGE, "command line", "predict needs pictures");
        return tool_remedy(p->err, "name pictures or folders; see dnnrun predict --help");
    }
    return DNR_OK;
}

/* What the cfg and the file say together. The command line wins over both. */
static dnr_status settle(prediction *p)
{
    cfg *c = &p->s.cfg;
    dnr_error *err = p->err;
    bool model;
    dnr_status st = DNR_OK;
    if (p->a.cfg)
        TOOL_TRY(st, cfg_load(c, p->a.cfg, NULL, 0, err));
    else
        cfg_init(c);
    bool batch = false;
    for (int i = 0; i < p->n_set; i++) {
        TOOL_TRY(st, cfg_set(c, p->set[i], err));
        batch = batch || !strncmp(p->set[i], "train.batch=", 12);
    }
    TOOL_TRY(st, card_read(p->a.weights, c, p->set, p->n_set, &p->names, &model, err));
    if (!model && !*c->model.name) {
        st = tool_fail(err, DNR_EUSAGE, "--weights", "%.300s does not say which model it is of",
                       p->a.weights);
        tool_remedy(err, "give its cfg too: dnnrun predict resnet50.cfg --weights %.150s …",
                    p->a.weights);
        goto out;
    }
    if (!batch)
        c->train.batch = BATCH;
    if (dnr_source_count(p->src) < c->train.batch)
        c->train.batch = dnr_source_count(p->src);
    c->data.crop = CROP_NONE; /* training's crop has no say here */
    c->data.pad = 0;
    st = cfg_check(c, err);
out:
    return st;
}

/* Names from the cfg's data, where the file has none and the data are there. */
static void names_from_data(prediction *p)
{
    const cfg *c = &p->s.cfg;
    const char *path = *c->data.val ? c->data.val : c->data.train;
    const char *map = *c->data.val ? c->data.val_class_map : c->data.class_map;
    dnr_source_opts o = {.class_map = *map ? map : NULL, .classes = (int)c->model.classes};
    dnr_source *src;
    if (p->names || !p->a.cfg || !*path)
        return;
    if (dnr_source_open(path, &o, &src) != DNR_OK) {
        fprintf(stderr, "note: classes are only numbered, for their names are not known: %s\n",
                dnr_last_error()->what);
        return;
    }
    p->names = json_array();
    for (int k = 0; k < dnr_source_classes(src); k++) {
        const char *name = dnr_source_class_name(src, k);
        if (name)
            json_array_append_new(p->names, rundir_text(name));
    }
    dnr_source_close(src);
}

/* ---------------------------------------------------------------- one picture */

static const float *sort_logits;

static int by_logit(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    float u = sort_logits[x], v = sort_logits[y];
    return u != v ? (u < v) - (u > v) : (x > y) - (x < y);
}

static const char *name_of(const prediction *p, int k)
{
    return json_string_value(json_array_get(p->names, (size_t)k));
}

/* Text from a file goes to a terminal: without its control characters. */
static void put_plain(const char *s)
{
    for (; *s; s++)
        putchar((unsigned char)*s < ' ' || *s == 0x7f ? '?' : *s);
}

static void report(prediction *p, const char *file, const float *logits, const uint8_t *pixels)
{
    const int classes = (int)p->s.cfg.model.classes;
    const int64_t asked = p->a.top < 0 ? 3 : p->a.top;
    const int top = asked < classes ? (int)asked : classes;
    double sum = 0;
    json_t *list = json_array();
    for (int k = 0; k < classes; k++)
        p->order[k] = k;
    sort_logits = logits;
    qsort(p->order, (size_t)classes, sizeof *p->order, by_logit);
    for (int k = 0; k < classes; k++)
        sum += exp((double)logits[k] - (double)logits[p->order[0]]);
    if (!p->a.json && (p->a.show || isatty(STDOUT_FILENO)))
        picture_draw(pixels, (int)p->s.cfg.data.image, stdout);
    if (!p->a.json) {
        put_plain(file);
        putchar(':');
    }
    for (int i = 0; i < top; i++) {
        int k = p->order[i];
        double share = exp((double)logits[k] - (double)logits[p->order[0]]) / sum;
        const char *name = name_of(p, k);
        if (p->a.json) {
            json_t *one = json_pack("{s:i}", "class", k);
            if (name)
                json_object_set_new(one, "name", json_string(name));
            json_object_set_new(one, "probability", json_real(share));
            json_array_append_new(list, one);
        } else {
            fputs(i ? ", " : " ", stdout);
            if (name)
                put_plain(name);
            else
                printf("class %d", k);
            printf(" %.1f %%", 100 * share);
        }
    }
    if (p->a.json) {
        json_t *j = json_pack("{s:o, s:O}", "image", rundir_text(file), "top", list);
        json_dumpf(j, stdout, JSON_REAL_PRECISION(7));
        json_decref(j);
    }
    putchar('\n');
    json_decref(list);
}

static void report_bad(prediction *p, const char *file)
{
    dnr_loader_stats stats;
    const char *reason = "cannot be read";
    dnr_loader_get_stats(p->loader, &stats);
    for (int64_t i = 0; i < stats.bad; i++)
        if (!strcmp(stats.bad_list[i].name, file))
            reason = stats.bad_list[i].reason;
    p->bad++;
    if (p->a.json) {
        json_t *j =
            json_pack("{s:o, s:o}", "image", rundir_text(file), "error", rundir_text(reason));
        json_dumpf(j, stdout, 0);
        putchar('\n');
        json_decref(j);
    }
}

/* ---------------------------------------------------------------- all of them */

static dnr_status open_all(prediction *p)
{
    session *s = &p->s;
    dnr_error *err = p->err;
    dnr_status st;
    TOOL_LIB(st, dnr_source_files(p->images, p->n_images, &p->src));
    TOOL_TRY(st, settle(p));
    names_from_data(p);
    TOOL_TRY(st, session_open(s, SESSION_INFER, err));
    TOOL_LIB(st, dnr_trainer_load(s->trainer, p->a.weights));
    dnr_loader_opts o = {
        .batch = s->cfg.train.batch,
        .image = (int)s->cfg.data.image,
        .resize = (int)s->cfg.data.resize,
        .crop = DNR_CROP_CENTER,
        .max_bad = -1,
        .max_pixels = s->cfg.data.max_pixels,
        .threads = (int)s->cfg.data.threads,
        .prefetch = (int)s->cfg.data.prefetch,
    };
    TOOL_LIB(st, dnr_loader_open(p->src, s->dev, &o, &p->loader));
    p->logits =
        malloc((size_t)s->cfg.train.batch * (size_t)s->cfg.model.classes * sizeof *p->logits);
    p->order = malloc((size_t)s->cfg.model.classes * sizeof *p->order);
    if (!p->logits || !p->order) {
        st = tool_fail(err, DNR_EMEM, "predict", "out of host memory");
        tool_remedy(err, "free some");
    }
out:
    return st;
}

static dnr_status predict_all(prediction *p)
{
    session *s = &p->s;
    dnr_error *err = p->err;
    const int64_t n = dnr_source_count(p->src), classes = s->cfg.model.classes;
    const size_t pixels = (size_t)s->cfg.data.image * (size_t)s->cfg.data.image * 3;
    dnr_status st;
    for (;;) {
        dnr_batch b;
        bool more;
        TOOL_LIB(st, dnr_loader_next(p->loader, &b, &more));
        if (!more)
            break;
        st = dnr_trainer_predict(s->trainer, &b, p->logits);
        for (int64_t i = 0; st == DNR_OK && i < s->cfg.train.batch && b.position + i < n; i++) {
            const char *file = dnr_source_sample_name(p->src, b.position + i);
            if (b.labels[i] < 0)
                report_bad(p, file);
            else
                report(p, file, p->logits + i * classes, b.pixels + (size_t)i * pixels);
        }
        dnr_loader_release(p->loader, &b);
        if (st != DNR_OK) {
            tool_lib_error(err, NULL, NULL);
            goto out;
        }
    }
    if (p->bad) {
        st = tool_fail(err, DNR_EDATA, "predict", "%lld of %lld pictures could not be read",
                       (long long)p->bad, (long long)n);
        tool_remedy(err, "see the warnings above; JPEG, PNG and BMP files are read");
    }
out:
    return st;
}

dnr_status cmd_predict(int argc, char **argv, dnr_error *err)
{
    prediction p = {.err = err};
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, ARG_WEIGHTS | ARG_JSON | ARG_TOP | ARG_SHOW, &p.a, err));
    if (p.a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, sort_words(&p));
    TOOL_TRY(st, open_all(&p));
    st = predict_all(&p);
out:
    dnr_loader_close(p.loader);
    session_close(&p.s);
    dnr_source_close(p.src);
    json_decref(p.names);
    free(p.images);
    free(p.set);
    free(p.logits);
    free(p.order);
    return st;
}
