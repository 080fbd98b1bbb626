#!/usr/bin/env python3
"""How a run would scale to more GPUs: the bucket schedule of `dnnrun plan --json` against a model of the links.

    dnnrun plan resnet50.cfg --measure --json >plan.json      on the GPU: each op's time
    tools/scaling.py plan.json [more.json ...] [--gpus 8,64,512]

A plan without times (no --measure) has them estimated from operations and bytes. --step-ms, a step's measured time, scales
them to it: launches are timed one by one. docs/scaling.md has the model and its assumptions."""
import argparse
import json
import math

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("plan", nargs="+")
p.add_argument("--gpus", default="8,64,512")
p.add_argument("--step-ms", help="of one GPU alone, for each plan; scales its times")
p.add_argument("--wire", type=float, default=4, help="bytes of a gradient on the wire (dist.reduce_type)")
p.add_argument("--host", type=int, default=8, help="GPUs of a host")
p.add_argument("--nvlink", type=float, default=340, help="GB/s, bus bandwidth of a sum within a host")
p.add_argument("--network", type=float, default=45, help="GB/s that a GPU's own network card sends")
p.add_argument("--launch-us", type=float, default=20, help="of a sum within a host, whatever its size")
p.add_argument("--hop-us", type=float, default=6, help="from host to host")
p.add_argument("--slow", type=float, default=0.06, help="by how much computing is slower while a sum travels")
p.add_argument("--jitter", type=float, default=0.003, help="spread of a rank's step, as a share of it")
p.add_argument("--flops", type=float, default=400e12, help="for plans without times: operations a second")
p.add_argument("--bytes", type=float, default=4e12, help="for plans without times: bytes a second")
p.add_argument("--timeline", action="store_true", help="when each bucket travels, at the largest number of GPUs")
p.add_argument("--table", action="store_true", help="of all plans, in Markdown; in brackets with 2 bytes on the wire")
p.add_argument("--json", action="store_true")
a = p.parse_args()


def op_us(op):
    return op["us"] if "us" in op else 1e6 * max(op["flops"] / a.flops, op["bytes"] / a.bytes)


def sum_us(size, n):
    """A sum of `size` bytes over n GPUs: reduced to shares within each host, over hosts by ring or tree, and back."""
    g = min(n, a.host)
    hosts = n // g
    us = a.launch_us + 2 * (g - 1) / g * size / (a.nvlink * 1e3)
    if hosts > 1:
        share = size / g / (a.network * 1e3)
        ring = 2 * (hosts - 1) * (share / hosts + a.hop_us)
        tree = 2 * share + 2 * math.log2(hosts) * a.hop_us
        us += min(ring, tree)
    return us


def step(ops, buckets, n, wire):
    """One step's microseconds, what of them waits for sums, and each bucket's (ready, begun, done). Computing is slower
    while the comm lane works."""
    now, busy_until, exposed, lane = 0.0, 0.0, 0.0, []
    at = {}
    for b in buckets:
        at.setdefault(b["after"], []).append(b)
    for i, (phase, us) in enumerate(ops):
        if phase == "update" and now < busy_until:
            exposed = busy_until - now
            now = busy_until
        slowed = max(0.0, busy_until - now) / (1 + a.slow)  # of its work, what falls into the busy time
        now += us + a.slow * min(us, slowed)
        for b in at.get(i, []) if n > 1 else []:
            begun = max(now, busy_until)
            busy_until = begun + sum_us(b["bytes"] * wire / 4, n)
            lane.append((now, begun, busy_until))
    slowest = 1 + a.jitter * (math.sqrt(2 * math.log(n)) if n > 1 else 0)  # of n, all of which wait for it
    return now * slowest, exposed, lane


class Plan:
    def __init__(self, path, step_ms):
        plan = json.load(open(path))
        last = next(q for q in plan["programs"] if q["program"] == "last")
        if any(o["op"].startswith("reduce") for o in last["ops"]):
            raise SystemExit(f"{path}: make the plan without ranks: its bucket list counts ops without sums")
        self.title, self.buckets = f"{plan['model']}, batch {plan['batch']}", last["buckets"]
        self.ops = [(o["phase"], op_us(o)) for o in last["ops"]]
        scale = step_ms * 1e3 / sum(us for _, us in self.ops) if step_ms else 1
        self.ops = [(phase, us * scale) for phase, us in self.ops]
        self.alone = sum(us for _, us in self.ops)

    def on(self, n, wire=a.wire):
        us, exposed, lane = step(self.ops, self.buckets, n, wire)
        return {"gpus": n, "ms": us / 1e3, "efficiency": self.alone / us, "sums_ms": sum(e - b for _, b, e in lane) / 1e3,
                "exposed_ms": exposed / 1e3, "buckets": lane}


def show(plan):
    rows = [plan.on(n) for n in gpus]
    print(f"{plan.title}, alone {plan.alone / 1e3:.2f} ms a step")
    print(f"{'GPUs':>6} {'ms':>8} {'weak scaling':>13} {'sums ms':>9} {'exposed ms':>11}")
    for r in rows:
        print(f"{r['gpus']:>6} {r['ms']:>8.2f} {100 * r['efficiency']:>11.1f} % {r['sums_ms']:>9.2f} {r['exposed_ms']:>11.3f}")
    if a.timeline:
        print(f"{'bucket':>6} {'MiB':>7} {'ready ms':>9} {'begun':>9} {'done':>9}")
        for b, (ready, begun, done) in zip(plan.buckets, rows[-1]["buckets"]):
            print(f"{b['bucket']:>6} {b['bytes'] * a.wire / 4 / 2**20:>7.1f} {ready / 1e3:>9.3f} {begun / 1e3:>9.3f} {done / 1e3:>9.3f}")


def show_table(plans):
    print("| GPUs | " + " | ".join(f"{q.title}, alone {q.alone / 1e3:.2f} ms" for q in plans) + " |")
    print("|---|" + "---|" * len(plans))
    for n in gpus:
        cells = ((q.on(n), q.on(n, 2)) for q in plans)
        print(f"| {n} | " + " | ".join(f"{r['ms']:.2f} ms, {100 * r['efficiency']:.1f} % ({100 * h['efficiency']:.1f})" for r, h in cells) + " |")


gpus = list(map(int, a.gpus.split(",")))
step_ms = list(map(float, a.step_ms.split(","))) if a.step_ms else [None] * len(a.plan)
if len(step_ms) != len(a.plan):
    p.error("--step-ms: one for each plan, separated by commas")
plans = [Plan(*q) for q in zip(a.plan, step_ms)]
if a.json:
    print(json.dumps([{"plan": q.title, "alone_ms": q.alone / 1e3, "rows": [q.on(n) for n in gpus]} for q in plans]))
elif a.table:
    show_table(plans)
else:
    for plan in plans:
        show(plan)
