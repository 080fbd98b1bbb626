/* test_weights.c: weights go to torchvision's form of file and back; others are refused.
 *
 *     test_weights                      on ref
 *     test_weights DEVICE PRECISION     exit code 77: the machine has no such device or precision */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../runtime/safetensors.h"
#include "trainrig.h"

static const char *temp_path(void)
{
    static char path[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/dnnrun-weights-%ld.safetensors", tmp ? tmp : "/tmp",
             (long)getpid());
    return path;
}

static void weights_go_round(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training a = tr_open(state, &o);
    tr_train(&a, 0, 5);
    OK(dnr_trainer_save(a.t, temp_path()));
    o.seed = 7;
    o.batch = 0; /* evaluates only */
    o.eval_batch = TR_BATCH;
    training b = tr_open(state, &o);
    dnr_eval_result before = tr_evaluate(&b, 40), want = tr_evaluate(&a, 40);
    assert_true(before.loss != want.loss);
    OK(dnr_trainer_load(b.t, temp_path()));
    dnr_eval_result got = tr_evaluate(&b, 40);
    assert_memory_equal(&got, &want, sizeof got);
    assert_true(tr_distance(&b, &a, DNRI_MASTER) == 0);
    dnri_state s;
    OK(dnri_store_read_state(b.t->store, &s));
    assert_int_equal(s.forwards, 5);
    unlink(temp_path());
    tr_close(&a);
    tr_close(&b);
}

static void files_have_torchvisions_form(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    o.model.name = "resnet18";
    training r = tr_open(state, &o);
    dnri_st_file *f;
    OK(dnr_trainer_save(r.t, temp_path()));
    OK(dnri_st_open(temp_path(), &f));
    assert_string_equal(dnri_st_metadata(f, "format"), "pt");
    assert_string_equal(dnri_st_metadata(f, "architecture"), "resnet18");
    assert_int_equal(dnri_st_count(f), 122); /* 62 parameters, 20 norms with three buffers each */
    const dnri_st_tensor *w = dnri_st_find(f, "layer2.0.conv1.weight");
    assert_non_null(w);
    assert_true(w->ndim == 4 && w->dim[0] == 128 && w->dim[1] == 64 && w->dim[2] == 3);
    const dnri_st_tensor *n = dnri_st_find(f, "layer4.1.bn2.num_batches_tracked");
    assert_true(n && n->type == DNRI_ST_I64 && n->ndim == 0);
    assert_int_equal(dnri_st_find(f, "fc.weight")->ndim, 2);
    /* OIHW: value (k, c, r, s) of the file is (k, r, s, c) of the store */
    double *file = malloc((size_t)w->count * sizeof *file),
           *store = malloc((size_t)w->count * sizeof *store);
    OK(dnri_st_read(f, w, file));
    OK(dnri_store_read(r.t->store, DNRI_MASTER, dnri_params_find(r.t->params, w->name), store));
    for (int k = 0; k < 128; k++)
        for (int c = 0; c < 64; c++)
            for (int p = 0; p < 9; p++)
                assert_true(file[(k * 64 + c) * 9 + p] == store[(k * 9 + p) * 64 + c]);
    free(file);
    free(store);
    dnri_st_close(f);
    unlink(temp_path());
    tr_close(&r);
}

/* Writes the file again without tensor `drop`, or with one named `add`, or with `drop` of another shape. */
static void rewrite(const char *drop, const char *add, bool reshape)
{
    dnri_st_file *f;
    OK(dnri_st_open(temp_path(), &f));
    int n = dnri_st_count(f), k = 0;
    dnri_st_tensor *t = calloc((size_t)n + 1, sizeof *t);
    static double zeros[1 << 17];
    for (int i = 0; i < n; i++) {
        const dnri_st_tensor *x = dnri_st_at(f, i);
        bool it = drop && strcmp(x->name, drop) == 0;
        assert_true(x->bytes <= sizeof zeros);
        if (!it)
            t[k++] = dnri_st_make(x->name, x->type, x->ndim, x->dim, zeros);
        else if (reshape)
            t[k++] = dnri_st_make(x->name, x->type, 2, (int64_t[]){3, 5}, zeros);
    }
    if (add)
        t[k++] = dnri_st_make(add, DNRI_ST_F32, 1, (int64_t[]){3}, zeros);
    OK(dnri_st_write(temp_path(), NULL, t, k));
    free(t);
    dnri_st_close(f);
}

static void other_weights_are_refused(void **state)
{
    dnr_trainer_opts o = tr_options(state);
    training r = tr_open(state, &o);
    int64_t n;
    double *before = tr_slab(&r, DNRI_MASTER, &n);
    static const struct {
        const char *drop, *add;
        bool reshape;
        const char *says;
    } CASES[] = {
        {"layer2.0.bn1.running_var", NULL, false, "layer2.0.bn1.running_var is missing"},
        {"fc.weight", NULL, true, "fc.weight is [3,5], not [4,64]"},
        {NULL, "layer9.weight", false, "layer9.weight is not of this model"},
        {"bn1.num_batches_tracked", "bn1.num_batches_tracked", false, "num_batches_tracked"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        OK(dnr_trainer_save(r.t, temp_path()));
        rewrite(CASES[i].drop, CASES[i].add, CASES[i].reshape);
        assert_int_equal(dnr_trainer_load(r.t, temp_path()), DNR_EDATA);
        tr_says(CASES[i].says);
        tr_says("does not say of which model");
    }
    /* nothing was changed by them */
    double *after = tr_slab(&r, DNRI_MASTER, &n);
    assert_memory_equal(before, after, (size_t)n * sizeof *before);
    /* the counters may be missing */
    OK(dnr_trainer_save(r.t, temp_path()));
    rewrite("bn1.num_batches_tracked", NULL, false);
    OK(dnr_trainer_load(r.t, temp_path()));
    /* another model and another number of classes */
    OK(dnr_trainer_save(r.t, temp_path()));
    o.model.name = "resnet20";
    training s = tr_open(state, &o);
    assert_int_equal(dnr_trainer_load(s.t, temp_path()), DNR_EDATA);
    tr_says("layer1.1.conv1.weight is missing");
    tr_says("says it is of resnet8");
    o = tr_options(state);
    o.model.classes = 5;
    training u = tr_open(state, &o);
    assert_int_equal(dnr_trainer_load(u.t, temp_path()), DNR_EDATA);
    tr_says("fc.weight is [4,64], not [5,64]");
    unlink(temp_path());
    assert_int_equal(dnr_trainer_load(u.t, temp_path()), DNR_EDATA);
    tr_says("No such file");
    free(before);
    free(after);
    tr_close(&r);
    tr_close(&s);
    tr_close(&u);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_go_round),
        cmocka_unit_test(files_have_torchvisions_form),
        cmocka_unit_test(other_weights_are_refused),
    };
    return tr_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
