"""tools/check/check_ptxas.py over planted kernels that this machine's nvcc and ptxas compile.

For every target a spill, for Hopper a serialized wgmma: each must fail, and the same kernel without the fault must pass.
test_check_ptxas.py has products of other formats, in the words that nvdisasm gives them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import check_ptxas
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")

# More values live at once than 40 registers hold.
SPILL = """
__global__ void combine_tokens(const float* in, float* out, int step) {
  float v[200];
#pragma unroll
  for (int i = 0; i < VALUES; ++i) v[i] = in[i * step];
  float sum = 0;
#pragma unroll
  for (int round = 0; round < 3; ++round)
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum = sum * v[i] + v[(i * 7 + round) % VALUES];
  out[threadIdx.x] = sum;
}
"""

# An assert between the product and its wait is a call, around which ptxas serializes.
WGMMA = """
#include <cassert>
#include <cstdint>
__global__ void sm90_gemm1_kernel(float* out, uint64_t a, uint64_t b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int i = 0; i < 10; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    assert(out[i] != 3);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Compiles a text as the build does, through keep_compiler_report.sh, and runs the check: exit code and output."""

    def run(listed: str, name: str, text: str, *command: str) -> tuple[int, str]:
        source, out = tmp_path / name, tmp_path / "planted.cu.o"
        source.write_text(text)
        keep = ROOT / "tools/check/keep_compiler_report.sh"
        done = subprocess.run(
            ["sh", keep, out, *command, source, "-o", out], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this compiler does not take it: {done.stderr.strip()[:200]}")
        monkeypatch.setattr(check_ptxas, "LISTED", [listed])
        monkeypatch.setattr("sys.argv", ["check_ptxas", str(tmp_path)])
        return check_ptxas.main(), capsys.readouterr().out

    return run


@pytest.mark.parametrize("target", ["80", "90a", "100f", "120f"])
def test_a_spill_fails(check, target):
    options = ["nvcc", f"-arch=sm_{target}", "-maxrregcount=40", "-Xptxas=-v", "-cubin"]
    code, out = check("combine_tokens", "k.cu", SPILL, *options, "-DVALUES=200")
    assert code == 1 and "spilled" in out
    assert check("combine_tokens", "k.cu", SPILL, *options, "-DVALUES=8")[0] == 0


def test_serialized_wgmma_fails(check):
    options = ["nvcc", "-arch=sm_90a", "-Xptxas=-v", "-cubin"]
    code, out = check("sm90_gemm1_kernel", "k.cu", WGMMA, *options)
    assert code == 1 and "serialized" in out
    assert check("sm90_gemm1_kernel", "k.cu", WGMMA, *options, "-DNDEBUG")[0] == 0
