"""The minimum nvcc version: the same in CMake, the acceptance and the docs; older ones are refused by name. So are
architectures whose PTX would give wrong numbers on a newer GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import acceptance_results as results
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_an_acceptance_begins_with_a_compiler_that_has_ptx_8_8():
    for release, begins in (("11.9.r11.9", False), ("12.8.r12.8", False), ("12.9.r12.9", True), ("13.0.r13.0", True)):
        problem = results.cannot_begin(f"Build cuda_{release}/compiler.1_0", "10.0")
        assert (problem == "") == begins, problem
        assert begins or "expected nvcc 12.9 or later" in problem
    assert "expected nvcc on PATH" in results.cannot_begin("", "10.0")


def test_it_is_one_number_everywhere():
    least = ".".join(map(str, results.NVCC))
    cmake = (ROOT / "cmake/cuda_language.cmake").read_text()
    assert f"VERSION_LESS {least})" in cmake and f"find_package(CUDAToolkit {least} REQUIRED)" in cmake
    for page in ("contribute/acceptance", "explanation/cuda", "contribute/dependencies"):
        assert f"{least} or later" in (ROOT / f"docs/{page}.md").read_text(), page


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("asked", "taken"), [("90", False), ("80-virtual;90;120", False), ("90-real", True), ("90;100", True)]
)
def test_old_ptx_alone_is_refused(asked, taken, tmp_path):
    """Such PTX has no kernels for Blackwell, where it would run."""
    options = [
        f"-DCMAKE_CUDA_ARCHITECTURES={asked}",
        "-DNVFP4_MOE_CUDA=ON",
        "-DNVFP4_MOE_TESTS=OFF",
        "-DNVFP4_MOE_CLI=OFF",
    ]
    told = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True, check=False)
    assert (told.returncode == 0) == taken, told.stderr
    assert taken or "add 100, or write 90-real" in " ".join(told.stderr.split()), told.stderr
