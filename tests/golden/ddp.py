#!/usr/bin/env python3
"""What PyTorch's DistributedDataParallel computes (gloo, 2 processes, fp64) -> ddp.json, for tests/test_ddp.c.

Rank r takes positions (2 k + r) n ... of the stream as its kth batch of n pictures: the order in which dnnrun deals them.
Kept are the losses of all steps (means over ranks), the weights after the last, and rank 0's running statistics.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import common
from models import case, pack, write

HERE = os.path.dirname(os.path.abspath(__file__))
WORLD = 2
CASES = [
    case("resnet20 ddp", "resnet20", 4, 16, projections=8),
    case("resnet20 ddp accumulate", "resnet20", 4, 16, projections=8, accumulate=2, smoothing=0.1, nesterov=True),
    case("resnet18 ddp", "resnet18", 2, 64, projections=8, stem="imagenet"),
]


def train(rank, c, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    model = common.make_model(c["model"], c["classes"], c["stem"])
    common.fill(model, 0)
    model.double().train()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=c["momentum"], nesterov=c["nesterov"],
                          weight_decay=c["weight_decay"])  # fmt: skip
    n, k, losses = c["batch"], 0, []
    for lr in c["lr"]:
        opt.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for micro in range(c["accumulate"]):
            x, y = common.batch(0, (WORLD * k + rank) * n, n, c["image"], c["classes"], torch.float64)
            k += 1
            ddp.require_backward_grad_sync = micro == c["accumulate"] - 1
            loss = F.cross_entropy(ddp(x), y, label_smoothing=c["smoothing"])
            (loss / c["accumulate"]).backward()
            total += loss.detach() / c["accumulate"]
        for g in opt.param_groups:
            g["lr"] = lr
        opt.step()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    if rank == 0:
        out = {"losses": torch.tensor(losses, dtype=torch.float64)}
        out.update({f"weight/{k}": p.detach() for k, p in model.named_parameters()})
        out.update({f"running/{k}": b for k, b in model.named_buffers() if "running" in k})
        results.update({k: pack(t, c["projections"]) for k, t in out.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    cases = []
    for c in CASES:
        with mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(train, (c, results), nprocs=WORLD)
            cases.append(dict(c, ranks=WORLD, tensors=dict(results)))
    write(os.path.join(HERE, "ddp.json"), {}, cases)
