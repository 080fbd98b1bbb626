#!/usr/bin/env bash
# Compares the public interface of libdnnrun (the functions dnr_… and the types of dnnrun.h) with the committed one.
# A function more is no breach; a change of anything that was there is. Meant changes: raise the version, then --update.
#   tests/abi.sh BUILD [--update]
set -euo pipefail
here=$(dirname "$(realpath "$0")")
library=$1/libdnnrun.so baseline=$here/libdnnrun.abi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
{ echo '[abi_whitelist]'; nm -D --defined-only "$library" | sed -n 's/.* T \(dnr_.*\)/  \1/p'; } >"$scratch/public"
mkdir "$scratch/headers"
cp "$here/../runtime/dnnrun.h" "$scratch/headers"
abidw --headers-dir "$scratch/headers" --drop-private-types --kmi-whitelist "$scratch/public" --no-corpus-path \
    --no-comp-dir-path --no-show-locs --no-elf-needed --no-parameter-names --type-id-style hash \
    --out-file "$scratch/now.abi" "$library"
if [ "${2:-}" = --update ]; then
    sed "s#$(realpath "$here/..")/*##g" "$scratch/now.abi" >"$baseline" # of no machine in particular
    exit 0
fi
grep -q dnr_loader_opts "$scratch/now.abi" && grep -q DNR_EDISK "$scratch/now.abi" || { echo "the library's interface could not be read"; exit 1; }
abidiff --no-added-syms "$baseline" "$scratch/now.abi" || {
    echo "dnnrun.h has changed for programs built against it. Is that meant? Then: raise DNR_VERSION, note it in"
    echo "CHANGELOG.md, and tests/abi.sh BUILD --update"
    exit 1
}
