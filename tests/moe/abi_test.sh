#!/bin/sh
# Compares the C ABI with the last release's, by abidiff. Functions, structs and constants may be added, and a struct may grow
# at its end. Every other change fails. Then changes are planted, to prove that they are found.
# usage: abi_test.sh HEADER BASELINE CC
#        abi_test.sh --declarations HEADER VERSION   prints a new baseline
#
# Both sides are compiled from declarations, with an empty body for each function. They are the library's ABI, because its
# sources include the header, and a compiler refuses a definition of a C function that differs from its declaration. The
# library itself would have to be compiled again, with debug information.
set -eu

# Prints a header without its comments.
declarations() { sed -zE 's!/\*([^*]|\*+[^*/])*\*+/!!g; s/\s*\n(\s*\n)*/\n/g' "$1"; }

if [ "$1" = --declarations ]; then
  echo "/* The declarations of $3, without comments: the baseline of abi_test.sh, which writes this file. */"
  declarations "$2"
  exit
fi
header=$1 baseline=$2 cc=$3
command -v abidiff >/dev/null || { echo "skipped: abidiff is not installed (Debian: abigail-tools)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# library DECLARATIONS NAME: makes NAME.so. An anonymous enum is named after its first constant and is the parameter of one more
# function, since abidiff compares the types that functions reach.
library() {
  sed -zE 's/enum \{\s*(NVFP4_MOE_[A-Z0-9_]+)([^}]*\};)/enum first_\1 { \1\2 void constants_\1(enum first_\1 value) {}/g
    s/(NVFP4_MOE_API [^;]*\));/\1 {}/g' "$1" >"$work/$2.c"
  "$cc" -std=gnu2x -w -g -shared -fPIC "$work/$2.c" -o "$work/$2.so"
}

# Every struct begins with its size, so a library can tell how much of it a program has.
cat >"$work/allowed" <<'TXT'
[suppress_type]
  type_kind = struct
  has_data_member_inserted_at = end
  has_size_change = yes
TXT

# compare DECLARATIONS: exit status 0 if programs of the last release run with these. Prints the report of abidiff.
compare() {
  library "$1" new || exit 1 # set -e does not hold here: an older new.so would be compared
  # Macros are not in the debug information.
  grep '^#define NVFP4_MOE_[A-Z_]* [^_]' "$work/old.c" | while read -r line; do
    grep -qxF "$line" "$work/new.c" || { echo "changed: $line"; exit 1; }
  done || return 1
  abidiff --no-added-syms --suppressions "$work/allowed" "$work/old.so" "$work/new.so"
}

library "$baseline" old
declarations "$header" >"$work/now"
compare "$work/now" >"$work/report" || { cat "$work/report"; exit 1; }

# planted RESULT SED: changes this header and expects that result, compatible or refused.
planted() {
  sed -E "$2" "$work/now" >"$work/changed"
  ! cmp -s "$work/now" "$work/changed" || { echo "not planted: $2"; exit 1; }
  if compare "$work/changed" >"$work/report" 2>&1; then result=compatible; else result=refused; fi
  test $result = "$1" || { cat "$work/report"; echo "$2: expected $1, got $result"; exit 1; }
}
planted compatible 's/^\} nvfp4_moe_config;/int64_t more; &/'
planted compatible 's/^typedef int32_t nvfp4_moe_dtype;/& enum { NVFP4_MOE_ADDED = 1 };/'
planted compatible 's/^NVFP4_MOE_API int32_t nvfp4_moe_abi_version/NVFP4_MOE_API int nvfp4_moe_added(void);\n&/'
planted refused 's/^  int64_t top_k;/int64_t more; &/'                                  # a field in the middle
planted refused 's/^  int64_t hidden_size;//'                                           # a field less
planted refused 's/^  size_t struct_size;/  uint32_t struct_size;/'                     # another type, in padding
planted refused 's/nvfp4_moe_version\(void\)/nvfp4_moe_version(int more)/'              # a parameter more
planted refused 's/^NVFP4_MOE_API void (nvfp4_moe_text_free)/NVFP4_MOE_API int \1/'     # another result
planted refused 's/^NVFP4_MOE_API int32_t nvfp4_moe_abi_version\(void\);//'             # a function less
planted refused 's/^typedef int32_t nvfp4_moe_dtype;/typedef int64_t nvfp4_moe_dtype;/' # a wider type
planted refused 's/(NVFP4_MOE_DTYPE_F32) = 3/\1 = 7/'                                   # another value
planted refused 's/(NVFP4_MOE_SHARED_EXPERT \(\(int64_t\))-1/\1-2/'
