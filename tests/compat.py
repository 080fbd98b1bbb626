#!/usr/bin/env python3
"""Weights travel both ways between dnnrun and torchvision.

    compat.py BUILD/dnnrun [--device cpu] [--models resnet18,resnet50]

For each model: what `dnnrun train` saves loads in torchvision with strict=True, and what torchvision saves (a state
dict through safetensors) evaluates in `dnnrun eval --weights`; in both cases both give the same log-probability of
every class. `eval` tells only a mean loss, so a picture is evaluated once under each of its possible labels.
Exit status 77: PyTorch, torchvision, safetensors or Pillow is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import torchvision
    from PIL import Image
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "golden"))
import common  # noqa: E402

CLASSES, SIDE, BOUND = 10, 64, 1e-5


def make_pictures(folder):
    """Training pictures in class folders, and one picture apart with a class map for each label it could have."""
    rng = np.random.default_rng(1)

    def picture(path):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.BICUBIC).save(path)

    for c in range(CLASSES):
        os.makedirs(f"{folder}/train/class{c}")
        for i in range(4):
            picture(f"{folder}/train/class{c}/{i}.png")
        with open(f"{folder}/map{c}", "w") as f:
            f.write(f"one.png {c}\n")
    os.mkdir(f"{folder}/one")
    picture(f"{folder}/one/one.png")


def dnnrun(args, tool, model, folder, command, *rest):
    cfg = os.path.join(ROOT, "models", "resnet50.cfg")
    line = [tool, command, cfg, f"device={args.device}", f"model.name={model}", f"model.classes={CLASSES}",
            f"data.image={SIDE}", f"data.resize={SIDE}", "train.precision=fp32", "train.batch=8", "optim.lr=0.01",
            f"data.train={folder}/train", *rest]  # fmt: skip
    p = subprocess.run(line, capture_output=True, text=True)
    if p.returncode:
        sys.exit(f"{' '.join(line)}\nended with {p.returncode}:\n{p.stdout}{p.stderr}")
    return p.stdout


def ours(args, model, folder, weights):
    """Log-probabilities of the picture, by dnnrun."""
    losses = []
    for c in range(CLASSES):
        out = dnnrun(args, args.tool, model, folder, "eval", f"data.val={folder}/one",
                     f"data.val_class_map={folder}/map{c}", "--weights", weights, "--json")  # fmt: skip
        losses.append(json.loads(out.splitlines()[-1])["loss"])
    return -torch.tensor(losses, dtype=torch.float64)


def theirs(model, folder):
    """The same by torchvision."""
    pixels = torch.from_numpy(np.array(Image.open(f"{folder}/one/one.png"))).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (common.MEAN, common.STD))
    with torch.no_grad():
        return model.eval()((pixels - mean) / std).double().log_softmax(1)[0]


def check(what, a, b):
    error = common.error(a, b)
    print(f"{what}: log-probabilities differ by {error:.1e} (allowed {BOUND:.0e})", flush=True)
    return error <= BOUND


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("tool")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--models", default="resnet18,resnet50")
    args = ap.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(folder)
        for name in args.models.split(","):
            torch.manual_seed(1)
            # dnnrun -> torchvision
            run = f"{folder}/{name}"
            dnnrun(args, args.tool, name, folder, "train", "train.max_steps=4", "data.val=", "--out", run)
            weights = f"{run}/checkpoints/last/model.safetensors"
            model = getattr(torchvision.models, name)(num_classes=CLASSES)
            model.load_state_dict(load_file(weights), strict=True)
            assert model.bn1.num_batches_tracked == 4, model.bn1.num_batches_tracked
            good &= check(f"{name} from dnnrun", ours(args, name, folder, weights), theirs(model, folder))
            # torchvision -> dnnrun
            model = getattr(torchvision.models, name)(num_classes=CLASSES)
            with torch.no_grad():
                for _ in range(4):  # running statistics of their own
                    model.train()(torch.randn(8, 3, SIDE, SIDE))
            save_file(model.state_dict(), f"{folder}/{name}.safetensors")
            got = ours(args, name, folder, f"{folder}/{name}.safetensors")
            good &= check(f"{name} from torchvision", got, theirs(model, folder))
    sys.exit(not good)


if __name__ == "__main__":
    main()
