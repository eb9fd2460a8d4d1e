#!/usr/bin/env python3
"""Measures with ncu what limits the Hopper GEMMs: one launch of gemm1 and of gemm2 per cell of the layer benchmark,
W4A16.

    bench/measure_limits.py --out bench/results/ncu-limits-h200-1a49611.json [--bench
    build/gpu/bench/bench_hopper_layers]

Shares are relative to what the machine sustains during the kernel, at the current clock and with the current content of
L2. ncu serializes kernels, so none overlaps its neighbour. Stalls: the largest reason, as a share of a warp's cycles
between two instructions.
"""

import argparse
import csv
import io
import pathlib
import re
import subprocess
import sys

import records

CELLS = {
    "v4pro_ep8": [1, 64, 1024, 4096],
    "v4flash": [1, 64, 512, 1024, 8192],
    "qwen30b": [1, 64, 256, 1024, 8192],
    "mixtral": [1, 64, 256, 8192],
}
FIGURES = {
    "us": "gpu__time_duration.sum",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "clock_ghz": "smsp__cycles_elapsed.avg.per_second",
}
STALL = re.compile(r"smsp__average_warps?_issue_stalled_(\w+?)_per_issue_active\.ratio")


def profile(bench, shape, tokens):
    command = [
        "ncu", "--graph-profiling", "node", "--clock-control", "none", "--cache-control", "none", "--csv", "--page",
        "raw", "--section", "WarpStateStats", "--metrics", ",".join(FIGURES.values()), "--kernel-name",
        "regex:sm90_gemm", "--launch-skip", "2", "--launch-count", "2", bench, shape, "--tokens", str(tokens),
        "--sm90-only",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        sys.exit(f"measure_limits.py: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[starts[0] :]))))
    units, kernels = rows[0], rows[1:]
    for kernel in kernels:
        yield kernel, units


def number(text):
    try:
        return float(text.replace(",", ""))
    except (ValueError, AttributeError):
        return None


def figures_of(kernel, units):
    found = {name: number(kernel.get(metric)) for name, metric in FIGURES.items()}
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}
    if found["us"] is not None:
        found["us"] *= scale.get(units.get(FIGURES["us"], ""), 1)
    stalls = {}
    for key, value in kernel.items():
        match = STALL.fullmatch(key or "")
        if match and number(value) is not None:
            stalls[match[1]] = number(value)
    found["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:3])
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default="build/gpu/bench/bench_hopper_layers")
    parser.add_argument("--out", help="JSON file, written again after every cell")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cells", help="SHAPE:T,SHAPE:T,...; default those of the docs")
    options = parser.parse_args()
    cells = [(shape, t) for shape, tokens in CELLS.items() for t in tokens]
    if options.cells:
        cells = [(shape, int(t)) for shape, t in (cell.split(":") for cell in options.cells.split(","))]
    device = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    result = {
        "schema": 1,
        "what": "ncu: what limits gemm1 and gemm2, W4A16",
        "device": device.stdout.splitlines()[0] if device.stdout else "",
        "commit": options.commit,
        "command": " ".join("FILE" if word == options.out else word for word in sys.argv),
        "metrics": FIGURES,
        "rows": [],
    }
    print("| shape | T | kernel | us | memory % | L2 % | issue % | ALU % | FMA % | tensor % | stalls |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for shape, tokens in cells:
        for kernel, units in profile(options.bench, shape, tokens):
            name = "gemm1" if "gemm1" in kernel["Kernel Name"] else "gemm2"
            row = {"shape": shape, "T": tokens, "kernel": name, **figures_of(kernel, units)}
            result["rows"].append(row)
            shown = [row[key] for key in ("memory", "l2", "issue", "alu", "fma", "tensor")]
            cells_text = ["-" if value is None else f"{value:.0f}" for value in shown]
            stalls = ", ".join(f"{key} {value:.1f}" for key, value in row["stalls"].items())
            us = "-" if row["us"] is None else f"{row['us']:.1f}"
            print("| " + " | ".join([shape, str(tokens), name, us, *cells_text, stalls]) + " |", flush=True)
        if options.out:
            pathlib.Path(options.out).write_text(records.text(result))


if __name__ == "__main__":
    main()
