/* onednn.c: the one file that knows oneDNN's versions. 2.x describes an op, then makes a primitive descriptor
 * of it, and its memory descriptors are values; 3.x does both at once, and they are handles. */
#include "onednn.h"

#include <dnnl.h>
#include <stdlib.h>
#include <string.h>

struct dnri_dnn {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
};

/* ---- what differs between versions */

typedef struct tensor_md {
    dnnl_memory_desc_t v;
    bool set;
} tensor_md;

/* One op's primitive descriptor: `alg` and friends as oneDNN wants them. */
typedef struct pd_args {
    dnri_dnn_pass pass;
    bool dense, training;
    const tensor_md *md; /* DNRI_DNN_SRC … */
    dnnl_dims_t stride, pad;
    const_dnnl_primitive_attr_t attr;
    int candidate; /* oneDNN's first choice, or one of its next */
} pd_args;

static dnnl_prop_kind_t forward_kind(const pd_args *a)
{
    return a->training ? dnnl_forward_training : dnnl_forward_inference;
}

#if DNNL_VERSION_MAJOR >= 3
#define NO_MORE dnnl_last_impl_reached
typedef const_dnnl_memory_desc_t md_ref;

static md_ref md_of(const tensor_md *m)
{
    return m->set ? m->v : NULL;
}

static dnnl_status_t md_make(tensor_md *m, int n, const dnnl_dims_t dims, dnnl_data_type_t type,
                             dnnl_format_tag_t tag)
{
    dnnl_status_t s = dnnl_memory_desc_create_with_tag(&m->v, n, dims, type, tag);
    m->set = s == dnnl_success;
    return s;
}

static void md_drop(tensor_md *m)
{
    if (m->set)
        dnnl_memory_desc_destroy(m->v);
}

static dnnl_status_t pd_first(dnri_dnn *e, const pd_args *a, const_dnnl_primitive_desc_t hint,
                              dnnl_primitive_desc_t *pd)
{
    md_ref src = md_of(&a->md[DNRI_DNN_SRC]), w = md_of(&a->md[DNRI_DNN_WEIGHTS]);
    md_ref bias = md_of(&a->md[DNRI_DNN_BIAS]), dst = md_of(&a->md[DNRI_DNN_DST]);
    const dnnl_dims_t dilation = {0, 0};
    dnnl_alg_kind_t alg = dnnl_convolution_direct;
    switch (a->pass) {
    case DNRI_DNN_FPROP:
        return a->dense ? dnnl_inner_product_forward_primitive_desc_create(
                              pd, e->engine, forward_kind(a), src, w, bias, dst, a->attr)
                        : dnnl_convolution_forward_primitive_desc_create(
                              pd, e->engine, forward_kind(a), alg, src, w, bias, dst, a->stride,
                              dilation, a->pad, a->pad, a->attr);
    case DNRI_DNN_DGRAD:
        return a->dense ? dnnl_inner_product_backward_data_primitive_desc_create(
                              pd, e->engine, src, w, dst, hint, a->attr)
                        : dnnl_convolution_backward_data_primitive_desc_create(
                              pd, e->engine, alg, src, w, dst, a->stride, dilation, a->pad, a->pad,
                              hint, a->attr);
    case DNRI_DNN_WGRAD:
        return a->dense ? dnnl_inner_product_backward_weights_primitive_desc_create(
                              pd, e->engine, src, w, bias, dst, hint, a->attr)
                        : dnnl_convolution_backward_weights_primitive_desc_create(
                              pd, e->engine, alg, src, w, bias, dst, a->stride, dilation, a->pad,
                              a->pad, hint, a->attr);
    }
    return dnnl_invalid_arguments;
}

static dnnl_status_t add_relu(dnnl_post_ops_t p)
{
    return dnnl_post_ops_append_eltwise(p, dnnl_eltwise_relu, 0, 0);
}

static dnnl_status_t add_sum(dnnl_post_ops_t p)
{
    return dnnl_post_ops_append_sum(p, 1, 0, dnnl_data_type_undef);
}

static dnnl_status_t pd_make(dnri_dnn *e, const pd_args *a, const_dnnl_primitive_desc_t hint,
                             dnnl_primitive_desc_t *pd)
{
    dnnl_status_t s = pd_first(e, a, hint, pd);
    for (int i = 0; i < a->candidate && s == dnnl_success; i++)
        s = dnnl_primitive_desc_next_impl(*pd);
    return s;
}
#else
#define NO_MORE dnnl_iterator_ends
typedef const dnnl_memory_desc_t *md_ref;

static md_ref md_of(const tensor_md *m)
{
    return m->set ? &m->v : NULL;
}

static dnnl_status_t md_make(tensor_md *m, int n, const dnnl_dims_t dims, dnnl_data_type_t type,
                             dnnl_format_tag_t tag)
{
    m->set = true;
    return dnnl_memory_desc_init_by_tag(&m->v, n, dims, type, tag);
}

static void md_drop(tensor_md *m)
{
}

static dnnl_status_t add_relu(dnnl_post_ops_t p)
{
    return dnnl_post_ops_append_eltwise(p, 1, dnnl_eltwise_relu, 0, 0);
}

static dnnl_status_t add_sum(dnnl_post_ops_t p)
{
    return dnnl_post_ops_append_sum(p, 1);
}

static dnnl_status_t pd_make(dnri_dnn *e, const pd_args *a, const_dnnl_primitive_desc_t hint,
                             dnnl_primitive_desc_t *pd)
{
    md_ref src = md_of(&a->md[DNRI_DNN_SRC]), w = md_of(&a->md[DNRI_DNN_WEIGHTS]);
    md_ref bias = md_of(&a->md[DNRI_DNN_BIAS]), dst = md_of(&a->md[DNRI_DNN_DST]);
    dnnl_alg_kind_t alg = dnnl_convolution_direct;
    dnnl_convolution_desc_t conv;
    dnnl_inner_product_desc_t dense;
    dnnl_status_t s = dnnl_invalid_arguments;
    switch (a->pass) {
    case DNRI_DNN_FPROP:
        s = a->dense
                ? dnnl_inner_product_forward_desc_init(&dense, forward_kind(a), src, w, bias, dst)
                : dnnl_convolution_forward_desc_init(&conv, forward_kind(a), alg, src, w, bias, dst,
                                                     a->stride, a->pad, a->pad);
        break;
    case DNRI_DNN_DGRAD:
        s = a->dense ? dnnl_inner_product_backward_data_desc_init(&dense, src, w, dst)
                     : dnnl_convolution_backward_data_desc_init(&conv, alg, src, w, dst, a->stride,
                                                                a->pad, a->pad);
        break;
    case DNRI_DNN_WGRAD:
        s = a->dense ? dnnl_inner_product_backward_weights_desc_init(&dense, src, w, bias, dst)
                     : dnnl_convolution_backward_weights_desc_init(&conv, alg, src, w, bias, dst,
                                                                   a->stride, a->pad, a->pad);
        break;
    }
    if (s != dnnl_success)
        return s;
    dnnl_primitive_desc_iterator_t it = NULL;
    s = dnnl_primitive_desc_iterator_create(
        &it, a->dense ? (const void *)&dense : (const void *)&conv, a->attr, e->engine, hint);
    for (int i = 0; i < a->candidate && s == dnnl_success; i++)
        s = dnnl_primitive_desc_iterator_next(it);
    if (s == dnnl_success && !(*pd = dnnl_primitive_desc_iterator_fetch(it)))
        s = dnnl_out_of_memory;
    if (it)
        dnnl_primitive_desc_iterator_destroy(it);
    return s;
}
#endif

static dnnl_status_t attr_make(bool deterministic, dnnl_primitive_attr_t *attr)
{
    dnnl_status_t s = dnnl_primitive_attr_create(attr);
    if (s == dnnl_success)
        s = dnnl_primitive_attr_set_scratchpad_mode(*attr, dnnl_scratchpad_mode_user);
        /* before 3.4 nothing depends on timing anyway */
#if DNNL_VERSION_MAJOR > 3 || (DNNL_VERSION_MAJOR == 3 && DNNL_VERSION_MINOR >= 4)
    if (s == dnnl_success && deterministic)
        s = dnnl_primitive_attr_set_deterministic(*attr, 1);
#endif
    return s;
}

/* ---- the same in all versions */

static dnr_status fail(const char *where, const char *what, dnnl_status_t s)
{
    char version[32];
    dnri_dnn_version(version, sizeof version);
    if (s == dnnl_out_of_memory)
        return dnri_fail(DNR_EMEM, where, "lower train.batch", "oneDNN is out of memory in %s",
                         what);
    return dnri_fail(DNR_EDEVICE, where,
                     "try oneDNN 2.6 or a later one, or another precision or shape",
                     "oneDNN %s cannot do %s: %s", version, what,
                     s == dnnl_unimplemented       ? "not implemented"
                     : s == dnnl_invalid_arguments ? "invalid arguments"
                                                   : "runtime error");
}

#define DNN_GOTO(what, expr)                                                                       \
    do {                                                                                           \
        dnnl_status_t dnn_s_ = (expr);                                                             \
        if (dnn_s_ != dnnl_success) {                                                              \
            st = fail(DNRI_HERE, what, dnn_s_);                                                    \
            goto out;                                                                              \
        }                                                                                          \
    } while (0)

void dnri_dnn_close(dnri_dnn *e)
{
    if (!e)
        return;
    if (e->stream)
        dnnl_stream_destroy(e->stream);
    if (e->engine)
        dnnl_engine_destroy(e->engine);
    free(e);
}

dnr_status dnri_dnn_open(dnri_dnn **out)
{
    dnr_status st = DNR_OK;
    dnri_dnn *e = calloc(1, sizeof *e);
    if (!e)
        return DNR_FAIL_NOMEM();
    /* A cached primitive stands in for every other candidate of its op. Without the cache, ops of one shape are made
     * one by one, which takes no longer than 1 ms each. */
    DNN_GOTO("start", dnnl_set_primitive_cache_capacity(0));
    DNN_GOTO("start", dnnl_engine_create(&e->engine, dnnl_cpu, 0));
    DNN_GOTO("start", dnnl_stream_create(&e->stream, e->engine, dnnl_stream_default_flags));
    *out = e;
    return DNR_OK;
out:
    dnri_dnn_close(e);
    return st;
}

void dnri_dnn_version(char *buf, size_t size)
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(buf, size, "%d.%d.%d", v->major, v->minor, v->patch);
}

/* An instruction set's bits contain those of the sets that it includes. */
static bool has_isa(dnnl_cpu_isa_t isa)
{
    return (dnnl_get_effective_cpu_isa() & isa) == isa;
}

bool dnri_dnn_native_bf16(void)
{
    return has_isa(dnnl_cpu_isa_avx512_core_bf16);
}

bool dnri_dnn_amx(void)
{
    return has_isa(dnnl_cpu_isa_avx512_core_amx);
}

/* A primitive and its arguments. Memories SRC … DST and RESIDUAL hold the caller's addresses, PACKED the weights as
 * the implementation wants them, SCRATCH + i the scratchpad of call i. */
enum { RESIDUAL = DNRI_DNN_DST + 1, PACKED, SCRATCH, MEMORIES = SCRATCH + 2 };

typedef struct call {
    dnnl_primitive_t primitive;
    int n;
    dnnl_exec_arg_t arg[6];
} call;

struct dnri_dnn_op {
    dnri_dnn *e;
    int calls;
    call call[2];
    dnnl_memory_t mem[MEMORIES];
    size_t packed, scratch; /* bytes */
    char impl[64];
};

void dnri_dnn_drop(dnri_dnn_op *op)
{
    if (!op)
        return;
    for (int i = 0; i < 2; i++)
        if (op->call[i].primitive)
            dnnl_primitive_destroy(op->call[i].primitive);
    for (int i = 0; i < MEMORIES; i++)
        if (op->mem[i])
            dnnl_memory_destroy(op->mem[i]);
    free(op);
}

static void add_arg(call *c, int arg, dnnl_memory_t mem)
{
    if (mem)
        c->arg[c->n++] = (dnnl_exec_arg_t){arg, mem};
}

static size_t round256(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

static dnr_status add_memory(dnri_dnn_op *op, int which, md_ref md)
{
    dnr_status st = DNR_OK;
    DNN_GOTO("memory", dnnl_memory_create(&op->mem[which], md, op->e->engine, DNNL_MEMORY_NONE));
out:
    return st;
}

/* Makes call i of a primitive descriptor and its scratchpad. */
static dnr_status add_call(dnri_dnn_op *op, int i, const_dnnl_primitive_desc_t pd)
{
    dnr_status st = DNR_OK;
    DNN_GOTO("make the primitive", dnnl_primitive_create(&op->call[i].primitive, pd));
    md_ref scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    size_t bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
    if (bytes) {
        DNR_GOTO(st, add_memory(op, SCRATCH + i, scratch));
        add_arg(&op->call[i], DNNL_ARG_SCRATCHPAD, op->mem[SCRATCH + i]);
        if (bytes > op->scratch)
            op->scratch = bytes;
    }
out:
    return st;
}

/* Convolutions gain from weights laid out as they like; for a dense layer the reorder would cost more than
 * the product. */
static dnnl_format_tag_t weights_tag(const dnri_dnn_desc *d)
{
    return d->dense ? dnnl_ab : dnnl_format_tag_any;
}

static dnr_status make_mds(const dnri_dnn_desc *d, tensor_md md[4], tensor_md *plain)
{
    dnr_status st = DNR_OK;
    for (int i = 0; i < 4; i++) {
        const dnr_desc *s = &d->shape[i];
        const dnnl_dims_t dims = {s->dim[0], s->dim[3], s->dim[1], s->dim[2]}; /* NCHW, or OIHW */
        dnnl_data_type_t type = s->dtype == DNR_BF16 ? dnnl_bf16 : dnnl_f32;
        if (i == DNRI_DNN_BIAS) {
            const dnnl_dims_t length = {s->dim[3]};
            if (d->biased)
                DNN_GOTO("a bias", md_make(&md[i], 1, length, type, dnnl_a));
            continue;
        }
        int n = d->dense ? 2 : 4;
        dnnl_format_tag_t tag = d->dense ? dnnl_ab : dnnl_acdb;
        bool weights = i == DNRI_DNN_WEIGHTS;
        DNN_GOTO("a tensor", md_make(&md[i], n, dims, type, weights ? weights_tag(d) : tag));
        if (weights)
            DNN_GOTO("a tensor", md_make(plain, n, dims, type, tag));
    }
out:
    return st;
}

/* Where the implementation wants other weights than `plain`: the reorder, before a pass that reads them or
 * after one that writes them. Sets *packed to the memory that the implementation gets. */
static dnr_status add_reorder(dnri_dnn_op *op, const dnri_dnn_desc *d, md_ref plain, md_ref wanted,
                              const_dnnl_primitive_attr_t attr, int *main_call, int *weights)
{
    dnr_status st = DNR_OK;
    bool written = d->pass == DNRI_DNN_WGRAD;
    dnnl_primitive_desc_t pd = NULL;
    *main_call = 0;
    *weights = DNRI_DNN_WEIGHTS;
    op->calls = 1;
    if (dnnl_memory_desc_equal(plain, wanted))
        return DNR_OK;
    op->packed = dnnl_memory_desc_get_size(wanted);
    op->calls = 2;
    *main_call = written ? 0 : 1;
    *weights = PACKED;
    DNR_GOTO(st, add_memory(op, PACKED, wanted));
    DNN_GOTO("reorder weights",
             dnnl_reorder_primitive_desc_create(&pd, written ? wanted : plain, op->e->engine,
                                                written ? plain : wanted, op->e->engine, attr));
    call *c = &op->call[1 - *main_call];
    DNR_GOTO(st, add_call(op, 1 - *main_call, pd));
    add_arg(c, DNNL_ARG_FROM, op->mem[written ? PACKED : DNRI_DNN_WEIGHTS]);
    add_arg(c, DNNL_ARG_TO, op->mem[written ? DNRI_DNN_WEIGHTS : PACKED]);
out:
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    return st;
}

/* What follows a convolution, in this order. */
static dnr_status add_post_ops(const dnri_dnn_desc *d, const tensor_md *dst,
                               dnnl_primitive_attr_t attr)
{
    dnr_status st = DNR_OK;
    dnnl_post_ops_t p = NULL;
    if (!d->relu && !d->added)
        return DNR_OK;
    DNN_GOTO("set attributes", dnnl_post_ops_create(&p));
    if (d->added && d->in_place)
        DNN_GOTO("add a residual", add_sum(p));
    else if (d->added)
        DNN_GOTO("add a residual", dnnl_post_ops_append_binary(p, dnnl_binary_add, md_of(dst)));
    if (d->relu)
        DNN_GOTO("add a ReLU", add_relu(p));
    DNN_GOTO("set attributes", dnnl_primitive_attr_set_post_ops(attr, p));
out:
    if (p)
        dnnl_post_ops_destroy(p);
    return st;
}

static bool for_older_cpus(const char *impl)
{
    return dnnl_get_effective_cpu_isa() >= dnnl_cpu_isa_avx512_core &&
           (strstr(impl, "sse41") || strstr(impl, "avx2"));
}

dnr_status dnri_dnn_create(dnri_dnn *e, const dnri_dnn_desc *d, dnri_dnn_op **out)
{
    static const char *const what[2][3] = {{"conv.fprop", "conv.dgrad", "conv.wgrad"},
                                           {"dense", "dense.dgrad", "dense.wgrad"}};
    static const int arg[3][4] = {
        {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST},
        {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DIFF_DST},
        {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_BIAS, DNNL_ARG_DIFF_DST}};
    dnr_status st = DNR_OK;
    tensor_md md[4] = {0}, plain = {0}, fwd_weights = {0};
    dnnl_primitive_attr_t attr = NULL, plain_attr = NULL;
    dnnl_primitive_desc_t hint = NULL, pd = NULL;
    dnri_dnn_op *op = calloc(1, sizeof *op);
    if (!op)
        return DNR_FAIL_NOMEM();
    op->e = e;
    DNN_GOTO("set attributes", attr_make(d->deterministic, &attr));
    DNN_GOTO("set attributes", attr_make(d->deterministic, &plain_attr));
    DNR_GOTO(st, make_mds(d, md, &plain));
    DNR_GOTO(st, add_post_ops(d, &md[DNRI_DNN_DST], attr));

    pd_args a = {
        .pass = d->pass, .dense = d->dense, .training = d->training, .md = md, .attr = attr};
    for (int i = 0; i < 2; i++) {
        a.stride[i] = d->stride;
        a.pad[i] = d->pad;
    }
    if (d->pass != DNRI_DNN_FPROP) {
        /* a backward pass wants the forward one as a hint; there, weights are of the activations' type */
        const dnr_desc *s = &d->shape[DNRI_DNN_WEIGHTS];
        const dnnl_dims_t dims = {s->dim[0], s->dim[3], s->dim[1], s->dim[2]};
        DNN_GOTO("a tensor",
                 md_make(&fwd_weights, d->dense ? 2 : 4, dims,
                         d->shape[DNRI_DNN_SRC].dtype == DNR_BF16 ? dnnl_bf16 : dnnl_f32,
                         weights_tag(d)));
        tensor_md fwd_md[4] = {md[DNRI_DNN_SRC], fwd_weights, md[DNRI_DNN_BIAS], md[DNRI_DNN_DST]};
        pd_args f = a;
        f.pass = DNRI_DNN_FPROP;
        f.training = true;
        f.md = fwd_md;
        DNN_GOTO(what[d->dense][DNRI_DNN_FPROP], pd_make(e, &f, NULL, &hint));
    }
    a.candidate = d->candidate;
    dnnl_status_t made = pd_make(e, &a, hint, &pd);
    const char *impl = "unnamed";
    if (made == dnnl_success)
        dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &impl);
    if (d->candidate > 0 && (made == NO_MORE || strncmp(impl, "ref", 3) == 0))
        goto none; /* plain loops stand last, and may take minutes */
    DNN_GOTO(what[d->dense][d->pass], made);
    if (d->candidate > 0 && for_older_cpus(impl)) {
        snprintf(op->impl, sizeof op->impl, "%s", impl);
        goto out; /* no calls: not worth a try */
    }

    dnnl_query_t weights_query =
        d->pass == DNRI_DNN_WGRAD ? dnnl_query_diff_weights_md : dnnl_query_weights_md;
    md_ref wanted = dnnl_primitive_desc_query_md(pd, weights_query, 0);
    for (int i = 0; i < 4; i++)
        if (md[i].set)
            DNR_GOTO(st, add_memory(op, i, md_of(i == DNRI_DNN_WEIGHTS ? &plain : &md[i])));
    int main_call, weights;
    DNR_GOTO(st, add_reorder(op, d, md_of(&plain), wanted, plain_attr, &main_call, &weights));
    DNR_GOTO(st, add_call(op, main_call, pd));
    for (int i = 0; i < 4; i++)
        add_arg(&op->call[main_call], arg[d->pass][i],
                op->mem[i == DNRI_DNN_WEIGHTS ? weights : i]);

    if (d->added && !d->in_place) {
        DNR_GOTO(st, add_memory(op, RESIDUAL, md_of(&md[DNRI_DNN_DST])));
        add_arg(&op->call[main_call], DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1,
                op->mem[RESIDUAL]);
    }

    snprintf(op->impl, sizeof op->impl, "%s%s", impl, op->packed ? " + reorder" : "");
    goto out;
none:
    dnri_dnn_drop(op);
    op = NULL;
out:
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    if (hint)
        dnnl_primitive_desc_destroy(hint);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    if (plain_attr)
        dnnl_primitive_attr_destroy(plain_attr);
    for (int i = 0; i < 4; i++)
        md_drop(&md[i]);
    md_drop(&plain);
    md_drop(&fwd_weights);
    if (st != DNR_OK) {
        dnri_dnn_drop(op);
        op = NULL;
    }
    *out = op;
    return st;
}

size_t dnri_dnn_workspace(const dnri_dnn_op *op)
{
    return round256(op->packed) + op->scratch;
}

int dnri_dnn_launches(const dnri_dnn_op *op)
{
    return op->calls;
}

const char *dnri_dnn_impl(const dnri_dnn_op *op)
{
    return op->impl;
}

bool dnri_dnn_is_good(const dnri_dnn_op *op)
{
    const bool elsewhere = op->mem[RESIDUAL] != NULL;
    return strncmp(op->impl, "ref", 3) != 0 && !(elsewhere && strstr(op->impl, "gemm"));
}

dnr_status dnri_dnn_bind(dnri_dnn_op *op, void *const address[4], void *residual, void *workspace)
{
    dnr_status st = DNR_OK;
    for (int i = 0; i < MEMORIES; i++) {
        void *p = i <= DNRI_DNN_DST ? address[i]
                  : i == RESIDUAL   ? residual
                  : i == PACKED     ? workspace
                  : workspace       ? (char *)workspace + round256(op->packed)
                                    : NULL;
        if (op->mem[i])
            DNN_GOTO("bind", dnnl_memory_set_data_handle(op->mem[i], p));
    }
out:
    return st;
}

dnr_status dnri_dnn_run(dnri_dnn_op *op)
{
    dnr_status st = DNR_OK;
    for (int i = 0; i < op->calls; i++)
        DNN_GOTO(op->impl, dnnl_primitive_execute(op->call[i].primitive, op->e->stream,
                                                  op->call[i].n, op->call[i].arg));
out:
    return st;
}
