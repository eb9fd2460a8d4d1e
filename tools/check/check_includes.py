#!/usr/bin/env python3
"""Checks the includes against the layering of docs/explanation/architecture.md.

Prints every violation; exit status 1 if there is one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTRACT = [
    "backend/backend.h",
    "backend/cuda_driver.h",
    "backend/device_exchange.h",
    "backend/device_functions.h",
    "backend/device_peers.h",
    "backend/device_replacement.h",
    "backend/device_sampling.h",
    "backend/device_streams.h",
    "backend/layer_steps.h",
]
CHECKPOINT = ["core/", "io/", "safetensors/", "gguf/", "checkpoint/"]
MOE = [*CHECKPOINT, *CONTRACT, "judge/", "moe/"]
PARALLEL = [*MOE, "exchange/", "parallel/"]
# room -> the allowed includes of its files, as path prefixes under src/ (or include/). src/CMakeLists.txt enforces the
# same.
ALLOWED = {
    "src/core/": ["core/"],
    "src/io/": ["core/", "io/"],
    "src/safetensors/": ["core/", "io/", "safetensors/"],
    "src/gguf/": ["core/", "io/", "safetensors/", "gguf/"],
    "src/checkpoint/": CHECKPOINT,
    "src/convert/": [*CHECKPOINT, "convert/"],
    "src/judge/": ["core/", "judge/"],
    "src/exchange/": ["core/", "exchange/"],
    "src/backend/": ["core/", *CONTRACT],
    "src/backend/reference/": ["core/", *CONTRACT, "backend/reference/"],
    "src/backend/cpu/": ["core/", *CONTRACT, "backend/cpu/"],
    "src/backend/cuda/": ["core/", *CONTRACT, "backend/cuda/"],
    "src/backend/sm80/": ["core/", *CONTRACT, "backend/cuda/", "backend/sm80/"],
    "src/backend/sm90/": ["core/", *CONTRACT, "backend/cuda/", "backend/sm90/"],
    "src/backend/sm100/": ["core/", *CONTRACT, "backend/cuda/", "backend/sm100/"],
    "src/backend/sm120/": ["core/", *CONTRACT, "backend/cuda/", "backend/sm120/"],
    "src/moe/": MOE,
    "src/parallel/": PARALLEL,
    "src/verify/": [*PARALLEL, "verify/"],
    "src/c_api/": [*PARALLEL, "c_api/", "nvfp4_moe/"],
    "include/": ["nvfp4_moe/"],
    "cli/console/": ["core/", "io/json.h", "cli/console/"],
    # target.h: only macros, for the loops that measure the peak rate of an instruction set
    "cli/bench/": [*PARALLEL, "backend/cpu/target.h", "cli/console/", "cli/bench/"],
    "cli/": [*PARALLEL, "convert/", "verify/", "cli/", "nvfp4_moe/"],
    "python/": [*PARALLEL, "convert/", "verify/", "nvfp4_moe/", "cli/verbs/command_line.h"],
    # A separate project, which includes nothing of the library.
    "ptxemu/": ["cudart/", "order/", "runtime/", "cutlass/", "cute/"],
}
# The reference checks core's codec, so it must not use it.
FORBIDDEN = {"src/backend/reference/": ["core/float_formats.h", "core/quantize.h", "core/dequantize.h"]}
# External headers that only some rooms may include.
OUTSIDE = {
    "src/core/": r"(nlohmann|fmt|CLI|cuda)",
    "include/": r"(nlohmann|fmt|CLI|cuda|torch)",
    "src/backend/cpu/": r"cuda",
    "src/backend/reference/": r"cuda",
    "cli/": r"(cuda|nlohmann)",
    "python/": r"(cuda|nlohmann)",
    "src/": r"(torch|CLI)",
}
OUTSIDE["src/io/"] = r"cuda"
# Use Json instead: trees of nlohmann::json allocate in their destructor, which ends the process if memory runs out.
OUTSIDE |= {
    f"src/{room}/": r"(cuda|nlohmann)"
    for room in ("safetensors", "gguf", "checkpoint", "convert", "judge", "moe", "parallel", "verify", "c_api")
}
INCLUDE = re.compile(r'\s*#include\s+(["<])([^">]+)[">]')


def room_of(path):
    return max((room for room in ALLOWED if path.startswith(room)), key=len, default=None)


def violations(file, path, room):
    for number, line in enumerate(file.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, name = match.group(1) == '"', match.group(2)
        beside = (file.parent / name).exists()
        if quoted and not beside and not any(name.startswith(prefix) for prefix in ALLOWED[room]):
            yield f"{path}:{number}: {room} may not include {name}"
        for prefix, names in FORBIDDEN.items():
            if path.startswith(prefix) and name in names:
                yield f"{path}:{number}: {prefix} keeps tables of its own, not {name}"
        for prefix, pattern in OUTSIDE.items():
            if path.startswith(prefix) and not quoted and re.match(pattern, name):
                yield f"{path}:{number}: {prefix} may not include <{name}>"


def names_of_the_library():
    """Yields lines of ptxemu/ that name the library; ptxemu must be usable without it."""
    for file in sorted(path for path in (ROOT / "ptxemu").rglob("*") if path.is_file() and path.suffix != ".pyc"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if re.search(r"nvfp4[_-]moe", line, re.IGNORECASE):
                yield f"{file.relative_to(ROOT).as_posix()}:{number}: ptxemu/ may not name the library"


TYPE = re.compile(r"(?:struct|class|enum class|union) (?:alignas\(.*\) )?(\w+)(?: final)?(?: :.*)? \{")


def types_of(file):
    """Yields (line, name with namespaces) of the types that a file defines in named namespaces."""
    spaces = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if opened := re.match(r"(?:inline )?namespace ?([\w:]*) \{", line):
            spaces.append(opened.group(1))
        elif re.match(r"\}  // (?:inline )?namespace", line):
            spaces.pop()
        elif (found := TYPE.match(line)) and spaces and all(spaces):
            yield number, "::".join([*spaces, found.group(1)])


def types_of_one_name(files):
    """Yields types that two files define: the linker takes one file's functions for both, without a word."""
    places = {}
    for file in files:
        for number, name in types_of(file):
            place = f"{file.relative_to(ROOT).as_posix()}:{number}"
            if name in places:
                yield f"{place}: {name} is also defined at {places[name]}"
            places.setdefault(name, place)


def main():
    bad = [*names_of_the_library()]
    library = [file for top in ("src", "cli", "python") for file in sorted((ROOT / top).rglob("*"))]
    bad += types_of_one_name(file for file in library if file.suffix in (".h", ".cpp", ".cu", ".cuh"))
    for top in ("src", "include", "cli", "python", "ptxemu"):
        for file in sorted((ROOT / top).rglob("*")):
            path = file.relative_to(ROOT).as_posix()
            if file.suffix in (".h", ".hpp", ".cpp", ".cu", ".cuh") and room_of(path):
                bad += violations(file, path, room_of(path))
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
