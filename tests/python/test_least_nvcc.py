"""The minimum nvcc version is one number everywhere, and PTX that would give wrong numbers on a newer GPU is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import acceptance_results as results
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_one_number_everywhere():
    least = ".".join(map(str, results.NVCC))
    assert f"expected nvcc {least} or later" in results.cannot_begin("Build cuda_12.8.r12.8/compiler.1_0", "10.0")
    assert results.cannot_begin(f"Build cuda_{least}.r{least}/compiler.1_0", "10.0") == ""
    cmake = (ROOT / "cmake/cuda_language.cmake").read_text()
    assert f"VERSION_LESS {least})" in cmake and f"find_package(CUDAToolkit {least} REQUIRED)" in cmake
    for page in ("contribute/acceptance", "explanation/cuda", "contribute/dependencies"):
        assert f"{least} or later" in (ROOT / f"docs/{page}.md").read_text(), page


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(("asked", "taken"), [("80-virtual;90;120", False), ("90-real", True)])
def test_old_ptx_is_refused_if_it_is_the_only_code_for_blackwell(asked, taken, tmp_path):
    """Such PTX has no kernels for Blackwell, where it would run."""
    switches = {"CUDA": "ON", "TESTS": "OFF", "CLI": "OFF"}
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={asked}", *(f"-DNVFP4_MOE_{k}={v}" for k, v in switches.items())]
    told = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True, check=False)
    assert (told.returncode == 0) == taken, told.stderr
    assert taken or "add 100, or write 90-real" in " ".join(told.stderr.split()), told.stderr
