#!/usr/bin/env python3
"""The table of docs/hopper.md, section 7: W4A16 and W4A4 beside their floor, from bench/results/moe-bench-h200.json.

    scripts/moe_bench_table.py bench/results/moe-bench-h200.json

Times are microseconds of a layer step in a CUDA graph. The record's comparison with other libraries is outdated:
python3 -m bench.moe_bench.table shows today's.
"""

import json
import math
import sys

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
PHASES = [("T = 1 to 8", 1, 8), ("T = 16 to 512", 16, 512), ("T = 1024 to 8192", 1024, 8192), ("all", 1, 8192)]
NAMES = {"bf16": "W4A16", "nvfp4": "W4A4"}


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values))


def line(cells):
    return "| " + " | ".join(cells) + " |"


def main():
    with open(sys.argv[1]) as file:
        bench = json.load(file)
    rows = {(r["shape"], r["T"], r["format"]): r for r in bench["rows"]}
    bad = [key for key, row in rows.items() if not row["ok"]]
    print(line(["shape", ""] + [f"T = {t}" for t in TOKENS]))
    print("|---|---|" + "---:|" * len(TOKENS))
    for shape in dict.fromkeys(r["shape"] for r in bench["rows"]):
        bf16 = [rows[shape, t, "bf16"] for t in TOKENS]
        nvfp4 = [rows[shape, t, "nvfp4"] for t in TOKENS]
        print(line([shape, "W4A16, us"] + [f"{r['us']:.0f}" for r in bf16]))
        print(line(["", "/ floor"] + [f"{r['over_floor']:.2f}" for r in bf16]))
        print(line(["", "W4A4 / W4A16"] + [f"{a['us'] / b['us']:.2f}" for a, b in zip(nvfp4, bf16, strict=True)]))
    print()
    print(line(["geometric means", "W4A16 / floor", "W4A4 / floor", "W4A4 / W4A16"]))
    print("|---|---:|---:|---:|")
    for title, first, last in PHASES:
        cells = [title]
        chosen = {f: [r for r in bench["rows"] if r["format"] == f and first <= r["T"] <= last] for f in NAMES}
        cells += [f"{geometric_mean([r['over_floor'] for r in chosen[name]]):.2f}" for name in NAMES]
        ratios = [rows[r["shape"], r["T"], "nvfp4"]["us"] / r["us"] for r in chosen["bf16"]]
        print(line([*cells, f"{geometric_mean(ratios):.2f}"]))
    print()
    print(f"{len(bench['rows'])} cells, {len(bad)} failed their check.")


if __name__ == "__main__":
    main()
