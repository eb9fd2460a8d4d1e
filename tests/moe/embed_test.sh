#!/bin/sh
# Installs the build into a fresh prefix and moves it. Builds examples/embed against it in C and C++, with the shared and the
# static library, by find_package and by pkg-config, and runs each program on a committed checkpoint.
# usage: embed_test.sh SOURCE BUILD GENERATOR CC CXX
set -eu
source_dir=$1 build_dir=$2 generator=$3 cc=$4 cxx=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for component in library development; do
  cmake --install "$build_dir" --prefix "$work/first" --component $component >>"$work/install.log"
done
mv "$work/first" "$work/prefix"
test -s "$work/prefix/share/doc/nvfp4_moe/LICENSE"
grep -q '^CUDA run time' "$work/prefix/share/doc/nvfp4_moe/THIRD_PARTY_NOTICES.txt"
cp -r "$source_dir/examples/embed" "$work/embed"  # really outside the tree

# runs PROGRAM shared|static: runs it, and checks whether it asks the loader for the library.
runs() {
  "$1" "$source_dir/tests/vectors/modelopt_qwen3_moe" 1 >"$work/out"
  grep -q '"activation_format":"int8_block"' "$work/out"  # a host's choice for declared NVFP4 activations
  grep '^token' "$work/out" >"$work/tokens"
  test "$(wc -l <"$work/tokens")" -eq 4
  [ -e "$work/expected" ] || cp "$work/tokens" "$work/expected"
  diff "$work/expected" "$work/tokens"
  found=static
  ! readelf --dynamic "$1" | grep -q 'NEEDED.*libnvfp4_moe\.so\.0' || found=shared
  test $found = "$2"
  # A directory that is no model: an ordinary error.
  if "$1" "$work/prefix" 2>"$work/error"; then exit 1; fi
  grep -q '^embed: ' "$work/error"
}

# found FOLDER option...: configures the example with find_package.
found() {
  folder=$1
  shift
  cmake -S "$work/embed" -B "$work/$folder" -G "$generator" -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
        -DCMAKE_PREFIX_PATH="$work/prefix" "$@" >"$work/configure.log" 2>&1
}
for kind in shared static; do
  found $kind -DEMBED_STATIC=$([ $kind = static ] && echo ON || echo OFF) || { cat "$work/configure.log"; exit 1; }
  cmake --build "$work/$kind" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
  runs "$work/$kind/embed" $kind
  runs "$work/$kind/embed_c" $kind
done
# A component that does not exist is an error.
sed -i 's/COMPONENTS static/COMPONENTS shtatic/' "$work/embed/CMakeLists.txt"
if found refused -DEMBED_STATIC=ON; then exit 1; fi
grep -q 'component: expected static, got shtatic' "$work/configure.log"

command -v pkg-config >/dev/null || { echo "skipped from here: pkg-config is not installed"; exit 77; }
library=$(dirname "$(find "$work/prefix" -name nvfp4_moe.pc)")
export PKG_CONFIG_PATH="$library" LD_LIBRARY_PATH="${library%/pkgconfig}"
# The words of pkg-config are split.
"$cc" "$work/embed/embed.c" -o "$work/c_shared" $(pkg-config --cflags --libs nvfp4_moe)
runs "$work/c_shared" shared
"$cc" "$work/embed/embed.c" -o "$work/c_static" $(pkg-config --cflags --libs nvfp4_moe-static)
runs "$work/c_static" static
"$cc" -static "$work/embed/embed.c" -o "$work/c_all_static" $(pkg-config --static --cflags --libs nvfp4_moe) 2>"$work/error" ||
  { cat "$work/error"; exit 1; }
runs "$work/c_all_static" static
"$cxx" -std=c++20 "$work/embed/main.cpp" -o "$work/cpp_shared" $(pkg-config --cflags --libs nvfp4_moe)
runs "$work/cpp_shared" shared
test "$(pkg-config --modversion nvfp4_moe)" = "$("$work/c_shared" "$source_dir/tests/vectors/modelopt_qwen3_moe" 1 | sed -n '1s/nvfp4-moe //p')"
