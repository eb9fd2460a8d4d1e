"""tools/check/check_ptxas.py over planted kernels that this machine's nvcc and ptxas compile.

For every target a spill, for Hopper a serialized wgmma, for Blackwell products of another format: each must fail, and
the same kernel without the fault must pass.
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

OF_SM120 = """
.version 9.0
.target sm_120f
.address_size 64
.visible .entry _Z18sm120_gemm1_kernelv(.param .u64 out) {
  .reg .b32 %r<5>; .reg .f32 %f<5>; .reg .b64 %d<2>; .reg .b16 %h<2>;
  ld.param.u64 %d1, [out]; ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%d1]; ld.global.v4.f32 {%f1,%f2,%f3,%f4}, [%d1+16];
  mov.u16 %h1, 0;
  mma.sync.aligned.KIND.m16n8k64.row.col.f32.e2m1.e2m1.f32.SCALES {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r1,%r2},
    {%f1,%f2,%f3,%f4}, {%r1}, {%h1,%h1}, {%r2}, {%h1,%h1};
  st.global.v4.f32 [%d1], {%f1,%f2,%f3,%f4};
  ret;
}
"""
OF_SM100 = """
.version 9.0
.target sm_100f
.address_size 64
.visible .entry _Z18sm100_gemm1_kernelv(.param .u32 d, .param .u64 a, .param .u64 b, .param .u32 descriptor) {
  .reg .b32 %r<3>; .reg .b64 %d<3>; .reg .pred %p;
  ld.param.u32 %r1, [d]; ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u32 %r2, [descriptor];
  setp.ne.u32 %p, %r2, 0;
  tcgen05.mma.cta_group::1.KIND [%r1], %d1, %d2, %r2, SCALES %p;
  ret;
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


OF_KIND = [
    (OF_SM120, "sm_120f", "kind::mxf4nvf4.block_scale.scale_vec::4X", "ue4m3", 0),
    (OF_SM120, "sm_120f", "kind::mxf4nvf4.block_scale.scale_vec::2X", "ue8m0", 1),
    (OF_SM120, "sm_120f", "kind::mxf4.block_scale.scale_vec::2X", "ue8m0", 1),
    (OF_SM100, "sm_100f", "kind::mxf4nvf4.block_scale.block16", "[%r1], [%r2],", 0),
    (OF_SM100, "sm_100f", "kind::mxf4.block_scale.block32", "[%r1], [%r2],", 1),
    (OF_SM100, "sm_100f", "kind::mxf8f6f4.block_scale.block32", "[%r1], [%r2],", 1),
    (OF_SM100, "sm_100f", "kind::f16", "", 1),
]


@pytest.mark.parametrize(("text", "arch", "kind", "scales", "expected"), OF_KIND, ids=[row[2] for row in OF_KIND])
def test_a_kernel_without_nvfp4_products_fails(check, text, arch, kind, scales, expected):
    text = text.replace("KIND", kind).replace("SCALES", scales)
    code, out = check(f"{arch[:-1].replace('_', '')}_gemm1_kernel", "k.ptx", text, "ptxas", "-v", f"-arch={arch}")
    assert code == expected, out
