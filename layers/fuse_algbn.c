/* fuse_algbn.c: the backward pass of a convolution and its batch norm without the tensor between them. */
#include "fuse.h"

#include "../runtime/backend.h"

#include <stdlib.h>
#include <string.h>

enum { B_X, B_Y, B_DY, B_DY2, B_GAMMA, B_BETA, B_MEAN, B_INVSTD }; /* in of norm.bwd */
enum { B_DX, B_DGAMMA, B_DBETA, B_DRESIDUAL };                     /* its outputs */
enum { Z_DZ, Z_SUM };                                              /* out of norm.dz */

/* The op that writes t, or NULL. */
static const dnri_op *writer(const dnr_graph *g, dnr_tid t)
{
    for (int i = 0; i < dnri_graph_ops(g); i++)
        for (int k = 0; k < dnri_graph_op_c(g, i)->n_out; k++)
            if (dnri_graph_op_c(g, i)->out[k] == t)
                return dnri_graph_op_c(g, i);
    return NULL;
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
    const dnri_op *maker = writer(g, m->dz);
    if (maker && maker->def == &dnri_def_norm_dz && maker->out[Z_DZ] == m->dz)
        m->sum_dz = maker->out[Z_SUM];
    return m->sum_dz >= 0;
}

static bool matches(const dnr_graph *g, int i, int64_t rows, match *m)
{
    const dnri_op *bwd = dnri_graph_op_c(g, i);
    if (bwd->def != &dnri_def_norm_bwd)
        return false;
    const dnri_op *conv = writer(g, bwd->in[B_X]);
    if (!conv || (conv->def != &dnri_def_conv && conv->def != &dnri_def_conv_stats))
        return false;
    const dnr_desc *x = dnri_desc(g, bwd->in[B_X]);
    *m = (match){.bwd = i,
                 .conv = *(const dnri_conv_attr *)conv->attr,
                 .a = conv->in[0],
                 .w = conv->in[1],
                 .c = dnri_desc(g, conv->in[0])->dim[3],
                 .rows = x->dim[0] * x->dim[1] * x->dim[2]};
    return m->conv.kernel == 1 && m->conv.pad == 0 && x->dim[3] > m->c &&
           m->rows >= rows * x->dim[3] && find_readers(g, bwd->out[B_DX], m) && find_dz(g, bwd, m);
}

/* What takes their place: DZ norm.bwd's; SUBSAMPLE to COEF conv.wgrad's; DGRAD and SPREAD conv.dgrad's. */
enum { DZ, SUBSAMPLE, GRAM, PRODUCT, COEF, DGRAD, SPREAD, PARTS };

/* Makes part `which` after the pattern of `like`, and its outputs. */
static dnr_status make(dnr_graph *g, dnri_op part[PARTS], int which, const dnri_op *like,
                       const dnri_op_def *def, const void *attr, size_t size, int n_in,
                       const dnr_tid *in, int n_out, const dnr_tid *out)
{
    dnri_op *op = &part[which];
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
    const dnri_algbn_attr attr = {m->rows};
    const bool strided = m->conv.stride > 1;
    const dnr_tid none[6] = {DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE, DNRI_NONE};
    dnr_tid a = m->a, dz = m->dz, sum_dz = m->sum_dz;
    if (dz < 0) {
        const bool residual = ((const dnri_norm_bwd_attr *)bwd->attr)->residual;
        DNR_TRY(make(g, part, DZ, bwd, &dnri_def_norm_dz, NULL, 0, 3, bwd->in + B_Y, 2,
                     (dnr_tid[]){residual ? bwd->out[B_DRESIDUAL] : DNRI_NONE, DNRI_NONE}));
        dz = part[DZ].out[Z_DZ];
        sum_dz = part[DZ].out[Z_SUM];
    }
    if (strided) {
        DNR_TRY(make(g, part, SUBSAMPLE, wgrad, &dnri_def_shortcut, &every, sizeof every, 1, &a, 1,
                     none));
        a = part[SUBSAMPLE].out[0];
    }
    DNR_TRY(
        make(g, part, GRAM, wgrad, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, DNRI_NONE}, 2, none));
    DNR_TRY(make(g, part, PRODUCT, wgrad, &dnri_def_gram, NULL, 0, 2, (dnr_tid[]){a, dz}, 1, none));
    const dnr_tid in[] = {part[PRODUCT].out[0], part[GRAM].out[0], part[GRAM].out[1], sum_dz, m->w,
                          bwd->in[B_GAMMA],     bwd->in[B_MEAN],   bwd->in[B_INVSTD]};
    const dnr_tid out[] = {wgrad->out[0], bwd->out[B_DGAMMA], bwd->out[B_DBETA],
                           DNRI_NONE,     DNRI_NONE,          DNRI_NONE};
    DNR_TRY(make(g, part, COEF, wgrad, &dnri_def_algbn_coef, &attr, sizeof attr, 8, in, 6, out));
    const dnr_tid *coef = part[COEF].out;
    DNR_TRY(make(g, part, DGRAD, dgrad, &dnri_def_algbn_dgrad, NULL, 0, 5,
                 (dnr_tid[]){dz, a, coef[3], coef[4], coef[5]}, 1, strided ? none : dgrad->out));
    if (!strided)
        return DNR_OK;
    return make(g, part, SPREAD, dgrad, &dnri_def_shortcut_bwd, &every, sizeof every, 1,
                part[DGRAD].out, 1, dgrad->out);
}

static dnr_status put(dnr_graph *g, const match *m, const dnri_op part[PARTS])
{
    const int n = dnri_graph_ops(g);
    int left = 0;
    dnri_op *ops = malloc((size_t)(n + PARTS) * sizeof *ops);
    if (!ops)
        return DNR_FAIL_NOMEM();
    for (int i = 0; i < n; i++) {
        const bool replaced = i == m->bwd || i == m->wgrad || i == m->dgrad;
        const int first = i == m->bwd ? DZ : i == m->wgrad ? SUBSAMPLE : DGRAD;
        const int end = i == m->bwd ? SUBSAMPLE : i == m->wgrad ? DGRAD : PARTS;
        for (int k = first; replaced && k < end; k++)
            if (part[k].def)
                ops[left++] = part[k];
        if (!replaced)
            ops[left++] = *dnri_graph_op_c(g, i);
    }
    dnri_graph_replace_ops(g, ops, left);
    return DNR_OK;
}

dnr_status dnri_fuse_algbn(dnr_graph *g, dnr_device *dev, int64_t rows)
{
    DNR_TRY(dnri_graph_status(g));
    match m;
    for (int i = 0; i < dnri_graph_ops(g); i++) {
        if (!matches(g, i, rows, &m))
            continue;
        dnri_op part[PARTS] = {{0}};
        DNR_TRY(make_parts(g, &m,
                           part)); /* new tensors of parts that are not taken are of no program */
        bool all = true;
        for (int k = 0; k < PARTS; k++)
            all &= !part[k].def || dnri_device_supports(dev, g, &part[k]);
        if (all)
            DNR_TRY(put(g, &m, part));
    }
    return DNR_OK;
}
