"""Matrix instructions against numpy: operands' places in registers, shared and tensor memory; when results are visible."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import LaunchError, ptx

ORDERS = ("at-once", "random", "late")
GENERATOR = np.random.default_rng(7)
BF16 = ml_dtypes.bfloat16


def run(emulator, text, inputs, shape, dtype, **options):
    pointers = [emulator.put(array) for array in inputs]
    out = emulator.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    emulator.launch(emulator.kernel(text, "test"), [*pointers, out], **options)
    return emulator.get(out, shape, dtype)


def integers(shape, low=-4, high=5):
    """Small integers as f32: sums of products are exact."""
    return GENERATOR.integers(low, high, size=shape).astype(np.float32)


@pytest.mark.parametrize("form", ["m8n8.x4", "x4.m8n8"])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(emulator, trans, form):
    """Lane 4 r + q gets elements 2 q and 2 q + 1 of row r of each matrix (transposed: of column r)."""
    body = f"""
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd2];
	st.shared.v4.u32 [%r4], {{%r5, %r6, %r7, %r8}};
	bar.warp.sync -1;
	ldmatrix.sync.aligned.{form}{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r4];
	add.s64 %rd3, %rd_o, %rd1; st.global.v4.u32 [%rd3], {{%r10, %r11, %r12, %r13}};
"""
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    text = ptx(body, "ao", shared=".shared .align 16 .b8 block[512];")
    got = run(emulator, text, [matrices], (32, 4, 2), np.uint16)
    source = matrices.transpose(0, 2, 1) if trans else matrices
    for lane in range(32):
        assert (got[lane] == source[:, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]).all()


@pytest.mark.parametrize("form", ["m8n8.x4", "x4.m8n8"])
def test_stmatrix(emulator, form):
    body = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];
	stmatrix.sync.aligned.FORM.shared.b16 [%r4], {%r5, %r6, %r7, %r8};
	bar.warp.sync -1;
	ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
	add.s64 %rd3, %rd_o, %rd1; st.global.v4.u32 [%rd3], {%r10, %r11, %r12, %r13};
"""
    body = body.replace("FORM", form)
    fragments = np.arange(256, dtype=np.uint16).reshape(32, 4, 2)
    got = run(emulator, ptx(body, "ao", shared=".shared .align 16 .b8 block[512];"), [fragments], (4, 8, 8), np.uint16)
    for lane in range(32):
        assert (got[:, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2] == fragments[lane]).all()


FRAGMENTS = """
	mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];
	mul.wide.u32 %rd3, %r1, 8; add.s64 %rd4, %rd_b, %rd3; ld.global.v2.u32 {%r14, %r15}, [%rd4];
	add.s64 %rd5, %rd_c, %rd1; ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%rd5];
	MMA
	add.s64 %rd6, %rd_o, %rd1; st.global.v4.u32 [%rd6], {%r20, %r21, %r22, %r23};
"""


def accumulator_fragments(c):
    """(16, 8) as lanes hold it: rows g and g + 8, columns 2 q and 2 q + 1."""
    lanes = np.arange(32)
    g, q = lanes // 4, lanes % 4 * 2
    return np.stack([c[g, q], c[g, q + 1], c[g + 8, q], c[g + 8, q + 1]], axis=1)


@pytest.mark.parametrize("name, dtype", [("bf16", BF16), ("f16", np.float16)])
def test_mma_of_halves(emulator, name, dtype):
    a, b, c = integers((16, 16)), integers((16, 8)), integers((16, 8), -100, 100)
    lanes = np.arange(32)
    g, q = lanes // 4, lanes % 4 * 2
    pairs = [(g, q), (g + 8, q), (g, q + 8), (g + 8, q + 8)]
    a_fragments = np.stack([np.stack([a[row, k], a[row, k + 1]], 1) for row, k in pairs], 1).astype(dtype)
    b_fragments = np.stack([np.stack([b[k, g], b[k + 1, g]], 1) for k in (q, q + 8)], 1).astype(dtype)
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%r20,%r21,%r22,%r23}}, {{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, {{%r16,%r17,%r18,%r19}};"
    text = ptx(FRAGMENTS.replace("MMA", mma), "abco")
    got = run(emulator, text, [a_fragments, b_fragments, accumulator_fragments(c)], (32, 4), np.float32)
    assert (got == accumulator_fragments(a @ b + c)).all()


def nibbles(codes):
    """(n, 8) codes of four bits as u32, the first lowest."""
    return (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)


def test_mma_block_scaled(emulator):
    """m16n8k64 of E2M1 with UE4M3 scales of 16 values: the scales of lanes that the selectors do not name are wrong."""
    a_codes, b_codes = GENERATOR.integers(0, 16, (16, 64)), GENERATOR.integers(0, 16, (8, 64))
    scales = np.array([0.5, 1, 2, 4], np.float32).astype(ml_dtypes.float8_e4m3fn)
    a_pick, b_pick = GENERATOR.integers(0, 4, (16, 4)), GENERATOR.integers(0, 4, (8, 4))
    values = lambda codes: codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # noqa: E731
    left = values(a_codes) * np.repeat(scales[a_pick].astype(np.float32), 16, axis=1)
    right = values(b_codes) * np.repeat(scales[b_pick].astype(np.float32), 16, axis=1)
    c = integers((16, 8), -100, 100)
    lanes = np.arange(32)
    g, q = lanes // 4, lanes % 4
    take = lambda codes, rows, first: nibbles(np.stack([codes[r, f : f + 8] for r, f in zip(rows, first, strict=True)]))  # noqa: E731
    a_fragments = np.stack([take(a_codes, g + 8 * (i % 2), 8 * q + 32 * (i // 2)) for i in range(4)], 1)
    b_fragments = np.stack([take(b_codes, g, 8 * q + 32 * i) for i in range(2)], 1)
    for a_thread, b_thread in ((0, 0), (1, 3)):
        scale_a = np.full((32, 4), 0x18, np.uint8)
        scale_b = scale_a.copy()
        for lane in range(32):
            if lane % 4 // 2 == a_thread:
                scale_a[lane] = scales.view(np.uint8)[a_pick[lane // 4 + 8 * (lane % 2)]]
            if lane % 4 == b_thread:
                scale_b[lane] = scales.view(np.uint8)[b_pick[lane // 4]]
        both = np.concatenate([scale_a, scale_b], axis=1)
        mma = "mul.wide.u32 %rd7, %r1, 8; add.s64 %rd8, %rd_s, %rd7; ld.global.v2.u32 {%r30, %r31}, [%rd8];\n\t"
        mma += f".reg .b16 zero, ta, tb; mov.u16 zero, 0; mov.u16 ta, {a_thread}; mov.u16 tb, {b_thread};\n\t"
        mma += "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        mma += "{%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19}, {%r30}, {zero, ta}, {%r31}, {zero, tb};"
        text = ptx(FRAGMENTS.replace("MMA", mma), "abcso")
        got = run(emulator, text, [a_fragments, b_fragments, accumulator_fragments(c), both], (32, 4), np.float32)
        assert (got == accumulator_fragments(left @ right.T + c)).all()


def core_matrices(operand):
    """(rows, 16) halves in the layout without swizzle: 8x8 matrices of 128 bytes, those of k beside each other."""
    rows = operand.shape[0]
    return operand.reshape(rows // 8, 8, 2, 8).transpose(0, 2, 1, 3)


# Shared memory holds A (64 rows) and then B (8 rows), each as core matrices: 128 bytes from one k half to the next, 256
# from eight rows to the next.
WGMMA = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];
	st.shared.v4.u32 [%r4], {%r5, %r6, %r7, %r8};
	setp.ge.u32 %p1, %r1, 16;
	@%p1 bra stored;
	ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2+2048]; st.shared.v4.u32 [%r4+2048], {%r5, %r6, %r7, %r8};
stored:
	fence.proxy.async.shared::cta;
	bar.sync 0;
	shr.u32 %r9, %r2, 4; cvt.u64.u32 %rd3, %r9; mov.b64 %rd4, 0x0000001000080000; or.b64 %rd3, %rd3, %rd4;
	add.s64 %rd5, %rd3, 128;
	mov.f32 %f1, 0f41200000; mov.f32 %f2, 0f41200000; mov.f32 %f3, 0f41200000; mov.f32 %f4, 0f41200000;
	setp.ne.u32 %p2, %r_s, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd3, %rd5, %p2, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	mov.b32 %f9, %f1;
	mov.b32 %r10, %f2; // no accumulator's copy: an instruction that reads
	add.u32 %r10, %r10, 0;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %rd6, %r1, 32; add.s64 %rd7, %rd_o, %rd6;
	st.global.v4.f32 [%rd7], {%f1, %f2, %f3, %f4}; st.global.f32 [%rd7+16], %f9; st.global.u32 [%rd7+20], EARLY;
"""


def wgmma_case(emulator, scale_d, early="0"):
    a, b = integers((64, 16)), integers((8, 16))
    text = ptx(WGMMA.replace("EARLY", early), ("a", "s:u32", "o"), shared=".shared .align 1024 .b8 block[2304];")
    operands = np.concatenate([core_matrices(a).reshape(-1), core_matrices(b).reshape(-1)]).astype(BF16)
    source, out = emulator.put(operands), emulator.empty(128 * 32)
    emulator.launch(emulator.kernel(text, "test"), [source, ctypes.c_uint32(scale_d), out], block=128)
    got = emulator.get(out, (128, 8), np.float32)
    want = a @ b.T + (10 if scale_d else 0)
    t = np.arange(128)
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    want = np.stack([want[row, column], want[row, column + 1], want[row + 8, column], want[row + 8, column + 1]], 1)
    return got, want


@pytest.mark.parametrize("scale_d", [0, 1])
def test_wgmma(emulator, scale_d):
    for order in ORDERS:
        with emulator.order(order):
            got, want = wgmma_case(emulator, scale_d)
        assert (got[:, :4] == want).all()
        assert (got[:, 4] == want[:, 0]).all()  # the copy made before the wait


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def byte_matrices(operand):
    """(rows, 32) bytes as core matrices: 16 bytes of a row, eight rows."""
    rows = operand.shape[0]
    return operand.reshape(rows // 8, 8, 2, 16).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("a_registers", [False, True], ids=["a in shared memory", "a in registers"])
@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
def test_wgmma_of_fp8(emulator, types, a_registers):
    """k is 32; a lane's word i is four of row g or g + 8 (i odd), of the first or second 16 of k (i of 2 and 3)."""
    a, b = integers((64, 32)), integers((8, 32))
    body = WGMMA.replace("m64n8k16.f32.bf16.bf16", f"m64n8k32.f32.{types[0]}.{types[1]}").replace(
        "1, 1, 0, 0;", "1, 1;"
    )
    if a_registers:
        load = "add.s64 %rd8, %rd1, 2304; add.s64 %rd9, %rd_a, %rd8; ld.global.v4.u32 {%r11, %r12, %r13, %r14}, [%rd9];"
        body = body.replace("wgmma.fence.sync.aligned;", load + " wgmma.fence.sync.aligned;", 1)
        body = body.replace("{%f1,%f2,%f3,%f4}, %rd3, %rd5", "{%f1,%f2,%f3,%f4}, {%r11,%r12,%r13,%r14}, %rd5")
    text = ptx(body.replace("EARLY", "0"), ("a", "s:u32", "o"), shared=".shared .align 1024 .b8 block[2304];")
    left, right = a.astype(FP8[types[0]]), b.astype(FP8[types[1]])
    a, b = left.astype(np.float32), right.astype(np.float32)
    t, word = np.arange(128)[:, None, None], np.arange(4)[None, :, None]
    rows = t // 32 * 16 + t % 32 // 4 + word % 2 * 8
    columns = t % 4 * 4 + np.arange(4) + word // 2 * 16
    fragments = left.view(np.uint8)[rows, columns]
    shared = left if not a_registers else np.zeros_like(left)
    parts = [byte_matrices(shared.view(np.uint8)), byte_matrices(right.view(np.uint8)), fragments]
    source, out = emulator.put(np.concatenate([part.reshape(-1) for part in parts])), emulator.empty(128 * 32)
    t = np.arange(128)
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    want = a @ b.T + 10
    want = np.stack([want[row, column], want[row, column + 1], want[row + 8, column], want[row + 8, column + 1]], 1)
    for order in ORDERS:
        with emulator.order(order):
            emulator.launch(emulator.kernel(text, "test"), [source, ctypes.c_uint32(1), out], block=128)
            got = emulator.get(out, (128, 8), np.float32)
        assert (got[:, :4] == want).all()


def test_wgmma_is_poison_before_its_wait(emulator):
    """A register that is read before the wait holds what no program should use."""
    body = WGMMA.replace(
        "mov.b32 %r10, %f2; // no accumulator's copy: an instruction that reads",
        "add.f32 %f10, %f2, 0f00000000; mov.b32 %r10, %f10;",
    )
    text = ptx(body.replace("EARLY", "%r10"), ("a", "s:u32", "o"), shared=".shared .align 1024 .b8 block[2304];")
    source, out = emulator.put(np.zeros(2304 // 2, BF16)), emulator.empty(128 * 32)
    emulator.launch(emulator.kernel(text, "test"), [source, ctypes.c_uint32(0), out], block=128)
    assert np.isnan(emulator.get(out, (128, 8), np.float32)[:, 5]).all()


TENSOR_MEMORY = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
	ld.shared.u32 %r3, [%r2];
	add.u32 %r4, %r1, 100; add.u32 %r5, %r1, 200;
	tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%r4, %r5};
	tcgen05.wait::st.sync.aligned;
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r6, %r7}, [%r3];
	EARLY
	tcgen05.wait::ld.sync.aligned;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_o, %rd1; st.global.v4.u32 [%rd2], {%r6, %r7, %r8, %r8};
	DEALLOC
"""
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;"


def test_tensor_memory_by_registers(emulator):
    text = TENSOR_MEMORY.replace("EARLY", "add.u32 %r8, %r6, 0;").replace("DEALLOC", DEALLOC)
    got = run(emulator, ptx(text, "o", shared=".shared .align 4 .b8 block[4];"), [], (32, 4), np.uint32)
    assert (got[:, 0] == np.arange(32) + 100).all() and (got[:, 1] == np.arange(32) + 200).all()
    assert (got[:, 2] == 0x7FFC0DEA).all()  # read before wait::ld


def test_tensor_memory_must_be_given_back(emulator):
    text = TENSOR_MEMORY.replace("EARLY", "mov.u32 %r8, 0;").replace("DEALLOC", "")
    with pytest.raises(LaunchError, match="tensor memory was not deallocated"):
        run(emulator, ptx(text, "o", shared=".shared .align 4 .b8 block[4];"), [], (32, 4), np.uint32)


# Shared memory: A (128 rows) and B (16 rows) as core matrices. One thread multiplies twice, the second time adding; its
# commit opens the barrier for the others.
TENSOR_PRODUCT = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; mov.u32 %r20, barrier; mov.u32 %r21, place; mov.u32 %r3, %r1;
store:
	shl.b32 %r4, %r3, 4; add.u32 %r5, %r2, %r4; mul.wide.u32 %rd1, %r3, 16; add.s64 %rd2, %rd_a, %rd1;
	ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd2]; st.shared.v4.u32 [%r5], {%r6, %r7, %r8, %r9};
	add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, 288;
	@%p1 bra store;
	shr.u32 %r10, %r1, 5; setp.ne.u32 %p2, %r10, 0;
	@%p2 bra ready;
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], 32;
	setp.ne.u32 %p3, %r1, 0;
	@!%p3 mbarrier.init.shared::cta.b64 [%r20], 1;
ready:
	fence.proxy.async.shared::cta;
	tcgen05.fence::before_thread_sync;
	bar.sync 0;
	tcgen05.fence::after_thread_sync;
	ld.shared.u32 %r11, [%r21];
	setp.ne.u32 %p4, %r1, 0;
	@%p4 bra wait;
	shr.u32 %r12, %r2, 4; cvt.u64.u32 %rd3, %r12; mov.b64 %rd4, 0x0000401000080000; or.b64 %rd3, %rd3, %rd4;
	add.s64 %rd5, %rd3, 256;
	mov.u32 %r13, IDESC; setp.ne.u32 %p5, %r13, %r13; setp.eq.u32 %p6, %r13, %r13;
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd3, %rd5, %r13, %p5;
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd3, %rd5, %r13, %p6;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];
wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p7, [%r20], 0;
	@!%p7 bra wait;
	tcgen05.fence::after_thread_sync;
	shl.b32 %r14, %r10, 21; add.u32 %r15, %r11, %r14;
	tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r15];
	tcgen05.wait::ld.sync.aligned;
	mul.wide.u32 %rd6, %r1, 64; add.s64 %rd7, %rd_o, %rd6;
STORES
	bar.sync 0;
	@%p2 bra done;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
done:
"""


@pytest.mark.parametrize("order", ORDERS)
def test_tensor_memory_product(emulator, order):
    """tcgen05.mma kind::f16 of 128 by 16 by 16, twice: the work of one thread is done in its order."""
    a, b = integers((128, 16)), integers((16, 16))
    registers = [f"%r{30 + i}" for i in range(16)]
    stores = "\n".join(f"\tst.global.u32 [%rd7+{4 * i}], {name};" for i, name in enumerate(registers))
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    text = TENSOR_PRODUCT.replace("IDESC", str(idesc)).replace("REGISTERS", ", ".join(registers))
    shared = ".shared .align 1024 .b8 block[4608];\n.shared .align 8 .b8 barrier[8];\n.shared .align 4 .b8 place[4];"
    operands = np.concatenate([core_matrices(a).reshape(-1), core_matrices(b).reshape(-1)]).astype(BF16)
    text = ptx(text.replace("STORES", stores), "ao", shared=shared, target="sm_100a")
    with emulator.order(order):
        got = run(emulator, text, [operands], (128, 16), np.float32, block=128)
        both_add = run(emulator, text.replace("%r13, %p5;", "%r13, %p6;"), [operands], (128, 16), np.float32, block=128)
    assert (got == 2 * (a @ b.T)).all()
    assert np.isnan(both_add).all()  # to what nobody has written
