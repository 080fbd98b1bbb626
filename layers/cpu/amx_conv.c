/* amx_conv.c: convolutions and their input gradients by AMX, in bf16 and NHWC, summed in fp32.
 *
 * Both are sums over places of the kernel of a product out[pixel][·] += in[pixel moved][·] · w[place]: 16 pixels side by side
 * are a tile as they lie, so nothing is unfolded. So that a move is the same number of pixels for all of them, pictures are
 * copied with zeros between their rows, as many as a move may leave a row by, a few pictures at a time; 1 × 1 kernels read the
 * tensor where it is. With a stride, the outputs of a gradient fall into parts by h mod stride, w mod stride, each with places of
 * its own (a convolution of stride 1 with a part of the kernel); forward, the inputs do, each part copied to a plane of its own. */
#include "amx.h"
#include "amx_tiles.h"

#include "../layers.h"

#include <string.h>

#ifdef HAVE_AMX

enum {
    MOST_KERNEL = 5,
    MOST_STRIDE = 2,
    MOST_PARTS = MOST_STRIDE * MOST_STRIDE,
    ROWS = 32,       /* pixels of two tiles, one above the other */
    AHEAD = 1 << 18, /* bytes of pixels handled together, */
    CHUNK = 1 << 19, /* and of packed weights, that a core's cache holds */
};

/* Outputs (stride · a + i, stride · b + j), or all of them. */
typedef struct part {
    int64_t i, j, rows, cols;
    int places;
    int64_t move[MOST_KERNEL * MOST_KERNEL]; /* from a grid's pixel to what it reads, in pixels */
    int place[MOST_KERNEL * MOST_KERNEL];    /* in the kernel */
} part;

typedef struct amx_conv {
    dnri_binding b;
    int slot[4];
    bool dgrad;
    int64_t n, h, w, c; /* of what is read (x, or dy), */
    int64_t k;          /* and the channels of what is written */
    int64_t out_h, out_w;
    int64_t kernel, in_stride, out_stride; /* one of the strides is 1 */
    /* the grid on which pictures lie: `lines` of `pitch` pixels, of which rows × cols are theirs, the rest zeros */
    int64_t rows, cols, top, left, lines, pitch;
    int parts, planes;
    bool used[MOST_PARTS]; /* planes */
    part part[MOST_PARTS];
    bool direct;           /* the grid is the tensor itself */
    int64_t plane;         /* pixels of a copied plane */
    int64_t each, units;   /* pictures, or ROWS pixels where direct, handled together; how often */
    int64_t panels, chunk; /* 32 written channels each; how many at a time */
    int64_t room;          /* elements of a slice's copy */
    int slices;
    const bf16 *in, *weights;
    bf16 *out, *packed, *copies;
} amx_conv;

/* ---- weights: [panel][place][step][2] tiles */

static int64_t places(const amx_conv *s)
{
    return s->kernel * s->kernel;
}

static int64_t panel_elements(const amx_conv *s)
{
    return places(s) * s->c * PANEL;
}

/* units: panels and places. weights are [k][place][c] of the convolution, whichever is read. */
AMX static void pack_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const amx_conv *s = ctx;
    __m512i lo[16], hi[16], turned[16];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t panel = unit / places(s), place = unit % places(s);
        bf16 *tile = s->packed + unit * s->c * PANEL;
        for (int64_t at = 0; at < s->c; at += STEP, tile += 2 * TILE) {
            if (s->dgrad) {
                const bf16 *row[STEP];
                for (int64_t i = 0; i < STEP; i++)
                    row[i] = s->weights + ((at + i) * places(s) + place) * s->k;
                pair_up(row, panel * PANEL, lo, hi);
                put(tile, lo);
                put(tile + TILE, hi);
                continue;
            }
            for (int half = 0; half < 2; half++) {
                const bf16 *w =
                    s->weights + ((panel * PANEL + 16 * half) * places(s) + place) * s->c + at;
                for (int64_t i = 0; i < 16; i++)
                    lo[i] = _mm512_loadu_si512(w + i * places(s) * s->c);
                turn(lo, turned);
                put(tile + half * TILE, turned);
            }
        }
    }
}

/* ---- pictures */

/* Copies `pictures` from `first` on into the slice's planes, whose other pixels are 0. */
static void copy_pictures(const amx_conv *s, bf16 *to, int64_t first, int64_t pictures)
{
    const int64_t step = s->in_stride;
    for (int plane = 0; plane < s->planes; plane++) {
        if (!s->used[plane])
            continue;
        for (int64_t g = 0; g < pictures; g++)
            for (int64_t a = 0, h = plane / step; h < s->h; a++, h += step) {
                const bf16 *from = s->in + ((first + g) * s->h + h) * s->w * s->c;
                bf16 *row =
                    to +
                    (plane * s->plane + (g * s->lines + s->top + a) * s->pitch + s->left) * s->c;
                if (step == 1)
                    memcpy(row, from, (size_t)(s->w * s->c) * sizeof *row);
                else
                    for (int64_t b = 0, w = plane % step; w < s->w; b++, w += step)
                        memcpy(row + b * s->c, from + w * s->c, (size_t)s->c * sizeof *row);
            }
    }
}

/* Where the part's outputs of ROWS of the grid's pixels lie; NULL for pixels that are no output. */
static void find_outputs(const amx_conv *s, const part *p, int64_t pixel, int64_t end, bf16 **out)
{
    int64_t b = pixel % s->pitch, a = pixel / s->pitch % s->lines, n = pixel / s->pitch / s->lines;
    for (int i = 0; i < ROWS; i++, pixel++) {
        const bool inside = pixel < end && n < s->n && a < p->rows && b < p->cols;
        const int64_t h = a * s->out_stride + p->i, w = b * s->out_stride + p->j;
        out[i] = inside ? s->out + ((n * s->out_h + h) * s->out_w + w) * s->k : NULL;
        if (++b == s->pitch) {
            b = 0;
            if (++a == s->lines) {
                a = 0;
                n++;
            }
        }
    }
}

/* ---- the product */

/* 32 channels, from `panel` on, of 32 pixels. */
AMX static inline void block(const amx_conv *s, const part *p, const bf16 *in, int64_t panel,
                             bf16 *const out[ROWS])
{
    float sum[ROWS][PANEL] __attribute__((aligned(64)));
    const int64_t pitch = s->c * (int64_t)sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < p->places; t++) {
        const bf16 *a = in + p->move[t] * s->c;
        const bf16 *w = s->packed + panel * panel_elements(s) + p->place[t] * s->c * PANEL;
        for (int64_t i = 0; i < s->c; i += STEP, a += STEP, w += 2 * TILE) {
            _tile_loadd(4, a, pitch);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + TILE, 64);
            _tile_loadd(5, a + 16 * s->c, pitch);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, &sum[0][0], sizeof sum[0]);
    _tile_stored(1, &sum[0][16], sizeof sum[0]);
    _tile_stored(2, &sum[16][0], sizeof sum[0]);
    _tile_stored(3, &sum[16][16], sizeof sum[0]);
    __asm__ volatile("" ::: "memory"); /* the tiles' stores are told to no compiler */
    for (int i = 0; i < ROWS; i++)
        if (out[i])
            _mm512_storeu_si512(out[i] + panel * PANEL,
                                (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(&sum[i][16]),
                                                             _mm512_load_ps(&sum[i][0])));
}

/* What no place of the kernel reaches. */
static void clear(const amx_conv *s, bf16 *const out[ROWS])
{
    for (int i = 0; i < ROWS; i++)
        if (out[i])
            memset(out[i], 0, (size_t)s->k * sizeof(bf16));
}

/* A part of pixels begin … end − 1 of the grid, of which `in` is the first. */
AMX static void multiply(const amx_conv *s, const part *p, const bf16 *in, int64_t begin,
                         int64_t end, bf16 *last)
{
    bf16 *out[ROWS];
    for (int64_t from = 0; from < s->panels; from += s->chunk) {
        const int64_t to = from + s->chunk < s->panels ? from + s->chunk : s->panels;
        for (int64_t pixel = begin; pixel < end; pixel += ROWS) {
            const bf16 *a = in + (pixel - begin) * s->c;
            find_outputs(s, p, pixel, end, out);
            if (!p->places) {
                clear(s, out);
                continue;
            }
            if (s->direct && end - pixel < ROWS) /* a tile would reach beyond the tensor */
                a = memcpy(last, a, (size_t)((end - pixel) * s->c) * sizeof *a);
            for (int64_t panel = from; panel < to; panel++)
                block(s, p, a, panel, out);
        }
        if (!p->places)
            return;
    }
}

AMX static void product_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const amx_conv *s = ctx;
    bf16 *copy = s->copies + slice * s->room;
    memset(copy, 0, (size_t)s->room * sizeof *copy);
    _tile_loadconfig(&all_full);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit * s->each, most = s->direct ? s->n * s->h * s->w : s->n;
        const int64_t all = s->direct ? s->each * ROWS : s->each;
        const int64_t from = s->direct ? first * ROWS : first;
        const int64_t count = most - from < all ? most - from : all;
        const int64_t area = s->direct ? 1 : s->lines * s->pitch;
        if (!s->direct)
            copy_pictures(s, copy, from, count);
        for (int i = 0; i < s->parts; i++)
            multiply(s, &s->part[i], s->direct ? s->in + from * s->c : copy, from * area,
                     (from + count) * area, copy);
    }
    _tile_release();
}

static dnr_status run(void *ctx)
{
    amx_conv *s = ctx;
    dnri_slices(s->slices, s->panels * places(s), pack_slice, s);
    dnri_slices(s->slices, s->units, product_slice, s);
    return DNR_OK;
}

/* ---- the step */

bool dnri_amx_conv_fits(const dnri_dnn_desc *d)
{
    const dnr_desc *w = &d->shape[DNRI_DNN_WEIGHTS];
    if (d->pass == DNRI_DNN_WGRAD || d->dense || d->biased || d->relu || d->added)
        return false;
    for (int i = 0; i < 4; i++)
        if (i != DNRI_DNN_BIAS && d->shape[i].dtype != DNR_BF16)
            return false;
    return w->dim[0] % PANEL == 0 && w->dim[3] % PANEL == 0 && w->dim[1] <= MOST_KERNEL &&
           d->stride <= MOST_STRIDE && dnri_amx_ready();
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Place r of the kernel, along one axis, for a part's outputs with index i: what output a reads is in + *move of plane
 * *plane. False: nothing. */
static bool find_move(const amx_conv *s, int64_t i, int64_t r, int64_t pad, int64_t *move,
                      int64_t *plane)
{
    const int64_t stride = s->dgrad ? s->out_stride : s->in_stride;
    const int64_t e = s->dgrad ? i + pad - r : r - pad, rest = (e % stride + stride) % stride;
    *move = (e - rest) / stride;
    *plane = s->dgrad ? 0 : rest;
    return !s->dgrad || rest == 0;
}

/* The parts, and the zeros that their moves want around the pictures. */
static void find_parts(amx_conv *s, int64_t pad)
{
    int64_t move[2], plane[2], down = 0, right = 0;
    for (int round = 0; round < 2; round++) { /* the pitch, then the moves */
        for (int k = 0; k < s->parts; k++) {
            part *p = &s->part[k];
            p->i = k / s->out_stride;
            p->j = k % s->out_stride;
            p->rows = (s->out_h - p->i + s->out_stride - 1) / s->out_stride;
            p->cols = (s->out_w - p->j + s->out_stride - 1) / s->out_stride;
            p->places = 0;
            down = larger(down, p->rows - s->rows);
            right = larger(right, p->cols - s->cols);
            for (int64_t r = 0; r < s->kernel; r++)
                for (int64_t c = 0; c < s->kernel; c++) {
                    if (!find_move(s, p->i, r, pad, &move[0], &plane[0]) ||
                        !find_move(s, p->j, c, pad, &move[1], &plane[1]))
                        continue;
                    s->top = larger(s->top, -move[0]);
                    s->left = larger(s->left, -move[1]);
                    down = larger(down, p->rows + move[0] - s->rows);
                    right = larger(right, p->cols + move[1] - s->cols);
                    const int64_t which = plane[0] * s->in_stride + plane[1];
                    s->used[which] = true;
                    p->place[p->places] = (int)(r * s->kernel + c);
                    p->move[p->places++] =
                        which * s->plane + (s->top + move[0]) * s->pitch + s->left + move[1];
                }
        }
        s->lines = s->rows + larger(s->top, down); /* the zeros below are those above the next */
        s->pitch = s->cols + larger(s->left, right);
        if (round == 0) {
            /* a tile may reach beyond the last picture, and its moves beyond that */
            const int64_t most = s->each * s->lines * s->pitch + ROWS;
            s->plane = most + (s->top + down + s->kernel) * s->pitch + s->left + s->kernel;
        }
    }
}

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    amx_conv *s = ctx;
    void *at[4];
    s->b = *b;
    dnri_dnn_tensors(b, s->slot, at);
    s->in = at[s->dgrad ? DNRI_DNN_DST : DNRI_DNN_SRC];
    s->out = at[s->dgrad ? DNRI_DNN_SRC : DNRI_DNN_DST];
    s->weights = at[DNRI_DNN_WEIGHTS];
    s->packed = b->workspace;
    s->copies = s->packed + s->panels * panel_elements(s);
    return DNR_OK;
}

dnr_status dnri_amx_conv_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                              dnri_step *out)
{
    amx_conv *s = dnri_cpu_step(out, sizeof *s, run, 2);
    if (!s)
        return DNR_EMEM;
    out->bind = bind;
    snprintf(out->impl, sizeof out->impl, "amx bf16");
    memcpy(s->slot, slot, sizeof s->slot);
    s->dgrad = d->pass == DNRI_DNN_DGRAD;
    const dnr_desc *in = &d->shape[s->dgrad ? DNRI_DNN_DST : DNRI_DNN_SRC];
    const dnr_desc *to = &d->shape[s->dgrad ? DNRI_DNN_SRC : DNRI_DNN_DST];
    s->n = in->dim[0];
    s->h = in->dim[1];
    s->w = in->dim[2];
    s->c = in->dim[3];
    s->out_h = to->dim[1];
    s->out_w = to->dim[2];
    s->k = to->dim[3];
    s->kernel = d->shape[DNRI_DNN_WEIGHTS].dim[1];
    s->in_stride = s->dgrad ? 1 : d->stride;
    s->out_stride = s->dgrad ? d->stride : 1;
    s->planes = (int)(s->in_stride * s->in_stride);
    s->parts = (int)(s->out_stride * s->out_stride);
    s->rows = (s->h + s->in_stride - 1) / s->in_stride;
    s->cols = (s->w + s->in_stride - 1) / s->in_stride;
    s->panels = s->k / PANEL;
    s->slices = dnri_threads_for(dev, 2.0 * (double)dnri_count(&d->shape[DNRI_DNN_DST]) *
                                          (double)(panel_elements(s) / PANEL) *
                                          (s->dgrad ? (double)s->k / (double)s->c : 1));
    s->each = 1;
    find_parts(s, d->pad);
    s->direct = s->planes == 1 && s->lines == s->rows && s->pitch == s->cols && s->kernel == 1;
    const int64_t pixels = s->direct ? ROWS : s->planes * s->lines * s->pitch;
    const int64_t most = s->direct ? (s->n * s->h * s->w + ROWS - 1) / ROWS : s->n;
    s->each = larger(1, AHEAD / (pixels * s->c * (int64_t)sizeof(bf16)));
    if (s->each > (most + s->slices - 1) / s->slices)
        s->each = (most + s->slices - 1) / s->slices;
    s->units = (most + s->each - 1) / s->each;
    s->top = s->left = 0;
    find_parts(s, d->pad);
    s->chunk = larger(1, CHUNK / (panel_elements(s) * (int64_t)sizeof(bf16)));
    s->room = (s->direct ? ROWS : s->planes * s->plane) * s->c;
    out->workspace = (size_t)(s->panels * panel_elements(s) + s->slices * s->room) * sizeof(bf16);
    return DNR_OK;
}

#else
bool dnri_amx_conv_fits(const dnri_dnn_desc *d)
{
    return false;
}

dnr_status dnri_amx_conv_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                              dnri_step *out)
{
    return DNR_FAIL(DNR_EDEVICE, "build with gcc 11, clang 12 or later ones", "there is no AMX");
}
#endif
