#!/usr/bin/env python3
"""Reads what ptxas said of the CUDA kernels (OBJECT.report, kept by scripts/keep_compiler_report.sh) in folders of objects.

Fails where a listed kernel is missing from every report, spills registers, or keeps an array in local memory, where
ptxas serialized wgmma, and where a kernel's machine code, in the object beside the report, lacks the tensor core
instruction that it is written for. Prints registers by kernel and architecture.
"""

import pathlib
import re
import struct
import sys

# Kernels that a layer's time goes to. In mangled names a function's own name stands between its length and its arguments.
LISTED = ["gemm1_swiglu_kernel", "gemm2_kernel", "quantize_nvfp4", "round_rows", "combine_tokens", "route_one_cta"]
LISTED += ["quantize_vec8_cta", "requantize_vec8_cta", "route_and_quantize_kernel", "sm90_gather_rows"]
LISTED += ["sm90_round_into_rows", "sm90_gemm1_kernel", "sm90_gemm2_kernel", "select_experts_kernel"]
LISTED += ["sm100_gemm1_kernel", "sm100_gemm2_kernel", "sm100_bf16_gemm1_kernel", "sm100_bf16_gemm2_kernel"]
LISTED += ["sm120_gemm1_kernel", "sm120_gemm2_kernel"]

# Block-scaled products of FP4, by bits of an instruction's first word: what nvdisasm calls UTCOMMA.4X (tcgen05.mma
# kind::mxf4nvf4; the two highest bits tell it from other kinds) and OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X (mma.m16n8k64).
TCGEN05_MMA_FP4 = (0xC000000000000FFF, 0x80000000000005EA)
MMA_SYNC_FP4 = (0xFFF, 0x47F)
NEEDS_BLOCK_SCALED_MMA = {
    "sm100_gemm1_kernel": TCGEN05_MMA_FP4,
    "sm100_gemm2_kernel": TCGEN05_MMA_FP4,
    "sm120_gemm1_kernel": MMA_SYNC_FP4,
    "sm120_gemm2_kernel": MMA_SYNC_FP4,
}
ELF_OF_CUDA = 190  # e_machine

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


def machine_code(data):
    """(mangled name, bytes of instructions) of each kernel of the device code that lies uncompressed in an object."""
    start = -1
    while (start := data.find(b"\x7fELF", start + 1)) >= 0:
        if struct.unpack_from("<H", data, start + 18)[0] != ELF_OF_CUDA:
            continue
        (table,) = struct.unpack_from("<Q", data, start + 40)
        size, count, names = struct.unpack_from("<3H", data, start + 58)
        sections = [struct.unpack_from("<2I4Q", data, start + table + i * size) for i in range(count)]
        for section in sections:
            begin = start + sections[names][4] + section[0]
            name = data[begin : data.index(b"\0", begin)].decode()
            if name.startswith(".text."):
                yield name.removeprefix(".text."), data[start + section[4] :][: section[5]]


def block_scaled_products(path):
    """Listed name: how many block-scaled products each kernel of that name has, in an object."""
    counts = {}
    for name, code in machine_code(path.read_bytes()):
        for kernel, (mask, bits) in NEEDS_BLOCK_SCALED_MMA.items():
            if f"{len(kernel)}{kernel}" in name:
                words = struct.unpack(f"<{len(code) // 8}Q", code)[::2]
                counts.setdefault(kernel, []).append(sum(w & mask == bits for w in words))
    return counts


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
    products = {}
    for path in reports:
        for kernel, counts in block_scaled_products(path.with_suffix("")).items():
            products.setdefault(kernel, []).extend(counts)
    for kernel in NEEDS_BLOCK_SCALED_MMA:
        counts = products.get(kernel, [])
        compiled = len([r for registers in seen.get(kernel, {}).values() for r in registers])
        if not counts or min(counts) == 0 or len(counts) < compiled:
            bad.append(f"{kernel}: {compiled} compiled, block-scaled products in the machine code: {counts}")
        else:
            print(f"{kernel}: block-scaled products {'/'.join(map(str, sorted(counts)))}")
    found = {kernel for listed in seen for kernel in listed.split()}
    bad += [f"{kernel}: in no report under {', '.join(sys.argv[1:])}" for kernel in LISTED if kernel not in found]
    for kernel, architectures in seen.items():
        text = ", ".join(f"{a} {'/'.join(map(str, sorted(r)))}" for a, r in sorted(architectures.items()))
        print(f"{kernel}: registers {text}")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
