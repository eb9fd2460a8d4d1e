#!/usr/bin/env python3
"""Checks with readelf that ELF files have the hardening of cmake/hardening.cmake.

    check_hardening.py FILE...

Required: a position-independent file, no executable stack, full RELRO (every address bound before main, then
read-only), no writable and executable segment, no text relocations, and stack protectors and checked copies in the
project's code. Exit status 1 if something is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def readelf(option: str, path: Path) -> str:
    command = ["readelf", "--wide", option, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={"LC_ALL": "C"}).stdout


def faults(path: Path) -> list[str]:
    """Returns what the file lacks, one short text each."""
    header, segments = readelf("--file-header", path), readelf("--program-headers", path)
    dynamic, symbols = readelf("--dynamic", path), readelf("--dyn-syms", path)
    found = []
    if not re.search(r"Type:\s+DYN ", header):
        found.append("not position-independent")
    stack = re.search(r"GNU_STACK.*\s(R[W ][E ])\s+0x", segments)
    if stack is None or "E" in stack.group(1):
        found.append("executable stack")
    if "GNU_RELRO" not in segments:
        found.append("no RELRO segment")
    if not re.search(r"\(FLAGS\).*BIND_NOW|\(FLAGS_1\).*NOW|\(BIND_NOW\)", dynamic):
        found.append("addresses are bound lazily")
    if re.search(r"^\s+LOAD.*\sRWE\s", segments, re.MULTILINE):
        found.append("a segment is writable and executable")
    if "(TEXTREL)" in dynamic:
        found.append("text relocations")
    if not re.search(r"\b__stack_chk_(fail|guard)", symbols):
        found.append("no stack protectors")
    if not re.search(r"\b__\w+_chk\b", symbols.replace("__stack_chk", "")):
        found.append("no checked copies")
    return found


def main() -> int:
    bad = 0
    for name in sys.argv[1:]:
        found = faults(Path(name))
        bad += bool(found)
        print(f"{name}: {', '.join(found) or 'ok'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
