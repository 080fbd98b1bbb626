#!/usr/bin/env python3
"""Writes layers.json: each layer kind's outputs and gradients as PyTorch computes them in fp64.

Pictures and weights are stored as dnnrun keeps them, NHWC and KRSC. Inputs have three decimals, so
that they are short. Run it from anywhere: python3 tests/golden/layers.py
"""
import json
import os

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(7)
cases = []


def rand(*shape, scale=1.0, shift=0.0):
    return torch.round(torch.randn(*shape) * scale * 1000 + shift * 1000) / 1000


def leaf(*shape, **kw):
    return rand(*shape, **kw).requires_grad_()


def flat(t):
    """In dnnrun's order of elements."""
    t = t.detach()
    if t.dim() == 4:
        t = t.permute(0, 2, 3, 1)
    return t.contiguous().flatten().tolist()


def case(op, opts, x, inputs, outputs):
    n, c = x.shape[:2]
    h, w = x.shape[2:] if x.dim() == 4 else (1, 1)
    cases.append({"op": op, "opts": opts, "x": [n, h, w, c],
                  "in": {k: flat(v) for k, v in inputs.items()},
                  "out": {k: flat(v) for k, v in outputs.items()}})


def grads(y, dy, leaves):
    return {"d" + k: g for k, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy))}


def layer(op, opts, x, y, leaves, inputs={}, outputs={}):
    dy = rand(*y.shape)
    case(op, opts, x, {**leaves, **inputs, "dy": dy}, {"y": y, **grads(y, dy, leaves), **outputs})


def conv(n, h, w, c, k, kernel, stride, pad):
    x, weight = leaf(n, c, h, w), leaf(k, c, kernel, kernel)
    layer("conv", dict(out=k, kernel=kernel, stride=stride, pad=pad), x,
          F.conv2d(x, weight, stride=stride, padding=pad), dict(x=x, weight=weight))


def norm(n, h, w, c, relu, residual, training):
    x, weight, bias = leaf(n, c, h, w, shift=0.5), leaf(c, shift=1.0), leaf(c)
    leaves = dict(x=x, weight=weight, bias=bias)
    running = dict(running_mean=rand(c), running_var=rand(c, scale=0.1, shift=1.0))
    after = {k: v.clone() for k, v in running.items()}
    y = F.batch_norm(x, after["running_mean"], after["running_var"], weight, bias, training)
    if residual:
        leaves["residual"] = leaf(n, c, h, w)
        y = y + leaves["residual"]
    y = F.relu(y) if relu else y
    opts = dict(relu=relu, residual=residual, training=training)
    if training:
        layer("norm", opts, x, y, leaves, running, after)
    else:
        case("norm", opts, x, {**leaves, **running}, {"y": y})


def pool(op, n, h, w, c, kernel, stride, pad, tied=False):
    x = torch.round(rand(n, c, h, w)).requires_grad_() if tied else leaf(n, c, h, w)
    f = {"max_pool": F.max_pool2d, "avg_pool": F.avg_pool2d}[op]
    layer(op, dict(kernel=kernel, stride=stride, pad=pad, tied=tied), x,
          f(x, kernel, stride=stride, padding=pad), dict(x=x))


def global_pool(n, h, w, c):
    x = leaf(n, c, h, w)
    layer("global_pool", {}, x, F.adaptive_avg_pool2d(x, 1), dict(x=x))


def dense(n, c, k):
    x, weight, bias = leaf(n, c), leaf(k, c), leaf(k)
    layer("dense", dict(out=k), x, F.linear(x, weight, bias), dict(x=x, weight=weight, bias=bias))


def shortcut(n, h, w, c, out, stride):
    x = leaf(n, c, h, w)
    before = (out - c) // 2
    y = F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, before, out - c - before))
    layer("shortcut", dict(out=out, stride=stride), x, y, dict(x=x))


def loss(n, k, smoothing, soft, mass=1.0):
    x = leaf(n, k, scale=3.0)
    labels = torch.randint(0, k, (n,))
    inputs = dict(x=x, labels=labels)
    if soft:
        target = torch.round(F.softmax(rand(n, k), 1) * 1000) / 1000
        target[:, 0] += mass - target.sum(1)
        inputs["soft"] = target
        each = F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
    else:
        labels[1] = -1
        each = F.cross_entropy(x, labels, label_smoothing=smoothing, reduction="none",
                               ignore_index=-1)
    dx, = torch.autograd.grad(each.sum() / n, x)
    case("loss", dict(smoothing=smoothing, soft=soft), x, inputs, dict(y=each, dx=dx))


def sgd(momentum, nesterov, decay, decay_norm_bias, clip, scale, steps=3):
    """A conv weight, a norm weight and a bias over some steps of torch.optim.SGD."""
    params = [leaf(2, 3, 1, 1), leaf(5), leaf(4)]
    lrs = [round(0.1 * (i + 1), 3) for i in range(steps)]
    others = decay if decay_norm_bias else 0.0
    optim = torch.optim.SGD([dict(params=params[:1], weight_decay=decay),
                             dict(params=params[1:], weight_decay=others)],
                            lr=0.1, momentum=momentum, nesterov=nesterov)
    start = [flat(p) for p in params]
    trace, norms = [], []
    for lr in lrs:
        grads_ = [rand(*p.shape) for p in params]
        for p, g in zip(params, grads_):
            p.grad = g.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, clip)) if clip else 0.0)
        for group in optim.param_groups:
            group["lr"] = lr
        optim.step()
        trace.append({"grad": [flat(g) for g in grads_], "weight": [flat(p) for p in params]})
    cases.append({"op": "sgd", "start": start, "lr": lrs, "norm": norms, "trace": trace,
                  "opts": dict(momentum=momentum, nesterov=nesterov, weight_decay=decay,
                               decay_norm_bias=decay_norm_bias, clip_norm=clip, scale=scale)})


for shape in [(2, 5, 4, 3, 4, 3, 1, 1), (1, 7, 7, 2, 3, 3, 2, 1), (2, 4, 4, 3, 2, 1, 1, 0),
              (1, 5, 6, 2, 2, 1, 2, 0), (1, 9, 8, 2, 2, 7, 2, 3), (1, 6, 7, 2, 2, 2, 3, 0),
              (1, 5, 5, 1, 2, 5, 1, 2), (1, 6, 6, 2, 1, 3, 3, 2)]:
    conv(*shape)
for relu in (False, True):
    for residual in (False, True):
        norm(2, 3, 2, 3, relu, residual, True)
        norm(1, 2, 3, 2, relu, residual, False)
for op in ("max_pool", "avg_pool"):
    for shape in [(2, 5, 6, 3, 3, 2, 1), (1, 4, 4, 2, 2, 2, 0), (1, 7, 5, 2, 3, 1, 1),
                  (1, 7, 7, 1, 5, 3, 2)]:
        pool(op, *shape)
pool("max_pool", 1, 6, 5, 3, 3, 2, 1, tied=True)
global_pool(2, 3, 4, 3)
dense(3, 5, 4)
shortcut(2, 5, 4, 3, 6, 2)
shortcut(1, 4, 4, 2, 5, 2)
shortcut(1, 3, 3, 2, 2, 1)
for smoothing in (0.0, 0.1):
    for soft in (False, True):
        loss(4, 7, smoothing, soft)
loss(3, 3, 0.1, False)
loss(3, 4, 0.1, True, mass=1.5)
sgd(0.0, False, 0.0, True, 0.0, 1.0)
sgd(0.9, False, 0.01, True, 0.0, 1.0)
sgd(0.9, True, 0.01, False, 0.0, 1.0)
sgd(0.9, True, 0.01, False, 0.7, 1024.0)

path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "layers.json")
with open(path, "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
print(f"{path}: {len(cases)} cases, torch {torch.__version__}")
