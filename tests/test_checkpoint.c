/* test_checkpoint.c: checkpoints bring back every bit, and are whole or refused; averages; fine-tuning.
 *
 *     test_checkpoint                      on ref
 *     test_checkpoint DEVICE PRECISION     exit code 77: the machine has no such device or precision */
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "../runtime/safetensors.h"
#include "trainrig.h"

static char folder[256]; /* for checkpoints; empty at the start of each test */

static const char *in(const char *name)
{
    static char path[4][512];
    static int k;
    k = (k + 1) % 4;
    snprintf(path[k], sizeof path[k], "%s/%s", folder, name);
    return path[k];
}

static bool there(const char *name)
{
    return access(in(name), F_OK) == 0;
}

static int entries(const char *path)
{
    DIR *d = opendir(path);
    int n = 0;
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    closedir(d);
    return n;
}

/* ---- what the library says */

static char said[4096];

static void listen(void *user, dnr_log_level level, const char *line)
{
    size_t at = strlen(said);
    snprintf(said + at, sizeof said - at, "%s\n", line);
}

static void heard(const char *text)
{
    if (!strstr(said, text))
        fail_msg("\"%s\" was not said, but: %s", text, said);
}

/* ---- bits */

static void same_slab(training *a, training *b, dnri_role role)
{
    int64_t n, m;
    double *x = tr_slab(a, role, &n), *y = tr_slab(b, role, &m);
    assert_int_equal(n, m);
    assert_memory_equal(x, y, (size_t)n * sizeof *x);
    free(x);
    free(y);
}

/* All that outlives a step, down to the bit. */
static void same(training *a, training *b)
{
    dnri_state s, t;
    same_slab(a, b, DNRI_MASTER);
    same_slab(a, b, DNRI_WEIGHT);
    same_slab(a, b, DNRI_MOMENTUM);
    if (a->t->o.ema > 0)
        same_slab(a, b, DNRI_EMA);
    same_slab(a, b, DNRI_BUFFER);
    OK(dnri_store_read_state(a->t->store, &s));
    OK(dnri_store_read_state(b->t->store, &t));
    assert_memory_equal(&s, &t, sizeof s);
    assert_int_equal(a->t->steps, b->t->steps);
    assert_int_equal(a->t->samples, b->t->samples);
    dnr_eval_result e = tr_evaluate(a, 40), f = tr_evaluate(b, 40);
    assert_memory_equal(&e, &f, sizeof e);
}

static void save(training *r, const char *name)
{
    static const char *const notes[] = {"cfg", "[a]\nb = ü \"c\"\n", "empty", "", NULL};
    OK(dnr_checkpoint_save(r->t, in(name), notes));
}

static dnr_checkpoint *open_whole(const char *name)
{
    dnr_checkpoint *c;
    OK(dnr_checkpoint_open(in(name), &c));
    return c;
}

/* Trains 3 steps, saves, trains 3 more; another trainer restores and trains those 3. */
static void check_same_bits(void **state, dnr_trainer_opts *o, const dnri_trainer_extra *extra)
{
    const int per_step = (int)(o->batch * (o->accumulate ? o->accumulate : 1));
    training a = tr_open_with(state, o, extra);
    tr_train(&a, 0, 3);
    save(&a, "step-000000003");
    dnr_metrics want = tr_train(&a, 3 * per_step, 3), last;
    o->seed++;
    training b = tr_open_with(state, o, extra);
    o->seed--;
    tr_train(&b, 77, 1); /* whatever it did before */
    dnr_checkpoint *c = open_whole("step-000000003");
    OK(dnr_checkpoint_restore(c, b.t));
    assert_int_equal(dnr_checkpoint_steps(c), 3);
    assert_int_equal(dnr_checkpoint_samples(c), 3 * per_step);
    OK(dnr_trainer_finish(b.t, &last)); /* describes the step before the checkpoint */
    assert_int_equal(last.step, 3);
    assert_int_equal(last.samples, 3 * per_step);
    assert_true(last.loss > 0 && last.lr > 0);
    dnr_metrics got = tr_train(&b, 3 * per_step, 3);
    assert_memory_equal(&got, &want, sizeof got);
    same(&a, &b);
    dnr_checkpoint_close(c);
    tr_close(&a);
    tr_close(&b);
}

static void goes_on_to_the_same_bits(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    check_same_bits(state, &o, NULL);
    o.ema = 0.9;
    o.accumulate = 2;
    o.optim.clip_norm = 1;
    o.optim.schedule = DNR_SCHEDULE_COSINE;
    o.optim.warmup_epochs = 0.2;
    check_same_bits(state, &o, NULL);
}

/* The loss scale, its growth and the skipped steps come back too. */
static void the_loss_scaler_goes_on(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.optim.lr = 1e-3;
    training a = tr_open_with(state, &o, &(dnri_trainer_extra){.scaled = true});
    dnri_state s = {.loss_scale = 4, .growth = 1998, .skipped = 5, .steps = 0};
    OK(dnri_store_write_state(a.t->store, &s));
    tr_train(&a, 0, 1);
    save(&a, "step-000000001");
    training b = tr_open_with(state, &o, &(dnri_trainer_extra){.scaled = true});
    dnr_checkpoint *c = open_whole("step-000000001");
    OK(dnr_checkpoint_restore(c, b.t));
    dnr_metrics m = tr_train(&b, TR_BATCH, 1); /* the 2000th good step */
    assert_true(m.loss_scale == 8 && m.skipped == 5 && m.step == 2);
    /* into a run without loss scaling, and back */
    if (tr_options(state).precision != DNR_PRECISION_FP16) {
        training plain = tr_open(state, &o);
        OK(dnr_checkpoint_restore(c, plain.t));
        assert_true(tr_train(&plain, TR_BATCH, 1).loss_scale == 1);
        save(&plain, "step-000000002");
        dnr_checkpoint_close(c);
        c = open_whole("step-000000002");
        OK(dnr_checkpoint_restore(c, b.t));
        OK(dnri_store_read_state(b.t->store, &s));
        assert_true(s.loss_scale == DNRI_SCALE_INIT);
        tr_close(&plain);
    }
    dnr_checkpoint_close(c);
    tr_close(&a);
    tr_close(&b);
}

/* ---- what lies in the folder */

static void files_and_notes(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.ema = 0.5;
    training a = tr_open(state, &o);
    tr_train(&a, 0, 2);
    save(&a, "step-000000002/"); /* a slash at the end does no harm */
    assert_int_equal(entries(in("step-000000002")), 4);
    assert_int_equal(entries(folder), 1);
    dnr_checkpoint *c = open_whole("step-000000002");
    assert_string_equal(dnr_checkpoint_note(c, "cfg"), "[a]\nb = ü \"c\"\n");
    assert_string_equal(dnr_checkpoint_note(c, "empty"), "");
    assert_null(dnr_checkpoint_note(c, "steps"));
    assert_string_equal(dnr_checkpoint_folder(c), in("step-000000002"));
    assert_int_equal(dnr_checkpoint_global_batch(c), TR_BATCH);
    dnr_checkpoint_close(c);

    /* both kinds of weights load as weights */
    dnr_eval_result want = tr_evaluate(&a, 40);
    training b = tr_open(state, &o);
    OK(dnr_trainer_load(b.t, in("step-000000002/model.safetensors")));
    dnr_eval_result got = tr_evaluate(&b, 40);
    assert_memory_equal(&got, &want, sizeof got);
    OK(dnr_trainer_load(b.t, in("step-000000002/model_ema.safetensors")));
    same_slab(&b, &b, DNRI_MASTER);
    assert_true(tr_distance(&a, &b, DNRI_MASTER) > 1e-6);

    /* over one that is there */
    tr_train(&a, 32, 1);
    save(&a, "step-000000002");
    c = open_whole("step-000000002");
    assert_int_equal(dnr_checkpoint_steps(c), 3);
    assert_int_equal(entries(folder), 1);
    dnr_checkpoint_close(c);
    tr_close(&a);
    tr_close(&b);
}

/* ---- damage */

static char *slurp(const char *path, size_t *n)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    char *text = malloc((size_t)st.st_size + 1);
    assert_int_equal(read(fd, text, (size_t)st.st_size), st.st_size);
    close(fd);
    *n = (size_t)st.st_size;
    return text;
}

static void spit(const char *path, const void *data, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, n), n);
    close(fd);
}

static void refused(const char *name, const char *what)
{
    dnr_checkpoint *c;
    dnr_status st = dnr_checkpoint_open(in(name), &c);
    if (st != DNR_EDATA)
        fail_msg("%s: status %d, not refused", what, (int)st);
    assert_null(c);
    assert_non_null(strstr(dnr_last_error()->what, in(name)));
    assert_true(dnr_last_error()->remedy[0]);
}

static void every_damage_is_found(void **state)
{
    static const char *const names[] = {"checksums", "model.safetensors", "model_ema.safetensors",
                                        "trainer.safetensors"};
    dnr_trainer_opts o = tr_options(state);
    o.ema = 0.5;
    training a = tr_open(state, &o);
    tr_train(&a, 0, 1);
    save(&a, "c");
    uint64_t random = 1;
    for (int k = 0; k < 4; k++) {
        char name[64];
        size_t n;
        snprintf(name, sizeof name, "c/%s", names[k]);
        char *text = slurp(in(name), &n), *bad = malloc(n + 1);
        /* one bit: all of the small file's, some of the large ones' */
        for (size_t i = 0; i < (k ? 24 : 8 * n); i++) {
            random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
            size_t bit = k ? (i < 8 ? i : (random >> 16) % (8 * n)) : i;
            memcpy(bad, text, n);
            bad[bit / 8] = (char)(bad[bit / 8] ^ 1 << bit % 8);
            spit(in(name), bad, n);
            refused("c", name);
        }
        /* cut short, at several lengths; one byte more; missing */
        for (size_t i = 0; i < 12; i++) {
            spit(in(name), text, i * n / 12);
            refused("c", "cut short");
        }
        spit(in(name), text, n - 1);
        refused("c", "cut short by one");
        memcpy(bad, text, n);
        bad[n] = 0;
        spit(in(name), bad, n + 1);
        refused("c", "one byte more");
        unlink(in(name));
        refused("c", "missing");
        mkdir(in(name), 0777);
        refused("c", "a folder");
        rmdir(in(name));
        spit(in(name), text, n);
        dnr_checkpoint_close(open_whole("c"));
        free(text);
        free(bad);
    }
    refused("none", "no such folder");
    refused("c/checksums", "not a folder");

    /* a list without the averages, though there are some */
    char line[3][128];
    FILE *f = fopen(in("c/checksums"), "r");
    for (int i = 0; i < 3; i++)
        assert_non_null(fgets(line[i], sizeof line[i], f));
    fclose(f);
    f = fopen(in("c/checksums"), "w");
    fprintf(f, "%s%s", line[0], line[2]);
    fclose(f);
    refused("c", "a missing line");
    /* each listed sum is XXH64 of the file */
    size_t n;
    char *text = slurp(in("c/model.safetensors"), &n);
    assert_true(XXH64(text, n, 0) == strtoull(line[0], NULL, 16));
    assert_string_equal(line[0] + 16, "  model.safetensors\n");
    free(text);
    tr_close(&a);
}

static void others_are_refused_and_nothing_changes(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o);
    tr_train(&a, 0, 1);
    save(&a, "c");
    dnr_checkpoint *c = open_whole("c");
    dnr_trainer_opts other[3] = {o, o, o};
    other[0].model.name = "resnet20";
    other[1].model.classes = TR_CLASSES + 1;
    other[2].batch = 2 * TR_BATCH;
    static const char *const says[] = {"does not fit resnet20", "tensor fc",
                                       "global batch of 16, this trainer has 32 x 1 = 32"};
    for (int i = 0; i < 3; i++) {
        training b = tr_open(state, &other[i]), fresh = tr_open(state, &other[i]);
        assert_int_equal(dnr_checkpoint_restore(c, b.t), i < 2 ? DNR_EDATA : DNR_EUSAGE);
        tr_says(says[i]);
        tr_says(in("c"));
        assert_true(tr_distance(&b, &fresh, DNRI_MASTER) == 0);
        assert_int_equal(b.t->steps, 0);
        tr_close(&b);
        tr_close(&fresh);
    }
    assert_non_null(strstr(dnr_last_error()->remedy, "at 16"));
    /* the same global batch in two passes is fine */
    o.batch = TR_BATCH / 2;
    o.accumulate = 2;
    training b = tr_open(state, &o);
    OK(dnr_checkpoint_restore(c, b.t));
    assert_true(tr_distance(&a, &b, DNRI_MASTER) == 0);
    tr_close(&b);
    o.batch = 0;
    o.eval_batch = TR_BATCH;
    b = tr_open(state, &o);
    assert_int_equal(dnr_checkpoint_restore(c, b.t), DNR_EUSAGE);
    tr_says("evaluation only");
    assert_int_equal(dnr_checkpoint_save(b.t, in("d"), NULL), DNR_EUSAGE);
    tr_close(&b);
    dnr_checkpoint_close(c);
    tr_close(&a);
}

/* ---- many of them */

static void damage(const char *name)
{
    size_t n;
    char *text = slurp(in(name), &n);
    text[n / 2] = (char)(text[n / 2] ^ 4);
    spit(in(name), text, n);
    free(text);
}

/* As another version would write it: whole, and of another format. */
static void make_foreign(const char *name)
{
    char file[64], line[100];
    size_t n, m;
    snprintf(file, sizeof file, "%s/trainer.safetensors", name);
    char *text = slurp(in(file), &n), *format = memmem(text, n, "dnnrun checkpoint 1", 19);
    assert_non_null(format);
    format[18] = '9';
    spit(in(file), text, n);
    snprintf(line, sizeof line, "%016llx  trainer.safetensors",
             (unsigned long long)XXH64(text, n, 0));
    free(text);
    snprintf(file, sizeof file, "%s/checksums", name);
    text = slurp(in(file), &m);
    char *old = memmem(text, m, "  trainer.safetensors", 21);
    assert_non_null(old);
    memcpy(old - 16, line, strlen(line));
    spit(in(file), text, m);
    free(text);
}

static void the_newest_whole_one(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    dnr_checkpoint *c;
    OK(dnr_checkpoint_newest(in("nowhere"), &c));
    assert_null(c);
    OK(dnr_checkpoint_newest(folder, &c));
    assert_null(c);
    training a = tr_open(state, &o);
    for (int i = 1; i <= 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "step-%09d", i);
        tr_train(&a, TR_BATCH * i, 1);
        save(&a, name);
    }
    mkdir(in("step-x"), 0777); /* none of ours */
    mkdir(in(".step-000000009.partial-1"), 0777);
    OK(dnr_checkpoint_newest(folder, &c));
    assert_int_equal(dnr_checkpoint_steps(c), 4);
    assert_string_equal(said, "");
    dnr_checkpoint_close(c);
    if (geteuid() != 0) { /* nothing is kept from root */
        chmod(in("step-000000004/trainer.safetensors"), 0);
        assert_int_equal(dnr_checkpoint_newest(folder, &c), DNR_EDISK);
        tr_says("cannot open trainer.safetensors: Permission denied");
        chmod(in("step-000000004/trainer.safetensors"), 0644);
    }
    damage("step-000000004/trainer.safetensors");
    unlink(in("step-000000003/model.safetensors"));
    OK(dnr_checkpoint_newest(folder, &c));
    assert_int_equal(dnr_checkpoint_steps(c), 2);
    heard("step-000000004: trainer.safetensors is damaged: its checksum is ");
    heard("step-000000003: cannot open model.safetensors: No such file");
    dnr_checkpoint_close(c);
    damage("step-000000002/checksums");
    damage("step-000000001/model.safetensors");
    OK(dnr_checkpoint_newest(folder, &c));
    assert_null(c);

    OK(dnr_checkpoint_rewind(folder, 2));
    assert_false(there("step-000000003"));
    assert_true(there("superseded-step-000000003") && there("superseded-step-000000004"));
    heard("set aside");
    save(&a, "step-000000005"); /* not damaged: to pass it over would be to throw it away */
    make_foreign("step-000000005");
    assert_int_equal(dnr_checkpoint_newest(folder, &c), DNR_EDATA);
    tr_says("it is of format 'dnnrun checkpoint 9'");
    assert_null(c);
    OK(dnr_checkpoint_rewind(folder, 4));
    save(&a, "step-000000004");
    OK(dnr_checkpoint_rewind(folder, 3));
    assert_true(there("superseded-step-000000004-2"));
    assert_true(there("step-000000002") && there("step-x"));
    tr_close(&a);
}

static void pruning(void **state)
{
    for (int i = 1; i <= 12; i++) {
        char name[64];
        snprintf(name, sizeof name, "step-%09d", i * 90);
        mkdir(in(name), 0777);
        strcat(name, "/model.safetensors");
        spit(in(name), "x", 1);
    }
    mkdir(in(".step-000000090.partial-77"), 0777);
    spit(in(".step-000000090.partial-77/model.safetensors"), "x", 1);
    mkdir(in(".step-000000180.old-77"), 0777);
    mkdir(in("mine"), 0777);
    OK(dnr_checkpoint_prune(folder, 0, NULL)); /* rubbish goes in any case */
    assert_int_equal(entries(folder), 13);
    OK(dnr_checkpoint_prune(folder, 3, "step-000000180"));
    assert_int_equal(entries(folder), 5);
    assert_true(there("step-000001080") && there("step-000000900") && there("step-000000180"));
    assert_true(there("mine"));
    OK(dnr_checkpoint_prune(folder, 1, NULL));
    assert_int_equal(entries(folder), 2);
    OK(dnr_checkpoint_prune(in("nowhere"), 3, NULL));
}

static void places_that_cannot_be_written(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o);
    assert_int_equal(dnr_checkpoint_save(a.t, in("no/such/step-000000001"), NULL), DNR_EDISK);
    tr_says("No such file");
    spit(in("file"), "x", 1);
    assert_int_equal(dnr_checkpoint_save(a.t, in("file"), NULL), DNR_EDISK);
    tr_says("not a folder");
    assert_int_equal(entries(folder), 1);
    if (geteuid() != 0) { /* root may write anywhere */
        mkdir(in("closed"), 0555);
        assert_int_equal(dnr_checkpoint_save(a.t, in("closed/step-000000001"), NULL), DNR_EDISK);
        tr_says("Permission denied");
    }
    tr_close(&a);
}

/* ---- averages */

static void averages_follow_the_weights(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.ema = 0.75;
    training a = tr_open(state, &o);
    int64_t n;
    double *want = tr_slab(&a, DNRI_MASTER, &n);
    for (int step = 0; step < 4; step++) {
        tr_train(&a, step * TR_BATCH, 1);
        double *w = tr_slab(&a, DNRI_MASTER, &n);
        for (int64_t i = 0; i < n; i++)
            want[i] = 0.75 * want[i] + 0.25 * w[i];
        free(w);
    }
    double *got = tr_slab(&a, DNRI_EMA, &n);
    assert_true(rig_error(got, want, n) < 1e-6);
    free(got);
    free(want);

    /* evaluated as what the saved file holds, and training goes on with the weights */
    training b = tr_open(state, &o);
    OK(dnr_trainer_save_ema(a.t, in("ema.safetensors")));
    OK(dnr_trainer_load(b.t, in("ema.safetensors")));
    assert_true(tr_distance(&b, &b, DNRI_EMA) == 0);
    dnr_eval_result plain = tr_evaluate(&a, 40);
    OK(dnri_store_swap_ema(a.t->store));
    dnr_eval_result x = tr_evaluate(&a, 40), y = tr_evaluate(&b, 40);
    OK(dnri_store_swap_ema(a.t->store));
    assert_memory_equal(&x, &y, sizeof x);
    assert_true(x.loss != plain.loss);
    dnr_eval_result again = tr_evaluate(&a, 40);
    assert_memory_equal(&again, &plain, sizeof plain);
    tr_close(&b);

    o.ema = 0;
    b = tr_open(state, &o);
    assert_int_equal(dnr_trainer_save_ema(b.t, in("x")), DNR_EUSAGE);
    tr_says("keeps no averages");
    /* a checkpoint with averages into a trainer without, and back: they start at the weights */
    save(&a, "c");
    dnr_checkpoint *c = open_whole("c");
    OK(dnr_checkpoint_restore(c, b.t));
    save(&b, "d");
    dnr_checkpoint_close(c);
    c = open_whole("d");
    OK(dnr_checkpoint_restore(c, a.t));
    heard("holds no averages");
    double *w = tr_slab(&a, DNRI_MASTER, &n), *e = tr_slab(&a, DNRI_EMA, &n);
    assert_memory_equal(w, e, (size_t)n * sizeof *w);
    free(w);
    free(e);
    dnr_checkpoint_close(c);
    tr_close(&a);
    tr_close(&b);
}

/* An overflowed step moves no average. */
static void averages_skip_overflows(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.ema = 0.5;
    training a = tr_open_with(state, &o, &(dnri_trainer_extra){.scaled = true});
    tr_train(&a, 0, 1);
    int64_t n;
    double *before = tr_slab(&a, DNRI_EMA, &n);
    dnri_state s;
    OK(dnri_store_read_state(a.t->store, &s));
    s.loss_scale = INFINITY;
    OK(dnri_store_write_state(a.t->store, &s));
    assert_int_equal(tr_train(&a, 16, 1).skipped, 1);
    double *after = tr_slab(&a, DNRI_EMA, &n);
    assert_memory_equal(before, after, (size_t)n * sizeof *before);
    free(before);
    free(after);
    tr_close(&a);
}

/* ---- fine-tuning */

static void fine_tuning(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o);
    tr_train(&a, 0, 2);
    OK(dnr_trainer_save(a.t, in("w.safetensors")));

    OK(dnr_trainer_init_from(a.t, in("w.safetensors"))); /* the same classes: everything */
    heard("tensors taken from ");
    assert_null(strstr(said, "not taken"));

    o.model.classes = TR_CLASSES + 3;
    o.seed = 9;
    o.ema = 0.9;
    training b = tr_open(state, &o), fresh = tr_open(state, &o);
    said[0] = 0;
    OK(dnr_trainer_init_from(b.t, in("w.safetensors")));
    heard("not taken, and so at their initial values: fc.weight, fc.bias (tensor fc.weight is "
          "[4,64], not [7,64])");
    for (int i = 0; i < dnri_params_count(b.t->params); i++) {
        const dnri_param *p = dnri_params_at(b.t->params, i);
        dnri_role role = p->kind == DNRI_RUNNING ? DNRI_BUFFER : DNRI_MASTER;
        training *from = strncmp(p->name, "fc.", 3) ? &a : &fresh;
        double *x = malloc((size_t)p->count * sizeof *x), *y = malloc((size_t)p->count * sizeof *y);
        OK(dnri_store_read(b.t->store, role, i, x));
        OK(dnri_store_read(from->t->store, role, dnri_params_find(from->t->params, p->name), y));
        assert_memory_equal(x, y, (size_t)p->count * sizeof *x);
        free(x);
        free(y);
    }
    int64_t n;
    double *w = tr_slab(&b, DNRI_MASTER, &n), *e = tr_slab(&b, DNRI_EMA, &n);
    assert_memory_equal(w, e, (size_t)n * sizeof *w);
    free(w);
    free(e);
    tr_close(&b);

    o.model.name = "resnet20"; /* another model is no start, however much of it fits */
    b = tr_open(state, &o);
    assert_int_equal(dnr_trainer_init_from(b.t, in("w.safetensors")), DNR_EDATA);
    tr_says("does not fit resnet20");
    assert_int_equal(dnr_trainer_init_from(b.t, in("none")), DNR_EDATA);
    tr_close(&b);
    tr_close(&fresh);
    tr_close(&a);
}

/* ---- */

static int clean(void **state)
{
    char command[300];
    const char *tmp = getenv("TMPDIR");
    said[0] = 0;
    dnr_set_log(listen, NULL);
    if (*folder) {
        snprintf(command, sizeof command, "rm -rf '%s'", folder);
        if (system(command) != 0)
            return -1;
    }
    snprintf(folder, sizeof folder, "%s/dnnrun-checkpoints-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_all(void **state)
{
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    folder[0] = 0;
    return system(command);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, clean, remove_all)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(goes_on_to_the_same_bits),
        TEST(the_loss_scaler_goes_on),
        TEST(files_and_notes),
        TEST(every_damage_is_found),
        TEST(others_are_refused_and_nothing_changes),
        TEST(the_newest_whole_one),
        TEST(pruning),
        TEST(places_that_cannot_be_written),
        TEST(averages_follow_the_weights),
        TEST(averages_skip_overflows),
        TEST(fine_tuning),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
