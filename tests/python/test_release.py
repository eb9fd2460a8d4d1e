"""./dev release: what it refuses, its bill of materials, the same bytes from two folders.

And which wheel ./dev demo takes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheels  # conftest puts tools/release/ on the path
import pytest
import release
import sbom
import wheel_tool

ROOT = Path(__file__).resolve().parents[2]
NOTICES = (ROOT / "THIRD_PARTY_NOTICES.txt").read_text()
CHANGELOG = """# Changelog

## [0.2.0] - unreleased

Not yet.

## [0.1.0] - 2026-01-31

- Reads [GGUF](docs/reference/checkpoints.md), see [the format](https://example.org/format).

## [0.0.9] - 2025-12-31

Older.
"""
# Stands for the real verbs: a file with what a build would take from its environment, and from its folder if it may.
DEV = """#!/bin/sh
verb_wheel() {
  mkdir -p dist
  echo "$SOURCE_DATE_EPOCH $TZ $PYTHONHASHSEED $DEBFULLNAME $(cat input)" >dist/nvfp4_moe-0.1.0.tar.gz
  echo "${CXXFLAGS#*=$PWD}" "$CUDACXX" >dist/nvfp4_moe-0.1.0-cp311.whl
}
"verb_$1"
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with all that release() reads, and stand-ins for ./dev and the linters."""
    folder = tmp_path / "tree"
    folder.mkdir()
    files = {"CMakeLists.txt": "project(nvfp4_moe VERSION 0.1.0)", "CHANGELOG.md": CHANGELOG, "dev": DEV, "input": "1"}
    for name, text in {**files, "THIRD_PARTY_NOTICES.txt": NOTICES, ".gitignore": "build/\ndist/\n"}.items():
        (folder / name).write_text(text)
    (folder / "dev").chmod(0o755)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    monkeypatch.setattr(release, "ROOT", folder)
    monkeypatch.setattr(release, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(release, "lint", lambda: None)
    monkeypatch.setattr(release, "validate", lambda bom: None)
    return folder


def run(tree: Path, version: str = "0.1.0", **options: bool) -> Path:
    release.release(version, tree / "dist", **{"cpu": True, "rehearse": False, **options})
    return tree / "dist"


def test_two_folders_give_the_same_files_and_the_sums_hold(tree, tmp_path, monkeypatch, capfd):
    first = run(tree)
    assert "no *.deb: ./dev has no verb package" in capfd.readouterr().err
    names = ["RELEASE_NOTES.md", "nvfp4_moe-0.1.0-cp311.whl", "nvfp4_moe-0.1.0.cdx.json", "nvfp4_moe-0.1.0.tar.gz"]
    assert sorted(path.name for path in first.iterdir()) == sorted([*names, "SHA256SUMS"])
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=first, check=True)
    other = tmp_path / "another place"
    shutil.copytree(tree, other, ignore=shutil.ignore_patterns("dist", "build"))
    monkeypatch.setattr(release, "ROOT", other)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert (run(other) / "SHA256SUMS").read_text() == (first / "SHA256SUMS").read_text()
    (other / "input").write_text("2")
    git(other, "commit", "-q", "-a", "-m", "another input")
    shutil.rmtree(other / "dist")
    assert (run(other) / "SHA256SUMS").read_text() != (first / "SHA256SUMS").read_text()
    with pytest.raises(release.Refused, match="expected an empty folder"):
        run(other)
    shutil.rmtree(other / "dist")
    release.SOURCE.mkdir()  # another release is under way, and must not lose its folder
    with pytest.raises(release.Refused, match="expected no such folder"):
        run(other)
    assert release.SOURCE.is_dir()


def test_refuses_what_is_no_release(tree, monkeypatch):
    for version, message in (
        ("0.1.1", "version: expected 0.1.0, as in CMakeLists.txt, got 0.1.1"),
        ("0.1", "got 0.1$"),
    ):
        with pytest.raises(release.Refused, match=message):
            run(tree, version)
    (tree / "new.txt").write_text("")
    with pytest.raises(release.Refused, match=r"no changed or untracked files, got 1: \?\? new.txt"):
        run(tree)
    (tree / "new.txt").unlink()
    monkeypatch.setattr(release, "STEPS", {"wheel": ("*.deb",)})
    with pytest.raises(release.Refused, match=r"./dev wheel: expected dist/\*.deb, found no such file"):
        run(tree)
    shutil.rmtree(tree / "dist")
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("git")))
    monkeypatch.setattr(release.shutil, "which", lambda name: None)
    with pytest.raises(release.Refused, match="nvcc: expected on PATH"):
        run(tree, cpu=False)


def test_notes_are_the_section_without_links_into_the_tree():
    notes = release.release_notes("0.1.0", CHANGELOG, rehearse=False)
    assert notes == "- Reads GGUF, see [the format](https://example.org/format).\n"
    with pytest.raises(release.Refused, match=r"expected a date for 0.2.0, got 'unreleased'"):
        release.release_notes("0.2.0", CHANGELOG, rehearse=False)
    assert release.release_notes("0.2.0", CHANGELOG, rehearse=True) == "Not yet.\n"
    with pytest.raises(release.Refused, match=r"expected a section '## \[0.3.0\] - DATE'"):
        release.release_notes("0.3.0", CHANGELOG, rehearse=True)


def test_this_tree_has_a_section_for_its_version():
    version = build_wheels.re.search(r"project\(nvfp4_moe VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    release.check_version(version, (ROOT / "CMakeLists.txt").read_text())
    assert "](docs/" not in release.release_notes(version, (ROOT / "CHANGELOG.md").read_text(), rehearse=True)


def test_the_bill_has_every_work_of_the_notices_with_a_licence():
    arguments = (NOTICES, "0.1.0", "0123abc", 1_700_000_000, False)
    bom = sbom.make_sbom(*arguments)
    assert bom == sbom.make_sbom(*arguments)
    names = {component["name"]: component for component in bom["components"]}
    assert names.keys() == sbom.WORKS.keys() - {"CUDA run time (cudart)"}
    assert {name for name, component in names.items() if "version" not in component} == {"robin-map (part of nanobind)"}
    assert names["nlohmann-json"]["purl"].startswith("pkg:deb/")
    assert names["fmt"]["licenses"] == [{"expression": "MIT WITH fmt-exception"}]
    assert names["libstdc++ and libgcc (GCC)"]["properties"] == [{"name": "nvfp4-moe:in", "value": "Python module"}]
    assert bom["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert json.loads(json.dumps(bom)) == bom


def test_the_bill_refuses_a_licence_and_a_work_that_it_does_not_know(monkeypatch):
    more = f"{NOTICES}{'=' * 120}\nzlib\nIn: library\nLicense: zlib\n"
    with pytest.raises(ValueError, match=r"differ in: zlib$"):
        sbom.make_sbom(more, "0.1.0", "0123abc", 0, False)
    monkeypatch.setitem(sbom.WORKS, "fmt", lambda: {"version": "1", "licence": "GPL-2"})
    with pytest.raises(ValueError, match=r"fmt: expected a licence of tools/release/sbom.py, got 'GPL-2'"):
        sbom.make_sbom(NOTICES, "0.1.0", "0123abc", 0, False)


def test_the_demo_takes_a_wheel_of_these_sources_only(tmp_path, monkeypatch, capfd):
    """A wheel of other sources, for another Python, or whose tool does not run is not used."""
    assert all((ROOT / name).exists() for name in wheel_tool.SOURCES)
    monkeypatch.setattr(wheel_tool, "ROOT", tmp_path)
    for name in wheel_tool.SOURCES:
        path = tmp_path / name if "." in name else tmp_path / name / "file.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    dist, major, minor = tmp_path / "dist", *sys.version_info[:2]

    def make(tag: str, prints: str = "0.1.0") -> Path:
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir()
        path = dist / f"nvfp4_moe-0.1.0-{tag}-manylinux_2_28_{platform.machine()}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("nvfp4_moe/__init__.py", "")
            wheel.writestr("nvfp4_moe/_tool.py", f"def main():\n    print({prints!r})\n")
            wheel.writestr(wheel_tool.RECORD, wheel_tool.hash_sources(tmp_path) + "\n")
        return path

    def run() -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["wheel_tool.py", "--dist", str(dist)])
        return (wheel_tool.main(), *capfd.readouterr())

    assert run() == (1, "", "")
    ours = f"cp{major}{minor}-cp{major}{minor}"
    for tag in (ours, f"cp{major}{minor - 1}-abi3"):
        wheel = make(tag)
        code, printed, reason = run()
        assert (code, printed) == (0, f"{tmp_path}/build/demo-wheel/nvfp4-moe\n") and str(wheel) in reason
    for tag in (f"cp{major}{minor - 1}-cp{major}{minor - 1}", f"cp{major}{minor + 1}-abi3"):
        make(tag)
        assert run() == (1, "", "")
    make(ours, prints="0.0.10")  # longer: Python takes a module of the same second and size for the one it knows
    assert run()[:2] == (1, "")
    make(ours)
    for change in (tmp_path / "src/file.cpp", tmp_path / "src/new.h", tmp_path / "CMakeLists.txt"):
        before = change.read_text() if change.exists() else None
        change.write_text("2")
        code, printed, reason = run()
        assert (code, printed) == (1, "") and "made of other sources than this tree's" in reason, change
        change.unlink() if before is None else change.write_text(before)
    assert run()[0] == 0
