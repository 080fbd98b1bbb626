/* checkpoint.c: what is in a checkpoint: written, verified, restored. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "checkpoint.h"
#include "card.h"
#include "weights.h"
#include "wholefile.h"

enum { MODEL, EMA, TRAINER, FILES }; /* in the order of `checksums` */
static const char *const NAMES[FILES] = {"model.safetensors", "model_ema.safetensors",
                                         "trainer.safetensors"};
static const char CHECKSUMS[] = "checksums";

#define FORMAT "dnnrun checkpoint 1"
#define STATE  "state" /* tensor: the state block's bytes */
#define NOTE   "note." /* before the caller's keys in the metadata */

struct dnr_checkpoint {
    char *folder;
    dnri_st_file *file[FILES]; /* EMA: NULL where there are no averages */
    dnri_state state;
    int64_t samples, global_batch;
};

static dnr_status path_of(const char *folder, const char *name, char **out)
{
    *out = NULL;
    return asprintf(out, "%s/%s", folder, name) < 0 ? DNR_FAIL_NOMEM() : DNR_OK;
}

/* ---- saving */

typedef struct entry {
    char key[24], text[64];
} entry;

static void set(entry *e, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void set(entry *e, const char *key, const char *fmt, ...)
{
    va_list ap;
    snprintf(e->key, sizeof e->key, "%s", key);
    va_start(ap, fmt);
    vsnprintf(e->text, sizeof e->text, fmt, ap);
    va_end(ap);
}

static uint64_t choices(const dnr_trainer *t)
{
    uint64_t h = 0;
    for (int i = 0; i < DNRI_PROGRAMS; i++)
        if (t->program[i].plan)
            h = dnri_plan_choices(t->program[i].plan, h);
    return h;
}

/* The pairs of trainer.safetensors; `own` and `keys` hold texts. From malloc; NULL: out of memory. */
enum { OWN = 10 };
static const char **trainer_metadata(const dnr_trainer *t, const char *const *notes, entry own[OWN],
                                     char **keys)
{
    int n = 0, k = 0;
    size_t room = 1;
    for (; notes && notes[2 * n]; n++)
        room += strlen(notes[2 * n]) + sizeof NOTE;
    const char **m = malloc((size_t)(2 * (OWN + 2 + n) + 1) * sizeof *m);
    char *key = *keys = malloc(room);
    if (!m || !key) {
        free(m);
        return NULL;
    }
    set(&own[0], "format", FORMAT);
    set(&own[1], "dnnrun", "%s", DNR_VERSION);
    set(&own[2], "steps", "%lld", (long long)t->steps);
    set(&own[3], "samples", "%lld", (long long)t->samples);
    set(&own[4], "global_batch", "%lld", (long long)dnri_trainer_global_batch(t));
    set(&own[5], "seed", "%llu", (unsigned long long)t->o.seed);
    set(&own[6], "precision", "%s", dnr_precision_name(t->o.precision));
    set(&own[7], "scaled", "%d", t->num.scaled);
    set(&own[8], "ema", "%.17g", t->o.ema);
    set(&own[9], "choices", "%016llx", (unsigned long long)choices(t));
    for (int i = 0; i < OWN; i++) {
        m[k++] = own[i].key;
        m[k++] = own[i].text;
    }
    m[k++] = "architecture";
    m[k++] = t->o.model.name;
    m[k++] = "device";
    m[k++] = t->dev->description;
    for (int i = 0; i < n; i++) {
        m[k++] = key;
        m[k++] = notes[2 * i + 1];
        key += sprintf(key, NOTE "%s", notes[2 * i]) + 1;
    }
    m[k] = NULL;
    return m;
}

static dnr_status write_trainer(dnr_trainer *t, const char *path, const char *const *notes,
                                uint64_t *sum)
{
    dnri_state state;
    entry own[OWN];
    char *keys = NULL;
    DNR_TRY(dnri_store_read_state(t->store, &state));
    const int64_t words = sizeof state / sizeof(int64_t);
    const dnri_st_tensor tensor = dnri_st_make(STATE, DNRI_ST_I64, 1, &words, &state);
    const char **metadata = trainer_metadata(t, notes, own, &keys);
    dnr_status s = metadata
                       ? dnri_weights_write(t, DNRI_OF_MOMENTUM, path, metadata, &tensor, 1, sum)
                       : DNR_FAIL_NOMEM();
    free(metadata);
    free(keys);
    return s;
}

static dnr_status write_one(dnr_trainer *t, int which, const char *path, const char *const *notes,
                            uint64_t *sum)
{
    dnri_card card;
    dnri_card_make(t, &card);
    return which == TRAINER ? write_trainer(t, path, notes, sum)
                            : dnri_weights_write(t, which == EMA ? DNRI_OF_EMA : DNRI_OF_MODEL,
                                                 path, card.pairs, NULL, 0, sum);
}

static dnr_status write_checksums(const char *folder, const char *text)
{
    dnri_wholefile f;
    char *path;
    DNR_TRY(path_of(folder, CHECKSUMS, &path));
    dnr_status s = dnri_wholefile_open(&f, path);
    if (s == DNR_OK)
        s = dnri_wholefile_write(&f, text, strlen(text));
    if (s == DNR_OK)
        s = dnri_wholefile_commit(&f);
    free(path);
    return s;
}

static dnr_status write_all(dnr_trainer *t, const char *folder, const char *const *notes)
{
    char text[FILES * 64] = "";
    for (int i = 0; i < FILES; i++) {
        char *path;
        uint64_t sum;
        if (i == EMA && t->o.ema == 0)
            continue;
        DNR_TRY(path_of(folder, NAMES[i], &path));
        dnr_status s = write_one(t, i, path, notes, &sum);
        free(path);
        DNR_TRY(s);
        snprintf(text + strlen(text), 64, "%016llx  %s\n", (unsigned long long)sum, NAMES[i]);
    }
    return write_checksums(folder, text);
}

dnr_status dnr_checkpoint_save(dnr_trainer *t, const char *folder, const char *const *notes)
{
    dnr_metrics done;
    char *temp;
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/')
        length--;
    if (t->o.batch == 0)
        return DNR_FAIL(DNR_EUSAGE, "create the trainer with a positive batch",
                        "this trainer was made for evaluation only");
    DNR_TRY(dnr_trainer_finish(t, &done));
    char *name = strndup(folder, length);
    if (!name)
        return DNR_FAIL_NOMEM();
    dnr_status s = dnri_checkpoint_begin(name, &temp);
    if (s == DNR_OK) {
        s = write_all(t, temp, notes);
        if (s == DNR_OK)
            s = dnri_checkpoint_commit(temp, name);
        if (s != DNR_OK)
            dnri_checkpoint_abandon(temp);
        free(temp);
    }
    free(name);
    return s == DNR_OK ? s : dnri_fail_context("checkpoint %s", folder);
}

/* ---- opening */

#define DAMAGED(...)                                                                               \
    DNR_FAIL(DNR_EDATA,                                                                            \
             "name a whole one, or its run; --resume auto takes the newest whole one of --out",    \
             __VA_ARGS__)

/* What lacks for a moment, or is kept from this user, is not damaged: it must not be passed over. */
static dnr_status unreadable(const char *doing, const char *name)
{
    if (errno == ENOMEM)
        return DNR_FAIL_NOMEM();
    if (errno == EMFILE || errno == ENFILE)
        return DNR_FAIL(DNR_EFAIL, "raise the limit on open files (ulimit -n)", "cannot %s %s: %s",
                        doing, name, strerror(errno));
    if (errno == EACCES || errno == EPERM)
        return DNR_FAIL(DNR_EDISK, "make it readable for this user", "cannot %s %s: %s", doing,
                        name, strerror(errno));
    return DAMAGED("cannot %s %s: %s", doing, name, strerror(errno));
}

static dnr_status hash_file(const char *path, const char *name, uint64_t *out)
{
    enum { CHUNK = 1 << 20 };
    dnr_status s = DNR_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return unreadable("open", name);
    XXH64_state_t *sum = XXH64_createState();
    char *chunk = malloc(CHUNK);
    if (!sum || !chunk)
        s = DNR_FAIL_NOMEM();
    else
        XXH64_reset(sum, 0);
    for (ssize_t n = 1; s == DNR_OK && n != 0;) {
        n = read(fd, chunk, CHUNK);
        if (n > 0)
            XXH64_update(sum, chunk, (size_t)n);
        else if (n < 0 && errno != EINTR)
            s = unreadable("read", name);
    }
    if (s == DNR_OK)
        *out = XXH64_digest(sum);
    free(chunk);
    XXH64_freeState(sum);
    close(fd);
    return s;
}

/* Reads `checksums`: lines of 16 hexadecimal digits, two blanks, one of NAMES. */
static dnr_status read_checksums(const char *folder, uint64_t sum[FILES], bool listed[FILES])
{
    char *path, line[128];
    DNR_TRY(path_of(folder, CHECKSUMS, &path));
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
    dnr_status s = f ? DNR_OK : unreadable("open", CHECKSUMS);
    free(path);
    if (!f && fd >= 0)
        close(fd);
    while (s == DNR_OK && fgets(line, sizeof line, f)) {
        size_t n = strlen(line);
        int which = FILES;
        for (int i = 0; i < FILES && n > 19 && line[n - 1] == '\n'; i++)
            if (n == 19 + strlen(NAMES[i]) && !strncmp(line + 18, NAMES[i], n - 19) &&
                !memcmp(line + 16, "  ", 2) && strspn(line, "0123456789abcdef") == 16)
                which = i;
        if (which == FILES || listed[which]) {
            s = DAMAGED("%s is damaged", CHECKSUMS);
            break;
        }
        listed[which] = true;
        sum[which] = strtoull(line, NULL, 16);
    }
    if (s == DNR_OK && ferror(f))
        s = unreadable("read", CHECKSUMS);
    if (f)
        fclose(f);
    return s;
}

static dnr_status check_file(const dnr_checkpoint *c, int which, uint64_t sum)
{
    char *path;
    uint64_t have = 0;
    DNR_TRY(path_of(c->folder, NAMES[which], &path));
    dnr_status s = hash_file(path, NAMES[which], &have);
    free(path);
    if (s == DNR_OK && have != sum)
        s = DAMAGED("%s is damaged: its checksum is %016llx, not %016llx", NAMES[which],
                    (unsigned long long)have, (unsigned long long)sum);
    return s;
}

static dnr_status open_file(dnr_checkpoint *c, int which)
{
    char *path;
    DNR_TRY(path_of(c->folder, NAMES[which], &path));
    dnr_status s = dnri_st_open(path, &c->file[which]);
    free(path);
    return s;
}

static const char *about(const dnr_checkpoint *c, const char *key)
{
    const char *text = dnri_st_metadata(c->file[TRAINER], key);
    return text ? text : "";
}

static dnr_status read_trainer(dnr_checkpoint *c)
{
    const dnri_st_tensor *x = dnri_st_find(c->file[TRAINER], STATE);
    if (strcmp(about(c, "format"), FORMAT))
        return DNR_FAIL(DNR_EDATA, "read it with the version of dnnrun that wrote it",
                        "it is of format '%.40s', not '" FORMAT "'", about(c, "format"));
    if (!x || x->type != DNRI_ST_I64 || x->bytes != sizeof c->state)
        return DAMAGED("%s holds no state block", NAMES[TRAINER]);
    c->samples = strtoll(about(c, "samples"), NULL, 10);
    c->global_batch = strtoll(about(c, "global_batch"), NULL, 10);
    return dnri_st_read_raw(c->file[TRAINER], x, &c->state);
}

/* `whole`: all files are as they were written. */
static dnr_status open_all(dnr_checkpoint *c, bool *whole)
{
    uint64_t sum[FILES];
    bool listed[FILES] = {false};
    struct stat st;
    if (stat(c->folder, &st) != 0)
        return DAMAGED("%s", strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return DAMAGED("it is not a folder");
    DNR_TRY(read_checksums(c->folder, sum, listed));
    if (!listed[MODEL] || !listed[TRAINER])
        return DAMAGED("%s does not list all files", CHECKSUMS);
    for (int i = 0; i < FILES; i++)
        if (listed[i])
            DNR_TRY(check_file(c, i, sum[i]));
    *whole = true;
    for (int i = 0; i < FILES; i++)
        if (listed[i])
            DNR_TRY(open_file(c, i));
    DNR_TRY(read_trainer(c));
    if (strtod(about(c, "ema"), NULL) > 0 && !c->file[EMA])
        return DAMAGED("%s does not list %s", CHECKSUMS, NAMES[EMA]);
    return DNR_OK;
}

static dnr_status open_folder(const char *folder, dnr_checkpoint **out, bool *whole)
{
    *out = NULL;
    *whole = false;
    dnr_checkpoint *c = calloc(1, sizeof *c);
    if (!c)
        return DNR_FAIL_NOMEM();
    c->folder = strdup(folder);
    dnr_status s = c->folder ? open_all(c, whole) : DNR_FAIL_NOMEM();
    if (s == DNR_OK) {
        *out = c;
        return s;
    }
    dnr_checkpoint_close(c);
    return dnri_fail_context("checkpoint %s", folder);
}

dnr_status dnr_checkpoint_open(const char *folder, dnr_checkpoint **out)
{
    bool whole;
    return open_folder(folder, out, &whole);
}

dnr_status dnr_checkpoint_newest(const char *folder, dnr_checkpoint **out)
{
    dnri_step_name *list;
    int n;
    bool whole;
    *out = NULL;
    DNR_TRY(dnri_checkpoint_list(folder, &list, &n));
    dnr_status s = DNR_OK;
    for (int i = 0; i < n && !*out && s == DNR_OK; i++) {
        char *path;
        s = path_of(folder, list[i].name, &path);
        if (s != DNR_OK)
            break;
        s = open_folder(path, out, &whole);
        free(path);
        if (s == DNR_EDATA && !whole) { /* whole, but not to be used: of another version */
            dnri_log(DNR_LOG_WARN, "passed over: %s", dnr_last_error()->what);
            s = DNR_OK;
        }
    }
    free(list);
    return s;
}

void dnr_checkpoint_close(dnr_checkpoint *c)
{
    if (!c)
        return;
    for (int i = 0; i < FILES; i++)
        dnri_st_close(c->file[i]);
    free(c->folder);
    free(c);
}

const char *dnr_checkpoint_folder(const dnr_checkpoint *c)
{
    return c->folder;
}

int64_t dnr_checkpoint_steps(const dnr_checkpoint *c)
{
    return c->state.steps;
}

int64_t dnr_checkpoint_samples(const dnr_checkpoint *c)
{
    return c->samples;
}

int64_t dnr_checkpoint_global_batch(const dnr_checkpoint *c)
{
    return c->global_batch;
}

const char *dnr_checkpoint_note(const dnr_checkpoint *c, const char *key)
{
    char name[64];
    snprintf(name, sizeof name, NOTE "%s", key);
    return dnri_st_metadata(c->file[TRAINER], name);
}

/* ---- restoring */

static dnr_status check(const dnr_checkpoint *c, const dnr_trainer *t)
{
    static const char *const more[] = {STATE, NULL};
    static const dnri_weights of[FILES] = {DNRI_OF_MODEL, DNRI_OF_EMA, DNRI_OF_MOMENTUM};
    int64_t global = dnri_trainer_global_batch(t);
    char remedy[160], ranks[24] = "";
    if (t->world > 1)
        snprintf(ranks, sizeof ranks, " x %d", t->world);
    for (int i = 0; i < FILES; i++)
        if (c->file[i])
            DNR_TRY(dnri_weights_check(t, of[i], c->file[i], NAMES[i], i == TRAINER ? more : NULL));
    if (global == c->global_batch)
        return DNR_OK;
    snprintf(
        remedy, sizeof remedy,
        "keep train.batch x train.accumulate%s at %lld: it sets the learning rate and the steps",
        t->world > 1 ? " x ranks" : "", (long long)c->global_batch);
    return dnri_fail(
        DNR_EUSAGE, DNRI_HERE, remedy,
        "it was made with a global batch of %lld, this trainer has %lld x %lld%s = %lld",
        (long long)c->global_batch, (long long)t->o.batch, (long long)t->o.accumulate, ranks,
        (long long)global);
}

/* What keeps a deterministic run from the same bits. */
static void remark(const dnr_checkpoint *c, const dnr_trainer *t)
{
    char now[24];
    snprintf(now, sizeof now, "%016llx", (unsigned long long)choices(t));
    if (!t->o.deterministic)
        return;
    if (strcmp(about(c, "device"), t->dev->description))
        dnri_log(DNR_LOG_WARN,
                 "the checkpoint was made on another device or version (%s; now %s): the bits will "
                 "differ",
                 about(c, "device"), t->dev->description);
    else if (strcmp(about(c, "choices"), now))
        dnri_log(DNR_LOG_WARN,
                 "other implementations are chosen now than when the checkpoint was made: the bits "
                 "will differ");
}

static dnr_status restore(const dnr_checkpoint *c, dnr_trainer *t)
{
    dnri_state state = c->state;
    DNR_TRY(check(c, t));
    DNR_TRY(dnri_weights_read(t, DNRI_OF_MODEL, c->file[MODEL]));
    DNR_TRY(dnri_weights_read(t, DNRI_OF_MOMENTUM, c->file[TRAINER]));
    if (t->o.ema > 0 && c->file[EMA])
        DNR_TRY(dnri_weights_read(t, DNRI_OF_EMA, c->file[EMA]));
    else
        DNR_TRY(dnri_store_start_ema(t->store));
    if (t->num.scaled && strcmp(about(c, "scaled"), "1"))
        state.loss_scale = DNRI_SCALE_INIT;
    if (!t->num.scaled) {
        state.loss_scale = 1;
        state.found_inf = 0; /* an overflow of the last step was the scale's */
    }
    DNR_TRY(dnri_trainer_go_on(t, &state, c->samples));
    remark(c, t);
    if (t->o.ema > 0 && !c->file[EMA])
        dnri_log(DNR_LOG_INFO, "the checkpoint holds no averages: they start at its weights");
    return DNR_OK;
}

dnr_status dnr_checkpoint_restore(const dnr_checkpoint *c, dnr_trainer *t)
{
    if (t->o.batch == 0)
        return DNR_FAIL(DNR_EUSAGE, "create the trainer with a positive batch",
                        "this trainer was made for evaluation only");
    dnr_status s = restore(c, t);
    return s == DNR_OK ? s : dnri_fail_context("checkpoint %s", c->folder);
}
