#!/usr/bin/env python3
"""Installs each wheel of this processor in dist/ into fresh environments without a compiler on PATH, and tests it.

usage: try_wheels.py [--dist dist] [3.10 3.11 ...]

Each wheel is tried in every Python that it serves and that is found. Prints a Markdown table: the wheel, the Python, the
file's size, seconds until `pip install` has ended and from there until a first layer has run, and what pytest says of
tests/python/numpy_only. If a test fails, its output goes to stderr and the exit status is 1, as without a wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_wheels
from build_wheels import ROOT, STABLE_ABI, VERSIONS, find_interpreter

TESTS = ROOT / "tests" / "python" / "numpy_only"
# README's first layer
LAYER = """
import numpy as np, nvfp4_moe
gate, up, down = (np.random.randn(8, *size).astype("f4") for size in [(32, 64), (32, 64), (64, 32)])
config = nvfp4_moe.MoeConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
layer = nvfp4_moe.MoeLayer.from_bf16(config, gate=gate, up=up, down=down)
out = layer.run(np.random.randn(3, 64).astype("f4"), np.array([[0, 1], [2, 3], [7, 0]]), np.full((3, 2), 0.5, "f4"))
assert np.isfinite(out).all() and out.any()
"""


def served(wheel: Path) -> list[str]:
    """Returns the versions of Python that the wheel is for."""
    python, abi = wheel.name.split("-")[2:4]
    version = f"{python[2]}.{python[3:]}"
    return list(VERSIONS[STABLE_ABI:]) if abi == "abi3" else [version]


def try_wheel(wheel: Path, interpreter: Path, folder: Path) -> tuple[str, bool]:
    """Returns the rest of the table's row, and whether all tests passed."""
    build_wheels.run(interpreter, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    options = {"env": environment | kept, "capture_output": True, "text": True, "check": False, "cwd": folder}
    times = [time.monotonic()]
    for command in (["-m", "pip", "install", "-q", "--only-binary", ":all:", wheel.resolve()], ["-c", LAYER]):
        done = subprocess.run([python, *command], **options)
        times.append(time.monotonic())
        if done.returncode != 0:
            return f"{(done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]} |", False
    subprocess.run([python, "-m", "pip", "install", "-q", "pytest"], **options)
    chosen = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-k", "not ten_thousand and not daemon", TESTS]
    tested = subprocess.run([python, "-m", "pytest", *chosen], **options)
    said = (tested.stdout.strip().splitlines() or [tested.stderr[-200:]])[-1]
    if tested.returncode != 0:
        print(tested.stdout + tested.stderr, file=sys.stderr)
    return f"{times[1] - times[0]:.1f} | {times[2] - times[1]:.1f} | {said} |", tested.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs and tests the wheels of dist/.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    options = parser.parse_args()
    wheels = sorted(options.dist.glob(f"*_{platform.machine()}.whl"))
    good, tried = True, 0
    print("| wheel | Python | MB | install, s | first layer, s | tests |\n| --- | --- | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as work:
        for wheel in wheels:
            for version in [version for version in served(wheel) if version in options.versions]:
                interpreter = find_interpreter(version)
                size = f"{wheel.stat().st_size / 1e6:.2f}"
                row, passed = ("not run: no such Python here |", True)
                if interpreter:
                    tried += 1
                    row, passed = try_wheel(wheel, interpreter, Path(work, f"{wheel.stem}-{version}"))
                good &= passed
                print(f"| {wheel.name} | {version} | {size} | {row}", flush=True)
    return 0 if good and tried else 1


if __name__ == "__main__":
    sys.exit(main())
