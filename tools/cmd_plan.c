/* cmd_plan.c: dnnrun plan: the programs of a run, without its data. */
#include "ranks.h"

static const char help[] =
    "dnnrun plan CFG [section.key=value ...] [--measure] [--json]: what a training step runs.\n"
    "\n"
    "  dnnrun plan resnet50.cfg                         ops, launches, implementations, bytes, "
    "FLOPs, memory map\n"
    "  dnnrun plan resnet50.cfg train.batch=64          the same with another batch\n"
    "  dnnrun plan resnet50.cfg memory.recompute=block  how much memory recomputation saves\n"
    "  dnnrun plan quickstart.cfg device=cpu --json     for a program\n"
    "  dnnrun plan resnet50.cfg --measure               and how long each launch takes on this "
    "device\n"
    "  mpirun -n 8 dnnrun plan resnet50.cfg             and where the sums over 8 ranks stand\n"
    "\n"
    "No pictures are read; memory is reserved as for training.\n";

dnr_status cmd_plan(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    session s = {0};
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, ARG_JSON | ARG_MEASURE, &a, err));
    if (a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    TOOL_TRY(st, tool_need_cfg(&a, "plan", err));
    TOOL_TRY(st, cfg_load(&s.cfg, a.cfg, a.set, a.n_set, err));
    TOOL_TRY(st, ranks_open(&s, false, err));
    if (a.measure && dnr_comm_launched(s.comm)) {
        tool_fail(err, DNR_EUSAGE, "command line",
                  "--measure times one launch after the other, which sums over ranks are not");
        st = tool_remedy(err, "start it without mpirun or srun");
        goto out;
    }
    TOOL_TRY(st, session_open(&s, 0, err));
    if (a.measure)
        TOOL_LIB(st, dnr_trainer_measure(s.trainer));
    if (session_speaks(&s))
        TOOL_LIB(st, dnr_trainer_explain(s.trainer, a.json ? DNR_EXPLAIN_JSON : DNR_EXPLAIN_TEXT,
                                         stdout));
out:
    session_close(&s);
    ranks_close(&s, st == DNR_OK ? NULL : err);
    return st;
}
