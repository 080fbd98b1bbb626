/* weights.c: the model's weights and running statistics in a file, with torchvision's names and layouts:
 * convolutions OIHW, dense [K,C], vectors [C], and the scalar "NAME.num_batches_tracked" of each norm. */
#include <stdlib.h>
#include <string.h>

#include "card.h"
#include "weights.h"

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

static const struct set {
    dnri_role flat, buffer; /* DNRI_ROLES: not of this set */
    const char *prefix;     /* of names in the file */
    bool tracked;           /* counters too */
} SETS[] = {
    [DNRI_OF_MODEL] = {DNRI_MASTER, DNRI_BUFFER, "", true},
    [DNRI_OF_EMA] = {DNRI_EMA, DNRI_EMA_BUFFER, "", true},
    [DNRI_OF_MOMENTUM] = {DNRI_MOMENTUM, DNRI_ROLES, "momentum.", false},
};

static dnri_role role_of(dnri_weights of, const dnri_param *p)
{
    return p->kind == DNRI_RUNNING ? SETS[of].buffer : SETS[of].flat;
}

typedef char file_name[DNRI_NAME + 32];

/* The parameter's name in the file. */
static const char *name_of(dnri_weights of, const dnri_param *p, file_name buf)
{
    snprintf(buf, sizeof(file_name), "%s%s", SETS[of].prefix, p->name);
    return buf;
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
    file_name *names; /* two for each parameter: its own, its counter's */
    double *scratch;  /* two tensors, as doubles */
    char *values;
} image;

static dnr_status fill_image(dnr_trainer *t, dnri_weights of, image *im, const int64_t *tracked)
{
    dnr_dtype dtype = t->num.master;
    dnri_st_type type = dtype == DNR_F64 ? DNRI_ST_F64 : DNRI_ST_F32;
    double *store = im->scratch, *file = im->scratch + largest(t->params);
    char *to = im->values;
    int64_t dim[4];

    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        file_name *name = &im->names[2 * i];
        if (role_of(of, p) == DNRI_ROLES)
            continue;
        DNR_TRY(dnri_store_read(t->store, role_of(of, p), i, store));
        reorder(p, store, file, true);
        dnri_from_double(dtype, file, to, (size_t)p->count);
        im->t[im->n++] = dnri_st_make(name_of(of, p, name[0]), type, file_shape(p, dim), dim, to);
        to += (size_t)p->count * dnri_dtype_size(dtype);
        if (SETS[of].tracked && tracked_name(p, name[1]))
            im->t[im->n++] = dnri_st_make(name[1], DNRI_ST_I64, 0, NULL, tracked);
    }
    return DNR_OK;
}

dnr_status dnri_weights_write(dnr_trainer *t, dnri_weights of, const char *path,
                              const char *const *metadata, const dnri_st_tensor *more, int n_more,
                              uint64_t *sum)
{
    size_t n = (size_t)dnri_params_count(t->params), total = 0;
    dnri_state state;
    DNR_TRY(dnri_store_read_state(t->store, &state));
    for (size_t i = 0; i < n; i++)
        total += (size_t)dnri_params_at(t->params, (int)i)->count;
    image im = {.t = malloc((2 * n + (size_t)n_more) * sizeof *im.t),
                .names = malloc(2 * n * sizeof *im.names),
                .scratch = malloc(2 * (size_t)largest(t->params) * sizeof(double)),
                .values = malloc(total * dnri_dtype_size(t->num.master))};
    dnr_status s = DNR_FAIL_NOMEM();
    if (im.t && im.names && im.scratch && im.values) {
        s = fill_image(t, of, &im, &state.forwards);
        for (int i = 0; i < n_more; i++)
            im.t[im.n++] = more[i];
        if (s == DNR_OK)
            s = dnri_st_write_sum(path, metadata, im.t, im.n, sum);
    }
    free(im.t);
    free(im.names);
    free(im.scratch);
    free(im.values);
    return s;
}

static dnr_status save(dnr_trainer *t, dnri_weights of, const char *path)
{
    dnri_card card;
    dnri_card_make(t, &card);
    return dnri_weights_write(t, of, path, card.pairs, NULL, 0, NULL);
}

dnr_status dnr_trainer_save(dnr_trainer *t, const char *path)
{
    return save(t, DNRI_OF_MODEL, path);
}

dnr_status dnr_trainer_save_ema(dnr_trainer *t, const char *path)
{
    if (!dnri_store_ptr(t->store, DNRI_EMA, -1))
        return DNR_FAIL(DNR_EUSAGE, "set train.ema, for example 0.9999",
                        "this trainer keeps no averages of its weights");
    return save(t, DNRI_OF_EMA, path);
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
    const char *arch = dnri_st_metadata(f, "architecture");
    char says[80] = "does not say of which model it is";
    if (arch)
        snprintf(says, sizeof says, "says it is of %.48s", arch);
    for (char *c = says; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?'; /* the file's text goes to a terminal */
    return DNR_FAIL(DNR_EDATA,
                    "use weights of this model, or set model.name and model.classes to theirs",
                    "'%s' does not fit %s with %d classes: %s; the file %s", path, t->o.model.name,
                    t->o.model.classes, difference, says);
}

/* Why the file's tensor is not this parameter's; false: it is. */
static bool unlike(const dnri_st_file *f, const dnri_param *p, const char *name, char why[400])
{
    const dnri_st_tensor *x = dnri_st_find(f, name);
    char have[128], want[128];
    int64_t dim[4];
    int ndim = file_shape(p, dim);
    if (!x) {
        snprintf(why, 400, "tensor %s is missing", name);
        return true;
    }
    if (x->ndim != ndim || memcmp(x->dim, dim, (size_t)ndim * sizeof *dim) != 0) {
        shape_text(x->ndim, x->dim, have);
        shape_text(ndim, dim, want);
        snprintf(why, 400, "tensor %s is %s, not %s", name, have, want);
        return true;
    }
    if (x->type == DNRI_ST_OTHER || x->type == DNRI_ST_I64) {
        snprintf(why, 400, "tensor %s is not of a floating-point type", name);
        return true;
    }
    return false;
}

/* Is `x` a parameter of the set, or the counter of one of the model's norms? */
static bool belongs(const dnr_trainer *t, dnri_weights of, const dnri_st_tensor *x)
{
    file_name name;
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        if (role_of(of, p) != DNRI_ROLES && strcmp(name_of(of, p, name), x->name) == 0)
            return true;
        if (SETS[of].tracked && tracked_name(p, name) && strcmp(name, x->name) == 0)
            return x->type == DNRI_ST_I64 && x->count == 1;
    }
    return false;
}

static bool listed(const char *const *names, const char *name)
{
    for (; names && *names; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

static bool is_head(const dnri_param *p)
{
    return p->kind == DNRI_DENSE_W || p->kind == DNRI_BIAS;
}

/* `but_head`: whatever the file says of the last layer. */
static dnr_status check(const dnr_trainer *t, dnri_weights of, const dnri_st_file *f,
                        const char *path, const char *const *more, bool but_head)
{
    file_name name;
    char why[400];
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        if (role_of(of, p) != DNRI_ROLES && !(but_head && is_head(p)) &&
            unlike(f, p, name_of(of, p, name), why))
            return differs(t, f, path, why);
    }
    for (int i = 0; i < dnri_st_count(f); i++) {
        const dnri_st_tensor *x = dnri_st_at(f, i);
        if (!belongs(t, of, x) && !listed(more, x->name)) {
            snprintf(why, sizeof why, "tensor %.95s is not of this model", x->name);
            return differs(t, f, path, why);
        }
    }
    return DNR_OK;
}

dnr_status dnri_weights_check(const dnr_trainer *t, dnri_weights of, const dnri_st_file *f,
                              const char *path, const char *const *more)
{
    return check(t, of, f, path, more, false);
}

static dnr_status read_counters(dnr_trainer *t, const dnri_st_file *f)
{
    double forwards = -1; /* stays where the file has no counters */
    dnri_state state;
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        file_name name;
        const dnri_st_tensor *x =
            tracked_name(dnri_params_at(t->params, i), name) ? dnri_st_find(f, name) : NULL;
        if (x)
            DNR_TRY(dnri_st_read(f, x, &forwards));
    }
    DNR_TRY(dnri_store_read_state(t->store, &state));
    if (forwards >= 0)
        state.forwards = (int64_t)forwards;
    return dnri_store_write_state(t->store, &state);
}

static dnr_status take(dnr_trainer *t, dnri_weights of, const dnri_st_file *f, bool but_head)
{
    size_t n = (size_t)largest(t->params);
    double *file = malloc(2 * n * sizeof *file), *store = file + n;
    dnr_status s = file ? DNR_OK : DNR_FAIL_NOMEM();
    for (int i = 0; s == DNR_OK && i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        file_name name;
        if (role_of(of, p) == DNRI_ROLES || (but_head && is_head(p)))
            continue;
        s = dnri_st_read(f, dnri_st_find(f, name_of(of, p, name)), file);
        reorder(p, store, file, false);
        if (s == DNR_OK)
            s = dnri_store_write(t->store, role_of(of, p), i, store);
    }
    free(file);
    return s == DNR_OK && of == DNRI_OF_MODEL ? read_counters(t, f) : s;
}

dnr_status dnri_weights_read(dnr_trainer *t, dnri_weights of, const dnri_st_file *f)
{
    return take(t, of, f, false);
}

dnr_status dnr_trainer_load(dnr_trainer *t, const char *path)
{
    dnri_st_file *f;
    DNR_TRY(dnri_st_open(path, &f));
    dnr_status s = dnri_weights_check(t, DNRI_OF_MODEL, f, path, NULL);
    if (s == DNR_OK)
        s = dnri_weights_read(t, DNRI_OF_MODEL, f);
    if (s == DNR_OK)
        s = dnri_store_start_ema(t->store);
    dnri_st_close(f);
    return s;
}

/* The last layer is taken whole or not at all. `why` then says why not. */
static bool head_fits(const dnr_trainer *t, const dnri_st_file *f, char why[400])
{
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        if (is_head(p) && unlike(f, p, p->name, why))
            return false;
    }
    return true;
}

static void say_taken(const dnr_trainer *t, const char *path, bool but_head, const char *why)
{
    int taken = 0;
    char left[256] = "";
    for (int i = 0; i < dnri_params_count(t->params); i++) {
        const dnri_param *p = dnri_params_at(t->params, i);
        size_t at = strlen(left);
        if (!but_head || !is_head(p))
            taken++;
        else
            snprintf(left + at, sizeof left - at, "%s%s", at ? ", " : "", p->name);
    }
    dnri_log(DNR_LOG_INFO, "%d of %d tensors taken from %s", taken, dnri_params_count(t->params),
             path);
    if (but_head)
        dnri_log(DNR_LOG_INFO, "not taken, and so at their initial values: %s (%s)", left, why);
}

dnr_status dnr_trainer_init_from(dnr_trainer *t, const char *path)
{
    dnri_st_file *f;
    char why[400];
    DNR_TRY(dnri_st_open(path, &f));
    bool but_head = !head_fits(t, f, why);
    dnr_status s = check(t, DNRI_OF_MODEL, f, path, NULL, but_head);
    if (s == DNR_OK)
        s = take(t, DNRI_OF_MODEL, f, but_head);
    if (s == DNR_OK)
        s = dnri_store_start_ema(t->store);
    if (s == DNR_OK)
        say_taken(t, path, but_head, why);
    dnri_st_close(f);
    return s;
}
