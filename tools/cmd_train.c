/* cmd_train.c: dnnrun train. */
#include "screen.h"
#include "train_loop.h"

#include <string.h>

static const char help[] =
    "dnnrun train CFG [section.key=value ...] [--out DIR] [--dry-run]: trains a model.\n"
    "\n"
    "  dnnrun train quickstart.cfg                      the bundled handwritten digits, within a "
    "minute\n"
    "  dnnrun train resnet50.cfg data.train=imagenet/train data.val=imagenet/val\n"
    "  dnnrun train resnet50.cfg train.batch=128 train.accumulate=2       half the memory, the "
    "same step\n"
    "  dnnrun train mine.cfg device=cuda:1 train.precision=bf16 --out runs/bf16\n"
    "  dnnrun train resnet50.cfg data.train=synthetic train.max_steps=100 no pictures at hand\n"
    "  dnnrun train resnet50.cfg --dry-run              resolved cfg, plan and memory map; trains "
    "nothing\n"
    "\n"
    "CFG is a path, or the name of one that came with dnnrun. section.key=value wins over the "
    "file.\n"
    "\n"
    "The run directory holds resolved.cfg, manifest.json, metrics.jsonl and "
    "checkpoints/{best,last}/model.safetensors,\n"
    "which torchvision loads as it is. Ctrl-C stops at the next step and saves; a second one "
    "kills.\n"
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
        snprintf(warmup, sizeof warmup, " after %g epochs of warm-up", c->optim.warmup);
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

dnr_status cmd_train(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    session s = {0};
    rundir dir = {0};
    dnr_status st;
    char *command[256]; /* as typed: parsing permutes argv */
    int n_command = argc < 256 ? argc : 256;
    memcpy(command, argv, (size_t)n_command * sizeof *command);

    TOOL_TRY(st, tool_parse(argc, argv, ARG_OUT | ARG_DRY_RUN, &a, err));
    if (a.help) {
        fputs(help, stdout);
        cfg_write_help(stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, tool_need_cfg(&a, "train", err));
    TOOL_TRY(st, cfg_load(&s.cfg, a.cfg, a.set, a.n_set, err));
    if (!a.dry_run)
        TOOL_TRY(st, rundir_make(&dir, &s.cfg, a.out, err));
    TOOL_TRY(st, session_open(&s, SESSION_TRAIN | SESSION_VAL, err));
    if (a.dry_run) {
        st = dry_run(&s, err);
        goto out;
    }
    banner(&s, &dir);
    TOOL_TRY(st, rundir_begin(&dir, &s, n_command, command, err));
    st = train_loop(&s, &dir, err);
out:
    session_close(&s);
    rundir_close(&dir);
    return st;
}
