"""Scalar instructions and their expected results, from Python's integers, exact fractions and other packages' formats.

A case is (name, PTX that leaves its result in %r9 or %rd9, 32 or 64 bits, expected(a, b, c)). Operands: %r1 to %r3
(bits of 32-bit values, as %f1 to %f3 too), %rd1 to %rd3. Scratch: %r4 to %r8, %h1 to %h8, %p1, %p2.
"""

import fractions
import math
import struct

import ml_dtypes
import numpy as np

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
NAN = 0x7FFFFFFF


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) else x


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits32(value):
    """f32 bits of a double, rounded once to nearest; overflow becomes infinity."""
    if math.isnan(value):
        return NAN
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def f64(bits):
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def bits64(value):
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def is_nan(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


def flush(bits):
    return bits & 0x80000000 if (bits & 0x7F800000) == 0 else bits


def float_op(of, ftz=False):
    """Applies `of` in numpy's float32 arithmetic; NaN results are 0x7fffffff."""

    def expected(a, b, c):
        values = [np.uint32(flush(x) if ftz else x).view(np.float32) for x in (a, b, c)]
        with np.errstate(all="ignore"):
            result = int(np.float32(of(*values)).view(np.uint32))
        result = flush(result) if ftz else result
        return NAN if is_nan(result) else result

    return expected


def rounded(exact, mode):
    """f32 bits of an exact fraction in a rounding mode (finite, not zero)."""
    sign = 0x80000000 if exact < 0 else 0
    low, high = 0, 0x7F7FFFFF  # the largest magnitude not above |exact|, by bisection over codes
    magnitude = abs(exact)
    while low < high:
        middle = (low + high + 1) // 2
        if fractions.Fraction(f32(middle)) <= magnitude:
            low = middle
        else:
            high = middle - 1
    if fractions.Fraction(f32(low)) == magnitude:
        return sign | low
    away = (mode == "rp" and exact > 0) or (mode == "rm" and exact < 0)
    return sign | (low + 1 if away else low)


def directed(of, mode):
    def expected(a, b, c):
        values = [f32(x) for x in (a, b, c)]
        if not all(map(math.isfinite, values)):
            return None  # not judged
        exact = of(*map(fractions.Fraction, values))
        if exact == 0:
            return None  # its sign depends on the mode
        return rounded(exact, mode)

    return expected


def fma_exact(a, b, c):
    values = [f32(x) for x in (a, b, c)]
    if not all(map(math.isfinite, values)):
        return None
    x, y, z = map(fractions.Fraction, values)
    exact = x * y + z
    if exact == 0 or abs(exact) >= fractions.Fraction(2) ** 128:
        return None
    low, high = rounded(exact, "rm"), rounded(exact, "rp")
    if low == high:
        return low
    if is_nan(low) or is_nan(high) or not (math.isfinite(f32(low)) and math.isfinite(f32(high))):
        return None
    below, above = exact - fractions.Fraction(f32(low)), fractions.Fraction(f32(high)) - exact
    return low if below < above or (below == above and low % 2 == 0) else high


def to_integer(value, mode, low, high, nan):
    if math.isnan(value):
        return nan
    if math.isinf(value):
        return low if value < 0 else high
    of = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    return min(max(of(value), low), high)


def divide(a, b):
    """Divides toward zero; a division by zero gives all bits set."""
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return a if b == 0 else a - b * divide(a, b)


def field(a, position, length, bits, is_signed):
    position, length = position & 255, length & 255
    if length == 0:
        return 0
    value = (a >> position) & ((1 << length) - 1) if position < bits else 0
    if not is_signed:
        return value & ((1 << bits) - 1)
    last = min(position + length - 1, bits - 1)
    width = last - position + 1 if position < bits else 0
    return (value | (~0 << width) if (a >> last) & 1 else value) & ((1 << bits) - 1)


def inserted(field_bits, into, position, length, bits):
    position, length = position & 255, length & 255
    mask = (((1 << length) - 1) << position) & ((1 << bits) - 1)
    return (into & ~mask) | ((field_bits << position) & mask)


def permuted(a, b, selectors):
    data = struct.pack("<II", a, b)
    result = 0
    for i in range(4):
        selector = (selectors >> (4 * i)) & 15
        byte = data[selector & 7]
        result |= ((255 if byte & 128 else 0) if selector & 8 else byte) << (8 * i)
    return result


def logic(a, b, c, table):
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def find_first(x, is_signed, amount):
    if is_signed and x >> 31:
        x = ~x & M32
    if x == 0:
        return M32
    return 32 - x.bit_length() if amount else x.bit_length() - 1


def minimum(a, b, nan_wins=False, largest=False):
    if is_nan(a) or is_nan(b):
        return NAN if nan_wins or (is_nan(a) and is_nan(b)) else b if is_nan(a) else a
    x, y = f32(a), f32(b)
    if x == y:
        return (a & b) if largest else (a | b)
    return a if (x > y) == largest else b


def half(of, dtype):
    """The low halves of a, b, c in a 16-bit format, computed exactly in double and rounded once."""

    def expected(a, b, c):
        values = [np.uint16(x & 0xFFFF).view(dtype) for x in (a, b, c)]
        if any(not np.isfinite(np.float32(x)) for x in values):
            return None
        return round_once(of(*(fractions.Fraction(float(x)) for x in values)), dtype)

    return expected


def round_once(exact, dtype):
    """Bits of the nearest value of a 16-bit format, ties to even; None if it overflows or is zero."""
    if exact == 0:
        return None
    codes = 0x7C00 if dtype == np.float16 else 0x7F80
    low, high = 0, codes - 1
    value = lambda code: fractions.Fraction(float(np.uint16(code).view(dtype)))  # noqa: E731
    while low < high:
        middle = (low + high + 1) // 2
        if value(middle) <= abs(exact):
            low = middle
        else:
            high = middle - 1
    if low == codes - 1:
        return None
    below, above = abs(exact) - value(low), value(low + 1) - abs(exact)
    code = low if below < above or (below == above and low % 2 == 0) else low + 1
    return code | (0x8000 if exact < 0 else 0)


def unary(text):
    return f"{text} %r9, %r1;"


def binary(text):
    return f"{text} %r9, %r1, %r2;"


def ternary(text):
    return f"{text} %r9, %r1, %r2, %r3;"


def flag(text):
    return f"{text}; selp.u32 %r9, 1, 0, %p1;"


def tf32_nearest(a, b, c):
    """The nearest of the two numbers of 10 mantissa bits around a; of equal ones that whose last bit is 0."""
    if is_nan(a):
        return NAN
    cut, rest = a & ~0x1FFF, a & 0x1FFF
    return cut + 0x2000 if a & 0x7F800000 != 0x7F800000 and (rest > 0x1000 or rest == 0x1000 and cut & 0x2000) else cut


def tanh_of_half(a, b, c):
    value = float(np.uint16(a & 0xFFFF).view(np.float16))
    return None if math.isnan(value) else int(np.float16(math.tanh(value)).view(np.uint16))


CASES = [
    ("add.s32", binary("add.s32"), 32, lambda a, b, c: (a + b) & M32),
    ("add.sat.s32", binary("add.sat.s32"), 32,
     lambda a, b, c: max(-(1 << 31), min((1 << 31) - 1, signed(a) + signed(b))) & M32),
    ("sub.u64", "sub.u64 %rd9, %rd1, %rd2;", 64, lambda a, b, c: (a - b) & M64),
    ("add.cc", "add.cc.u32 %r4, %r1, %r2; addc.u32 %r9, %r2, %r3;", 32, lambda a, b, c: (b + c + (a + b > M32)) & M32),
    ("sub.cc", "sub.cc.u32 %r4, %r1, %r2; subc.u32 %r9, %r2, %r3;", 32, lambda a, b, c: (b - c - (a < b)) & M32),
    ("addc.cc", "add.cc.u32 %r4, %r1, %r2; addc.cc.u32 %r5, %r2, %r3; addc.u32 %r9, %r1, %r3;", 32,
     lambda a, b, c: (a + c + (b + c + (a + b > M32) > M32)) & M32),
    ("mul.lo.s32", binary("mul.lo.s32"), 32, lambda a, b, c: (a * b) & M32),
    ("mul.hi.s32", binary("mul.hi.s32"), 32, lambda a, b, c: (signed(a) * signed(b) >> 32) & M32),
    ("mul.hi.u64", "mul.hi.u64 %rd9, %rd1, %rd2;", 64, lambda a, b, c: a * b >> 64),
    ("mul.wide.s32", "mul.wide.s32 %rd9, %r1, %r2;", 64, lambda a, b, c: (signed(a & M32) * signed(b & M32)) & M64),
    ("mul.wide.u16", "cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; mul.wide.u16 %r9, %h1, %h2;", 32,
     lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF)),
    ("mad.lo.s32", ternary("mad.lo.s32"), 32, lambda a, b, c: (a * b + c) & M32),
    ("div.s32", binary("div.s32"), 32, lambda a, b, c: divide(signed(a), signed(b)) & M32),
    ("rem.u64", "rem.u64 %rd9, %rd1, %rd2;", 64, lambda a, b, c: remainder(a, b) & M64),
    ("abs.s32", unary("abs.s32"), 32, lambda a, b, c: abs(signed(a)) & M32),
    ("neg.s32", unary("neg.s32"), 32, lambda a, b, c: -a & M32),
    ("min.s32", binary("min.s32"), 32, lambda a, b, c: min(signed(a), signed(b)) & M32),
    ("max.s64", "max.s64 %rd9, %rd1, %rd2;", 64, lambda a, b, c: max(signed(a, 64), signed(b, 64)) & M64),
    ("max.u16x2", binary("max.u16x2"), 32, lambda a, b, c: max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16),
    ("dp4a.s32.u32", ternary("dp4a.s32.u32"), 32,
     lambda a, b, c: (c + sum(signed(a >> i & 255, 8) * (b >> i & 255) for i in (0, 8, 16, 24))) & M32),
    ("and.b32", binary("and.b32"), 32, lambda a, b, c: a & b),
    ("not.b32", unary("not.b32"), 32, lambda a, b, c: ~a & M32),
    ("cnot.b32", unary("cnot.b32"), 32, lambda a, b, c: int(a == 0)),
    ("shl.b32", "and.b32 %r4, %r2, 63; shl.b32 %r9, %r1, %r4;", 32, lambda a, b, c: (a << (b & 63)) & M32),
    ("shr.s32", "and.b32 %r4, %r2, 63; shr.s32 %r9, %r1, %r4;", 32, lambda a, b, c: (signed(a) >> (b & 63)) & M32),
    ("shr.s64", "and.b32 %r4, %r2, 127; shr.s64 %rd9, %rd1, %r4;", 64,
     lambda a, b, c: (signed(a, 64) >> (b & 127)) & M64),
    ("shf.r.wrap", ternary("shf.r.wrap.b32"), 32, lambda a, b, c: (b << 32 | a) >> (c & 31) & M32),
    ("shf.l.clamp", "and.b32 %r4, %r3, 63; shf.l.clamp.b32 %r9, %r1, %r2, %r4;", 32,
     lambda a, b, c: ((b << 32 | a) << min(c & 63, 32) >> 32) & M32),
    ("shf.r.clamp", "and.b32 %r4, %r3, 63; shf.r.clamp.b32 %r9, %r1, %r2, %r4;", 32,
     lambda a, b, c: (b << 32 | a) >> min(c & 63, 32) & M32),
    ("bfe.u32", "and.b32 %r4, %r2, 63; and.b32 %r5, %r3, 63; bfe.u32 %r9, %r1, %r4, %r5;", 32,
     lambda a, b, c: field(a, b & 63, c & 63, 32, False)),
    ("bfe.s32", "and.b32 %r4, %r2, 63; and.b32 %r5, %r3, 63; bfe.s32 %r9, %r1, %r4, %r5;", 32,
     lambda a, b, c: field(a, b & 63, c & 63, 32, True)),
    ("bfi.b32", "and.b32 %r4, %r3, 63; shr.u32 %r5, %r3, 26; bfi.b32 %r9, %r1, %r2, %r4, %r5;", 32,
     lambda a, b, c: inserted(a, b, c & 63, c >> 26, 32)),
    ("popc.b32", unary("popc.b32"), 32, lambda a, b, c: bin(a).count("1")),
    ("clz.b32", unary("clz.b32"), 32, lambda a, b, c: 32 - a.bit_length()),
    ("brev.b32", unary("brev.b32"), 32, lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    ("bfind.s32", unary("bfind.s32"), 32, lambda a, b, c: find_first(a, True, False)),
    ("bfind.shiftamt.u32", unary("bfind.shiftamt.u32"), 32, lambda a, b, c: find_first(a, False, True)),
    ("prmt.b32", ternary("prmt.b32"), 32, permuted),
    ("lop3.b32", "lop3.b32 %r9, %r1, %r2, %r3, 0xe2;", 32, lambda a, b, c: logic(a, b, c, 0xE2)),
    ("selp.b32", "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r9, %r2, %r3, %p1;", 32,
     lambda a, b, c: b if signed(a) < signed(b) else c),
    ("setp.hi.u32", flag("setp.hi.u32 %p1, %r1, %r2"), 32, lambda a, b, c: int(a > b)),
    ("setp.and", "setp.ne.s32 %p2, %r3, 0; " + flag("setp.ge.and.s32 %p1, %r1, %r2, %p2"), 32,
     lambda a, b, c: int(signed(a) >= signed(b) and c != 0)),
    ("setp.lt.f32", flag("setp.lt.f32 %p1, %r1, %r2"), 32, lambda a, b, c: int(f32(a) < f32(b))),
    ("setp.ne.f32", flag("setp.ne.f32 %p1, %r1, %r2"), 32, lambda a, b, c: int(f32(a) < f32(b) or f32(a) > f32(b))),
    ("setp.neu.f32", flag("setp.neu.f32 %p1, %r1, %r2"), 32, lambda a, b, c: int(not f32(a) == f32(b))),
    ("setp.nan.f32", flag("setp.nan.f32 %p1, %r1, %r2"), 32, lambda a, b, c: int(is_nan(a) or is_nan(b))),
    ("add.rn.f32", binary("add.rn.f32"), 32, float_op(lambda a, b, c: a + b)),
    ("add.ftz.f32", binary("add.ftz.f32"), 32, float_op(lambda a, b, c: a + b, ftz=True)),
    ("sub.f32", binary("sub.f32"), 32, float_op(lambda a, b, c: a - b)),
    ("mul.f32", binary("mul.f32"), 32, float_op(lambda a, b, c: a * b)),
    ("div.rn.f32", binary("div.rn.f32"), 32, float_op(lambda a, b, c: a / b)),
    ("rcp.rn.f32", unary("rcp.rn.f32"), 32, float_op(lambda a, b, c: np.float32(1) / a)),
    ("sqrt.rn.f32", unary("sqrt.rn.f32"), 32, float_op(lambda a, b, c: np.sqrt(a))),
    ("fma.rn.f32", ternary("fma.rn.f32"), 32, fma_exact),
    ("add.rz.f32", binary("add.rz.f32"), 32, directed(lambda a, b, c: a + b, "rz")),
    ("mul.rp.f32", binary("mul.rp.f32"), 32, directed(lambda a, b, c: a * b, "rp")),
    ("fma.rz.f32", ternary("fma.rz.f32"), 32, directed(lambda a, b, c: a * b + c, "rz")),
    ("min.f32", binary("min.f32"), 32, lambda a, b, c: minimum(a, b)),
    ("max.f32", binary("max.f32"), 32, lambda a, b, c: minimum(a, b, largest=True)),
    ("max.NaN.f32", binary("max.NaN.f32"), 32, lambda a, b, c: minimum(a, b, nan_wins=True, largest=True)),
    ("add.f64", "add.rn.f64 %rd9, %rd1, %rd2;", 64, lambda a, b, c: double_sum(f64(a), f64(b))),
    ("cvt.s64.s32", "cvt.s64.s32 %rd9, %r1;", 64, lambda a, b, c: signed(a & M32) & M64),
    ("cvt.u32.u16", "cvt.u16.u32 %h1, %r1; cvt.u32.u16 %r9, %h1;", 32, lambda a, b, c: a & 0xFFFF),
    ("cvt.s32.s8", unary("cvt.s32.s8"), 32, lambda a, b, c: signed(a & 255, 8) & M32),
    ("cvt.sat.u8.s32", unary("cvt.sat.u8.s32"), 32, lambda a, b, c: max(0, min(255, signed(a)))),
    ("cvt.rn.f32.u32", unary("cvt.rn.f32.u32"), 32, lambda a, b, c: int(np.float32(np.uint32(a)).view(np.uint32))),
    ("cvt.rz.f32.s32", unary("cvt.rz.f32.s32"), 32,
     lambda a, b, c: rounded(fractions.Fraction(signed(a)), "rz") if a else 0),
    ("cvt.rni.s32.f32", unary("cvt.rni.s32.f32"), 32,
     lambda a, b, c: to_integer(f32(a), "rni", -(1 << 31), (1 << 31) - 1, 0) & M32),
    ("cvt.rzi.s32.f32", unary("cvt.rzi.s32.f32"), 32,
     lambda a, b, c: to_integer(f32(a), "rzi", -(1 << 31), (1 << 31) - 1, 0) & M32),
    ("cvt.rpi.u32.f32", unary("cvt.rpi.u32.f32"), 32, lambda a, b, c: to_integer(f32(a), "rpi", 0, M32, 0)),
    ("cvt.rzi.s64.f64", "cvt.rzi.s64.f64 %rd9, %rd1;", 64,
     lambda a, b, c: to_integer(f64(a), "rzi", -(1 << 63), (1 << 63) - 1, 1 << 63) & M64),
    ("cvt.rmi.f32.f32", unary("cvt.rmi.f32.f32"), 32, float_op(lambda a, b, c: np.floor(a))),
    ("cvt.f64.f32", "cvt.f64.f32 %rd9, %r1;", 64, lambda a, b, c: None if is_nan(a & M32) else bits64(f32(a & M32))),
    ("cvt.rn.f32.f64", "cvt.rn.f32.f64 %r9, %rd1; cvt.u64.u32 %rd9, %r9;", 64, lambda a, b, c: bits32(f64(a))),
    ("cvt.rz.f32.f64", "cvt.rz.f32.f64 %r9, %rd1; cvt.u64.u32 %rd9, %r9;", 64, lambda a, b, c: double_to_zero(f64(a))),
    ("cvt.pack", "cvt.pack.sat.s16.s32 %r9, %r1, %r2;", 32,
     lambda a, b, c: (saturated(a) & 0xFFFF) << 16 | saturated(b) & 0xFFFF),
    ("cvt.pack of s4", "cvt.pack.sat.s4.s32.b32 %r9, %r1, %r2, %r3;", 32,
     lambda a, b, c: c << 8 & M32 | (max(-8, min(7, signed(a))) & 15) << 4 | max(-8, min(7, signed(b))) & 15),
    ("cvt.pack of u2", "cvt.pack.sat.u2.s32.b32 %r9, %r1, %r2, %r3;", 32,
     lambda a, b, c: c << 4 & M32 | max(0, min(3, signed(a))) << 2 | max(0, min(3, signed(b)))),
    ("cvt.rn.tf32.f32", "cvt.rn.tf32.f32 %r9, %r1;", 32, tf32_nearest),
    ("tanh.approx.f16", "tanh.approx.f16x2 %r9, %r1; and.b32 %r9, %r9, 0xffff;", 32, tanh_of_half),
    ("fma.rn.f16x2.relu", "fma.rn.f16x2.relu %r9, %r1, %r2, %r3; and.b32 %r9, %r9, 0xffff;", 32,
     half(lambda a, b, c: max(a * b + c, 0), np.float16)),
    ("mov.b64", "mov.b64 %rd9, {%r1, %r2};", 64, lambda a, b, c: (b & M32) << 32 | a & M32),
    ("add.f16", "cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; add.f16 %h3, %h1, %h2; cvt.u32.u16 %r9, %h3;", 32,
     half(lambda a, b, c: a + b, np.float16)),
    ("mul.bf16", "cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2; mul.bf16 %h3, %h1, %h2; cvt.u32.u16 %r9, %h3;", 32,
     half(lambda a, b, c: a * b, ml_dtypes.bfloat16)),
    ("fma.rn.f16", "fma.rn.f16x2 %r9, %r1, %r2, %r3; and.b32 %r9, %r9, 0xffff;", 32,
     half(lambda a, b, c: a * b + c, np.float16)),
    ("fma.rn.bf16", "fma.rn.bf16x2 %r9, %r1, %r2, %r3; and.b32 %r9, %r9, 0xffff;", 32,
     half(lambda a, b, c: a * b + c, ml_dtypes.bfloat16)),
    ("cvt.rz.f16.f32", "cvt.rz.f16.f32 %h1, %r1; cvt.u32.u16 %r9, %h1;", 32, lambda a, b, c: half_to_zero(a)),
]  # fmt: skip


def saturated(x):
    return max(-(1 << 15), min((1 << 15) - 1, signed(x)))


def double_sum(a, b):
    with np.errstate(all="ignore"):
        result = float(np.float64(a) + np.float64(b))
    return None if math.isnan(result) else bits64(result)


def double_to_zero(value):
    if not math.isfinite(value):
        return bits32(value)
    return rounded(fractions.Fraction(value), "rz") if value else bits64(value) >> 32


def half_to_zero(bits):
    value = f32(bits)
    if not math.isfinite(value) or value == 0:
        return None
    low = np.float16(min(abs(value), 65504.0))
    if float(low) > abs(value):
        low = np.nextafter(low, np.float16(0))
    return int(low.view(np.uint16)) | (0x8000 if bits >> 31 else 0)


def operands(count, bits, seed):
    """(3, count) values: special ones of integers and floats in all pairs first, then random ones."""
    generator = np.random.default_rng(seed)
    if bits == 32:
        special = [0, 1, 2, 31, 32, 33, M32, 1 << 31, (1 << 31) - 1, 0x3F800000, 0xBF800000, 0x3F800001, 0x40490FDB]
        special += [0x7F800000, 0xFF800000, 0x7FC01234, 0xFFFFFFFF, 0x00000001, 0x80000000, 0x007FFFFF, 0x00800000]
        special += [0x7F7FFFFF, 0x4F000000, 0xCF000000, 0x3F000000, 0x3FC00000, 0x40200000, 0x33800000, 0x477FE000]
        special += [0x387FC000]
    else:
        floats = (1.0, -1.5, 1 + 2**-30, 1e300, 0.1, math.inf, -math.inf, math.nan, 2.0**63, -(2.0**63), 3.99999999,
                  1 + 2**-24)  # fmt: skip
        special = [0, 1, M64, 1 << 63, (1 << 63) - 1, *map(bits64, floats)]
    first = [(a, b, special[(i * 7 + j) % len(special)]) for i, a in enumerate(special) for j, b in enumerate(special)]
    values = generator.integers(0, 1 << bits, size=(3, count), dtype=np.uint64)
    # Half of the random ones have exponents near each other, so that sums and comparisons are not trivial.
    near = generator.integers(0x3E000000, 0x42000000, size=(3, count // 2), dtype=np.uint64)
    if bits == 64:
        near = np.array([[bits64(f32(int(x)) * (1 + 2**-40)) for x in row] for row in near], dtype=np.uint64)
    values[:, count // 2 : count // 2 + near.shape[1]] = near
    values[:, : len(first)] = np.array(first, dtype=object).T.astype(np.uint64)[:, :count]
    return values
