/* config.c: reads a cfg strictly. What the table does not know, or does not allow, is an error. */
#include "config.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <ini.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *origin_text(const cfg *c, int line, char buf[96])
{
    if (line == CFG_FROM_ARGS) {
        snprintf(buf, 96, "command line");
    } else {
        size_t len = strlen(c->path); /* the end of a long path says more than its start */
        snprintf(buf, 96, "%s%.48s:%d", len > 48 ? "…" : "", c->path + (len > 48 ? len - 45 : 0),
                 line);
    }
    return buf;
}

const char *cfg_origin(const cfg *c, const char *key, char buf[96])
{
    snprintf(buf, 96, "default");
    for (int i = 0; i < cfg_n_keys; i++)
        if (!strcmp(cfg_keys[i].name, key) && c->origin[i])
            origin_text(c, c->origin[i], buf);
    return buf;
}

/* ---------------------------------------------------------------- values */

static dnr_status bad_value(const cfg_key *k, const char *text, const char *where, const char *why,
                            dnr_error *err)
{
    char range[576];
    tool_fail(err, DNR_EUSAGE, where, "%s = %.200s: %s", k->name, text, why);
    if (*cfg_range(k, range))
        return tool_remedy(err, "allowed: %s%s%s", range, *k->unit ? " " : "", k->unit);
    return tool_remedy(err, "see docs/cfg.md");
}

/* Is the text that choice, or what it stands for: "auto:<GiB>" for "auto:" and a positive number? */
static bool is_choice(const char *choice, const char *text)
{
    const size_t prefix = strcspn(choice, "<");
    char *end;
    if (!choice[prefix])
        return !strcmp(choice, text);
    if (strncmp(choice, text, prefix) || !isdigit((unsigned char)text[prefix]))
        return false;
    const double v = strtod(text + prefix, &end);
    return !*end && isfinite(v) && v > 0;
}

static dnr_status set_choice(const cfg_key *k, void *field, const char *text, const char *where,
                             dnr_error *err)
{
    char list[512], *save = NULL;
    const char *names[64];
    int n = 0;
    cfg_choices(k, list);
    for (char *p = strtok_r(list, "|", &save); p && n < 64; p = strtok_r(NULL, "|", &save))
        names[n++] = p;
    for (int i = 0; i < n; i++) {
        if (is_choice(names[i], text)) {
            if (k->type == CFG_CHOICE)
                *(int64_t *)field = i;
            else
                snprintf(field, CFG_TEXT, "%s", text);
            return DNR_OK;
        }
    }
    const char *near = tool_nearest(text, names, n);
    bad_value(k, text, where, "no such choice", err);
    if (near) {
        char rest[sizeof err->remedy];
        snprintf(rest, sizeof rest, "%s", err->remedy);
        tool_remedy(err, "did you mean %s? %.280s", near, rest);
    }
    return err->status;
}

static bool in_range(const cfg_key *k, double v)
{
    return isfinite(v) && (k->above ? v > k->min : v >= k->min) && v <= k->max;
}

static dnr_status set_reals(const cfg_key *k, cfg_list *list, const char *text, const char *where,
                            dnr_error *err)
{
    cfg_list got = {0};
    char too_many[48];
    snprintf(too_many, sizeof too_many, "more than %d numbers", CFG_LIST);
    const char *p = text + strspn(text, " \t,");
    while (*p) {
        char *end;
        double v = strtod(p, &end);
        if (end == p || (*end && !strchr(" \t,", *end)))
            return bad_value(k, text, where, "not a list of numbers", err);
        if (!in_range(k, v))
            return bad_value(k, text, where, "out of range", err);
        if (got.n == CFG_LIST)
            return bad_value(k, text, where, too_many, err);
        got.v[got.n++] = v;
        p = end + strspn(end, " \t,");
    }
    if (k->count && got.n == 1)
        for (got.n = 1; got.n < k->count; got.n++)
            got.v[got.n] = got.v[0];
    if (k->count && got.n != k->count)
        return bad_value(k, text, where, "wrong number of numbers (one, or one a channel)", err);
    *list = got;
    return DNR_OK;
}

/* "@cfg/x" to the folder of the cfg file; "~/x", which a shell leaves as it is behind "key=", to the user's own. */
static dnr_status set_path(const cfg *c, const cfg_key *k, char *field, const char *text,
                           const char *where, dnr_error *err)
{
    char dir[CFG_TEXT] = "";
    if (!strncmp(text, "@cfg/", 5)) {
        char *real = realpath(c->path, NULL); /* NULL: the cfg is no file, so "@cfg/" is here */
        char *slash = real ? strrchr(real, '/') : NULL;
        if (slash)
            snprintf(dir, sizeof dir, "%.*s", (int)(slash + 1 - real), real);
        free(real);
        text += 5;
    } else if (!strncmp(text, "~/", 2)) {
        const char *home = getenv("HOME");
        if (!home || !*home)
            return bad_value(k, text, where, "HOME is not set", err);
        snprintf(dir, sizeof dir, "%s", home);
        text += 1;
    }
    if (snprintf(field, CFG_TEXT, "%s%s", dir, text) >= CFG_TEXT)
        return bad_value(k, text, where, "the path is too long", err);
    return DNR_OK;
}

static dnr_status set_value(cfg *c, const cfg_key *k, const char *text, const char *where,
                            dnr_error *err)
{
    void *field = (char *)c + k->offset;
    char *end;
    switch (k->type) {
    case CFG_BOOL:
        if (strcmp(text, "true") && strcmp(text, "false"))
            return bad_value(k, text, where, "neither true nor false", err);
        *(bool *)field = !strcmp(text, "true");
        return DNR_OK;
    case CFG_INT: {
        errno = 0;
        long long v = strtoll(text, &end, 10);
        if (end == text || *end)
            return bad_value(k, text, where, "not a whole number", err);
        if (errno || (double)v < k->min || (double)v > k->max)
            return bad_value(k, text, where, "out of range", err);
        *(int64_t *)field = v;
        return DNR_OK;
    }
    case CFG_REAL: {
        double v = strtod(text, &end);
        if (end == text || *end)
            return bad_value(k, text, where, "not a number", err);
        if (!in_range(k, v))
            return bad_value(k, text, where, "out of range", err);
        *(double *)field = v;
        return DNR_OK;
    }
    case CFG_REALS:
        return set_reals(k, field, text, where, err);
    case CFG_PATH:
        return set_path(c, k, field, text, where, err);
    case CFG_STRING:
        if (!k->choices || !*text) { /* an empty name is "not given" */
            if (strlen(text) >= CFG_TEXT)
                return bad_value(k, text, where, "too long", err);
            snprintf(field, CFG_TEXT, "%s", text);
            return DNR_OK;
        }
        return set_choice(k, field, text, where, err);
    case CFG_CHOICE:
        return set_choice(k, field, text, where, err);
    }
    return DNR_OK;
}

/* ---------------------------------------------------------------- keys */

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

static dnr_status unknown_key(const char *name, const char *where, dnr_error *err)
{
    const char *names[CFG_MAX_KEYS], *near = NULL;
    for (int i = 0; i < cfg_n_keys; i++) {
        names[i] = cfg_keys[i].name;
        if (!near &&
            !strcmp(last_part(names[i]), last_part(name))) /* the right key in the wrong section */
            near = names[i];
    }
    if (!near)
        near = tool_nearest(name, names, cfg_n_keys);
    tool_fail(err, DNR_EUSAGE, where, "unknown key %.200s", name);
    if (!near)
        return tool_remedy(err, "all keys: docs/cfg.md, or dnnrun train --help");
    if (!strchr(near, '.'))
        return tool_remedy(err, "did you mean %s? (It stands before the first section.)", near);
    return tool_remedy(err, "did you mean %s?", near);
}

/* cudnn.pin.LAYER.PASS: the library knows the layers. */
static dnr_status pin(cfg *c, const char *name, const char *text, int line, dnr_error *err)
{
    char where[96], first[96];
    const char *of = name + strlen(CFG_PIN), *pass = strrchr(of, '.');
    origin_text(c, line, where);
    if (!pass || pass == of ||
        (strcmp(pass, ".fprop") && strcmp(pass, ".dgrad") && strcmp(pass, ".wgrad"))) {
        tool_fail(err, DNR_EUSAGE, where, "%s names no pass of a layer", name);
        return tool_remedy(err, "write cudnn.pin.LAYER.fprop, dgrad or wgrad, as dnnrun tune "
                                "--export does");
    }
    if (!*text || strlen(text) >= sizeof c->pins[0].engine ||
        strlen(of) >= sizeof c->pins[0].name || strpbrk(text, "\r\n")) {
        tool_fail(err, DNR_EUSAGE, where, "%s = %.100s is no engine", name, text);
        return tool_remedy(err, "write it as dnnrun tune --export does: eng67 k2=4,13=0");
    }
    int i = 0;
    while (i < c->n_pins && strcmp(c->pins[i].name, of))
        i++;
    if (i < c->n_pins && (line == CFG_FROM_ARGS) == (c->pins[i].line == CFG_FROM_ARGS)) {
        tool_fail(err, DNR_EUSAGE, where, "%s is given twice, first at %s", name,
                  origin_text(c, c->pins[i].line, first));
        return tool_remedy(err, "remove one of them");
    }
    if (i == CFG_MAX_PINS) {
        tool_fail(err, DNR_EUSAGE, where, "more than %d pins", CFG_MAX_PINS);
        return tool_remedy(err, "pin fewer; the others are chosen by timing");
    }
    snprintf(c->pins[i].name, sizeof c->pins[i].name, "%s", of);
    snprintf(c->pins[i].engine, sizeof c->pins[i].engine, "%s", text);
    c->pins[i].line = line;
    c->n_pins += i == c->n_pins;
    return DNR_OK;
}

static dnr_status assign(cfg *c, const char *name, const char *text, int line, dnr_error *err)
{
    char where[96], first[96];
    origin_text(c, line, where);
    if (strncmp(name, CFG_PIN, strlen(CFG_PIN)) == 0)
        return pin(c, name, text, line, err);
    int i = 0;
    while (i < cfg_n_keys && strcmp(cfg_keys[i].name, name))
        i++;
    if (i == cfg_n_keys)
        return unknown_key(name, where, err);
    if (c->origin[i] && (line == CFG_FROM_ARGS) == (c->origin[i] == CFG_FROM_ARGS)) {
        tool_fail(err, DNR_EUSAGE, where, "%s is given twice, first at %s", name,
                  origin_text(c, c->origin[i], first));
        return tool_remedy(err, "remove one of them");
    }
    c->origin[i] = line;
    if (strpbrk(text, "\r\n")) /* resolved.cfg could not hold it */
        return bad_value(&cfg_keys[i], text, where, "holds a line break", err);
    return set_value(c, &cfg_keys[i], text, where, err);
}

void cfg_unquote(char *value)
{
    size_t n = strlen(value);
    if (n < 2 || *value != '"' || value[n - 1] != '"')
        return;
    memmove(value, value + 1, n - 2);
    value[n - 2] = 0;
}

void cfg_init(cfg *c)
{
    dnr_error err;
    memset(c, 0, sizeof *c);
    for (int i = 0; i < cfg_n_keys; i++)
        set_value(c, &cfg_keys[i], cfg_keys[i].unset, "default",
                  &err); /* test_config checks each */
}

dnr_status cfg_set(cfg *c, const char *assignment, dnr_error *err)
{
    char name[128];
    size_t n = strcspn(assignment, "=");
    if (!assignment[n] || n >= sizeof name) {
        tool_fail(err, DNR_EUSAGE, "command line", "%.200s is not of the form section.key=value",
                  assignment);
        return tool_remedy(err,
                           "for example train.batch=64; one cfg file is taken, before the keys");
    }
    const char *value = assignment + n + 1;
    if (n && isblank((unsigned char)assignment[n - 1])) /* "key = value", as in a file */
        value += strspn(value, " \t");
    while (n && isblank((unsigned char)assignment[n - 1]))
        n--;
    snprintf(name, sizeof name, "%.*s", (int)n, assignment);
    return assign(c, name, value, CFG_FROM_ARGS, err);
}

/* ---------------------------------------------------------------- the file */

enum {
    INI_ROOM = 190
}; /* inih's buffer holds 200 bytes unless built otherwise: values stay outside */

typedef struct reading {
    cfg *c;
    FILE *f;
    dnr_error *err; /* the first error */
    dnr_status status;
    int line;
    char *text; /* getline's */
    size_t room;
    char *value; /* within it: what the key of this line is set to */
} reading;

static void refuse(reading *r, const char *what, const char *remedy)
{
    char where[96];
    r->status = tool_fail(r->err, DNR_EUSAGE, origin_text(r->c, r->line, where), "%s", what);
    tool_remedy(r->err, "%s", remedy);
}

/* Ends p before its comment, and blanks before that. A value in double quotes may hold # and ;. */
static void cut_comment(char *p)
{
    char *q = p, *value = p + strcspn(p, "=:");
    if (!strchr("[#;", *p) && *value) {
        value += 1 + strspn(value + 1, " \t");
        char *end = *value == '"' ? strchr(value + 1, '"') : NULL;
        if (end && (!end[1] || isspace((unsigned char)end[1])))
            q = end + 1;
    }
    while (*q && !((*q == '#' || *q == ';') && (q == p || isspace((unsigned char)q[-1]))))
        q++;
    while (q > p && isspace((unsigned char)q[-1]))
        q--;
    *q = 0;
}

/* inih's fgets: counts lines, takes comments and indentation away (inih would take an indented line as the
 * rest of the one before), and refuses what inih would swallow. */
static char *next_line(char *buf, int size, void *user)
{
    reading *r = user;
    if (r->status != DNR_OK)
        return NULL;
    errno = 0;
    ssize_t len = getline(&r->text, &r->room, r->f);
    if (len < 0) {
        if (ferror(r->f)) {
            char where[96];
            r->status = tool_fail(r->err, DNR_EUSAGE, origin_text(r->c, r->line + 1, where),
                                  "cannot read the cfg: %s", strerror(errno));
            tool_remedy(r->err, errno == EISDIR
                                    ? "give a text file; that of a run is RUN/resolved.cfg"
                                    : "give a text file");
        }
        return NULL;
    }
    r->line++;
    if (strlen(r->text) != (size_t)len) {
        refuse(r, "the line holds a zero byte", "give a text file");
        return NULL;
    }
    char *p = r->text;
    if (r->line == 1 && !strncmp(p, "\xEF\xBB\xBF", 3)) /* byte-order mark */
        p += 3;
    p += strspn(p, " \t");
    cut_comment(p);
    const char *end = strchr(p, ']');
    if (*p == '[' && end && end[1]) {
        refuse(r, "text after a section's name", "put it on a line of its own");
        return NULL;
    }
    if (*p && (*p == '[' ? !end : !strpbrk(p, "=:"))) { /* inih would go on and report it last */
        refuse(r, "neither [section] nor key = value", "see docs/cfg.md for the form of a cfg");
        return NULL;
    }
    size_t n = *p == '[' ? strlen(p) : strcspn(p, "=:");
    if (n > INI_ROOM || (int)n + 4 > size) {
        refuse(r, "a name longer than 190 characters", "see docs/cfg.md for the names of all keys");
        return NULL;
    }
    r->value = p + n + (p[n] != 0);
    r->value += strspn(r->value, " \t");
    snprintf(buf, (size_t)size, "%.*s%s\n", (int)n, p, p[n] ? "=" : "");
    return buf;
}

static int on_key(void *user, const char *section, const char *name, const char *value)
{
    reading *r = user;
    char full[128];
    (void)value;
    if (r->status != DNR_OK || !name)
        return 0;
    snprintf(full, sizeof full, "%s%s%s", section, *section ? "." : "", name);
    cfg_unquote(r->value);
    r->status = assign(r->c, full, r->value, r->line, r->err);
    return r->status == DNR_OK;
}

dnr_status cfg_read(cfg *c, FILE *f, const char *path, dnr_error *err)
{
    reading r = {.c = c, .f = f, .err = err};
    snprintf(c->path, sizeof c->path, "%s", path);
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t n = strlen(base);
    n = n > 4 && !strcmp(base + n - 4, ".cfg") ? n - 4 : n;
    snprintf(c->name, sizeof c->name, "%.*s", (int)n, base);
    if (ini_parse_stream(next_line, &r, on_key, &r) != 0 && r.status == DNR_OK)
        refuse(&r, "the line cannot be parsed", "see docs/cfg.md for the form of a cfg");
    free(r.text);
    return r.status;
}

/* Folders of the cfgs that came with dnnrun. */
static bool shipped_folder(int i, char buf[CFG_TEXT])
{
    char share[CFG_TEXT - 16];
    if (!tool_share(i, share, sizeof share))
        return false;
    snprintf(buf, CFG_TEXT, "%s/models", share);
    return true;
}

static dnr_status no_such_cfg(const char *name, dnr_error *err)
{
    char dir[CFG_TEXT], list[sizeof err->remedy] = "", found[32][64], whole[CFG_TEXT];
    const char *names[32], *near;
    int n = 0;
    for (int i = 0; n == 0 && shipped_folder(i, dir); i++) {
        DIR *d = opendir(dir);
        for (struct dirent *e; d && n < 32 && (e = readdir(d));)
            if (strlen(e->d_name) < sizeof found[0] && fnmatch("*.cfg", e->d_name, 0) == 0)
                names[n] = strcpy(found[n], e->d_name), n++;
        if (d)
            closedir(d);
    }
    for (size_t i = 0, at = 0; i < (size_t)n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", names[i]);
    tool_fail(err, DNR_EUSAGE, "command line", "there is no cfg %.400s", name);
    name = strrchr(name, '/') ? strrchr(name, '/') + 1 : name;
    near = tool_nearest(name, names, n);
    snprintf(whole, sizeof whole, "%.500s.cfg", name);
    near = near ? near : tool_nearest(whole, names, n);
    if (near)
        return tool_remedy(err, "did you mean %s? With dnnrun came: %.240s", near, list);
    return tool_remedy(err, "give the path of a cfg file%s%.240s", n ? "; with dnnrun came: " : "",
                       list);
}

dnr_status cfg_load(cfg *c, const char *name, char *const set[], int n_set, dnr_error *err)
{
    char path[CFG_TEXT], dir[CFG_TEXT];
    FILE *f = NULL;
    cfg_init(c);
    if (snprintf(path, sizeof path, "%s", name) < (int)sizeof path)
        f = fopen(path, "r");
    if (!f && errno == EACCES) {
        tool_fail(err, DNR_EUSAGE, "command line", "cannot read %.400s: %s", path, strerror(errno));
        return tool_remedy(err, "make it readable for this user");
    }
    for (int i = 0; !f && !strchr(name, '/') && shipped_folder(i, dir); i++)
        if (snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path)
            f = fopen(path, "r");
    if (!f)
        return no_such_cfg(name, err);
    dnr_status st = cfg_read(c, f, path, err);
    fclose(f);
    for (int i = 0; st == DNR_OK && i < n_set; i++)
        st = cfg_set(c, set[i], err);
    return st == DNR_OK ? cfg_check(c, err) : st;
}

/* ---------------------------------------------------------------- checks over several keys */

#define CHECK(cond, key, remedy, ...)                                                              \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            tool_fail(err, DNR_EUSAGE, cfg_origin(c, key, where), __VA_ARGS__);                    \
            return tool_remedy(err, "%s", remedy);                                                 \
        }                                                                                          \
    } while (0)

static bool has_imagenet_stem(const cfg *c)
{
    static const char *const nets[] = {"resnet18", "resnet34", "resnet50", "resnet101",
                                       "resnet152"};
    for (size_t i = 0; c->model.stem == STEM_AUTO && i < sizeof nets / sizeof nets[0]; i++)
        if (!strcmp(c->model.name, nets[i]))
            return true;
    return c->model.stem == STEM_IMAGENET;
}

dnr_status cfg_check(const cfg *c, dnr_error *err)
{
    enum { STEP = 1, MULTISTEP, LINEAR, COSINE, POLY, ONECYCLE }; /* of optim.schedule */
    char where[96];
    CHECK(*c->model.name, "model.name", "add `name = resnet50`, say, to [model]",
          "model.name is missing");
    CHECK(c->data.resize == 0 || c->data.resize >= c->data.image, "data.resize",
          "raise data.resize to data.image, or set it to 0",
          "data.resize = %lld is less than data.image = %lld", (long long)c->data.resize,
          (long long)c->data.image);
    CHECK(c->data.crop != CROP_PAD || c->data.pad > 0, "data.crop", "set data.pad, or crop = none",
          "data.crop = pad needs data.pad > 0");
    CHECK(c->data.pad == 0 || c->data.crop == CROP_PAD, "data.pad",
          "set data.crop = pad, or leave data.pad out",
          "data.pad is used only with data.crop = pad");
    CHECK(c->data.area_min <= c->data.area_max, "data.area_min", "swap them",
          "data.area_min is above data.area_max");
    CHECK(c->data.aspect_min <= c->data.aspect_max, "data.aspect_min", "swap them",
          "data.aspect_min is above data.aspect_max");
    CHECK(!has_imagenet_stem(c) || c->data.image >= 32, "data.image",
          "use model.stem = cifar, or data.image of 32 or more",
          "pictures of %lld pixels are too small for %s with the imagenet stem",
          (long long)c->data.image, c->model.name);
    CHECK(c->optim.warmup < (double)c->train.epochs, "optim.warmup",
          "shorten the warm-up, or train longer",
          "optim.warmup = %g epochs leaves nothing of train.epochs = %lld", c->optim.warmup,
          (long long)c->train.epochs);
    CHECK(c->optim.schedule != ONECYCLE || c->optim.warmup == 0, "optim.warmup",
          "leave optim.warmup out; optim.pct_start says how long it rises",
          "optim.schedule = onecycle has a warm-up of its own");
    CHECK(c->optim.schedule != MULTISTEP || c->optim.milestones.n > 0, "optim.schedule",
          "set optim.milestones = 30, 60, 80, say",
          "optim.schedule = multistep needs optim.milestones");
    for (int64_t i = 1; i < c->optim.milestones.n; i++)
        CHECK(c->optim.milestones.v[i] > c->optim.milestones.v[i - 1], "optim.milestones",
              "put them in rising order", "optim.milestones: %g comes after %g",
              c->optim.milestones.v[i], c->optim.milestones.v[i - 1]);
    CHECK(!c->optim.nesterov || c->optim.momentum > 0, "optim.nesterov",
          "set optim.momentum = 0.9, or nesterov = false",
          "optim.nesterov needs optim.momentum > 0");
    return DNR_OK;
}
