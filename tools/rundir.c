/* rundir.c: the run directory. */
#include "rundir.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_ROOM = CFG_TEXT + 64 };

static dnr_status disk_error(const char *path, const char *doing, dnr_error *err)
{
    int e = errno;
    tool_fail(err, DNR_EDISK, "run directory", "cannot %s %.500s: %s", doing, path, strerror(e));
    return tool_remedy(err, e == ENOSPC ? "free some space, or choose another place with --out DIR"
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

dnr_status rundir_make(rundir *r, const cfg *c, const char *out, dnr_error *err)
{
    static const char *const marks[] = {"resolved.cfg", "manifest.json", "metrics.jsonl",
                                        "checkpoints"};
    char file[PATH_ROOM];
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
    } else {
        char stamp[32];
        time_t now = time(NULL);
        struct tm tm;
        strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", localtime_r(&now, &tm));
        snprintf(r->path, sizeof r->path, "runs/%s-%s", c->name, stamp);
        for (int i = 2; access(r->path, F_OK) == 0 && i < 100; i++) /* several in one second */
            snprintf(r->path, sizeof r->path, "runs/%s-%s-%d", c->name, stamp, i);
    }
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++) {
        if (access(inside(r, marks[i], file), F_OK) == 0) {
            tool_fail(err, DNR_EUSAGE, out == c->run.out ? "run.out" : "command line",
                      "%.500s already holds a run (it has %s)", r->path, marks[i]);
            return tool_remedy(err, "choose another folder with --out DIR, or remove that one");
        }
    }
    dnr_status st = make_folders(r->path, err);
    if (st == DNR_OK && access(r->path, W_OK) != 0)
        st = disk_error(r->path, "write to", err);
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

/* What dnr_device_list prints, as a list of lines. */
static json_t *describe_backends(void)
{
    char *text = NULL, *save = NULL;
    size_t size = 0;
    json_t *list = json_array();
    FILE *f = open_memstream(&text, &size);
    if (f) {
        dnr_device_list(f);
        fclose(f);
        for (char *p = strtok_r(text, "\n", &save); p; p = strtok_r(NULL, "\n", &save))
            json_array_append_new(list, rundir_text(p));
        free(text);
    }
    return list;
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
    json_t *d = json_pack("{s:s, s:o, s:s, s:o}", "device", dnr_device_name(s->dev),
                          "device_description", rundir_text(dnr_device_description(s->dev)),
                          "precision", dnr_precision_name(dnr_trainer_precision(s->trainer)),
                          "backends", describe_backends());
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

dnr_status rundir_begin(rundir *r, const session *s, int argc, char **argv, dnr_error *err)
{
    char file[PATH_ROOM];
    FILE *f = fopen(inside(r, "resolved.cfg", file), "w");
    if (!f)
        return disk_error(file, "write", err);
    fprintf(f, "# %s, every key with its value\n", s->cfg.name);
    cfg_write(&s->cfg, f);
    if (fclose(f) != 0)
        return disk_error(file, "write", err);

    json_t *m = manifest(s, argc, argv);
    int bad = m ? json_dump_file(m, inside(r, "manifest.json", file), JSON_INDENT(2)) : 0;
    json_decref(m);
    if (!m) {
        tool_fail(err, DNR_EMEM, "run directory", "out of host memory");
        return tool_remedy(err, "free some");
    }
    if (bad)
        return disk_error(file, "write", err);

    r->metrics = fopen(inside(r, "metrics.jsonl", file), "w");
    return r->metrics ? DNR_OK : disk_error(file, "write", err);
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
    errno = 0;
    int bad = json_dumpf(record, r->metrics, JSON_COMPACT | JSON_REAL_PRECISION(10));
    json_decref(record);
    if (bad || fputc('\n', r->metrics) == EOF || fflush(r->metrics) != 0)
        return disk_error(inside(r, "metrics.jsonl", file), "write", err);
    return DNR_OK;
}

dnr_status rundir_save(rundir *r, dnr_trainer *t, const char *name, dnr_error *err)
{
    char file[PATH_ROOM], folder[64];
    snprintf(folder, sizeof folder, "checkpoints/%s", name);
    dnr_status st = make_folders(inside(r, folder, file), err);
    if (st != DNR_OK)
        return st;
    strncat(file, "/model.safetensors", sizeof file - strlen(file) - 1);
    st = dnr_trainer_save(t, file);
    return st == DNR_OK ? DNR_OK : tool_lib_error(err, NULL, NULL);
}

void rundir_close(rundir *r)
{
    if (r->metrics)
        fclose(r->metrics);
    /* both fail, as they should, where anything is in them */
    if (*r->path)
        rmdir(r->path);
    if (!strncmp(r->path, "runs/", 5))
        rmdir("runs");
    *r = (rundir){0};
}
