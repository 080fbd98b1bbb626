/* session.c: cfg values to options of the library. */
#include "session.h"
#include "card.h"
#include "ranks.h"

#include <stdlib.h>
#include <string.h>

static dnr_status open_source(const cfg *c, const char *key, const char *path,
                              const char *class_map, dnr_source **out, dnr_error *err)
{
    char where[96], what[96];
    dnr_source_opts o = {
        .class_map = *class_map ? class_map : NULL,
        .classes = (int)c->model.classes,
        .synthetic_n = c->data.synthetic_n,
        .synthetic_image = (int)c->data.image,
    };
    if (dnr_source_open(path, &o, out) == DNR_OK)
        return DNR_OK;
    snprintf(what, sizeof what, "%s = %.80s", key, path);
    return tool_lib_error(err, cfg_origin(c, key, where), what);
}

/* Class k must be the same thing in both, or the accuracy means nothing. */
static dnr_status same_classes(const session *s, dnr_error *err)
{
    char where[96];
    for (int k = 0; k < dnr_source_classes(s->train) && k < dnr_source_classes(s->val); k++) {
        const char *a = dnr_source_class_name(s->train, k), *b = dnr_source_class_name(s->val, k);
        if (a && b && strcmp(a, b)) {
            tool_fail(err, DNR_EDATA, cfg_origin(&s->cfg, "data.val", where),
                      "class %d is %.60s in data.train and %.60s in data.val", k, a, b);
            return tool_remedy(err, "give both the same class folders");
        }
    }
    return DNR_OK;
}

static dnr_status open_data(session *s, int data, dnr_error *err)
{
    const cfg *c = &s->cfg;
    dnr_status st = DNR_OK;
    if ((data & SESSION_TRAIN) && !*c->data.train) {
        tool_fail(err, DNR_EUSAGE, c->path, "data.train is missing");
        return tool_remedy(err, "say where the training pictures are: data.train=FOLDER, or "
                                "data.train=synthetic to try it out");
    }
    if (data == SESSION_VAL && !*c->data.val) {
        tool_fail(err, DNR_EUSAGE, c->path, "data.val is missing");
        return tool_remedy(err, "say where the pictures to evaluate are: data.val=FOLDER");
    }
    if (data & SESSION_TRAIN)
        TOOL_TRY(st,
                 open_source(c, "data.train", c->data.train, c->data.class_map, &s->train, err));
    if ((data & SESSION_VAL) && *c->data.val)
        TOOL_TRY(st, open_source(c, "data.val", c->data.val, c->data.val_class_map, &s->val, err));
    if (s->train && s->val)
        st = same_classes(s, err);
out:
    return st;
}

static dnr_status open_loader(session *s, bool train, dnr_error *err)
{
    const cfg *c = &s->cfg;
    static const dnr_crop crops[] = {DNR_CROP_RANDOM, DNR_CROP_PAD, DNR_CROP_CENTER};
    dnr_loader_opts o = {
        .batch = c->train.batch,
        .image = (int)c->data.image,
        .train = train,
        .shuffle = c->data.shuffle,
        .seed = (uint64_t)c->train.seed,
        .start = train ? s->start : 0,
        .rank = s->comm ? dnr_comm_rank(s->comm) : 0,
        .world = session_world(s),
        .crop = train ? crops[c->data.crop] : DNR_CROP_CENTER,
        .resize = (int)c->data.resize,
        .pad = (int)c->data.pad,
        .flip = train && c->data.flip,
        .area_min = c->data.area_min,
        .area_max = c->data.area_max,
        .aspect_min = c->data.aspect_min,
        .aspect_max = c->data.aspect_max,
        .on_error = c->data.on_error == ON_ERROR_STOP ? DNR_ON_ERROR_STOP : DNR_ON_ERROR_SKIP,
        .max_bad = c->data.max_bad,
        .max_pixels = c->data.max_pixels,
        .threads = (int)c->data.threads,
        .prefetch = (int)c->data.prefetch,
    };
    dnr_status st;
    TOOL_LIB(st, dnr_loader_open(train ? s->train : s->val, s->dev, &o,
                                 train ? &s->train_loader : &s->val_loader));
out:
    return st;
}

static dnr_optim_opts optim_opts(const session *s)
{
    const cfg *c = &s->cfg;
    static const dnr_schedule schedules[] = {
        DNR_SCHEDULE_CONSTANT, DNR_SCHEDULE_STEP, DNR_SCHEDULE_MULTISTEP, DNR_SCHEDULE_LINEAR,
        DNR_SCHEDULE_COSINE,   DNR_SCHEDULE_POLY, DNR_SCHEDULE_ONECYCLE,
    };
    dnr_optim_opts o = {
        .lr = s->lr,
        .momentum = c->optim.momentum,
        .nesterov = c->optim.nesterov,
        .weight_decay = c->optim.weight_decay,
        .decay_norm_bias = c->optim.decay_norm_bias,
        .clip_norm = c->train.clip_norm,
        .schedule = schedules[c->optim.schedule],
        .warmup_epochs = c->optim.warmup,
        .warmup_factor = c->optim.warmup_factor,
        .lr_min = c->optim.lr_min,
        .gamma = c->optim.gamma,
        .step_epochs = c->optim.step_epochs,
        .power = c->optim.power,
        .n_milestones = (int)c->optim.milestones.n,
        .pct_start = c->optim.pct_start,
        .div_factor = c->optim.div_factor,
        .final_div_factor = c->optim.final_div_factor,
    };
    memcpy(o.milestones, c->optim.milestones.v, sizeof o.milestones);
    return o;
}

/* The file of cudnn.cache, or NULL. */
static const char *cache_of(const cfg *c, char *path, size_t size)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (strcmp(c->cudnn.cache, "none") == 0)
        return NULL;
    if (c->cudnn.cache[0])
        return c->cudnn.cache;
    if (xdg &&
        xdg[0] == '/') /* others are to be ignored, says the XDG base directory specification */
        snprintf(path, size, "%s/dnnrun/choices.json", xdg);
    else if (home && home[0])
        snprintf(path, size, "%s/.cache/dnnrun/choices.json", home);
    else
        return NULL;
    return path;
}

static dnr_recompute recompute_of(const char *text)
{
    int r = DNR_RECOMPUTE_NONE;
    while (*text && r < DNR_RECOMPUTE_AUTO && strcmp(text, dnr_recompute_name((dnr_recompute)r)))
        r++;
    return (dnr_recompute)r;
}

/* cudnn.pin.* as the library takes them. From malloc; NULL where there are none. */
static char *pins_of(const cfg *c)
{
    char *pins = NULL;
    size_t size;
    FILE *f = c->n_pins ? open_memstream(&pins, &size) : NULL;
    for (int i = 0; f && i < c->n_pins; i++)
        fprintf(f, "%s=%s\n", c->pins[i].name, c->pins[i].engine);
    if (f)
        fclose(f);
    return pins;
}

static dnr_status open_trainer(session *s, bool evaluates_only, dnr_error *err)
{
    const cfg *c = &s->cfg;
    static const dnr_precision precisions[] = {
        DNR_PRECISION_AUTO, DNR_PRECISION_FP32, DNR_PRECISION_TF32,
        DNR_PRECISION_FP16, DNR_PRECISION_BF16,
    };
    char cache[4096];
    static const char *const stems[] = {NULL, "imagenet", "cifar"};
    static const dnr_fusion fusions[] = {DNR_FUSION_AUTO, DNR_FUSION_OFF, DNR_FUSION_D1,
                                         DNR_FUSION_D2, DNR_FUSION_D3};
    static const dnr_reduce reduces[] = {DNR_REDUCE_F32, DNR_REDUCE_F16, DNR_REDUCE_BF16};
    dnr_trainer_opts o = {
        .model = {.name = c->model.name,
                  .classes = (int)c->model.classes,
                  .stem = stems[c->model.stem],
                  .zero_init_residual = c->model.zero_init_residual,
                  .sync_bn = c->model.sync_bn,
                  .sync_bn_group = (int)c->model.sync_bn_group},
        .optim = optim_opts(s),
        .precision = precisions[c->train.precision],
        .batch = evaluates_only ? 0 : c->train.batch,
        .accumulate = c->train.accumulate,
        .eval_batch = c->train.batch,
        .image = (int)c->data.image,
        .label_smoothing = c->train.label_smoothing,
        .ema = c->train.ema,
        .epoch_samples = s->epoch_samples,
        .total_samples = s->total_samples,
        .seed = (uint64_t)c->train.seed,
        .deterministic = c->train.deterministic,
        .recompute = recompute_of(c->memory.recompute),
        .recompute_gib =
            strncmp(c->memory.recompute, "auto:", 5) ? 0 : atof(c->memory.recompute + 5),
        .fusion = fusions[c->cudnn.fusion],
        .memory_fraction = c->memory.fraction,
        .workspace_mb = c->cudnn.workspace_mb,
        .cache = cache_of(c, cache, sizeof cache),
        .benchmark = c->cudnn.benchmark && !c->train.deterministic,
        .comm = s->comm,
        .bucket_mb = c->dist.bucket_mb,
        .reduce = reduces[c->dist.reduce_type],
    };
    dnr_status st;
    memcpy(o.mean, c->data.mean.v, sizeof o.mean);
    memcpy(o.std, c->data.std.v, sizeof o.std);
    char *pins = pins_of(c);
    o.pins = pins;
    st = s->tuned ? dnr_tune(s->dev, &o, s->tuned, s->tuned_user)
                  : dnr_trainer_create(s->dev, &o, &s->trainer);
    free(pins);
    TOOL_LIB(st, st);
out:
    return st;
}

dnr_status session_open(session *s, int data, dnr_error *err)
{
    const cfg *c = &s->cfg;
    char where[96];
    dnr_status st;
    if (s->comm)
        dnr_comm_stage(s->comm, RANKS_SLOW_S, "opening the data, the device and the plan");
    TOOL_TRY(st, open_data(s, data, err)); /* first: it fails most often, and fast */
    if (!s->dev && (st = ranks_open_device(s)) != DNR_OK) {
        tool_lib_error(err, cfg_origin(c, "device", where), NULL);
        goto out;
    }
    s->global_batch = c->train.batch * c->train.accumulate * session_world(s);
    s->lr = c->optim.lr;
    if (c->optim.scale_lr == SCALE_LINEAR)
        s->lr *= (double)s->global_batch / (double)c->optim.base_batch;
    s->epoch_samples = s->train ? dnr_source_count(s->train) : s->global_batch;
    s->total_samples = s->epoch_samples * c->train.epochs;
    s->steps = (s->total_samples + s->global_batch - 1) / s->global_batch;
    if (c->train.max_steps && c->train.max_steps < s->steps)
        s->steps = c->train.max_steps;
    TOOL_TRY(st, open_trainer(s, data == SESSION_VAL || data == SESSION_INFER, err));
    if (s->train)
        TOOL_TRY(st, card_write(s, err));
    if (s->train)
        TOOL_TRY(st, open_loader(s, true, err));
    if (s->val)
        TOOL_TRY(st, open_loader(s, false, err));
out:
    return st;
}

void session_close(session *s)
{
    dnr_loader_close(s->train_loader);
    dnr_loader_close(s->val_loader);
    dnr_trainer_destroy(s->trainer);
    dnr_source_close(s->train);
    dnr_source_close(s->val);
    dnr_device_close(s->dev);
}
