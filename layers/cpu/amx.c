/* amx.c: weight gradients of convolutions by AMX, in bf16 and NHWC, summed in fp32.
 *
 * dw[k][r,s,c] = Σ over output pixels m of dy[m][k] · x[m moved by (r,s)][c] is a matrix product whose sum runs over the
 * slowest index of both factors. A tile product wants pixels as the fastest index of one (A: 16 channels × 32 pixels)
 * and in pairs in the other (B: 16 pairs × 16 channels × 2). So some thousand pixels at a time are packed into such
 * tiles: dy once; x, for each place of the kernel, 32 channels at a time, which stay in the core's cache while all rows of dw
 * take them up. */
#include "amx.h"
#include "amx_tiles.h"

#include "../layers.h"

#include <string.h>

#ifdef HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>

enum {
    PIXELS = 1024,   /* packed at a time, at most */
    CHUNK = 1 << 20, /* bytes of packed dy that a core's cache holds beside the rest */
};

typedef struct amx {
    dnri_binding b;
    int slot[4];
    int64_t h, w, c, p, q, k, kernel, stride, pad; /* x [n,h,w,c], dy [n,p,q,k] */
    int64_t pixels;                                /* of dy: n·p·q */
    int64_t room;                                  /* steps in a packed block, */
    int64_t first, steps;                          /* the block being handled */
    int64_t panels;                                /* columns of dw in thirty-twos */
    int64_t rows, chunks; /* channels of dy in thirty-twos: of a chunk; chunks of all */
    int slices;
    const bf16 *x, *dy;
    float *dw;
    const bf16 **pixel;  /* [place][step][32]: what of x is under it */
    bf16 *a, *t, *zeros; /* packed dy [k/16][step], packed x [slice][step][2]; a pixel of zeros */
} amx;

/* ---- packing */

AMX static void pack_dy(const amx *s, int64_t step)
{
    const bf16 *pixel[STEP];
    __m512i lo[16], hi[16], turned[16];
    for (int64_t i = 0, m = s->first + step * STEP; i < STEP; i++, m++)
        pixel[i] = m < s->pixels ? s->dy + m * s->k : s->zeros;
    for (int64_t k = 0; k < s->k; k += PANEL) {
        bf16 *tile = s->a + (k / 16 * s->room + step) * TILE;
        pair_up(pixel, k, lo, hi);
        turn(lo, turned);
        put(tile, turned);
        turn(hi, turned);
        put(tile + s->room * TILE, turned);
    }
}

/* Pixels of x under place (r, s) of the kernel; outside the picture there are zeros. */
static void find_pixels(const amx *s, int64_t step, int64_t r, int64_t col, const bf16 **pixel)
{
    int64_t m = s->first + step * STEP, q = m % s->q, p = m / s->q % s->p, n = m / s->q / s->p;
    for (int i = 0; i < STEP; i++, m++) {
        const int64_t h = p * s->stride - s->pad + r, w = q * s->stride - s->pad + col;
        const bool inside = m < s->pixels && h >= 0 && h < s->h && w >= 0 && w < s->w;
        pixel[i] = inside ? s->x + ((n * s->h + h) * s->w + w) * s->c : s->zeros;
        if (++q == s->q) {
            q = 0;
            if (++p == s->p) {
                p = 0;
                n++;
            }
        }
    }
}

AMX static void pack_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const amx *s = ctx;
    for (int64_t step = begin; step < end; step++) {
        pack_dy(s, step);
        for (int64_t place = 0; place < s->kernel * s->kernel; place++)
            find_pixels(s, step, place / s->kernel, place % s->kernel,
                        s->pixel + (place * s->room + step) * STEP);
    }
}

/* 32 channels of x under a place of the kernel, which are a panel of dw's columns. */
AMX static void pack_x(const amx *s, int64_t panel, bf16 *tile)
{
    const int64_t each = s->c / PANEL;
    const bf16 *const *pixel = s->pixel + panel / each * s->room * STEP;
    __m512i lo[16], hi[16];
    for (int64_t step = 0; step < s->steps; step++, pixel += STEP, tile += 2 * TILE) {
        pair_up(pixel, panel % each * PANEL, lo, hi);
        put(tile, lo);
        put(tile + TILE, hi);
    }
}

/* ---- the product */

/* 32 × 32 of dw, rows `pitch` bytes apart. */
AMX static inline void block(const amx *s, const bf16 *a, const bf16 *t, float *dw, int64_t pitch)
{
    const bf16 *below = a + s->room * TILE;
    float *lower = (float *)((char *)dw + 16 * pitch);
    if (s->first == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, dw, pitch);
        _tile_loadd(1, dw + 16, pitch);
        _tile_loadd(2, lower, pitch);
        _tile_loadd(3, lower + 16, pitch);
    }
    for (int64_t i = 0; i < s->steps; i++) {
        _tile_loadd(4, a + i * TILE, 64);
        _tile_loadd(6, t + 2 * i * TILE, 64);
        _tile_loadd(7, t + (2 * i + 1) * TILE, 64);
        _tile_loadd(5, below + i * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, dw, pitch);
    _tile_stored(1, dw + 16, pitch);
    _tile_stored(2, lower, pitch);
    _tile_stored(3, lower + 16, pitch);
}

/* units: panels of dw for each chunk of its rows */
AMX static void product_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const amx *s = ctx;
    const int64_t columns = s->panels * PANEL;
    bf16 *t = s->t + slice * s->room * 2 * TILE;
    _tile_loadconfig(&all_full);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t panel = unit % s->panels, from = unit / s->panels * s->rows;
        const int64_t to = from + s->rows < s->k / PANEL ? from + s->rows : s->k / PANEL;
        pack_x(s, panel, t);
        for (int64_t row = from; row < to; row++)
            block(s, s->a + row * 2 * s->room * TILE, t,
                  s->dw + row * PANEL * columns + panel * PANEL, columns * (int64_t)sizeof(float));
    }
    _tile_release();
    __asm__ volatile("" ::: "memory"); /* the tiles' stores are told to no compiler */
}

static dnr_status run(void *ctx)
{
    amx *s = ctx;
    memset(s->zeros, 0, (size_t)(s->c > s->k ? s->c : s->k) * sizeof *s->zeros);
    for (s->first = 0; s->first < s->pixels; s->first += s->room * STEP) {
        s->steps = (s->pixels - s->first + STEP - 1) / STEP;
        s->steps = s->steps < s->room ? s->steps : s->room;
        dnri_slices(s->slices, s->steps, pack_slice, s);
        dnri_slices(s->slices, s->panels * s->chunks, product_slice, s);
    }
    return DNR_OK;
}

/* ---- the step */

/* A process has to ask Linux for the tiles' registers once. */
bool dnri_amx_ready(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    static int granted; /* 0: not asked */
    if (!granted)
        granted = dnri_dnn_amx() && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 ? 1 : -1;
    return granted > 0;
}

static bool wgrad_fits(const dnri_dnn_desc *d)
{
    return d->pass == DNRI_DNN_WGRAD && !d->dense && d->shape[DNRI_DNN_SRC].dtype == DNR_BF16 &&
           d->shape[DNRI_DNN_DST].dtype == DNR_BF16 &&
           d->shape[DNRI_DNN_WEIGHTS].dtype == DNR_F32 &&
           d->shape[DNRI_DNN_SRC].dim[3] % PANEL == 0 &&
           d->shape[DNRI_DNN_DST].dim[3] % PANEL == 0 && dnri_amx_ready();
}

bool dnri_amx_fits(const dnri_dnn_desc *d)
{
    return wgrad_fits(d) || dnri_amx_conv_fits(d);
}

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    amx *s = ctx;
    void *at[4];
    s->b = *b;
    dnri_dnn_tensors(b, s->slot, at);
    s->x = at[DNRI_DNN_SRC];
    s->dy = at[DNRI_DNN_DST];
    s->dw = at[DNRI_DNN_WEIGHTS];
    s->pixel = b->workspace;
    s->a = (bf16 *)(s->pixel + s->kernel * s->kernel * s->room * STEP);
    s->t = s->a + s->k / 16 * s->room * TILE;
    s->zeros = s->t + s->slices * s->room * 2 * TILE;
    return DNR_OK;
}

dnr_status dnri_amx_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4], dnri_step *out)
{
    if (d->pass != DNRI_DNN_WGRAD)
        return dnri_amx_conv_step(dev, d, slot, out);
    const dnr_desc *x = &d->shape[DNRI_DNN_SRC], *y = &d->shape[DNRI_DNN_DST];
    const int64_t kernel = d->shape[DNRI_DNN_WEIGHTS].dim[1];
    amx *s = dnri_cpu_step(out, sizeof *s, run, 0);
    if (!s)
        return DNR_EMEM;
    out->bind = bind;
    snprintf(out->impl, sizeof out->impl, "amx bf16");
    memcpy(s->slot, slot, sizeof s->slot);
    s->h = x->dim[1];
    s->w = x->dim[2];
    s->c = x->dim[3];
    s->p = y->dim[1];
    s->q = y->dim[2];
    s->k = y->dim[3];
    s->kernel = kernel;
    s->stride = d->stride;
    s->pad = d->pad;
    s->pixels = y->dim[0] * s->p * s->q;
    s->room = (s->pixels < PIXELS ? s->pixels + STEP - 1 : PIXELS) / STEP;
    s->panels = kernel * kernel * s->c / PANEL;
    s->slices = dnri_threads_for(dev, 2.0 * (double)s->pixels * (double)(s->k * s->panels * PANEL));
    const int64_t all = s->k / PANEL, most = CHUNK / (s->room * 2 * TILE * (int64_t)sizeof(bf16));
    s->rows = most < 1 ? 1 : most < all ? most : all;
    while (s->rows > 1 && s->slices > 1 &&
           (all + s->rows - 1) / s->rows * s->panels < 4 * s->slices)
        s->rows = (s->rows + 1) / 2;
    s->chunks = (all + s->rows - 1) / s->rows;
    out->workspace =
        (size_t)(kernel * kernel * s->room * STEP) * sizeof *s->pixel +
        (size_t)((all + s->slices) * s->room * 2 * TILE + (s->c > s->k ? s->c : s->k)) *
            sizeof(bf16);
    out->launches = 2 * (int)((s->pixels + s->room * STEP - 1) / (s->room * STEP));
    return DNR_OK;
}

#else
bool dnri_amx_fits(const dnri_dnn_desc *d)
{
    return false;
}

dnr_status dnri_amx_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4], dnri_step *out)
{
    return DNR_FAIL(DNR_EDEVICE, "build with gcc 11, clang 12 or later ones", "there is no AMX");
}
#endif
