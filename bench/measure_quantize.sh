#!/usr/bin/env bash
# Measures quantize on a synthesized bf16 checkpoint (default 4 GiB): wall time, rate, peak anonymous memory; and what
# one rank of eight reads from storage. Prints JSON; --out FILE writes it too (bench/results/).
#   bench/measure_quantize.sh [--size 4GiB] [--build build/cpu] [--dir DIR] [--out FILE] [-- quantize options...]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
size=4GiB build=build/cpu dir="" out=""
while [ $# -gt 0 ]; do
  case $1 in
    --size) size=$2; shift 2 ;;
    --build) build=$2; shift 2 ;;
    --dir) dir=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --) shift; break ;;
    *) echo "measure_quantize.sh: unknown option $1" >&2; exit 2 ;;
  esac
done
tool=$build/cli/nvfp4-moe load_rank=$build/tests/load_rank
work=$(mktemp -d -p "${dir:-${TMPDIR:-/tmp}}" nvfp4_moe_measure_XXXXXX)
trap 'rm -rf "$work"' EXIT

"$tool" synthesize "$work/bf16" --of-size "$size" --quiet --json >"$work/synthesize.json"
# The peak is polled: what counts is what stays allocated for a step of the stream, which lasts far longer than a poll.
"$tool" quantize "$work/bf16" "$work/nvfp4" --quiet --json "$@" >"$work/quantize.json" &
pid=$!
peak_kb=0 samples=0
while line=$(grep RssAnon "/proc/$pid/status" 2>/dev/null); do
  set -- $line
  [ "$2" -gt "$peak_kb" ] && peak_kb=$2
  samples=$((samples + 1))
  sleep 0.01
done
wait "$pid"
"$load_rank" "$work/nvfp4" 8 >/dev/null  # its own pages are in memory from here on
"$load_rank" "$work/nvfp4" 8 >"$work/rank.json"

python3 - "$work" "$peak_kb" "$samples" "$size" "$out" <<'PYTHON'
import json, os, pathlib, re, subprocess, sys

work, peak_kb, samples, size, out = sys.argv[1:]
load = lambda name: json.loads(pathlib.Path(work, name).read_text())
quantize, rank = load("quantize.json"), load("rank.json")
cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
source = sum(f.stat().st_size for f in pathlib.Path(work, "bf16").glob("*.safetensors"))
written = sum(f.stat().st_size for f in pathlib.Path(work, "nvfp4").glob("*.safetensors"))
seconds = quantize["elapsed_s"]
git = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True).stdout.strip()
result = {
    "schema": 1,
    "what": "quantize",
    "device": f"{cpu.group(1) if cpu else 'unknown'}, {os.cpu_count()} threads",
    "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
    "command": f"bench/measure_quantize.sh --size {size}",
    "load_average_1min": os.getloadavg()[0],
    "source_bytes": source,
    "written_bytes": written,
    "seconds": round(seconds, 2),
    "source_mb_per_s": round(source / seconds / 1e6, 1),
    "peak_anonymous_bytes": int(peak_kb) * 1024,
    "peak_samples": int(samples),
    "mean_sqnr_db": quantize.get("mean_sqnr_db"),
    "rank_of_eight_read_bytes": rank["read_bytes"],
    "rank_of_eight_checkpoint_bytes": rank["checkpoint_bytes"],
    "rank_of_eight_share": round(rank["read_bytes"] / rank["checkpoint_bytes"], 4),
    # Of the experts alone: 9 bytes for every 16 weights.
    "rank_of_eight_share_of_experts": round(rank["read_bytes"] / (quantize["expert_source_bytes"] / 2 * 9 / 16), 4),
}
text = json.dumps(result, indent=2)
print(text)
if out:
    pathlib.Path(out).write_text(text + "\n")
ok = result["peak_anonymous_bytes"] < 1e9 and result["rank_of_eight_share_of_experts"] < 1 / 7
sys.exit(0 if ok else 1)
PYTHON
