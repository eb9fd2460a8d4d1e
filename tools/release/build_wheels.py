#!/usr/bin/env python3
"""Builds the source distribution, and from it one wheel for each requested Python version (default: all that are
found).

usage: build_wheels.py [--out dist] [--library LIBRARY] [3.11 3.12 ...]

The library does not depend on Python: LIBRARY (libnvfp4_moe_internal.a of the same source) is linked into every wheel,
and only the bindings are compiled for each. Without it every wheel compiles everything, as `pip install .` does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# A version is usable if it can make environments and compile extensions.
USABLE = (
    "import ensurepip, os, sys, sysconfig, venv; "
    "assert os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h')); "
    "print('%d.%d' % sys.version_info[:2])"
)


def run(*command: object) -> str:
    """Runs a command and returns its output. On failure raises with the end of the output."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-6000:]
        raise RuntimeError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{said}")
    return done.stdout


def find_interpreter(version: str) -> Path | None:
    """Finds the first interpreter with that version, ensurepip and Python.h: this one, on PATH, or of pyenv."""
    folders = [Path(sys.executable).parent, *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    folders += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for folder in folders:
        candidate = folder / f"python{version}"
        if candidate.is_file():
            told = subprocess.run([candidate, "-c", USABLE], capture_output=True, text=True, check=False)
            if told.returncode == 0 and told.stdout.strip() == version:
                return candidate
    return None


def make_environment(directory: Path, *packages: object, interpreter: Path) -> Path:
    """Makes a virtual environment of that interpreter with these packages; returns its python."""
    run(interpreter, "-m", "venv", "--clear", directory)
    python = directory / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return python


def make_backend(work: Path, interpreter: Path) -> Path:
    """Makes the build environment with exactly the requirements of pyproject.toml; reused while they do not change."""
    required = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    directory = work / f"backend-{interpreter.name}"
    stamp = directory / "requires"
    if not stamp.exists() or stamp.read_text() != required:
        make_environment(directory, *re.findall(r'"([^"]+)"', required), interpreter=interpreter)
        stamp.write_text(required)
    return directory / "bin" / "python"


def build_sdist(out: Path, work: Path, interpreter: Path) -> Path:
    """Builds the source distribution in `out`."""
    hook = (
        "import os, sys; from scikit_build_core.build import build_sdist; "
        "os.chdir(sys.argv[1]); print(build_sdist(sys.argv[2]))"
    )
    out.mkdir(parents=True, exist_ok=True)
    return out / run(make_backend(work, interpreter), "-c", hook, ROOT, out.resolve()).splitlines()[-1]


def build_wheel(source: Path, out: Path, work: Path, interpreter: Path, prebuilt: Path | None = None) -> Path:
    """Builds the interpreter's wheel in `out` from `source`, an sdist or a source tree.

    `prebuilt` is its library (.a), or its module for this interpreter (.so); then nothing is compiled.
    """
    python = make_backend(work, interpreter)
    options = []
    if prebuilt:
        name = "NVFP4_MOE_PREBUILT_MODULE" if prebuilt.suffix == ".so" else "NVFP4_MOE_PREBUILT"
        options = [f"--config-settings=cmake.define.{name}={prebuilt.resolve()}"]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", fresh, *options, source)
        (wheel,) = Path(fresh).glob("*.whl")
        return wheel.replace(out / wheel.name)


def main() -> int:
    parser = argparse.ArgumentParser(description="The source distribution, and one wheel for each Python version.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="environments, kept between runs")
    parser.add_argument("--library", type=Path, help="libnvfp4_moe_internal.a of this source")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default: all found")
    options = parser.parse_args()
    unknown = set(options.versions) - set(VERSIONS)
    if unknown:
        parser.error(f"Python {', '.join(sorted(unknown))}: expected {', '.join(VERSIONS)}")
    found = {version: find_interpreter(version) for version in options.versions or VERSIONS}
    missing = [version for version, interpreter in found.items() if interpreter is None]
    if missing and (options.versions or len(missing) == len(found)):
        print(f"Python {', '.join(missing)}: no interpreter with venv and headers on PATH or in pyenv", file=sys.stderr)
        return 2
    interpreters = [interpreter for interpreter in found.values() if interpreter is not None]
    sdist = build_sdist(options.out, options.work, interpreters[0])
    print(sdist)
    for interpreter in interpreters:
        print(build_wheel(sdist, options.out, options.work, interpreter, options.library), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
