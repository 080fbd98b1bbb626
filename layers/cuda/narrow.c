/* narrow.c: times our own product against another way, once for each shape. */
#include "narrow.h"
#include "wide.h"

#include "../../runtime/choices.h"
#include "../../runtime/cuda/convplan.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

/* Operands lie in the tuner's memory one after the other, a0 first. */
enum { A1, B0, B1, CONSTANTS, D, MASK, WORKSPACE, PLACES };

typedef struct timing {
    dnri_cuda *d;
    const dnri_narrow_contest *c;
    size_t at[PLACES];
    bool rival, failed[2]; /* our own, the rival */
} timing;

static void layout(timing *t)
{
    const k_narrow_args *a = &t->c->a;
    const int64_t size = (int64_t)dnri_dtype_size((dnr_dtype)a->type);
    const int64_t bytes[] = {
        a->rows * a->depth[0] * size,
        a->rows * a->depth[1] * size,
        (int64_t)a->n * a->depth[0] * size,
        (int64_t)a->n * a->depth[1] * size,
        a->n * (int64_t)sizeof(float), /* a shift, or two halves */
        a->rows * a->n * size,
        t->c->mask ? a->rows * a->n / 8 : 0,
    };
    size_t at = 0;
    for (int i = 0; i < PLACES; i++) {
        at += ((size_t)bytes[i] + 255) & ~(size_t)255;
        t->at[i] = at;
    }
}

static void run(void *ctx, cudaStream_t s, void *memory)
{
    timing *t = ctx;
    char *at = memory;
    k_narrow_args a = t->c->a;
    a.a[0] = at;
    a.a[1] = at + t->at[A1];
    a.b[0] = at + t->at[B0];
    a.b[1] = at + t->at[B1];
    a.shift = (const float *)(at + t->at[CONSTANTS]);
    a.halves = a.shift;
    a.d = at + t->at[D];
    a.residual = t->c->residual ? a.d : NULL;
    a.mask = t->c->mask ? (uint8_t *)(at + t->at[MASK]) : NULL;
    if (t->failed[t->rival])
        return;
    t->failed[t->rival] = t->rival
                              ? t->c->rival(t->d, t->c->own, s, &a, at + t->at[WORKSPACE]) != DNR_OK
                              : k_narrow(s, &a) != cudaSuccess;
}

dnr_status dnri_narrow_wins(dnri_cuda *d, const dnri_narrow_contest *c, bool *wins)
{
    const k_narrow_args *a = &c->a;
    timing t = {.d = d, .c = c};
    char key[192], text[64];
    float us[2];
    snprintf(key, sizeof key, "%s%s %s rows%lld n%d depth%d+%d%s%s%s workspace%zu", c->name,
             k_wide_takes(a) ? " wide" : "", dnri_dtype_name((dnr_dtype)a->type),
             (long long)a->rows, a->n, a->depth[0], a->depth[1], c->residual ? " residual" : "",
             a->relu ? " relu" : "", c->mask ? " mask" : "", c->workspace);
    const char *known = d->choices ? dnri_choices_get(d->choices, key) : NULL;
    if (known) {
        *wins = strncmp(known, "own", 3) == 0;
        return DNR_OK;
    }
    layout(&t);
    for (int i = 0; i < 2; i++) {
        t.rival = i == 1;
        DNR_TRY(dnri_cuda_time(d, a->type, t.at[WORKSPACE] + c->workspace, run, &t, &us[i]));
    }
    *wins = !t.failed[0] && (t.failed[1] || us[0] < us[1]);
    snprintf(text, sizeof text, "%s us %.3f, not %.3f", *wins ? "own" : "other",
             (double)us[*wins ? 0 : 1], (double)us[*wins ? 1 : 0]);
    return d->choices && us[0] < FLT_MAX ? dnri_choices_set(d->choices, key, text) : DNR_OK;
}
