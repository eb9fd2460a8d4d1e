"""Matrix instructions against numpy: places of operands in registers and memory, and when results become visible."""

import fractions
import math

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import ORDERS, LaunchError

GENERATOR = np.random.default_rng(7)
BF16 = ml_dtypes.bfloat16


def integers(shape, low=-4, high=5):
    """Small integers as f32: sums of products are exact."""
    return GENERATOR.integers(low, high, size=shape).astype(np.float32)


MATRICES = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; shl.b32 %r3, %r1, 4; add.u32 %r4, %r2, %r3;
	mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2];
	STORE [%r4], {%r5, %r6, %r7, %r8};
	bar.warp.sync -1;
	LOAD {%r10, %r11, %r12, %r13}, [%r4];
	add.s64 %rd3, %rd_o, %rd1; st.global.v4.u32 [%rd3], {%r10, %r11, %r12, %r13};
"""


@pytest.mark.parametrize("form", ["m8n8.x4", "x4.m8n8"])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("store", [False, True], ids=["ldmatrix", "stmatrix"])
def test_matrices_in_registers(emulator, store, trans, form):
    """Lane 4 r + q has elements 2 q and 2 q + 1 of row r of each matrix (transposed: of column r)."""
    moves = {"LOAD": "ld.shared.v4.u32", "STORE": "st.shared.v4.u32"}
    name = f"{'st' if store else 'ld'}matrix.sync.aligned.{form}{trans}.shared.b16"
    if store and trans and form == "x4.m8n8":
        name = "stmatrix.sync.aligned.x4.m8n8.shared.b16.trans"  # as DeepGEMM has it, and ptxas takes it
    elif trans and form == "x4.m8n8":
        name = name.replace(".m8n8.trans", ".trans.m8n8")  # as CUTLASS has it
    moves |= {"STORE" if store else "LOAD": name}
    body = MATRICES.replace("LOAD", moves["LOAD"]).replace("STORE", moves["STORE"])
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    lanes = np.arange(32)
    rows, columns = lanes[:, None] // 4, lanes[:, None] % 4 * 2 + np.arange(2)
    fragments = (matrices.transpose(0, 2, 1) if trans else matrices)[:, rows, columns].transpose(1, 0, 2)
    given, expected = (fragments, matrices) if store else (matrices, fragments)
    shared = ".shared .align 16 .b8 block[512];"
    got = emulator.run(body, [np.ascontiguousarray(given)], expected.shape, np.uint16, shared=shared)
    assert (got == expected).all()


FRAGMENTS = """
	mov.u32 %r1, %tid.x; mul.wide.u32 %rd1, %r1, 16; add.s64 %rd2, %rd_a, %rd1; \
ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd2];
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
    mma = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19};"
    )
    operands = [a_fragments, b_fragments, accumulator_fragments(c)]
    got = emulator.run(FRAGMENTS.replace("MMA", mma), operands, (32, 4), np.float32)
    assert (got == accumulator_fragments(a @ b + c)).all()


def nibbles(codes):
    """(n, 8) codes of four bits as u32, the first lowest."""
    return (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)


def block_scaled(emulator, form, a_codes, b_codes, a_scales, b_scales, c, threads=(0, 0), first=0):
    """The fragments of D of m16n8k64 of E2M1 codes (16, 64) and (8, 64) with scale codes (16, n) and (8, n).

    The scales of lanes and the bytes that the selectors (`threads`, `first`) do not name are wrong."""
    g, q = np.arange(32) // 4, np.arange(32) % 4
    take = lambda codes, rows, first: nibbles(  # noqa: E731
        np.stack([codes[r, f : f + 8] for r, f in zip(rows, first, strict=True)])
    )  # fmt: skip
    a_fragments = np.stack([take(a_codes, g + 8 * (i % 2), 8 * q + 32 * (i // 2)) for i in range(4)], 1)
    b_fragments = np.stack([take(b_codes, g, 8 * q + 32 * i) for i in range(2)], 1)
    both = np.full((32, 8), 0x18, np.uint8)
    blocks = slice(first, first + a_scales.shape[1])
    for lane in range(32):
        if lane % 4 // 2 == threads[0]:
            both[lane, :4][blocks] = a_scales[lane // 4 + 8 * (lane % 2)]
        if lane % 4 == threads[1]:
            both[lane, 4:][blocks] = b_scales[lane // 4]
    mma = "mul.wide.u32 %rd7, %r1, 8; add.s64 %rd8, %rd_d, %rd7; ld.global.v2.u32 {%r30, %r31}, [%rd8];\n\t"
    mma += f".reg .b16 first, ta, tb; mov.u16 first, {first}; mov.u16 ta, {threads[0]}; mov.u16 tb, {threads[1]};\n\t"
    mma += f"mma.sync.aligned.m16n8k64.row.col.kind::{form} "
    mma += (
        "{%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19}, "
        "{%r30}, {first, ta}, {%r31}, {first, tb};"
    )
    operands = [a_fragments, b_fragments, accumulator_fragments(c), both]
    return emulator.run(FRAGMENTS.replace("MMA", mma), operands, (32, 4), np.float32, target="sm_120a")


NVFP4 = "mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


def test_mma_block_scaled(emulator):
    """m16n8k64 of E2M1 with UE4M3 scales of 16 values."""
    a_codes, b_codes = GENERATOR.integers(0, 16, (16, 64)), GENERATOR.integers(0, 16, (8, 64))
    scales = np.array([0.5, 1, 2, 4], np.float32).astype(ml_dtypes.float8_e4m3fn)
    a_pick, b_pick = GENERATOR.integers(0, 4, (16, 4)), GENERATOR.integers(0, 4, (8, 4))
    values = lambda codes: codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # noqa: E731
    left = values(a_codes) * np.repeat(scales[a_pick].astype(np.float32), 16, axis=1)
    right = values(b_codes) * np.repeat(scales[b_pick].astype(np.float32), 16, axis=1)
    c, codes = integers((16, 8), -100, 100), scales.view(np.uint8)
    for threads in ((0, 0), (1, 3)):
        got = block_scaled(emulator, NVFP4, a_codes, b_codes, codes[a_pick], codes[b_pick], c, threads)
        assert (got == accumulator_fragments(left @ right.T + c)).all()
        with_nan = codes[a_pick]
        with_nan[:8, 3] = 0x7F  # NaN, of rows 0 to 7 (PTX ISA, 5.2.3)
        got = block_scaled(emulator, NVFP4, a_codes, b_codes, with_nan, codes[b_pick], c, threads)
        assert np.isnan(got[:, :2]).all() and not np.isnan(got[:, 2:]).any()


@pytest.mark.parametrize("byte_a, byte_b", [(0, 0), (2, 0), (0, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
def test_mma_takes_the_byte_pair_that_its_byte_id_names(emulator, kind, byte_a, byte_b):
    """scale_vec::2X: byte-id 0 takes the lower two bytes of a lane's scales, 2 the upper two (PTX ISA, 9.7.14.3)."""
    scale_a, scale_b = (GENERATOR.integers(124, 131, (rows, 4)).astype(np.uint8) for rows in (16, 8))
    lanes = np.arange(32)
    both = np.concatenate([scale_a[lanes // 4 + 8 * (lanes % 2)], scale_b[lanes // 4]], axis=1)
    ones = np.full((32, 4), 0x22222222, np.uint32)
    mma = "mul.wide.u32 %rd7, %r1, 8; add.s64 %rd8, %rd_d, %rd7; ld.global.v2.u32 {%r30, %r31}, [%rd8];\n\t"
    mma += f".reg .b16 zero, ba, bb; mov.u16 zero, 0; mov.u16 ba, {byte_a}; mov.u16 bb, {byte_b};\n\t"
    mma += f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
    mma += "{%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19}, "
    mma += "{%r30}, {ba, zero}, {%r31}, {bb, zero};"
    operands = [ones, ones[:, :2].copy(), np.zeros((32, 4), np.float32), both]
    got = emulator.run(FRAGMENTS.replace("MMA", mma), operands, (32, 4), np.float32, target="sm_120a")
    left, right = (
        2.0 ** (scales[:, byte : byte + 2].astype(np.float32) - 127)
        for scales, byte in ((scale_a, byte_a), (scale_b, byte_b))
    )
    assert (got == accumulator_fragments(32 * (left @ right.T))).all()


@pytest.mark.parametrize("vector, byte", [("2X", 1), ("2X", 3), ("4X", 2)])
def test_mma_refuses_byte_ids_that_its_scales_do_not_have(emulator, vector, byte):
    kind, scale = ("mxf4", "ue8m0") if vector == "2X" else ("mxf4nvf4", "ue4m3")
    mma = f".reg .b16 zero, ba; mov.u16 zero, 0; mov.u16 ba, {byte};\n\t"
    mma += f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::{vector}.f32.e2m1.e2m1.f32.{scale} "
    mma += "{%r20,%r21,%r22,%r23}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {%r16,%r17,%r18,%r19}, "
    mma += "{%r10}, {ba, zero}, {%r10}, {zero, zero};"
    zeros = [np.zeros((32, n), np.uint32) for n in (4, 2, 4)]
    with pytest.raises(LaunchError, match="no such byte-id"):
        emulator.run(FRAGMENTS.replace("MMA", mma), zeros, (32, 4), np.float32, target="sm_120a")


def scale_value(code, ue8m0):
    if ue8m0:
        return math.nan if code == 255 else 2.0 ** (code - 127)
    return float(np.uint8(code & 127).view(ml_dtypes.float8_e4m3fn))


def plain_sum(a_codes, b_codes, a_scales, b_scales, ue8m0=False):
    """A product of two rows of E2M1 codes as exact integers in each block, and exact fractions between UE4M3 blocks.

    The sum between blocks of UE8M0 is one of doubles, which they may exceed."""
    halves = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    length, total = len(a_codes) // len(a_scales), 0.0 if ue8m0 else fractions.Fraction(0)
    for block, scales in enumerate(zip(a_scales, b_scales, strict=True)):
        a_scale, b_scale = (scale_value(int(code), ue8m0) for code in scales)
        if math.isnan(a_scale + b_scale):
            return math.nan
        ks = range(block * length, (block + 1) * length)
        part = sum(halves[a_codes[k]] * halves[b_codes[k]] for k in ks)
        total += type(total)(a_scale) * type(total)(b_scale) * part / 4
    return float(total)  # exact: 49 bits


def extreme_codes(shape, kind):
    """E2M1 codes: any, the largest of both signs, zeros of both signs, or terms that cancel."""
    if kind == "cancel":
        codes = GENERATOR.integers(0, 8, shape).reshape(-1, 2)
        codes[:, 1] = codes[:, 0] | 8
        return codes.reshape(shape)
    return GENERATOR.choice({"any": range(16), "largest": (7, 15, 7, 7), "zero": (0, 8)}[kind], shape)


@pytest.mark.parametrize("kind", ["any", "largest", "zero", "cancel"])
@pytest.mark.parametrize(
    "form, blocks, first",
    [
        (NVFP4, 4, 0),
        ("mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", 2, 2),
        ("mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0", 4, 0),
    ],
    ids=["ue4m3", "2 of ue8m0", "4 of ue8m0"],
)
def test_mma_block_scaled_at_its_limits(emulator, form, blocks, first, kind):
    """Every scale code, NaN included, as A's and as B's, against plain sums bit for bit."""
    ue8m0 = "ue8m0" in form
    a_scale_codes = GENERATOR.permutation(256).astype(np.uint8).reshape(-1, 16, blocks)
    b_scale_codes = GENERATOR.permutation(256).astype(np.uint8).reshape(-1, 8, blocks)
    for i, b_scales in enumerate(b_scale_codes):
        a_scales = a_scale_codes[i % len(a_scale_codes)]
        a_codes, b_codes = extreme_codes((16, 64), kind), extreme_codes((8, 64), kind)
        if kind == "cancel":
            b_codes[:] = b_codes[:, :1]
        sums = [
            [plain_sum(a_codes[m], b_codes[n], a_scales[m], b_scales[n], ue8m0) for n in range(8)] for m in range(16)
        ]
        sums = np.array(sums)
        with np.errstate(over="ignore", invalid="ignore"):
            # Accumulators that cancel the sum, of the same size, far apart, or zero.
            c = GENERATOR.choice([-1, 1, 2.0**-26, 2.0**26, 0], sums.shape) * np.nan_to_num(sums.astype(np.float32))
            c = c.astype(np.float32)
            want = accumulator_fragments((sums + c.astype(np.float64)).astype(np.float32))
        got = block_scaled(emulator, form, a_codes, b_codes, a_scales, b_scales, c, (1, 2), first)
        want = np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32))
        assert (got.view(np.uint32) == want).all()


def core_matrices(operand):
    """(rows, 16) halves in the layout without swizzle: 8x8 matrices of 128 bytes, those of k next to each other."""
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
	setp.ne.u32 %p2, %r_b, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd3, %rd5, %p2, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	mov.b32 %f9, %f2;
	mov.b32 %r10, %f2; // no accumulator's copy: an instruction that reads
	add.u32 %r10, %r10, 0;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %rd6, %r1, 32; add.s64 %rd7, %rd_o, %rd6;
	st.global.v4.f32 [%rd7], {%f1, %f2, %f3, %f4}; st.global.f32 [%rd7+16], %f9; st.global.u32 [%rd7+20], EARLY;
"""


def wgmma(emulator, body, operands, scale_d, early="0"):
    shared = ".shared .align 1024 .b8 block[2304];"
    return emulator.run(
        body.replace("EARLY", early), [operands, scale_d], (128, 8), np.float32, shared=shared, block=128
    )


def lanes_of(d):
    """(64, 8) as the threads of a warpgroup hold it."""
    t = np.arange(128)
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    return np.stack([d[row, column], d[row, column + 1], d[row + 8, column], d[row + 8, column + 1]], 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale_d", [0, 1])
def test_wgmma(emulator, scale_d, order):
    a, b = integers((64, 16)), integers((8, 16))
    operands = np.concatenate([core_matrices(a).reshape(-1), core_matrices(b).reshape(-1)]).astype(BF16)
    with emulator.order(order):
        got = wgmma(emulator, WGMMA, operands, scale_d)
    want = lanes_of(a @ b.T + (10 if scale_d else 0))
    assert (got[:, :4] == want).all()
    assert (got[:, 4] == want[:, 1]).all()  # the copy made before the wait


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def byte_matrices(operand):
    """(rows, 32) bytes as core matrices: 16 bytes of a row, eight rows."""
    rows = operand.shape[0]
    return operand.reshape(rows // 8, 8, 2, 16).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("a_registers", [False, True], ids=["a in shared memory", "a in registers"])
@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
def test_wgmma_of_fp8(emulator, types, a_registers, order):
    """k is 32; a lane's word i is four of row g or g + 8 (i odd), of the first or second 16 of k (i of 2 and 3)."""
    a, b = integers((64, 32)), integers((8, 32))
    # A small product, which E4M3 sums cut off next to a large one: the last of 13 bits below it is 2^-5.
    a[0], b[0], b[1:, 1] = 0, 0, 0
    a[0, :2], b[0, :2] = (256, 2**-6), (1, 1)
    body = WGMMA.replace("m64n8k16.f32.bf16.bf16", f"m64n8k32.f32.{types[0]}.{types[1]}").replace(
        "1, 1, 0, 0;", "1, 1;"
    )
    if a_registers:
        load = "add.s64 %rd8, %rd1, 2304; add.s64 %rd9, %rd_a, %rd8; ld.global.v4.u32 {%r11, %r12, %r13, %r14}, [%rd9];"
        body = body.replace("wgmma.fence.sync.aligned;", load + " wgmma.fence.sync.aligned;", 1)
        body = body.replace("{%f1,%f2,%f3,%f4}, %rd3, %rd5", "{%f1,%f2,%f3,%f4}, {%r11,%r12,%r13,%r14}, %rd5")
    left, right = a.astype(FP8[types[0]]), b.astype(FP8[types[1]])
    a, b = left.astype(np.float32), right.astype(np.float32)
    t, word = np.arange(128)[:, None, None], np.arange(4)[None, :, None]
    rows = t // 32 * 16 + t % 32 // 4 + word % 2 * 8
    columns = t % 4 * 4 + np.arange(4) + word // 2 * 16
    fragments = left.view(np.uint8)[rows, columns]
    shared = left if not a_registers else np.zeros_like(left)
    parts = [byte_matrices(shared.view(np.uint8)), byte_matrices(right.view(np.uint8)), fragments]
    want = a @ b.T + 10
    if types == ("e4m3", "e4m3"):
        want[0, 0] = 256 + 10
    with emulator.order(order):
        got = wgmma(emulator, body, np.concatenate([part.reshape(-1) for part in parts]), 1)
    assert (got[:, :4] == lanes_of(want)).all()


def test_wgmma_is_poison_before_its_wait(emulator):
    """A register that is read before the wait holds poison."""
    body = WGMMA.replace(
        "mov.b32 %r10, %f2; // no accumulator's copy: an instruction that reads",
        "add.f32 %f10, %f2, 0f00000000; mov.b32 %r10, %f10;",
    )
    assert np.isnan(wgmma(emulator, body, np.zeros(2304 // 2, BF16), 0, "%r10")[:, 5]).all()


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
PLACE = ".shared .align 4 .b8 block[4];"


@pytest.mark.parametrize("loads", [None, "registers"])
def test_tensor_memory_by_registers(emulator, monkeypatch, loads):
    """Registers read before wait::ld are poison, except with PTXEMU_TENSOR_LOADS=registers, as ptxas compiles it."""
    if loads:
        monkeypatch.setenv("PTXEMU_TENSOR_LOADS", loads)
    text = TENSOR_MEMORY.replace("EARLY", "add.u32 %r8, %r6, 0;").replace("DEALLOC", DEALLOC)
    got = emulator.run(text, shape=(32, 4), shared=PLACE, target="sm_100a")
    assert (got[:, 0] == np.arange(32) + 100).all() and (got[:, 1] == np.arange(32) + 200).all()
    assert (got[:, 2] == (np.arange(32) + 100 if loads else 0x7FFC0DEA)).all()


@pytest.mark.parametrize(
    "allocated, given_back, said",
    [
        (32, "", "tensor memory was not deallocated"),
        (32, DEALLOC.replace("%r3, 32;", "%r3, 64;"), "dealloc of what was not allocated so"),
        (64, DEALLOC, "dealloc of what was not allocated so"),
    ],
)
def test_tensor_memory_must_be_given_back(emulator, allocated, given_back, said):
    text = TENSOR_MEMORY.replace("EARLY", "mov.u32 %r8, 0;").replace("DEALLOC", given_back)
    with pytest.raises(LaunchError, match=said):
        emulator.run(text.replace("[%r2], 32;", f"[%r2], {allocated};"), shape=(32, 4), shared=PLACE, target="sm_100a")
