/* config.h: the cfg of a run: one struct, one table that documents, types and ranges its keys. */
#ifndef CONFIG_H
#define CONFIG_H

#include "tool.h"

enum { CFG_TEXT = 1024, CFG_LIST = DNR_MAX_MILESTONES, CFG_MAX_KEYS = 80, CFG_MAX_PINS = 512 };

#define CFG_PIN "cudnn.pin." /* how the keys of pins begin */

/* cudnn.pin.NAME = ENGINE */
typedef struct cfg_pin {
    char name[80], engine[200];
    int line; /* as in cfg.origin */
} cfg_pin;

typedef struct cfg_list {
    int64_t n;
    double v[CFG_LIST];
} cfg_list;

/* Values of one run. A choice holds its index in the key's list of choices. */
typedef struct cfg {
    char device[CFG_TEXT];
    struct {
        char name[CFG_TEXT];
        int64_t classes, stem;
        bool zero_init_residual, sync_bn;
        int64_t sync_bn_group;
    } model;
    struct {
        char train[CFG_TEXT], val[CFG_TEXT], class_map[CFG_TEXT], val_class_map[CFG_TEXT];
        int64_t synthetic_n, image, resize, crop, pad;
        bool flip;
        double area_min, area_max, aspect_min, aspect_max;
        cfg_list mean, std;
        int64_t on_error, max_bad, max_pixels, threads, prefetch;
        bool shuffle;
    } data;
    struct {
        int64_t epochs, max_steps, batch, accumulate, precision;
        double label_smoothing, clip_norm;
        double ema;
        int64_t seed;
        bool deterministic;
        char init[CFG_TEXT];
    } train;
    struct {
        double lr;
        int64_t base_batch, scale_lr;
        double momentum;
        bool nesterov;
        double weight_decay;
        bool decay_norm_bias;
        int64_t schedule;
        double warmup, warmup_factor, lr_min, gamma, step_epochs, power;
        cfg_list milestones;
        double pct_start, div_factor, final_div_factor;
    } optim;
    struct {
        double fraction;
        char recompute[CFG_TEXT];
    } memory;
    struct {
        bool benchmark;
        int64_t fusion, workspace_mb;
        char cache[CFG_TEXT];
    } cudnn;
    struct {
        double timeout, bucket_mb;
        int64_t reduce_type, transport;
        char standin[CFG_TEXT];
    } dist;
    struct {
        char out[CFG_TEXT];
        int64_t log_every, eval_every;
        double save_every, save_minutes;
        int64_t keep;
        bool tensorboard;
    } run;

    cfg_pin pins[CFG_MAX_PINS];
    int n_pins;

    /* not keys */
    char path[CFG_TEXT]; /* of the file */
    char name[64];       /* "resnet50" of models/resnet50.cfg */
    int origin
        [CFG_MAX_KEYS]; /* by key: 0 the default, else the line of the file, or CFG_FROM_ARGS */
} cfg;

enum { CFG_FROM_ARGS = -1 };

/* Indices of the choices, in the order of the table. */
enum { STEM_AUTO, STEM_IMAGENET, STEM_CIFAR };
enum { CROP_RANDOM, CROP_PAD, CROP_NONE };
enum { ON_ERROR_SKIP, ON_ERROR_STOP };
enum { SCALE_LINEAR, SCALE_NONE };

/* ---- the table (config_table.c) */

typedef enum cfg_type {
    CFG_BOOL,
    CFG_INT,
    CFG_REAL,
    CFG_REALS, /* numbers, separated by blanks or commas */
    CFG_CHOICE,
    CFG_STRING,
    CFG_PATH, /* "@cfg/" at its start is the folder of the cfg file */
} cfg_type;

typedef struct cfg_key {
    const char *name; /* "train.batch" */
    cfg_type type;
    size_t offset; /* in cfg */
    double min, max;
    bool above;          /* the value must be greater than `min` */
    int count;           /* CFG_REALS: exactly this many, or one for all; 0: up to CFG_LIST */
    const char *choices; /* "a|b|c" */
    const char *unset;   /* the default, as it would stand in a cfg */
    const char *unit;    /* or "" */
    const char *doc;     /* Markdown, one paragraph */
} cfg_key;

extern const cfg_key cfg_keys[];
extern const int cfg_n_keys;

/* The key's choices; for model.name those of the library. Returns buf. */
const char *cfg_choices(const cfg_key *k, char buf[512]);
/* "1 … 65536", "> 0", "a | b", … Returns buf. */
const char *cfg_range(const cfg_key *k, char buf[576]);

/* ---- reading (config.c) */

/* Every key at its default. */
void cfg_init(cfg *c);
/* Reads an INI stream; `path` names it in errors and gives "@cfg/" its folder. Unknown and repeated keys, wrong types
 * and values out of range are DNR_EUSAGE with "FILE:LINE", the allowed range or the nearest right name. */
dnr_status cfg_read(cfg *c, FILE *f, const char *path, dnr_error *err);
/* "section.key=value" of the command line; wins over the file. */
dnr_status cfg_set(cfg *c, const char *assignment, dnr_error *err);
/* Checks that span several keys. Call last. */
dnr_status cfg_check(const cfg *c, dnr_error *err);
/* Where a key got its value: "resnet50.cfg:12", "command line", "default". Returns buf. */
const char *cfg_origin(const cfg *c, const char *key, char buf[96]);

/* Finds `name` (a path; without a slash also among the installed cfgs), reads it, applies the assignments
 * and checks. */
dnr_status cfg_load(cfg *c, const char *name, char *const set[], int n_set, dnr_error *err);

/* ---- writing (config_write.c) */

/* Takes the double quotes around a value away, in place. */
void cfg_unquote(char *value);
/* The value as it would stand on the command line. Returns buf. */
const char *cfg_value(const cfg *c, const cfg_key *k, char buf[CFG_TEXT]);
/* All keys with their values, as a cfg that gives the same run. */
void cfg_write(const cfg *c, FILE *out);
/* One line a key: name, default, range. */
void cfg_write_help(FILE *out);
/* docs/cfg.md */
void cfg_write_doc(FILE *out);

#endif
