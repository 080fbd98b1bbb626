/* cmd_train.c: dnnrun train. */
#include "ranks.h"
#include "resume.h"
#include "screen.h"
#include "train_loop.h"

#include <string.h>

static const char help[] =
    "dnnrun train CFG [section.key=value ...] [--out DIR] [--resume auto|PATH] [--init FILE]\n"
    "    [--allow-changes] [--dry-run] [--profile N] [--log-all-ranks]: trains a model.\n"
    "\n"
    "  dnnrun train quickstart.cfg                      the bundled handwritten digits, within a "
    "minute\n"
    "  dnnrun train resnet50.cfg data.train=imagenet/train data.val=imagenet/val\n"
    "  dnnrun train resnet50.cfg train.batch=128 train.accumulate=2       half the memory, the "
    "same step\n"
    "  dnnrun train mine.cfg device=cuda:1 train.precision=bf16 --out runs/bf16\n"
    "  dnnrun train resnet50.cfg data.train=synthetic train.max_steps=100 no pictures at hand\n"
    "  dnnrun train mine.cfg --out runs/a --resume auto   goes on where that run stopped, or "
    "begins "
    "it\n"
    "  dnnrun train mine.cfg --resume runs/a/checkpoints/step-000005000   from this checkpoint\n"
    "  dnnrun train mine.cfg model.classes=37 --init resnet50.safetensors  fine-tuning; the last "
    "layer begins anew\n"
    "  mpirun -n 8 dnnrun train resnet50.cfg            on 8 GPUs, a process each; srun does as "
    "well (docs/multi-gpu.md)\n"
    "  dnnrun train mine.cfg --profile 3                three steps as a Chrome trace: trace.json "
    "in the "
    "run directory\n"
    "  dnnrun train resnet50.cfg --dry-run              resolved cfg, plan and memory map; trains "
    "nothing\n"
    "\n"
    "CFG is a path, or the name of one that came with dnnrun. section.key=value wins over the "
    "file.\n"
    "\n"
    "The run directory holds resolved.cfg, manifest.json, metrics.jsonl and "
    "checkpoints/{best,last}/model.safetensors,\n"
    "which torchvision loads as it is. Ctrl-C, SIGTERM, SIGUSR1, SIGHUP and a closed pipe behind "
    "the output save a\n"
    "checkpoint after the step at hand and exit with 75; a second signal kills. Checkpoints are "
    "whole or absent, so\n"
    "that a killed run goes on with --resume auto from its newest; a changed cfg is shown and "
    "refused, unless\n"
    "--allow-changes.\n"
    "\n"
    "Of several ranks, rank 0 prints; the others print warnings and errors, with --log-all-ranks "
    "everything.\n"
    "\n"
    "Keys, defaults and what is allowed (docs/cfg.md explains each):\n"
    "\n";

static void banner(const session *s, const rundir *dir)
{
    const cfg *c = &s->cfg;
    char a[32], b[32], n[32], warmup[48] = "", schedule[CFG_TEXT] = "", stop[64] = "";
    size_t arena, store;
    dnr_trainer_memory(s->trainer, &arena, &store);
    for (int i = 0; i < cfg_n_keys; i++)
        if (!strcmp(cfg_keys[i].name, "optim.schedule"))
            cfg_value(c, &cfg_keys[i], schedule);
    if (c->optim.warmup > 0)
        snprintf(warmup, sizeof warmup, " after %g epoch%s of warm-up", c->optim.warmup,
                 c->optim.warmup == 1 ? "" : "s");
    if (c->train.max_steps)
        snprintf(stop, sizeof stop, " (train.max_steps = %lld)", (long long)c->train.max_steps);
    screen_print("dnnrun %s on %s: %s", dnr_version(), dnr_device_name(s->dev),
                 dnr_device_description(s->dev));
    screen_print("model   %s, %s parameters, %lld classes, %s", c->model.name,
                 tool_thousands(dnr_trainer_parameters(s->trainer), n), (long long)c->model.classes,
                 dnr_precision_name(dnr_trainer_precision(s->trainer)));
    if (s->val)
        screen_print("data    %s pictures to train, %s to validate, %lld x %lld",
                     tool_thousands(dnr_source_count(s->train), a),
                     tool_thousands(dnr_source_count(s->val), b), (long long)c->data.image,
                     (long long)c->data.image);
    else
        screen_print(
            "data    %s pictures to train, none to validate (data.val is empty), %lld x %lld",
            tool_thousands(dnr_source_count(s->train), a), (long long)c->data.image,
            (long long)c->data.image);
    if (s->comm && dnr_comm_launched(s->comm))
        screen_print("ranks   %s", dnr_comm_description(s->comm));
    screen_print("steps   %s%s of %s pictures, %lld epochs", tool_thousands(s->steps, a), stop,
                 tool_thousands(s->global_batch, b), (long long)c->train.epochs);
    screen_print("rate    %.6g (%g for %lld, scale_lr = %s), %s%s", s->lr, c->optim.lr,
                 (long long)c->optim.base_batch,
                 c->optim.scale_lr == SCALE_LINEAR ? "linear" : "none", schedule, warmup);
    screen_print("memory  %s planned: activations and workspace %s, weights and optimizer %s",
                 tool_bytes((double)(arena + store), n), tool_bytes((double)arena, a),
                 tool_bytes((double)store, b));
    if (dir)
        screen_print("run     %s", dir->path);
}

static dnr_status dry_run(session *s, dnr_error *err)
{
    dnr_status st;
    banner(s, NULL);
    puts("\n---- resolved cfg\n");
    cfg_write(&s->cfg, stdout);
    puts("\n---- plan\n");
    TOOL_LIB(st, dnr_trainer_explain(s->trainer, DNR_EXPLAIN_TEXT, stdout));
out:
    return st;
}

static bool is_auto(const tool_args *a)
{
    return a->resume && !strcmp(a->resume, "auto");
}

/* --init FILE is train.init=FILE. */
static dnr_status set_init(cfg *c, const char *file, dnr_error *err)
{
    char assignment[sizeof c->train.init + 16];
    if (!file)
        return DNR_OK;
    if (strlen(file) >= sizeof c->train.init || !*file) {
        tool_fail(err, DNR_EUSAGE, "command line", "--init with %s path",
                  *file ? "too long a" : "an empty");
        return tool_remedy(err, "give a file of weights");
    }
    snprintf(assignment, sizeof assignment, "train.init=%s", file);
    return cfg_set(c, assignment, err);
}

static dnr_status check_options(const tool_args *a, const cfg *c, dnr_error *err)
{
    if (is_auto(a) && !a->out && !*c->run.out) {
        tool_fail(err, DNR_EUSAGE, "command line",
                  "--resume auto without a run directory: each run would get a new one");
        return tool_remedy(err, "add --out DIR, or set run.out");
    }
    if (a->resume && a->dry_run) {
        tool_fail(err, DNR_EUSAGE, "command line",
                  "--dry-run trains nothing, so --resume has no use");
        return tool_remedy(err, "leave one of them out");
    }
    if (a->resume && a->init && strcmp(a->resume, "auto")) {
        tool_fail(err, DNR_EUSAGE, "command line",
                  "--resume PATH brings its own weights: --init has no use");
        return tool_remedy(err, "leave one of them out");
    }
    if (a->allow_changes && !a->resume) {
        tool_fail(err, DNR_EUSAGE, "command line", "--allow-changes belongs to --resume");
        return tool_remedy(err, "leave it out, or add --resume auto");
    }
    return DNR_OK;
}

/* The weights to begin with: the checkpoint's, a file's, or the initial ones; rank 0's, in all ranks. */
static dnr_status begin_with(session *s, const resume *r, bool allow, dnr_error *err)
{
    char where[96];
    dnr_status st;
    dnr_comm_stage(s->comm, RANKS_SLOW_S, "loading the weights");
    if (r->from) {
        TOOL_TRY(st, resume_check_session(r, s, allow, err));
        TOOL_LIB(st, dnr_checkpoint_restore(r->from, s->trainer));
        screen_print("resume  from %s, after step %lld of %lld", dnr_checkpoint_folder(r->from),
                     (long long)dnr_checkpoint_steps(r->from), (long long)s->steps);
    } else if (*s->cfg.train.init && session_speaks(s) && !r->goes_on) {
        if ((st = dnr_trainer_init_from(s->trainer, s->cfg.train.init)) != DNR_OK)
            return tool_lib_error(err, cfg_origin(&s->cfg, "train.init", where), NULL);
    }
    TOOL_LIB(st, dnr_trainer_share(s->trainer));
out:
    return st;
}

/* Which run directory, and from which checkpoint; rank 0 looks, the others learn it. */
static dnr_status find_place(session *s, const tool_args *a, rundir *dir, resume *r, dnr_error *err)
{
    dnr_status st = DNR_OK;
    bool leads = session_speaks(s);
    dnr_comm_stage(s->comm, RANKS_SLOW_S, "opening the run directory");
    if (leads && is_auto(a)) /* locked before it is looked at */
        TOOL_TRY(st, rundir_make(dir, &s->cfg, a->out, true, err));
    if (leads)
        TOOL_TRY(st, resume_find(r, a->resume, a->out, &s->cfg, err));
    TOOL_TRY(st, resume_share(r, s->comm, err));
    TOOL_TRY(st, resume_check_cfg(r, &s->cfg, session_world(s), a->allow_changes, err));
    if (leads && !is_auto(a))
        TOOL_TRY(st, rundir_make(dir, &s->cfg, *r->out ? r->out : a->out, r->in_place, err));
    s->start = r->samples;
out:
    return st;
}

static dnr_status train(session *s, const tool_args *a, rundir *dir, resume *r, int n_command,
                        char **command, dnr_error *err)
{
    dnr_status st;
    TOOL_TRY(st, ranks_open(s, a->log_all_ranks, err));
    TOOL_TRY(st, find_place(s, a, dir, r, err));
    TOOL_TRY(st, session_open(s, SESSION_TRAIN | SESSION_VAL, err));
    TOOL_TRY(st, ranks_compare(s, err));
    banner(s, dir);
    TOOL_TRY(st, begin_with(s, r, a->allow_changes, err));
    dnr_comm_stage(s->comm, RANKS_SLOW_S, "beginning the run directory");
    if (session_speaks(s))
        TOOL_TRY(st, rundir_begin(dir, s, r->from, n_command, command, err));
    st = train_loop(s, dir, r, err);
out:
    return st;
}

dnr_status cmd_train(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    session s = {0};
    rundir dir = {0};
    resume r = {0};
    dnr_status st;
    char *command[256]; /* as typed: parsing permutes argv */
    int n_command = argc < 256 ? argc : 256;
    memcpy(command, argv, (size_t)n_command * sizeof *command);

    TOOL_TRY(st, tool_parse(argc, argv,
                            ARG_OUT | ARG_DRY_RUN | ARG_RESUME | ARG_INIT | ARG_ALLOW_CHANGES |
                                ARG_LOG_ALL | ARG_PROFILE,
                            &a, err));
    if (a.help) {
        fputs(help, stdout);
        cfg_write_help(stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, tool_need_cfg(&a, "train", err));
    TOOL_TRY(st, cfg_load(&s.cfg, a.cfg, a.set, a.n_set, err));
    TOOL_TRY(st, check_options(&a, &s.cfg, err));
    TOOL_TRY(st, set_init(&s.cfg, a.init, err));
    s.profile = a.profile > 0 ? a.profile : 0;
    if (a.dry_run) {
        TOOL_TRY(st, session_open(&s, SESSION_TRAIN | SESSION_VAL, err));
        st = dry_run(&s, err);
        goto out;
    }
    st = train(&s, &a, &dir, &r, n_command, command, err);
out:
    if (st != DNR_OK && st != DNR_STOPPED)
        screen_last_words(err); /* before others hear of it, and say it in their words */
    rundir_close(&dir);
    session_close(&s);
    resume_close(&r);
    ranks_close(&s, st == DNR_OK ? NULL : err);
    return st;
}
