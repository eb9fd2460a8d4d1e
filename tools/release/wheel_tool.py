#!/usr/bin/env python3
"""Finds a wheel in dist/ that was made of this tree's sources, for ./dev demo, which then compiles nothing.

usage: wheel_tool.py [--dist dist]    unpacks the wheel for this Python and prints the path of its nvfp4-moe
       wheel_tool.py --sources        prints the hash of the sources, which each wheel carries (nvfp4_moe/_sources.txt)

Exit status 1 if there is no such wheel; the reason is on stderr if there are others.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# All that the module and the tool are compiled from
SOURCES = ("CMakeLists.txt", "CMakePresets.json", "pyproject.toml", "cmake", "include", "src", "cli",
           "python/CMakeLists.txt", "python/exports.map", "python/stub.pat", "python/src", "python/nvfp4_moe")  # fmt: skip
RECORD = "nvfp4_moe/_sources.txt"


def hash_sources(root: Path) -> str:
    """Returns a SHA-256 over the names and bytes of SOURCES."""
    named = [root / name for name in SOURCES]
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("*"))]
    hashed = hashlib.sha256()
    for file in sorted(files):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
            data = file.read_bytes()
            hashed.update(f"{file.relative_to(root)} {len(data)}\n".encode() + data)
    return hashed.hexdigest()


def find_wheel(dist: Path, sources: str) -> Path | None:
    """Returns the wheel for this interpreter and processor that records these sources."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(dist.glob(f"nvfp4_moe-*_{platform.machine()}.whl")):
        python, abi = wheel.name.split("-")[2:4]
        if python != version and (abi != "abi3" or sys.version_info < (3, int(python[3:]))):
            continue
        with zipfile.ZipFile(wheel) as opened:
            recorded = opened.read(RECORD).decode().strip() if RECORD in opened.namelist() else "none"
        if recorded == sources:
            return wheel
        print(f"{wheel}: not used, it was made of other sources than this tree's", file=sys.stderr)
    return None


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpacks the wheel and returns its tool. Nothing is installed, because the tool needs no other package."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    tool = folder / "nvfp4-moe"  # Python finds the package next to a script first
    tool.write_text(f"#!{sys.executable}\nimport sys\n\nfrom nvfp4_moe._tool import main\n\nsys.exit(main())\n")
    tool.chmod(0o755)
    return tool


def main() -> int:
    parser = argparse.ArgumentParser(description="The tool of a wheel that was made of this tree's sources.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--sources", action="store_true", help="print the hash of the sources")
    options = parser.parse_args()
    sources = hash_sources(ROOT)
    if options.sources:
        print(sources)
        return 0
    wheel = find_wheel(options.dist, sources)
    if wheel is None:
        return 1
    tool = unpack(wheel, ROOT / "build" / "demo-wheel")
    told = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    if told.stdout.strip() != wheel.name.split("-")[1]:
        print(f"{wheel}: not used, its tool does not run here: {told.stderr.strip()[-200:]}", file=sys.stderr)
        return 1
    print(f"{wheel}: made of this tree's sources, so nothing is compiled", file=sys.stderr)
    print(tool)
    return 0


if __name__ == "__main__":
    sys.exit(main())
