#!/usr/bin/env python3
"""Reads a run's event files with TensorBoard's own reader and compares every number with metrics.jsonl.

    events.py RUN       exit code 77: this Python has no tensorboard
"""
import json
import sys
from pathlib import Path

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError as e:
    print(e)
    sys.exit(77)

run = Path(sys.argv[1])
events = EventAccumulator(str(run), size_guidance={"scalars": 0})
events.Reload()
wanted = {}  # tag -> {step: value}
for line in (run / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    if record["event"] in ("train", "eval"):
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "step":
                wanted.setdefault(f"{record['event']}/{key}", {})[record["step"]] = value
tags = set(events.Tags()["scalars"])
assert tags == set(wanted), tags ^ set(wanted)
count = 0
for tag in tags:
    found = {e.step: e.value for e in events.Scalars(tag)}
    assert list(found) == sorted(found) and len(found) == len(events.Scalars(tag)), tag  # no step twice
    assert found.keys() == wanted[tag].keys(), (tag, found.keys() ^ wanted[tag].keys())
    for step, value in found.items():
        assert abs(value - wanted[tag][step]) <= 1e-6 * abs(wanted[tag][step]), (tag, step, value, wanted[tag][step])
        count += 1
print(f"{count} scalars of {len(tags)} tags agree")
