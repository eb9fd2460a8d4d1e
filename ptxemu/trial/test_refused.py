"""Programs that hardware refuses, or leaves undefined: the report has the line and what is required."""

import os

import numpy as np
import pytest

from trial.emulator import LaunchError, line_of, ptx
from trial.test_matrices import DEALLOC, PLACE
from trial.test_tensor_pairs import product


def refusal(emulator, text, arguments=(), **options):
    with pytest.raises(LaunchError) as raised:
        emulator.launch(emulator.kernel(text, "test"), list(arguments), **options)
    return str(raised.value)


TENSOR = f"""
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; setp.ge.u32 %p1, %r1, 32;
	@%p1 bra allocated;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
allocated:
	bar.sync 0;
	ld.shared.u32 %r3, [%r2]; mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0;
	and.b32 %r8, %r1, 96; shl.b32 %r8, %r8, 16; add.u32 %r9, %r3, %r8; add.u32 %r9, %r9, OFFSET;
	INSTRUCTION
	tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;
	bar.sync 0;
	@%p1 bra done;
	{DEALLOC}
done:
"""


@pytest.mark.parametrize(
    "move, shape, registers, lane, required",
    [
        ("ld", "32x32b", 1, 16, "requires lane 0 in warp 0"),
        ("st", "32x32b", 1, 1, "requires lane 0 in warp 0"),
        ("ld", "32x32b", 1, 32, "lanes that belong to another warp: this shape requires lane 0 in warp 0"),
        ("ld", "16x128b", 2, 8, "requires lane 0 or 16 in warp 0"),
        ("st", "16x256b", 4, 24, "requires lane 0 or 16 in warp 0"),
        ("ld", "16x256b", 4, 128, "lanes that belong to another warp: this shape requires lane 0 or 16 in warp 0"),
        ("ld", "32x32b", 1, 0, None),
        ("st", "16x256b", 4, 16, None),
    ],
)
def test_lanes_of_tensor_memory(emulator, move, shape, registers, lane, required):
    """A warp reaches 32 lanes by its number in the warpgroup (PTX ISA, 9.7.16.8.1)."""
    names = "{" + ", ".join(f"%r{4 + i}" for i in range(registers)) + "}"
    operands = f"{names}, [%r9]" if move == "ld" else f"[%r9], {names}"
    instruction = f"tcgen05.{move}.sync.aligned.{shape}.x1.b32 {operands};"
    body = TENSOR.replace("INSTRUCTION", instruction).replace("OFFSET", str(lane << 16))
    text = ptx(body, shared=PLACE, target="sm_100a")
    if required is None:
        emulator.launch(emulator.kernel(text, "test"), [], block=128)
        return
    said = refusal(emulator, text, block=32)
    assert f"tcgen05.{move} at lane {lane}" in said and required in said
    assert f"PTX line {line_of(text, instruction)}\n" in said


def test_lanes_whose_warp_number_is_ignored(emulator, monkeypatch):
    """With PTXEMU_TENSOR_LANES=ignored every warp reads its own 32 lanes at the address of the first."""
    move = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r1}; tcgen05.wait::st.sync.aligned;\n\t"
    move += "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3]; tcgen05.wait::ld.sync.aligned;\n\t"
    move += "mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd1, %rd_o; st.global.u32 [%rd1], %r4;"
    body = TENSOR.replace("INSTRUCTION", move).replace("OFFSET", "0")
    options = {"shape": 128, "shared": PLACE, "target": "sm_100a", "block": 128}
    with pytest.raises(LaunchError, match="lanes that belong to another warp"):
        emulator.run(body, **options)
    monkeypatch.setenv("PTXEMU_TENSOR_LANES", "ignored")
    assert (emulator.run(body, **options) == np.arange(128)).all()


F16 = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
MXF4 = 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
ISSUE = {
    F16: "	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd30, %rd5, %r13, %p5;\n",
    MXF4: "	tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r11], %rd30, %rd5, %r13, "
    "[%r11], [%r11], %p5;\n",
}


@pytest.mark.parametrize(
    "kind, bits, flipped, said",
    [
        *((F16, 0, 1 << bit, "bits 3, 6, 23 and 29 of the instruction descriptor must be 0") for bit in (3, 6, 23, 29)),
        *((MXF4, 0, 1 << bit, "bits 3, 6 and 24 to 26 of the instruction descriptor must be 0") for bit in (3, 6, 24)),
        (MXF4, 0, (4 ^ 8) << 24, "bits 3, 6 and 24 to 26 of the instruction descriptor must be 0"),  # M = 64
        *((F16, 1 << bit, 0, "bits 14, 15, 30, 31 and 53 to 60 of a descriptor must be 0") for bit in (14, 31, 53, 60)),
        (F16, 1 << 46 | 1 << 47, 0, "the descriptor's version must be 1"),
        (F16, 1 << 49, 0, "descriptors with a base offset are not supported"),
        (F16, 1 << 52, 0, "descriptors with an absolute address are not supported"),
        (F16, 3 << 61, 0, "this swizzle is not supported"),
    ],
)
def test_reserved_bits_of_descriptors(emulator, kind, bits, flipped, said):
    """PTX ISA, 9.7.16.4: tables of the shared memory descriptor and of the instruction descriptor."""
    issue = f"\tmov.b64 %rd31, {bits}; xor.b64 %rd30, %rd3, %rd31;\n" + ISSUE[kind]
    with pytest.raises(LaunchError) as raised:
        product(emulator, [np.zeros(4096, np.uint8)], issue, kind ^ flipped, 1)
    assert said in str(raised.value) and "PTX line " in str(raised.value)


def test_block_scales_of_a_pair_need_256_rows(emulator):
    """With M = 128 the scales of B are in other lanes (CuTe's tmem_sf_frg), which the emulator does not have."""
    issue = ISSUE[MXF4].replace("%rd30", "%rd3").replace("group::1", "group::2")
    with pytest.raises(LaunchError, match="block scales with M = 128 of a pair are not supported"):
        product(emulator, [np.zeros(4096, np.uint8)] * 2, issue, MXF4, 2)


@pytest.mark.parametrize("bit, said", [
    *((bit, "wgmma: bits 14, 15, 30, 31, 46 to 48 and 52 to 61 of a descriptor must be 0") for bit in (15, 30, 46, 61)),
    (50, "wgmma: descriptors with a base offset are not supported"),
])  # fmt: skip
def test_reserved_bits_of_wgmma_descriptors(emulator, bit, said):
    body = f"""
	mov.b64 %rd1, {1 << bit | 64 | 16 << 32 | 8 << 16}; mov.b64 %rd2, 64; setp.eq.u32 %p1, %r1, %r1;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f1,%f2,%f3,%f4}}, %rd2, %rd1, %p1, 1, 1, 0, 0;
"""
    text = ptx(body, shared=".shared .align 16 .b8 block[4096];")
    text_said = refusal(emulator, text, block=128)
    assert said in text_said and f"PTX line {line_of(text, 'wgmma.mma_async')}\n" in text_said


EMPTY = ptx("\n\tmov.u32 %r1, 0;")


def with_directive(directive):
    return EMPTY.replace("\n{\n", f"\n{directive}\n{{\n", 1)


@pytest.mark.parametrize("directive, block, said", [
    (".reqntid 64", 32, "ctas of 32, 1, 1 threads, .reqntid (PTX line 6) requires 64, 1, 1"),
    (".reqntid 64, 2", 128, "ctas of 128, 1, 1 threads, .reqntid (PTX line 6) requires 64, 2, 1"),
    (".reqntid 64", 64, None),
    (".maxntid 64", 32, None),
])  # fmt: skip
def test_threads_that_a_kernel_requires(emulator, directive, block, said):
    """Another size than .reqntid's is an error of the launch (PTX ISA, 11.4.3)."""
    text = with_directive(directive)
    if said is None:
        emulator.launch(emulator.kernel(text, "test"), [], block=block)
    else:
        assert said in refusal(emulator, text, block=block)


@pytest.mark.parametrize("directive, cluster, said", [
    (".reqnctapercluster 2", 4, "clusters of 4, 1, 1 ctas, .reqnctapercluster (PTX line 6) requires 2, 1, 1"),
    (".maxclusterrank 2", 4, "clusters of 4 ctas, .maxclusterrank (PTX line 6) allows 2"),
    ("", 16, "a cluster of 16 ctas requires cudaFuncAttributeNonPortableClusterSizeAllowed: 8 are portable"),
    ("", 32, "a cluster has at most 16 ctas, the launch has 32"),
    (".reqnctapercluster 2", 2, None),
    (".reqnctapercluster 2", 0, None),
    ("", 8, None),
])  # fmt: skip
def test_sizes_of_clusters(emulator, directive, cluster, said):
    text = with_directive(directive)
    if said is None:
        emulator.launch(emulator.kernel(text, "test"), [], grid=32, cluster=cluster)
    else:
        assert said in refusal(emulator, text, grid=32, cluster=cluster)


def test_clusters_of_16_with_the_attribute(emulator):
    kernel = emulator.kernel(EMPTY, "test")
    non_portable = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    emulator.check(emulator.cuda.cuFuncSetAttribute(kernel, non_portable, 1))
    emulator.launch(kernel, [], grid=32, cluster=16)


def test_clusters_need_a_device_that_has_them(emulator):
    text = ptx("\n\tmov.u32 %r1, 0;", target="sm_80")
    assert "clusters requires compute capability 9.0 or later" in refusal(emulator, text, grid=2, cluster=2)


@pytest.mark.parametrize("target, device, required", [
    ("sm_90a", "10.0", "it requires 9.0 and no other"),
    ("sm_100a", "10.3", "it requires 10.0 and no other"),
    ("sm_100f", "12.0", "it requires 10.0 or later of the same major version"),
    ("sm_103f", "10.0", "it requires 10.3 or later of the same major version"),
    ("sm_120", "10.0", "it requires 12.0 or later"),
    ("sm_90", "8.0", "it requires 9.0 or later"),
    ("sm_80", "12.0", None),
    ("sm_100f", "10.3", None),
    ("sm_120a", "12.0", None),
])  # fmt: skip
def test_targets_and_devices(emulator, target, device, required):
    text = ptx("\n\tmov.u32 %r1, 0;", target=target)
    os.environ["PTXEMU_CC"] = device
    if required is None:
        emulator.launch(emulator.loaded(text, "test"), [])
        return
    with pytest.raises(LaunchError) as raised:
        emulator.loaded(text, "test")
    assert f"PTX for {target} does not run on compute capability {device}: {required}" in str(raised.value)


# By ptxas 13.0, which the same text was given for these and ten other targets.
@pytest.mark.parametrize("instruction, good, bad", [
    ("wgmma.fence.sync.aligned;", ("sm_90a",), ("sm_90", "sm_100a", "sm_120a")),
    ("tcgen05.wait::ld.sync.aligned;", ("sm_100a", "sm_100f", "sm_103a"), ("sm_90a", "sm_100", "sm_120a")),
    ("setmaxnreg.inc.sync.aligned.u32 64;", ("sm_90a", "sm_100f", "sm_120a"), ("sm_90", "sm_100", "sm_120")),
    ("{ .reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %f1, %f2; }", ("sm_100f", "sm_120a"), ("sm_90a", "sm_100")),
    ("cvt.rn.bf16x2.ue8m0x2 %r1, %h1;", ("sm_100a", "sm_120f"), ("sm_90a", "sm_120")),
    ("cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;", ("sm_89", "sm_90", "sm_100", "sm_120"), ()),
])  # fmt: skip
def test_instructions_and_targets(emulator, instruction, good, bad):
    """An instruction of one architecture needs a target with a suffix that has it."""
    for target in good:
        emulator.launch(emulator.kernel(ptx("\n\t" + instruction, target=target), "test"), [], block=128)
    for target in bad:
        text = ptx("\n\t" + instruction, target=target)
        said = refusal(emulator, text, block=128)
        name = instruction[instruction.index("cvt") if "cvt" in instruction else 0 :].split()[0].rstrip(";")
        assert f"PTX line {line_of(text, instruction)}: {name} requires one of the targets " in said
        assert f"and this text is for {target[3:]}" in said


@pytest.mark.parametrize("instruction, target", [
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
     "sm_100f"),
    ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
     "{%f1,%f2,%f3,%f4},{%r1,%r2,%r3,%r4},{%r5,%r6},{%f1,%f2,%f3,%f4},%r7,{%h1,%h2},%r8,{%h1,%h2};", "sm_100a"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32 "
     "{%f1,%f2,%f3,%f4},{%r1,%r2,%r3,%r4},{%r5,%r6},{%f1,%f2,%f3,%f4};", "sm_90a"),
    ("tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd1, %rd2, %r2, %p1;", "sm_100f"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3];", "sm_120"),
    ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1};", "sm_90a"),
    ("redux.sync.max.abs.f32 %f1, %f2, %r1;", "sm_120a"),
    ("@%p1 cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes "
     "[%r1], [%rd1, {%r2,%r3}], [%r4];", "sm_120a"),
    ("here: tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;", "sm_100"),
    ("{ clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 "
     "[%r1], [%r2]; }", "sm_100"),
])  # fmt: skip
def test_instructions_that_a_target_lacks(emulator, instruction, target):
    text = ptx("\n\t" + instruction, target=target)
    assert f"PTX line {line_of(text, instruction)}: " in (said := refusal(emulator, text))
    assert "requires one of the targets " in said


REGISTERS = """
	mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128;
	@%p1 bra producer;
	setmaxnreg.inc.sync.aligned.u32 INC;
	bra done;
producer:
	DEC
done:
	bar.sync 0;
"""


@pytest.mark.parametrize("bounds, increase, decrease, fits", [
    (".maxntid 384", 232, "setmaxnreg.dec.sync.aligned.u32 40;", True),  # 40 + 2 232 = 3 168: 65536 / 384, by eights
    (".maxntid 384", 224, "setmaxnreg.dec.sync.aligned.u32 80;", False),
    (".reqntid 384", 240, "setmaxnreg.dec.sync.aligned.u32 40;", False),
    (".maxnreg 168", 176, "", False),
    (".maxnreg 168", 168, "", True),
])  # fmt: skip
def test_registers_of_a_cta(emulator, bounds, increase, decrease, fits):
    """setmaxnreg.inc waits until the cta's pool has the registers (PTX ISA): without enough it waits for ever."""
    text = ptx(REGISTERS.replace("INC", str(increase)).replace("DEC", decrease)).replace(
        "\n{\n", f"\n{bounds}\n{{\n", 1
    )
    if fits:
        emulator.launch(emulator.kernel(text, "test"), [], block=384)
        return
    said = refusal(emulator, text, block=384)
    assert "deadlock in kernel test" in said
    line = line_of(text, "setmaxnreg.inc")
    assert f"waits for the cta's registers, a thread's setmaxnreg.inc to {increase:#x}, PTX line {line}\n" in said


def test_registers_without_bounds_are_not_counted(emulator):
    """Without .maxntid or .maxnreg setmaxnreg may have no effect (PTX ISA), and ptxas ignores it."""
    emulator.launch(emulator.kernel(ptx(REGISTERS.replace("INC", "240").replace("DEC", "")), "test"), [], block=384)


@pytest.mark.parametrize("instructions, said", [
    ("setmaxnreg.dec.sync.aligned.u32 176;", "setmaxnreg.dec to more registers than the warp's threads have"),
    ("setmaxnreg.dec.sync.aligned.u32 96; setmaxnreg.inc.sync.aligned.u32 64;",
     "setmaxnreg.inc to fewer registers than the warp's threads have"),
    ("setmaxnreg.inc.sync.aligned.u32 20;", "expected 24 to 256 registers in steps of 8"),
])  # fmt: skip
def test_counts_of_setmaxnreg(emulator, instructions, said):
    text = ptx("\n\t" + instructions).replace("\n{\n", "\n.maxntid 384\n{\n", 1)
    assert said in refusal(emulator, text, block=384)
