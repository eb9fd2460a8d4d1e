"""Layouts of matrices against those of CuTe, which CUTLASS's kernels use on chips.

They are those of operands with a swizzle, of registers of tcgen05.ld, of D's lanes and of rows of scales.

The layouts are CuTe's shapes and strides as its headers have them, evaluated here: cute/atom/copy_traits_sm100.hpp,
mma_traits_sm100.hpp and mma_traits_sm90_gmma.hpp.
"""

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import ORDERS
from trial.test_matrices import BF16, DEALLOC, PLACE, integers, lanes_of
from trial.test_tensor_pairs import packed, product, scale_atom, scaled

GENERATOR = np.random.default_rng(13)


def at(shape, stride, index):
    """CuTe's layout: the offset of a coordinate, which is taken apart from the first dimension on."""
    if not isinstance(shape, tuple):
        return index % shape * stride
    offset = 0
    for part, step in zip(shape, stride, strict=True):
        size = int(np.prod(np.array(flat(part))))
        offset += at(part, step, index % size)
        index //= size
    return offset


def flat(shape):
    return [n for part in shape for n in flat(part)] if isinstance(shape, tuple) else [shape]


def swizzled(operand, bits):
    """(rows, k) of two-byte elements in Swizzle<bits,4,3> o ((8,m),(T,2)):((2^bits T,SBO),(1,T)), as bytes."""
    pitch = 16 << bits
    rows = np.ascontiguousarray(operand.astype(BF16)).view(np.uint8)
    assert rows.shape[1] == pitch  # a row fills the swizzle's width
    image = np.empty(rows.size, np.uint8)
    for row in range(rows.shape[0]):
        for byte in range(pitch):
            address = at((8, rows.shape[0] // 8), (pitch, 8 * pitch), row) + byte
            image[address ^ (address >> 3 & ((1 << bits) - 1) << 4)] = rows[row, byte]
    return image


def descriptor(bits, layout_type, at_bit, version=0):
    """The descriptor's constant bits: from eight rows to the next (SBO), the swizzle, and the version."""
    return (8 * (16 << bits) >> 4) << 32 | layout_type << at_bit | version << 46


WGMMA = """
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; mov.u32 %r3, %r1;
store:
	shl.b32 %r4, %r3, 4; add.u32 %r4, %r2, %r4; mul.wide.u32 %rd1, %r3, 16; add.s64 %rd2, %rd_a, %rd1;
	ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd2]; st.shared.v4.u32 [%r4], {%r5, %r6, %r7, %r8};
	add.u32 %r3, %r3, 128; setp.lt.u32 %p1, %r3, ITEMS; @%p1 bra store;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	add.u32 %r9, %r2, STEP; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd3, %r9; mov.b64 %rd4, DESCRIPTOR; or.b64 %rd3, %rd3, %rd4;
	add.s64 %rd5, %rd3, B_AT; setp.ne.u32 %p2, %r1, %r1;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd3, %rd5, %p2, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	mul.wide.u32 %rd6, %r1, 16; add.s64 %rd7, %rd_o, %rd6; st.global.v4.f32 [%rd7], {%f1, %f2, %f3, %f4};
"""


# The last 16 of each row's k: a step of k that lies in the swizzle's width.
@pytest.mark.parametrize("bits, layout_type", [(1, 3), (2, 2), (3, 1)], ids=["32 bytes", "64 bytes", "128 bytes"])
def test_wgmma_of_swizzled_operands(emulator, bits, layout_type):
    k = 8 << bits
    a, b = integers((64, k)), integers((8, k))
    image = np.concatenate([swizzled(a, bits), swizzled(b, bits)])
    text = WGMMA.replace("ITEMS", str(image.size // 16)).replace("STEP", str(2 * (k - 16)))
    text = text.replace("B_AT", str(128 * k >> 4)).replace("DESCRIPTOR", str(descriptor(bits, layout_type, 62)))
    shared = f".shared .align 1024 .b8 block[{image.size}];"
    got = emulator.run(text, [image], (128, 4), np.float32, shared=shared, block=128)
    assert (got == lanes_of(a[:, -16:] @ b[:, -16:].T)).all()


@pytest.mark.parametrize("bits, layout_type", [(1, 6), (2, 4), (3, 2)], ids=["32 bytes", "64 bytes", "128 bytes"])
def test_tcgen05_of_swizzled_operands(emulator, bits, layout_type):
    k = 8 << bits
    a, b = integers((128, k)), integers((16, k))
    issue = f"""
	cvt.u64.u32 %rd30, %r12; mov.b64 %rd31, {descriptor(bits, layout_type, 61, 1)}; or.b64 %rd30, %rd30, %rd31;
	add.s64 %rd30, %rd30, {2 * (k - 16) >> 4}; add.s64 %rd31, %rd30, {256 * k >> 4};
	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd30, %rd31, %r13, %p5;
"""
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    got = product(emulator, [np.concatenate([swizzled(a, bits), swizzled(b, bits)])], issue, idesc, 1)
    assert (got[0] == a[:, -16:] @ b[:, -16:].T).all()


# Copy_Traits<SM100_TMEM_LOAD_...>::DstLayout: (lane, bit of its registers) to a bit of the rows of ValID's width. With
# .pack::16b ValID has 16 bits of each cell.
LOADS = {
    ("16x64b", 1, False): (((2, 2, 8), (32,)), ((512, 32, 64), (1,))),
    ("16x64b", 4, False): (((2, 2, 8), (32, 4)), ((2048, 32, 256), (1, 64))),
    ("16x64b", 2, True): (((2, 2, 8), (32, 2)), ((1024, 32, 128), (1, 64))),
    ("16x32bx2", 2, False): (((16, 2), (64,)), ((128, 64), (1,))),
    ("16x32bx2", 4, True): (((16, 2), (128,)), ((256, 128), (1,))),
    ("16x128b", 1, False): (((4, 8), (32, 2)), ((32, 128), (1, 1024))),
    ("16x128b", 2, True): (((4, 8), (32, 2, 2)), ((32, 256), (1, 2048, 128))),
    ("16x256b", 1, True): (((4, 8), (64, 2)), ((64, 256), (1, 2048))),
    ("16x256b", 2, False): (((4, 8), (64, 2, 2)), ((64, 512), (1, 4096, 256))),
    ("16x256b", 4, False): (((4, 8), (64, 2, 4)), ((64, 1024), (1, 8192, 256))),
    ("32x32b", 4, True): (((32,), (128,)), ((128,), (1,))),
}


@pytest.mark.parametrize("shape, repeats, packed", LOADS)
def test_registers_of_tensor_memory(emulator, shape, repeats, packed):
    """A cell holds 32 times its lane plus its column, in the lower or the upper 16 lanes of the warp.

    The same registers are stored to columns of their own and loaded again."""
    rows = 32 if shape == "32x32b" else 16
    width = {"16x32bx2": 64}.get(shape, int(shape[3:].rstrip("b").split("b")[0])) * repeats // 32  # columns
    registers = rows * width // 32
    cells, loaded, again = (
        "{" + ", ".join(f"%r{first + i}" for i in range(n)) + "}"
        for first, n in ((20, 32), (60, registers), (80, registers))
    )
    lines = "\n".join(f"\tadd.u32 %r{20 + i}, %r4, {i};" for i in range(32))
    stores = "\n".join(
        f"\tst.global.u32 [%rd2+{4 * i}], %r{60 + i}; st.global.u32 [%rd2+{4 * (registers + i)}], %r{80 + i};"
        for i in range(registers)
    )
    # The second half's distance in cells, as CuTe gives it.
    split = f", {width // 2 * (2 if packed else 1)}" if shape == "16x32bx2" else ""
    form = f"{shape}.x{repeats}"
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    body = f"""
	mov.u32 %r1, %tid.x; mov.u32 %r2, block; mul.lo.u32 %r4, %r1, 32; or.b32 %r4, %r4, {0xABC00000 if packed else 0};
{lines}
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64; ld.shared.u32 %r3, [%r2];
	tcgen05.st.sync.aligned.32x32b.x32.b32 [%r3], {cells};
	tcgen05.wait::st.sync.aligned;
	shl.b32 %r5, %r_a, 16; add.u32 %r5, %r5, %r3; add.u32 %r6, %r5, 32;
	tcgen05.ld.sync.aligned.{form}{pack}.b32 {loaded}, [%r5]{split};
	tcgen05.wait::ld.sync.aligned;
	tcgen05.st.sync.aligned.{form}{unpack}.b32 [%r6]{split}, {loaded};
	tcgen05.wait::st.sync.aligned;
	tcgen05.ld.sync.aligned.{form}{pack}.b32 {again}, [%r6]{split};
	tcgen05.wait::ld.sync.aligned;
	mul.wide.u32 %rd1, %r1, {8 * registers}; add.s64 %rd2, %rd_o, %rd1;
{stores}
	{DEALLOC.replace("32;", "64;")}
"""
    (lanes, values), (lane_stride, value_stride) = LOADS[shape, repeats, packed]
    size = 16 if packed else 32
    for half in (0, 16) if rows == 16 else (0,):
        got = emulator.run(body, [half], shape=(32, 2, registers), shared=PLACE, target="sm_100a")
        assert (got[:, 0] == got[:, 1]).all()
        parts = got[:, 0].copy().view(np.uint16 if packed else np.uint32)
        for lane in range(32):
            for i in range(parts.shape[1]):
                bits = at(lanes, lane_stride, lane) + at(values, value_stride, size * i)
                row, bit = divmod(bits, 32 * width)
                assert parts[lane, i] == 32 * (half + row) + bit // size, (lane, i)


def lanes_and_columns(shape, stride, rows, columns):
    """tmem_frg's tmem_atom: of (row, column) of D the lane, and the column of tensor memory (its stride is 128)."""
    for row in range(rows):
        for column in range(columns):
            address = at(shape[0], stride[0], row) + at(shape[1], stride[1], column)
            yield row, column, address % 128, address // 128


@pytest.mark.parametrize("order", ORDERS)
def test_product_of_64_rows(emulator, order):
    """D of M = 64: 16 rows in each of the four groups of 32 lanes; the other lanes keep what they have."""
    a, b = integers((64, 16)), integers((16, 16))
    operands = [np.concatenate([core(a), np.zeros(1024, BF16), core(b)])]
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (64 // 16) << 24
    issue = "	tcgen05.mma.cta_group::1.kind::f16 [%r11], %rd3, %rd5, %r13, %p5;\n"
    with emulator.order(order):
        got = product(emulator, operands, issue, idesc, 1)[0]
    want = np.full((128, 16), np.nan, np.float32)
    for row, column, lane, place in lanes_and_columns(((16, 4), 16), ((1, 32), 128), 64, 16):
        want[lane, place] = (a @ b.T)[row, column]
    assert ((got == want) | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize("order", ORDERS)
def test_product_of_a_pair_with_64_rows_each(emulator, order):
    """D of M = 128 of a pair: the left half of the columns in lanes 0 to 63, the right half in the others."""
    a, b = integers((128, 16)), integers((32, 16))
    halves = [(a[:64], b[:16]), (a[64:], b[16:])]
    operands = [np.concatenate([core(left), np.zeros(1024, BF16), core(right)]) for left, right in halves]
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (32 // 8) << 17 | (128 // 16) << 24
    issue = "	tcgen05.mma.cta_group::2.kind::f16 [%r11], %rd3, %rd5, %r13, %p5;\n"
    with emulator.order(order):
        got = product(emulator, operands, issue, idesc, 2)
    want = np.empty((2, 128, 16), np.float32)
    for row, column, lane, place in lanes_and_columns((64, (16, 2)), (1, (128, 64)), 64, 32):
        for rank in range(2):
            want[rank, lane, place] = (a[64 * rank :] @ b.T)[row, column]
    assert (got == want).all()


def core(operand):
    """(rows, 16) halves as core matrices, one after the other."""
    return operand.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1).astype(BF16)


@pytest.mark.parametrize("order", ORDERS)
def test_scales_of_rows_past_128(emulator, order):
    """N = 256: tmem_sf_frg puts the scales of row r into lane r % 32 and column r / 32, and its four bytes are k's.

    The scale 0x7f is NaN (PTX ISA, 5.2.3), and makes a row or a column of D NaN."""
    scales = GENERATOR.choice(np.array([0.5, 1, 2, 4], ml_dtypes.float8_e4m3fn), (384, 4))
    a, b = (GENERATOR.integers(0, 16, (rows, 64)).astype(np.uint8) for rows in (128, 256))
    for nan in (False, True):
        if nan:
            scales[[5, 128 + 131], [2, 3]] = np.nan
            assert scales.view(np.uint8)[5, 2] == 0x7F
        atoms = [scale_atom(part) for part in scales.view(np.uint8).reshape(3, 128, 4)]
        lines = ["sub.s64 %rd7, %rd3, 0x800000000; // 128 bytes from eight lines to the next"]
        for i in range(3):
            lines.append(f"add.s64 %rd8, %rd7, {768 + 32 * i}; add.u32 %r24, %r11, {256 + 4 * i};")
            lines.append("tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %rd8;")
        lines.append("add.u32 %r24, %r11, 256; add.u32 %r25, %r11, 260;")
        lines.append("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%r11], %rd3, %rd5, %r13, [%r24], ")
        lines[-1] += "[%r25], %p5;"
        idesc = 1 << 7 | 1 << 10 | (256 // 8) << 17 | (128 // 16) << 24
        want = scaled(a, scales[:128]) @ scaled(b, scales[128:]).T
        for column in (0, 128, 240):
            with emulator.order(order):
                operands = [np.concatenate([packed(a), packed(b), *atoms])]
                got = product(emulator, operands, "\n".join(lines), idesc, 1, column, allocated=512)[0]
            part = want[:, column : column + 16]
            assert ((got == part) | (np.isnan(got) & np.isnan(part))).all()
            assert np.isnan(got).any() == nan
