#!/bin/sh
# Installs the build into a fresh prefix, builds examples/embed against it and runs that on a committed checkpoint.
# usage: embed_test.sh SOURCE BUILD GENERATOR CXX
set -eu
source_dir=$1 build_dir=$2 generator=$3 cxx=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build_dir" --prefix "$work/prefix" --component library >"$work/install.log"
test -s "$work/prefix/share/doc/nvfp4_moe/LICENSE"
grep -q '^CUDA run time' "$work/prefix/share/doc/nvfp4_moe/THIRD_PARTY_NOTICES.txt"
cp -r "$source_dir/examples/embed" "$work/embed"  # really outside the tree
cmake -S "$work/embed" -B "$work/build" -G "$generator" -DCMAKE_CXX_COMPILER="$cxx" \
      -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/configure.log" || { cat "$work/configure.log"; exit 1; }
cmake --build "$work/build" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/build/embed" "$source_dir/tests/vectors/modelopt_qwen3_moe" 1 | tee "$work/out"
grep -q '"activation_format":"int8_block"' "$work/out"  # a host's choice for declared NVFP4 activations
grep -q '^token 3: ' "$work/out"
# A directory that is no model: an ordinary error.
if "$work/build/embed" "$work/prefix" 2>"$work/error"; then exit 1; fi
grep -q '^embed: ' "$work/error"
