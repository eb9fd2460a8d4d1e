#!/bin/sh
# The shared library shows exactly the functions that its header declares.
# usage: exports_test.sh LIBRARY HEADER
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nm -D --defined-only "$1" | awk '{print $3}' | sort >"$work/exported"
grep -o 'nvfp4_moe_[a-z0-9_]*(' "$2" | tr -d '(' | sort -u >"$work/declared"
test "$(wc -l <"$work/declared")" -gt 30
diff "$work/declared" "$work/exported"
