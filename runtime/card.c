/* card.c: metadata of weights: written with them, read without a trainer. */
#include <stdlib.h>
#include <string.h>

#include "card.h"
#include "safetensors.h"

static const char *const OWN[] = {"format",  "architecture", "dnnrun", "stem",
                                  "classes", "image",        "mean",   "std"};

static void add(dnri_card *c, int *n, const char *key, const char *value)
{
    c->pairs[(*n)++] = key;
    c->pairs[(*n)++] = value;
}

static const char *three(const double v[3], char buf[80])
{
    snprintf(buf, 80, "%.9g %.9g %.9g", v[0], v[1], v[2]);
    return buf;
}

void dnri_card_make(const dnr_trainer *t, dnri_card *out)
{
    const dnr_trainer_opts *o = &t->o;
    int n = 0;
    snprintf(out->classes, sizeof out->classes, "%d", o->model.classes);
    snprintf(out->image, sizeof out->image, "%d", o->eval_image);
    add(out, &n, "format", "pt");
    add(out, &n, "architecture", o->model.name);
    add(out, &n, "dnnrun", DNR_VERSION);
    add(out, &n, "stem", o->model.stem ? o->model.stem : "auto");
    add(out, &n, "classes", out->classes);
    add(out, &n, "image", out->image);
    add(out, &n, "mean", three(o->mean, out->mean));
    add(out, &n, "std", three(o->std, out->std));
    for (int i = 0; i < DNRI_NOTES && t->notes[i][0]; i++)
        add(out, &n, t->notes[i][0], t->notes[i][1]);
    out->pairs[n] = NULL;
}

dnr_status dnr_trainer_note(dnr_trainer *t, const char *key, const char *value)
{
    for (size_t i = 0; i < sizeof OWN / sizeof OWN[0]; i++)
        if (!strcmp(OWN[i], key))
            return DNR_FAIL(DNR_EUSAGE, "use another key", "\"%s\" is written by the library", key);
    int i = 0;
    while (i < DNRI_NOTES && t->notes[i][0] && strcmp(t->notes[i][0], key))
        i++;
    if (i == DNRI_NOTES)
        return DNR_FAIL(DNR_EUSAGE, "put more into one note", "a trainer keeps %d notes",
                        DNRI_NOTES);
    char *k = strdup(key), *v = strdup(value);
    if (!k || !v) {
        free(k);
        free(v);
        return DNR_FAIL_NOMEM();
    }
    free(t->notes[i][0]);
    free(t->notes[i][1]);
    t->notes[i][0] = k;
    t->notes[i][1] = v;
    return DNR_OK;
}

/* ---- reading */

struct dnr_weights {
    dnri_st_file *file;
};

dnr_status dnr_weights_open(const char *path, dnr_weights **out)
{
    dnr_weights *w = calloc(1, sizeof *w);
    *out = NULL;
    if (!w)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_st_open(path, &w->file);
    if (st == DNR_OK)
        *out = w;
    else
        free(w);
    return st;
}

void dnr_weights_close(dnr_weights *w)
{
    if (w)
        dnri_st_close(w->file);
    free(w);
}

const char *dnr_weights_metadata(const dnr_weights *w, const char *key)
{
    return dnri_st_metadata(w->file, key);
}
