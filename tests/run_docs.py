#!/usr/bin/env python3
"""Runs the code blocks of README.md and docs/*.md that are tagged `run` (or, with --gpu, `gpu`).

A block starts with ```sh run and is executed by bash -euo pipefail in a scratch folder, with the build folder first
on PATH and the repository reachable as $DNNRUN_SOURCE. A block may be followed by ```text expect: every line there
must occur in the output, with … standing for anything. Every shell block must carry a tag: run, gpu or show.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\S*) ?(.*)$")


def blocks(text):
    """(first line number, language, tag, body) of each fenced block"""
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = FENCE.match(lines[i])
        if not fence:
            i += 1
            continue
        end = next(k for k in range(i + 1, len(lines)) if lines[k].startswith("```"))
        yield i + 1, fence.group(1), fence.group(2).strip(), "\n".join(lines[i + 1:end])
        i = end + 1


def matches(line, output):
    return re.search(".*".join(re.escape(part.strip()) for part in line.split("…")), output) is not None


def main():
    args = argparse.ArgumentParser()
    args.add_argument("build", type=Path)
    args.add_argument("--gpu", action="store_true")
    args = args.parse_args()
    wanted = "gpu" if args.gpu else "run"
    env = dict(os.environ, PATH=f"{args.build.resolve()}:{os.environ['PATH']}", DNNRUN_SOURCE=str(ROOT))
    failures = ran = 0
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        output = ""
        with tempfile.TemporaryDirectory() as scratch:  # blocks of one page build on each other
            for line, language, tag, body in blocks(path.read_text()):
                where = f"{path.relative_to(ROOT)}:{line}"
                if language in ("sh", "bash") and tag not in ("run", "gpu", "show"):
                    print(f"{where}: tag this block run, gpu or show")
                    failures += 1
                elif language in ("sh", "bash") and tag == wanted:
                    ran += 1
                    done = subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=scratch, env=env, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
                    output = done.stdout
                    print(f"{where}: {'ok' if done.returncode == 0 else f'exit code {done.returncode}'}")
                    if done.returncode:
                        print(output)
                        failures += 1
                elif tag == "expect" and output:
                    for expected in filter(None, (text.strip() for text in body.splitlines())):
                        if not matches(expected, output):
                            print(f"{where}: not in the output: {expected}\n{output}")
                            failures += 1
                if language in ("sh", "bash") and tag != wanted:
                    output = ""
    print(f"{ran} blocks run, {failures} failures")
    return 1 if failures else 0


sys.exit(main())
