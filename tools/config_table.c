/* config_table.c: every key of a cfg. The parser, docs/cfg.md and `dnnrun train --help` are made from this table. */
#include "config.h"

#define AT(field) offsetof(cfg, field)

#define BOOL(key, field, unset, doc)                                                               \
    {                                                                                              \
        key, CFG_BOOL, AT(field), 0, 0, false, 0, NULL, unset, "", doc                             \
    }
#define INT(key, field, min, max, unset, unit, doc)                                                \
    {                                                                                              \
        key, CFG_INT, AT(field), min, max, false, 0, NULL, unset, unit, doc                        \
    }
#define REAL(key, field, min, max, unset, unit, doc)                                               \
    {                                                                                              \
        key, CFG_REAL, AT(field), min, max, false, 0, NULL, unset, unit, doc                       \
    }
/* greater than min */
#define POSITIVE(key, field, max, unset, unit, doc)                                                \
    {                                                                                              \
        key, CFG_REAL, AT(field), 0, max, true, 0, NULL, unset, unit, doc                          \
    }
#define CHOICE(key, field, choices, unset, doc)                                                    \
    {                                                                                              \
        key, CFG_CHOICE, AT(field), 0, 0, false, 0, choices, unset, "", doc                        \
    }
#define STRING(key, field, choices, unset, doc)                                                    \
    {                                                                                              \
        key, CFG_STRING, AT(field), 0, 0, false, 0, choices, unset, "", doc                        \
    }
#define PATH(key, field, doc)                                                                      \
    {                                                                                              \
        key, CFG_PATH, AT(field), 0, 0, false, 0, NULL, "", "", doc                                \
    }
#define REALS(key, field, min, max, above, count, unset, unit, doc)                                \
    {                                                                                              \
        key, CFG_REALS, AT(field), min, max, above, count, NULL, unset, unit, doc                  \
    }

const cfg_key cfg_keys[] = {
    STRING("device", device, NULL, "auto",
           "Where the work runs: `auto` (the first CUDA device, else the CPU), `cpu`, `cuda` or "
           "`cuda:N`. A device asked for by name and missing is an error."),

    STRING("model.name", model.name, "@models", "",
           "The network. `resnet18` to `resnet152` are ResNet v1.5 (He et al. 2015, stride on the "
           "3×3); `resnet8`, `resnet20` … `resnet110` are the paper's CIFAR networks."),
    INT("model.classes", model.classes, 2, 1e6, "1000", "",
        "Number of classes. It must be that of the data."),
    CHOICE("model.stem", model.stem, "auto|imagenet|cifar", "auto",
           "First layers: `imagenet` is a 7×7 convolution of stride 2 and a max pool; `cifar` one "
           "3×3 convolution, for small pictures; `auto` is the network's usual one."),
    BOOL("model.zero_init_residual", model.zero_init_residual, "false",
         "Start the last batch norm of each residual block at zero (Goyal et al. 2017), so that "
         "every block starts as the identity."),

    BOOL("model.sync_bn", model.sync_bn, "false",
         "Of several ranks: batch norm over the batches of all ranks together, so that N ranks are "
         "one with the N-fold batch; without it each has statistics of its own, as in PyTorch's "
         "DDP. For small batches a rank: it makes ranks wait for each other in every layer, and "
         "layers are not fused."),
    INT("model.sync_bn_group", model.sync_bn_group, 0, 65536, "0", "ranks",
        "`model.sync_bn` over the batches of so many ranks each, in their order, such as those of "
        "one host: a divisor of the number of ranks. 0: of all."),

    PATH("data.train", data.train,
         "Training pictures: a folder with one folder a class; a flat folder with "
         "`data.class_map`; tar shards (`train-{000000..000009}.tar`, or one file), where "
         "`x.tar:train` takes only the members below `train/`; or `synthetic`."),
    PATH("data.val", data.val, "Validation pictures, in the same forms. Empty: no evaluation."),
    PATH("data.class_map", data.class_map,
         "For a flat folder of training pictures: a text file with lines `FILE CLASS`."),
    PATH("data.val_class_map", data.val_class_map, "The same for `data.val`."),
    INT("data.synthetic_n", data.synthetic_n, 1, 100000000, "1281167", "pictures",
        "How many pictures `synthetic` has."),
    INT("data.image", data.image, 1, 8192, "224", "pixels",
        "Height and width of the pictures given to the network."),
    INT("data.resize", data.resize, 0, 16384, "0", "pixels",
        "The shorter side is resized to this before the centre is cut out (validation, and "
        "training "
        "with `crop = none`) or the border is added (`crop = pad`). 0: to `data.image`."),
    CHOICE("data.crop", data.crop, "random|pad|none", "random",
           "How training pictures are cut: `random` resizes a random part (torchvision's "
           "RandomResizedCrop); `pad` adds a border of `data.pad` zeros and cuts at a random "
           "place; `none` does as for validation."),
    INT("data.pad", data.pad, 0, 1024, "0", "pixels", "Border on each side for `crop = pad`."),
    BOOL("data.flip", data.flip, "true", "Mirror each training picture with probability 1/2."),
    POSITIVE("data.area_min", data.area_min, 1, "0.08", "",
             "`crop = random`: least share of the picture's area."),
    POSITIVE("data.area_max", data.area_max, 1, "1", "",
             "`crop = random`: largest share of the picture's area."),
    POSITIVE("data.aspect_min", data.aspect_min, 100, "0.75", "",
             "`crop = random`: least width over height."),
    POSITIVE("data.aspect_max", data.aspect_max, 100, "1.3333333333333333", "",
             "`crop = random`: largest width over height."),
    REALS("data.mean", data.mean, 0, 1, false, 3, "0.485 0.456 0.406", "",
          "Mean of the red, green and blue channel (one number: of all three) of pictures scaled "
          "to 0 … 1; it is subtracted. The default is ImageNet's."),
    REALS("data.std", data.std, 0, 10, true, 3, "0.229 0.224 0.225", "",
          "Standard deviation of the channels; they are divided by it."),
    CHOICE("data.on_error", data.on_error, "skip|stop", "skip",
           "What to do with a picture that cannot be read: `skip` replaces it by another, always "
           "the same one, and reports it at the end of the epoch; `stop` ends the run."),
    INT("data.max_bad", data.max_bad, -1, 1e12, "100", "pictures",
        "More bad pictures than this end the run. -1: no limit."),
    INT("data.max_pixels", data.max_pixels, 1, 1e12, "178956970", "pixels",
        "A picture with more is bad. The default is Pillow's limit."),
    INT("data.threads", data.threads, 0, 256, "0", "threads",
        "Threads that decode. 0: one for each core, at most 16; where the CPU computes, which they "
        "give way to, one for each core that it leaves, or for every four that it takes."),
    INT("data.prefetch", data.prefetch, 0, 1024, "0", "batches", "Batches decoded ahead. 0: 3."),
    BOOL("data.shuffle", data.shuffle, "true",
         "Visit the training pictures in a new random order each epoch. The order depends on "
         "`train.seed` and the epoch only."),

    INT("train.epochs", train.epochs, 1, 1e6, "90", "epochs",
        "Length of the run, and of the learning-rate schedule."),
    INT("train.max_steps", train.max_steps, 0, 1e12, "0", "steps",
        "End after this many steps, where that is sooner; the schedule stays that of "
        "`train.epochs`. 0: no limit."),
    INT("train.batch", train.batch, 1, 65536, "256", "pictures",
        "Pictures in one pass forward and backward. The global batch is `train.batch` × "
        "`train.accumulate`."),
    INT("train.accumulate", train.accumulate, 1, 65536, "1", "passes",
        "Passes whose gradients are averaged for one step of the optimizer."),
    CHOICE("train.precision", train.precision, "auto|fp32|tf32|fp16|bf16", "auto",
           "Type of activations and of the multiplications; weights, momentum and statistics are "
           "always kept in fp32. `auto` is fp16 on CUDA and fp32 on the CPU. fp16 uses dynamic "
           "loss scaling."),
    REAL("train.label_smoothing", train.label_smoothing, 0, 0.99, "0", "",
         "Share of the target spread evenly over all classes (Szegedy et al. 2015)."),
    REAL("train.clip_norm", train.clip_norm, 0, 1e30, "0", "",
         "Scale the gradient down to this norm where it is larger. 0: never."),
    REAL(
        "train.ema", train.ema, 0, 0.99999, "0", "",
        "Keep a moving average of the weights and running statistics, with this decay each step "
        "(0.9999, say): e ← e + (1 − decay)(w − e), from the initial weights on, as timm's "
        "ModelEmaV2 does. It is evaluated and saved beside the weights, and decides which "
        "checkpoint is the best. A run should be several times 1/(1 − decay) steps long. 0: none."),
    INT("train.seed", train.seed, 0, 9007199254740991.0, "0", "",
        "Seed of the initial weights, of the order of the pictures and of augmentation."),
    BOOL("train.deterministic", train.deterministic, "false",
         "The same bits every time on the same kind of machine. Turns `cudnn.benchmark` off, and "
         "may be slower."),
    PATH("train.init", train.init,
         "Weights to begin with: safetensors with torchvision's names; `--init` wins. The last "
         "layer "
         "may be of another number of classes, and then begins anew; all else must fit."),

    POSITIVE("optim.lr", optim.lr, 1e6, "0.1", "",
             "Peak learning rate for a global batch of `optim.base_batch`."),
    INT("optim.base_batch", optim.base_batch, 1, 1e9, "256", "pictures",
        "The global batch that `optim.lr` is meant for."),
    CHOICE("optim.scale_lr", optim.scale_lr, "linear|none", "linear",
           "`linear`: the learning rate used is `optim.lr` × global batch / `optim.base_batch` "
           "(Goyal et al. 2017); `none`: it is `optim.lr`."),
    REAL("optim.momentum", optim.momentum, 0, 0.9999, "0.9", "",
         "Momentum of SGD, in PyTorch's form."),
    BOOL("optim.nesterov", optim.nesterov, "false", "Nesterov's momentum, in PyTorch's form."),
    REAL("optim.weight_decay", optim.weight_decay, 0, 100, "5e-5", "",
         "L2 penalty, added to the gradient."),
    BOOL("optim.decay_norm_bias", optim.decay_norm_bias, "false",
         "Decay the weights and biases of batch norm and the bias of the last layer too, as "
         "PyTorch's SGD does by default."),
    CHOICE("optim.schedule", optim.schedule, "constant|step|multistep|linear|cosine|poly|onecycle",
           "cosine",
           "Learning rate over the run. With t = 0 … 1 after the warm-up: `constant`; `step`: × "
           "`gamma` every `step_epochs`; `multistep`: × `gamma` at each of `milestones`; `linear`: "
           "straight to `lr_min`; `cosine`: lr_min + (lr − lr_min)(1 + cos πt)/2; `poly`: lr_min + "
           "(lr − lr_min)(1 − t)^`power`; `onecycle`: PyTorch's OneCycleLR with `optim.lr` as its "
           "peak, momentum kept."),
    REAL("optim.warmup", optim.warmup, 0, 1e6, "0", "epochs",
         "Length of a linear warm-up before the schedule."),
    REAL("optim.warmup_factor", optim.warmup_factor, 0, 1, "0", "",
         "The warm-up starts at this share of the learning rate. 0: at one step's share of it."),
    REAL("optim.lr_min", optim.lr_min, 0, 1e6, "0", "",
         "Where `linear`, `cosine` and `poly` end. Not scaled by the batch."),
    POSITIVE("optim.gamma", optim.gamma, 1, "0.1", "", "Factor of `step` and `multistep`."),
    POSITIVE("optim.step_epochs", optim.step_epochs, 1e6, "30", "epochs",
             "Distance of the steps of `step`."),
    REALS("optim.milestones", optim.milestones, 0, 1e6, true, 0, "", "epochs",
          "Epochs at which `multistep` lowers the learning rate, in rising order, 16 at most: `30, "
          "60, 80`."),
    POSITIVE("optim.power", optim.power, 100, "2", "", "Exponent of `poly`; 1 makes it `linear`."),
    POSITIVE("optim.pct_start", optim.pct_start, 0.9999, "0.3", "",
             "`onecycle`: share of the run spent rising."),
    POSITIVE("optim.div_factor", optim.div_factor, 1e9, "25", "",
             "`onecycle`: the peak over the first learning rate."),
    POSITIVE("optim.final_div_factor", optim.final_div_factor, 1e12, "1e4", "",
             "`onecycle`: the first learning rate over the last."),

    POSITIVE("memory.fraction", memory.fraction, 1, "0.9", "",
             "Largest share of the device's memory that may be planned. A plan that needs more is "
             "refused before the first step."),
    STRING(
        "memory.recompute", memory.recompute, "none|stage|block|cheap|auto:<GiB>", "none",
        "Recompute activations in the backward pass instead of keeping them: `block` keeps what "
        "enters each residual block, `stage` only what enters each stage; `cheap` remakes only "
        "what "
        "takes one pass over memory, batch norms without a residual and the pictures; `auto:10` "
        "takes of these "
        "the one that costs least with 10 GiB in all, of `cheap` no more than it takes, and says "
        "which. The gradients stay the same."),

    BOOL("cudnn.benchmark", cudnn.benchmark, "true",
         "Time the candidate implementations of each large convolution and take the fastest, "
         "instead "
         "of the first that cuDNN or oneDNN proposes. On the CPU in fp32 they include Winograd's "
         "method, with about four times the rounding error."),
    CHOICE(
        "cudnn.fusion", cudnn.fusion, "auto|off|d1|d2|d3", "auto",
        "Fewer passes over memory. `d1`: the stem's batch norm, ReLU and max pool are one pass; on "
        "CUDA, convolutions in fp16 sum up the statistics of the batch norm that follows, and in "
        "16 bits a batch norm behind a residual leaves a mask for its gradient; `d2`: "
        "also algebraic batch norm, where the device has it (CUDA): the gradients of 1x1 "
        "convolutions that widen (the last of a bottleneck block, and projections) and of the "
        "batch norm behind them come without the tensor between the two, which is then not kept; "
        "`algbn_ratio` in the log tells how far means were from 0 beside spreads: beyond some 100 "
        "these gradients are less accurate than `d1`'s; "
        "`d3`: the forward pass of these layers does not write that tensor either, and "
        "`algbn_exact` tells how many channels' means were so far from 0 that their variance was "
        "taken the long way; `auto`: `d3` in fp16 and bf16, else `d1`. All but `off` also fold "
        "batch norm into the "
        "convolutions for evaluation. The results differ by rounding only."),
    PATH("cudnn.cache", cudnn.cache,
         "CUDA: file that keeps what `cudnn.benchmark` chose, by GPU, driver, versions and "
         "convolution, "
         "so that a later start need not time it again; any number of runs may share it. Empty: "
         "`dnnrun/choices.json` in `$XDG_CACHE_HOME` or `~/.cache`; `none`: no file."),
    INT("cudnn.workspace_mb", cudnn.workspace_mb, 1, 1e6, "1024", "MiB",
        "Most workspace that one launch may ask for."),

    REAL("dist.timeout", dist.timeout, 1, 86400, "60", "seconds",
         "Of several ranks: how long to wait for all of them at the start, and for one that is "
         "silent, or that the others wait for. Then it is lost, and all ranks end with exit code "
         "5 and a message that names it."),
    POSITIVE("dist.bucket_mb", dist.bucket_mb, 65536, "25", "MiB",
             "Of several ranks: gradients are summed in pieces of at least this size, each as soon "
             "as backward has completed it; the first piece is of at most 1 MiB. `dnnrun plan` "
             "shows them."),

    CHOICE(
        "dist.reduce_type", dist.reduce_type, "fp32|fp16|bf16", "fp32",
        "Of several ranks: as what gradients travel. In 16 bits they are half as many bytes, and "
        "are rounded before they leave and when they are added up: over N ranks an element is "
        "off by at most N · u · Σ|g|, with u = 2⁻¹¹ for `fp16`, 2⁻⁸ for `bf16`. `fp16` needs "
        "`train.precision = fp16`, which scales the loss: small gradients would vanish."),
    CHOICE(
        "dist.transport", dist.transport, "tcp|mpi", "tcp",
        "Of several ranks: what carries sums on the CPU. `tcp`: connections to rank 0, which adds "
        "in the order of ranks; `mpi`: the MPI library that dnnrun was built with, under its "
        "mpirun or srun. On GPUs it carries only what is small; gradients go through NCCL."),
    STRING("dist.standin", dist.standin, NULL, "",
           "To see without other GPUs how much of their sums a step hides: of one rank alone "
           "(`DNR_RANK=0 DNR_WORLD_SIZE=1`), let each sum take as long as it would over many. "
           "`RANKS:GB/S:MICROSECONDS`, for example `8:340:20`: 20 µs and 2 · 7/8 of its bytes at "
           "340 GB/s, one sum after the other. Empty: none."),

    PATH("run.out", run.out,
         "Run directory; `--out` wins. Empty: `runs/<cfg>-<date>-<time>` in the current folder."),
    INT("run.log_every", run.log_every, 1, 1e9, "50", "steps",
        "Steps between two records of `metrics.jsonl`."),
    INT("run.eval_every", run.eval_every, 0, 1e6, "1", "epochs",
        "Epochs between two evaluations; there is always one at the end. 0: only there."),
    REAL(
        "run.save_every", run.save_every, 0, 1e6, "1", "epochs",
        "Epochs, or a fraction of one, between two checkpoints. 0: none by epochs. There is always "
        "one at the end, at a signal, and of the best evaluation."),
    REAL("run.save_minutes", run.save_minutes, 0, 1e6, "30", "minutes",
         "A checkpoint also when this much time has passed since the last. 0: none by time."),
    INT("run.keep", run.keep, 0, 1e6, "3", "checkpoints",
        "The newest checkpoints to keep; older ones, except the best, are removed. 0: all."),
    BOOL(
        "run.tensorboard", run.tensorboard, "false",
        "Write TensorBoard's event files into the run directory too: `tensorboard --logdir runs`."),
};
const int cfg_n_keys = sizeof cfg_keys / sizeof cfg_keys[0];
_Static_assert(sizeof cfg_keys / sizeof cfg_keys[0] <= CFG_MAX_KEYS,
               "cfg.origin has room for every key");

const char *cfg_choices(const cfg_key *k, char buf[512])
{
    buf[0] = 0;
    if (k->choices && k->choices[0] != '@') {
        snprintf(buf, 512, "%s", k->choices);
    } else if (k->choices) {
        size_t at = 0;
        for (const char *const *m = dnr_model_names(); *m && at < 512; m++)
            at += (size_t)snprintf(buf + at, 512 - at, "%s%s", at ? "|" : "", *m);
    }
    return buf;
}

const char *cfg_range(const cfg_key *k, char buf[576])
{
    char list[512];
    buf[0] = 0;
    switch (k->type) {
    case CFG_BOOL:
        snprintf(buf, 576, "true | false");
        break;
    case CFG_CHOICE:
    case CFG_STRING: {
        size_t at = 0;
        for (const char *p = cfg_choices(k, list); *p && at < 570; p++)
            at += (size_t)snprintf(buf + at, 576 - at, *p == '|' ? " | " : "%c", *p);
        break;
    }
    case CFG_INT:
        snprintf(buf, 576, "%.0f … %.0f", k->min, k->max);
        break;
    case CFG_REAL:
    case CFG_REALS:
        snprintf(buf, 576, k->above ? "> %g, at most %g" : "%g … %g", k->min, k->max);
        break;
    case CFG_PATH:
        break;
    }
    return buf;
}
