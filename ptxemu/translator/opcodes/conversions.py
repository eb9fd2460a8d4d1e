"""cvt: integers, f32, f64, halves and the small formats, with their rounding and saturation."""

from ..types import BITS
from . import MODES, form, values
from .floats import FTZ, floats

N = r"(8|16|32|64)"
INT = rf"\.(?P<type>[us]{N})"
UNSIGNED, SIGNED = rf"\.(?P<to>u{N})", rf"\.(?P<to>s{N})"
ROUND, WHOLE = r"\.(?P<round>rn|rz|rm|rp)", r"\.(?P<round>rni|rzi|rmi|rpi)"
HALF = r"\.(?P<source>b?f16)"
SATURATED = "saturate_integer<{to:V}>((i128)({1:t}))"
ROUNDED = "(float)round_to_integer((double){1:f},{round:mode})"


def signed(*rows):
    """Rows of a signed result, sign-extended if the register is wider."""
    values(*rows, put=lambda kernel, match, to, value: kernel.put_signed(to, value, BITS[match["to"]]))


values(
    ("cvt", UNSIGNED + INT, "({to:U})({1:t})"),
    ("cvt", r"\.sat" + UNSIGNED + INT, "({to:U})(" + SATURATED + ")"),
    ("cvt", ROUND + r"\.f32" + INT, "float_bits(float_from_integer({1:t},{round:mode}))"),
    ("cvt", r"\.rn\.f64" + INT, "double_bits((double)({1:t}))"),
    ("cvt", r"\.rn\.(?P<to>b?f16)\.(?P<type>[us](8|16|32))", "{to}_from_double((double)({1:t}))"),
    ("cvt", WHOLE + r"\.f64\.f64", "double_bits(round_to_integer({1:d},{round:mode}))"),
    ("cvt", FTZ + r"\.f64\.f32", "double_bits((double){1:f})"),
    ("cvt", r"(\.ftz)?\.f32" + HALF, "float_bits(float_from_{source}({1:16}))"),
    ("cvt", r"\.rna\.tf32\.f32", "tf32_from_bits({1:32})"),
    ("cvt", r"\.rn\.tf32\.f32", "tf32_from_float({1:32})"),
    (
        "cvt",
        r"\.rn\.bf16x2\.ue8m0x2",
        "uint16_t packed={1:16}; (uint32_t)bf16_from_ue8m0(packed>>8)<<16|bf16_from_ue8m0(packed&255)",
    ),
    (
        "cvt",
        r"\.(?P<round>rz|rp)(?P<sat>\.satfinite)?\.ue8m0x2\.f32",
        "(ue8m0_from_float({1:f},{round:mode},{sat:flag})<<8)|ue8m0_from_float({2:f},{round:mode},{sat:flag})",
    ),
)
signed(
    ("cvt", SIGNED + INT, "{1:t}"),
    ("cvt", r"\.sat" + SIGNED + INT, SATURATED),
)
# Out of range saturates, with or without .sat. NaN gives 0, but only the top bit if 64-bit types are involved.
for rows, to in ((values, UNSIGNED), (signed, SIGNED)):
    to = WHOLE + FTZ + r"(\.sat)?" + to
    number = "integer_from_double<{to:V}>"
    rows(
        ("cvt", to + r"\.f64", number + "({1:d},{round:mode},true)"),
        ("cvt", to + r"\.f32", number + "((double){1:f},{round:mode},{to:is_64})"),
        ("cvt", to + HALF, number + "((double)float_from_{source}({1:16}),{round:mode},{to:is_64})"),
    )
floats(
    ("cvt", FTZ + r"(?P<sat>\.sat)?\.f32\.f32", "{1:f}"),
    ("cvt", WHOLE + FTZ + r"(?P<sat>\.sat)?\.f32\.f32", ROUNDED),
    ("cvt", ROUND + FTZ + r"(?P<sat>\.sat)?\.f32\.f64", "float_from_double({1:d},{round:mode})"),
)

HALVES = r"\.(?P<round>rn|rz)(?P<ftz>\.ftz)?(?P<sat>\.satfinite)?(?P<relu>\.relu)?(?P<sat2>\.satfinite)?"


def to_half(kernel, match, operand):
    value = kernel.f32(operand, match["ftz"])
    value = f"relu({value})" if match["relu"] else value
    finite = "true" if match["sat"] or match["sat2"] else "false"
    return f"{match['to']}_from_float({value},{MODES[match['round']]},{finite})"


@form("cvt", HALVES + r"\.(?P<to>b?f16)\.f32")
def f32_to_half(kernel, match, operands):
    return kernel.put(operands[0], to_half(kernel, match, operands[1]))


@form("cvt", HALVES + r"\.(?P<to>b?f16)x2\.f32")
def f32_to_halves(kernel, match, operands):
    high, low = (to_half(kernel, match, operand) for operand in operands[1:3])
    return kernel.put(operands[0], f"((uint32_t){high}<<16)|{low}")


def small(match, values):
    """The two values in a small format, or from one to f16."""
    for value in values:
        value = f"relu({value})" if match["relu"] else value
        if match["to"] == "f16":
            yield f"(uint32_t)f16_from_float({value},kNearest,false)"
        else:
            yield f"{match['to']}_from_float({value})"


@form("cvt", r"\.rn\.satfinite(?P<relu>\.relu)?\.(?P<to>e2m1|e4m3|e5m2)x2\.f32")
def f32_to_small(kernel, match, operands):
    high, low = small(match, (kernel.f32(operand) for operand in operands[1:3]))
    return kernel.put(operands[0], f"pack_small<{BITS[match['to'] + 'x2'] // 2}>({high},{low})")


@form("cvt", r"\.rn\.satfinite(?P<relu>\.relu)?\.(?P<to>e4m3|e5m2)x2\.(?P<source>b?f16)x2")
def halves_to_small(kernel, match, operands):
    high, low = small(match, (f"float_from_{match['source']}((uint16_t)(packed>>{16 * i}))" for i in (1, 0)))
    return f"uint32_t packed={kernel.get(operands[1], 32)}; " + kernel.put(operands[0], f"({high}<<8)|{low}")


@form("cvt", r"\.rn(?P<relu>\.relu)?\.(?P<to>f16)x2\.(?P<source>e2m1|e4m3|e5m2)x2")
def small_to_halves(kernel, match, operands):
    shift = BITS[match["source"] + "x2"] // 2
    codes = (f"float_from_{match['source']}((packed>>{i * shift})&{(1 << shift) - 1})" for i in (1, 0))
    high, low = small(match, codes)
    return f"uint16_t packed={kernel.get(operands[1], 16)}; " + kernel.put(operands[0], f"({high}<<16)|{low}")


PACKED = "(uint32_t)({packed:U})saturate_integer<{packed:V}>((i128)(int32_t){%d:32})"
PACKED = "(" + PACKED % 1 + "<<{packed:bits})|" + PACKED % 2
values(
    ("cvt", r"\.pack\.sat\.(?P<packed>[us](16|8))\.s32", PACKED),
    ("cvt", r"\.pack\.sat\.(?P<packed>[us](16|8))\.s32\.b32", PACKED + "|{3:32}<<16"),
    (
        "cvt",
        r"\.pack\.sat\.(?P<packed>[us])(?P<size>[24])\.s32\.b32",
        "saturate_bits({1:32},{size},{packed:is_signed})<<{size}|saturate_bits({2:32},{size},{packed:is_signed})"
        "|{3:32}<<(2*{size})",
    ),
)
