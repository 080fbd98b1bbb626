/* store.c: all that outlives a step, in the memory of one device. */
#include "store.h"

#include "backend.h"
#include "rng.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct dnri_store {
    dnr_device *dev;
    dnri_params *params;
    dnri_numerics num;
    unsigned holds;
    uint64_t changes;
    void *slab[DNRI_ROLES]; /* WEIGHT is MASTER where the types agree */
};

static const char *const role_names[DNRI_ROLES] = {
    [DNRI_MASTER] = "master",     [DNRI_GRAD] = "gradient",
    [DNRI_GSUM] = "gradient sum", [DNRI_MOMENTUM] = "momentum",
    [DNRI_WEIGHT] = "weight",     [DNRI_BUFFER] = "running statistics",
    [DNRI_EMA] = "average",       [DNRI_EMA_BUFFER] = "average of statistics",
    [DNRI_STATE] = "state",       [DNRI_HEADER] = "header",
    [DNRI_CELL] = "cell",
};

static bool aliased(const dnri_numerics *num)
{
    return num->compute == num->master;
}

static dnr_dtype slab_type(const dnri_numerics *num, dnri_role role)
{
    return role == DNRI_WEIGHT ? num->compute : num->master;
}

/* Bytes of a slab; 0: there is none. */
static size_t slab_bytes(const dnri_params *params, const dnri_numerics *num, unsigned holds,
                         dnri_role role)
{
    size_t elem = dnri_dtype_size(slab_type(num, role));
    size_t flat = (size_t)dnri_params_flat(params) * elem;
    switch (role) {
    case DNRI_MASTER:
        return flat;
    case DNRI_GRAD:
    case DNRI_MOMENTUM:
        return holds & DNRI_STORE_TRAIN ? flat : 0;
    case DNRI_GSUM:
        return holds & DNRI_STORE_SUMS ? flat : 0;
    case DNRI_EMA:
        return holds & DNRI_STORE_EMA ? flat : 0;
    case DNRI_WEIGHT:
        return aliased(num) ? 0 : flat;
    case DNRI_BUFFER:
        return (size_t)dnri_params_buffers(params) * elem;
    case DNRI_EMA_BUFFER:
        return holds & DNRI_STORE_EMA ? (size_t)dnri_params_buffers(params) * elem : 0;
    case DNRI_STATE:
        return sizeof(dnri_state);
    case DNRI_HEADER:
        return sizeof(dnri_header);
    case DNRI_CELL:
        return sizeof(void *);
    case DNRI_ROLES:
        break;
    }
    return 0;
}

size_t dnri_store_size(dnri_params *params, const dnri_numerics *num, unsigned holds)
{
    size_t sum = 0;
    dnri_params_seal(params);
    for (int role = 0; role < DNRI_ROLES; role++)
        sum += (slab_bytes(params, num, holds, (dnri_role)role) + 255) / 256 * 256;
    return sum;
}

size_t dnri_store_bytes(const dnri_store *s, dnri_role role)
{
    return slab_bytes(s->params, &s->num, s->holds, role);
}

dnr_status dnri_store_new(dnr_device *dev, dnri_params *params, const dnri_numerics *num,
                          unsigned holds, dnri_store **out)
{
    *out = NULL;
    dnri_store *s = calloc(1, sizeof *s);
    if (!s)
        return DNR_FAIL_NOMEM();
    dnri_params_seal(params);
    s->dev = dev;
    s->params = params;
    s->num = *num;
    s->holds = holds;
    for (int role = 0; role < DNRI_ROLES; role++) {
        size_t bytes = slab_bytes(params, num, holds, (dnri_role)role);
        if (bytes && dev->be->alloc(dev, bytes, &s->slab[role]) != DNR_OK) {
            dnri_store_free(s);
            return dnri_fail_context("%s slab", role_names[role]);
        }
    }
    if (aliased(num))
        s->slab[DNRI_WEIGHT] = s->slab[DNRI_MASTER];
    *out = s;
    return DNR_OK;
}

void dnri_store_free(dnri_store *s)
{
    if (!s)
        return;
    if (aliased(&s->num))
        s->slab[DNRI_WEIGHT] = NULL;
    for (int role = 0; role < DNRI_ROLES; role++)
        if (s->slab[role])
            s->dev->be->free(s->dev, s->slab[role]);
    free(s);
}

uint64_t dnri_store_changes(const dnri_store *s)
{
    return s->changes;
}

dnri_params *dnri_store_params(const dnri_store *s)
{
    return s->params;
}

/* Address of parameter x in the slab of `role` itself; NULL where it is in none. */
static void *place_of(const dnri_store *s, dnri_role role, const dnri_param *x)
{
    bool buffer = x->kind == DNRI_RUNNING;
    bool of_buffers = role == DNRI_BUFFER || role == DNRI_EMA_BUFFER;
    if (!s->slab[role] || role >= DNRI_STATE || buffer != of_buffers)
        return NULL;
    return (char *)s->slab[role] + (size_t)x->offset * dnri_dtype_size(slab_type(&s->num, role));
}

/* Norms work in the master type, so their weights are the masters. */
static dnri_role resolve(dnri_role role, const dnri_param *x)
{
    bool norm = x->kind == DNRI_NORM_W || x->kind == DNRI_NORM_B;
    return role == DNRI_WEIGHT && norm ? DNRI_MASTER : role;
}

void *dnri_store_ptr(const dnri_store *s, dnri_role role, int param)
{
    if (param < 0)
        return s->slab[role];
    const dnri_param *x = dnri_params_at(s->params, param);
    return place_of(s, resolve(role, x), x);
}

/* Writes n of the parameter's values, from `at` on, into the slab; on return `host` holds them as rounded. */
static dnr_status put(dnri_store *s, dnri_role role, const dnri_param *x, int64_t at, int64_t n,
                      double *host, void *staging)
{
    dnr_dtype type = slab_type(&s->num, role);
    size_t size = dnri_dtype_size(type);
    dnri_from_double(type, host, staging, (size_t)n);
    dnri_to_double(type, staging, host, (size_t)n);
    return dnri_copy_now(s->dev, (char *)place_of(s, role, x) + (size_t)at * size, staging,
                         (size_t)n * size);
}

static dnr_status find(const dnri_store *s, dnri_role *role, int param, const dnri_param **x)
{
    if (param < 0 || param >= dnri_params_count(s->params))
        return DNR_FAIL(DNR_EUSAGE, "use an index of the parameter table",
                        "the model has no parameter %d", param);
    *x = dnri_params_at(s->params, param);
    *role = resolve(*role, *x);
    if (!place_of(s, *role, *x))
        return DNR_FAIL(DNR_EUSAGE, "ask for a slab that the store was made with",
                        "parameter '%s' has no place among the store's %s", (*x)->name,
                        role_names[*role]);
    return DNR_OK;
}

dnr_status dnri_store_read(dnri_store *s, dnri_role role, int param, double *host)
{
    const dnri_param *x = NULL;
    DNR_TRY(find(s, &role, param, &x));
    dnr_dtype type = slab_type(&s->num, role);
    size_t bytes = (size_t)x->count * dnri_dtype_size(type);
    void *staging = malloc(bytes);
    if (!staging)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_copy_now(s->dev, staging, place_of(s, role, x), bytes);
    if (st == DNR_OK)
        dnri_to_double(type, staging, host, (size_t)x->count);
    free(staging);
    return st;
}

enum { PIECE = 1 << 16 }; /* values at a time: a whole copy would add to the peak of host memory */

/* Room for a piece and its staging. */
static double *new_piece(void)
{
    return malloc(2 * PIECE * sizeof(double));
}

/* put, and into the low-precision weights, from the rounded master, as the optimizer does. */
static dnr_status put_piece(dnri_store *s, dnri_role role, const dnri_param *x, int64_t at,
                            int64_t n, double *piece)
{
    DNR_TRY(put(s, role, x, at, n, piece, piece + PIECE));
    return role == DNRI_MASTER && !aliased(&s->num)
               ? put(s, DNRI_WEIGHT, x, at, n, piece, piece + PIECE)
               : DNR_OK;
}

static int64_t piece_at(const dnri_param *x, int64_t at)
{
    return x->count - at < PIECE ? x->count - at : PIECE;
}

dnr_status dnri_store_write(dnri_store *s, dnri_role role, int param, const double *host)
{
    const dnri_param *x = NULL;
    DNR_TRY(find(s, &role, param, &x));
    dnr_status st = DNR_OK;
    s->changes++;
    double *piece = new_piece();
    if (!piece)
        return DNR_FAIL_NOMEM();
    for (int64_t at = 0; at < x->count; at += PIECE) {
        memcpy(piece, host + at, (size_t)piece_at(x, at) * sizeof *piece);
        DNR_GOTO(st, put_piece(s, role, x, at, piece_at(x, at), piece));
    }
out:
    free(piece);
    return st;
}

dnr_status dnri_store_read_state(dnri_store *s, dnri_state *out)
{
    return dnri_copy_now(s->dev, out, s->slab[DNRI_STATE], sizeof *out);
}

dnr_status dnri_store_write_state(dnri_store *s, const dnri_state *in)
{
    return dnri_copy_now(s->dev, s->slab[DNRI_STATE], in, sizeof *in);
}

/* Zeroes the slabs whole, padding too: a warm-up may have written to them. */
static dnr_status clear(dnri_store *s, size_t bytes, void *slab)
{
    enum { CHUNK = 1 << 20 };
    char *zeros = calloc(1, CHUNK);
    if (!zeros)
        return DNR_FAIL_NOMEM();
    dnr_status st = DNR_OK;
    for (size_t done = 0; done < bytes && st == DNR_OK; done += CHUNK)
        st = dnri_copy_now(s->dev, (char *)slab + done, zeros,
                           bytes - done < CHUNK ? bytes - done : CHUNK);
    free(zeros);
    return st;
}

/* The next n initial values of the parameter. */
static void initial(const dnri_param *x, dnri_rng *rng, int64_t n, double *v)
{
    const int64_t *d = x->dim;
    double std = sqrt(2.0 / (double)(d[0] * d[1] * d[2]));
    double bound = 1 / sqrt((double)(x->fan > 0 ? x->fan : d[1] * d[2] * d[3]));
    for (int64_t i = 0; i < n; i++)
        switch (x->init) {
        case DNRI_INIT_ZERO:
            v[i] = 0;
            break;
        case DNRI_INIT_ONE:
            v[i] = 1;
            break;
        case DNRI_INIT_FAN_OUT:
            v[i] = std * dnri_rng_normal(rng);
            break;
        case DNRI_INIT_LINEAR:
            v[i] = bound * (2 * dnri_rng_uniform(rng) - 1);
            break;
        }
}

dnr_status dnri_store_init(dnri_store *s, uint64_t seed)
{
    dnr_status st = DNR_OK;
    double *piece = new_piece();
    if (!piece)
        return DNR_FAIL_NOMEM();
    s->changes++;
    for (int role = 0; role < DNRI_STATE; role++)
        if (s->slab[role])
            DNR_GOTO(st, clear(s, slab_bytes(s->params, &s->num, s->holds, (dnri_role)role),
                               s->slab[role]));
    for (int i = 0; i < dnri_params_count(s->params); i++) {
        const dnri_param *x = dnri_params_at(s->params, i);
        const dnri_role role = x->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER;
        dnri_rng rng = DNRI_RNG(seed, dnri_rng_word(x->name));
        for (int64_t at = 0; at < x->count; at += PIECE) {
            initial(x, &rng, piece_at(x, at), piece);
            DNR_GOTO(st, put_piece(s, role, x, at, piece_at(x, at), piece));
        }
    }
    DNR_GOTO(st, dnri_store_start_ema(s));
    st =
        dnri_store_write_state(s, &(dnri_state){.loss_scale = s->num.scaled ? DNRI_SCALE_INIT : 1});
out:
    free(piece);
    return st;
}

/* ---- averages */

static const dnri_role AVERAGED[][2] = {{DNRI_MASTER, DNRI_EMA}, {DNRI_BUFFER, DNRI_EMA_BUFFER}};

dnr_status dnri_store_start_ema(dnri_store *s)
{
    for (int i = 0; i < 2 && s->slab[DNRI_EMA]; i++)
        DNR_TRY(dnri_copy_now(s->dev, s->slab[AVERAGED[i][1]], s->slab[AVERAGED[i][0]],
                              slab_bytes(s->params, &s->num, s->holds, AVERAGED[i][0])));
    return DNR_OK;
}

/* WEIGHT from MASTER, rounded as the optimizer rounds. */
static dnr_status renew_weights(dnri_store *s)
{
    for (int i = 0; i < dnri_params_count(s->params) && !aliased(&s->num); i++) {
        const dnri_param *x = dnri_params_at(s->params, i);
        if (!place_of(s, DNRI_WEIGHT, x))
            continue;
        double *v = malloc((size_t)x->count * 2 * sizeof *v);
        if (!v)
            return DNR_FAIL_NOMEM();
        dnr_status st = dnri_store_read(s, DNRI_MASTER, i, v);
        if (st == DNR_OK)
            st = put(s, DNRI_WEIGHT, x, 0, x->count, v, v + x->count);
        free(v);
        DNR_TRY(st);
    }
    return DNR_OK;
}

dnr_status dnri_store_swap_ema(dnri_store *s)
{
    if (!s->slab[DNRI_EMA] || !s->slab[DNRI_GRAD])
        return DNR_FAIL(DNR_EUSAGE, "set train.ema, for example 0.9999",
                        "this trainer keeps no averages of its weights");
    size_t room = slab_bytes(s->params, &s->num, s->holds, DNRI_GRAD);
    s->changes++;
    for (int i = 0; i < 2; i++) {
        char *a = s->slab[AVERAGED[i][0]], *b = s->slab[AVERAGED[i][1]],
             *aside = s->slab[DNRI_GRAD];
        size_t bytes = slab_bytes(s->params, &s->num, s->holds, AVERAGED[i][0]);
        for (size_t at = 0, n; at < bytes; at += n) {
            n = bytes - at < room ? bytes - at : room;
            DNR_TRY(dnri_copy_now(s->dev, aside, a + at, n));
            DNR_TRY(dnri_copy_now(s->dev, a + at, b + at, n));
            DNR_TRY(dnri_copy_now(s->dev, b + at, aside, n));
        }
    }
    return renew_weights(s);
}
