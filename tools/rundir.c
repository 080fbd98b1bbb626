/* rundir.c: the run directory. */
#include "rundir.h"
#include "events.h"
#include "screen.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_ROOM = CFG_TEXT + 64, LOCK_WAIT_S = 5 };

static dnr_status disk_error(const char *path, const char *doing, dnr_error *err)
{
    int e = errno;
    tool_fail(err, DNR_EDISK, "run directory", "cannot %s %.500s: %s", doing, path, strerror(e));
    return tool_remedy(err, e == ENOSPC ? "free some space, or choose another place with --out DIR"
                            : e == EFBIG
                                ? "raise the limit on file sizes (ulimit -f), or use another place "
                                  "with --out DIR"
                                : "choose a place that you may write to with --out DIR");
}

/* mkdir -p */
static dnr_status make_folders(const char *path, dnr_error *err)
{
    char part[PATH_ROOM];
    snprintf(part, sizeof part, "%s", path);
    for (char *p = part + 1;; p++) {
        char c = *p;
        if (c != '/' && c)
            continue;
        *p = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return disk_error(part, "make", err);
        if (!c)
            break;
        *p = c;
    }
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) {
        errno = ENOTDIR;
        return disk_error(path, "make", err);
    }
    return DNR_OK;
}

static const char *inside(const rundir *r, const char *name, char buf[PATH_ROOM])
{
    snprintf(buf, PATH_ROOM, "%s/%s", r->path, name);
    return buf;
}

/* Does the name still stand for the open file? Whoever held the lock may have removed it. */
static bool is_still(int fd, const char *path)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

/* A lock ends with the process, however it ends; one that was killed just now may take a moment. A file system
 * without locks is used without. */
static dnr_status take_lock(rundir *r, dnr_error *err)
{
    char file[PATH_ROOM];
    inside(r, ".lock", file);
    for (double end = tool_now() + LOCK_WAIT_S; tool_now() < end; usleep(20000)) {
        int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0)
            return disk_error(file, "write", err);
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 ? is_still(fd, file) : errno != EWOULDBLOCK) {
            r->lock = fd + 1;
            return DNR_OK;
        }
        close(fd);
    }
    tool_fail(err, DNR_EUSAGE, "run directory", "another process is training in %.500s", r->path);
    return tool_remedy(err, "wait for it, stop it, or choose another folder with --out DIR");
}

static dnr_status refuse_a_run(const rundir *r, const char *where, dnr_error *err)
{
    static const char *const marks[] = {"resolved.cfg", "manifest.json", "metrics.jsonl",
                                        "checkpoints"};
    char file[PATH_ROOM];
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++)
        if (access(inside(r, marks[i], file), F_OK) == 0) {
            tool_fail(err, DNR_EUSAGE, where, "%.500s already holds a run (it has %s)", r->path,
                      marks[i]);
            return tool_remedy(
                err, "go on with it: --resume auto; or choose another folder with --out DIR");
        }
    return DNR_OK;
}

/* The longest part of the path that is there, as it is: all but symbolic links. */
static void real_part(const char *path, char real[PATH_MAX])
{
    char part[PATH_ROOM];
    snprintf(part, sizeof part, "%s", path);
    while (!realpath(part, real)) {
        char *slash = strrchr(part, '/');
        if (!slash && !strcmp(part, ".")) { /* a removed folder */
            real[0] = 0;
            return;
        }
        if (slash)
            slash[slash == part] = 0;
        else
            snprintf(part, sizeof part, ".");
    }
}

/* A folder among those of classes would be taken for one of them. */
static dnr_status refuse_data(const char *path, const cfg *c, const char *where, dnr_error *err)
{
    const struct {
        const char *key, *folder, *map;
    } data[] = {{"data.train", c->data.train, c->data.class_map},
                {"data.val", c->data.val, c->data.val_class_map}};
    char run[PATH_MAX], folder[PATH_MAX];
    real_part(path, run);
    for (int i = 0; i < 2; i++) {
        struct stat sb;
        if (!*data[i].folder || *data[i].map || !realpath(data[i].folder, folder) ||
            stat(folder, &sb) != 0 || !S_ISDIR(sb.st_mode))
            continue;
        const size_t n = strlen(folder);
        if (strncmp(run, folder, n) || (run[n] && run[n] != '/' && n > 1))
            continue;
        tool_fail(err, DNR_EUSAGE, where, "the run directory %.250s lies in %s = %.250s", path,
                  data[i].key, data[i].folder);
        return tool_remedy(err, "choose a folder outside of the pictures with --out DIR");
    }
    return DNR_OK;
}

/* A new folder in runs/: other runs may begin, or end and remove what is empty, at the same moment. */
static dnr_status make_new(rundir *r, const cfg *c, dnr_error *err)
{
    char stamp[32], again[8] = "";
    time_t now = time(NULL);
    struct tm tm;
    dnr_status st;
    strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", localtime_r(&now, &tm));
    for (int i = 1; (st = make_folders("runs", err)) == DNR_OK; i++) {
        if (i > 1)
            snprintf(again, sizeof again, "-%d", i);
        snprintf(r->path, sizeof r->path, "runs/%s-%s%s", c->name, stamp, again);
        if (mkdir(r->path, 0777) == 0)
            break;
        if ((errno != EEXIST && errno != ENOENT) || i == 1000)
            return disk_error(r->path, "make", err);
    }
    return st;
}

dnr_status rundir_make(rundir *r, const cfg *c, const char *out, bool go_on, dnr_error *err)
{
    dnr_status st;
    *r = (rundir){0};
    if (!out && *c->run.out)
        out = c->run.out;
    if (out) {
        if (strlen(out) >= sizeof r->path - 1 || !*out) {
            tool_fail(err, DNR_EUSAGE, "command line", "%s path for the run directory",
                      *out ? "too long a" : "empty");
            return tool_remedy(err, "give a folder with --out DIR");
        }
        snprintf(r->path, sizeof r->path, "%s", out);
    }
    const char *where = out && out == c->run.out ? "run.out" : "command line";
    if (out && !go_on)
        TOOL_TRY(st, refuse_a_run(r, where, err));
    if (!go_on)
        TOOL_TRY(st, refuse_data(out ? out : "runs", c, where, err));
    TOOL_TRY(st, out ? make_folders(r->path, err) : make_new(r, c, err));
    if (access(r->path, W_OK) != 0) {
        st = disk_error(r->path, "write to", err);
        goto out;
    }
    TOOL_TRY(st, take_lock(r, err));
    if (!go_on) /* one may have begun, and ended, before the lock was ours */
        TOOL_TRY(st, refuse_a_run(r, where, err));
out:
    return st;
}

static json_t *hex64(uint64_t v)
{
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)v);
    return json_string(text);
}

static json_t *describe_source(const dnr_source *s, const char *path)
{
    return s ? json_pack("{s:o, s:I, s:i, s:o}", "path", rundir_text(path), "pictures",
                         (json_int_t)dnr_source_count(s), "classes", dnr_source_classes(s), "hash",
                         hex64(dnr_source_hash(s)))
             : json_null();
}

static json_t *manifest(const session *s, int argc, char **argv)
{
    char stamp[40], host[128] = "", *cwd = getcwd(NULL, 0);
    time_t now = time(NULL);
    struct tm tm;
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    gethostname(host, sizeof host - 1);
    json_t *command = json_array();
    for (int i = 0; i < argc; i++)
        json_array_append_new(command, rundir_text(argv[i]));
    size_t arena = 0, store = 0;
    dnr_trainer_memory(s->trainer, &arena, &store);
    json_t *m = json_pack("{s:s, s:s, s:o, s:o, s:o, s:o}", "dnnrun", dnr_version(), "started",
                          stamp, "host", rundir_text(host), "folder", rundir_text(cwd ? cwd : ""),
                          "command", command, "cfg", rundir_text(s->cfg.path));
    json_t *d = json_pack("{s:s, s:o, s:s}", "device", dnr_device_name(s->dev),
                          "device_description", rundir_text(dnr_device_description(s->dev)),
                          "precision", dnr_precision_name(dnr_trainer_precision(s->trainer)));
    json_t *p =
        json_pack("{s:s, s:I, s:I, s:f, s:I, s:I, s:I, s:o, s:{s:o, s:o}}", "model",
                  s->cfg.model.name, "parameters", (json_int_t)dnr_trainer_parameters(s->trainer),
                  "global_batch", (json_int_t)s->global_batch, "lr", s->lr, "steps",
                  (json_int_t)s->steps, "arena_bytes", (json_int_t)arena, "store_bytes",
                  (json_int_t)store, "plan_hash", hex64(dnr_trainer_plan_hash(s->trainer)), "data",
                  "train", describe_source(s->train, s->cfg.data.train), "val",
                  describe_source(s->val, s->cfg.data.val));
    json_object_update(m, d);
    json_object_update(m, p);
    json_decref(d);
    json_decref(p);
    free(cwd);
    return m;
}

/* ---------------------------------------------------------------- files that appear whole */

static FILE *begin_file(const rundir *r, const char *name)
{
    char temp[PATH_ROOM], partial[64];
    snprintf(partial, sizeof partial, ".%s.partial", name);
    return fopen(inside(r, partial, temp), "w");
}

/* Puts the file in place; `bad`: writing it has failed already. */
static dnr_status end_file(const rundir *r, FILE *f, const char *name, bool bad, dnr_error *err)
{
    char temp[PATH_ROOM], file[PATH_ROOM], partial[64];
    snprintf(partial, sizeof partial, ".%s.partial", name);
    inside(r, partial, temp);
    inside(r, name, file);
    if (f) {
        bad = bad || ferror(f) || fflush(f) != 0 || fsync(fileno(f)) != 0;
        int e = errno;
        if (fclose(f) == 0 || bad)
            errno = e;
        else
            bad = true;
        if (!bad && rename(temp, file) == 0)
            return DNR_OK;
        e = errno;
        unlink(temp);
        errno = e;
    }
    return disk_error(file, "write", err);
}

static dnr_status write_cfg(const rundir *r, const session *s, dnr_error *err)
{
    FILE *f = begin_file(r, "resolved.cfg");
    if (f) {
        fprintf(f, "# %s, every key with its value\n", s->cfg.name);
        cfg_write(&s->cfg, f);
    }
    return end_file(r, f, "resolved.cfg", false, err);
}

/* The manifest of the first start stays; each resume adds what is so now to its list "resumes". */
static dnr_status write_manifest(const rundir *r, const session *s, const dnr_checkpoint *from,
                                 int argc, char **argv, dnr_error *err)
{
    char file[PATH_ROOM];
    json_t *now = manifest(s, argc, argv), *first = NULL;
    if (now && from) {
        json_object_set_new(now, "checkpoint", rundir_text(dnr_checkpoint_folder(from)));
        json_object_set_new(now, "step", json_integer(dnr_checkpoint_steps(from)));
        first = json_load_file(inside(r, "manifest.json", file), 0, NULL);
        json_t *list = json_object_get(first, "resumes");
        if (!list && json_is_object(first)) {
            list = json_array();
            json_object_set_new(first, "resumes", list);
        }
        json_array_append(list, now); /* fails, as it should, where there is no manifest */
    }
    if (!now) {
        tool_fail(err, DNR_EMEM, "run directory", "out of host memory");
        return tool_remedy(err, "free some");
    }
    FILE *f = begin_file(r, "manifest.json");
    bool bad = f && json_dumpf(json_is_object(first) ? first : now, f, JSON_INDENT(2)) != 0;
    json_decref(first);
    json_decref(now);
    return end_file(r, f, "manifest.json", bad, err);
}

int rundir_keep_records(FILE *from, FILE *to, int64_t step)
{
    char *line = NULL;
    size_t room = 0;
    int damaged = 0;
    for (ssize_t n; (n = getline(&line, &room, from)) > 0;) {
        json_t *j = line[n - 1] == '\n' ? json_loadb(line, (size_t)n, 0, NULL) : NULL;
        const json_t *at = json_object_get(j, "step");
        if (!json_is_integer(at))
            damaged++;
        else if (json_integer_value(at) <= step)
            fwrite(line, 1, (size_t)n, to);
        json_decref(j);
    }
    free(line);
    return damaged;
}

static dnr_status write_plan(const rundir *r, const session *s, dnr_error *err)
{
    FILE *f = begin_file(r, "plan.json");
    bool bad = f && dnr_trainer_explain(s->trainer, DNR_EXPLAIN_JSON, f) != DNR_OK;
    return end_file(r, f, "plan.json", bad, err);
}

static dnr_status open_events(rundir *r, const session *s, int64_t step, dnr_error *err)
{
    if (!s->cfg.run.tensorboard)
        return DNR_OK;
    r->events = events_open(r->path, step);
    return r->events ? DNR_OK : disk_error(r->path, "write TensorBoard's events to", err);
}

static dnr_status open_metrics(rundir *r, int64_t step, dnr_error *err)
{
    char file[PATH_ROOM];
    dnr_status st;
    FILE *from = fopen(inside(r, "metrics.jsonl", file), "r"), *to = begin_file(r, "metrics.jsonl");
    bool bad = !from && errno != ENOENT && to;
    int damaged = from && to ? rundir_keep_records(from, to, step) : 0;
    if (damaged)
        screen_print("metrics.jsonl: %d damaged or unfinished line%s dropped", damaged,
                     damaged == 1 ? "" : "s");
    if (from) {
        bad = bad || ferror(from);
        fclose(from);
    }
    TOOL_TRY(st, end_file(r, to, "metrics.jsonl", bad, err));
    r->metrics = fopen(file, "a");
    if (!r->metrics)
        st = disk_error(file, "write", err);
out:
    return st;
}

dnr_status rundir_begin(rundir *r, const session *s, const dnr_checkpoint *from, int argc,
                        char **argv, dnr_error *err)
{
    char folder[PATH_ROOM];
    dnr_status st;
    int64_t step = from ? dnr_checkpoint_steps(from) : -1;
    r->begun = true;
    TOOL_TRY(st, make_folders(inside(r, "checkpoints", folder), err));
    TOOL_LIB(st, dnr_checkpoint_rewind(folder, step));
    TOOL_TRY(st, write_cfg(r, s, err));
    TOOL_TRY(st, write_manifest(r, s, from, argc, argv, err));
    TOOL_TRY(st, write_plan(r, s, err));
    TOOL_TRY(st, open_metrics(r, step, err));
    TOOL_TRY(st, open_events(r, s, step, err));
out:
    return st;
}

json_t *rundir_text(const char *s)
{
    json_t *j = json_string(s);
    if (j)
        return j;
    char *ascii = strdup(s); /* no UTF-8, so no JSON: show what can be shown */
    for (char *p = ascii; p && *p; p++)
        *p = (signed char)*p < 0 ? '?' : *p;
    j = json_string(ascii ? ascii : "?");
    free(ascii);
    return j;
}

json_t *rundir_real(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

dnr_status rundir_record(rundir *r, json_t *record, dnr_error *err)
{
    char file[PATH_ROOM];
    if (!r->metrics) {
        json_decref(record);
        return DNR_OK;
    }
    errno = 0;
    int bad = json_dumpf(record, r->metrics, JSON_COMPACT | JSON_REAL_PRECISION(10));
    int lost = r->events ? events_write(r->events, record) : 0;
    json_decref(record);
    if (bad || fputc('\n', r->metrics) == EOF || fflush(r->metrics) != 0)
        return disk_error(inside(r, "metrics.jsonl", file), "write", err);
    return lost ? disk_error(r->path, "write TensorBoard's events to", err) : DNR_OK;
}

/* ---------------------------------------------------------------- checkpoints */

static void step_name(int64_t step, char name[32])
{
    snprintf(name, 32, "step-%09lld", (long long)step);
}

/* checkpoints/NAME → step-NNNNNNNNN, at once. */
static dnr_status set_link(rundir *r, const char *name, int64_t step, dnr_error *err)
{
    char to[32], rest[64], temp[PATH_ROOM], link[PATH_ROOM];
    step_name(step, to);
    snprintf(rest, sizeof rest, "checkpoints/%s", name);
    inside(r, rest, link);
    snprintf(rest, sizeof rest, "checkpoints/.%s.partial", name);
    inside(r, rest, temp);
    unlink(temp);
    if (symlink(to, temp) != 0 || rename(temp, link) != 0)
        return disk_error(link, "make the link", err);
    return DNR_OK;
}

dnr_status rundir_link(rundir *r, int64_t step, int64_t best, dnr_error *err)
{
    char file[PATH_ROOM], name[32], rest[64];
    dnr_status st = set_link(r, "last", step, err);
    step_name(best, name);
    snprintf(rest, sizeof rest, "checkpoints/%s", name);
    if (st == DNR_OK && best >= 0 && access(inside(r, rest, file), F_OK) == 0)
        st = set_link(r, "best", best, err);
    return st;
}

dnr_status rundir_save(rundir *r, dnr_trainer *t, const rundir_save_opts *o,
                       const char *const *notes, dnr_error *err)
{
    char folder[PATH_ROOM], checkpoint[PATH_ROOM + 32], name[32], best[32];
    dnr_status st;
    /* no checkpoint may be newer than its records */
    if (fsync(fileno(r->metrics)) != 0 && errno != EINVAL)
        return disk_error(inside(r, "metrics.jsonl", folder), "write", err);
    TOOL_TRY(st, make_folders(inside(r, "checkpoints", folder), err));
    step_name(o->step, name);
    snprintf(checkpoint, sizeof checkpoint, "%s/%s", folder, name);
    TOOL_LIB(st, dnr_checkpoint_save(t, checkpoint, notes));
    TOOL_TRY(st, rundir_link(r, o->step, o->best, err));
    step_name(o->best, best);
    if (dnr_checkpoint_prune(folder, (int)o->keep, o->best >= 0 ? best : NULL) != DNR_OK)
        screen_log(NULL, DNR_LOG_WARN, dnr_last_error()->what); /* nothing is lost by it */
out:
    return st;
}

void rundir_close(rundir *r)
{
    char file[PATH_ROOM];
    if (r->metrics)
        fclose(r->metrics);
    if (r->events)
        fclose(r->events);
    if (r->lock) {
        if (!r->begun && access(inside(r, "resolved.cfg", file), F_OK) != 0)
            unlink(inside(r, ".lock", file));
        close(r->lock - 1);
    }
    /* both fail, as they should, where anything is in them */
    if (*r->path)
        rmdir(r->path);
    if (!strncmp(r->path, "runs/", 5))
        rmdir("runs");
    *r = (rundir){0};
}

bool rundir_weights(const char *folder, char weights[CFG_TEXT])
{
    char file[PATH_ROOM];
    snprintf(file, sizeof file, "%s/resolved.cfg", folder);
    snprintf(weights, CFG_TEXT, "%s/checkpoints/last/model.safetensors", folder);
    return access(file, F_OK) == 0;
}
