/* synthetic.c: pictures made up from their index, for trying and timing a run without data. Each class has
 * a pattern of coloured cells under the noise, so that there is something to learn. */
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"

#define CELLS 4 /* of the pattern, in each direction */

typedef struct synthetic {
    dnr_source base;
    int side;
} synthetic;

static const char *name(const dnr_source *s, int64_t i)
{
    return "synthetic";
}

static int label(const dnr_source *s, int64_t i)
{
    dnri_rng r = DNRI_RNG(DNRI_DRAW_SYNTHETIC, 0, (uint64_t)i);
    return (int)dnri_rng_below(&r, (uint64_t)s->classes);
}

static dnr_status render(const dnr_source *s, int64_t i, dnri_picture *out)
{
    int side = ((const synthetic *)s)->side;
    DNR_TRY(dnri_picture_fit(out, side, side));
    dnri_rng noise = DNRI_RNG(DNRI_DRAW_SYNTHETIC, 1, (uint64_t)i);
    dnri_rng pattern = DNRI_RNG(DNRI_DRAW_SYNTHETIC, 2, (uint64_t)label(s, i));
    uint8_t cell[CELLS * CELLS * 3];
    for (int c = 0; c < CELLS * CELLS * 3; c++)
        cell[c] = (uint8_t)(dnri_rng_next(&pattern) >> 57); /* 0 … 127 */
    const size_t width = (size_t)side * 3, size = width * (size_t)side;
    for (size_t k = 0; k < size; k += 8) { /* the same bytes on any machine */
        const uint64_t word = htole64(dnri_rng_next(&noise) & 0x7f7f7f7f7f7f7f7f);
        memcpy(out->rgb + k, &word, size - k < 8 ? size - k : 8);
    }
    uint8_t *rows = malloc(CELLS * width); /* the pattern's, a row of cells each */
    if (!rows)
        return DNR_FAIL_NOMEM();
    for (int e = 0; e < CELLS; e++)
        for (int x = 0; x < side; x++)
            memcpy(rows + (size_t)e * width + (size_t)x * 3,
                   cell + (e * CELLS + x * CELLS / side) * 3, 3);
    for (int y = 0; y < side; y++) {
        const uint8_t *add = rows + (size_t)(y * CELLS / side) * width;
        uint8_t *row = out->rgb + (size_t)y * width;
        for (size_t k = 0; k < width; k++)
            row[k] = (uint8_t)(row[k] + add[k]);
    }
    free(rows);
    return DNR_OK;
}

static void release(dnr_source *s)
{
    free(s->root);
    free(s);
}

dnr_status dnri_synthetic_open(const dnr_source_opts *o, dnr_source **out)
{
    static const dnri_source_ops ops = {NULL, render, name, label, release};
    synthetic *s = calloc(1, sizeof *s);
    if (!s || !(s->base.root = strdup(""))) {
        free(s);
        return DNR_FAIL_NOMEM();
    }
    s->base.ops = &ops;
    s->base.count = o->synthetic_n ? o->synthetic_n : 1281167;
    s->base.classes = o->classes ? o->classes : 1000;
    s->side = o->synthetic_image ? o->synthetic_image : 224;
    if (s->side > 8192) {
        int side = s->side;
        release(&s->base);
        return DNR_FAIL(DNR_EUSAGE, "use at most 8192", "synthetic pictures of %d pixels a side",
                        side);
    }
    dnri_rng h = DNRI_RNG(DNRI_DRAW_SYNTHETIC, (uint64_t)s->base.count, (uint64_t)s->base.classes,
                          (uint64_t)s->side);
    s->base.hash = dnri_rng_next(&h);
    *out = &s->base;
    return DNR_OK;
}
