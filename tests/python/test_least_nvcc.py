"""The minimum nvcc version: the same in CMake, the acceptance and the docs; older ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import acceptance_results as results

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
