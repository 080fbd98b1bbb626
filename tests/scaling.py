#!/usr/bin/env python3
"""tools/scaling.py on a plan so small that its steps can be followed by hand: tests/scaling.py"""
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools/scaling.py"
MB = 10**6
PLAN = {"model": "m", "batch": 1, "programs": [{"program": "eval"}, {
    "program": "last",
    "ops": [{"op": "a", "phase": "forward", "us": 1000}, {"op": "b", "phase": "backward", "us": 1000},
            {"op": "c", "phase": "backward", "us": 1000}, {"op": "d", "phase": "update", "us": 60},
            {"op": "e", "phase": "update", "us": 40}],
    "buckets": [{"bucket": 0, "bytes": 36 * MB, "after": 1}, {"bucket": 1, "bytes": 3.6 * MB, "after": 2}]}]}


def rows(*options):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump(PLAN, f)
        f.flush()
        out = subprocess.run([sys.executable, TOOL, f.name, "--json", "--nvlink", "300", "--network", "45", "--launch-us", "20",
                              "--hop-us", "6", *options], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(out)[0]["rows"]


def near(got, want):
    assert math.isclose(got, want, rel_tol=1e-9), (got, want)


# 8 GPUs of a host: 20 + 2 · 7/8 · 36 MB / 300 GB/s = 230 µs, and 20 + 21 = 41. The first travels from 2000 on: op c does 230/1.15
# = 200 µs of its work in that time, and 800 after it, to 3030. The second travels to 3071, all of which is waited for.
r, = rows("--gpus", "8", "--slow", "0.15", "--jitter", "0")
near(r["ms"], 3.171)
near(r["efficiency"], 3100 / 3171)
near(r["sums_ms"], 0.271)
near(r["exposed_ms"], 0.041)
assert [list(map(round, b)) for b in r["buckets"]] == [[2000, 2000, 2230], [3030, 3030, 3071]]

# 16 GPUs on two hosts: as much within them, and shares of 4.5 and 0.45 MB, 100 and 10 µs of the card's: by ring 2 · (50 + 6) = 112
# and 2 · (5 + 6) = 22, by tree 2 · 100 + 12 and 2 · 10 + 12. Jitter: √(2 ln 16) spreads of 1 %.
r, = rows("--gpus", "16", "--slow", "0", "--jitter", "0.01")
near(r["sums_ms"], 0.230 + 0.112 + 0.041 + 0.022)
near(r["exposed_ms"], 0.063)
near(r["ms"], 3.163 * (1 + 0.01 * math.sqrt(2 * math.log(16))))

# 1024 GPUs: 128 hosts. The tree, 2 · 100 + 2 · 7 · 6 µs, is shorter than a ring of 2 · 127 hops. In 16 bits half of each.
r, = rows("--gpus", "1024", "--slow", "0", "--jitter", "0", "--wire", "2")
near(r["sums_ms"], (20 + 105 + 100 + 84 + 20 + 10.5 + 10 + 84) / 1e3)

# A first bucket that travels longer than backward goes on holds up the second. One GPU waits for nobody.
PLAN["programs"][1]["buckets"][0]["bytes"] = 360 * MB
r, one = rows("--gpus", "8,1", "--slow", "0", "--jitter", "0.01", "--step-ms", "6.2")
near(r["exposed_ms"], (4000 + 2120 + 41 - 6000) / 1e3)
near(one["ms"], 6.2)
near(one["efficiency"], 1)
print("all passed")
