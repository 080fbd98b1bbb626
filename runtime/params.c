/* params.c: the table of what a model owns, and its layout in the slabs. */
#include "store.h"

#include <stdlib.h>
#include <string.h>

struct dnri_params {
    dnri_param *at;
    int n, room;
    bool sealed;
    int64_t flat, buffers; /* elements */
};

dnri_params *dnri_params_new(void)
{
    return calloc(1, sizeof(dnri_params));
}

void dnri_params_free(dnri_params *p)
{
    if (p)
        free(p->at);
    free(p);
}

int dnri_params_count(const dnri_params *p)
{
    return p->n;
}

const dnri_param *dnri_params_at(const dnri_params *p, int index)
{
    return &p->at[index];
}

int dnri_params_find(const dnri_params *p, const char *name)
{
    for (int i = 0; i < p->n; i++)
        if (strcmp(p->at[i].name, name) == 0)
            return i;
    return -1;
}

/* Elements, or 0 where a dimension is not positive or the product exceeds what an offset can hold.
 */
static int64_t count_of(const int64_t dim[4])
{
    int64_t count = 1;
    for (int i = 0; i < 4; i++) {
        if (dim[i] < 1 || count > (INT64_C(1) << 48) / dim[i])
            return 0;
        count *= dim[i];
    }
    return count;
}

static dnr_status check_same(const dnri_param *a, const dnri_param *b)
{
    if (a->kind == b->kind && memcmp(a->dim, b->dim, sizeof a->dim) == 0)
        return DNR_OK;
    char have[64], want[64];
    return DNR_FAIL(
        DNR_EUSAGE, "give each layer a name of its own",
        "parameter '%s' is %s already and cannot be %s too", a->name,
        dnri_desc_text(&(dnr_desc){DNR_F32, {a->dim[0], a->dim[1], a->dim[2], a->dim[3]}}, have),
        dnri_desc_text(&(dnr_desc){DNR_F32, {b->dim[0], b->dim[1], b->dim[2], b->dim[3]}}, want));
}

dnr_status dnri_params_add(dnri_params *p, const dnri_param *proto, int *index)
{
    *index = dnri_params_find(p, proto->name);
    if (*index >= 0)
        return check_same(&p->at[*index], proto);
    int64_t count = count_of(proto->dim);
    if (count == 0)
        return DNR_FAIL(DNR_EUSAGE, "use positive sizes of a sane magnitude",
                        "parameter '%s' is %lld x %lld x %lld x %lld", proto->name,
                        (long long)proto->dim[0], (long long)proto->dim[1],
                        (long long)proto->dim[2], (long long)proto->dim[3]);
    if (p->sealed)
        return DNR_FAIL(DNR_EUSAGE, "build all programs of a run from the same model options",
                        "parameter '%s' appears after the parameters were laid out", proto->name);
    if (p->n == p->room) {
        int room = p->room ? 2 * p->room : 64;
        dnri_param *at = realloc(p->at, (size_t)room * sizeof *at);
        if (!at)
            return DNR_FAIL_NOMEM();
        p->at = at;
        p->room = room;
    }
    p->at[p->n] = *proto;
    p->at[p->n].count = count;
    p->at[p->n].offset = -1;
    *index = p->n++;
    return DNR_OK;
}

static void place(dnri_param *p, int64_t *end)
{
    p->offset = *end;
    *end += (p->count + DNRI_PARAM_ALIGN - 1) / DNRI_PARAM_ALIGN * DNRI_PARAM_ALIGN;
}

void dnri_params_seal(dnri_params *p)
{
    if (p->sealed)
        return;
    p->sealed = true;
    for (int i = p->n - 1; i >= 0; i--) /* backward completes the last layer's gradient first */
        if (p->at[i].kind != DNRI_RUNNING)
            place(&p->at[i], &p->flat);
    for (int i = 0; i < p->n; i++)
        if (p->at[i].kind == DNRI_RUNNING)
            place(&p->at[i], &p->buffers);
}

int64_t dnri_params_flat(const dnri_params *p)
{
    return p->flat;
}

int64_t dnri_params_buffers(const dnri_params *p)
{
    return p->buffers;
}

bool dnri_param_decays(const dnri_param *p, bool decay_norm_bias)
{
    switch (p->kind) {
    case DNRI_CONV_W:
    case DNRI_DENSE_W:
        return true;
    case DNRI_BIAS:
    case DNRI_NORM_W:
    case DNRI_NORM_B:
        return decay_norm_bias;
    case DNRI_RUNNING:
        break;
    }
    return false;
}
