"""tcgen05.mma of every kind but f16 and the first NVFP4 one, and tcgen05.cp of every shape."""

import fractions

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import LaunchError
from trial.test_tensor_pairs import product, scale_atom

GENERATOR = np.random.default_rng(17)
# Keys: the type's code in an instruction descriptor.
SMALL = {
    0: ml_dtypes.float8_e4m3fn,
    1: ml_dtypes.float8_e5m2,
    3: ml_dtypes.float6_e2m3fn,
    4: ml_dtypes.float6_e3m2fn,
    5: ml_dtypes.float4_e2m1fn,
}
WIDTHS = {0: 8, 1: 8, 3: 6, 4: 6, 5: 4}
F32, S32 = 1 << 4, 2 << 4
ROWS, COLUMNS = 128, 16


def descriptor(a, b, bits=F32, n=COLUMNS):
    return bits | a << 7 | b << 10 | n // 8 << 17 | ROWS // 16 << 24


def core(rows):
    """(rows, 32) bytes as core matrices of 8 rows by 16 bytes."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)


def run(emulator, issue, parts, idesc):
    """D after `issue`, whose instruction descriptor is an input, so that one kernel serves many."""
    data = np.concatenate([*parts, np.array([idesc, 0, 0, 0], np.uint32).view(np.uint8)])
    load = f"\tld.global.u32 %r13, [%rd21+{data.size - 16}];\n"
    return product(emulator, [data], load + issue, 0, 1)[0]


def codes(kind, rows):
    """Random codes (rows, 32) without NaN, of exponents whose sums double holds, and their values."""
    drawn = GENERATOR.integers(0, 1 << WIDTHS[kind], (rows, 32)).astype(np.uint8)
    if kind == 0:
        drawn[drawn & 0x7F == 0x7F] = 0x7E
    if kind == 1:
        drawn = (drawn & 0x83) | GENERATOR.integers(8, 23, drawn.shape).astype(np.uint8) << 2
    return drawn, drawn.view(SMALL[kind]).astype(np.float64)


def operand(kind, drawn):
    """Codes as rows of 32 bytes: 16 values and, if they are short, padding, which must not count."""
    width = WIDTHS[kind]
    bits = np.unpackbits(drawn[..., None], axis=-1, bitorder="little")[..., :width].reshape(-1, 2, 16 * width)
    padding = GENERATOR.integers(0, 2, (bits.shape[0], 2, 128 - 16 * width)).astype(np.uint8)
    return core(np.packbits(np.concatenate([bits, padding], -1), axis=-1, bitorder="little").reshape(-1, 32))


def test_kind_f8f6f4(emulator):
    """All pairs of types, with and without negated operands. Sums are exact and rounded once."""
    issue = "\ttcgen05.mma.cta_group::1.kind::f8f6f4 [%r11], %rd3, %rd5, %r13, %p5;\n"
    for i, kinds in enumerate((a, b) for a in SMALL for b in SMALL):
        (a_codes, a), (b_codes, b) = codes(kinds[0], ROWS), codes(kinds[1], COLUMNS)
        negated = i % 4
        parts = [operand(kinds[0], a_codes), operand(kinds[1], b_codes)]
        got = run(emulator, issue, parts, descriptor(*kinds, F32 | negated << 13))
        want = (a @ b.T * (-1) ** (negated in (1, 2))).astype(np.float32)
        assert (got == want).all(), (kinds, negated)


def test_kind_tf32(emulator):
    """The upper 19 bits of a number count."""
    issue = "\ttcgen05.mma.cta_group::1.kind::tf32 [%r11], %rd3, %rd5, %r13, %p5;\n"
    a, b = (GENERATOR.integers(-1000, 1000, (rows, 8)).astype(np.float32) for rows in (ROWS, COLUMNS))
    more = [(x.view(np.uint32) | GENERATOR.integers(0, 1 << 13, x.shape).astype(np.uint32)) for x in (a, b)]
    got = run(emulator, issue, [core(x) for x in more], descriptor(2, 2))
    assert (got == a @ b.T).all()


@pytest.mark.parametrize("saturates", [False, True])
def test_kind_i8(emulator, saturates):
    """D begins with what tcgen05.cp has written: numbers that sums leave the range of s32 from."""
    issue = """
	add.s64 %rd7, %rd3, 288; tcgen05.cp.cta_group::1.128x256b [%r11], %rd7;
	add.s64 %rd7, %rd3, 544; add.u32 %r24, %r11, 8; tcgen05.cp.cta_group::1.128x256b [%r24], %rd7;
	tcgen05.mma.cta_group::1.kind::i8 [%r11], %rd3, %rd5, %r13, %p6;
"""
    before = GENERATOR.choice([2**31 - 1, -(2**31), 0, 2**31 - 9000], (ROWS, 16)).astype(np.int32)
    for a_type, b_type in ((0, 0), (0, 1), (1, 0), (1, 1)):
        a, b = (GENERATOR.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (ROWS, COLUMNS))
        parts = [core(a), core(b), core(before[:, :8]), core(before[:, 8:])]
        got = run(emulator, issue, parts, descriptor(a_type, b_type, S32 | saturates << 3)).view(np.int32)
        left, right = (x.view(np.int8 if kind else np.uint8).astype(np.int64) for x, kind in ((a, a_type), (b, b_type)))
        want = left @ right.T + before
        assert (want != want.astype(np.int32)).any()
        assert (got == (np.clip(want, -(2**31), 2**31 - 1) if saturates else want.astype(np.int32))).all()


# Scales of A and of B lie after B, in 512 bytes each.
SCALES = """
	sub.s64 %rd7, %rd3, 0x800000000; // 128 bytes from eight lines to the next
	add.s64 %rd8, %rd7, 288; add.s64 %rd9, %rd7, 320; add.u32 %r24, %r11, 16; add.u32 %r25, %r11, 20;
	tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %rd8; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r25], %rd9;
"""
UE8M0 = 1 << 23


def scaled_mma(form, accumulate="%p5"):
    return f"\ttcgen05.mma.cta_group::1.kind::{form} [%r11], %rd3, %rd5, %r13, [%r24], [%r25], {accumulate};\n"


def test_kind_mxf8f6f4(emulator):
    """One scale a row: the byte that the descriptor names, differently for A and for B."""
    issue = SCALES + scaled_mma("mxf8f6f4.block_scale") + scaled_mma("mxf8f6f4.block_scale.scale_vec::1X", "%p6")
    for i, kinds in enumerate(((0, 0), (1, 0), (0, 5), (5, 3), (4, 1))):
        (a_codes, a), (b_codes, b) = codes(kinds[0], ROWS), codes(kinds[1], COLUMNS)
        scales_a, scales_b = (GENERATOR.integers(1, 254, (128, 4)).astype(np.uint8) for _ in range(2))
        scales_b = np.clip(scales_b, 110, 140)
        scales_a = np.clip(scales_a, 110, 140)
        id_a, id_b = i % 4, (i + 1 + i // 4) % 4
        scales_a[3, id_a] = 255  # NaN
        parts = [operand(kinds[0], a_codes), operand(kinds[1], b_codes), scale_atom(scales_a), scale_atom(scales_b)]
        got = run(emulator, issue, parts, descriptor(*kinds, UE8M0 | id_a << 29 | id_b << 4, COLUMNS))
        factors = np.ldexp(1.0, scales_a[:, id_a, None].astype(int) + scales_b[None, :16, id_b].astype(int) - 254)
        factors[3] = np.nan
        want = (2 * (a @ b.T).astype(np.float32).astype(np.float64) * factors).astype(np.float32)
        assert ((got == want) | (np.isnan(got) & np.isnan(want))).all(), kinds


def test_kinds_of_e2m1_with_two_scales(emulator):
    """mxf4, and mxf4nvf4 with blocks of 32: the pair of bytes that the descriptor names."""
    names = ("mxf4.block_scale", "mxf4.block_scale.block32", "mxf4nvf4.block_scale.scale_vec::2X")
    issue = SCALES + "".join(scaled_mma(name, "%p6" if i else "%p5") for i, name in enumerate(names))
    for id_a, id_b in ((0, 0), (2, 0), (0, 2)):
        a, b = (GENERATOR.integers(0, 256, (rows, 32)).astype(np.uint8) for rows in (ROWS, COLUMNS))
        scales = [GENERATOR.integers(125, 130, (128, 4)).astype(np.uint8) for _ in range(2)]
        values = []
        for part, scale, first in ((a, scales[0], id_a), (b, scales[1], id_b)):
            nibbles = np.stack([part & 15, part >> 4], -1).reshape(-1, 64)
            factors = np.ldexp(1.0, scale[: len(part), first : first + 2].astype(int) - 127)
            values.append(nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(factors, 32, 1))
        parts = [core(a), core(b), *map(scale_atom, scales)]
        got = run(emulator, issue, parts, descriptor(1, 1, UE8M0 | id_a << 29 | id_b << 4))
        assert (got == 3 * (values[0] @ values[1].T)).all()


PLAIN = "\ttcgen05.mma.cta_group::1.kind::{} [%r11], %rd3, %rd5, %r13, %p5;\n"
MX8, MX4, NV4 = "mxf8f6f4.block_scale", "mxf4.block_scale", "mxf4nvf4.block_scale.scale_vec::4X"


@pytest.mark.parametrize("kind, idesc, said", [
    ("f8f6f4", descriptor(0, 0, n=8), "N must be a multiple of 16 with M = 128"),
    ("f8f6f4", descriptor(2, 0), "kind::f8f6f4: operands must be E4M3, E5M2, E2M3, E3M2 or E2M1"),
    ("f8f6f4", descriptor(0, 0, 0), "D must be f32"),
    ("f8f6f4", descriptor(0, 0, F32 | 8), "bits 3, 6, 23 and 29 of the instruction descriptor must be 0"),
    ("f8f6f4", descriptor(0, 0, F32 | 1 << 15), "operands that are not K-major are not supported"),
    ("tf32", descriptor(1, 2), "kind::tf32: operands must be tf32"),
    ("i8", descriptor(0, 0, S32 | 1 << 14), "kind::i8: operands cannot be negated"),
    ("i8", descriptor(0, 0), "kind::i8: D must be s32"),
    ("i8", descriptor(0, 2, S32), "kind::i8: operands must be u8 or s8"),
    (MX8, descriptor(0, 0, 0), "blocks of 32 require UE8M0 scales"),
    (MX8, descriptor(0, 6, UE8M0), "kind::mxf8f6f4: operands must be"),
    (MX8, descriptor(0, 0, UE8M0 | 1 << 31), "bit 31 of the instruction descriptor must be 0"),
    (MX4, descriptor(1, 1, UE8M0 | 1 << 4), "scale selectors must be 0 or 2"),
    (MX4, descriptor(1, 0, UE8M0), "kind::mxf4: operands must be E2M1"),
    (NV4, descriptor(1, 1, 2 << 29), "scale selectors must be 0 for blocks of 16"),
    (NV4, descriptor(1, 1, UE8M0), "UE8M0 scales of blocks of 16 are not supported"),
])  # fmt: skip
def test_descriptors_that_a_kind_does_not_take(emulator, kind, idesc, said):
    """PTX ISA, 9.7.16.4: the tables of instruction descriptors, and 9.7.16.2.1, the shapes of each kind."""
    issue = SCALES + scaled_mma(kind) if "scale" in kind else PLAIN.format(kind)
    with pytest.raises(LaunchError) as raised:
        run(emulator, issue, [np.zeros(8192, np.uint8)], idesc)
    assert said in str(raised.value) and "PTX line " in str(raised.value)


# CuTe's Copy_Traits<SM100_UTCCP_...>: the lanes of (row, copy), as shapes and strides of ValID, and bytes of a row.
COPIES = {
    "128x256b": ((128, 1), (1, 0), 32),
    "128x128b": ((128, 1), (1, 0), 16),
    "32x128b.warpx4": ((32, 4), (1, 32), 16),
    "4x256b": ((4, 1), (32, 0), 32),
    "64x128b.warpx2::02_13": ((64, 2), (1, 64), 16),
    "64x128b.warpx2::01_23": (((32, 2), 2), ((1, 64), 32), 16),
}


def test_shapes_of_copies(emulator):
    """Each copies to columns of its own; lanes that it does not name keep their poison."""
    image = np.arange(128 * 8, dtype=np.uint32).reshape(128, 8) + 1000
    columns, lines, want = 0, [], np.full((128, 32), 0x7FFC0DEA, np.uint32)
    for name, (shape, stride, size) in COPIES.items():
        lines.append(f"add.u32 %r24, %r11, {columns}; tcgen05.cp.cta_group::1.{name} [%r24], %rd3;")
        row_shape, row_stride = (shape[0], stride[0]) if isinstance(shape[0], tuple) else ((shape[0],), (stride[0],))
        for row in range(int(np.prod(row_shape))):
            first, rest = 0, row
            for extent, step in zip(row_shape, row_stride, strict=True):
                first, rest = first + rest % extent * step, rest // extent
            for copy in range(shape[1]):
                want[first + copy * stride[1], columns : columns + size // 4] = image[row, : size // 4]
        columns += size // 4
    assert columns == 32
    for column in (0, 16):
        got = product(emulator, [core(image)], "\n".join(lines), 0, 1, column)[0]
        assert (got.view(np.uint32) == want[:, column : column + 16]).all()


def test_sums_are_rounded_once(emulator):
    """A sum whose terms are lost one by one: 2^13 and 32 terms of half of its last bit, against exact fractions."""
    issue = "\ttcgen05.mma.cta_group::1.kind::f8f6f4 [%r11], %rd3, %rd5, %r13, %p5;\n"
    a, b = np.full((ROWS, 32), 2.0**-9), np.ones((COLUMNS, 32))
    a[:, 0], b[:, 0] = 256, 448
    parts = [core(x.astype(SMALL[0])) for x in (a, b)]
    exact = sum(fractions.Fraction(x) * fractions.Fraction(y) for x, y in zip(a[0], b[0], strict=True))
    assert (run(emulator, issue, parts, descriptor(0, 0)) == np.float32(float(exact))).all()
