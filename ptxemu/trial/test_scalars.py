"""Tests of scalar instructions on many values, against trial/scalars.py, and of small formats on all their values."""

import ml_dtypes
import numpy as np
import pytest

from trial.emulator import ptx
from trial.scalars import CASES, NAN, operands

COUNT = 2048


def scalar_kernel(cases):
    """One thread an element: operands from three arrays of 64 bits, each case's result into an array of its own."""
    lines = ["mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ntid.x; mov.u32 %r12, %tid.x; mad.lo.s32 %r13, %r10, %r11, %r12;"]
    lines.append("mul.wide.u32 %rd10, %r13, 8;")
    for i, letter in enumerate("abc"):
        lines.append(
            f"add.s64 %rd11, %rd_{letter}, %rd10; ld.global.u64 %rd{i + 1}, [%rd11]; cvt.u32.u64 %r{i + 1}, %rd{i + 1};"
        )
    lines.append("add.s64 %rd12, %rd_o, %rd10;")
    for i, (_, text, bits, _) in enumerate(cases):
        result = "" if bits == 64 else " cvt.u64.u32 %rd9, %r9;"
        lines.append(f"{{ {text}{result} st.global.u64 [%rd12+{i * COUNT * 8}], %rd9; }}")
    return "\n".join(lines)


@pytest.mark.parametrize("bits", [32, 64])
def test_scalars(emulator, bits):
    cases = [case for case in CASES if case[2] == bits]
    values = operands(COUNT, bits, seed=bits)
    results = emulator.run(
        scalar_kernel(cases), list(values), (len(cases), COUNT), np.uint64, grid=COUNT // 256, block=256
    )
    judged = 0
    for (name, _, _, expected), row in zip(cases, results, strict=True):
        for a, b, c, got in zip(*(column.tolist() for column in values), row.tolist(), strict=True):
            want = expected(a, b, c)
            if want is None:
                continue
            judged += 1
            assert got == want, f"{name} of {a:#x}, {b:#x}, {c:#x}: expected {want:#x}, got {got:#x}"
    assert judged > len(cases) * COUNT // 2


def convert(emulator, text, values, dtype=np.uint32):
    """text: PTX from %r1 (bits of one value) to %r9. Returns its results for all values."""
    body = f"""
	mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ntid.x; mov.u32 %r12, %tid.x; mad.lo.s32 %r13, %r10, %r11, %r12;
	mul.lo.s32 %r14, %r13, 32; // 32 values a thread
	mul.wide.u32 %rd1, %r14, 4; add.s64 %rd2, %rd_a, %rd1; add.s64 %rd3, %rd_o, %rd1;
	mov.u32 %r15, 0;
again:
	ld.global.u32 %r1, [%rd2]; mov.b32 %f1, %r1;
	{text}
	st.global.u32 [%rd3], %r9;
	add.s64 %rd2, %rd2, 4; add.s64 %rd3, %rd3, 4; add.u32 %r15, %r15, 1;
	setp.lt.u32 %p9, %r15, 32;
	@%p9 bra again;
"""
    padded = np.zeros(-(-len(values) // 4096) * 4096, np.uint32)
    padded[: len(values)] = values
    got = emulator.run(body, [padded], len(padded), grid=len(padded) // 4096, block=128, target="sm_100a")
    return got[: len(values)].astype(dtype)


def expect(got, want, values, what):
    wrong = np.nonzero(got != want)[0]
    assert len(wrong) == 0, (
        f"{what} of {int(values[wrong[0]]):#x}: expected {int(want[wrong[0]]):#x}, got {int(got[wrong[0]]):#x}"
    )


# Every upper half of a float, with lower halves around each point at which a rounding may go either way.
FLOATS = (np.arange(65536, dtype=np.uint32)[:, None] << 16 | np.array([0, 1, 0x8000, 0xFFFF], np.uint32)).reshape(-1)
FINITE = FLOATS[np.isfinite(FLOATS.view(np.float32))]
IS_NAN = np.isnan(FLOATS.view(np.float32))


def nearest(dtype, largest=None):
    """Returns FLOATS as the package itself converts them, saturated if `largest` is given."""
    values = FLOATS.view(np.float32)
    with np.errstate(all="ignore"):
        if largest:
            values = np.clip(values, -np.float32(largest), np.float32(largest))
        return values.astype(dtype).view(np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16).astype(np.uint32)


HALF = "cvt.rn.TYPE.f32 %h1, %f1; cvt.u32.u16 %r9, %h1;"
# Packed conversions have a one, in E2M1 a four, in the other half.
PACKED = "mov.f32 %f2, 0f3F800000; cvt.rn.satfinite.TYPE.f32 %h1, OPERANDS; cvt.u32.u16 %r9, %h1;"
E2M1 = ".reg .b8 code; mov.f32 %f2, 0f40800000; cvt.rn.satfinite.e2m1x2.f32 code, %f2, %f1; cvt.u32.u8 %r9, code;"


@pytest.mark.parametrize(
    "name, text, dtype, largest, nan, place",
    [
        ("f16", HALF, np.float16, None, 0x7FFF, lambda x: x),
        ("bf16", HALF, ml_dtypes.bfloat16, None, 0x7FFF, lambda x: x),
        ("e4m3x2", PACKED.replace("OPERANDS", "%f2, %f1"), ml_dtypes.float8_e4m3fn, 448, 0x7F, lambda x: 0x3800 | x),
        ("e5m2x2", PACKED.replace("OPERANDS", "%f1, %f2"), ml_dtypes.float8_e5m2, 57344, 0x7F, lambda x: x << 8 | 0x3C),
        ("e2m1x2", E2M1, ml_dtypes.float4_e2m1fn, 6, 7, lambda x: 0x60 | x & 15),
    ],
)
def test_f32_to(emulator, name, text, dtype, largest, nan, place):
    got = convert(emulator, text.replace("TYPE", name), FLOATS)
    expect(got, place(np.where(IS_NAN, nan, nearest(dtype, largest))), FLOATS, f"cvt.{name}")


def test_f32_to_ue8m0(emulator):
    positive = FINITE[FINITE < 0x80000000]
    down, up = (
        convert(emulator, f"cvt.{mode}.satfinite.ue8m0x2.f32 %h1, 0f00000000, %f1; cvt.u32.u16 %r9, %h1;", positive)
        for mode in ("rz", "rp")
    )
    exact = positive.view(np.float32).astype(np.float64)
    fields = positive >> 23
    # A power of two is its own exponent; otherwise the next one below or above.
    whole = (positive & 0x7FFFFF) == 0
    expect(down, np.where(fields == 0, 0, fields), positive, "cvt.rz.ue8m0x2")
    want = np.minimum(np.where(whole, fields, fields + 1), 254)
    want = np.where(fields == 0, np.where(exact > 2.0**-127, 1, 0), want)
    expect(up, want, positive, "cvt.rp.ue8m0x2")


def test_every_small_code(emulator):
    """e4m3, e5m2 and e2m1 to f16, UE8M0 to bf16: all codes, in both halves."""
    codes = np.arange(256, dtype=np.uint32)
    for name, dtype in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        text = f"mov.u32 %r4, 0x3800; or.b32 %r4, %r4, %r1; cvt.u16.u32 %h1, %r4; cvt.rn.f16x2.{name}x2 %r9, %h1;"
        got = convert(emulator, text, codes)
        values = codes.astype(np.uint8).view(dtype).astype(np.float16)
        want = np.where(np.isnan(values), 0x7FFF, values.view(np.uint16)).astype(np.uint32)
        high = np.array([0x38], np.uint8).view(dtype).astype(np.float16).view(np.uint16)[0]
        expect(got, int(high) << 16 | want, codes, f"cvt.f16x2.{name}x2")
    got = convert(emulator, ".reg .b8 code; cvt.u8.u32 code, %r1; cvt.rn.f16x2.e2m1x2 %r9, code;", codes)
    table = ml_dtypes.float4_e2m1fn
    low, high = (
        (codes >> shift & 15).astype(np.uint8).view(table).astype(np.float16).view(np.uint16).astype(np.uint32)
        for shift in (0, 4)
    )
    expect(got, high << 16 | low, codes, "cvt.f16x2.e2m1x2")
    got = convert(emulator, "cvt.u16.u32 %h1, %r1; cvt.rn.bf16x2.ue8m0x2 %r9, %h1; and.b32 %r9, %r9, 0xffff;", codes)
    values = codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32).astype(ml_dtypes.bfloat16)
    want = np.where(codes == 255, 0x7FFF, values.view(np.uint16)).astype(np.uint32)
    expect(got, want, codes, "cvt.bf16x2.ue8m0x2")


def test_every_half(emulator):
    codes = np.arange(65536, dtype=np.uint32)
    for name, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        got = convert(emulator, f"cvt.u16.u32 %h1, %r1; cvt.f32.{name} %f2, %h1; mov.b32 %r9, %f2;", codes)
        with np.errstate(all="ignore"):
            values = codes.astype(np.uint16).view(dtype).astype(np.float32)
        wrong = (got != values.view(np.uint32)) & ~(np.isnan(values) & ((got & 0x7FFFFFFF) > 0x7F800000))
        assert not wrong.any(), f"cvt.f32.{name} of {codes[wrong][0]:#x}"


def test_nan_is_canonical(emulator):
    """An operation's NaN has one pattern, for every input NaN."""
    got = convert(emulator, "add.f32 %f2, %f1, %f1; mov.b32 %r9, %f2;", FLOATS[IS_NAN])
    assert (got == NAN).all()


def test_atomics_return_the_old_value(emulator):
    body = """
	mov.u32 %r1, %tid.x;
	atom.global.add.u32 %r2, [%rd_a], 3;
	mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd_o, %rd1;
	st.global.u32 [%rd2], %r2;
	atom.global.max.s32 %r3, [%rd_a+4], %r1;
	add.u32 %r7, %r1, 100; atom.global.cas.b32 %r4, [%rd_a+8], %r1, %r7; // lane 7 alone finds what it expects
	atom.global.inc.u32 %r5, [%rd_a+12], 5;
	red.global.or.b32 [%rd_a+16], %r1;
	atom.global.add.f32 %f1, [%rd_a+20], 0f3F000000;
	atom.global.exch.b32 %r6, [%rd_a+24], %r1;
"""
    start = np.array([10, -5, 7, 0, 64, 0, 1234], np.int32)
    cells, out = emulator.put(start), emulator.empty(32 * 4)
    emulator.launch(emulator.kernel(ptx(body, "ao"), "test"), [cells, out])
    assert sorted(emulator.get(out, 32, np.uint32)) == [10 + 3 * i for i in range(32)]
    after = emulator.get(cells, 7, np.int32)
    assert after[:5].tolist() == [10 + 96, 31, 107, 32 % 6, 64 | 31]
    assert after[5:6].view(np.float32)[0] == 16.0 and 0 <= after[6] < 32
