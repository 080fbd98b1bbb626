/* cmd_eval.c: dnnrun eval: one exact pass over the validation pictures. */
#include "ranks.h"
#include "rundir.h"
#include "screen.h"
#include "session.h"

#include <jansson.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char help[] =
    "dnnrun eval CFG|RUN [section.key=value ...] [--weights FILE] [--json]: accuracy of a trained "
    "model.\n"
    "\n"
    "  dnnrun eval runs/quickstart-20250131-120000                 a run directory: its cfg and "
    "its last weights\n"
    "  dnnrun eval resnet50.cfg --weights model.safetensors data.val=imagenet/val\n"
    "  dnnrun eval resnet50.cfg --weights model.safetensors --json\n"
    "  dnnrun eval runs/mine --weights runs/mine/checkpoints/best/model.safetensors "
    "train.batch=64\n"
    "\n"
    "FILE holds safetensors with torchvision's names: what training saves, or a torchvision state "
    "dict.\n"
    "Every picture counts once, also where mpirun or srun starts several ranks, which share them. "
    "--json prints one line:\n"
    "  {\"top1\": 0.9917, \"top5\": 1.0, \"loss\": 0.05, \"images\": 359, \"correct1\": 356, "
    "\"correct5\": 359}\n"
    "top1 and top5 are fractions; loss is the mean cross-entropy without label smoothing.\n";

/* A run directory stands for its cfg and its last weights. */
static dnr_status resolve_run(tool_args *a, char cfg_path[CFG_TEXT], char weights[CFG_TEXT],
                              dnr_error *err)
{
    struct stat sb;
    if (stat(a->cfg, &sb) != 0 || !S_ISDIR(sb.st_mode))
        return DNR_OK;
    snprintf(cfg_path, CFG_TEXT, "%s/resolved.cfg", a->cfg);
    if (!rundir_weights(a->cfg, weights)) {
        tool_fail(err, DNR_EUSAGE, "command line",
                  "%.400s is a folder, but no run: it has no resolved.cfg", a->cfg);
        return tool_remedy(err, "give a cfg, or the folder of a run");
    }
    if (!a->weights && access(weights, F_OK) != 0) {
        tool_fail(err, DNR_EDATA, "command line", "the run %.400s has saved no weights yet",
                  a->cfg);
        return tool_remedy(err, "go on with it: dnnrun train CFG --out %.200s --resume auto",
                           a->cfg);
    }
    a->cfg = cfg_path;
    if (!a->weights)
        a->weights = weights;
    return DNR_OK;
}

enum { NAMED = 10 }; /* bad pictures that the loader's log names */

static void report_bad(session *s)
{
    dnr_loader_stats stats;
    dnr_loader_get_stats(s->val_loader, &stats);
    if (!stats.bad)
        return;
    fprintf(stderr, "warning: %lld bad picture%s not counted\n", (long long)stats.bad,
            stats.bad == 1 ? " is" : "s are");
    for (int64_t i = 0; stats.bad > NAMED && i < stats.bad; i++)
        fprintf(stderr, "warning: not counted: %s: %s\n", stats.bad_list[i].name,
                stats.bad_list[i].reason);
}

static void print_result(const dnr_eval_result *r, bool as_json)
{
    double n = (double)r->images, top1 = (double)r->correct1 / n, top5 = (double)r->correct5 / n;
    if (!as_json) {
        printf("top-1 %.2f %% (%lld of %lld), top-5 %.2f %%, loss %.4f\n", 100 * top1,
               (long long)r->correct1, (long long)r->images, 100 * top5, r->loss);
        return;
    }
    json_t *j = json_pack("{s:f, s:f, s:o, s:I, s:I, s:I}", "top1", top1, "top5", top5, "loss",
                          isfinite(r->loss) ? json_real(r->loss) : json_null(), "images",
                          (json_int_t)r->images, "correct1", (json_int_t)r->correct1, "correct5",
                          (json_int_t)r->correct5);
    json_dumpf(j, stdout, JSON_REAL_PRECISION(10));
    putchar('\n');
    json_decref(j);
}

dnr_status cmd_eval(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    session s = {0};
    dnr_eval_result r;
    char cfg_path[CFG_TEXT], weights[CFG_TEXT];
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, ARG_WEIGHTS | ARG_JSON, &a, err));
    if (a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, tool_need_cfg(&a, "eval", err));
    TOOL_TRY(st, resolve_run(&a, cfg_path, weights, err));
    TOOL_TRY(st, cfg_load(&s.cfg, a.cfg, a.set, a.n_set, err));
    if (!a.weights) {
        st = tool_fail(err, DNR_EUSAGE, "command line", "which weights? A cfg has none");
        tool_remedy(err, "add --weights FILE, or give the folder of a run in place of the cfg");
        goto out;
    }
    TOOL_TRY(st, ranks_open(&s, false, err));
    TOOL_TRY(st, session_open(&s, SESSION_VAL, err));
    TOOL_TRY(st, ranks_compare(&s, err));
    if (session_speaks(&s))
        TOOL_LIB(st, dnr_trainer_load(s.trainer, a.weights));
    TOOL_LIB(st, dnr_trainer_eval(s.trainer, s.val_loader, &r));
    report_bad(&s);
    if (session_speaks(&s))
        print_result(&r, a.json);
out:
    if (st != DNR_OK && st != DNR_STOPPED)
        screen_last_words(err); /* before others hear of it, and say it in their words */
    session_close(&s);
    ranks_close(&s, st == DNR_OK ? NULL : err);
    return st;
}
