#!/usr/bin/env python3
"""dnnrun beside PyTorch on this machine's GPU: training and inference of ResNets, memory, start-up, with what is asked of
each. Prints a table; exits with 1 where something asked for is missed.

    gpu_compare.py --dnnrun build/dnnrun --json gpu.json
    gpu_compare.py … --case 'resnet50 b256$'    some cases
    gpu_compare.py … --only-compile             only fills PyTorch's caches of compiled code, all cases at once
    gpu_compare.py … --no-torch
    gpu_compare.py … --fusion d1,d2 --peers bf16     dnnrun at these levels of cudnn.fusion; PyTorch in bf16 alone

dnnrun's figure for training is the median of the records of a real `dnnrun train` on synthetic pictures, loader and all;
PyTorch's is tests/bench/torch_resnet.py's: channels-last, compiled, pictures on the device; the faster of fp16 and bf16
counts, below batch 256 through CUDA graphs.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(HERE, "..", "..", "models")
CIFAR = ["--stem", "cifar", "--classes", "10", "--image", "32"]

#       name                      cfg                 precision  batch  settings                        PyTorch's arguments       times PyTorch  images/s
TRAIN = [("resnet50 b256", "resnet50", "fp16", 256, [], [], 1.25, 9000),
         ("resnet50 b256 bf16", "resnet50", "bf16", 256, [], [], None, 8000),
         ("resnet50 b128", "resnet50", "fp16", 128, [], ["--graphs"], 1.3, None),
         ("resnet50 b64", "resnet50", "fp16", 64, [], ["--graphs"], 1.3, None),
         ("resnet50 b32", "resnet50", "fp16", 32, [], ["--graphs"], 1.3, None),
         ("resnet50 b256 cheap", "resnet50", "fp16", 256, ["memory.recompute=cheap"], None, None, None),
         ("resnet50 b256 block", "resnet50", "fp16", 256, ["memory.recompute=block"], None, None, None),
         ("resnet18 b256", "resnet50", "fp16", 256, ["model.name=resnet18"], ["--model", "resnet18"], 1.2, None),
         ("resnet34 b256", "resnet50", "fp16", 256, ["model.name=resnet34"], ["--model", "resnet34"], 1.2, None),
         ("resnet101 b256", "resnet50", "fp16", 256, ["model.name=resnet101"], ["--model", "resnet101"], 1.2, None),
         ("resnet152 b256", "resnet50", "fp16", 256, ["model.name=resnet152"], ["--model", "resnet152"], 1.2, None),
         ("resnet18-cifar b512", "resnet18-cifar10", "fp16", 512, [], ["--model", "resnet18", *CIFAR], 1.2, None)]  # fmt: skip
#       name            batch  ms at most  images/s at least
INFER = [("infer b1", 1, 0.32, None), ("infer b256", 256, None, 34000)]
#       name             GiB at most, times the time of resnet50 b256 at most
MEMORY = {"resnet50 b256": (10.0, None), "resnet50 b256 cheap": (5.5, 1.06), "resnet50 b256 block": (4.0, 1.25)}


def tool(args, *words):
    own = [s.split("=")[0] for s in args.set]
    words = [w for w in words if w.split("=")[0] not in own] + args.set
    p = subprocess.run([args.dnnrun, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if p.returncode:
        sys.exit(f"dnnrun {' '.join(words)}: exit code {p.returncode}\n{p.stdout}")
    return p.stdout


def settings_of(args, precision, batch):
    return ["device=cuda", "data.train=synthetic", "data.val=", f"train.precision={precision}", f"train.batch={batch}"]


def train(args, cfg, precision, batch, more):
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, "run")
        steps = max(150, min(1500, 38400 // batch))
        said = tool(args, "train", os.path.join(MODELS, f"{cfg}.cfg"), *settings_of(args, precision, batch), *more,
                    f"train.max_steps={steps}", f"run.log_every={steps // 5}", "--out", run)
        with open(os.path.join(run, "metrics.jsonl")) as f:
            rates = [r["images_per_s"] for r in map(json.loads, f) if r["event"] == "train"][1:]
    size, unit = re.search(r"([\d.]+) ([MG])iB planned", said).groups()
    return statistics.median(rates), float(size) / (1024 if unit == "M" else 1)


@functools.cache
def torch(python, *words):
    p = subprocess.run([python, os.path.join(HERE, "torch_resnet.py"), *words], stdout=subprocess.PIPE,
                       stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    return json.loads(p.stdout.splitlines()[-1]) if p.returncode == 0 else None


def train_peers(args, precision, batch, words):
    """What PyTorch is run with; nothing where it is not asked."""
    if words is None or args.no_torch:
        return []
    either = args.peers.split(",") if precision == "fp16" else [precision]
    return [["--compile", "--batch", str(batch), "--precision", p, "--steps", "25", *words] for p in either]


def infer_peer(batch):
    return ["--mode", "infer", "--compile", "--cast", "--freeze", "--batch", str(batch)]


def fill_caches(args, cases, infers):
    jobs = [w for c in cases for w in train_peers(args, c[2], c[3], c[5])] + [infer_peer(i[1]) for i in infers]
    waiting = [subprocess.Popen([args.python, os.path.join(HERE, "torch_resnet.py"), *w, "--warmup", "2", "--steps", "2"],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for w in jobs]  # fmt: skip
    print(f"compiled {sum(p.wait() == 0 for p in waiting)} of {len(jobs)} in PyTorch", flush=True)


def best(results):
    return max((r for r in results if r), key=lambda r: r["images_per_s"], default=None)


def judge(row, missed):
    def want(what, value, sense, bound):
        if value is not None and bound is not None and not (value >= bound if sense == ">=" else value <= bound):
            missed.append(f"{row['case']} {row.get('fusion', '')}: {what} {value:.3f}, asked for {sense} {bound}")

    want("images/s", row["images_per_s"], ">=", row.get("least"))
    want("times PyTorch", row.get("speedup"), ">=", row.get("least_speedup"))
    want("ms", row["ms"], "<=", row.get("most_ms"))
    want("GiB", row.get("gib"), "<=", row.get("most_gib"))
    want("times the time", row.get("slower"), "<=", row.get("most_slower"))


def show(r):
    peer = r.get("torch") or {}
    print(f"{r['case']:21}{r.get('fusion', ''):5}{r['ms']:9.3f} ms{r['images_per_s']:11,.0f}/s{r.get('gib', 0):7.1f} GiB"
          f"{peer.get('ms_per_step', 0):10.3f} ms{peer.get('images_per_s', 0):10,.0f}/s{peer.get('peak_gib') or 0:6.1f} GiB"
          f"  {peer.get('precision', ''):5}{r.get('speedup') or 0:6.2f} x", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--dnnrun", default=os.path.join(HERE, "..", "..", "build", "dnnrun"))
    ap.add_argument("--python", default=sys.executable, help="one that has torch")
    ap.add_argument("--case", default="", help="a regular expression of their names")
    ap.add_argument("--fusion", default="auto", help="levels of cudnn.fusion")
    ap.add_argument("--peers", default="fp16,bf16", help="precisions in which PyTorch is beside fp16")
    ap.add_argument("--set", nargs="*", default=[], help="cfg settings for all")
    ap.add_argument("--only-compile", action="store_true")
    ap.add_argument("--no-torch", action="store_true")
    ap.add_argument("--json", help="write the figures there as well")
    args = ap.parse_args()
    cases, infers = [c for c in TRAIN if re.search(args.case, c[0])], [i for i in INFER if re.search(args.case, i[0])]
    if not cases + infers:
        sys.exit(f"no case's name matches {args.case}")
    if args.only_compile:
        return fill_caches(args, cases, infers)
    rows, missed = [], []

    def add(row):
        rows.append(row)
        judge(row, missed)
        show(row)
        if args.json:  # what is there so far
            with open(args.json, "w") as f:
                json.dump({"rows": rows, "missed": missed}, f, indent=1)

    for name, cfg, precision, batch, more, words, speedup, least in cases:
        peer = best(torch(args.python, *w) for w in train_peers(args, precision, batch, words))
        most_gib, most_slower = MEMORY.get(name, (None, None))
        for level in args.fusion.split(","):
            rate, gib = train(args, cfg, precision, batch, [*more, f"cudnn.fusion={level}"])
            base = [r["ms"] for r in rows if r["case"] == "resnet50 b256" and r["fusion"] == level]
            add({"case": name, "fusion": level, "precision": precision, "images_per_s": rate, "ms": 1e3 * batch / rate,
                 "gib": gib, "least": least, "torch": peer, "least_speedup": speedup,
                 "speedup": rate / peer["images_per_s"] if peer else None, "most_gib": most_gib, "most_slower": most_slower,
                 "slower": 1e3 * batch / rate / base[0] if base else None})  # fmt: skip
    for name, batch, most_ms, least in infers:
        own = json.loads(tool(args, "bench", "infer", os.path.join(MODELS, "resnet50.cfg"), *settings_of(args, "fp16", batch), "--json"))
        peer = None if args.no_torch else torch(args.python, *infer_peer(batch))
        add({"case": name, "precision": "fp16", "images_per_s": own["images_per_s"], "ms": own["ms_per_run"],
             "latency_ms": own["latency_ms"]["median"], "most_ms": most_ms, "least": least, "torch": peer,
             "speedup": own["images_per_s"] / peer["images_per_s"] if peer else None})  # fmt: skip
    for m in missed:
        print("MISSED", m)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
