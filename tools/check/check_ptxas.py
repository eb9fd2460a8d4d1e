#!/usr/bin/env python3
"""Checks ptxas's reports on the CUDA kernels (OBJECT.report, from tools/check/keep_compiler_report.sh) in folders of
objects.

Prints registers by kernel and architecture. Fails if
- a listed kernel is missing from every report, spills registers, or keeps an array in local memory,
- a function that a listed kernel may call spills,
- ptxas serialized wgmma, or
- a kernel's machine code, in the object next to the report, lacks the tensor core instruction that it is written for.
"""

import pathlib
import re
import struct
import sys
from typing import NamedTuple

# Kernels that take most of a layer's time. In mangled names a function's name is between its length and its arguments.
LISTED = ["gemm1_swiglu_kernel", "gemm2_kernel", "quantize_any_type", "round_rows", "combine_tokens", "route_one_cta"]
LISTED += ["quantize_vec8_cta", "requantize_vec8_cta", "route_and_quantize_kernel", "sm90_gather_rows"]
LISTED += [
    "sm90_round_into_rows",
    "sm90_gemm1_kernel",
    "sm90_gemm2_kernel",
    "sm90_gemm1_narrow_or_wide_kernel",
    "sm90_gemm2_narrow_or_wide_kernel",
    "router_gemm_kernel",
    "select_experts_kernel",
    "pack_packets",
    "unpack_packets_kernel",
    "pack_rows_kernel",
    "push_tokens_kernel",
    "push_packets_kernel",
    "push_rows_kernel",
]
LISTED += ["sm100_gemm1_kernel", "sm100_gemm2_kernel", "sm100_bf16_gemm1_kernel", "sm100_bf16_gemm2_kernel"]
LISTED += ["sm120_gemm1_kernel", "sm120_gemm2_kernel"]


class Instruction(NamedTuple):
    """A 16-byte instruction, recognized by the bits in its two words that distinguish it from similar ones."""

    name: str  # in nvdisasm
    masks: tuple[int, int]
    values: tuple[int, int]

    def count(self, code):
        words = struct.unpack(f"<{len(code) // 16 * 2}Q", code[: len(code) // 16 * 16])
        pairs = zip(words[::2], words[1::2], strict=True)
        return sum(all(w & m == v for w, m, v in zip(pair, self.masks, self.values, strict=True)) for pair in pairs)


# The low 12 bits are the opcode. It is the same for MXFP4, whose scales are E8 for 32 elements each, and for sm_100
# also the same for bf16 (UTCHMMA): the other bits are those of .UE4M3, of .4X and of the kind.
OMMA = Instruction("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", (0xFFF, 0xC0000), (0x47F, 0x40000))
UTCOMMA = Instruction("UTCOMMA.4X", (0xC000000000000FFF, 0), (0x80000000000005EA, 0))
UTCHMMA = Instruction("UTCHMMA", (0xC000000000000FFF, 0), (0x5EA, 0))
PRODUCTS = {
    "sm120_gemm1_kernel": OMMA,
    "sm120_gemm2_kernel": OMMA,
    "sm100_gemm1_kernel": UTCOMMA,
    "sm100_gemm2_kernel": UTCOMMA,
    "sm100_bf16_gemm1_kernel": UTCHMMA,
    "sm100_bf16_gemm2_kernel": UTCHMMA,
}
ELF_OF_CUDA = 190  # e_machine

COMPILING = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
# C7517: ptxas inserted a wait, because accumulators are used before the source waits for them.
SERIALIZED = re.compile(r"wgmma.*serializ|C75(10|13|17)", re.IGNORECASE)


def kernels(report):
    """Yields (mangled name, architecture, stack, spill stores, spill loads, registers) for each kernel in a report."""
    current, frame = None, None
    for line in report.splitlines():
        if match := COMPILING.search(line):
            current, frame = match.groups(), None
        elif (match := FRAME.search(line)) and current:
            frame = tuple(map(int, match.groups()))
        elif (match := REGISTERS.search(line)) and current and frame:
            yield *current, *frame, int(match.group(1))
            current, frame = None, None


def called_functions(report):
    """Yields (mangled name, spill stores, spill loads) for each function in a report that is not a kernel."""
    entries, name = set(), None
    for line in report.splitlines():
        if match := COMPILING.search(line):
            entries.add(match.group(1))
        elif match := PROPERTIES.search(line):
            name = match.group(1)
        elif (match := FRAME.search(line)) and name and name not in entries:
            yield name, *map(int, match.groups()[1:])


def machine_code(data):
    """Yields (mangled name, instruction bytes) for each kernel in an object's uncompressed device code."""
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


def is_kernel(listed, mangled):
    return f"{len(listed)}{listed}" in mangled


def products_in(path):
    """Counts, by listed name, the tensor core instructions of each kernel of that name in an object."""
    counts = {}
    for name, code in machine_code(path.read_bytes()):
        for kernel, product in PRODUCTS.items():
            if is_kernel(kernel, name):
                counts.setdefault(kernel, []).append(product.count(code))
    return counts


def main():
    reports = [path for folder in sys.argv[1:] for path in sorted(pathlib.Path(folder).rglob("*.cu.o.report"))]
    seen, bad = {}, []
    for path in reports:
        text = path.read_text()
        bad += [f"{path.name}: {line}" for line in text.splitlines() if SERIALIZED.search(line)]
        any_listed = False
        for name, architecture, stack, stores, loads, registers in kernels(text):
            listed = " ".join(kernel for kernel in LISTED if is_kernel(kernel, name))
            if not listed:
                continue
            any_listed = True
            seen.setdefault(listed, {}).setdefault(architecture, []).append(registers)
            if stack or stores or loads:
                bad.append(f"{listed} {architecture}: {stack} bytes of stack, {stores} spilled, {loads} reloaded")
        if any_listed:
            for name, stores, loads in called_functions(text):
                if stores or loads:
                    bad.append(f"{path.name}: {name}, which is called: {stores} spilled, {loads} reloaded")
    products = {}
    for path in reports:
        for kernel, counts in products_in(path.with_suffix("")).items():
            products.setdefault(kernel, []).extend(counts)
    for kernel in [kernel for kernel in PRODUCTS if kernel in LISTED]:
        counts = products.get(kernel, [])
        compiled = len([r for registers in seen.get(kernel, {}).values() for r in registers])
        if not counts or min(counts) == 0 or len(counts) < compiled:
            bad.append(f"{kernel}: {compiled} compiled, {PRODUCTS[kernel].name} in the machine code: {counts}")
        else:
            print(f"{kernel}: {PRODUCTS[kernel].name} {'/'.join(map(str, sorted(counts)))}")
    found = {kernel for listed in seen for kernel in listed.split()}
    bad += [f"{kernel}: in no report under {', '.join(sys.argv[1:])}" for kernel in LISTED if kernel not in found]
    for kernel, architectures in seen.items():
        text = ", ".join(f"{a} {'/'.join(map(str, sorted(r)))}" for a, r in sorted(architectures.items()))
        print(f"{kernel}: registers {text}")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
