#!/usr/bin/env bash
# Trains, stops, resumes and evaluates in a build with -DDNR_SANITIZE=thread by clang; a data race fails it. libomp's own
# tool tells the sanitizer what OpenMP's barriers order; oneDNN is not instrumented, and so its inside is not looked at.
#   tests/threads.sh BUILD
set -euo pipefail
tool=$(realpath "$1")/dnnrun
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
archer=$(ldconfig -p | sed -n 's/.*libarcher.so => //p' | head -1)
[ -n "$archer" ] || archer=$(find /usr/lib/llvm* -name libarcher.so 2>/dev/null | sort | tail -1)
[ -n "$archer" ] || { echo "tests/threads.sh: there is no libarcher.so (package libomp-dev)"; exit 1; }
export TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66" ARCHER_OPTIONS=verbose=1
export OMP_TOOL_LIBRARIES=$archer OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive
nm -D "$tool" "$(dirname "$tool")"/dnnrun-cpu.so | grep __tsan_read >/dev/null || { echo "this build is not instrumented"; exit 1; }
common="quickstart.cfg device=cpu data.threads=4 train.deterministic=true train.ema=0.9"
"$tool" train $common train.epochs=2 optim.warmup=0 train.max_steps=30 --out run 2>&1 | tee log
grep -qi 'archer detected' log || { echo "Archer did not start"; exit 1; }
"$tool" train $common train.epochs=2 optim.warmup=0 train.max_steps=40 --out run --resume auto --allow-changes
"$tool" eval run
"$tool" train $common data.std=1e-39 --out lost && exit 1 || [ $? -eq 1 ] # and the search for what is not finite
