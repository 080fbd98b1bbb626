/* weights.c: the model's weights and running statistics in a file, with torchvision's names and layouts:
 * convolutions OIHW, dense [K,C], vectors [C], and the scalar "NAME.num_batches_tracked" of each norm. */
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"
#include "trainer.h"

#define RUNNING_MEAN ".running_mean"
#define TRACKED      ".num_batches_tracked"

/* "bn1.num_batches_tracked" where `p` is "bn1.running_mean": of each norm once. */
static bool tracked_name(const dnri_param *p, char name[DNRI_NAME + 32])
{
    size_t n = strlen(p->name), suffix = strlen(RUNNING_MEAN);
    if (n < suffix || strcmp(p->name + n - suffix, RUNNING_MEAN) != 0)
        return false;
    snprintf(name, DNRI_NAME + 32, "%.*s" TRACKED, (int)(n - suffix), p->name);
    return true;
}

/* The shape of a parameter in a file. */
static int file_shape(const dnri_param *p, int64_t dim[4])
{
    switch (p->kind) {
    case DNRI_CONV_W: /* [K,R,S,C] → OIHW */
        dim[0] = p->dim[0];
        dim[1] = p->dim[3];
        dim[2] = p->dim[1];
        dim[3] = p->dim[2];
        return 4;
    case DNRI_DENSE_W:
        dim[0] = p->dim[0];
        dim[1] = p->dim[3];
        return 2;
    default:
        dim[0] = p->dim[3];
        return 1;
    }
}

/* Copies between the store's order [K,R,S,C] and the file's [K,C,R,S]; others have one order. */
static void reorder(const dnri_param *p, double *store, double *file, bool to_file)
{
    int64_t area = p->kind == DNRI_CONV_W ? p->dim[1] * p->dim[2] : 1;
    int64_t c = p->kind == DNRI_CONV_W ? p->dim[3] : p->count;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t at = i / (area * c) * area * c + i % c * area + i / c % area;
        if (to_file)
            file[at] = store[i];
        else
            store[i] = file[at];
    }
}

static dnri_role role_of(const dnri_param *p)
{
    return p->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER;
}

static int64_t largest(const dnri_params *params)
{
    int64_t most = 0;
    for (int i = 0; i < dnri_params_count(params); i++)
        if (dnri_params_at(params, i)->count > most)
            most = dnri_params_at(params, i)->count;
    return most;
}

/* ---- saving */

/* The tensors of a file, and what they point to. */
typedef struct image {
    dnri_st_tensor *t;
    int n;
    char (*names)[DNRI_NAME + 32]; /* of the counters */
    double *scratch;               /* two tensors, as doubles */
    char *values;
} image;

static dnr_status fill_image(dnr_trainer *t, image *im, const int64_t *tracked)
{
    dnr_dtype dtype = t->num.master;
    dnri_st_type type = dtype == DNR_F64 ? DNRI_ST_F64 : DNRI_ST_F32;
    double *store = im->scratch, *file = im->scratch + largest(t->params);
    char *to = im->values;
    int64_t dim[4];

    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        DNR_TRY(dnri_store_read(t->store, role_of(p), i, store));
        reorder(p, store, file, true);
        dnri_from_double(dtype, file, to, (size_t)p->count);
        im->t[im->n++] = dnri_st_make(p->name, type, file_shape(p, dim), dim, to);
        to += (size_t)p->count * dnri_dtype_size(dtype);
        if (tracked_name(p, im->names[i]))
            im->t[im->n++] = dnri_st_make(im->names[i], DNRI_ST_I64, 0, NULL, tracked);
    }
    return DNR_OK;
}

dnr_status dnr_trainer_save(dnr_trainer *t, const char *path)
{
    const char *metadata[] = {"format",    "pt", "architecture", t->o.model.name, "dnnrun",
                              DNR_VERSION, NULL};
    size_t n = (size_t)dnri_params_count(t->params), total = 0;
    dnri_state state;
    DNR_TRY(dnri_store_read_state(t->store, &state));
    for (size_t i = 0; i < n; i++)
        total += (size_t)dnri_params_at(t->params, (int)i)->count;
    image im = {.t = malloc(2 * n * sizeof *im.t),
                .names = malloc(n * sizeof *im.names),
                .scratch = malloc(2 * (size_t)largest(t->params) * sizeof(double)),
                .values = malloc(total * dnri_dtype_size(t->num.master))};
    dnr_status s = DNR_FAIL_NOMEM();
    if (im.t && im.names && im.scratch && im.values) {
        s = fill_image(t, &im, &state.forwards);
        if (s == DNR_OK)
            s = dnri_st_write(path, metadata, im.t, im.n);
    }
    free(im.t);
    free(im.names);
    free(im.scratch);
    free(im.values);
    return s;
}

/* ---- loading */

static void shape_text(int ndim, const int64_t *dim, char buf[128])
{
    size_t n = (size_t)snprintf(buf, 128, "[");
    for (int i = 0; i < ndim && n < 120; i++)
        n += (size_t)snprintf(buf + n, 128 - n, "%s%lld", i ? "," : "", (long long)dim[i]);
    snprintf(buf + (n < 126 ? n : 126), 2, "]");
}

/* Fails, with what the file says of itself. `difference` names the first tensor that differs. */
static dnr_status differs(const dnr_trainer *t, const dnri_st_file *f, const char *path,
                          const char *difference)
{
    const char *of = dnri_st_metadata(f, "architecture");
    char says[80] = "does not say of which model it is";
    if (of)
        snprintf(says, sizeof says, "says it is of %.48s", of);
    for (char *c = says; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?'; /* the file's text goes to a terminal */
    return DNR_FAIL(DNR_EDATA,
                    "use weights of this model, or set model.name and model.classes to theirs",
                    "'%s' does not fit %s with %d classes: %s; the file %s", path, t->o.model.name,
                    t->o.model.classes, difference, says);
}

static dnr_status check_param(const dnr_trainer *t, const dnri_st_file *f, const char *path,
                              const dnri_param *p)
{
    const dnri_st_tensor *x = dnri_st_find(f, p->name);
    char text[400], have[128], want[128];
    int64_t dim[4];
    int ndim = file_shape(p, dim);
    if (!x) {
        snprintf(text, sizeof text, "tensor %s is missing", p->name);
        return differs(t, f, path, text);
    }
    if (x->ndim == ndim && memcmp(x->dim, dim, (size_t)ndim * sizeof *dim) == 0) {
        if (x->type != DNRI_ST_OTHER && x->type != DNRI_ST_I64)
            return DNR_OK;
        snprintf(text, sizeof text, "tensor %s is not of a floating-point type", p->name);
        return differs(t, f, path, text);
    }
    shape_text(x->ndim, x->dim, have);
    shape_text(ndim, dim, want);
    snprintf(text, sizeof text, "tensor %s is %s, not %s", p->name, have, want);
    return differs(t, f, path, text);
}

/* Is `x` the counter of one of the model's norms? */
static bool is_tracked(const dnr_trainer *t, const dnri_st_tensor *x)
{
    char name[DNRI_NAME + 32];
    for (int i = 0; i < dnri_params_count(t->params); i++)
        if (tracked_name(dnri_params_at(t->params, i), name) && strcmp(name, x->name) == 0)
            return x->type == DNRI_ST_I64 && x->count == 1;
    return false;
}

/* Everything is checked before anything is changed. */
static dnr_status check_file(const dnr_trainer *t, const dnri_st_file *f, const char *path)
{
    for (int i = 0; i < dnri_params_count(t->params); i++)
        DNR_TRY(check_param(t, f, path, dnri_params_at(t->params, i)));
    for (int i = 0; i < dnri_st_count(f); i++) {
        const dnri_st_tensor *x = dnri_st_at(f, i);
        if (dnri_params_find(t->params, x->name) < 0 && !is_tracked(t, x)) {
            char text[160];
            snprintf(text, sizeof text, "tensor %.95s is not of this model", x->name);
            return differs(t, f, path, text);
        }
    }
    return DNR_OK;
}

static dnr_status load_values(dnr_trainer *t, const dnri_st_file *f, double *file, double *store)
{
    double forwards = -1; /* stays where the file has no counters */
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        char name[DNRI_NAME + 32];
        DNR_TRY(dnri_st_read(f, dnri_st_find(f, p->name), file));
        reorder(p, store, file, false);
        DNR_TRY(dnri_store_write(t->store, role_of(p), i, store));
        const dnri_st_tensor *counter = tracked_name(p, name) ? dnri_st_find(f, name) : NULL;
        if (counter)
            DNR_TRY(dnri_st_read(f, counter, &forwards));
    }
    dnri_state state;
    DNR_TRY(dnri_store_read_state(t->store, &state));
    if (forwards >= 0)
        state.forwards = (int64_t)forwards;
    return dnri_store_write_state(t->store, &state);
}

dnr_status dnr_trainer_load(dnr_trainer *t, const char *path)
{
    dnri_st_file *f;
    DNR_TRY(dnri_st_open(path, &f));
    size_t n = (size_t)largest(t->params);
    double *scratch = malloc(2 * n * sizeof *scratch);
    dnr_status s = scratch ? check_file(t, f, path) : DNR_FAIL_NOMEM();
    if (s == DNR_OK)
        s = load_values(t, f, scratch, scratch + n);
    free(scratch);
    dnri_st_close(f);
    return s;
}
