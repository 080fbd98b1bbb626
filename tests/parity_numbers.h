/* parity_numbers.h: the inputs of the parity cases, bit for bit as golden/common.py makes them; its head
 * states the formulas. */
#ifndef DNR_PARITY_NUMBERS_H
#define DNR_PARITY_NUMBERS_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../runtime/slot.h"
#include "../runtime/store.h"

static inline uint64_t parity_stream(int draw, const char *name)
{
    char text[DNRI_NAME + 16];
    uint64_t h = 0xCBF29CE484222325u;
    snprintf(text, sizeof text, "%d/%s", draw, name);
    for (const char *c = text; *c; c++)
        h = (h ^ (unsigned char)*c) * 0x100000001B3u;
    return h;
}

static inline uint64_t parity_hash(uint64_t stream, int64_t i)
{
    uint64_t z = stream + ((uint64_t)i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline double parity_uniform(uint64_t stream, int64_t i)
{
    return (double)(parity_hash(stream, i) >> 40) / 0x1p24;
}

/* Reorders between the store's [K,R,S,C] and the files' [K,C,R,S]. */
static inline void parity_to_file(const dnri_param *p, const double *krsc, double *kcrs)
{
    int64_t rs = p->dim[1] * p->dim[2], c = p->dim[3];
    for (int64_t i = 0; i < p->count; i++) {
        int64_t k = i / (rs * c), at = i / c % rs;
        kcrs[(k * c + i % c) * rs + at] = krsc[i];
    }
}

/* Initial values of a parameter or buffer, in the store's order. `last`: it is the last norm of a residual
 * branch. */
static inline void parity_weights(const dnri_param *p, int draw, bool last, double *krsc)
{
    uint64_t stream = parity_stream(draw, p->name);
    int64_t k = p->dim[0], rs = p->dim[1] * p->dim[2], c = p->dim[3];
    double bound = p->kind == DNRI_CONV_W    ? sqrt(6 / (double)(k * rs))
                   : p->kind == DNRI_DENSE_W ? 1 / sqrt((double)c)
                   : p->kind == DNRI_BIAS    ? 1 / sqrt((double)p->fan)
                                             : 0.1;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t file = (i / (rs * c) * c + i % c) * rs + i / c % rs;
        double u = parity_uniform(stream, file);
        double v = p->kind == DNRI_NORM_W ? (0.5 + u) * (last ? 0.25 : 1) : (2 * u - 1) * bound;
        krsc[i] = p->kind == DNRI_RUNNING ? (strstr(p->name, "running_var") ? 1 : 0) : (float)v;
    }
}

/* Fills a slot with positions start … start + n - 1 of the stream. */
static inline void parity_batch(void *slot, int draw, int64_t start, int64_t n, int64_t image,
                                int classes)
{
    uint64_t noise = parity_stream(draw, "noise"), tiles = parity_stream(draw, "tiles");
    uint64_t labels = parity_stream(draw, "labels");
    int32_t *y = (int32_t *)((char *)slot + dnri_slot_labels());
    uint8_t *x = (uint8_t *)slot + dnri_slot_pixels(n);
    int64_t side = image / 8;
    for (int64_t i = 0; i < n; i++)
        y[i] = (int32_t)((parity_hash(labels, start + i) >> 33) % (uint64_t)classes);
    for (int64_t i = 0; i < n * image * image * 3; i++) {
        int64_t c = i % 3, col = i / 3 % image, row = i / 3 / image % image;
        int64_t position = start + i / 3 / image / image;
        uint64_t tile =
            parity_hash(tiles, ((position * side + row / 8) * side + col / 8) * 3 + c) >> 56;
        x[i] =
            (uint8_t)((3 * tile + (parity_hash(noise, start * image * image * 3 + i) >> 56)) >> 2);
    }
}

/* The first n projections of an array in the files' order. */
static inline void parity_project(const double *a, int64_t count, int n, double *out)
{
    uint64_t stream = parity_stream(0, "sign");
    memset(out, 0, (size_t)n * sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        uint64_t h = parity_hash(stream, i);
        for (int k = 0; k < n; k++)
            out[k] += h >> k & 1 ? -a[i] : a[i];
    }
}

#endif
