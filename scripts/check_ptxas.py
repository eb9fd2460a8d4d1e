#!/usr/bin/env python3
"""Reads what ptxas said of the CUDA kernels (OBJECT.report, kept by scripts/keep_compiler_report.sh) in folders of objects.

Fails where a listed kernel is missing from every report, spills registers, or keeps an array in local memory, and where
ptxas serialized wgmma. Prints registers by kernel and architecture.
"""

import pathlib
import re
import sys

# Kernels that a layer's time goes to. In mangled names a function's own name stands between its length and its arguments.
LISTED = ["gemm1_swiglu_kernel", "gemm2_kernel", "quantize_nvfp4", "round_rows", "combine_tokens", "route_one_cta"]
LISTED += ["quantize_vec8_cta", "requantize_vec8_cta", "route_and_quantize_kernel", "sm90_gather_rows"]
LISTED += ["sm90_round_into_rows", "sm90_gemm1_kernel", "sm90_gemm2_kernel", "select_experts_kernel"]

COMPILING = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(r"wgmma.*serializ|C75(10|13)", re.IGNORECASE)


def kernels(report):
    """(mangled name, architecture, stack, spill stores, spill loads, registers) of each kernel in a report."""
    current, frame = None, None
    for line in report.splitlines():
        if match := COMPILING.search(line):
            current = match.groups()
        elif (match := FRAME.search(line)) and current:
            frame = tuple(map(int, match.groups()))
        elif (match := REGISTERS.search(line)) and current and frame:
            yield *current, *frame, int(match.group(1))
            current, frame = None, None


def main():
    reports = [path for folder in sys.argv[1:] for path in sorted(pathlib.Path(folder).rglob("*.cu.o.report"))]
    seen, bad = {}, []
    for path in reports:
        text = path.read_text()
        bad += [f"{path.name}: {line}" for line in text.splitlines() if SERIALIZED.search(line)]
        for name, architecture, stack, stores, loads, registers in kernels(text):
            listed = " ".join(kernel for kernel in LISTED if f"{len(kernel)}{kernel}" in name)
            if not listed:
                continue
            seen.setdefault(listed, {}).setdefault(architecture, []).append(registers)
            if stack or stores or loads:
                bad.append(f"{listed} {architecture}: {stack} bytes of stack, {stores} spilled, {loads} reloaded")
    found = {kernel for listed in seen for kernel in listed.split()}
    bad += [f"{kernel}: in no report under {', '.join(sys.argv[1:])}" for kernel in LISTED if kernel not in found]
    for kernel, architectures in seen.items():
        text = ", ".join(f"{a} {'/'.join(map(str, sorted(r)))}" for a, r in sorted(architectures.items()))
        print(f"{kernel}: registers {text}")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
