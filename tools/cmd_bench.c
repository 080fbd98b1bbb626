/* cmd_bench.c: dnnrun bench. */
#include "bench.h"
#include "ranks.h"

#include <jansson.h>
#include <string.h>

static const char help[] =
    "dnnrun bench train|infer|compare CFG [section.key=value ...]: speed and memory.\n"
    "dnnrun bench allreduce [section.key=value ...]: sums over ranks.\n"
    "\n"
    "  dnnrun bench train resnet50.cfg                    whole training steps on one batch in "
    "memory\n"
    "  dnnrun bench infer resnet50.cfg train.batch=1      forward passes; train.batch pictures "
    "each\n"
    "  dnnrun bench train resnet50.cfg --json > before.json\n"
    "  dnnrun bench train resnet50.cfg --baseline before.json --tolerance 5%\n"
    "  dnnrun bench compare resnet50.cfg --python VENV/bin/python    the same in PyTorch, beside "
    "dnnrun\n"
    "  dnnrun bench compare resnet50.cfg --infer train.batch=1\n"
    "\n"
    "  mpirun -n 8 dnnrun bench train resnet50.cfg        the same on 8 ranks, sums of gradients "
    "included\n"
    "  mpirun -n 8 dnnrun bench allreduce                 sums of 4 B to 1 GB: time, algorithm and "
    "bus bandwidth as\n"
    "                                                     nccl-tests defines them; --most 64: up "
    "to "
    "64 MiB\n"
    "\n"
    "  --warmup N         runs before the clock starts (10)\n"
    "  --runs N           timed runs (100)\n"
    "  --json             the figures as one line of JSON\n"
    "  --baseline FILE    fail (1) where latency, throughput or planned memory are worse than in "
    "FILE\n"
    "  --tolerance 5%     by more than this (5%)\n"
    "  --python FILE      a Python that has torch (python3)\n"
    "\n"
    "No data is read and no loader runs: the batch is noise. Each latency is one run that is "
    "waited "
    "for; throughput\n"
    "is that of the same number of runs without waiting in between. The learning rate is constant, "
    "and "
    "residual\n"
    "branches start at zero. docs/compare.md says what makes the comparison fair.\n";

static dnr_status which(int argc, char **argv, dnr_error *err)
{
    static const char *const modes[] = {"train", "infer", "compare", "allreduce"};
    for (int i = 0; argc > 1 && i < 4; i++)
        if (!strcmp(argv[1], modes[i]))
            return DNR_OK;
    if (argc > 1) {
        const char *near = tool_nearest(argv[1], modes, 4);
        tool_fail(err, DNR_EUSAGE, "command line",
                  "bench of what? %.200s is none of train, infer, compare "
                  "and allreduce",
                  argv[1]);
        return near ? tool_remedy(err, "did you mean dnnrun bench %s?", near)
                    : tool_remedy(err, "for example dnnrun bench train quickstart.cfg");
    }
    tool_fail(err, DNR_EUSAGE, "command line", "bench of what?");
    return tool_remedy(err,
                       "for example dnnrun bench train quickstart.cfg; see dnnrun bench --help");
}

static dnr_status measure(const tool_args *a, bool infer, dnr_error *err)
{
    session s = {0};
    bench b = {.infer = infer,
               .warmup = a->warmup < 0 ? 10 : a->warmup,
               .runs = a->runs < 0 ? 100 : a->runs,
               .exchange = a->exchange};
    json_t *j = NULL, *then = NULL;
    dnr_status st;
    TOOL_TRY(st, cfg_load(&s.cfg, a->cfg, a->set, a->n_set, err));
    TOOL_TRY(st, ranks_open(&s, false, err));
    if (a->baseline && session_speaks(&s))
        TOOL_TRY(st, bench_baseline(a->baseline, &then, err));
    TOOL_TRY(st, bench_measure(&b, &s, err));
    if (!session_speaks(&s))
        goto out;
    j = bench_json(&b, &s);
    if (a->json) {
        json_dumpf(j, stdout, JSON_REAL_PRECISION(10));
        putchar('\n');
    } else {
        bench_print(&b, &s);
    }
    if (then)
        TOOL_TRY(st,
                 bench_against(j, then, a->baseline, a->tolerance < 0 ? 0.05 : a->tolerance, err));
out:
    json_decref(j);
    json_decref(then);
    bench_free(&b);
    session_close(&s);
    ranks_close(&s, st == DNR_OK ? NULL : err);
    return st;
}

dnr_status cmd_bench(int argc, char **argv, dnr_error *err)
{
    enum { BOTH = ARG_JSON | ARG_WARMUP | ARG_RUNS };
    tool_args a;
    char name[32];
    if (argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
        fputs(help, stdout);
        return DNR_OK;
    }
    dnr_status st = which(argc, argv, err);
    if (st != DNR_OK)
        return st;
    bool compare = !strcmp(argv[1], "compare"), infer = !strcmp(argv[1], "infer");
    bool allreduce = !strcmp(argv[1], "allreduce");
    snprintf(name, sizeof name, "bench %s", argv[1]);
    argv[1] = name; /* the command's name, in errors */
    st = tool_parse(argc - 1, argv + 1,
                    allreduce ? ARG_JSON | ARG_MOST
                    : compare ? BOTH | ARG_PYTHON | ARG_INFER
                              : BOTH | ARG_BASELINE | ARG_TOLERANCE | ARG_EXCHANGE,
                    &a, err);
    if (st == DNR_OK && a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    if (st == DNR_OK && a.tolerance >= 0 && !a.baseline) {
        tool_fail(err, DNR_EUSAGE, "command line", "--tolerance of what? There is no --baseline");
        st = tool_remedy(err, "add --baseline FILE, or leave it out");
    }
    if (st == DNR_OK && allreduce)
        return bench_allreduce(&a, err);
    if (st == DNR_OK)
        st = tool_need_cfg(&a, name, err);
    if (st != DNR_OK)
        return st;
    return compare ? bench_compare(&a, err) : measure(&a, infer, err);
}
