/* trainer_opts.c: checks dnr_trainer_opts and fills in its defaults. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer.h"

#define CHECK(cond, remedy, ...)                                                                   \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return DNR_FAIL(DNR_EUSAGE, remedy, __VA_ARGS__);                                      \
    } while (0)

static dnr_status check_schedule(const dnr_optim_opts *o)
{
    CHECK(o->warmup_epochs >= 0 && o->warmup_factor >= 0 && o->warmup_factor <= 1,
          "use optim.warmup >= 0 and a factor in 0…1", "warm-up of %g epochs from factor %g",
          o->warmup_epochs, o->warmup_factor);
    CHECK(o->lr_min >= 0 && o->lr_min <= o->lr, "use a number in 0…optim.lr", "optim.lr_min is %g",
          o->lr_min);
    switch (o->schedule) {
    case DNR_SCHEDULE_STEP:
        CHECK(o->step_epochs > 0, "set optim.step_epochs to a positive number",
              "optim.step_epochs is %g", o->step_epochs);
        CHECK(o->gamma > 0, "set optim.gamma, for example 0.1", "optim.gamma is %g", o->gamma);
        break;
    case DNR_SCHEDULE_MULTISTEP:
        CHECK(o->n_milestones >= 1 && o->n_milestones <= DNR_MAX_MILESTONES,
              "give 1 to 16 milestones, in epochs", "optim.milestones has %d entries",
              o->n_milestones);
        CHECK(o->gamma > 0, "set optim.gamma, for example 0.1", "optim.gamma is %g", o->gamma);
        break;
    case DNR_SCHEDULE_POLY:
        CHECK(o->power > 0, "set optim.power, for example 2", "optim.power is %g", o->power);
        break;
    case DNR_SCHEDULE_ONECYCLE:
        CHECK(o->warmup_epochs == 0, "set optim.warmup = 0: optim.pct_start is its warm-up",
              "one-cycle with a warm-up of %g epochs", o->warmup_epochs);
        CHECK(o->pct_start >= 0 && o->pct_start < 1 && o->div_factor >= 0 &&
                  o->final_div_factor >= 0,
              "use pct_start in 0…1 and positive factors",
              "one-cycle with pct_start %g, div_factor %g, final_div_factor %g", o->pct_start,
              o->div_factor, o->final_div_factor);
        break;
    case DNR_SCHEDULE_CONSTANT:
    case DNR_SCHEDULE_LINEAR:
    case DNR_SCHEDULE_COSINE:
        break;
    default:
        CHECK(false, "use one of enum dnr_schedule", "there is no schedule %d", (int)o->schedule);
    }
    return DNR_OK;
}

static dnr_status check_optim(const dnr_optim_opts *o)
{
    CHECK(isfinite(o->lr) && o->lr >= 0, "use a number >= 0", "optim.lr is %g", o->lr);
    CHECK(o->momentum >= 0 && o->momentum < 1, "use a number in 0…1", "optim.momentum is %g",
          o->momentum);
    CHECK(!o->nesterov || o->momentum > 0, "set optim.momentum, for example 0.9",
          "Nesterov's method needs momentum");
    CHECK(isfinite(o->weight_decay) && o->weight_decay >= 0, "use a number >= 0",
          "optim.weight_decay is %g", o->weight_decay);
    CHECK(isfinite(o->clip_norm) && o->clip_norm >= 0, "use a number >= 0; 0 is off",
          "train.clip_norm is %g", o->clip_norm);
    return check_schedule(o);
}

static dnr_status check(const dnr_trainer_opts *o)
{
    CHECK(o->model.name, "name a model, for example resnet50", "no model is named");
    CHECK(o->model.classes >= 1, "set model.classes to the number of classes",
          "model.classes is %d", o->model.classes);
    CHECK(o->model.sync_bn_group >= 0, "use a number of ranks; 0: all", "model.sync_bn_group is %d",
          o->model.sync_bn_group);
    CHECK(o->batch >= 0 && o->batch <= 1 << 16 && o->eval_batch > 0 && o->eval_batch <= 1 << 16,
          "use a number in 1…65536", "train.batch is %lld, the evaluation's %lld",
          (long long)o->batch, (long long)o->eval_batch);
    CHECK(o->accumulate >= 1 && o->accumulate <= 1 << 20, "use a positive number",
          "train.accumulate is %lld", (long long)o->accumulate);
    CHECK(o->image >= 1 && o->image <= 8192 && o->eval_image >= 1 && o->eval_image <= 8192,
          "use a number in 1…8192", "data.image is %d, the evaluation's %d", o->image,
          o->eval_image);
    for (int c = 0; c < 3; c++)
        CHECK(isfinite(o->mean[c]) && isfinite(o->std[c]) && o->std[c] > 0,
              "use three means, and three standard deviations > 0, for pixels in 0…1",
              "channel %d has mean %g and std %g", c, o->mean[c], o->std[c]);
    CHECK(o->label_smoothing >= 0 && o->label_smoothing < 1, "use a number in 0…1, for example 0.1",
          "train.label_smoothing is %g", o->label_smoothing);
    CHECK(o->ema >= 0 && o->ema < 1, "use a number in 0…1, for example 0.9999; 0 is off",
          "train.ema is %g", o->ema);
    CHECK(o->fusion >= DNR_FUSION_AUTO && o->fusion <= DNR_FUSION_D3, "use one of enum dnr_fusion",
          "there is no level of fusion %d", (int)o->fusion);
    CHECK(o->recompute >= DNR_RECOMPUTE_NONE && o->recompute <= DNR_RECOMPUTE_AUTO,
          "use one of enum dnr_recompute", "there is no mode of recomputation %d",
          (int)o->recompute);
    CHECK(o->recompute != DNR_RECOMPUTE_AUTO ||
              (isfinite(o->recompute_gib) && o->recompute_gib > 0),
          "give a positive number of GiB", "memory.recompute is auto:%g", o->recompute_gib);
    CHECK(o->memory_fraction > 0 && o->memory_fraction <= 1, "use a number in 0…1",
          "memory.fraction is %g", o->memory_fraction);
    CHECK(o->workspace_mb > 0, "use a positive number", "cudnn.workspace_mb is %lld",
          (long long)o->workspace_mb);
    CHECK(o->bucket_mb > 0 && o->bucket_mb <= 65536, "use a number in 0…65536",
          "dist.bucket_mb is %g", o->bucket_mb);
    CHECK(o->reduce >= DNR_REDUCE_F32 && o->reduce <= DNR_REDUCE_BF16, "use one of enum dnr_reduce",
          "there is no type of reduction %d", (int)o->reduce);
    if (o->batch == 0)
        return DNR_OK;
    CHECK(o->epoch_samples >= 1 && o->total_samples >= 1, "use positive numbers",
          "an epoch of %lld samples, a run of %lld", (long long)o->epoch_samples,
          (long long)o->total_samples);
    return check_optim(&o->optim);
}

dnr_status dnri_trainer_options(const dnr_trainer_opts *in, dnr_trainer_opts *out)
{
    static const double MEAN[] = {0.485, 0.456, 0.406}, STD[] = {0.229, 0.224, 0.225};
    dnr_trainer_opts o = *in;
    if (o.std[0] == 0 && o.std[1] == 0 && o.std[2] == 0) {
        memcpy(o.mean, MEAN, sizeof MEAN);
        memcpy(o.std, STD, sizeof STD);
    }
    o.accumulate = o.accumulate ? o.accumulate : 1;
    o.eval_batch = o.eval_batch ? o.eval_batch : o.batch;
    o.eval_image = o.eval_image ? o.eval_image : o.image;
    o.memory_fraction = o.memory_fraction != 0 ? o.memory_fraction : 0.9;
    o.workspace_mb = o.workspace_mb ? o.workspace_mb : 1024;
    o.bucket_mb = o.bucket_mb != 0 ? o.bucket_mb : DNRI_BUCKET_BYTES / 0x1p20;
    DNR_TRY(check(&o));
    char *name = strdup(o.model.name), *stem = o.model.stem ? strdup(o.model.stem) : NULL;
    char *cache = o.cache ? strdup(o.cache) : NULL, *pins = o.pins ? strdup(o.pins) : NULL;
    if (!name || (o.model.stem && !stem) || (o.cache && !cache) || (o.pins && !pins)) {
        free(name);
        free(stem);
        free(cache);
        free(pins);
        return DNR_FAIL_NOMEM();
    }
    o.model.name = name;
    o.model.stem = stem;
    o.cache = cache;
    o.pins = pins;
    *out = o;
    return DNR_OK;
}
