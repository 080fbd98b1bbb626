"""What the PyTorch peers share: the models, the numbers that C and Python make alike, and measures of error.

Every input of a parity case is a pure function that tests/parity_numbers.h computes to the same bits:

    hash(draw, name, i) = splitmix64's finaliser of fnv1a("DRAW/NAME") + (i + 1) * 0x9e3779b97f4a7c15   (mod 2^64)
    u(draw, name, i)    = (hash >> 40) / 2^24, in [0, 1)
    pixel               = (3 * tile + noise) >> 2, so that pictures differ in more than noise
        noise               = hash("noise") >> 56; i runs over [position in the stream, row, column, RGB]
        tile                = hash("tiles") >> 56; i runs over [position, row / 8, column / 8, RGB]
    label               = (hash("labels") >> 33) mod classes; i = position in the stream
    weight              = (2u - 1) * bound, in double, rounded once to fp32; i runs over the file's layout (OIHW)
        bound: convolution sqrt(6 / (K*R*S)); dense weight and bias 1 / sqrt(C); norm bias 0.1
        norm weight: 0.5 + u instead, a quarter of it for the last norm of a residual branch (keeps the network
        well conditioned: otherwise fp32 has two digits left in the gradients of resnet50)
    running mean 0, running variance 1

A large tensor `a` is kept as its norm and projections on random signs: p[k] = sum of +-a[i], the sign being bit k
of hash(0, "sign", i) (set: minus), i over the file's layout. The mean of (p[k](a) - p[k](b))^2 estimates ||a - b||^2.
"""

import functools
import json
import os

import numpy as np
import torch
from torch import nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


# ---------------------------------------------------------------- numbers


def hashes(draw, name, n, start=0):
    stream = 0xCBF29CE484222325
    for byte in f"{draw}/{name}".encode():
        stream = (stream ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.lru_cache(maxsize=200)
def uniform(draw, name, n):
    return (hashes(draw, name, n) >> np.uint64(40)).astype(np.float64) / 2**24


def fill(model, draw):
    """Sets all weights of a model."""
    last = ".bn3." if hasattr(model.layer1[0], "bn3") else ".bn2."
    for name, p in model.named_parameters():
        u = uniform(draw, name, p.numel())
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Conv2d):
            v = (2 * u - 1) * np.sqrt(6 / (p.numel() / p.shape[1]))
        elif isinstance(owner, nn.Linear):
            v = (2 * u - 1) * (1 / np.sqrt(owner.in_features))
        else:
            v = (0.5 + u) * (0.25 if last in name else 1) if name.endswith("weight") else (2 * u - 1) * 0.1
        with torch.no_grad():
            p.copy_(torch.from_numpy(v.astype(np.float32)).view(p.shape))


def batch(draw, start, n, image, classes, dtype=torch.float64):
    """Pictures (normalised, NCHW) and labels of n positions of the stream."""
    def pixels(name, side):
        count = side * side * 3
        return (hashes(draw, name, n * count, start * count) >> np.uint64(56)).reshape(n, side, side, 3).astype(int)

    tiles = pixels("tiles", image // 8).repeat(8, 1).repeat(8, 2)
    pixels = (3 * tiles + pixels("noise", image)) >> 2
    labels = (hashes(draw, "labels", n, start) >> np.uint64(33)) % np.uint64(classes)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(dtype) / 255
    mean, std = (torch.tensor(v, dtype=dtype).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (x - mean) / std, torch.from_numpy(labels.astype(np.int64))


def project(a, k):
    """The k projections of a flat array; k <= 64."""
    h = hashes(0, "sign", a.size)
    return [float(a @ (1 - 2 * (h >> np.uint64(j) & np.uint64(1)).astype(np.float64))) for j in range(k)]


def error(a, b):
    """Relative norm of the difference."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---------------------------------------------------------------- models


class Block(nn.Module):
    """The basic block of the CIFAR ResNets, with option A's shortcut: subsample by 2, zero channels before and after."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU()

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        more = y.shape[1] - x.shape[1]
        if more:
            x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more // 2, more - more // 2))
        return self.relu(y + x)


class CifarResNet(nn.Module):
    """He et al. 2015, section 4.2: depth 6n + 2, named like torchvision's."""

    def __init__(self, depth, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        cin = 16
        for s, cout in enumerate((16, 32, 64)):
            blocks = []
            for b in range((depth - 2) // 6):
                blocks.append(Block(cin, cout, 2 if s and not b else 1))
                cin = cout
            setattr(self, f"layer{s + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(64, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


def make_model(name, classes, stem=None):
    """Resnet18 ... resnet152 are torchvision's, resnet20 ... resnet110 the CIFAR ones."""
    depth = int(name.removeprefix("resnet"))
    if (depth - 2) % 6 == 0 and depth not in (50, 152):
        return CifarResNet(depth, classes)
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=classes)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


# ---------------------------------------------------------------- files


def append_json(path, record):
    """Adds a record to a JSON list that grows run by run; complete or unchanged."""
    records = read_json(path) + [record]
    with open(path + ".tmp", "w") as f:
        json.dump(records, f, indent=1)
    os.replace(path + ".tmp", path)


def read_json(path):
    return json.load(open(path)) if os.path.exists(path) else []


def read_lines(path):
    """The records of a JSON-lines file."""
    with open(path) as f:
        return [json.loads(line) for line in f]
