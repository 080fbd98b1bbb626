#!/usr/bin/env python3
"""PyTorch's speed at what `dnnrun bench` measures: a whole training step (forward, loss, backward, SGD; in fp16 the
GradScaler) or a forward pass, on noise that is on the device already. The model, the step and the clock are those of
tools/compare_torch.py; here no dnnrun is needed.

    torch_resnet.py                                          resnet50, batch 256, fp16, channels-last, eager, GPU
    torch_resnet.py --precision bf16 --compile
    torch_resnet.py --device cpu --batch 16 --precision fp32 --threads 2
    torch_resnet.py --batch 32 --compile --graphs            with CUDA graphs (compile mode reduce-overhead)
    torch_resnet.py --mode infer --batch 1 --compile         with CUDA graphs (compile mode max-autotune)
    torch_resnet.py --mode infer --compile --cast --freeze   its fastest: weights in fp16 from the start, norms folded
    torch_resnet.py --model resnet20 --image 32 --classes 10 --batch 128 --device cpu

Prints one line of JSON: images/s and ms per step (median, and the quartiles), peak memory, start-up time, versions.
"""

import argparse
import json
import os
import platform
import statistics
import sys

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import compare_torch as peer  # noqa: E402

OPTIM = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-5, "decay_norm_bias": True, "clip_norm": 0,
         "label_smoothing": 0.0}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="resnet50")
    ap.add_argument("--stem", default="auto", choices=["auto", "imagenet", "cifar"])
    ap.add_argument("--classes", type=int, default=1000)
    ap.add_argument("--image", type=int, default=224)
    ap.add_argument("--batch", type=int, default=256)
    ap.add_argument("--precision", default="fp16", choices=["fp32", "tf32", "fp16", "bf16"])
    ap.add_argument("--layout", default="channels_last", choices=["channels_last", "contiguous_format"])
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--graphs", action="store_true", help="with --compile: training through CUDA graphs")
    ap.add_argument("--cast", action="store_true", help="inference: weights and pictures in 16 bits, no autocast")
    ap.add_argument("--freeze", action="store_true", help="inference with --compile: fold what is constant (batch norm)")
    ap.add_argument("--checkpoint", action="store_true", help="recompute each residual block (gradient checkpointing)")
    ap.add_argument("--mode", default="train", choices=["train", "infer"])
    ap.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    ap.add_argument("--threads", type=int, default=os.cpu_count(), help="on the CPU")
    ap.add_argument("--warmup", type=int, default=10, help="steps")
    ap.add_argument("--steps", type=int, default=50, help="timed steps")
    args = ap.parse_args()

    cuda, infer = args.device == "cuda", args.mode == "infer"
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision)
    if (args.cast and not (infer and half)) or (args.freeze and not (infer and args.compile)):
        ap.error("--cast is for --mode infer in 16 bits, --freeze for --mode infer --compile")
    layout = getattr(torch, args.layout)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    peer.allow(args.precision)
    model = peer.ResNet(args.model, args.classes, args.stem).to(args.device, memory_format=layout).train(not infer)
    if args.checkpoint:
        for m in list(model.modules()):
            if isinstance(m, peer.Block):
                m.forward = lambda x, f=m.forward: checkpoint(f, x, use_reentrant=False)
    x = torch.randn(args.batch, 3, args.image, args.image, device=args.device).to(memory_format=layout)
    labels = torch.randint(0, args.classes, (args.batch,), device=args.device)
    if args.cast:
        model, x = model.to(half), x.to(half)
    if args.freeze:
        from torch._inductor import config as inductor

        inductor.freezing = True
    case = {"device": args.device, "precision": "fp32" if args.cast else args.precision, "accumulate": 1,
            "optim": OPTIM}
    mode = ("max-autotune" if cuda else "default") if infer else "reduce-overhead" if args.graphs else "default"
    step = peer.make_step(model, x, labels, case, infer, mode if args.compile else None)
    wait = torch.cuda.synchronize if cuda else lambda: None

    for _ in range(args.warmup):
        step()
    wait()
    ready = peer.process_age()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, seconds = peer.measure(step, args.steps, wait)
    low, median, high = statistics.quantiles(times, n=4)
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    result = dict(
        vars(args),
        device_name=device,
        images_per_s=round(args.batch * args.steps / seconds, 1),
        ms_per_step=round(1e3 * seconds / args.steps, 3),
        ms_synchronised=dict(median=round(median, 3), low=round(low, 3), high=round(high, 3)),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        start_up_s=round(ready, 1),
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version() if cuda else None,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
