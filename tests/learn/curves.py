#!/usr/bin/env python3
"""Draws the training losses of what cifar.py has run: one curve a system, the mean over its seeds, in a band from the
lowest to the highest.

    curves.py resnet50 cifar-results.json docs/curves.svg     needs matplotlib
"""

import argparse
import os
import sys

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "dnnrun"  # the same picture from the same figures
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden"))
import common  # noqa: E402


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("recipe")
    ap.add_argument("results")
    ap.add_argument("picture")
    args = ap.parse_args()
    curves = {}
    for r in common.read_json(args.results):
        if r["recipe"] == args.recipe and r.get("losses"):
            curves.setdefault(r["system"], []).append(r)
    if not curves:
        sys.exit(f"{args.results} has no losses of {args.recipe}")
    figure, (all_steps, end) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for system, runs in curves.items():
        x = [step for step, _ in runs[0]["losses"]]
        y = np.array([[loss for _, loss in r["losses"]] for r in runs])
        label = f"{system.rpartition(':')[2]}, {100 * np.mean([r['top1'] for r in runs]):.2f} %"
        for axes, part in ((all_steps, slice(None)), (end, slice(len(x) * 3 // 5, None))):
            (line,) = axes.plot(x[part], y.mean(0)[part], linewidth=1, label=label)
            axes.fill_between(x[part], y.min(0)[part], y.max(0)[part], color=line.get_color(), alpha=0.15, linewidth=0)
    for axes in (all_steps, end):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    all_steps.set_ylabel("training loss")
    all_steps.set_yscale("log")
    all_steps.legend()
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
