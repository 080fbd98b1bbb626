/* tool.h: what the sub-commands share: errors, nearest names, arguments, formats. */
#ifndef TOOL_H
#define TOOL_H

#include "dnnrun.h"

/* ---- errors. A function that fails fills `err` and returns its status; main prints it once:
 *
 *     tool_fail(err, DNR_EUSAGE, where, "unknown key %s", name);
 *     return tool_remedy(err, "did you mean %s?", near);
 */
dnr_status tool_fail(dnr_error *err, dnr_status status, const char *where, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
dnr_status tool_remedy(dnr_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Takes over the library's last error; `where` (may be NULL) goes before its place, `what` before its text. */
dnr_status tool_lib_error(dnr_error *err, const char *where, const char *what);

/* Forwards a failure of the library, or of the tool, through the function's `out:` label. */
#define TOOL_LIB(st, expr)                                                                         \
    do {                                                                                           \
        if (((st) = (expr)) != DNR_OK) {                                                           \
            tool_lib_error(err, NULL, NULL);                                                       \
            goto out;                                                                              \
        }                                                                                          \
    } while (0)
#define TOOL_TRY(st, expr)                                                                         \
    do {                                                                                           \
        if (((st) = (expr)) != DNR_OK)                                                             \
            goto out;                                                                              \
    } while (0)

/* ---- names */

/* Edit distance with transpositions (Damerau, restricted), letter case ignored. */
int tool_distance(const char *a, const char *b);
/* The name nearest to `wrong`, or NULL where none is near (at most a third of its letters and one differ). */
const char *tool_nearest(const char *wrong, const char *const names[], int n);

/* ---- arguments: CFG [section.key=value …] and the options that the command allows */

enum {
    ARG_OUT = 1,
    ARG_DRY_RUN = 2,
    ARG_WEIGHTS = 4,
    ARG_JSON = 8,
    ARG_RESUME = 32,
    ARG_INIT = 64,
    ARG_ALLOW_CHANGES = 128,
    ARG_MEASURE = 16,
    ARG_EXPORT = 256,
    ARG_PROFILE = 512
};
enum { /* of predict, bench and report */
       ARG_TOP = 1 << 16,
       ARG_SHOW = 1 << 17,
       ARG_WARMUP = 1 << 18,
       ARG_RUNS = 1 << 19,
       ARG_BASELINE = 1 << 20,
       ARG_TOLERANCE = 1 << 21,
       ARG_PYTHON = 1 << 22,
       ARG_EXCHANGE = 1 << 23,
       ARG_INFER = 1 << 24,
       ARG_LOG_ALL = 1 << 25,
       ARG_MOST = 1 << 26
};

typedef struct tool_args {
    const char *cfg; /* NULL: none given */
    char **set;      /* what follows */
    int n_set;
    const char *out, *weights, *resume, *init;
    bool allow_changes, dry_run, json, measure, export, help;
    int64_t top, warmup, runs, most, profile; /* < 0: not given */
    double tolerance;                         /* share; < 0: not given */
    const char *baseline, *python, *exchange;
    bool show, infer;
    bool log_all_ranks;
} tool_args;

/* `argv[0]` is the command's name. Permutes argv. */
dnr_status tool_parse(int argc, char **argv, int allowed, tool_args *a, dnr_error *err);
/* Fails where no CFG was given. */
dnr_status tool_need_cfg(const tool_args *a, const char *command, dnr_error *err);

/* ---- commands */

typedef struct tool_command {
    const char *name;
    const char *summary; /* NULL: not listed */
    dnr_status (*run)(int argc, char **argv, dnr_error *err);
} tool_command;

dnr_status cmd_train(int argc, char **argv, dnr_error *err);
dnr_status cmd_eval(int argc, char **argv, dnr_error *err);
dnr_status cmd_tune(int argc, char **argv, dnr_error *err);
dnr_status cmd_plan(int argc, char **argv, dnr_error *err);
dnr_status cmd_predict(int argc, char **argv, dnr_error *err);
dnr_status cmd_report(int argc, char **argv, dnr_error *err);
dnr_status cmd_bench(int argc, char **argv, dnr_error *err);
dnr_status cmd_version(int argc, char **argv, dnr_error *err);
dnr_status cmd_config_doc(int argc, char **argv, dnr_error *err);

/* ---- formats; each returns buf */

const char *tool_bytes(double bytes, char buf[32]);      /* "12.3 MiB" */
const char *tool_thousands(int64_t n, char buf[32]);     /* "1,281,167" */
const char *tool_duration(double seconds, char buf[32]); /* "1:02:03", "4:05", "7.2 s" */
double tool_now(void);                                   /* seconds, monotonic */

/* Folders of what came with dnnrun: as it is installed, and as it lies in a build folder. False where i ≥ 2. */
bool tool_share(int i, char *buf, size_t size);
/* Path of a file in the first of them that has it. */
bool tool_shipped(const char *file, char *buf, size_t size);

#endif
