#!/usr/bin/env python3
"""Makes the files of a release from a clean clone of this commit, with the same bytes on each run.

usage: release.py VERSION [--cpu] [--rehearse] [--out dist]
       release.py --lint

Writes to dist/: what the verbs of STEPS make, RELEASE_NOTES.md (the changelog's section), the bill of materials
(CycloneDX) and SHA256SUMS. Refuses changed or untracked files, a VERSION that is not CMakeLists.txt's, and a changelog
without a dated section for it. --lint only checks .github/workflows and containers/, as each release does first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sbom import make_sbom, validate

ROOT = Path(__file__).resolve().parents[2]
# The clone that is built. Its path is the same on every host, because nvcc puts a hash of it into the names of kernels.
SOURCE = Path("/tmp/nvfp4-moe-release")
# The commands of ./dev that make files of a release, and the files in dist/ that each must leave.
STEPS = {
    "wheel": ("nvfp4_moe-*.tar.gz", "nvfp4_moe-*.whl"),
    "wheel --cuda": ("nvfp4_moe_cu13-*.whl",),
    "package --make": ("*.deb",),
}
LINTERS = (
    ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/*.yml"),
    ("zizmor", "--offline", "--quiet", "--no-progress", ".github/workflows/*.yml"),
    ("hadolint", "containers/Dockerfile.*"),
)


class Refused(Exception):
    """The tree is not one to release. The message names the thing, what was expected and what came."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def check_version(version: str, cmake: str) -> None:
    declared = re.search(r"project\(nvfp4_moe VERSION ([0-9.]+)", cmake)[1]
    if version != declared:
        raise Refused(f"version: expected {declared}, as in CMakeLists.txt, got {version}")


def release_notes(version: str, changelog: str, rehearse: bool) -> str:
    """Returns the changelog's section. Relative links, which lead nowhere outside the repository, become their text."""
    section = re.search(rf"^## \[{re.escape(version)}\] - (.+)\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    if section is None:
        raise Refused(f"CHANGELOG.md: expected a section '## [{version}] - DATE', found no such line")
    dated = re.fullmatch(r"\d{4}-\d\d-\d\d", section[1])
    if not dated and not rehearse:
        raise Refused(f"CHANGELOG.md: expected a date for {version}, got '{section[1]}' (--rehearse accepts it)")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", section[2]).strip() + "\n"


def check_clean() -> None:
    changed = git("status", "--porcelain").splitlines()
    if changed:
        raise Refused(f"working tree: expected no changed or untracked files, got {len(changed)}: {changed[0]}")


def check_compilers(cpu: bool) -> None:
    if not cpu and shutil.which("nvcc") is None:
        raise Refused("nvcc: expected on PATH, found no such program (--cpu leaves out the CUDA kernels)")


def lint() -> None:
    """Runs the linters of this environment over the workflows and the container files."""
    for tool, *arguments in LINTERS:
        files = [str(path) for path in sorted(ROOT.glob(arguments.pop()))]
        subprocess.run([Path(sys.executable).parent / tool, *arguments, *files], cwd=ROOT, check=True)


def build_environment(source: Path, epoch: int, cpu: bool) -> dict[str, str]:
    """Everything that would otherwise differ between two builds: time, locale, paths, maintainer, build backend."""
    paths = f"-ffile-prefix-map={source}=."
    name, address = git("log", "-1", "--format=%an%n%ae").splitlines()
    fixed = {
        "SOURCE_DATE_EPOCH": str(epoch),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "DEBFULLNAME": name,
        "DEBEMAIL": address,
        "CFLAGS": paths,
        "CXXFLAGS": paths,
        "CUDAFLAGS": f"-Xcompiler={paths}",
        "PIP_CONSTRAINT": str(source / "python/requirements-release.txt"),
    }
    # CMake then finds no compiler for CUDA.
    return {**os.environ, **fixed, **({"CUDACXX": "/bin/false"} if cpu else {})}


def make_artefacts(source: Path, environment: dict[str, str], cpu: bool) -> list[Path]:
    """Runs the verbs of STEPS in the clone and returns their files. A verb that ./dev does not have is named."""
    verbs = re.findall(r"^verb_(\w+)\(\)", (source / "dev").read_text(), re.MULTILINE)
    made: list[Path] = []
    for command, patterns in STEPS.items():
        verb, *options = command.split()
        if cpu and "--cuda" in options:
            continue
        if verb not in verbs:
            print(f"release: no {', '.join(patterns)}: ./dev has no verb {verb}", file=sys.stderr)
            continue
        subprocess.run([source / "dev", verb, *options], cwd=source, env=environment, check=True, stdout=sys.stderr)
        for pattern in patterns:
            found = sorted((source / "dist").glob(pattern))
            if not found:
                raise Refused(f"./dev {command}: expected dist/{pattern}, found no such file")
            made += found
    return made


def checksums(folder: Path) -> str:
    """Returns the lines of SHA256SUMS for all files of a folder, in the form that sha256sum -c reads."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def release(version: str, out: Path, cpu: bool, rehearse: bool) -> None:
    check_version(version, (ROOT / "CMakeLists.txt").read_text())
    notes = release_notes(version, (ROOT / "CHANGELOG.md").read_text(), rehearse)
    check_compilers(cpu)
    check_clean()
    lint()
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out}: expected an empty folder, or no such folder")
    os.umask(0o022)  # modes are part of archives
    try:
        SOURCE.mkdir()
    except FileExistsError:
        raise Refused(f"{SOURCE}: expected no such folder; remove it unless another release is under way") from None
    try:
        make_release(version, out, cpu, notes)
    finally:
        shutil.rmtree(SOURCE)
    print((out / "SHA256SUMS").read_text(), end="")


def make_release(version: str, out: Path, cpu: bool, notes: str) -> None:
    """Builds in SOURCE and writes the files of the release to out."""
    git("clone", "--quiet", "--no-local", str(ROOT), str(SOURCE))
    commit, epoch = git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct"))
    bom = make_sbom((ROOT / "THIRD_PARTY_NOTICES.txt").read_text(), version, commit, epoch, cuda=not cpu)
    validate(bom)
    out.mkdir(parents=True, exist_ok=True)
    for path in make_artefacts(SOURCE, build_environment(SOURCE, epoch, cpu), cpu):
        shutil.copy(path, out)
    (out / f"nvfp4_moe-{version}.cdx.json").write_text(json.dumps(bom, indent=2) + "\n")
    (out / "RELEASE_NOTES.md").write_text(notes)
    (out / "SHA256SUMS").write_text(checksums(out))


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev release", description="Makes the files of a release in dist/.")
    parser.add_argument("version", nargs="?", metavar="VERSION", help="the version of CMakeLists.txt")
    parser.add_argument("--cpu", action="store_true", help="leave out the CUDA kernels")
    parser.add_argument("--rehearse", action="store_true", help="accept a changelog section without a date")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty folder (default: dist)")
    parser.add_argument("--lint", action="store_true", help="only check the workflows and the container files")
    options = parser.parse_args()
    if options.lint == bool(options.version):
        parser.error("expected VERSION or --lint")
    try:
        if options.lint:
            lint()
        else:
            release(options.version, options.out.resolve(), options.cpu, options.rehearse)
    except (Refused, ValueError) as refused:
        print(f"./dev release: {refused}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failed:
        print(f"./dev release: {' '.join(map(str, failed.cmd))}: exit status {failed.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
