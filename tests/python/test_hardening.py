"""The linked files are hardened, and the check detects a file that is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import check_hardening  # conftest puts tools/check/ on the path
import nvfp4_moe as nv
import pytest

BUILD = Path(nv.__file__).resolve().parents[2]
TOOL = Path(os.environ.get("NVFP4_MOE_TOOL", BUILD / "cli/nvfp4-moe"))

# Copies of a length unknown to the compiler into an array of known length: both kinds of check apply.
PROGRAM = """
#include <cstdio>
#include <cstring>
int main(int count, char** arguments) {
  char text[16];
  std::strcpy(text, arguments[count - 1]);
  return std::puts(text) < 0;
}
"""
ALL_ON = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-fPIE", "-pie"]
ALL_ON += ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
FAULTS = {
    "-fno-stack-protector": "no stack protectors",
    "-U_FORTIFY_SOURCE": "no checked copies",
    "-Wl,-z,lazy": "addresses are bound lazily",
    "-Wl,-z,norelro": "no RELRO segment",
    "-Wl,-z,execstack": "executable stack",
    "-no-pie": "not position-independent",
}


@pytest.mark.parametrize(
    "path", [Path(nv._core.__file__), BUILD / "libnvfp4_moe.so", TOOL], ids=lambda path: path.name.split(".")[0]
)
def test_what_is_linked_here_is_hardened(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    assert check_hardening.faults(path) == []


def test_the_check_finds_each_fault(tmp_path: Path) -> None:
    if shutil.which("c++") is None or shutil.which("readelf") is None:
        pytest.skip("no c++ or no readelf")
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    for flags, expected in (([], []), *(([flag], [fault]) for flag, fault in FAULTS.items())):
        subprocess.run(["c++", "-O2", "-w", *ALL_ON, *flags, str(source), "-o", str(program)], check=True)
        assert check_hardening.faults(program) == expected, flags
