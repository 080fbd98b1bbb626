#include "choices.h"

#include "wholefile.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define VERSION 1
#define KIND    "dnnrun choices"

struct dnri_choices {
    char *path, *machine;
    json_t *known; /* key → text, of this machine */
    json_t *fresh; /* of them, what the file lacks */
    bool said;
};

static bool all_texts(json_t *of_machine)
{
    const char *key;
    json_t *text;
    json_object_foreach(of_machine, key, text) if (!json_is_string(text)) return false;
    return json_is_object(of_machine);
}

/* The file's machines, {machine: {key: text}}: a new reference, empty where there is no file or none of ours. */
static json_t *read_machines(const char *path, bool *said)
{
    json_error_t e = {0};
    json_t *file = NULL, *machines = NULL, *of_machine;
    const char *name, *wrong = "it is not a file of choices of this version";
    if (access(path, F_OK) != 0)
        return json_object();
    file = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    const char *kind = json_string_value(json_object_get(file, "kind"));
    if (!file)
        wrong = e.text;
    else if (kind && strcmp(kind, KIND) == 0 &&
             json_integer_value(json_object_get(file, "version")) == VERSION)
        machines = json_incref(json_object_get(file, "machines"));
    bool good = json_is_object(machines);
    json_object_foreach(machines, name, of_machine) good = good && all_texts(of_machine);
    json_decref(file);
    if (good)
        return machines;
    if (!*said)
        dnri_log(DNR_LOG_WARN, "%s is left out, and will be replaced: %s", path, wrong);
    *said = true;
    json_decref(machines);
    return json_object();
}

dnr_status dnri_choices_open(const char *path, const char *machine, dnri_choices **out)
{
    dnri_choices *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c)
        return DNR_FAIL_NOMEM();
    c->path = path ? strdup(path) : NULL;
    c->machine = strdup(machine);
    json_t *machines = c->path ? read_machines(path, &c->said) : NULL;
    json_t *known = json_object_get(machines, machine);
    c->known = known ? json_incref(known) : json_object();
    c->fresh = json_object();
    json_decref(machines);
    if ((path && !c->path) || !c->machine || !c->known || !c->fresh) {
        dnri_choices_free(c);
        return DNR_FAIL_NOMEM();
    }
    *out = c;
    return DNR_OK;
}

void dnri_choices_free(dnri_choices *c)
{
    if (!c)
        return;
    json_decref(c->known);
    json_decref(c->fresh);
    free(c->path);
    free(c->machine);
    free(c);
}

const char *dnri_choices_get(const dnri_choices *c, const char *key)
{
    return json_string_value(json_object_get(c->known, key));
}

dnr_status dnri_choices_set(dnri_choices *c, const char *key, const char *text)
{
    const char *old = dnri_choices_get(c, key);
    if (old && strcmp(old, text) == 0)
        return DNR_OK;
    if (json_object_set_new(c->known, key, json_string(text)) != 0 ||
        json_object_set_new(c->fresh, key, json_string(text)) != 0)
        return DNR_FAIL_NOMEM();
    return DNR_OK;
}

char *dnri_choices_text(const dnri_choices *c)
{
    json_t *j = json_pack("{s:s, s:O}", "machine", c->machine, "choices", c->known);
    char *text = j ? json_dumps(j, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(j);
    return text;
}

bool dnri_choices_take(dnri_choices *c, const char *text)
{
    json_t *j = json_loads(text, 0, NULL), *theirs = json_object_get(j, "choices");
    const char *machine = json_string_value(json_object_get(j, "machine"));
    bool good = machine && strcmp(machine, c->machine) == 0 && all_texts(theirs) &&
                json_object_update(c->known, theirs) == 0;
    json_decref(j);
    return good;
}

/* mkdir -p of what lies above `path`; what it cannot make shows when the file is written. */
static void make_folders(char *path)
{
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            (void)mkdir(path, 0777);
            *p = '/';
        }
}

static dnr_status write_text(const char *path, const char *text)
{
    dnri_wholefile f;
    DNR_TRY(dnri_wholefile_open(&f, path));
    DNR_TRY(dnri_wholefile_write(&f, text, strlen(text)));
    return dnri_wholefile_commit(&f);
}

void dnri_choices_save(dnri_choices *c)
{
    if (!c->path || json_object_size(c->fresh) == 0)
        return;
    json_t *machines = read_machines(c->path, &c->said);
    json_t *mine = json_object_get(machines, c->machine);
    mine = mine ? json_incref(mine) : json_object();
    char *text = NULL;
    if (json_object_update(mine, c->fresh) == 0 &&
        json_object_set(machines, c->machine, mine) == 0) {
        json_t *file =
            json_pack("{s:s, s:i, s:O}", "kind", KIND, "version", VERSION, "machines", machines);
        text = json_dumps(file, JSON_INDENT(1) | JSON_SORT_KEYS);
        json_decref(file);
    }
    json_decref(machines);
    json_decref(mine);
    make_folders(c->path);
    if (text && write_text(c->path, text) == DNR_OK) {
        json_object_clear(c->fresh);
    } else if (!c->said) {
        dnri_log(DNR_LOG_WARN, "what was timed cannot be kept: %s",
                 text ? dnr_last_error()->what : "out of memory");
        c->said = true;
    }
    free(text);
}
