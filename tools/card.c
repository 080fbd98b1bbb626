/* card.c: metadata of weights, as cfg keys. */
#include "card.h"
#include "rundir.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Metadata and the keys that they set. */
static const struct {
    const char *metadata, *key;
} fields[] = {
    {"architecture", "model.name"},
    {"classes", "model.classes"},
    {"stem", "model.stem"},
    {"image", "data.image"},
    {"resize", "data.resize"},
    {"mean", "data.mean"},
    {"std", "data.std"},
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

dnr_status card_write(session *s, dnr_error *err)
{
    char resize[24];
    char *text = NULL;
    json_t *names = json_array();
    dnr_status st;
    snprintf(resize, sizeof resize, "%lld", (long long)s->cfg.data.resize);
    TOOL_LIB(st, dnr_trainer_note(s->trainer, "resize", resize));
    for (int k = 0; k < dnr_source_classes(s->train); k++) {
        const char *name = dnr_source_class_name(s->train, k);
        if (!name)
            goto out;
        json_array_append_new(names, rundir_text(name));
    }
    text = json_dumps(names, JSON_COMPACT);
    if (text)
        TOOL_LIB(st, dnr_trainer_note(s->trainer, "class_names", text));
out:
    free(text);
    json_decref(names);
    return st;
}

static bool is_set(const char *key, char *const set[], int n_set)
{
    size_t n = strlen(key);
    for (int i = 0; i < n_set; i++)
        if (!strncmp(set[i], key, n) && set[i][n] == '=')
            return true;
    return false;
}

static dnr_status bad_field(const char *path, const char *what, dnr_error *err)
{
    tool_fail(err, DNR_EDATA, "--weights", "%.300s: its metadata %.80s cannot be used", path, what);
    return tool_remedy(err,
                       "give the cfg it was trained with, and set the key on the command line");
}

static dnr_status read_names(const dnr_weights *w, const char *path, int64_t classes,
                             json_t **names, dnr_error *err)
{
    const char *text = dnr_weights_metadata(w, "class_names");
    *names = text ? json_loads(text, 0, NULL) : NULL;
    bool good = !text || (int64_t)json_array_size(*names) == classes;
    for (size_t i = 0; i < json_array_size(*names); i++)
        good = good && json_is_string(json_array_get(*names, i));
    return good ? DNR_OK : bad_field(path, "class_names", err);
}

dnr_status card_read(const char *path, cfg *c, char *const set[], int n_set, json_t **names,
                     bool *model, dnr_error *err)
{
    dnr_weights *w;
    dnr_status st;
    *names = NULL;
    if (dnr_weights_open(path, &w) != DNR_OK)
        return tool_lib_error(err, "--weights", NULL);
    *model = dnr_weights_metadata(w, "architecture") != NULL;
    for (int i = 0; i < N_FIELDS; i++) {
        const char *value = dnr_weights_metadata(w, fields[i].metadata);
        char assignment[256];
        if (!value || is_set(fields[i].key, set, n_set))
            continue;
        snprintf(assignment, sizeof assignment, "%s=%.200s", fields[i].key, value);
        if (cfg_set(c, assignment, err) != DNR_OK) {
            st = bad_field(path, fields[i].metadata, err);
            goto out;
        }
    }
    st = read_names(w, path, c->model.classes, names, err);
out:
    dnr_weights_close(w);
    return st;
}
