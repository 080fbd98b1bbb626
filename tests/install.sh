#!/usr/bin/env bash
# Installs a build into a fresh prefix and uses it from there, with nothing else of dnnrun in reach: the tool, the man
# page, the completion, the headers as C11 and C++17, and the examples.
#   tests/install.sh BUILD CC CXX
set -euo pipefail
build=$(realpath "$1") cc=$2 cxx=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/then moved" # from any prefix: also from one that it was not installed to
prefix="$scratch/then moved"
cd "$scratch"
fail() { echo "tests/install.sh: $*" >&2; exit 1; }
clean() { env -i HOME="$scratch" PATH="$prefix/bin:/usr/bin:/bin" OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive "$@"; }

echo "== tool"
clean dnnrun version
version=$(clean dnnrun --version | cut -d' ' -f2)
clean dnnrun train quickstart.cfg train.epochs=1 optim.warmup=0 device=cpu --out run | tail -3
clean dnnrun eval run >/dev/null || fail "the quickstart left nothing to evaluate"
! strings -a "$prefix/bin/dnnrun" 2>/dev/null | grep -F "$build/share" || fail "the binary knows the build folder"

echo "== man page and completion"
man=$(ls "$prefix"/share/man/man1/dnnrun.1)
[ -z "$(command -v man)" ] || man --warnings -l "$man" 2>warnings >page
[ ! -s warnings ] || { cat warnings; fail "the man page has warnings"; }
grep -q 'DNNRUN TRAIN' "$man" && grep -q 'data.train' "$man" || fail "the man page lacks the help of train"
complete_words() { # complete_words WORD…: what completion offers for the last word
    bash -c '. "$1"; shift; compopt() { :; }; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _dnnrun; echo "${COMPREPLY[*]}"' \
        _ "$prefix/share/bash-completion/completions/dnnrun" "$@"
}
[ "$(complete_words dnnrun tra)" = train ] || fail "completion of tra: $(complete_words dnnrun tra)"
complete_words dnnrun train quickstart.cfg --res | grep -x -- --resume >/dev/null || fail "completion of --res"
complete_words dnnrun train quickstart.cfg optim.lr | grep -w 'optim.lr=' >/dev/null || fail "completion of optim.lr"
complete_words dnnrun train quick | grep -w quickstart.cfg >/dev/null || fail "completion of quick"

echo "== headers and examples"
export PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name dnnrun.pc)")
[ "$(pkg-config --modversion dnnrun)" = "$version" ] || fail "pkg-config has another version"
eval "flags=($(pkg-config --cflags dnnrun)) libs=($(pkg-config --libs dnnrun))"
libdir=$(dirname "$PKG_CONFIG_PATH")
strict=(-Wall -Wextra -Wpedantic -Werror)
echo '#include <dnnrun.h>' >header.c
"$cc" -std=c11 "${strict[@]}" "${flags[@]}" -c header.c -o header.o
"$cxx" -std=c++17 "${strict[@]}" "${flags[@]}" -x c++ -c header.c -o header.o
digits="$prefix/share/dnnrun/data/digits.tar"
for example in train layer; do
    "$cc" -std=c11 -O2 "${strict[@]}" "${flags[@]}" "$prefix/share/dnnrun/examples/$example.c" "${libs[@]}" -lm -o $example
    said=$(clean env LD_LIBRARY_PATH="$libdir" ./$example "$digits:train" "$digits:test")
    echo "$example: $said"
    [ "${said%% *}" -ge 320 ] || fail "$example gets too few of 359 right"
done
[ "$(wc -l <"$prefix/share/dnnrun/examples/train.c")" -le 40 ] || fail "train.c has grown beyond 40 lines"
echo "all good"
