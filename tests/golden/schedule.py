"""Writes schedule.json: the learning rate of every schedule at each step, by torch.optim.lr_scheduler.

    python tests/golden/schedule.py > tests/golden/schedule.json
"""

import json

import torch
from torch.optim import lr_scheduler as S

LR, BATCH, EPOCH_STEPS, EPOCHS = 0.4, 32, 7, 6
STEPS = EPOCH_STEPS * EPOCHS


def run(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warm(optimizer, steps, factor):
    return S.LinearLR(optimizer, start_factor=factor, total_iters=steps)


def then(main, warm_steps, factor):
    """Warm-up, then `main`, which starts when the warm-up ends."""

    def make(o):
        if not warm_steps:
            return main(o, STEPS)
        return S.SequentialLR(o, [warm(o, warm_steps, factor), main(o, STEPS - warm_steps)], [warm_steps])

    return make


def times(main, warm_steps, factor):
    """Warm-up as a factor on `main`, which counts from the start of the run."""

    def make(o):
        return S.ChainedScheduler([main(o)] + ([warm(o, warm_steps, factor)] if warm_steps else []))

    return make


def cases():
    low = 0.01
    for warm_epochs, factor in (0, 0), (1, 0), (2, 0.1):
        n = warm_epochs * EPOCH_STEPS
        f = factor or (1 / n if n else 1)
        w = {"warmup_epochs": warm_epochs, "warmup_factor": factor}
        yield w | {"schedule": "constant"}, times(lambda o: S.ConstantLR(o, 1), n, f)
        yield (w | {"schedule": "step", "gamma": 0.3, "step_epochs": 2},
               times(lambda o: S.StepLR(o, 2 * EPOCH_STEPS, 0.3), n, f))
        yield (w | {"schedule": "multistep", "gamma": 0.1, "milestones": [1, 3, 5]},
               times(lambda o: S.MultiStepLR(o, [k * EPOCH_STEPS for k in (1, 3, 5)], 0.1), n, f))
        yield (w | {"schedule": "linear", "lr_min": low},
               then(lambda o, t: S.LinearLR(o, 1, low / LR, t), n, f))
        yield (w | {"schedule": "cosine", "lr_min": low},
               then(lambda o, t: S.CosineAnnealingLR(o, t, low), n, f))
        yield w | {"schedule": "cosine"}, then(lambda o, t: S.CosineAnnealingLR(o, t), n, f)
        yield (w | {"schedule": "poly", "power": 2},
               then(lambda o, t: S.PolynomialLR(o, t, 2), n, f))
        yield (w | {"schedule": "poly", "power": 0.9, "lr_min": low},
               then(lambda o, t: S.LambdaLR(o, lambda s: (low + (LR - low) * (1 - s / t) ** 0.9) / LR), n, f))
    for pct, div, final in (0, 0, 0), (0.1, 10, 100), (0.5, 2, 1e3), (0.01, 25, 1e4):
        keys = {"pct_start": pct, "div_factor": div, "final_div_factor": final}
        yield (keys | {"schedule": "onecycle"},
               lambda o, p=pct or 0.3, d=div or 25, f=final or 1e4: S.OneCycleLR(
                   o, LR, total_steps=STEPS, pct_start=p, div_factor=d, final_div_factor=f,
                   anneal_strategy="cos", cycle_momentum=False))


if __name__ == "__main__":
    out = [{"options": options, "lr": run(make)} for options, make in cases()]
    rows = ",\n".join(json.dumps(case) for case in out)
    print(f'{{"torch": "{torch.__version__}", "lr": {LR}, "batch": {BATCH}, "epoch": {BATCH * EPOCH_STEPS},\n'
          f' "total": {BATCH * STEPS}, "cases": [\n{rows}\n]}}')
