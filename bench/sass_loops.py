"""Finds the loop over k in the machine code of kernels in a build's objects, and counts its instructions.

Uses nvdisasm (from CUDA, or from PyPI's nvidia-cuda-nvdisasm).
"""

import pathlib
import re
import struct
import subprocess
import tempfile

ELF_OF_CUDA = 190  # e_machine
NO_BITS = 8  # sh_type of a section that takes no bytes of the file
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);")
LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
TARGET = re.compile(r"`\((\.L\w+)\)")
WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")


def cubins(data):
    """Yields the uncompressed device code in an object, file by file."""
    start = -1
    while (start := data.find(b"\x7fELF", start + 1)) >= 0:
        if struct.unpack_from("<H", data, start + 18)[0] != ELF_OF_CUDA:
            continue
        programs, sections = struct.unpack_from("<2Q", data, start + 32)
        program_size, program_count, section_size, section_count = struct.unpack_from("<4H", data, start + 54)
        end = max(sections + section_size * section_count, programs + program_size * program_count)
        for i in range(section_count):
            header = struct.unpack_from("<2I4Q", data, start + sections + i * section_size)
            if header[1] != NO_BITS:
                end = max(end, header[4] + header[5])
        yield data[start : start + end]


def disassembled(path, nvdisasm):
    """Returns {mangled kernel: text of its instructions} for an object."""
    kernels = {}
    for cubin in cubins(pathlib.Path(path).read_bytes()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = subprocess.run([nvdisasm, "-c", "-hex", file.name], capture_output=True, text=True, check=True)
        for part in re.split(r"^\.text\.", done.stdout, flags=re.MULTILINE)[1:]:
            name, _, text = part.partition(":")
            kernels[name] = text
    return kernels


def loop_over_k(text, product):
    """Returns the shortest loop with the most instructions whose names begin with `product`; None if none has any.

    instructions: of one pass, with waits taken once. clocks_of_one_warp: the sum of the issue delays that the compiler
    encodes in the instructions (4 bits from bit 105 on), which is the time of one warp without waits for memory and
    barriers. before_first_load: the part up to the first LDSM, or to the first product without one, which does not grow
    with the rows of a tile.
    """
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label.group(1)] = len(instructions)
        elif match := INSTRUCTION.search(line):
            instructions.append([match.group(2), match.group(3), 0])
        elif instructions and (word := WORD.search(line)):
            instructions[-1][2] = int(word.group(1), 16) >> 41 & 0xF
    loops = []
    for at, (name, operands, _) in enumerate(instructions):
        target = TARGET.search(operands)
        if name.startswith("BRA") and target and labels.get(target.group(1), at + 1) <= at:
            begin = labels[target.group(1)]
            names = [name for name, _, _ in instructions[begin : at + 1]]
            clocks = sum(stall for _, _, stall in instructions[begin : at + 1])
            loops.append((sum(name.startswith(product) for name in names), -len(names), names, clocks))
    if not loops or max(loops)[0] == 0:
        return None
    _, _, names, clocks = max(loops)
    first = next(i for i, name in enumerate(names) if name.startswith(("LDSM", product)))
    families = {}
    for name in names:
        family = name.split(".")[0]
        families[family] = families.get(family, 0) + 1
    return {
        "instructions": len(names),
        "clocks_of_one_warp": clocks,
        "products": sum(name.startswith(product) for name in names),
        "before_first_load": first,
        "families": dict(sorted(families.items(), key=lambda item: (-item[1], item[0]))),
    }
