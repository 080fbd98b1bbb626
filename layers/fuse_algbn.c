/* fuse_algbn.c: a convolution and its batch norm without the tensor between them, in backward or altogether. */
#include "fuse.h"

#include "../runtime/backend.h"

#include <stdlib.h>
#include <string.h>

enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD }; /* in of norm.bwd */
enum { B_DX, B_DGAMMA, B_DBETA, B_DRESIDUAL };                     /* its outputs */
enum { N_X, N_GAMMA, N_BETA, N_RESIDUAL, N_MEAN, N_VAR };          /* in of norm.train */
enum { N_Y, N_OUT_MEAN, N_OUT_INVSTD, N_MASK };                    /* its outputs */
enum { Z_Y, Z_DY, Z_DY2 };                                         /* in of norm.dz */
enum { Z_DZ, Z_SUM };                                              /* its outputs */
enum { C_GRAM = 1, C_MEAN = 6 };                                   /* in of algbn.coef */

/* The convolution that writes t, or −1. */
static int conv_of(const dnr_graph *g, dnr_tid t)
{
    const int i = dnri_graph_writer(g, t);
    const dnri_op_def *def = i < 0 ? NULL : dnri_graph_op_c(g, i)->def;
    return def == &dnri_def_conv || def == &dnri_def_conv_stats ? i : -1;
}

/* The three ops, by position, and what they speak of. */
typedef struct match {
    int bwd, wgrad, dgrad;
    dnri_conv_attr conv;
    dnr_tid a, w;
    dnr_tid dz, sum_dz; /* DNRI_NONE: to be made */
    int64_t c, rows;    /* channels of a; M */
} match;

/* Finds the convolution's backward ops: the only readers of dx, wgrad first. */
static bool find_readers(const dnr_graph *g, dnr_tid dx, match *m)
{
    m->wgrad = m->dgrad = -1;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op *op = dnri_graph_op_c(g, i);
        for (int k = 0; k < op->n_in; k++) {
            if (op->in[k] != dx)
                continue;
            if (op->def == &dnri_def_conv_wgrad && k == 1 && op->in[0] == m->a && m->wgrad < 0)
                m->wgrad = i;
            else if (op->def == &dnri_def_conv_dgrad && k == 0 && op->in[1] == m->w && m->dgrad < 0)
                m->dgrad = i;
            else
                return false;
        }
    }
    return m->wgrad >= 0 && m->wgrad < m->dgrad && !dnri_graph_tensor(g, dx)->keep;
}

/* Is there dz, and its sum? They are made from what norm.bwd reads; where dz is dy itself, by the norm.dz of the norm
 * behind. */
static bool find_dz(const dnr_graph *g, const dnri_op *bwd, match *m)
{
    m->dz = bwd->in[B_DY];
    m->sum_dz = DNRI_NONE;
    if (bwd->in[B_Y] >= 0 || bwd->in[B_DY2] >= 0) {
        m->dz = DNRI_NONE;
        return true;
    }
    const int i = dnri_graph_writer(g, m->dz);
    if (i >= 0 && dnri_graph_op_c(g, i)->def == &dnri_def_norm_dz)
        m->sum_dz = dnri_graph_op_c(g, i)->out[Z_SUM];
    return m->sum_dz >= 0;
}

static bool matches(const dnr_graph *g, int i, int64_t rows, match *m)
{
    const dnri_op *bwd = dnri_graph_op_c(g, i);
    if (bwd->def != &dnri_def_norm_bwd)
        return false;
    const int at = conv_of(g, bwd->in[B_X]);
    if (at < 0)
        return false;
    const dnri_op *conv = dnri_graph_op_c(g, at);
    const dnr_desc *x = dnri_desc(g, bwd->in[B_X]);
    *m = (match){.bwd = i,
                 .conv = *(const dnri_conv_attr *)conv->attr,
                 .a = conv->in[0],
                 .w = conv->in[1],
                 .c = dnri_desc(g, conv->in[0])->dim[3],
                 .rows = x->dim[0] * x->dim[1] * x->dim[2]};
    rows *= m->conv.stride * m->conv.stride; /* there is more to save where it does not stride */
    return m->conv.kernel == 1 && m->conv.pad == 0 && x->dim[3] > m->c &&
           m->rows >= rows * x->dim[3] && find_readers(g, bwd->out[B_DX], m) && find_dz(g, bwd, m);
}

/* What takes their place: DZ norm.bwd's; SUBSAMPLE to COEF conv.wgrad's; DGRAD and SPREAD conv.dgrad's. */
enum { DZ, SUBSAMPLE, GRAM, PRODUCT, COEF, DGRAD, SPREAD, PARTS };

static const dnr_tid none[] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};

/* Makes an op after the pattern of `like`, and its outputs. */
static dnr_status make(dnr_graph *g, dnri_op *op, const dnri_op *like, const dnri_op_def *def,
                       const void *attr, size_t size, int n_in, const dnr_tid *in, int n_out,
                       const dnr_tid *out)
{
    *op = *like;
    op->def = def;
    op->n_in = n_in;
    op->n_out = n_out;
    memset(op->attr, 0, sizeof op->attr);
    if (size)
        memcpy(op->attr, attr, size);
    for (int k = 0; k < n_in; k++)
        op->in[k] = in[k];
    for (int k = 0; k < n_out; k++)
        op->out[k] = out[k];
    return def->infer(g, op);
}

static dnr_status make_parts(dnr_graph *g, const match *m, dnri_op part[PARTS])
{
    const dnri_op *bwd = dnri_graph_op_c(g, m->bwd), *wgrad = dnri_graph_op_c(g, m->wgrad),
                  *dgrad = dnri_graph_op_c(g, m->dgrad);
    const dnri_shortcut_attr every = {(int32_t)m->c, m->conv.stride, m->conv.h, m->conv.w, m->c};
    const dnri_algbn_attr attr = {.rows = m->rows};
    const bool strided = m->conv.stride > 1;
    dnr_tid a = m->a, dz = m->dz, sum_dz = m->sum_dz;
    if (dz < 0) {
        const bool residual = ((const dnri_norm_bwd_attr *)bwd->attr)->residual;
        DNR_TRY(make(g, &part[DZ], bwd, &dnri_def_norm_dz, NULL, 0, 3, bwd->in + B_Y, 2,
                     (dnr_tid[]){residual ? bwd->out[B_DRESIDUAL] : DNRI_NONE, DNRI_NONE}));
        dz = part[DZ].out[Z_DZ];
        sum_dz = part[DZ].out[Z_SUM];
    }
    if (strided) {
        DNR_TRY(make(g, &part[SUBSAMPLE], wgrad, &dnri_def_shortcut, &every, sizeof every, 1, &a, 1,
                     none));
        a = part[SUBSAMPLE].out[0];
    }
    DNR_TRY(make(g, &part[GRAM], wgrad, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, DNRI_NONE}, 2,
                 none));
    DNR_TRY(
        make(g, &part[PRODUCT], wgrad, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, dz}, 1, none));
    const dnr_tid in[] = {part[PRODUCT].out[0],
                          part[GRAM].out[0],
                          part[GRAM].out[1],
                          sum_dz,
                          m->w,
                          bwd->in[B_GAMMA],
                          bwd->in[B_MEAN],
                          bwd->in[B_INVSTD],
                          dnri_slab_tensor(g, DNRI_HEADER)};
    const dnr_tid out[] = {wgrad->out[0],
                           bwd->out[B_DGAMMA],
                           bwd->out[B_DBETA],
                           DNRI_NONE,
                           DNRI_NONE,
                           DNRI_NONE,
                           dnri_slab_tensor(g, DNRI_STATE)};
    DNR_TRY(make(g, &part[COEF], wgrad, &dnri_def_algbn_coef, &attr, sizeof attr, 9, in, 7, out));
    const dnr_tid *coef = part[COEF].out;
    DNR_TRY(make(g, &part[DGRAD], dgrad, &dnri_def_algbn_dgrad, NULL, 0, 5,
                 (dnr_tid[]){dz, a, coef[3], coef[4], coef[5]}, 1, strided ? none : dgrad->out));
    if (!strided)
        return DNR_OK;
    return make(g, &part[SPREAD], dgrad, &dnri_def_shortcut_bwd, &every, sizeof every, 1,
                part[DGRAD].out, 1, dgrad->out);
}

/* Parts from `first` to `end`, those that are there, take the place of op `at`. */
typedef struct place {
    int at, first, end;
} place;

/* The tensors made for parts that are not taken are of no program. */
static bool supported(const dnr_graph *g, dnr_device *dev, const dnri_op *part, int n)
{
    for (int k = 0; k < n; k++)
        if (part[k].def && !dnri_device_supports(dev, g, &part[k]))
            return false;
    return true;
}

/* Puts the parts in their three places. */
static dnr_status put(dnr_graph *g, const dnri_op *part, const place places[3])
{
    const int n = dnri_graph_ops(g);
    int left = 0;
    dnri_op *ops = malloc((size_t)(n + PARTS) * sizeof *ops);
    if (!ops)
        return DNR_FAIL_NOMEM();
    for (int i = 0; i < n; i++) {
        const place *at = NULL;
        for (int p = 0; p < 3; p++)
            at = places[p].at == i ? &places[p] : at;
        for (int k = at ? at->first : 0; at && k < at->end; k++)
            if (part[k].def)
                ops[left++] = part[k];
        if (!at)
            ops[left++] = *dnri_graph_op_c(g, i);
    }
    dnri_graph_replace_ops(g, ops, left);
    return DNR_OK;
}

/* The gradient of a convolution of stride 2, `half`, goes to the norm.dz that adds it to another's as it is, not `spread`
 * over the pixels it strides over; where the device has that. */
static bool join_dz(dnr_graph *g, dnr_device *dev, int stride, dnr_tid spread, dnr_tid half)
{
    const int at = stride == 2 ? dnri_graph_reader(g, spread, -1) : -1;
    dnri_op *dz = at < 0 ? NULL : dnri_graph_op(g, at), now;
    if (!dz || dz->def != &dnri_def_norm_dz || dz->in[Z_DY2] < 0)
        return false;
    now = *dz;
    if (now.in[Z_DY] == spread)
        now.in[Z_DY] = now.in[Z_DY2];
    now.in[Z_DY2] = half;
    if (!dnri_desc_equal(dnri_desc(g, now.in[Z_DY]), dnri_desc(g, now.out[Z_DZ])) ||
        !dnri_device_supports(dev, g, &now))
        return false;
    *dz = now;
    return true;
}

/* The same of convolutions whose batch norm stays as it is: without its stride their dgrad makes half. */
static dnr_status join_plain(dnr_graph *g, dnr_device *dev)
{
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        const dnri_op dgrad = *dnri_graph_op_c(g, i);
        const dnri_conv_attr *conv = (const dnri_conv_attr *)dgrad.attr;
        if (dgrad.def != &dnri_def_conv_dgrad || conv->kernel != 1 || conv->pad != 0 ||
            conv->stride != 2)
            continue;
        const dnr_desc *dy = dnri_desc(g, dgrad.in[0]);
        const dnri_conv_attr dense = {1, 1, 0, dy->dim[1], dy->dim[2]};
        dnri_op half;
        DNR_TRY(make(g, &half, &dgrad, dgrad.def, &dense, sizeof dense, 2, dgrad.in, 1, none));
        if (join_dz(g, dev, conv->stride, dgrad.out[0], half.out[0]))
            *dnri_graph_op(g, i) = half;
    }
    return DNR_OK;
}

/* The first algbn.coef of the program; NULL: there is none. */
static dnri_algbn_attr *first_coef(dnr_graph *g)
{
    for (int i = 0; i < dnri_graph_ops(g); i++)
        if (dnri_graph_op_c(g, i)->def == &dnri_def_algbn_coef)
            return (dnri_algbn_attr *)dnri_graph_op(g, i)->attr;
    return NULL;
}

/* Convolutions that stride come last: the ops that read their gradient, and that make dz, are those of others. */
dnr_status dnri_fuse_algbn(dnr_graph *g, dnr_device *dev, int64_t rows)
{
    DNR_TRY(dnri_graph_status(g));
    match m;
    for (int strided = 0; strided < 2; strided++)
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            if (!matches(g, i, rows, &m) || (m.conv.stride > 1) != strided)
                continue;
            dnri_op part[PARTS] = {{0}};
            DNR_TRY(make_parts(g, &m, part));
            if (!supported(g, dev, part, PARTS))
                continue;
            if (strided && join_dz(g, dev, m.conv.stride, dnri_graph_op_c(g, m.dgrad)->out[0],
                                   part[DGRAD].out[0]))
                part[SPREAD].def = NULL;
            else if (strided && rows > 0)
                continue;
            DNR_TRY(put(g, part,
                        (place[]){{m.bwd, DZ, SUBSAMPLE},
                                  {m.wgrad, SUBSAMPLE, DGRAD},
                                  {m.dgrad, DGRAD, PARTS}}));
        }
    dnri_algbn_attr *first = first_coef(g);
    if (first)
        first->first = true;
    return join_plain(g, dev);
}

/* ---- forward */

/* The convolution, its norm, and the Gram matrix that backward makes of what the convolution reads. */
typedef struct forward {
    int conv, norm, gram;
} forward;

static bool matches_forward(const dnr_graph *g, int i, forward *m)
{
    const dnri_op *norm = dnri_graph_op_c(g, i);
    if (norm->def != &dnri_def_norm_train)
        return false;
    const dnr_tid x = norm->in[N_X];
    int reads = 0;
    *m = (forward){.conv = conv_of(g, x), .norm = i, .gram = -1};
    for (int k = 0; k < dnri_graph_ops(g); k++) {
        const dnri_op *op = dnri_graph_op_c(g, k);
        for (int j = 0; j < op->n_in; j++)
            reads += op->in[j] == x;
        if (op->def == &dnri_def_algbn_coef && op->in[C_MEAN] == norm->out[N_OUT_MEAN])
            m->gram = dnri_graph_writer(g, op->in[C_GRAM]);
    }
    return m->conv >= 0 && m->gram >= 0 && reads == 1 && !dnri_graph_tensor(g, x)->keep;
}

/* EVERY and SQUARE take the convolution's place, the rest the norm's. */
enum { EVERY, SQUARE, STATS, FOLD, JOIN, FORWARD_PARTS };

static dnr_status make_forward(dnr_graph *g, const forward *m, bool first,
                               dnri_op part[FORWARD_PARTS])
{
    const dnri_op *conv = dnri_graph_op_c(g, m->conv), *norm = dnri_graph_op_c(g, m->norm),
                  *gram = dnri_graph_op_c(g, m->gram);
    const dnri_conv_attr *c = (const dnri_conv_attr *)conv->attr;
    const dnri_norm_attr *n = (const dnri_norm_attr *)norm->attr;
    const dnr_desc x = *dnri_desc(g, norm->in[N_X]), d = *dnri_desc(g, conv->in[0]);
    const dnri_shortcut_attr every = {(int32_t)d.dim[3], c->stride, c->h, c->w, d.dim[3]};
    const dnri_algbn_attr attr = {.rows = x.dim[0] * x.dim[1] * x.dim[2]};
    const dnri_algbn_stats_attr stats = {attr.rows, n->eps, n->momentum, first};
    const dnri_algbn_join_attr join = {n->relu};
    const dnr_tid w = conv->in[1], header = dnri_slab_tensor(g, DNRI_HEADER),
                  state = dnri_slab_tensor(g, DNRI_STATE);
    dnr_tid a = conv->in[0];
    if (c->stride > 1) {
        DNR_TRY(
            make(g, &part[EVERY], conv, &dnri_def_shortcut, &every, sizeof every, 1, &a, 1, none));
        a = part[EVERY].out[0];
    }
    DNR_TRY(make(g, &part[SQUARE], conv, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, DNRI_NONE}, 2,
                 gram->out));
    const dnr_tid sum_a = gram->out[1], mean = norm->out[N_OUT_MEAN],
                  invstd = norm->out[N_OUT_INVSTD];
    DNR_TRY(make(g, &part[STATS], norm, &dnri_def_algbn_stats, &stats, sizeof stats, 7,
                 (dnr_tid[]){gram->out[0], sum_a, a, w, norm->in[N_MEAN], norm->in[N_VAR], header},
                 3, (dnr_tid[]){mean, invstd, state}));
    const bool low = dnri_graph_numerics(g)->compute != dnri_graph_numerics(g)->master;
    DNR_TRY(make(g, &part[FOLD], norm, &dnri_def_algbn_fold, &attr, sizeof attr, 5,
                 (dnr_tid[]){w, sum_a, norm->in[N_GAMMA], norm->in[N_BETA], invstd}, low ? 3 : 2,
                 none));
    const dnr_tid *fold = part[FOLD].out;
    const bool mask = norm->n_out > N_MASK;
    return make(g, &part[JOIN], norm, &dnri_def_algbn_join, &join, sizeof join, 5,
                (dnr_tid[]){a, fold[0], fold[1], norm->in[N_RESIDUAL], low ? fold[2] : DNRI_NONE},
                mask ? 2 : 1, (dnr_tid[]){norm->out[N_Y], mask ? norm->out[N_MASK] : DNRI_NONE});
}

dnr_status dnri_fuse_algbn_forward(dnr_graph *g, dnr_device *dev)
{
    DNR_TRY(dnri_graph_status(g));
    forward m;
    bool first = true;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        if (!matches_forward(g, i, &m))
            continue;
        dnri_op part[FORWARD_PARTS] = {{0}};
        DNR_TRY(make_forward(g, &m, first, part));
        if (!supported(g, dev, part, FORWARD_PARTS))
            continue;
        DNR_TRY(
            put(g, part,
                (place[]){{m.conv, EVERY, STATS}, {m.norm, STATS, FORWARD_PARTS}, {m.gram, 0, 0}}));
        first_coef(g)->first = first = false;
    }
    return DNR_OK;
}
