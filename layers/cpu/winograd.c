/* winograd.c: 3 × 3 convolutions of stride 1 with a quarter of the multiplications (Lavin & Gray 2015,
 * arXiv:1509.09308), F(4 × 4, 3 × 3), in fp32 and NHWC.
 *
 * A tile of 6 × 6 pixels gives 4 × 4 outputs. Evaluated at the points 0, ±p, ±q and ∞ in both directions, it is 36
 * numbers a channel, and the convolution becomes 36 matrix products over channels:
 *   fprop, dgrad   M[36][tile][out] = V[36][tile][in] · U[36][in][out]     V of pictures, U of weights
 *   wgrad          D[36][k][c]      = Σ over tiles Z[36][tile][k] · V[36][tile][c]     Z of dy, 4 × 4 pixels a tile
 * then each 6 × 6 of M or D goes back to 4 × 4 pixels or 3 × 3 weights. Tiles are handled in groups that stay in
 * cache. dgrad is fprop on dy with turned weights. */
#include "winograd.h"

#include "../../runtime/cpu/kernel.h"
#include "../layers.h"

/* The points: with p·q = 1 the error is less than half of that of 1 and 2. */
#define P  0.625f
#define Q  1.6f
#define PP (P * P)
#define QQ (Q * Q)
/* 1 / the product of the differences to the other points */
#define N0 (1 / (PP * QQ))
#define NP (1 / (2 * PP * (PP - QQ)))
#define NQ (1 / (2 * QQ * (QQ - PP)))

enum {
    POINTS = 36,
    LANES = 16,
    ROWS = 6,
    SKEW = 16 /* floats: keeps planes off each other's cache sets */
};

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));
typedef float vec_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define VEC(p)  (*(vec_in_memory *)(p))
#define CVEC(p) ((vec) * (const vec_in_memory *)(p))
#define UNROLL  _Pragma("GCC unroll 6")

typedef struct wino {
    dnri_binding b;
    dnri_dnn_pass pass;
    int slot[4];
    /* the picture that is cut into tiles, and the one that 4 × 4 pixels a tile belong to */
    int64_t n, h, w, ci, p, q, co;
    int64_t pad, th, tw, tiles; /* tiles of a picture: th × tw; of all: tiles */
    int64_t group;              /* tiles handled together */
    int slices;
    int64_t first, count; /* wgrad: the group being handled */
    int64_t panel;        /* columns of a product that are computed together */
    int64_t v_row, v_plane, m_row, m_plane, u_plane; /* strides, floats */
    const float *x, *y_in;
    float *y;
    const float *weights, *bias, *residual; /* bias and residual: fprop's, or NULL */
    float *dw, *u, *v, *m, *zeros;
    int added; /* the op's input that is the residual */
    bool relu;
} wino;

/* ---- 36 points from pixels and back, one direction; `s` is the stride between vectors */

/* 6 pixels to 6 points */
DNRI_INLINE void points_of_6(const vec *d, int s, vec *o, int t)
{
    o[0] = PP * QQ * d[0] - (PP + QQ) * d[2 * s] + d[4 * s];
    o[5 * t] = PP * QQ * d[s] - (PP + QQ) * d[3 * s] + d[5 * s];
    vec a = d[4 * s] - QQ * d[2 * s], b = P * (d[3 * s] - QQ * d[s]);
    o[t] = a + b;
    o[2 * t] = a - b;
    a = d[4 * s] - PP * d[2 * s], b = Q * (d[3 * s] - PP * d[s]);
    o[3 * t] = a + b;
    o[4 * t] = a - b;
}

/* 4 pixels of dy, or 3 weights (n), to 6 points */
DNRI_INLINE void points_of(const vec *g, int n, int s, vec *o, int t)
{
    o[0] = N0 * g[0];
    o[5 * t] = g[(n - 1) * s];
    vec odd = g[s], a = NP * (g[0] + PP * g[2 * s]);
    vec b = NP * P * odd;
    if (n == 4)
        b += NP * P * PP * g[3 * s];
    o[t] = a + b;
    o[2 * t] = a - b;
    a = NQ * (g[0] + QQ * g[2 * s]);
    b = NQ * Q * odd;
    if (n == 4)
        b += NQ * Q * QQ * g[3 * s];
    o[3 * t] = a + b;
    o[4 * t] = a - b;
}

/* 6 points to 4 outputs or 3 weights (n) */
DNRI_INLINE void pixels_of(const vec *m, int n, int s, vec *o, int t)
{
    vec sp = m[s] + m[2 * s], dp = m[s] - m[2 * s];
    vec sq = m[3 * s] + m[4 * s], dq = m[3 * s] - m[4 * s];
    o[0] = m[0] + sp + sq;
    o[t] = P * dp + Q * dq;
    o[2 * t] = PP * sp + QQ * sq;
    if (n == 4)
        o[3 * t] = PP * P * dp + QQ * Q * dq;
    o[(n - 1) * t] += m[5 * s];
}

/* ---- products */

/* c[ROWS][nv vectors] = (add ? c : 0) + Σ over depth of a[row · rs + i · cs] · b[i · ldb + …] */
DNRI_INLINE void block(const float *a, int64_t rs, int64_t cs, const float *b, int64_t ldb,
                       float *c, int64_t ldc, int64_t depth, bool add, int nv)
{
    vec sum[ROWS][4];
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < nv; j++) sum[i][j] =
        add ? CVEC(c + i * ldc + j * LANES) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec col[4];
        UNROLL for (int j = 0; j < nv; j++) col[j] = CVEC(b + k * ldb + j * LANES);
        UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < nv; j++) sum[i][j] +=
            a[i * rs + k * cs] * col[j];
    }
    UNROLL for (int i = 0; i < ROWS; i++) UNROLL for (int j = 0; j < nv; j++)
        VEC(c + i * ldc + j * LANES) = sum[i][j];
}

/* Rows come in sixes: memory is rounded up to them, and what is computed beyond is not read. */
DNRI_INLINE void product(const float *a, int64_t rs, int64_t cs, const float *b, int64_t ldb,
                         float *c, int64_t ldc, int64_t rows, int64_t depth, bool add,
                         int64_t panel)
{
    for (int64_t r = 0; r < rows; r += ROWS) {
        const float *ar = a + r * rs;
        float *cr = c + r * ldc;
        if (panel == 4 * LANES)
            block(ar, rs, cs, b, ldb, cr, ldc, depth, add, 4);
        else if (panel == 2 * LANES)
            block(ar, rs, cs, b, ldb, cr, ldc, depth, add, 2);
        else
            block(ar, rs, cs, b, ldb, cr, ldc, depth, add, 1);
    }
}

/* ---- tiles */

/* The pixels of a tile of `side` × `side`, from (h0, w0) on; outside the picture: zeros. */
DNRI_INLINE void tile_pixels(const wino *s, const float *x, int64_t n, int64_t h0, int64_t w0,
                             int side, int64_t h, int64_t w, int64_t c, const float **at)
{
    for (int i = 0; i < side; i++)
        for (int j = 0; j < side; j++) {
            int64_t y = h0 + i, z = w0 + j;
            bool inside = y >= 0 && y < h && z >= 0 && z < w;
            at[side * i + j] = inside ? x + ((n * h + y) * w + z) * c : s->zeros;
        }
}

/* V: row `row` of its planes from tile t of the picture */
DNRI_INLINE void put_v(const wino *s, int64_t t, float *v, int64_t row)
{
    const float *at[POINTS];
    vec d[POINTS], e[POINTS];
    int64_t in = t % (s->th * s->tw);
    tile_pixels(s, s->x, t / (s->th * s->tw), in / s->tw * 4 - s->pad, in % s->tw * 4 - s->pad, 6,
                s->h, s->w, s->ci, at);
    for (int64_t c = 0; c < s->ci; c += LANES) {
        float *to = v + row * s->v_row + c;
        UNROLL for (int j = 0; j < 6; j++)
        {
            UNROLL for (int i = 0; i < 6; i++) d[6 * i + j] = CVEC(at[6 * i + j] + c);
            points_of_6(d + j, 6, e + j, 6);
        }
        UNROLL for (int i = 0; i < 6; i++)
        {
            points_of_6(e + 6 * i, 1, d + 6 * i, 1);
            UNROLL for (int j = 0; j < 6; j++) VEC(to + (6 * i + j) * s->v_plane) = d[6 * i + j];
        }
    }
}

/* Z: likewise from dy */
DNRI_INLINE void put_z(const wino *s, int64_t t, float *z, int64_t row)
{
    const float *at[16];
    vec d[16], e[24], o[6];
    int64_t in = t % (s->th * s->tw);
    tile_pixels(s, s->y_in, t / (s->th * s->tw), in / s->tw * 4, in % s->tw * 4, 4, s->p, s->q,
                s->co, at);
    for (int64_t c = 0; c < s->co; c += LANES) {
        float *to = z + row * s->m_row + c;
        UNROLL for (int j = 0; j < 4; j++)
        {
            UNROLL for (int i = 0; i < 4; i++) d[4 * i + j] = CVEC(at[4 * i + j] + c);
            points_of(d + j, 4, 4, e + j, 4);
        }
        UNROLL for (int i = 0; i < 6; i++)
        {
            points_of(e + 4 * i, 4, 1, o, 1);
            UNROLL for (int j = 0; j < 6; j++) VEC(to + (6 * i + j) * s->m_plane) = o[j];
        }
    }
}

/* y: tile t from row `row` of M's planes */
DNRI_INLINE void put_y(const wino *s, int64_t t, const float *m, int64_t row)
{
    vec d[POINTS], e[24], o[4];
    int64_t in = t % (s->th * s->tw), n = t / (s->th * s->tw);
    int64_t h0 = in / s->tw * 4, w0 = in % s->tw * 4;
    int hs = s->p - h0 < 4 ? (int)(s->p - h0) : 4, ws = s->q - w0 < 4 ? (int)(s->q - w0) : 4;
    const int64_t at = ((n * s->p + h0) * s->q + w0) * s->co;
    float *y = s->y + at;
    const float *residual = s->residual ? s->residual + at : NULL;
    for (int64_t c = 0; c < s->co; c += LANES) {
        const float *from = m + row * s->m_row + c;
        const vec bias = s->bias ? CVEC(s->bias + c) : (vec){0};
        UNROLL for (int j = 0; j < 6; j++)
        {
            UNROLL for (int i = 0; i < 6; i++) d[6 * i + j] = CVEC(from + (6 * i + j) * s->m_plane);
            pixels_of(d + j, 4, 6, e + j, 6);
        }
        for (int i = 0; i < hs; i++) {
            pixels_of(e + 6 * i, 4, 1, o, 1);
            for (int j = 0; j < ws; j++) {
                vec r = o[j] + bias;
                if (residual)
                    r += CVEC(residual + (i * s->q + j) * s->co + c);
                if (s->relu)
                    r = (vec)((bits)r & ~(r < 0)); /* NaN passes */
                VEC(y + (i * s->q + j) * s->co + c) = r;
            }
        }
    }
}

/* ---- fprop and dgrad */

/* U from the weights: [36][panels of out][in][panel]. Units: vectors of output channels. */
DNRI_CLONES static void weights_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wino *s = ctx;
    vec g[9], e[18], o[6];
    const bool turned = s->pass == DNRI_DNN_DGRAD;
    for (int64_t unit = begin; unit < end; unit++)
        for (int64_t i = 0; i < s->ci; i++) {
            int64_t out = unit * LANES;
            float *u = s->u + out / s->panel * s->panel * s->ci + i * s->panel + out % s->panel;
            for (int r = 0; r < 9; r++)
                if (turned) /* weights [in][3][3][out] */
                    g[r] = CVEC(s->weights + (i * 9 + 8 - r) * s->co + out);
                else /* [out][3][3][in] */
                    for (int j = 0; j < LANES; j++)
                        g[r][j] = s->weights[((out + j) * 9 + r) * s->ci + i];
            UNROLL for (int j = 0; j < 3; j++) points_of(g + j, 3, 3, e + j, 3);
            UNROLL for (int k = 0; k < 6; k++)
            {
                points_of(e + 3 * k, 3, 1, o, 1);
                UNROLL for (int j = 0; j < 6; j++) VEC(u + (6 * k + j) * s->u_plane) = o[j];
            }
        }
}

DNRI_CLONES static void tiles_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wino *s = ctx;
    float *v = s->v + slice * POINTS * s->v_plane, *m = s->m + slice * POINTS * s->m_plane;
    for (int64_t t0 = begin; t0 < end; t0 += s->group) {
        int64_t n = end - t0 < s->group ? end - t0 : s->group;
        for (int64_t t = 0; t < n; t++)
            put_v(s, t0 + t, v, t);
        for (int k = 0; k < POINTS; k++)
            for (int64_t c = 0; c < s->co; c += s->panel)
                product(v + k * s->v_plane, s->v_row, 1, s->u + k * s->u_plane + c * s->ci,
                        s->panel, m + k * s->m_plane + c, s->m_row, n, s->ci, false, s->panel);
        for (int64_t t = 0; t < n; t++)
            put_y(s, t0 + t, m, t);
    }
}

static dnr_status pictures_run(void *ctx)
{
    wino *s = ctx;
    memset(s->zeros, 0, (size_t)s->ci * sizeof(float));
    dnri_slices(s->slices, s->co / LANES, weights_slice, s);
    dnri_slices(s->slices, s->tiles, tiles_slice, s);
    return DNR_OK;
}

/* ---- wgrad: a group of tiles at a time, for all threads together, so that D exists once */

DNRI_CLONES static void group_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wino *s = ctx;
    for (int64_t t = begin; t < end; t++) {
        put_v(s, s->first + t, s->v, t);
        put_z(s, s->first + t, s->m, t);
    }
}

/* units: a panel of columns at one point */
DNRI_CLONES static void sum_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wino *s = ctx;
    int64_t panels = s->ci / s->panel;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t k = unit / panels, c = unit % panels * s->panel;
        product(s->m + k * s->m_plane, 1, s->m_row, s->v + k * s->v_plane + c, s->v_row,
                s->u + k * s->u_plane + c, s->ci, s->co, s->count, s->first > 0, s->panel);
    }
}

/* units: output channels */
DNRI_CLONES static void dw_slice(void *ctx, int slice, int64_t begin, int64_t end)
{
    const wino *s = ctx;
    vec d[6], e[18], o[3];
    for (int64_t k = begin; k < end; k++)
        for (int64_t c = 0; c < s->ci; c += LANES) {
            const float *from = s->u + k * s->ci + c;
            UNROLL for (int j = 0; j < 6; j++)
            {
                UNROLL for (int i = 0; i < 6; i++) d[i] = CVEC(from + (6 * i + j) * s->u_plane);
                pixels_of(d, 3, 1, e + j, 6);
            }
            UNROLL for (int i = 0; i < 3; i++)
            {
                pixels_of(e + 6 * i, 3, 1, o, 1);
                UNROLL for (int j = 0; j < 3; j++) VEC(s->dw + (k * 9 + 3 * i + j) * s->ci + c) =
                    o[j];
            }
        }
}

static dnr_status wgrad_run(void *ctx)
{
    wino *s = ctx;
    memset(s->zeros, 0, (size_t)(s->ci > s->co ? s->ci : s->co) * sizeof(float));
    for (s->first = 0; s->first < s->tiles; s->first += s->group) {
        s->count = s->tiles - s->first < s->group ? s->tiles - s->first : s->group;
        dnri_slices(s->slices, s->count, group_slice, s);
        dnri_slices(s->slices, POINTS * (s->ci / s->panel), sum_slice, s);
    }
    dnri_slices(s->slices, s->co, dw_slice, s);
    return DNR_OK;
}

/* ---- steps */

bool dnri_winograd_fits(const dnri_dnn_desc *d)
{
    const dnr_desc *x = &d->shape[DNRI_DNN_SRC], *w = &d->shape[DNRI_DNN_WEIGHTS];
    return x->dtype == DNR_F32 && w->dim[1] == 3 && w->dim[2] == 3 && d->stride == 1 &&
           d->pad <= 2 && w->dim[0] % LANES == 0 && w->dim[3] % LANES == 0;
}

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static dnr_status bind(void *ctx, const dnri_binding *b)
{
    wino *s = ctx;
    void *at[4];
    int copies = s->pass == DNRI_DNN_WGRAD ? 1 : s->slices;
    s->b = *b;
    dnri_dnn_tensors(b, s->slot, at);
    bool back = s->pass == DNRI_DNN_DGRAD;
    s->x = at[back ? DNRI_DNN_DST : DNRI_DNN_SRC];
    s->y = at[back ? DNRI_DNN_SRC : DNRI_DNN_DST];
    s->y_in = s->y;
    s->bias = at[DNRI_DNN_BIAS];
    s->residual = s->added ? b->in[s->added] : NULL;
    s->weights = s->dw = at[DNRI_DNN_WEIGHTS];
    s->u = b->workspace;
    s->v = s->u + POINTS * s->u_plane;
    s->m = s->v + copies * POINTS * s->v_plane;
    s->zeros = s->m + copies * POINTS * s->m_plane;
    return DNR_OK;
}

static void set_shape(wino *s, const dnri_dnn_desc *d)
{
    const dnr_desc *x = &d->shape[DNRI_DNN_SRC], *y = &d->shape[DNRI_DNN_DST];
    s->pad = d->pad;
    if (d->pass == DNRI_DNN_DGRAD) {
        const dnr_desc *t = x;
        x = y;
        y = t;
        s->pad = 2 - d->pad;
    }
    s->n = x->dim[0];
    s->h = x->dim[1];
    s->w = x->dim[2];
    s->ci = x->dim[3];
    s->p = y->dim[1];
    s->q = y->dim[2];
    s->co = y->dim[3];
    s->th = (s->p + 3) / 4;
    s->tw = (s->q + 3) / 4;
    s->tiles = s->n * s->th * s->tw;
}

dnr_status dnri_winograd_step(dnr_device *dev, const dnri_dnn_desc *d, const int slot[4],
                              dnri_step *out)
{
    bool wgrad = d->pass == DNRI_DNN_WGRAD;
    wino *s = dnri_cpu_step(out, sizeof *s, wgrad ? wgrad_run : pictures_run, 2);
    if (!s)
        return DNR_EMEM;
    out->bind = bind;
    snprintf(out->impl, sizeof out->impl, "winograd 4x4");
    s->pass = d->pass;
    memcpy(s->slot, slot, sizeof s->slot);
    s->relu = d->relu;
    s->added = d->added ? d->residual : 0;
    set_shape(s, d);
    s->slices = dnri_cpu_of(dev)->threads;
    int64_t columns = wgrad ? s->ci : s->co;
    s->panel = columns % (4 * LANES) == 0   ? 4 * LANES
               : columns % (2 * LANES) == 0 ? 2 * LANES
                                            : LANES;
    /* V and M of a group: in a core's cache, or in the one that all share */
    int64_t least = wgrad ? 96 : 48, cache = wgrad ? 4 << 20 : 512 << 10;
    s->group = cache / (POINTS * (int64_t)sizeof(float) * (s->ci + s->co));
    s->group = round_up(s->group > least ? s->group : least, ROWS);
    s->group = s->group < round_up(s->tiles, ROWS) ? s->group : round_up(s->tiles, ROWS);
    s->v_row = s->ci + SKEW;
    s->m_row = s->co + SKEW;
    s->v_plane = s->group * s->v_row + SKEW;
    s->m_plane = s->group * s->m_row + SKEW;
    s->u_plane = s->ci * (wgrad ? round_up(s->co, ROWS) : s->co) + SKEW;
    int copies = wgrad ? 1 : s->slices;
    int64_t widest = s->ci > s->co ? s->ci : s->co;
    out->workspace = (size_t)(POINTS * (s->u_plane + copies * (s->v_plane + s->m_plane)) + widest) *
                     sizeof(float);
    out->launches = wgrad ? 1 + 2 * (int)((s->tiles + s->group - 1) / s->group) : 2;
    return DNR_OK;
}
