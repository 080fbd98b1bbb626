/* ref_packed.c: pictures in packed form, and the first convolution over them. */
#include "ref.h"
#include "../../runtime/slot.h"

#include <string.h>

/* Offset of channel c of pixel (h, w) of picture n, in pictures of H x W. */
static int64_t packed_at(int64_t packing, int64_t H, int64_t W, int64_t n, int64_t h, int64_t w,
                         int64_t c)
{
    if (packing == DNRI_QUADS)
        return ((n * H + h) * W + w) * 4 + c;
    return ((n * (H / 2) + h / 2) * (W / 2) + w / 2) * 16 + (h % 2 * 2 + w % 2) * 4 + c;
}

static void ingest(const ref_step *s)
{
    const dnri_ingest_attr *a = &((const dnri_packed_ingest_attr *)s->op.attr)->in;
    const char *slot = *(char *const *)s->at.in[0];
    const uint8_t *pixels = (const uint8_t *)slot + dnri_slot_pixels(a->n);
    double *quads = s->at.out[DNRI_QUADS_OUT], *blocks = s->at.out[DNRI_BLOCKS_OUT];
    if (quads)
        memset(quads, 0, dnri_bytes(&s->out[DNRI_QUADS_OUT]));
    if (blocks)
        memset(blocks, 0, dnri_bytes(&s->out[DNRI_BLOCKS_OUT]));
    for (int64_t i = 0; i < a->n * a->h * a->w * 3; i++) {
        const int64_t c = i % 3, w = i / 3 % a->w, h = i / 3 / a->w % a->h, n = i / 3 / a->w / a->h;
        const double v = pixels[i] * a->scale[c] + a->shift[c];
        if (quads)
            quads[packed_at(DNRI_QUADS, a->h, a->w, n, h, w, c)] = v;
        if (blocks)
            blocks[packed_at(DNRI_BLOCKS, a->h, a->w, n, h, w, c)] = v;
    }
    if (!s->at.out[1]) /* a clone */
        return;
    memcpy(s->at.out[1], slot + dnri_slot_labels(), (size_t)a->n * sizeof(int32_t));
    memcpy(s->at.out[2], slot, sizeof(dnri_header));
}

/* The three channels of x at kernel position j = (r, s) of output i = (n, p, q); NULL in the padding. */
static const double *pixel(const dnri_packed_conv_attr *a, const dnr_desc *y, const double *x,
                           int64_t i, int64_t j)
{
    const int64_t q = i % y->dim[2], p = i / y->dim[2] % y->dim[1], n = i / y->dim[2] / y->dim[1];
    const int64_t h = p * a->conv.stride - a->conv.pad + j / a->conv.kernel;
    const int64_t w = q * a->conv.stride - a->conv.pad + j % a->conv.kernel;
    if (h < 0 || h >= a->conv.h || w < 0 || w >= a->conv.w)
        return NULL;
    return x + packed_at(a->packing, a->conv.h, a->conv.w, n, h, w, 0);
}

/* Offset of w's three values at kernel position j of output channel k; packed weights lie as a picture does. */
static int64_t weight_at(const dnri_packed_conv_attr *a, const dnr_desc *w, int64_t k, int64_t j)
{
    const int64_t R = a->conv.kernel, r = j / R, s = j % R, lead = a->conv.pad % 2;
    if (w->dim[3] == 3)
        return (k * R * R + j) * 3;
    if (a->packing == DNRI_QUADS)
        return packed_at(DNRI_QUADS, R, R, k, r, s, 0);
    return packed_at(DNRI_BLOCKS, 2 * w->dim[1], 2 * w->dim[2], k, r + lead, s + lead, 0);
}

static void fprop(const ref_step *s)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)s->op.attr;
    const dnr_desc *d = &s->out[0];
    const int64_t K = d->dim[3], taps = a->conv.kernel * a->conv.kernel;
    const double *w = s->at.in[1];
    double *y = s->at.out[0];
    memset(y, 0, dnri_bytes(d));
    REF_PARALLEL
    for (int64_t i = 0; i < dnri_count(d) / K; i++)
        for (int64_t j = 0; j < taps; j++) {
            const double *x = pixel(a, d, s->at.in[0], i, j);
            for (int64_t k = 0; x && k < K; k++)
                y[i * K + k] += ref_dot(w + weight_at(a, &s->in[1], k, j), x, 3);
        }
    for (int which = 1; which < s->op.n_out; which++) {
        double *sum = s->at.out[which];
        for (int64_t k = 0; k < K; k++) {
            sum[k] = 0;
            for (int64_t i = k; i < dnri_count(d); i += K)
                sum[k] += which == 1 ? y[i] : y[i] * y[i];
        }
    }
}

static void wgrad(const ref_step *s)
{
    const dnri_packed_conv_attr *a = (const dnri_packed_conv_attr *)s->op.attr;
    const dnr_desc *d = &s->in[1];
    const int64_t K = d->dim[3], taps = a->conv.kernel * a->conv.kernel;
    const double *dy = s->at.in[1];
    double *dw = s->at.out[0];
    memset(dw, 0, dnri_bytes(&s->out[0]));
    REF_PARALLEL
    for (int64_t j = 0; j < taps; j++)
        for (int64_t i = 0; i < dnri_count(d) / K; i++) {
            const double *x = pixel(a, d, s->at.in[0], i, j);
            for (int64_t k = 0; x && k < K; k++)
                ref_axpy(dw + (k * taps + j) * 3, dy[i * K + k], x, 3);
        }
}

const ref_row ref_packed_rows[] = {
    {&dnri_def_packed_ingest, ingest},
    {&dnri_def_packed_conv, fprop},
    {&dnri_def_packed_conv_wgrad, wgrad},
    {NULL, NULL},
};
