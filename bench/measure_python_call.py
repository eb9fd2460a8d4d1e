#!/usr/bin/env python3
"""Measures the overhead of a call from Python in microseconds: the median and the least of five medians.

    PYTHONPATH=build/cpu/python python bench/measure_python_call.py OUT.json

The batch has no tokens, so the library returns after its checks and all the time is the binding's.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import nvfp4_moe
import nvfp4_moe.torch_op  # noqa: F401
import records
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/python/numpy_only"))

import layers  # noqa: E402


def medians_us(call, rounds: int = 5, repeats: int = 4000) -> list[float]:
    medians = []
    for _ in range(rounds):
        times = []
        for _ in range(repeats):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
        medians.append(statistics.median(times) / 1e3)
    return medians


def main() -> None:
    layer = layers.layer()
    numpy_inputs = layers.batch(0)
    inputs = [torch.from_numpy(array) for array in numpy_inputs]
    out, numpy_out = torch.empty_like(inputs[0]), np.empty_like(numpy_inputs[0])
    op, op_out, handle = torch.ops.nvfp4_moe.moe_layer.default, torch.ops.nvfp4_moe.moe_layer.out, layer.handle
    calls = {
        "run_torch_out": lambda: layer.run(*inputs, out),
        "run_torch": lambda: layer.run(*inputs),
        "op_out": lambda: op_out(*inputs, handle, out=out),
        "op": lambda: op(*inputs, handle),
        "run_numpy_out": lambda: layer.run(*numpy_inputs, numpy_out),
    }
    nothing = min(medians_us(lambda: None))
    rows = {}
    for name, call in calls.items():
        medians = medians_us(call)
        rows[name] = {
            "median_us": round(statistics.median(medians) - nothing, 3),
            "least_us": round(min(medians) - nothing, 3),
        }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    result = {
        "device": next(
            line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")
        ),
        "commit": commit.stdout.strip(),
        "command": "PYTHONPATH=build/cpu/python python bench/measure_python_call.py",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "calls": rows,
    }
    text = records.text(result).rstrip()
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
