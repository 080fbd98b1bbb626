#!/usr/bin/env bash
# Makes the .deb, looks at what it asks for, and runs what is in it, unpacked, with a clean environment.
#   tests/package.sh BUILD
set -euo pipefail
build=$(realpath "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
cpack -G DEB --config "$build/CPackConfig.cmake" -B "$scratch" >log 2>&1 || { cat log; exit 1; }
deb=$(ls dnnrun_*.deb)
needs=$(dpkg-deb -f "$deb" Depends)
echo "$deb: needs $needs"
for package in libc6 libdnnl libjansson libinih libxxhash; do
    grep -q "$package" <<<"$needs" || { echo "$deb does not depend on $package"; exit 1; }
done
dpkg-deb -x "$deb" root
! grep -rqF "$build" root || { echo "something in the package knows the build folder:"; grep -rlF "$build" root; exit 1; }
run() { env -i HOME="$scratch" PATH="$scratch/root/usr/bin:/usr/bin:/bin" OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "$@"; }
run dnnrun version
run dnnrun train quickstart.cfg train.epochs=1 optim.warmup=0 device=cpu --out run | tail -2
