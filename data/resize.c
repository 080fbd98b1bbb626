/* resize.c: antialiased bilinear resizing, equal to Pillow's and so to torchvision's on PIL images.
 *
 * Output pixel i of a side that shrinks from `in` to `out` is a weighted mean of the input pixels
 * within scale = max(1, in / out) of its centre (i + ½) · in / out, by a triangle. Weights are
 * fixed-point; the horizontal pass is rounded to 8 bits before the vertical one. Only the window's
 * columns and the rows that it needs are computed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"

#define BITS 22 /* of a weight's fraction: 8 bits of pixel and 2 of headroom make 32 */

void dnri_scratch_free(dnri_scratch *s)
{
    free(s->weights.data);
    free(s->rows.data);
    free(s->sums.data);
    *s = (dnri_scratch){0};
}

/* Which input pixels make output pixels from … from + n − 1, and by which weights. */
typedef struct axis {
    int n, taps; /* taps: room for each output pixel */
    int *first, *count;
    int32_t *weight; /* [n][taps] */
} axis;

static int taps_for(int in, int64_t out)
{
    double scale = (double)in / (double)out;
    return (int)ceil(scale < 1 ? 1 : scale) * 2 + 1;
}

static size_t axis_bytes(int n, int taps)
{
    return (size_t)n * (2 + (size_t)taps) * sizeof(int32_t);
}

static axis axis_make(void *memory, int in, int64_t out, int64_t from, int n)
{
    axis a = {n, taps_for(in, out), memory, (int *)memory + n, (int32_t *)memory + 2 * n};
    double step = (double)in / (double)out, scale = step < 1 ? 1 : step, inverse = 1 / scale;
    for (int i = 0; i < n; i++) {
        double centre = ((double)(from + i) + 0.5) * step, sum = 0;
        int lo = (int)(centre - scale + 0.5), hi = (int)(centre + scale + 0.5);
        lo = lo < 0 ? 0 : lo;
        hi = hi > in ? in : hi;
        int32_t *w = a.weight + (size_t)i * (size_t)a.taps;
        for (int pass = 0; pass < 2; pass++) /* the sum, then the weights */
            for (int k = lo; k < hi; k++) {
                double t = 1 - fabs((k - centre + 0.5) * inverse);
                if (t < 0)
                    t = 0;
                if (pass)
                    w[k - lo] = (int32_t)(t / sum * (1 << BITS) + 0.5);
                else
                    sum += t;
            }
        a.first[i] = lo;
        a.count[i] = hi - lo;
    }
    return a;
}

static uint8_t round_off(int32_t sum)
{
    sum >>= BITS;
    return (uint8_t)(sum > 255 ? 255 : sum);
}

static void horizontal(const uint8_t *row, const axis *a, uint8_t *out)
{
    for (int i = 0; i < a->n; i++) {
        const int32_t *w = a->weight + (size_t)i * (size_t)a->taps;
        const uint8_t *p = row + (size_t)a->first[i] * 3;
        int32_t r = 1 << (BITS - 1), g = r, b = r;
        for (int k = 0; k < a->count[i]; k++, p += 3) {
            r += w[k] * p[0];
            g += w[k] * p[1];
            b += w[k] * p[2];
        }
        out[3 * i] = round_off(r);
        out[3 * i + 1] = round_off(g);
        out[3 * i + 2] = round_off(b);
    }
}

/* `rows`: the first row that pixel i needs; n values each. */
static void vertical(const uint8_t *rows, size_t stride, const axis *a, int i, int n, int32_t *sums,
                     uint8_t *out)
{
    const int32_t *w = a->weight + (size_t)i * (size_t)a->taps;
    for (int c = 0; c < n; c++)
        sums[c] = 1 << (BITS - 1);
    for (int k = 0; k < a->count[i]; k++, rows += stride)
        for (int c = 0; c < n; c++)
            sums[c] += w[k] * rows[c];
    for (int c = 0; c < n; c++)
        out[c] = round_off(sums[c]);
}

static void mirror(uint8_t *row, int n)
{
    for (int a = 0, b = n - 1; a < b; a++, b--)
        for (int c = 0; c < 3; c++) {
            uint8_t t = row[3 * a + c];
            row[3 * a + c] = row[3 * b + c];
            row[3 * b + c] = t;
        }
}

/* The part of the window, along one side, that the resized rectangle covers. */
static void covered(int64_t o, int64_t r, int side, int *lo, int *n)
{
    int64_t a = o < 0 ? -o : 0, b = r - o < side ? r - o : side;
    *lo = (int)(a < side ? a : side);
    *n = (int)(b > *lo ? b - *lo : 0);
}

dnr_status dnri_resize(const dnri_picture *p, const dnri_view *v, int side, dnri_scratch *s,
                       uint8_t *out)
{
    size_t pitch = (size_t)p->w * 3, line = (size_t)side * 3;
    const uint8_t *src = p->rgb + (size_t)v->y * pitch + (size_t)v->x * 3;
    int x0, y0, nx, ny;
    covered(v->ox, v->rw, side, &x0, &nx);
    covered(v->oy, v->rh, side, &y0, &ny);
    if (nx < side || ny < side)
        memset(out, 0, line * (size_t)side);
    if (!nx || !ny)
        return DNR_OK;
    uint8_t *to = out + (size_t)y0 * line + (size_t)x0 * 3;
    int64_t fx = v->ox + x0, fy = v->oy + y0; /* first column and row in the resized rectangle */
    bool across = v->rw != v->w, down = v->rh != v->h;
    int n = nx * 3;
    size_t ax = across ? axis_bytes(nx, taps_for(v->w, v->rw)) : 0;
    size_t ay = down ? axis_bytes(ny, taps_for(v->h, v->rh)) : 0;
    axis h = {0}, d = {0};
    int first = (int)fy, rows = ny; /* input rows in use */
    if (across || down) {
        DNR_TRY(dnri_buffer_fit(&s->weights, ax + ay));
        if (across)
            h = axis_make(s->weights.data, v->w, v->rw, fx, nx);
        if (down) {
            d = axis_make(s->weights.data + ax, v->h, v->rh, fy, ny);
            first = d.first[0];
            rows = d.first[ny - 1] + d.count[ny - 1] - first;
        }
    }
    src += (size_t)first * pitch;
    size_t stride = pitch;
    if (!across)
        src += (size_t)fx * 3;
    else if (down) {
        stride = (size_t)n;
        DNR_TRY(dnri_buffer_fit(&s->rows, stride * (size_t)rows));
        for (int y = 0; y < rows; y++)
            horizontal(src + (size_t)y * pitch, &h, s->rows.data + (size_t)y * stride);
        src = s->rows.data;
    }
    if (down)
        DNR_TRY(dnri_buffer_fit(&s->sums, (size_t)n * sizeof(int32_t)));
    for (int y = 0; y < ny; y++) {
        uint8_t *row = to + (size_t)y * line;
        if (down)
            vertical(src + (size_t)(d.first[y] - first) * stride, stride, &d, y, n,
                     (int32_t *)s->sums.data, row);
        else if (across)
            horizontal(src + (size_t)y * pitch, &h, row);
        else
            memcpy(row, src + (size_t)y * pitch, (size_t)n);
    }
    if (v->flip)
        for (int y = 0; y < ny; y++)
            mirror(out + (size_t)(y0 + y) * line, side);
    return DNR_OK;
}
