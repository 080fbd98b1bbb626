#!/usr/bin/env python3
"""Holds the code to the house rules of docs/design.md: who may include whom, and no feature #ifdefs."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("runtime", "layers", "models", "data", "dist", "tools")
# room -> rooms whose headers it may include
MAY = {
    "runtime": {"runtime"},
    "layers": {"layers", "runtime"},
    "models": {"models", "layers", "runtime"},
    "data": {"data", "runtime"},
    "dist": {"dist", "runtime"},
    "tools": {"tools"},  # and dnnrun.h
}
VENDOR = re.compile(r"^(cuda|cudnn|cublas|nccl|nvml|nvjpeg|cub/|mpi\.h|dnnl|oneapi/|omp\.h|jpeglib|turbojpeg|stb/)")
VENDOR_ROOMS = re.compile(r"^(runtime|layers)/(cuda|cpu)/|^dist/|^data/")
FEATURE = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\b(DNR_HAVE_\w+|DNR_CUDA|DNR_CPU|DNR_MPI|DNR_NCCL|__CUDACC__)\b")


def folder(path):
    """runtime/cuda for runtime/cuda/device.c, runtime for runtime/plan.c"""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 and parts[1] in ("cuda", "cpu") else parts[0]


def check(path, text, errors):
    room = path.split("/")[0]
    for number, line in enumerate(text.splitlines(), 1):
        def complain(why):
            errors.append(f"{path}:{number}: {why}: {line.strip()}")

        if FEATURE.match(line):
            complain("features are chosen in CMake and the table of back ends, not by #ifdef")
        include = re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line)
        if not include:
            continue
        quote, name = include.groups()
        if VENDOR.match(name) and not VENDOR_ROOMS.match(path):
            complain("vendor headers only below cuda/, cpu/, dist/ and data/")
        if quote != '"' or path.startswith("tools/examples/"):  # these use what is installed
            continue
        target = (ROOT / path).parent / name
        if not target.exists():
            target = ROOT / "runtime" / name
        if not target.exists():
            complain("no such header of ours")
            continue
        target = target.resolve().relative_to(ROOT).as_posix()
        if room == "tools":
            if target != "runtime/dnnrun.h" and not target.startswith("tools/"):
                complain("the tool uses nothing but dnnrun.h")
        elif target.split("/")[0] not in MAY[room]:
            complain(f"{room} may not include {target.split('/')[0]}")
        into = folder(target)
        if "/" in into and into.split("/")[1] != (folder(path) + "/").split("/")[1]:
            complain(f"{folder(path)} may not include {into}")


def main():
    files = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    errors = []
    count = 0
    for path in files.split():
        if path.endswith((".c", ".h", ".cu", ".cuh")):
            count += 1
            check(path, (ROOT / path).read_text(), errors)
    print("\n".join(errors))
    print(f"{count} files, {len(errors)} breaches")
    return 1 if errors or not count else 0


sys.exit(main())
