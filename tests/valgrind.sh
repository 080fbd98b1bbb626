#!/usr/bin/env bash
# A tiny training under valgrind: no bad access, and nothing lost at exit. Valgrind knows no AVX-512.
#   tests/valgrind.sh BUILD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(realpath "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
# A folder without the CUDA module: the manifest lists all devices, and valgrind takes half a minute to load cuBLAS's code.
mkdir bin
cp -dR "$build"/dnnrun "$build"/libdnnrun.so* "$build"/dnnrun-cpu.so "$build"/share bin
tool=bin/dnnrun
export LD_LIBRARY_PATH=$PWD/bin OMP_NUM_THREADS=1 DNNL_MAX_CPU_ISA=AVX2
checked() {
    valgrind -q --suppressions="$here/valgrind.supp" --error-exitcode=99 --leak-check=full --show-leak-kinds=definite,indirect,possible \
        --errors-for-leak-kinds=definite,indirect,possible "$tool" "$@"
}
small="quickstart.cfg device=cpu train.epochs=1 optim.warmup=0 train.batch=8 data.threads=1 data.val="
checked train $small train.max_steps=2 train.ema=0.9 --out run
checked train $small data.std=1e-39 --out lost && exit 1 || [ $? -eq 1 ] # an error frees what it had, too
