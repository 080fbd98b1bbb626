#!/usr/bin/env python3
"""The PyTorch side of `dnnrun bench compare`: what dnnrun has just measured, once more.

    compare_torch.py FOLDER [--layout channels_last|contiguous_format] [--compile]

FOLDER holds what dnnrun left: dnnrun.json (the settings), initial.safetensors (its first weights) and batch.bin (labels
as int32, then pixels as uint8 [batch, image, image, RGB]). Prints one line of JSON. Exit code 77: torch or safetensors is
missing. The rules of the comparison are in docs/compare.md.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import sys
import time
import warnings

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError as e:
    print(e, file=sys.stderr)
    sys.exit(77)


# ---------------------------------------------------------------- the model, with torchvision's names


class Block(nn.Module):
    """Basic or bottleneck (v1.5: the stride is the 3x3's); `pad`: the parameter-free shortcut of the CIFAR networks."""

    def __init__(self, cin, width, stride, bottleneck, pad):
        super().__init__()
        cout = 4 * width if bottleneck else width
        kernels = [(1, 1, width), (3, stride, width), (1, 1, cout)] if bottleneck else [(3, stride, width), (3, 1, width)]
        at = cin
        for i, (k, s, c) in enumerate(kernels, 1):
            setattr(self, f"conv{i}", nn.Conv2d(at, c, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(c))
            at = c
        self.n = len(kernels)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.more = stride, cout - cin
        self.downsample = None
        if not pad and (stride != 1 or cout != cin):
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        y = x
        for i in range(1, self.n + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = self.relu(y) if i < self.n else y
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return self.relu(y + x)


class ResNet(nn.Module):
    def __init__(self, name, classes, stem):
        super().__init__()
        depth = int(name.removeprefix("resnet"))
        large = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}.get(depth)
        blocks = large or ((depth - 2) // 6,) * 3
        bottleneck = bool(large) and depth >= 50
        cin = 64 if large else 16
        if stem == "cifar" or (stem == "auto" and not large):
            self.conv1, self.maxpool = nn.Conv2d(3, cin, 3, 1, 1, bias=False), nn.Identity()
        else:
            self.conv1, self.maxpool = nn.Conv2d(3, cin, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)
        self.bn1 = nn.BatchNorm2d(cin)
        self.relu = nn.ReLU(inplace=True)
        self.stages = []
        for s, n in enumerate(blocks):
            width = (64 if large else 16) << s
            stage = []
            for b in range(n):
                stage.append(Block(cin, width, 2 if s and not b else 1, bottleneck, not large))
                cin = 4 * width if bottleneck else width
            self.stages.append(f"layer{s + 1}")
            setattr(self, self.stages[-1], nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(cin, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


# ---------------------------------------------------------------- measuring


def process_age():
    """Seconds since the process began, as dnnrun counts them."""
    with open("/proc/self/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def percentile(times, p):
    """Nearest rank, as dnnrun's."""
    return times[max(0, -(-len(times) * p // 100) - 1)]


def read_batch(folder, case, device, layout):
    n, side = case["batch"], case["image"]
    with open(os.path.join(folder, "batch.bin"), "rb") as f:
        data = bytearray(f.read())
    labels = torch.frombuffer(data, dtype=torch.int32, count=n).long().to(device)
    pixels = torch.frombuffer(data, dtype=torch.uint8, offset=4 * n).view(n, side, side, 3).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(case["optim"][k], device=device).view(1, 3, 1, 1) for k in ("mean", "std"))
    x = (pixels.to(device).float() / 255 - mean) / std
    return x.contiguous(memory_format=layout), labels


def make_optimizer(model, o, cuda):
    decayed = [p for p in model.parameters() if p.ndim > 1 or o["decay_norm_bias"]]
    others = [p for p in model.parameters() if p.ndim <= 1 and not o["decay_norm_bias"]]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], o["lr"], momentum=o["momentum"], nesterov=o["nesterov"],
                           weight_decay=o["weight_decay"], fused=cuda or None)


def allow(precision):
    """What the libraries below may do: fp32 means fp32."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def make_step(model, x, labels, case, infer, mode=None):
    """What is measured: a function that trains on the batch and returns the loss, or returns the logits; compiled in
    that mode, where one is given."""
    o, cuda = case["optim"], case["device"].startswith("cuda")
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case["precision"])

    def amp():
        return torch.autocast("cuda" if cuda else "cpu", half) if half else contextlib.nullcontext()

    def forward(x):
        with amp():
            return model(x)

    def loss_of(x, labels):
        with amp():
            return F.cross_entropy(model(x), labels, label_smoothing=o["label_smoothing"])

    if mode:
        forward, loss_of = (torch.compile(f, mode=mode) for f in (forward, loss_of))
    if infer:
        return torch.inference_mode()(lambda: forward(x))
    opt = make_optimizer(model, o, cuda)
    scaler = torch.amp.GradScaler("cuda", enabled=case["precision"] == "fp16" and cuda)

    def train():
        opt.zero_grad(set_to_none=True)
        for _ in range(case["accumulate"]):
            loss = loss_of(x, labels)
            scaler.scale(loss / case["accumulate"] if case["accumulate"] > 1 else loss).backward()
        if o["clip_norm"] > 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), o["clip_norm"])
        scaler.step(opt)
        scaler.update()
        return loss

    return train


def measure(step, runs, wait, fetch=lambda result: None):
    """Milliseconds of runs that are waited for one by one, and whose result is fetched; seconds of as many in a row."""
    times = []
    for _ in range(runs):
        t = time.perf_counter()
        fetch(step())
        wait()
        times.append(1e3 * (time.perf_counter() - t))
    t = time.perf_counter()
    for _ in range(runs):
        step()
    wait()
    return times, time.perf_counter() - t


def threads_of(description):
    """As dnnrun describes a CPU: "Some CPU, 2 threads, oneDNN ...", or "1 thread"."""
    return int(re.search(r", (\d+) threads?,", description)[1])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("folder")
    ap.add_argument("--layout", default="channels_last", choices=["channels_last", "contiguous_format"])
    ap.add_argument("--compile", action="store_true")
    args = ap.parse_args()
    try:
        from safetensors.torch import load_file
    except ImportError as e:
        print(e, file=sys.stderr)
        sys.exit(77)
    warnings.simplefilter("ignore")

    with open(os.path.join(args.folder, "dnnrun.json")) as f:
        own = json.load(f)
    case, warmup, runs, infer = own["case"], own["warmup"], own["runs"], own["bench"] == "infer"
    device, layout = case["device"], getattr(torch, args.layout)
    cuda = device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        sys.exit(f"this torch ({torch.__version__}) has no CUDA device")
    if not cuda:
        torch.set_num_threads(threads_of(case["device_description"]))
    wait = torch.cuda.synchronize if cuda else lambda: None
    allow(case["precision"])

    model = ResNet(case["model"], case["classes"], case["stem"])
    model.load_state_dict(load_file(os.path.join(args.folder, "initial.safetensors")))
    model = model.to(device, memory_format=layout).train(not infer)
    x, labels = read_batch(args.folder, case, device, layout)
    mode = ("max-autotune" if infer and cuda else "default") if args.compile else None
    step = make_step(model, x, labels, case, infer, mode)

    losses = []
    for i in range(warmup):
        result = step()
        if infer:
            result.float().cpu()
        else:
            losses.append(result.item())
        wait()
        if i == 0:
            start = process_age()
    # dnnrun hands the logits over too
    times, seconds = measure(step, runs, wait, (lambda logits: logits.cpu()) if infer else lambda loss: None)
    times.sort()

    memory = {"process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if cuda:
        free, total = torch.cuda.mem_get_info()
        memory |= {"device_used": total - free, "allocated_peak": torch.cuda.max_memory_allocated(),
                   "reserved": torch.cuda.memory_reserved()}
    about = f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
    about += f", cuDNN {torch.backends.cudnn.version()}" if cuda else f", {torch.get_num_threads()} threads"
    print(json.dumps({
        "torch": torch.__version__.split("+")[0], "about": about, "layout": args.layout, "compiled": args.compile,
        "images_per_s": runs * case["batch"] * (1 if infer else case["accumulate"]) / seconds,
        "ms_per_run": 1e3 * seconds / runs, "start_s": start, "memory": memory,
        "latency_ms": {"median": percentile(times, 50), "p95": percentile(times, 95), "p99": percentile(times, 99),
                       "min": times[0], "max": times[-1]},
        "loss": [v if v == v and abs(v) != float("inf") else None for v in losses],
    }))


if __name__ == "__main__":
    main()
