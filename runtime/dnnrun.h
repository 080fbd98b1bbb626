/* dnnrun.h: the whole public interface of libdnnrun, from simple to advanced.
 *
 * Shape of a program that trains a model:
 *
 *     dnr_device *dev;            where the work runs
 *     dnr_source *src;            where the pictures come from
 *     dnr_trainer *t;             model + optimizer + plans on that device
 *     dnr_loader *loader;         threads that decode and augment into pinned batches
 *
 *     dnr_device_open("auto", &dev);
 *     dnr_source_open("data/train", NULL, &src);
 *     dnr_trainer_create(dev, &opts, &t);
 *     dnr_loader_open(src, dev, &loader_opts, &loader);
 *     while (more) dnr_trainer_step(t, loader, &metrics);
 *     dnr_trainer_save(t, "model.safetensors");
 *
 * share/dnnrun/examples/train.c is such a program, whole, in 40 lines. The sections below go from what each program needs
 * to what few do: status, device, data, training, checkpoints, looking inside. Layers and models of one's own:
 * dnnrun/runtime/extend.h.
 *
 * Conventions: every fallible function returns a dnr_status and explains itself through
 * dnr_last_error(); objects are created through an out-pointer, owned by the caller and destroyed
 * with X_close / X_destroy, which accept NULL; pointers handed out by getters are borrowed and live
 * as long as their object. Tensors are NHWC. An object is used by one thread at a time. */
#ifndef DNNRUN_H
#define DNNRUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DNR_VERSION "0.1.0"

/* ---------------------------------------------------------------- status */

/* The value is also the tool's exit code. */
typedef enum dnr_status {
    DNR_OK = 0,
    DNR_EFAIL = 1,    /* anything else that failed */
    DNR_EUSAGE = 2,   /* wrong argument, cfg or model */
    DNR_EDATA = 3,    /* a picture, data set or weights file is missing or bad */
    DNR_EMEM = 4,     /* not enough memory on the host or device */
    DNR_EPEER = 5,    /* a rank is lost or differs, or something stalled */
    DNR_EDEVICE = 6,  /* a device or library is missing or failed */
    DNR_EDISK = 7,    /* disk full or unwritable */
    DNR_STOPPED = 75, /* saved and stopped on request: run again to go on */
} dnr_status;

typedef struct dnr_error {
    dnr_status status;
    char where[96];   /* "layers/conv.c:41" */
    char what[640];   /* one line: what failed, with names and numbers */
    char remedy[320]; /* one line: what to do about it */
} dnr_error;

/* The last failure of the calling thread. Valid until its next failure. Never NULL. */
const dnr_error *dnr_last_error(void);

typedef enum dnr_log_level { DNR_LOG_INFO, DNR_LOG_WARN } dnr_log_level;
typedef void (*dnr_log_fn)(void *user, dnr_log_level level, const char *line);

/* Where the library's remarks go (chosen device, replaced pictures …). Silent by default.
 * May be called from loader threads, one at a time. */
void dnr_set_log(dnr_log_fn fn, void *user);

const char *dnr_version(void);

/* ---------------------------------------------------------------- device */

typedef struct dnr_device dnr_device;

/* `spec`: "auto" (the first CUDA device, else the CPU), "cpu", "cuda", "cuda:N".
 * A device asked for by name and missing is DNR_EDEVICE, with the reason. */
dnr_status dnr_device_open(const char *spec, dnr_device **out);
void dnr_device_close(dnr_device *dev);
const char *dnr_device_name(const dnr_device *dev); /* "cpu", "cuda:0" */
const char *
dnr_device_description(const dnr_device *dev); /* one line: model, libraries, versions */

/* Free and total bytes of the device's memory, as its driver (on the CPU: the kernel) tells. */
dnr_status dnr_device_memory(dnr_device *dev, size_t *free, size_t *total);

/* Writes one line for each back end: what it is, or why it cannot be used. */
void dnr_device_list(FILE *out);

/* ---------------------------------------------------------------- several ranks */

/* A run on several GPUs or machines is as many processes, the ranks, each with a device, a loader and a trainer of its
 * own. mpirun or srun starts them, or whoever sets DNR_RANK, DNR_WORLD_SIZE and DNR_MASTER (HOST:PORT of rank 0) in their
 * environments. With `comm` in their options, trainers sum their gradients: a step is that of all ranks' batches
 * together. All ranks call the same functions in the same order. */
typedef struct dnr_comm dnr_comm;

typedef struct dnr_comm_opts {
    /* What carries sums of host memory: "tcp", or "mpi" under mpirun or srun; NULL = "tcp". */
    const char *transport;
    /* A rank that is silent, or keeps the others waiting, for longer is lost; 0 = 60. */
    double timeout_s;
    /* Called once, from a thread of the communicator's, when a rank is lost: its name, host and stage are in `why`. It
     * may end the process: what this rank has enqueued may never finish. NULL: the calls that wait for others fail
     * with DNR_EPEER. */
    void (*on_loss)(void *user, const dnr_error *why);
    void *user;
} dnr_comm_opts;

/* Returns when all ranks are there. A process that no launcher started is alone: a world of one, where nothing below
 * does anything. `opts` may be NULL. DNR_EPEER, naming the ranks that did not come, after timeout_s. */
dnr_status dnr_comm_open(const dnr_comm_opts *opts, dnr_comm **out);
/* `why`: what ended this rank early, for the others to know; NULL: it is done. */
void dnr_comm_close(dnr_comm *c, const dnr_error *why);
int dnr_comm_rank(const dnr_comm *c); /* 0 … world − 1 */
int dnr_comm_world(const dnr_comm *c);
int dnr_comm_local_rank(const dnr_comm *c); /* among the ranks of this host */
int dnr_comm_local_world(const dnr_comm *c);
bool dnr_comm_launched(const dnr_comm *c); /* false: alone */
const char *
dnr_comm_description(const dnr_comm *c); /* one line: ranks, hosts, transport, interface */
/* The same without a communicator, from the environment alone. */
dnr_status dnr_launched(int *rank, int *world);

/* Something in which all ranks should agree. */
typedef struct dnr_fact {
    const char *name, *value; /* value: may have several lines; the first that differs is shown */
} dnr_fact;
/* DNR_EPEER, in all ranks, where one differs from rank 0: which, in what. */
dnr_status dnr_comm_compare(dnr_comm *c, const dnr_fact *facts, int n);
/* Rank 0's bytes to all. */
dnr_status dnr_comm_broadcast(dnr_comm *c, void *data, size_t bytes);
/* Sums `bytes` of fp32 in dev's memory over all ranks, `times` times, after checking one sum: seconds of each, of the
 * slowest rank. */
dnr_status dnr_comm_measure(dnr_comm *c, dnr_device *dev, size_t bytes, int times, double *seconds);
/* What this rank is about to do, for the message should it be lost meanwhile. Others may wait for it for allow_s where
 * that is more than the timeout. */
void dnr_comm_stage(dnr_comm *c, double allow_s, const char *text);

/* ---------------------------------------------------------------- data */

/* A data set: n samples, each an encoded picture with a class label and a name. */
typedef struct dnr_source dnr_source;

typedef struct dnr_source_opts {
    const char *class_map; /* file of lines "FILE CLASS", for a flat folder; NULL otherwise */
    int classes;           /* expected number of classes; 0 = do not check */
    int64_t synthetic_n;   /* samples of path "synthetic"; 0 = 1281167 (ImageNet's) */
    int synthetic_image;   /* their side in pixels; 0 = 224 */
} dnr_source_opts;

/* `path` is one of
 *     DIR                     class folders, numbered as torchvision's ImageFolder numbers them
 *     DIR with class_map      a flat folder; CLASS is a number, or a name (numbered in sorted order)
 *     x-{000000..000009}.tar  shards, or one x.tar: WebDataset (KEY.jpg + KEY.cls) or class folders
 *     x.tar:FOLDER            what lies in FOLDER of a tar, such as "digits.tar:train"
 *     synthetic               made-up pictures
 * Tars are plain (not compressed) and read in place. DNR_EDATA when missing or empty, when labels are
 * out of range or the number of class folders differs. `opts` may be NULL. */
dnr_status dnr_source_open(const char *path, const dnr_source_opts *opts, dnr_source **out);
/* Pictures to be looked at, without labels: each path is a picture or a folder of them (all below it, sorted). */
dnr_status dnr_source_files(const char *const *paths, int n, dnr_source **out);
void dnr_source_close(dnr_source *src);
int64_t dnr_source_count(const dnr_source *src);
int dnr_source_classes(const dnr_source *src);
const char *dnr_source_class_name(const dnr_source *src,
                                  int label); /* NULL where names are unknown */
const char *dnr_source_sample_name(const dnr_source *src, int64_t i);
int dnr_source_label(const dnr_source *src, int64_t i);
uint64_t dnr_source_hash(const dnr_source *src); /* of names, sizes and labels */

typedef enum dnr_crop {
    DNR_CROP_CENTER, /* resize the shorter side to `resize`, cut the centre (validation) */
    DNR_CROP_RANDOM, /* random-resized-crop: area and aspect ratio as torchvision's */
    DNR_CROP_PAD,    /* pad by `pad` zeros, cut at a random place (CIFAR) */
} dnr_crop;

typedef enum dnr_on_error { DNR_ON_ERROR_SKIP, DNR_ON_ERROR_STOP } dnr_on_error;

typedef struct dnr_loader_opts {
    int64_t batch; /* samples of one batch on this rank */
    int image;     /* height and width of the pictures delivered */
    bool train;    /* endless shuffled stream; otherwise one pass in order */
    bool shuffle;  /* of a training stream */
    uint64_t seed;
    int64_t start; /* position in the stream of the first sample of the first batch */
    /* Batches of consecutive positions are dealt to the ranks in turn; world 0 = 1. In a validation
     * pass all ranks get as many batches, so the last may be empty. */
    int rank, world;
    dnr_crop crop;
    int resize;                    /* CENTER, PAD: shorter side before the crop; 0 = `image` */
    int pad;                       /* DNR_CROP_PAD: pixels on each side */
    bool flip;                     /* mirror each training picture with probability 1/2 */
    double area_min, area_max;     /* DNR_CROP_RANDOM: share of the area; 0,0 = 0.08, 1 */
    double aspect_min, aspect_max; /* DNR_CROP_RANDOM: width over height; 0,0 = 3/4, 4/3 */
    dnr_on_error on_error;
    int64_t max_bad;    /* more bad samples than this stop the run; < 0 = no limit */
    int64_t max_pixels; /* a picture with more is bad; 0 = 178956970 (Pillow's limit) */
    int threads;        /* decoding threads; 0 = one for each core, at most 16; fewer where the
                           device is the CPU */
    int prefetch;       /* batches decoded ahead; 0 = 3 */
    double timeout_s;   /* longest wait for one batch; 0 = 300 */
} dnr_loader_opts;

typedef struct dnr_loader dnr_loader;

/* One batch in a slot of pinned host memory (layout: runtime/slot.h). */
typedef struct dnr_batch {
    void *slot;
    int32_t *labels;  /* [batch]; -1 = no sample (the tail of a validation pass, or a bad picture
                         there) */
    uint8_t *pixels;  /* [batch, image, image, 3], RGB */
    int64_t position; /* of its first sample in the stream */
    int64_t count;    /* labels >= 0 */
    int index;        /* of the slot */
    size_t bytes;     /* of the slot */
} dnr_batch;

typedef struct dnr_bad_sample {
    const char *name;
    const char *reason;
    int64_t times; /* how often it was met */
} dnr_bad_sample;

typedef struct dnr_loader_stats {
    double wait_s;                  /* time dnr_loader_next waited, in all */
    int64_t bad;                    /* distinct bad samples met so far */
    const dnr_bad_sample *bad_list; /* borrowed until the next call on the loader */
} dnr_loader_stats;

/* The loader borrows `src` and `dev` (for pinned memory; NULL = ordinary memory). */
dnr_status dnr_loader_open(dnr_source *src, dnr_device *dev, const dnr_loader_opts *opts,
                           dnr_loader **out);
void dnr_loader_close(dnr_loader *l);
/* The next batch in order; a validation pass ends with *more = false and no batch.
 * `more` may be NULL for a training stream. The slot is the caller's until dnr_loader_release. */
dnr_status dnr_loader_next(dnr_loader *l, dnr_batch *out, bool *more);
void dnr_loader_release(dnr_loader *l, const dnr_batch *b);
/* Starts a validation pass anew. All batches must have been released. */
dnr_status dnr_loader_rewind(dnr_loader *l);
void dnr_loader_get_stats(dnr_loader *l, dnr_loader_stats *out);
const dnr_loader_opts *dnr_loader_get_opts(const dnr_loader *l); /* with defaults filled in */
/* Another loader of the same source and options, whose first batch begins at `position` of the stream. */
dnr_status dnr_loader_open_at(const dnr_loader *l, int64_t position, dnr_loader **out);
/* Name of sample i of a batch that was not released yet; NULL where there is none. */
const char *dnr_loader_sample_name(const dnr_loader *l, const dnr_batch *b, int64_t i);

/* A batch of the caller's own, in pinned memory of `dev` (NULL: ordinary memory): black pictures, labels
 * −1 (no sample). For pictures that are in memory already, and for measurements without a loader. */
dnr_status dnr_batch_new(dnr_device *dev, int64_t batch, int image, dnr_batch *out);
void dnr_batch_free(dnr_device *dev, dnr_batch *b);

/* ---------------------------------------------------------------- training */

typedef enum dnr_precision {
    DNR_PRECISION_AUTO, /* fp16 on CUDA, fp32 on the CPU */
    DNR_PRECISION_FP64, /* the reference back end only */
    DNR_PRECISION_FP32,
    DNR_PRECISION_TF32,
    DNR_PRECISION_FP16,
    DNR_PRECISION_BF16,
} dnr_precision;

const char *dnr_precision_name(dnr_precision p);

typedef struct dnr_model_opts {
    const char *name; /* "resnet50", "resnet20", … (see dnr_model_names) */
    int classes;
    const char *stem;        /* "imagenet" or "cifar"; NULL = the model's usual one */
    bool zero_init_residual; /* last batch norm of each block starts at gamma = 0 */
    bool sync_bn;            /* of several ranks: batch norm over the batches of all, */
    int sync_bn_group;       /* or of so many ranks each, in their order; 0: of all */
} dnr_model_opts;

/* NULL-terminated list of the models that dnr_trainer_create knows. */
const char *const *dnr_model_names(void);

typedef enum dnr_schedule {
    DNR_SCHEDULE_CONSTANT,
    DNR_SCHEDULE_STEP,      /* lr · gamma^⌊epoch / step_epochs⌋ */
    DNR_SCHEDULE_MULTISTEP, /* lr · gamma^(number of milestones passed) */
    DNR_SCHEDULE_LINEAR,    /* straight from lr to lr_min */
    DNR_SCHEDULE_COSINE,    /* lr_min + (lr − lr_min) · (1 + cos π t) / 2 */
    DNR_SCHEDULE_POLY,      /* lr_min + (lr − lr_min) · (1 − t)^power */
    DNR_SCHEDULE_ONECYCLE,  /* PyTorch's OneCycleLR with cosine annealing, momentum kept */
} dnr_schedule;

#define DNR_MAX_MILESTONES 16

typedef struct dnr_optim_opts {
    double lr; /* peak learning rate, already scaled to the global batch */
    double momentum;
    bool nesterov;
    double weight_decay;
    bool decay_norm_bias; /* decay batch-norm weights and biases too */
    double clip_norm;     /* 0 = off; else torch.nn.utils.clip_grad_norm_ */
    dnr_schedule schedule;
    double warmup_epochs; /* linear from warmup_factor · lr */
    double warmup_factor; /* 0 = from one step's worth, lr / steps of warm-up */
    double lr_min;
    double gamma;                          /* STEP, MULTISTEP */
    double step_epochs;                    /* STEP */
    double power;                          /* POLY */
    double milestones[DNR_MAX_MILESTONES]; /* MULTISTEP, in epochs */
    int n_milestones;
    double pct_start, div_factor, final_div_factor; /* ONECYCLE; 0,0,0 = 0.3, 25, 1e4 */
} dnr_optim_opts;

/* The learning rate after `samples` of `total` samples; a pure function. `epoch` = samples in an
 * epoch, `global_batch` = samples of a step. */
double dnr_learning_rate(const dnr_optim_opts *o, int64_t samples, int64_t total, int64_t epoch,
                         int64_t global_batch);

typedef enum dnr_recompute {
    DNR_RECOMPUTE_NONE,
    DNR_RECOMPUTE_STAGE, /* keep only what enters a stage */
    DNR_RECOMPUTE_BLOCK, /* keep only what enters a residual block */
    DNR_RECOMPUTE_CHEAP, /* remake what takes one pass over memory: batch norms without a residual */
    DNR_RECOMPUTE_AUTO, /* of those the one that costs least and needs no more than recompute_gib; of CHEAP no more
                           than it takes for that */
} dnr_recompute;

/* How far graphs are fused where the device gains by it. All levels compute the same; all but OFF fold batch norm into
 * convolutions for evaluation. */
typedef enum dnr_fusion {
    DNR_FUSION_AUTO, /* D3 in fp16 and bf16, else D1 */
    DNR_FUSION_OFF,
    DNR_FUSION_D1, /* batch-norm statistics come out of the convolution before, the stem's norm and pool are
                      one pass, and norms with a residual leave a mask for their gradient */
    DNR_FUSION_D2, /* D1, and algebraic batch norm: the gradients of 1x1 convolutions that widen and of the norm
                      behind them come without the tensor between the two, which is then not kept */
    DNR_FUSION_D3, /* D2, and the forward pass of these layers does not write that tensor either, where the device
                      can do without */
} dnr_fusion;

/* As what gradients travel between ranks. In 16 bits they are half as many bytes; each is rounded before it leaves, and
 * their sum whenever a rank has added to it: over N ranks an element is off by at most N · u · Σ|g|, u = 2^-11 (fp16) or
 * 2^-8 (bf16). */
typedef enum dnr_reduce {
    DNR_REDUCE_F32,
    DNR_REDUCE_F16, /* needs a scaled loss (DNR_PRECISION_FP16): small gradients would vanish */
    DNR_REDUCE_BF16,
} dnr_reduce;

typedef struct dnr_trainer_opts {
    dnr_model_opts model;
    dnr_optim_opts optim;
    dnr_precision precision;
    int64_t batch;      /* micro-batch of this rank; 0 = only evaluates (set eval_batch) */
    int64_t accumulate; /* micro-batches of a step; 0 = 1 */
    int image;          /* height and width */
    double mean[3],
        std[3]; /* of the channels, for pixels scaled to 0…1; std 0,0,0 = ImageNet's mean and std */
    double label_smoothing;
    double ema;            /* decay of a moving average of the weights, each step; 0 = none */
    int64_t epoch_samples; /* samples in an epoch */
    int64_t total_samples; /* of the whole run, for the schedule */
    uint64_t seed;         /* of the initial weights */
    bool deterministic;    /* same bits every time on the same kind of machine */
    dnr_recompute recompute;
    double
        recompute_gib; /* DNR_RECOMPUTE_AUTO: most memory of store, arena and staging together; DNR_EMEM with the
                             least that would do where nothing fits */
    dnr_fusion fusion;
    double memory_fraction; /* most of the device's memory that may be planned; 0 = 0.9 */
    int64_t workspace_mb;   /* cap of one launch's workspace; 0 = 1024 */
    bool benchmark;         /* time candidate implementations before step one */
    const char *
        pins; /* lines "LAYER.PASS=ENGINE": on CUDA, in training, the convolution LAYER computes PASS (fprop, dgrad
                         or wgrad) by this engine of cuDNN's, as dnr_tune writes it; where cuDNN no longer does,
                         another is taken, with a remark. NULL: none */
    const char
        *cache; /* file that keeps what `benchmark` chose on a GPU, for later starts; NULL: none */
    int64_t eval_batch; /* 0 = batch */
    int eval_image;     /* 0 = image */
    dnr_comm *comm;     /* borrowed; NULL: this trainer is alone */
    double bucket_mb;   /* gradients are summed over ranks in pieces of this many MiB; 0 = 25 */
    dnr_reduce reduce;  /* as what they travel */
} dnr_trainer_opts;

typedef struct dnr_trainer dnr_trainer;

/* State after a step, as read from the device. */
typedef struct dnr_metrics {
    int64_t step;      /* optimizer steps attempted */
    int64_t samples;   /* seen so far */
    double loss;       /* mean over the step's samples, unscaled */
    double top1, top5; /* shares of the step's samples */
    double lr;
    double loss_scale; /* 1 where unused */
    int64_t skipped;   /* steps skipped for overflow, so far */
    double grad_norm;  /* before clipping; 0 where clipping is off */
    bool stop; /* a rank asked to stop (dnr_trainer_ask_stop): all learn it at the same step */
    /* DNR_FUSION_D2 and D3, else 0: how far what a channel of an algebraic layer sums up is from 0 beside its spread, the
     * largest such ratio; and with D3 how many channels were beyond what a Gram matrix can tell, so that their variance
     * was taken from the activations */
    double algbn_ratio;
    int64_t algbn_exact;
} dnr_metrics;

typedef struct dnr_eval_result {
    int64_t images, correct1, correct5;
    double loss; /* mean; without label smoothing */
} dnr_eval_result;

/* Builds the model, the plans of all programs and their memory map, reserves the memory and
 * initialises the weights (He-normal, fan-out). DNR_EMEM, before any memory is taken, when the plan
 * does not fit; the error names the largest batch that does. The trainer borrows `dev`. */
dnr_status dnr_trainer_create(dnr_device *dev, const dnr_trainer_opts *opts, dnr_trainer **out);
void dnr_trainer_destroy(dnr_trainer *t);

/* One optimizer step: `accumulate` batches from the loader. Enqueues and returns; `*out` describes
 * the step before the one just enqueued (step = 0 when there was none yet), so nothing waits for
 * the device. The loader must live until the step is described.
 *
 * A step with a gradient that is not finite changes no weight. In fp16 the loss scale is halved then;
 * where it is 1 or unused, training cannot go on: the step is run again, op by op, and the call that
 * would describe it (and each later one) fails with DNR_EFAIL, naming the step, the first layer and
 * tensor that is not finite, its range, the samples and the likely cause; the log gets the names of
 * all samples. */
dnr_status dnr_trainer_step(dnr_trainer *t, dnr_loader *l, dnr_metrics *out);
/* The same on batches of the caller's, `n` = `accumulate` of them. The caller's again on return. */
dnr_status dnr_trainer_step_on(dnr_trainer *t, const dnr_batch *b, int64_t n, dnr_metrics *out);
/* From the next step on, the metrics of all ranks say `stop`: they can end after the same step. An evaluation by one rank
 * alone ends at once, with DNR_STOPPED. May be called from a signal handler. */
void dnr_trainer_ask_stop(dnr_trainer *t);
/* All ranks take over rank 0's weights, statistics, momentum, counters and position, verified by hash (DNR_EPEER). The
 * first step or evaluation does so by itself; needed again where they change later. */
dnr_status dnr_trainer_share(dnr_trainer *t);
/* Waits (bounded) until all enqueued steps are done and describes the last one. */
dnr_status dnr_trainer_finish(dnr_trainer *t, dnr_metrics *out);
/* One exact pass over a validation loader: each sample counts once. Of several ranks, each evaluates its share with rank
 * 0's running statistics, and all get the result of the whole. */
dnr_status dnr_trainer_eval(dnr_trainer *t, dnr_loader *l, dnr_eval_result *out);
/* The same with the moving averages of the weights; DNR_EUSAGE where opts.ema was 0. */
dnr_status dnr_trainer_eval_ema(dnr_trainer *t, dnr_loader *l, dnr_eval_result *out);
/* The forward pass of evaluation over a batch of eval_batch pictures of eval_image, whatever their labels.
 * Waits for `logits` [eval_batch, classes]; where that is NULL it enqueues and returns. */
dnr_status dnr_trainer_predict(dnr_trainer *t, const dnr_batch *b, float *logits);

/* Weights and running statistics, with torchvision's names and layouts. `path` is written whole or
 * not at all (temporary file, fsync, rename). */
dnr_status dnr_trainer_save(dnr_trainer *t, const char *path);
dnr_status dnr_trainer_save_ema(dnr_trainer *t, const char *path);
/* DNR_EDATA where the file is missing, damaged, or of another model (names the first difference).
 * Averages start anew at what was loaded. */
dnr_status dnr_trainer_load(dnr_trainer *t, const char *path);
/* The same, to begin a training with: the last layer may be of another number of classes, and then
 * keeps its initial values. Says what was taken and what was not through the log. */
dnr_status dnr_trainer_init_from(dnr_trainer *t, const char *path);

/* ---------------------------------------------------------------- checkpoints */

/* All that a training needs to go on as if it had never stopped. A checkpoint is a folder, complete or absent, whatever happens while it is written:
 *
 *     model.safetensors      weights and running statistics, as dnr_trainer_save writes them
 *     model_ema.safetensors  their moving averages, where opts.ema is set
 *     trainer.safetensors    momentum, the state block (loss scale, counters), and in its metadata the
 *                            position in the stream, the seed, what it was made with, and notes
 *     checksums              XXH64 of these files, one line each, as `xxhsum -c` reads them */

/* Writes the checkpoint `folder` (its parent must exist); one of that name is replaced. `notes`:
 * pairs of key and text for the caller's own use, NULL-terminated; may be NULL. Waits for enqueued
 * steps. Where it fails (DNR_EDISK), what lay there before is untouched. */
dnr_status dnr_checkpoint_save(dnr_trainer *t, const char *folder, const char *const *notes);

typedef struct dnr_checkpoint dnr_checkpoint;

/* Opens a checkpoint after reading every byte and comparing checksums. DNR_EDATA, with what is wrong,
 * where it is missing, incomplete or damaged. */
dnr_status dnr_checkpoint_open(const char *folder, dnr_checkpoint **out);
/* The whole one of most steps among the checkpoints "step-…" in `folder`; *out = NULL where there is
 * none, or no such folder. Each damaged one of more steps is passed over with a warning; a whole
 * one that cannot be used, as of another version of dnnrun, is an error. */
dnr_status dnr_checkpoint_newest(const char *folder, dnr_checkpoint **out);
void dnr_checkpoint_close(dnr_checkpoint *c);
const char *dnr_checkpoint_folder(const dnr_checkpoint *c);
int64_t dnr_checkpoint_steps(const dnr_checkpoint *c);
int64_t dnr_checkpoint_samples(const dnr_checkpoint *c); /* seen: the next position in the stream */
int64_t dnr_checkpoint_global_batch(const dnr_checkpoint *c);
const char *dnr_checkpoint_note(const dnr_checkpoint *c, const char *key); /* NULL: none */
/* The trainer goes on where the checkpoint's stood; open its loader at dnr_checkpoint_samples. With
 * the same options, `deterministic` and the same kind of machine: to the same bits. DNR_EDATA where
 * it is of another model, DNR_EUSAGE where the global batch differs; everything is checked before
 * anything is changed. */
dnr_status dnr_checkpoint_restore(const dnr_checkpoint *c, dnr_trainer *t);
/* Removes the checkpoints "step-…" in `folder` except the `keep` of most steps and the one named
 * `best` (may be NULL), and what interrupted saves have left there. keep = 0 keeps all. */
dnr_status dnr_checkpoint_prune(const char *folder, int keep, const char *best);
/* Renames the checkpoints of more than `steps` steps in `folder` to superseded-step-…, so that a run
 * that goes on from an earlier one does not find them; says so. */
dnr_status dnr_checkpoint_rewind(const char *folder, int64_t steps);

/* ---------------------------------------------------------------- looking inside */

/* Text for the metadata of the files that this trainer saves, such as "class_names". The library itself
 * writes "architecture", "stem", "classes", "image" (pixels), "mean" and "std". At most 16. */
dnr_status dnr_trainer_note(dnr_trainer *t, const char *key, const char *value);

/* A file of weights, for what it says of itself. */
typedef struct dnr_weights dnr_weights;
dnr_status dnr_weights_open(const char *path, dnr_weights **out);
void dnr_weights_close(dnr_weights *w);
const char *dnr_weights_metadata(const dnr_weights *w, const char *key); /* NULL: it does not say */

/* What runs and where it lies: ops, launches, implementations, bytes, FLOPs, memory map and peak of
 * each program. */
typedef enum dnr_explain_form { DNR_EXPLAIN_TEXT, DNR_EXPLAIN_JSON } dnr_explain_form;
/* Times every launch of every program on the device, alone and repeated, for dnr_trainer_explain to show. Noise
 * is the input; afterwards the weights are initialised anew. Takes seconds. */
dnr_status dnr_trainer_measure(dnr_trainer *t);
dnr_status dnr_trainer_explain(const dnr_trainer *t, dnr_explain_form form, FILE *out);
/* The next `steps` calls of dnr_trainer_step are traced, and with the last `path` is written: Chrome's trace format
 * (chrome://tracing, ui.perfetto.dev), a bar for each launch in the row of its lane, in the order of the device's clock,
 * and a row for the host. Launches run one by one then, and each step is waited for, so that steps are
 * slower; they give the same results. */
dnr_status dnr_trainer_profile(dnr_trainer *t, int64_t steps, const char *path);

/* One way to compute an op, as it was timed. */
typedef struct dnr_tune_way {
    const char *implementation;
    double us;        /* < 0: it was left out: it fails, is wrong, or was hopeless */
    size_t workspace; /* bytes */
} dnr_tune_way;

/* The contest of one op. Equal ops share one; each is told. */
typedef struct dnr_tune_contest {
    const char *layer, *pass, *op; /* "layer1.0.conv1", "fprop", "conv.stats" */
    bool training;                 /* else of evaluation */
    const char *problem;           /* its tensors */
    const dnr_tune_way *ways;
    int n, chosen;   /* chosen < 0: none of them was timed */
    const char *pin; /* ENGINE for dnr_trainer_opts.pins; NULL: the device has no such names */
} dnr_tune_contest;
typedef void (*dnr_tune_fn)(void *user, const dnr_tune_contest *c);

/* Times the convolutions of all programs that dnr_trainer_create would build, whatever opts->cache holds, keeps the
 * choices there, and tells `fn` of each. Takes memory for timing alone. DNR_EUSAGE where opts say not to time. */
dnr_status dnr_tune(dnr_device *dev, const dnr_trainer_opts *opts, dnr_tune_fn fn, void *user);

/* A hash of the programs (not of the implementations chosen): equal on ranks that can work
 * together. */
uint64_t dnr_trainer_plan_hash(const dnr_trainer *t);
/* Trainable parameters of the model (running statistics not counted). */
int64_t dnr_trainer_parameters(const dnr_trainer *t);
/* Bytes planned: arena (peak over the programs) and store. */
void dnr_trainer_memory(const dnr_trainer *t, size_t *arena, size_t *store);
dnr_precision dnr_trainer_precision(const dnr_trainer *t); /* AUTO resolved */
dnr_recompute dnr_trainer_recompute(const dnr_trainer *t); /* likewise */
const char *dnr_recompute_name(dnr_recompute r);           /* "none", "stage" … */

#ifdef __cplusplus
}
#endif
#endif
