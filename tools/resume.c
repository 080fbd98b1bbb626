/* resume.c: see resume.h. */
#include "resume.h"
#include "rundir.h"
#include "screen.h"

#include <ctype.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- which checkpoint */

static bool exists(const char *folder, const char *name)
{
    char path[CFG_TEXT + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* The run directory of RUN/checkpoints/NAME (links followed), or false where it is in none. */
static bool run_of(const char *checkpoint, char run[CFG_TEXT])
{
    char real[PATH_MAX];
    if (!realpath(checkpoint, real) || strlen(real) >= CFG_TEXT)
        return false;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(real, '/');
        if (!slash || slash == real || (up == 1 && strcmp(slash, "/checkpoints")))
            return false;
        *slash = 0;
    }
    snprintf(run, CFG_TEXT, "%s", real);
    return exists(run, "resolved.cfg");
}

static bool same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static dnr_status find_auto(resume *r, const char *out, dnr_error *err)
{
    dnr_status st;
    char folder[CFG_TEXT + 16];
    r->in_place = true;
    snprintf(folder, sizeof folder, "%.*s/checkpoints", CFG_TEXT - 1, out);
    TOOL_LIB(st, dnr_checkpoint_newest(folder, &r->from));
    if (!r->from)
        screen_print("resume  no whole checkpoint in %s: a fresh start", folder);
out:
    return st;
}

static dnr_status find_path(resume *r, const char *path, const char *out, dnr_error *err)
{
    char checkpoint[CFG_TEXT + 32], run[CFG_TEXT];
    dnr_status st;
    snprintf(checkpoint, sizeof checkpoint, "%.*s%s", CFG_TEXT - 1, path,
             exists(path, "resolved.cfg") ? "/checkpoints/last" : "");
    TOOL_LIB(st, dnr_checkpoint_open(checkpoint, &r->from));
    if (!run_of(checkpoint, run))
        goto out; /* a checkpoint that was moved away: a run directory of its own */
    if (!out)
        memcpy(r->out, run, sizeof run);
    r->in_place = !out || same_folder(out, run);
out:
    return st;
}

dnr_status resume_find(resume *r, const char *how, const char *out, const cfg *c, dnr_error *err)
{
    if (!out && *c->run.out)
        out = c->run.out;
    if (!how)
        return DNR_OK;
    return strcmp(how, "auto") ? find_path(r, how, out, err) : find_auto(r, out, err);
}

dnr_status resume_share(resume *r, dnr_comm *comm, dnr_error *err)
{
    const char *note = r->from ? dnr_checkpoint_note(r->from, "loop") : NULL;
    int64_t about[5] = {0};
    dnr_status st = DNR_OK;
    if (r->from) {
        about[0] = 1;
        about[1] = dnr_checkpoint_steps(r->from);
        about[2] = dnr_checkpoint_samples(r->from);
        about[3] = dnr_checkpoint_global_batch(r->from);
        about[4] = note ? (int64_t)strlen(note) + 1 : 0;
    }
    if (comm)
        TOOL_LIB(st, dnr_comm_broadcast(comm, about, sizeof about));
    r->goes_on = about[0] != 0;
    r->steps = about[1];
    r->samples = about[2];
    r->global_batch = about[3];
    r->loop = about[4] ? calloc(1, (size_t)about[4]) : NULL;
    if (about[4] && !r->loop) {
        st = tool_fail(err, DNR_EMEM, "checkpoint", "out of host memory");
        return tool_remedy(err, "free some");
    }
    if (note)
        memcpy(r->loop, note, (size_t)about[4]);
    if (comm && about[4])
        TOOL_LIB(st, dnr_comm_broadcast(comm, r->loop, (size_t)about[4]));
out:
    return st;
}

void resume_close(resume *r)
{
    dnr_checkpoint_close(r->from);
    free(r->loop);
    *r = (resume){0};
}

/* ---------------------------------------------------------------- may it go on */

/* Keys, and sections, that decide where, how fast and how long, not what is computed. */
static const char *const may_change[] = {
    "device",        "data.on_error",   "data.max_bad", "data.threads",
    "data.prefetch", "train.max_steps", "train.init",   "memory.",
    "cudnn.",        "dist.",           "run.",
};
/* What matters of these is compared by resume_check_session. */
static const char *const of_session[] = {"data.train", "data.val", "data.class_map",
                                         "data.val_class_map"};

static bool listed(const char *const list[], size_t n, const char *key)
{
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(list[i]);
        if (list[i][len - 1] == '.' ? !strncmp(list[i], key, len) : !strcmp(list[i], key))
            return true;
    }
    return false;
}
#define LISTED(list, key) listed(list, sizeof(list) / sizeof(list)[0], key)

bool resume_may_change(const char *key)
{
    return LISTED(may_change, key) || LISTED(of_session, key);
}

/* The value of a key in the text of a resolved cfg; false: it has none. */
static bool value_in(const char *text, const char *key, char value[CFG_TEXT])
{
    char section[64] = "", name[160];
    for (const char *line = text; *line;) {
        int n = (int)strcspn(line, "\n"), end = n;
        int eq = (int)strcspn(line, "=\n");
        if (*line == '[') {
            snprintf(section, sizeof section, "%.*s.", (int)strcspn(line + 1, "]\n"), line + 1);
        } else if (eq < n) {
            int k = eq;
            while (k > 0 && isspace((unsigned char)line[k - 1]))
                k--;
            snprintf(name, sizeof name, "%s%.*s", section, k, line);
            if (!strcmp(name, key)) {
                for (eq++; eq < end && line[eq] == ' ';)
                    eq++;
                snprintf(value, CFG_TEXT, "%.*s", end - eq, line + eq);
                cfg_unquote(value);
                return true;
            }
        }
        line += n + (line[n] == '\n');
    }
    return false;
}

/* Adds a line to the diff that is shown; counts those that need leave. */
typedef struct diff {
    int refused, named; /* in the message; the screen has all */
    char names[200];
} diff;

static void differs(diff *d, const char *key, const char *was, const char *now, bool free)
{
    size_t at = strlen(d->names);
    screen_print("changed %-24s %s → %s%s", key, *was ? was : "(empty)", *now ? now : "(empty)",
                 free ? "   (may change)" : "");
    if (free)
        return;
    d->refused++;
    if (at + strlen(key) + 2 >= sizeof d->names)
        return;
    snprintf(d->names + at, sizeof d->names - at, "%s%s", at ? ", " : "", key);
    d->named++;
}

static dnr_status judge(const resume *r, const diff *d, bool allow, dnr_error *err)
{
    if (!d->refused || allow)
        return DNR_OK;
    char more[32] = "";
    if (d->refused > d->named)
        snprintf(more, sizeof more, " and %d more", d->refused - d->named);
    tool_fail(err, DNR_EUSAGE, "command line",
              "the cfg is not the one that checkpoint %.200s was made with: %s%s differ%s",
              dnr_checkpoint_folder(r->from), d->names, more, d->refused == 1 ? "s" : "");
    return tool_remedy(err, "set %s back, or add --allow-changes to go on with the new cfg",
                       d->refused == 1 ? "it" : "them");
}

/* Another batch of a pass, or number of ranks, keeps the global batch: that is what the learning rate and the steps are
 * for. */
static dnr_status keep_global_batch(const resume *r, cfg *c, int world, dnr_error *err)
{
    int64_t global = r->global_batch, batch = c->train.batch * world;
    char where[96], set[64], ranks[32] = "";
    if (batch * c->train.accumulate == global)
        return DNR_OK;
    if (world > 1)
        snprintf(ranks, sizeof ranks, " x %d ranks", world);
    bool chosen = !strcmp(cfg_origin(c, "train.accumulate", where), "command line");
    if (chosen || global % batch) {
        tool_fail(err, DNR_EUSAGE, cfg_origin(c, "train.batch", where),
                  "the checkpoint was made with a global batch of %lld; train.batch x "
                  "train.accumulate%s is now %lld x %lld%s = %lld",
                  (long long)global, world > 1 ? " x ranks" : "", (long long)c->train.batch,
                  (long long)c->train.accumulate, ranks, (long long)(batch * c->train.accumulate));
        if (global % batch == 0)
            return tool_remedy(err, "set train.accumulate=%lld", (long long)(global / batch));
        if (global % world)
            return tool_remedy(err, "start a number of ranks that divides %lld", (long long)global);
        return tool_remedy(err,
                           "set train.batch to a divisor of %lld, and train.accumulate to the "
                           "quotient",
                           (long long)(global / world));
    }
    snprintf(set, sizeof set, "train.accumulate=%lld", (long long)(global / batch));
    dnr_status st = cfg_set(c, set, err);
    if (st == DNR_OK)
        screen_print("resume  %s, so that the global batch stays %lld", set, (long long)global);
    return st;
}

dnr_status resume_check_cfg(const resume *r, cfg *c, int world, bool allow, dnr_error *err)
{
    diff d = {0};
    bool same_batch = false;
    if (!r->goes_on)
        return DNR_OK;
    dnr_status st = keep_global_batch(r, c, world, err);
    const char *text = r->from ? dnr_checkpoint_note(r->from, "cfg") : NULL;
    for (int i = 0; st == DNR_OK && text && i < cfg_n_keys; i++) {
        const char *key = cfg_keys[i].name;
        char was[CFG_TEXT], now[CFG_TEXT];
        cfg_value(c, &cfg_keys[i], now);
        if (!value_in(text, key, was))
            snprintf(was, sizeof was, "%s", cfg_keys[i].unset); /* a key newer than the run */
        if (!strcmp(key, "train.batch"))
            same_batch = !strcmp(was, now);
        /* with the same batch, only another number of ranks has changed it */
        bool adapted = !strcmp(key, "train.accumulate") && same_batch;
        if (strcmp(was, now) && !LISTED(of_session, key))
            differs(&d, key, was, now, adapted || LISTED(may_change, key));
    }
    return st == DNR_OK ? judge(r, &d, allow, err) : st;
}

/* ---------------------------------------------------------------- notes */

char *resume_note_cfg(const cfg *c)
{
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f)
        return NULL;
    cfg_write(c, f);
    fclose(f);
    /* the note is UTF-8, paths need not be: what cannot be shown is ?, as in the manifest */
    json_t *plain = text ? rundir_text(text) : NULL;
    free(text);
    text = plain ? strdup(json_string_value(plain)) : NULL;
    json_decref(plain);
    return text;
}

static void hash_text(const dnr_source *s, char buf[20])
{
    buf[0] = 0;
    if (s)
        snprintf(buf, 20, "%016llx", (unsigned long long)dnr_source_hash(s));
}

/* What a session has, by the names of the diff. */
enum { FACTS = 3 };
static const char *const fact_names[FACTS] = {"data.train (pictures)", "data.val (pictures)",
                                              "train.precision"};

static void facts(const session *s, char text[FACTS][20])
{
    hash_text(s->train, text[0]);
    hash_text(s->val, text[1]);
    snprintf(text[2], 20, "%s", dnr_precision_name(dnr_trainer_precision(s->trainer)));
}

char *resume_note_data(const session *s)
{
    char text[FACTS][20];
    facts(s, text);
    json_t *j = json_object();
    for (int i = 0; i < FACTS; i++)
        json_object_set_new(j, fact_names[i], json_string(text[i]));
    char *out = json_dumps(j, JSON_COMPACT);
    json_decref(j);
    return out;
}

dnr_status resume_check_session(const resume *r, const session *s, bool allow, dnr_error *err)
{
    diff d = {0};
    char now[FACTS][20];
    const char *note = r->from ? dnr_checkpoint_note(r->from, "data") : NULL;
    json_t *j = note ? json_loads(note, 0, NULL) : NULL;
    facts(s, now);
    for (int i = 0; i < FACTS; i++) {
        const char *was = json_string_value(json_object_get(j, fact_names[i]));
        if (was && strcmp(was, now[i]))
            differs(&d, fact_names[i], was, now[i], false);
    }
    json_decref(j);
    return judge(r, &d, allow, err);
}
