#!/usr/bin/env python3
"""Does dnnrun learn CIFAR-10 as well as PyTorch with the same recipe?

    cifar.py resnet20 DATA                       5 epochs on the CPU: PyTorch, dnnrun on folders, dnnrun on shards
    cifar.py resnet18 DATA --precision fp16      16 epochs on a GPU
    cifar.py resnet50 DATA --systems torch,shards:off,shards:d1,shards:d2   10 epochs, each level of cudnn.fusion
    cifar.py resnet20 DATA --systems torch --seeds 1        one run
    cifar.py resnet20 DATA --report              what the results so far say

DATA holds cifar10/{train,test}/CLASS/*.jpg and cifar10-shards/{train,test}-*.tar; where they are not there yet,
expand.py of $DNR_TEST_DATA or ../shared/data makes them. The recipe is the cfg of models/ with the overrides of RECIPES
and those of the command line; both systems read it. Each run adds a record to --results; runs already there are not
repeated. Exit status 1: the means differ by more than 2 standard errors of their difference; 77: PyTorch or the
pictures are missing.
"""

import argparse
import concurrent.futures
import configparser
import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import numpy as np
    import torch
    from torch.nn import functional as F
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "golden"))
import common  # noqa: E402

RECIPES = {  # the cfg of models/ and what is changed in it
    # the learning rate falls after half and three quarters, as in the full recipe
    "resnet20": ("resnet20", ["train.epochs=5", "optim.milestones=2.5 3.75", "device=cpu", "train.precision=fp32"]),
    "resnet18": ("resnet18", ["device=cuda", "train.precision=fp16"]),
    "resnet50": ("resnet18", ["device=cuda", "train.precision=fp16", "model.name=resnet50", "model.zero_init_residual=true",
                              "train.batch=256", "optim.base_batch=256", "train.epochs=10"]),
}  # fmt: skip


def cfg_file(recipe):
    return os.path.join(ROOT, "models", f"{RECIPES[recipe][0]}-cifar10.cfg")


def read_cfg(recipe, overrides):
    """A cfg as {"section.key": text}."""
    parser = configparser.ConfigParser(inline_comment_prefixes="#;", strict=True)
    with open(cfg_file(recipe)) as f:
        parser.read_string("[top]\n" + f.read())
    cfg = {f"{s}.{k}".removeprefix("top."): v for s in parser.sections() for k, v in parser[s].items()}
    return cfg | dict(o.split("=", 1) for o in overrides)


def expand(data):
    """Makes the folder of pictures and the shards where they are missing."""
    for made, form in (("cifar10/test", []), ("cifar10-shards", ["--shards"])):
        if os.path.isdir(os.path.join(data, made)):
            continue
        sources = [os.environ.get("DNR_TEST_DATA", ""), os.path.join(ROOT, "..", "shared", "data")]
        scripts = [s for s in (os.path.join(d, "expand.py") for d in sources) if os.path.exists(s)]
        if not scripts:
            print(f"skipped: {data} has no {made}, and there is no expand.py in $DNR_TEST_DATA or ../shared/data")
            sys.exit(77)
        subprocess.run([sys.executable, scripts[0], data, "cifar10", *form], check=True)


# ---------------------------------------------------------------- PyTorch


def load_pictures(data, split):
    """All pictures of a split as uint8 [n, 32, 32, 3], with labels; kept beside them as one file."""
    from PIL import Image

    folder = os.path.join(data, "cifar10", split)
    cache = os.path.join(data, f"cifar10-{split}.npz")
    if not os.path.exists(cache):
        files = [(os.path.join(folder, c, f), i) for i, c in enumerate(sorted(os.listdir(folder)))
                 for f in sorted(os.listdir(os.path.join(folder, c)))]  # fmt: skip
        with concurrent.futures.ThreadPoolExecutor() as pool:
            x = np.stack(list(pool.map(lambda f: np.asarray(Image.open(f[0]).convert("RGB")), files)))
        np.savez(cache + ".tmp.npz", x=x, y=np.array([i for _, i in files]))
        os.replace(cache + ".tmp.npz", cache)
    z = np.load(cache)
    return torch.from_numpy(z["x"]), torch.from_numpy(z["y"])


def learning_rates(opt, cfg, steps):
    """A PyTorch scheduler, stepped once a step."""
    kind, epochs = cfg["optim.schedule"], float(cfg["train.epochs"])
    if kind == "onecycle":
        return torch.optim.lr_scheduler.OneCycleLR(opt, float(cfg["optim.lr"]), total_steps=steps, cycle_momentum=False)
    if kind == "multistep":
        milestones = [float(m) * steps / epochs for m in cfg["optim.milestones"].replace(",", " ").split()]
        gamma = float(cfg["optim.gamma"])
        return torch.optim.lr_scheduler.LambdaLR(opt, lambda s: gamma ** sum(s >= m for m in milestones))
    raise SystemExit(f"cifar.py knows no schedule {kind}")


def train_torch(cfg, data, seed):
    device, precision = cfg["device"], cfg["train.precision"]
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    batch, pad = int(cfg["train.batch"]), int(cfg["data.pad"])
    (x, y), (test_x, test_y) = (load_pictures(data, s) for s in ("train", "test"))
    x = F.pad(x, (0, 0, pad, pad, pad, pad)).to(device)  # black
    y = y.to(device)
    mean, std = (torch.tensor([float(v) for v in cfg[f"data.{k}"].split()], device=device) for k in ("mean", "std"))
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    model = common.make_model(cfg["model.name"], int(cfg["model.classes"]), cfg.get("model.stem"))
    if cfg.get("model.zero_init_residual") == "true":
        for name, gamma in model.named_parameters():
            if name.endswith("bn3.weight" if hasattr(model.layer1[0], "bn3") else "bn2.weight"):
                torch.nn.init.zeros_(gamma)
    model.to(device, memory_format=torch.channels_last)
    steps = -(-int(cfg["train.epochs"]) * len(y) // batch)
    stop = min(steps, int(cfg.get("train.max_steps", steps)))
    opt = torch.optim.SGD(model.parameters(), float(cfg["optim.lr"]), float(cfg.get("optim.momentum", 0.9)),
                          weight_decay=float(cfg["optim.weight_decay"]),
                          nesterov=cfg.get("optim.nesterov") == "true")  # fmt: skip
    assert cfg["optim.decay_norm_bias"] == "true" and cfg["data.flip"] == "true" and cfg["optim.base_batch"] == str(batch)
    schedule = learning_rates(opt, cfg, steps)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    smoothing = float(cfg.get("train.label_smoothing", 0))
    span = torch.arange(32)

    def normalise(pixels):
        return ((pixels.float() / 255 - mean) / std).permute(0, 3, 1, 2)

    def shuffled():
        """An endless stream of permutations; a batch may span two epochs."""
        stream = torch.empty(0, dtype=torch.long)
        while True:
            while len(stream) < batch:
                stream = torch.cat([stream, torch.randperm(len(y), generator=rng)])
            yield stream[:batch]
            stream = stream[batch:]

    every = int(cfg.get("run.log_every", 50))
    losses, window = [], torch.zeros((), device=device)  # as dnnrun's records: means over `every` steps
    started = time.time()
    model.train()
    for step, index in zip(range(1, stop + 1), shuffled()):
        row, col = (torch.randint(0, 2 * pad + 1, (batch, 1), generator=rng) + span for _ in range(2))
        flip = torch.rand(batch, 1, generator=rng) < 0.5
        col = torch.where(flip, col.flip(1), col)
        index, row, col = index.to(device), row.to(device), col.to(device)
        pictures = x[index[:, None, None], row[:, :, None], col[:, None, :]]
        with torch.autocast(device, half, enabled=half is not None):
            loss = F.cross_entropy(model(normalise(pictures)), y[index], label_smoothing=smoothing)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
        window += loss.detach()
        if step % every == 0:
            losses.append([step, window.item() / every])
            window.zero_()
    model.eval()
    correct, total = 0, 0.0
    with torch.no_grad(), torch.autocast(device, half, enabled=half is not None):
        for i in range(0, len(test_y), 1000):
            z = model(normalise(test_x[i : i + 1000].to(device))).float()
            label = test_y[i : i + 1000].to(device)
            correct += (z.argmax(1) == label).sum().item()
            total += F.cross_entropy(z, label, reduction="sum").item()
    return dict(top1=correct / len(test_y), loss=total / len(test_y), losses=losses, seconds=time.time() - started)


# ---------------------------------------------------------------- dnnrun


def train_dnnrun(recipe, overrides, data, seed, system, tool):
    form, _, level = system.partition(":")
    overrides = [*overrides, f"cudnn.fusion={level}"] if level else overrides
    paths = {"folder": ("cifar10/train", "cifar10/test"),
             "shards": ("cifar10-shards/train-{000000..000009}.tar", "cifar10-shards/test-{000000..000001}.tar")}  # fmt: skip
    train, val = (os.path.join(data, p) for p in paths[form])
    cfg = cfg_file(recipe)
    with tempfile.TemporaryDirectory() as run:
        out = os.path.join(run, "run")
        started = time.time()
        # evaluated at the end only, as the peer is
        subprocess.run([tool, "train", cfg, *overrides, f"data.train={train}", f"data.val={val}", f"train.seed={seed}",
                        "run.eval_every=0", "--out", out], check=True, stdout=sys.stderr)  # fmt: skip
        seconds = time.time() - started
        records = common.read_lines(os.path.join(out, "metrics.jsonl"))
    last = [r for r in records if r["event"] == "eval"][-1]
    steps = [r for r in records if r["event"] == "train"]
    return dict(top1=last["top1"], loss=last["loss"], losses=[[r["step"], r["loss"]] for r in steps], seconds=seconds,
                images_per_s=statistics.median(r["images_per_s"] for r in steps))  # fmt: skip


# ---------------------------------------------------------------- comparison


def report(results, recipe, cfg):
    """Prints means and differences; returns whether all systems agree with PyTorch."""
    groups = {}
    for r in results:
        if r["recipe"] == recipe and r["cfg"] == cfg:
            groups.setdefault(r["system"], []).append(100 * r["top1"])
    stats = {}
    for system, top1 in sorted(groups.items()):
        error = statistics.stdev(top1) / len(top1) ** 0.5 if len(top1) > 1 else float("nan")
        stats[system] = (statistics.mean(top1), error)
        runs = " ".join(f"{v:.2f}" for v in top1)
        print(f"{recipe} {system:10} {stats[system][0]:.2f} +- {error:.2f} % (standard error; {len(top1)} seeds: {runs})")
    agree = True
    for system, (mean, error) in stats.items():
        if system != "torch" and "torch" in stats:
            difference, total = mean - stats["torch"][0], (error**2 + stats["torch"][1] ** 2) ** 0.5
            agree &= abs(difference) <= 2 * total
            print(f"{recipe} {system} - torch: {difference:+.2f} %, {abs(difference) / total:.1f} standard errors (at most 2)")
    return agree


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("recipe", choices=list(RECIPES))
    ap.add_argument("data", help="folder with cifar10/ and cifar10-shards/")
    ap.add_argument("overrides", nargs="*", help="section.key=value")
    ap.add_argument("--systems", default="torch,folder,shards", help="of torch, folder, shards; shards:d2 is with cudnn.fusion=d2")
    ap.add_argument("--seeds", default="0,1,2")
    ap.add_argument("--precision", help="short for train.precision=")
    ap.add_argument("--dnnrun", default=os.path.join(ROOT, "build", "dnnrun"), help="the tool")
    ap.add_argument("--results", default="cifar-results.json")
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
    ap.add_argument("--report", action="store_true", help="run nothing")
    args = ap.parse_intermixed_args()
    torch.set_num_threads(args.threads)
    if not args.report:
        expand(args.data)
    overrides = RECIPES[args.recipe][1] + args.overrides
    overrides += [f"train.precision={args.precision}"] if args.precision else []
    cfg = read_cfg(args.recipe, overrides)
    for key in list(cfg):  # where the pictures lie is no part of the recipe
        if key in ("data.train", "data.val"):
            del cfg[key]
    overrides = [f"{k}={v}" for k, v in dict(o.split("=", 1) for o in overrides).items()]
    for seed in map(int, args.seeds.split(",")) if not args.report else ():
        for system in args.systems.split(","):
            key = dict(recipe=args.recipe, system=system, seed=seed, cfg=cfg)
            if any(all(r[k] == v for k, v in key.items()) for r in common.read_json(args.results)):
                continue
            if system == "torch":
                result = train_torch(cfg, args.data, seed)
            else:
                result = train_dnnrun(args.recipe, overrides, args.data, seed, system, args.dnnrun)
            print(f"{args.recipe} {system} seed {seed}: {100 * result['top1']:.2f} % in {result['seconds']:.0f} s", flush=True)
            common.append_json(args.results, key | result | dict(torch=torch.__version__))
    return 0 if report(common.read_json(args.results), args.recipe, cfg) else 1


if __name__ == "__main__":
    sys.exit(main())
