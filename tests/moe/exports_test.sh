#!/bin/sh
# The shared library exports exactly the functions that its header declares, each with the version of the release that added it:
# a function of the last release (the baseline of abi_test.sh) keeps its version, and any other one has this release's.
# usage: exports_test.sh LIBRARY HEADER VERSION BASELINE
set -eu
LC_ALL=C
export LC_ALL
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
names_of() { grep -o 'nvfp4_moe_[a-z0-9_]*(' "$1" | tr -d '(' | sort -u; }
nm -D --defined-only --with-symbol-versions "$1" | awk '$2 != "A" {print $3}' | sort >"$work/exported"
names_of "$2" >"$work/declared"
test "$(wc -l <"$work/declared")" -gt 30
sed 's/@.*//' "$work/exported" | diff "$work/declared" -
names_of "$4" >"$work/released"
newest=$(sed -n '1s/.*declarations of \([0-9.]*\)\.[0-9]*,.*/\1/p' "$4")
awk -v own="${3%.*}" -v newest="$newest" '
  function number(version) { split(version, part, "."); return part[1] * 1000 + part[2] }
  NR == FNR { released[$1]; next }
  { split($1, half, "@@NVFP4_MOE_")
    if (half[1] in released ? half[2] == "" || number(half[2]) > number(newest) : half[2] != own) {
      print $1 ": expected the version of the release that added it (src/c_api/exports.map)"; bad = 1 } }
  END { exit bad }' "$work/released" "$work/exported"
readelf --dynamic "$1" | grep -q 'SONAME.*\[libnvfp4_moe\.so\.0\]'
