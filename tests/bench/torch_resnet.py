#!/usr/bin/env python3
"""PyTorch's speed at what `dnnrun bench` measures: a whole training step (forward, loss, backward, SGD; in fp16 the
GradScaler) or a forward pass, on synthetic pictures that are on the device already.

    torch_resnet.py                                          resnet50, batch 256, fp16, channels-last, eager, GPU
    torch_resnet.py --precision bf16 --compile
    torch_resnet.py --device cpu --batch 16 --precision fp32 --threads 2
    torch_resnet.py --batch 32 --compile --graphs            with CUDA graphs (compile mode reduce-overhead)
    torch_resnet.py --mode infer --batch 1 --compile         with CUDA graphs (compile mode max-autotune)
    torch_resnet.py --model resnet20 --image 32 --classes 10 --batch 128 --device cpu

Prints one line of JSON: images/s and ms per step (median, and the quartiles), peak memory, start-up time, versions.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

T0 = time.time()
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
import common  # noqa: E402


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="resnet50")
    ap.add_argument("--stem", default="imagenet", choices=["imagenet", "cifar"])
    ap.add_argument("--classes", type=int, default=1000)
    ap.add_argument("--image", type=int, default=224)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--precision", default="fp16", choices=["fp32", "tf32", "fp16", "bf16"])
    ap.add_argument("--layout", default="channels_last", choices=["channels_last", "contiguous_format"])
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--graphs", action="store_true", help="with --compile: training through CUDA graphs")
    ap.add_argument("--checkpoint", action="store_true", help="recompute each residual block (gradient checkpointing)")
    ap.add_argument("--mode", default="train", choices=["train", "infer"])
    ap.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="on the CPU")
    ap.add_argument("--warmup", type=int, default=10, help="steps")
    ap.add_argument("--steps", type=int, default=50, help="timed steps")
    args = ap.parse_args()

    cuda = args.device == "cuda"
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision)
    layout = getattr(torch, args.layout)
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.manual_seed(0)
    model = common.make_model(args.model, args.classes, args.stem).to(args.device, memory_format=layout)
    if args.checkpoint:
        from torch.utils.checkpoint import checkpoint

        for m in list(model.modules()):
            if hasattr(m, "bn2"):  # a residual block
                m.forward = lambda x, f=m.forward: checkpoint(f, x, use_reentrant=False)
    x = torch.randn(args.batch, 3, args.image, args.image, device=args.device).to(memory_format=layout)
    y = torch.randint(0, args.classes, (args.batch,), device=args.device)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-5, nesterov=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16" and args.mode == "train")

    def forward(x):
        with torch.autocast(args.device, half, enabled=half is not None):
            return model(x)

    def loss_of(x, y):
        with torch.autocast(args.device, half, enabled=half is not None):
            return F.cross_entropy(model(x), y)

    if args.compile:
        forward = torch.compile(forward, mode="max-autotune" if args.mode == "infer" and cuda else "default")
        loss_of = torch.compile(loss_of, mode="reduce-overhead" if args.graphs else "default")

    def train():
        opt.zero_grad()
        scaler.scale(loss_of(x, y)).backward()
        scaler.step(opt)
        scaler.update()

    def infer():
        with torch.no_grad():
            forward(x)

    step = train if args.mode == "train" else infer
    model.train(args.mode == "train")

    def wait():
        if cuda:
            torch.cuda.synchronize()

    for _ in range(args.warmup):
        step()
    wait()
    ready = time.time() - T0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(args.steps):
        t = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - t)
    t = time.perf_counter()  # once more without waiting after each step
    for _ in range(args.steps):
        step()
    wait()
    stream = (time.perf_counter() - t) / args.steps
    low, median, high = statistics.quantiles(times, n=4)
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    result = dict(
        vars(args),
        device_name=device,
        images_per_s=round(args.batch / stream, 1),
        ms_per_step=round(1e3 * stream, 3),
        ms_synchronised=dict(median=round(1e3 * median, 3), low=round(1e3 * low, 3), high=round(1e3 * high, 3)),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        start_up_s=round(ready, 1),
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version() if cuda else None,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
