"""Tests of the translator: it accepts what it knows, and refuses everything else with file and line."""

import pathlib
import re
import subprocess
import sys

import pytest

HOME = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HOME))

from translator.errors import TranslationError  # noqa: E402
from translator.module import Module  # noqa: E402
from translator.opcodes import FORMS  # noqa: E402
from translator.program import program  # noqa: E402

KERNEL = """// comment
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .align 8 .b8 s[24]) .maxntid 128, 1, 1
{{
	.reg .pred %p<4>;
	.reg .b32 %r<8>; /* over
	two lines */
	.reg .b64 %rd<8>;
	.shared .align 16 .b8 block[48];
	{body}
	ret;
}}
"""
BODY_LINE = 12


def translated(body):
    module = Module(KERNEL.format(body=body))
    return program(module, module.entries()[0])


def test_a_kernel_and_what_a_launch_must_know():
    text = translated("ld.param.u64 %rd1, [p]; st.global.u32 [%rd1+8], 7; mov.u32 %r1, block;")
    assert 'kernel_info{"k",run,32,48,{128,1,1},{0,0,0},2,{0,8},{8,24},4u,false,0,0}' in text
    assert f"T->line={BODY_LINE};" in text and "T->global_at((v_rd1+(int64_t)8ll),4)" in text


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.u32 %r1, %r2;",
        "add.u33 %r1, %r2, %r3;",
        "mov.u32.volatile %r1, %r2;",
        "popc.b32 %r1;",
        "popc.b32 %r1, %r2, %r3;",  # an operand too many
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
        "bfind.shiftmount.u32 %r1, %r2;",
        "add.ftz.rn.f32 %r1, %r2, %r3;",  # modifiers in another order
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 "
        "{%r1,%r1,%r1,%r1},{%r1,%r1,%r1,%r1},{%r1,%r1},{%r1,%r1,%r1,%r1};",
        *(
            f"mma.sync.aligned.{name} {{%r1,%r2,%r3,%r4}},{{%r1,%r2,%r3,%r4}},{{%r1,%r2}},{{%r1,%r2,%r3,%r4}};"
            for name in (
                "m16n8k64.row.col.s32.s8.s8.s32",  # a shape that s8 does not have
                "m16n8k16.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32",
                "m16n8k32.row.col.f32.e4m3.e2m1.f32",  # E2M1 without .kind::f8f6f4
                "m16n8k16.row.col.f16.f16.f16.f16",  # two registers of D and C
                "m16n8k8.row.col.f64.f64.f64.f64.rz",
            )
        ),
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [%r2];",
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r1,%r2}, [%r3];",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2];",  # without the distance of its halves
        "tcgen05.ld.sync.aligned.16x128b.x1.b32 {%r1}, [%r2];",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], 1;",
        "tcgen05.mma.cta_group::1.kind::tf32 [%r1], [%r3], %rd2, %r2, 1;",  # A in tensor memory
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, 1, -1, 1, 0, 0;",
        "cvt.rn.satfinite.e2m1x4.f32 %r1, %r2, %r3;",
        "ld.global.v3.u32 {%r1,%r2,%r3}, [%rd1];",
        "atom.global.add.b32 %r1, [%rd1], %r2;",
        "bra nowhere;",
        "mov.u32 %r1, %undeclared;",
        ".frob 3;",
    ],
)
def test_what_it_does_not_know_is_an_error_with_its_line(instruction):
    with pytest.raises(TranslationError) as raised:
        translated("mov.u32 %r1, 0;\n\t" + instruction)
    error = raised.value
    assert error.line == BODY_LINE + 1 and error.text == instruction.rstrip(";")
    assert error.located("x.ptx").startswith(f"x.ptx:{BODY_LINE + 1}: ")


def test_names_of_inner_scopes_are_apart():
    text = translated("{ .reg .b32 t; mov.u32 t, 1; }\n{ .reg .b64 t; mov.u64 t, 2; }")
    names = set(re.findall(r"v_s\d_t_", text))
    assert names == {"v_s1_t_", "v_s2_t_"}


def test_numbered_registers_that_share_a_stem():
    text = translated("{ .reg .b32 x<3>; .reg .b64 x1<2>; mov.b32 x2, 1; mov.b64 x10, 2; }")
    assert "uint32_t v_s1_x2=" in text and "uint64_t v_s1_x10=" in text


def test_guards_and_labels():
    text = translated("$L: setp.eq.s32 %p1, %r1, 0; @!%p1 bra $L; @%p1 add.s32 %r1, %r1, 1;")
    assert "L__S_L:;" in text and "if(!v_p1){goto L__S_L;}" in text and "if(v_p1){v_r1=" in text


def test_branch_tables():
    text = translated("{ts: .branchtargets $A, $B; brx.idx %r1, ts;}\n$A: mov.u32 %r2, 1;\n$B: mov.u32 %r2, 2;")
    assert "case 0: goto L__S_A; case 1: goto L__S_B;" in text


def test_parameters_are_aligned():
    text = KERNEL.format(body="").replace("(.param .u64 p, ", "(.param .u8 c, .param .u64 p, .param .u8 d, ")
    text = text.replace(".param .align 8", ".param .align 16")
    module = Module(text)
    assert "{0,8,16,32},{1,8,1,24}" in program(module, module.entries()[0])


WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, 1, 1, 1, 0, 0;"


def test_registers_that_wgmma_takes_without_a_fence():
    """A copy is as old as its source, and values from other blocks are not tracked."""
    written = "wgmma.fence.sync.aligned;\n\tadd.u32 %r5, %r5, 1;\n\tmov.u32 %r3, %r5;\n\t"
    assert f"on_unfenced(T,{BODY_LINE + 1})" in translated(written + WGMMA)
    assert "on_unfenced" not in translated(written + "wgmma.fence.sync.aligned; " + WGMMA)
    assert "on_unfenced" not in translated(written + "$L: " + WGMMA)


def test_every_family_is_there():
    assert {"add", "mov", "ld", "cvt", "mma", "wgmma", "tcgen05", "mbarrier", "cp", "tensormap"} <= set(FORMS)
    assert sum(map(len, FORMS.values())) > 200


def test_the_command_names_file_and_line(tmp_path):
    bad = tmp_path / "bad.ptx"
    bad.write_text(KERNEL.format(body="sin.rn.f32 %r1, %r2;"))
    done = subprocess.run(
        [sys.executable, "-m", "translator", str(bad)], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == f"ptxemu: {bad}:{BODY_LINE}: unknown modifiers or types of sin in sin.rn.f32: sin.rn.f32 %r1, %r2\n"
    )
