#!/usr/bin/env python3
"""dnnrun beside PyTorch on this machine's CPU: throughput, peak memory, planned memory and start-up, with what is asked of
each. Prints a table; exits with 1 where something asked for is missed.

    cpu_compare.py --dnnrun build/dnnrun --python VENV/bin/python
    cpu_compare.py … --threads 2 --rounds 3 --json out.json      contenders take turns; medians of the rounds
    cpu_compare.py … --case resnet18 --runs 5                    some cases only
    cpu_compare.py … --set memory.recompute=block                other settings

Both do what `dnnrun bench compare` does: the same weights, batch, steps and threads, each contender in a process of its
own (docs/compare.md); PyTorch eager, channels-last and contiguous, and with --compile compiled as well: its fastest counts.
Use an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

#       name                    cfg                  settings
CASES = [("resnet50 fp32", "resnet50.cfg", ["train.batch=16", "train.precision=fp32", "memory.recompute=cheap"]),
         ("resnet50 bf16", "resnet50.cfg", ["train.batch=16", "train.precision=bf16", "memory.recompute=cheap"]),
         ("resnet18-cifar fp32", "resnet18-cifar10.cfg", ["train.batch=128", "train.precision=fp32"]),
         ("resnet18-cifar bf16", "resnet18-cifar10.cfg", ["train.batch=128", "train.precision=bf16"]),
         ("quickstart", "quickstart.cfg", [])]
SYNTHETIC = ["data.train=synthetic", "data.val="]

# asked for: what, of which cases, at least or at most
ASKED = [("speedup", "fp32", ">=", 1.1), ("speedup", "bf16", ">=", 1.1), ("over_fp32", "bf16", ">=", 1.8),
         ("memory_ratio", "resnet", "<=", 0.6), ("plan_error", "resnet", "<=", 0.1),
         ("start_s", "quickstart", "<=", 0.5)]


def run(command, env):
    p = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(command)}: exit code {p.returncode}")
    return json.loads(p.stdout)


def peers(args):
    both = [["--layout", "channels_last"], ["--layout", "contiguous_format"]]
    return both + [["--layout", "channels_last", "--compile"]] if args.compile else both


def measure(args, cfg, settings):
    """One round: dnnrun's figures, and those of PyTorch's fastest."""
    env = dict(os.environ, OMP_NUM_THREADS=str(args.threads))
    small = cfg == "quickstart.cfg"
    own_keys = [s.split("=")[0] for s in args.set]
    settings = [s for s in ([] if small else SYNTHETIC) + settings if s.split("=")[0] not in own_keys] + args.set
    warmup, runs = (10, 300) if small else (args.warmup, args.runs)
    bench = [args.dnnrun, "bench", "train", os.path.join(ROOT, "models", cfg), "device=cpu", *settings, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        # the weights and the batch in a run of its own: writing them takes memory
        run(bench + ["--exchange", folder, "--warmup", "1", "--runs", "2"], env)
        own = run(bench + ["--warmup", str(warmup), "--runs", str(runs)], env)
        with open(os.path.join(folder, "dnnrun.json"), "w") as f:
            json.dump(own, f)
        script = os.path.join(ROOT, "tools", "compare_torch.py")
        all_ = [run([args.python, script, folder, *peer], env) for peer in peers(args)]
    return own, max(all_, key=lambda r: r["images_per_s"])


def row(name, settings, rounds):
    def median(side, *path):
        def get(r):
            for key in path:
                r = r[key]
            return r
        return statistics.median(get(r[side]) for r in rounds)

    r = {"case": name, "settings": settings, "threads": rounds[0][0]["case"]["device_description"], "torch": rounds[0][1]["about"],
         "layout": rounds[-1][1]["layout"] + (", compiled" if rounds[-1][1]["compiled"] else ""),
         "images_per_s": median(0, "images_per_s"), "torch_images_per_s": median(1, "images_per_s"),
         "peak_mib": median(0, "memory", "process_peak") / 2**20, "torch_peak_mib": median(1, "memory", "process_peak") / 2**20,
         "planned_mib": median(0, "memory", "planned") / 2**20, "measured_mib": median(0, "memory", "measured") / 2**20,
         "start_s": median(0, "start_s"), "torch_start_s": median(1, "start_s"),
         "loss": rounds[0][0]["loss"][-1], "torch_loss": rounds[0][1]["loss"][-1]}
    r["speedup"] = r["images_per_s"] / r["torch_images_per_s"]
    r["memory_ratio"] = r["peak_mib"] / r["torch_peak_mib"]
    r["plan_error"] = abs(r["measured_mib"] / r["planned_mib"] - 1)
    return r


def judge(rows):
    """The figures asked for that are missed."""
    missed = []
    for what, cases, sense, bound in ASKED:
        for r in rows:
            if cases in r["case"] and what in r and not (r[what] >= bound if sense == ">=" else r[what] <= bound):
                missed.append(f"{r['case']}: {what} {r[what]:.3f}, asked for {sense} {bound}")
    return missed


def show(rows):
    print(f"{'':21}{'images/s':>19}{'x':>7}{'x fp32':>7}{'peak MiB':>14}{'x':>6}{'planned':>9}{'measured':>9}{'start s':>14}"
          f"{'loss':>22}")
    for r in rows:
        over = f"{r['over_fp32']:.2f}" if "over_fp32" in r else ""
        print(f"{r['case']:21}{r['images_per_s']:10.1f}{r['torch_images_per_s']:9.1f}{r['speedup']:7.2f}{over:>7}"
              f"{r['peak_mib']:7.0f}{r['torch_peak_mib']:7.0f}{r['memory_ratio']:6.2f}{r['planned_mib']:9.0f}"
              f"{r['measured_mib']:9.0f}{r['start_s']:7.2f}{r['torch_start_s']:7.2f}{r['loss']:11.5f}{r['torch_loss']:11.5f}"
              f"  {r['layout']}")
    print(f"\ndnnrun, then PyTorch, in each pair. {rows[0]['threads']}; {rows[0]['torch']}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--dnnrun", default=os.path.join(ROOT, "build", "dnnrun"))
    ap.add_argument("--python", default=sys.executable, help="one that has torch and safetensors")
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--rounds", type=int, default=1)
    ap.add_argument("--warmup", type=int, default=3, help="steps")
    ap.add_argument("--runs", type=int, default=10, help="steps waited for, and as many in a row")
    ap.add_argument("--case", default="", help="cases whose name holds this")
    ap.add_argument("--set", nargs="*", default=[], help="cfg settings")
    ap.add_argument("--compile", action="store_true", help="torch.compile too")
    ap.add_argument("--json", help="write the figures there as well")
    args = ap.parse_args()
    rows = []
    for name, cfg, settings in CASES:
        if args.case in name:
            rows.append(row(name, settings + args.set, [measure(args, cfg, settings) for _ in range(args.rounds)]))
    if not rows:
        sys.exit(f"no case's name holds {args.case}")
    fp32 = {r["case"].split()[0]: r["torch_images_per_s"] for r in rows if "fp32" in r["case"]}
    for r in rows:
        if "bf16" in r["case"] and r["case"].split()[0] in fp32:
            r["over_fp32"] = r["images_per_s"] / fp32[r["case"].split()[0]]
    show(rows)
    missed = judge(rows)
    for m in missed:
        print("MISSED", m)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"rows": rows, "missed": missed}, f, indent=1)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
