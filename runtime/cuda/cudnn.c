/* cudnn.c: one convolution as a cuDNN operation graph, alone or with sums over its result, and the engine configurations that cuDNN proposes for it. */
#include "convplan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UID_X = 1, UID_W, UID_Y, UID_SUM, UID_SQSUM, UID_BIAS, UID_RESIDUAL, UID_HIDDEN };
enum { ASKED = 16, MAX_KNOBS = CUDNN_KNOB_TYPE_COUNTS };
#define REDUCED (1u << CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION)

/* Descriptors live as long as the plan made from them: cuDNN does not say which of them it still reads. */
struct dnri_cudnn_keep {
    int n, room;
    cudnnBackendDescriptor_t *d;
};
typedef struct dnri_cudnn_keep keep;

dnri_cudnn_keep *dnri_cudnn_keep_new(void)
{
    return calloc(1, sizeof(keep));
}

void dnri_cudnn_keep_free(keep *k)
{
    if (!k)
        return;
    while (k->n > 0)
        (void)cudnnBackendDestroyDescriptor(k->d[--k->n]);
    free(k->d);
    free(k);
}

static dnr_status make(keep *k, cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out)
{
    if (k->n == k->room) {
        int room = k->room ? 2 * k->room : 64;
        cudnnBackendDescriptor_t *d = realloc(k->d, (size_t)room * sizeof *d);
        if (!d)
            return DNR_FAIL_NOMEM();
        k->d = d;
        k->room = room;
    }
    DNRI_CUDNN(cudnnBackendCreateDescriptor(type, out), "making a cuDNN descriptor (%d)",
               (int)type);
    k->d[k->n++] = *out;
    return DNR_OK;
}

static dnr_status set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                      cudnnBackendAttributeType_t type, int64_t n, const void *value)
{
    DNRI_CUDNN(cudnnBackendSetAttribute(d, name, type, n, value), "setting cuDNN attribute %d",
               (int)name);
    return DNR_OK;
}

static dnr_status set_descriptor(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                 cudnnBackendDescriptor_t value)
{
    return set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

/* One value of an attribute, or false where there is none. */
static bool get(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, void *value)
{
    int64_t n = 0;
    return cudnnBackendGetAttribute(d, name, type, 1, &n, value) == CUDNN_STATUS_SUCCESS && n == 1;
}

static dnr_status finalize(cudnnBackendDescriptor_t d, const char *what)
{
    DNRI_CUDNN(cudnnBackendFinalize(d), "finalizing cuDNN's %s", what);
    return DNR_OK;
}

static cudnnDataType_t type_of(int64_t dtype)
{
    return dtype == DNR_F16    ? CUDNN_DATA_HALF
           : dtype == DNR_BF16 ? CUDNN_DATA_BFLOAT16
                               : CUDNN_DATA_FLOAT;
}

/* ---------------------------------------------------------------- the graph */

/* cuDNN's order of dimensions is n, c, h, w, whatever the strides. From UID_HIDDEN on: a tensor that exists only
 * between two operations. */
static dnr_status tensor(keep *k, int64_t uid, int64_t dtype, int64_t n, int64_t h, int64_t w,
                         int64_t c, cudnnBackendDescriptor_t *out)
{
    const bool hidden = uid >= UID_HIDDEN;
    cudnnDataType_t type = type_of(dtype);
    int64_t dims[] = {n, c, h, w}, strides[] = {h * w * c, 1, w * c, c}, align = 16;
    DNR_TRY(make(k, CUDNN_BACKEND_TENSOR_DESCRIPTOR, out));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align));
    DNR_TRY(set(*out, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &hidden));
    return finalize(*out, "tensor");
}

/* The padding that follows: as much as comes before where that gives the size of the output, else what does. */
static int64_t pad_after(const dnri_conv_problem *p, int64_t in, int64_t out)
{
    bool even = (in + 2 * p->pad - p->kernel) / p->stride + 1 == out;
    return even ? p->pad : (out - 1) * p->stride + p->kernel - in - p->pad;
}

static dnr_status convolution(keep *k, const dnri_conv_problem *p, cudnnBackendDescriptor_t *out)
{
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    int64_t two = 2, one[] = {1, 1}, pad[] = {p->pad, p->pad}, stride[] = {p->stride, p->stride};
    int64_t after[] = {pad_after(p, p->h, p->p), pad_after(p, p->w, p->q)};
    DNR_TRY(make(k, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, out));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &two));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, pad));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, after));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, stride));
    DNR_TRY(set(*out, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, one));
    return finalize(*out, "convolution");
}

/* The operation of a problem's convolution, and y. */
static dnr_status operation(keep *k, const dnri_conv_problem *p, cudnnBackendDescriptor_t *y,
                            cudnnBackendDescriptor_t *out)
{
    static const struct {
        cudnnBackendDescriptorType_t type;
        cudnnBackendAttributeName_t x, w, y, conv, alpha, beta;
    } kinds[] = {
        [DNRI_FPROP] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
        [DNRI_DGRAD] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
        [DNRI_WGRAD] = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA},
    };
    const bool act = p->kind == DNRI_FPROP_ACT;
    const int64_t kind = act || p->kind == DNRI_FPROP_STATS ? DNRI_FPROP : p->kind;
    cudnnBackendDescriptor_t x, w, conv;
    float one = 1, zero = 0;
    DNR_TRY(tensor(k, UID_X, p->type, p->n, p->h, p->w, p->c, &x));
    DNR_TRY(tensor(k, UID_W, p->type, p->k, p->kernel, p->kernel, p->c, &w));
    DNR_TRY(
        tensor(k, act ? UID_HIDDEN : UID_Y, act ? DNR_F32 : p->type, p->n, p->p, p->q, p->k, y));
    DNR_TRY(convolution(k, p, &conv));
    DNR_TRY(make(k, kinds[kind].type, out));
    DNR_TRY(set_descriptor(*out, kinds[kind].x, x));
    DNR_TRY(set_descriptor(*out, kinds[kind].w, w));
    DNR_TRY(set_descriptor(*out, kinds[kind].y, *y));
    DNR_TRY(set_descriptor(*out, kinds[kind].conv, conv));
    DNR_TRY(set(*out, kinds[kind].alpha, CUDNN_TYPE_FLOAT, 1, &one));
    DNR_TRY(set(*out, kinds[kind].beta, CUDNN_TYPE_FLOAT, 1, &zero));
    return finalize(*out, "convolution operation");
}

static dnr_status statistics(keep *k, const dnri_conv_problem *p, cudnnBackendDescriptor_t y,
                             cudnnBackendDescriptor_t *out)
{
    cudnnGenStatsMode_t mode = CUDNN_GENSTATS_SUM_SQSUM;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t sum, sqsum;
    DNR_TRY(tensor(k, UID_SUM, DNR_F32, 1, 1, 1, p->k, &sum));
    DNR_TRY(tensor(k, UID_SQSUM, DNR_F32, 1, 1, 1, p->k, &sqsum));
    DNR_TRY(make(k, CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR, out));
    DNR_TRY(set(*out, CUDNN_ATTR_OPERATION_GENSTATS_MODE, CUDNN_TYPE_GENSTATS_MODE, 1, &mode));
    DNR_TRY(set(*out, CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type));
    DNR_TRY(set_descriptor(*out, CUDNN_ATTR_OPERATION_GENSTATS_XDESC, y));
    DNR_TRY(set_descriptor(*out, CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, sum));
    DNR_TRY(set_descriptor(*out, CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, sqsum));
    return finalize(*out, "statistics operation");
}

/* out = a + b, or ReLU of a where b is NULL */
static dnr_status pointwise(keep *k, cudnnBackendDescriptor_t a, cudnnBackendDescriptor_t b,
                            cudnnBackendDescriptor_t out, cudnnBackendDescriptor_t *op)
{
    cudnnPointwiseMode_t mode = b ? CUDNN_POINTWISE_ADD : CUDNN_POINTWISE_RELU_FWD;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t what;
    DNR_TRY(make(k, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, &what));
    DNR_TRY(set(what, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode));
    DNR_TRY(set(what, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type));
    DNR_TRY(finalize(what, "pointwise mode"));
    DNR_TRY(make(k, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, op));
    DNR_TRY(set_descriptor(*op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, what));
    DNR_TRY(set_descriptor(*op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a));
    if (b)
        DNR_TRY(set_descriptor(*op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b));
    DNR_TRY(set_descriptor(*op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out));
    return finalize(*op, "pointwise operation");
}

/* What turns the convolution's result into y; appends to op. Precompiled engines want this order, and in 16 bits a bias of
 * that type. */
static dnr_status epilogue(keep *k, const dnri_conv_problem *p, cudnnBackendDescriptor_t v,
                           cudnnBackendDescriptor_t *op, int64_t *n)
{
    const int64_t steps = p->residual + 1 + p->relu;
    cudnnBackendDescriptor_t operand;
    for (int64_t i = 0; i < steps; i++) {
        const bool last = i + 1 == steps;
        cudnnBackendDescriptor_t next;
        DNR_TRY(tensor(k, last ? UID_Y : UID_HIDDEN + 1 + i, last ? p->type : DNR_F32, p->n, p->p,
                       p->q, p->k, &next));
        if (i < p->residual)
            DNR_TRY(tensor(k, UID_RESIDUAL, p->type, p->n, p->p, p->q, p->k, &operand));
        else if (i == p->residual)
            DNR_TRY(tensor(k, UID_BIAS, p->type, 1, 1, 1, p->k, &operand));
        else
            operand = NULL;
        DNR_TRY(pointwise(k, v, operand, next, &op[(*n)++]));
        v = next;
    }
    return DNR_OK;
}

static dnr_status graph(keep *k, const dnri_cudnn_target *t, const dnri_conv_problem *p,
                        cudnnBackendDescriptor_t *out)
{
    cudnnBackendDescriptor_t op[4], y;
    int64_t n = 1;
    DNR_TRY(operation(k, p, &y, &op[0]));
    if (p->kind == DNRI_FPROP_STATS)
        DNR_TRY(statistics(k, p, y, &op[n++]));
    if (p->kind == DNRI_FPROP_ACT)
        DNR_TRY(epilogue(k, p, y, op, &n));
    DNR_TRY(make(k, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, out));
    if (t->handle)
        DNR_TRY(set(*out, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &t->handle));
    DNR_TRY(set(*out, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n, op));
    return finalize(*out, "operation graph");
}

/* ---------------------------------------------------------------- configurations */

/* The configurations that one heuristic proposes; none is no error. */
static dnr_status propose(keep *k, const dnri_cudnn_target *t, cudnnBackendDescriptor_t og,
                          cudnnBackendHeurMode_t mode, cudnnBackendDescriptor_t cfg[ASKED], int *n)
{
    cudnnBackendDescriptor_t heur;
    int64_t count = 0;
    *n = 0;
    DNR_TRY(make(k, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heur));
    DNR_TRY(set_descriptor(heur, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, og));
    DNR_TRY(set(heur, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode));
    if (t->device)
        DNR_TRY(set_descriptor(heur, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, t->device));
    if (cudnnBackendFinalize(heur) != CUDNN_STATUS_SUCCESS)
        return DNR_OK;
    for (int i = 0; i < ASKED; i++)
        DNR_TRY(make(k, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &cfg[i]));
    if (cudnnBackendGetAttribute(heur, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                 ASKED, &count, cfg) == CUDNN_STATUS_SUCCESS)
        *n = (int)(count < ASKED ? count : ASKED);
    return DNR_OK;
}

/* What an engine says of itself, a bit for each note. */
static unsigned numerical_notes(cudnnBackendDescriptor_t engine)
{
    cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    int64_t n = 0;
    unsigned bits = 0;
    if (cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                 CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n,
                                 notes) == CUDNN_STATUS_SUCCESS)
        for (int64_t i = 0; i < n; i++)
            bits |= 1u << notes[i];
    return bits;
}

static bool compiles_at_run_time(cudnnBackendDescriptor_t engine)
{
    cudnnBackendBehaviorNote_t notes[CUDNN_BEHAVIOR_NOTE_TYPE_COUNT];
    int64_t n = 0;
    if (cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE,
                                 CUDNN_BEHAVIOR_NOTE_TYPE_COUNT, &n, notes) == CUDNN_STATUS_SUCCESS)
        for (int64_t i = 0; i < n; i++)
            if (notes[i] == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION)
                return true;
    return false;
}

/* May an engine with these notes compute `p`? fp32 stays fp32 unless TF32 is allowed, and the large Winograd tiles
 * lose too many digits. Engines that may sum in less than fp32 are only taken on proof: see tune.c. */
static bool allowed(const dnri_conv_problem *p, unsigned notes)
{
    unsigned no = 1u << CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 |
                  1u << CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13;
    if (p->deterministic)
        no |= 1u << CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    if (p->deterministic || !p->benchmark || p->type == DNR_F32 || p->kind == DNRI_FPROP_STATS)
        no |= REDUCED;
    if (p->type == DNR_F32 && !p->tf32)
        no |=
            1u << CUDNN_NUMERICAL_NOTE_TENSOR_CORE | 1u << CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
    return (notes & no) == 0;
}

/* Reads a configuration; and writes it as "cudnn eng67 k2=4,13=0". */
static dnr_status describe(keep *k, cudnnBackendDescriptor_t cfg, cudnnBackendDescriptor_t engine,
                           dnri_cudnn_config *config, char impl[64])
{
    cudnnBackendDescriptor_t knob[MAX_KNOBS];
    int64_t n = 0;
    *config = (dnri_cudnn_config){.engine = -1};
    (void)get(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, &config->engine);
    int len = snprintf(impl, 64, "cudnn eng%d", (int)config->engine);
    for (int i = 0; i < MAX_KNOBS; i++)
        DNR_TRY(make(k, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &knob[i]));
    if (cudnnBackendGetAttribute(cfg, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_KNOBS, &n,
                                 knob) != CUDNN_STATUS_SUCCESS)
        return DNR_OK;
    for (int i = 0; i < n && i < MAX_KNOBS; i++) {
        cudnnBackendKnobType_t type;
        int64_t value;
        if (!get(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, &type) ||
            !get(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, &value))
            continue;
        if (len < 63)
            len += snprintf(impl + len, (size_t)(64 - len), "%s%d=%lld", i ? "," : " k", (int)type,
                            (long long)value);
        if (config->n >= 0 && config->n < DNRI_KNOBS) {
            config->type[config->n] = type;
            config->value[config->n++] = value;
        } else {
            config->n = -1;
        }
    }
    return DNR_OK;
}

enum when { PRECOMPILED, RUN_TIME, EITHER }; /* is an engine compiled */

/* A plan from a configuration; c->plan stays NULL where it is not allowed, refused or too large. */
static dnr_status try_cfg(keep *k, const dnri_cudnn_target *t, const dnri_conv_problem *p,
                          enum when when, cudnnBackendDescriptor_t cfg, dnri_conv_candidate *c)
{
    cudnnBackendDescriptor_t engine, plan;
    int64_t workspace = 0;
    c->plan = NULL;
    DNR_TRY(make(k, CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine));
    if (!get(cfg, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, &engine))
        return DNR_OK;
    unsigned notes = numerical_notes(engine);
    if (!allowed(p, notes) ||
        (when != EITHER && when != (compiles_at_run_time(engine) ? RUN_TIME : PRECOMPILED)))
        return DNR_OK;
    c->doubtful = notes & REDUCED;
    DNR_TRY(describe(k, cfg, engine, &c->config, c->impl));
    DNR_TRY(make(k, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan));
    if (t->handle)
        DNR_TRY(set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &t->handle));
    if (t->device)
        DNR_TRY(set_descriptor(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, t->device));
    DNR_TRY(set_descriptor(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, cfg));
    if (cudnnBackendFinalize(plan) != CUDNN_STATUS_SUCCESS) {
        if (!*t->said_refused)
            dnri_log(DNR_LOG_INFO, "%s was proposed but refused by cuDNN; the next one is taken",
                     c->impl);
        *t->said_refused = true;
        return DNR_OK;
    }
    if (!get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, &workspace) ||
        workspace > p->workspace_cap)
        return DNR_OK;
    c->workspace = (size_t)workspace;
    c->plan = plan;
    return DNR_OK;
}

/* Engines compiled at run time take half a second each to build, so they come last; where there is another way than one
 * plan they are left out. */
dnr_status dnri_cudnn_candidates(keep *k, const dnri_cudnn_target *t, const dnri_conv_problem *p,
                                 int max, dnri_conv_candidate *c, int *n)
{
    static const struct {
        cudnnBackendHeurMode_t mode;
        bool run_time, last_resort;
    } rounds[] = {
        {CUDNN_HEUR_MODE_A, false, false},       {CUDNN_HEUR_MODE_B, false, false},
        {CUDNN_HEUR_MODE_FALLBACK, false, true}, {CUDNN_HEUR_MODE_A, true, true},
        {CUDNN_HEUR_MODE_FALLBACK, true, true},
    };
    cudnnBackendDescriptor_t og;
    *n = 0;
    DNR_TRY(graph(k, t, p, &og));
    for (size_t r = 0; r < sizeof rounds / sizeof rounds[0]; r++) {
        cudnnBackendDescriptor_t cfg[ASKED];
        int proposed;
        if (*n == max || (*n > 0 && rounds[r].last_resort) ||
            (rounds[r].run_time && dnri_conv_splits(p)))
            break;
        DNR_TRY(propose(k, t, og, rounds[r].mode, cfg, &proposed));
        for (int i = 0; i < proposed && *n < max; i++) {
            bool known = false;
            DNR_TRY(try_cfg(k, t, p, rounds[r].run_time ? RUN_TIME : PRECOMPILED, cfg[i], &c[*n]));
            for (int j = 0; c[*n].plan && j < *n && !known; j++)
                known = strcmp(c[j].impl, c[*n].impl) == 0;
            if (c[*n].plan && !known)
                (*n)++;
        }
    }
    return DNR_OK;
}

dnr_status dnri_cudnn_rebuild(keep *k, const dnri_cudnn_target *t, const dnri_conv_problem *p,
                              const dnri_cudnn_config *config, dnri_conv_candidate *c)
{
    cudnnBackendDescriptor_t og, engine, cfg, knob[DNRI_KNOBS];
    c->plan = NULL;
    DNR_TRY(graph(k, t, p, &og));
    DNR_TRY(make(k, CUDNN_BACKEND_ENGINE_DESCRIPTOR, &engine));
    DNR_TRY(set_descriptor(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, og));
    if (t->device)
        DNR_TRY(set_descriptor(engine, CUDNN_ATTR_ENGINE_DEVICEPROP, t->device));
    DNR_TRY(make(k, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &cfg));
    /* from here on a refusal means that the configuration is no longer known */
    if (cudnnBackendSetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1,
                                 &config->engine) != CUDNN_STATUS_SUCCESS ||
        cudnnBackendFinalize(engine) != CUDNN_STATUS_SUCCESS)
        return DNR_OK;
    for (int i = 0; i < config->n; i++) {
        cudnnBackendKnobType_t type = (cudnnBackendKnobType_t)config->type[i];
        DNR_TRY(make(k, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, &knob[i]));
        if (cudnnBackendSetAttribute(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                                     CUDNN_TYPE_KNOB_TYPE, 1, &type) != CUDNN_STATUS_SUCCESS ||
            cudnnBackendSetAttribute(knob[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64,
                                     1, &config->value[i]) != CUDNN_STATUS_SUCCESS ||
            cudnnBackendFinalize(knob[i]) != CUDNN_STATUS_SUCCESS)
            return DNR_OK;
    }
    DNR_TRY(set_descriptor(cfg, CUDNN_ATTR_ENGINECFG_ENGINE, engine));
    if ((config->n > 0 && cudnnBackendSetAttribute(cfg, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, config->n,
                                                   knob) != CUDNN_STATUS_SUCCESS) ||
        cudnnBackendFinalize(cfg) != CUDNN_STATUS_SUCCESS)
        return DNR_OK;
    return try_cfg(k, t, p, EITHER, cfg, c);
}

/* ---------------------------------------------------------------- running */

dnr_status dnri_cudnn_pack(cudnnBackendDescriptor_t *out, const dnri_conv_at *at)
{
    int64_t uids[UID_HIDDEN], n = 0;
    void *const all[] = {at->x, at->w, at->y, at->sum, at->sqsum, at->bias, at->residual};
    void *addresses[UID_HIDDEN];
    for (int64_t i = 0; i < UID_HIDDEN - UID_X; i++) /* in the order of the UIDs */
        if (all[i]) {
            uids[n] = UID_X + i;
            addresses[n++] = all[i];
        }
    DNRI_CUDNN(cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, out),
               "making a variant pack");
    DNR_TRY(set(*out, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids));
    DNR_TRY(set(*out, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, addresses));
    DNR_TRY(set(*out, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &at->workspace));
    return finalize(*out, "variant pack");
}

dnr_status dnri_cudnn_probe(const char *json, const dnri_conv_problem *p, bool again, char impl[64],
                            size_t *workspace)
{
    bool said = true;
    dnri_cudnn_target t = {.said_refused = &said};
    dnri_conv_candidate c;
    int n = 0;
    keep *k = dnri_cudnn_keep_new();
    impl[0] = 0;
    *workspace = 0;
    if (!k)
        return DNR_FAIL_NOMEM();
    dnr_status st;
    DNR_GOTO(st, make(k, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &t.device));
    DNR_GOTO(st, set(t.device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                     (int64_t)strlen(json), json));
    DNR_GOTO(st, finalize(t.device, "device properties"));
    DNR_GOTO(st, dnri_cudnn_candidates(k, &t, p, 1, &c, &n));
    if (n && again) {
        const dnri_cudnn_config config = c.config;
        DNR_GOTO(st, dnri_cudnn_rebuild(k, &t, p, &config, &c));
        n = c.plan != NULL;
    }
    if (n) {
        memcpy(impl, c.impl, sizeof c.impl);
        *workspace = c.workspace;
    }
out:
    dnri_cudnn_keep_free(k);
    return st;
}
