#!/usr/bin/env bash
# fuzz.sh SECONDS [SEED]: builds the libFuzzer targets (preset asan: address and undefined) and runs each for
# SECONDS/targets, one target per core at a time. The same SEED starts every run with the same inputs, so CI repeats what was
# tried before. New inputs are kept in build/fuzz/corpus, and the next run continues from them. Inputs that broke a target are
# in build/fuzz/artifacts. Prints one line per target; exits with 1 if any of them broke.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

seconds=${1:?usage: tools/fuzz.sh SECONDS [SEED]}
seed=${2:-0} # 0: libFuzzer chooses a seed
targets=(safetensors gguf config plan c_api index cache repro exchange csf)
each=$((seconds / ${#targets[@]}))
[ "$each" -ge 1 ] || { echo "fuzz.sh: expected at least ${#targets[@]} seconds, got $seconds" >&2; exit 2; }

mkdir -p build/fuzz
python3 tests/fuzz/make_fuzz_corpus.py build/fuzz/seeds
for step in "cmake --preset asan" "cmake --build build/asan -j ${NVFP4_MOE_JOBS:-$(nproc)} --target ${targets[*]/%/_fuzz}"; do
  $step >build/fuzz.log 2>&1 || { tail -40 build/fuzz.log >&2; exit 1; }
done

# fuzz TARGET: runs a target and prints one line with the result; fails if the target broke.
fuzz() {
  local target=$1 code=0 runs coverage
  local corpus=build/fuzz/corpus/$target log=build/fuzz/$target.log
  mkdir -p "$corpus" build/fuzz/artifacts
  local options=(-seed="$seed" -max_total_time="$each" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=build/fuzz/artifacts/)
  case $target in
    c_api | exchange) options+=(-max_len=2048) ;;
    cache) options+=(-max_len=512) ;;
    gguf) options+=(-max_len=4096) ;;
    *) options+=(-max_len=8192 -dict=build/fuzz/seeds/json.dict) ;;
  esac
  "build/asan/tests/${target}_fuzz" "${options[@]}" "$corpus" "build/fuzz/seeds/$target" >"$log" 2>&1 || code=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  coverage=$(grep -oE 'cov: [0-9]+ ft: [0-9]+' "$log" | tail -1) || true
  printf '%-12s %4d s  %10s runs  %s  %s\n' "$target" "$each" "${runs:-?}" "${coverage:-no coverage}" \
    "$([ $code -eq 0 ] && echo 'nothing found' || echo "FAILED, see $log")"
  [ $code -eq 0 ] || { grep -E -A 25 'ERROR|not so:|runtime error' "$log" | head -60 >&2; return 1; }
}
export -f fuzz
export each seed
# One target per core, as many at a time as there are cores.
printf '%s\n' "${targets[@]}" | xargs -P "${NVFP4_MOE_JOBS:-$(nproc)}" -I '{}' bash -euo pipefail -c 'fuzz {}' || exit 1
