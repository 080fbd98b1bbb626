#!/usr/bin/env python3
"""What PyTorch computes on the parity cases of tests/test_parity.c; see common.py for how the inputs arise.

    models.py                          exact cases in fp64 -> models.json; rounding cases on the CPU -> rounding_cpu.json
    models.py --device cuda --out DIR  rounding cases on the GPU -> DIR/rounding_cuda.json

models.json holds PyTorch's fp64 results: of an exact case the loss of step 1, losses (per sample) and logits of its last
micro-batch, gradients and running statistics; loss and weights of step 5, and logits in evaluation mode after it. Of a
rounding case (step 1 only) enough to pin the truth.

rounding_*.json hold PyTorch's own error: of each tensor of step 1 the relative norm of its difference from fp64, over
the case's draws of weights, pictures and labels: root mean square of what forward computes, median and upper quartile of
gradients.
Losses are kept per sample and several draws taken so that no lucky number decides. A gradient jumps by 1e-3 where
rounding takes a ReLU input or a tie of the max pool to the other side; in low precision that happens everywhere and
averages, in fp32 it is rare and a matter of chance; and next to the loss there are few such jumps in any precision, of
1 % each in ResNet-18's last norm. Hence the median, the quartile, which tells how far draws lie apart, and draws selected
for keeping clear of jumps: of the first CANDIDATES those with the largest kink_margin whose gradients are within 1e-4 in
each of several ways of computing them in fp32 (--select finds them). On the CPU they are computed in two layouts, NHWC
and NCHW, and the errors pooled, since some draws meet kinks in one of them all the same.
"""

import argparse
import functools
import json
import multiprocessing
import os

import numpy as np
import torch
from torch.nn import functional as F

import common

HERE = os.path.dirname(os.path.abspath(__file__))
LOSS_SCALE = 1024.0  # of fp16: below the initial 65536, so that no draw overflows
LR = [0.05, 0.04, 0.03, 0.02, 0.01]
PLAIN = dict(stem="cifar", classes=10, accumulate=1, smoothing=0.0, momentum=0.9, weight_decay=5e-4,
             decay_norm_bias=True, nesterov=False, clip_norm=0.0, lr=LR, projections=16, draws=[0])  # fmt: skip
CANDIDATES = 128
EVERYTHING = dict(smoothing=0.1, accumulate=2, decay_norm_bias=False, nesterov=True, clip_norm=1.0)


def case(name, model, batch, image, **options):
    return dict(PLAIN, name=name, model=model, batch=batch, image=image, **options)


EXACT = [
    case("resnet20", "resnet20", 8, 16),
    case("resnet20 smoothing", "resnet20", 8, 16, smoothing=0.1, projections=8),
    case("resnet20 accumulate", "resnet20", 4, 16, accumulate=2, projections=8),
    case("resnet20 no decay of norm and bias", "resnet20", 8, 16, decay_norm_bias=False, weight_decay=0.05, projections=8),
    case("resnet20 nesterov", "resnet20", 8, 16, nesterov=True, projections=8),
    case("resnet20 clip", "resnet20", 8, 16, clip_norm=1.0, projections=8),
    case("resnet18", "resnet18", 4, 64, stem="imagenet"),
    case("resnet18 everything", "resnet18", 8, 32, stem="imagenet", **EVERYTHING),
    case("resnet18 cifar stem", "resnet18", 4, 16),
    case("resnet50", "resnet50", 4, 64, stem="imagenet"),
]
ONE = dict(projections=4, lr=LR[:1])
ROUNDING = [
    case("resnet20 rounding", "resnet20", 16, 32, draws=[114, 12, 127, 77, 18], **ONE),
    case("resnet18 rounding", "resnet18", 4, 64, stem="imagenet", draws=[68, 81, 93, 20, 59], **ONE),
    case("resnet50 rounding", "resnet50", 4, 64, stem="imagenet", draws=[13, 5, 44, 124, 27], **ONE),
]
LAYOUTS = [torch.channels_last, torch.contiguous_format]
PRECISIONS = {"cpu": ["fp32", "bf16"], "cuda": ["fp32", "tf32", "fp16", "bf16"]}


def kink_margin(c, draw):
    """How near ReLU and max pool come to a kink in the first forward pass, relative to the rms of their input."""
    margins = []

    def watch(module, args):
        x = args[0]
        gap = x.abs()
        if isinstance(module, torch.nn.MaxPool2d):
            windows = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2).flatten(4)
            first, second = windows.topk(2, -1).values.unbind(-1)
            gap = (first - second)[second > 0]
        margins.append((gap.min() / x.pow(2).mean().sqrt()).item())

    model = common.make_model(c["model"], c["classes"], c["stem"])
    common.fill(model, draw)
    for m in model.modules():
        if isinstance(m, (torch.nn.ReLU, torch.nn.MaxPool2d)):
            m.register_forward_pre_hook(watch)
    with torch.no_grad():
        model.double().train()(common.batch(draw, 0, c["batch"], c["image"], c["classes"])[0])
    return min(margins)


def select(c, count=5):
    """The draws of a rounding case."""
    with multiprocessing.get_context("spawn").Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        margins = pool.map(functools.partial(kink_margin, c), range(CANDIDATES))
    margins = sorted(zip(margins, range(CANDIDATES)), reverse=True)
    ways = [("cpu", layout, onednn) for onednn in (True, False) for layout in LAYOUTS]
    if torch.cuda.is_available():
        ways += [("cuda", layout, True) for layout in LAYOUTS]
    chosen = []
    for margin, draw in margins:
        truth = {k: t for k, t in train(c, draw).items() if k.startswith("grad/")}
        worst = 0.0
        for device, layout, onednn in ways:
            with torch.backends.mkldnn.flags(enabled=onednn):
                run = train(c, draw, "fp32", device, layout)
            worst = max([worst] + [common.error(run[k].cpu(), t) for k, t in truth.items()])
            if worst > 1e-4:
                break
        print(f"{c['name']} draw {draw}: margin {margin:.1e}, largest error {worst:.1e}", flush=True)
        chosen += [draw] if worst <= 1e-4 else []
        if len(chosen) == count:
            break
    return chosen


def train(c, draw, precision="fp64", device="cpu", layout=torch.channels_last):
    """Runs the steps of a case; returns its tensors by name."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    model = common.make_model(c["model"], c["classes"], c["stem"])
    common.fill(model, draw)
    model.to(device, dtype, memory_format=layout).train()
    decayed = [p for p in model.parameters() if c["decay_norm_bias"] or p.ndim > 1]
    others = [p for p in model.parameters() if not c["decay_norm_bias"] and p.ndim == 1]
    opt = torch.optim.SGD([dict(params=decayed, weight_decay=c["weight_decay"]), dict(params=others)], lr=1.0,
                          momentum=c["momentum"], nesterov=c["nesterov"])  # fmt: skip
    n, out, position = c["batch"], {}, 0

    def pictures():
        x, y = common.batch(draw, position, n, c["image"], c["classes"], dtype)
        return x.to(device, memory_format=layout), y.to(device)

    for step, lr in enumerate(c["lr"]):
        total = 0.0
        opt.zero_grad()
        for _ in range(c["accumulate"]):
            x, y = pictures()
            position += n
            with torch.autocast(device, half, enabled=half is not None):
                z = model(x)
                loss = F.cross_entropy(z, y, reduction="none", label_smoothing=c["smoothing"])
            (loss.mean() / c["accumulate"] * scale).backward()
            total += loss.mean().item() / c["accumulate"]
        for p in model.parameters():
            p.grad /= scale
        if step == 0:
            out["loss"], out["losses"], out["logits"] = torch.tensor(total, dtype=torch.float64), loss.detach(), z.detach()
            out.update({f"grad/{k}": p.grad.clone() for k, p in model.named_parameters()})
            out.update({f"running/{k}": b.clone() for k, b in model.named_buffers() if "running" in k})
        if c["clip_norm"]:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c["clip_norm"])
            assert norm > c["clip_norm"], f"{c['name']}: a gradient of norm {norm} is not clipped"
        for g in opt.param_groups:
            g["lr"] = lr
        opt.step()
    if len(c["lr"]) > 1:
        out["loss/last"] = torch.tensor(total, dtype=torch.float64)
        out.update({f"weight/{k}": p.detach() for k, p in model.named_parameters()})
        model.eval()
        with torch.no_grad():
            out["logits/eval"] = model(pictures()[0])
    return out


def pack(t, projections):
    """A tensor as it is stored: whole where small, else its norm and projections."""
    a = t.double().cpu().contiguous().numpy().ravel()
    if a.size <= 16 or t.ndim == 2 and a.size <= 80:
        return dict(values=[float(f"{v:.12g}") for v in a])
    return dict(norm=float(f"{np.linalg.norm(a):.12g}"), proj=[float(f"{v:.10g}") for v in common.project(a, projections)])


def write(path, head, cases):
    """JSON with one tensor a line."""
    with open(path, "w") as f:
        f.write(json.dumps(dict(head, torch=torch.__version__))[:-1] + ', "cases": [\n')
        for i, c in enumerate(cases):
            tensors = c.pop("tensors")
            f.write((",\n" if i else "") + json.dumps(c)[:-1] + ', "tensors": {\n')
            f.write(",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in tensors.items()))
            f.write("}}")
        f.write("\n]}\n")


def exact():
    cases = []
    for c in EXACT + ROUNDING:
        print(c["name"], flush=True)
        cases.append(dict(c, tensors={k: pack(t, c["projections"]) for k, t in train(c, c["draws"][0]).items()}))
    return cases


def rounding(device):
    cases = []
    layouts = LAYOUTS if device == "cpu" else LAYOUTS[:1]
    for c in ROUNDING:
        truth = [train(c, d, device=device) for d in c["draws"]]
        for precision in PRECISIONS[device]:
            runs = [train(c, d, precision, device, layout) for layout in layouts for d in c["draws"]]
            tensors = {}
            for k in truth[0]:
                errors = [common.error(r[k], t[k]) for r, t in zip(runs, truth * len(layouts))]
                e = np.quantile(errors, [0.5, 0.75]) if k.startswith("grad/") else [np.sqrt(np.mean(np.square(errors)))]
                tensors[k] = [float(f"{v:.4g}") for v in e]
            del tensors["loss"]
            print(f"{c['name']} {precision}: median error {np.median([e[0] for e in tensors.values()]):.2e}", flush=True)
            cases.append(dict(name=c["name"], precision=precision, tensors=tensors))
    return cases


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    ap.add_argument("--out", default=HERE, help="folder to write into")
    ap.add_argument("--select", action="store_true", help="find new draws for the rounding cases and use them")
    args = ap.parse_args()
    if args.select:
        for c in ROUNDING:
            c["draws"] = select(c)
            print(f"{c['name']}: draws={c['draws']}", flush=True)
    if args.device == "cpu":
        write(os.path.join(args.out, "models.json"), {}, exact())
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    head = dict(device=name, loss_scale=LOSS_SCALE)
    write(os.path.join(args.out, f"rounding_{args.device}.json"), head, rounding(args.device))
