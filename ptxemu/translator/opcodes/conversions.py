"""cvt: integers, f32, f64, halves and the small formats, with their rounding and saturation."""

from ..errors import TranslationError
from ..types import BITS, SIGNED, UNSIGNED, arithmetic
from . import form

INT = r"[us](8|16|32|64)"
ROUNDED = {"rni": "kNearest", "rzi": "kToZero", "rmi": "kDown", "rpi": "kUp"}
MODES = {"rn": "kNearest", "rz": "kToZero", "rm": "kDown", "rp": "kUp"}


def widened(kernel, kind, operand):
    return kernel.get_typed(operand, kind)


@form("cvt", rf"(?P<sat>\.sat)?\.(?P<to>{INT})\.(?P<source>{INT})")
def integer_to_integer(kernel, match, operands):
    to, bits = match["to"], BITS[match["to"]]
    value = widened(kernel, match["source"], operands[1])
    if match["sat"]:
        value = f"saturate_integer<{arithmetic(to)}>((i128)({value}))"
    if to[0] == "s":
        return kernel.put_signed(operands[0], value, bits)
    return kernel.put(operands[0], f"({UNSIGNED[bits]})({value})")


@form("cvt", rf"\.(?P<round>rn|rz|rm|rp)\.(?P<to>f32)\.(?P<source>{INT})")
def integer_to_f32(kernel, match, operands):
    value = widened(kernel, match["source"], operands[1])
    return kernel.put(operands[0], f"float_bits(float_from_integer({value},{MODES[match['round']]}))")


@form("cvt", rf"\.rn\.f64\.(?P<source>{INT})")
def integer_to_f64(kernel, match, operands):
    return kernel.put(operands[0], f"double_bits((double)({widened(kernel, match['source'], operands[1])}))")


@form("cvt", rf"\.rn\.(?P<to>b?f16)\.(?P<source>{INT})")
def integer_to_half(kernel, match, operands):
    if BITS[match["source"]] > 32:
        raise TranslationError("64-bit integers to halves are not supported")
    return kernel.put(
        operands[0], f"{match['to']}_from_double((double)({widened(kernel, match['source'], operands[1])}))"
    )


@form("cvt", rf"\.(?P<round>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?(\.sat)?\.(?P<to>{INT})\.(?P<source>f32|f64|b?f16)")
def float_to_integer(kernel, match, operands):
    # Out of range saturates, .sat or not. NaN gives 0, but the top bit alone where 64-bit types take part.
    to, source = match["to"], match["source"]
    if source == "f64":
        value = kernel.f64(operands[1])
    elif source == "f32":
        value = f"(double){kernel.f32(operands[1], match['ftz'])}"
    else:
        value = f"(double)float_from_{source}({kernel.get(operands[1], 16)})"
    number = f"integer_from_double<{arithmetic(to)}>({value},{ROUNDED[match['round']]},{'true' if source == 'f64' or BITS[to] == 64 else 'false'})"
    if to[0] == "s":
        return kernel.put_signed(operands[0], number, BITS[to])
    return kernel.put(operands[0], number)


@form("cvt", r"(\.(?P<round>rni|rzi|rmi|rpi))?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32\.f32")
def f32_to_f32(kernel, match, operands):
    value = kernel.f32(operands[1], match["ftz"])
    if match["round"]:
        value = f"(float)round_to_integer((double){value},{ROUNDED[match['round']]})"
    return kernel.put_f32(operands[0], value, match["ftz"], match["sat"])


@form("cvt", r"\.(?P<round>rni|rzi|rmi|rpi)\.f64\.f64")
def f64_to_f64(kernel, match, operands):
    value = f"round_to_integer({kernel.f64(operands[1])},{ROUNDED[match['round']]})"
    return kernel.put(operands[0], f"double_bits({value})")


@form("cvt", r"(?P<ftz>\.ftz)?\.f64\.f32")
def f32_to_f64(kernel, match, operands):
    return kernel.put(operands[0], f"double_bits((double){kernel.f32(operands[1], match['ftz'])})")


@form("cvt", r"\.(?P<round>rn|rz|rm|rp)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32\.f64")
def f64_to_f32(kernel, match, operands):
    value = f"float_from_double({kernel.f64(operands[1])},{MODES[match['round']]})"
    return kernel.put_f32(operands[0], value, match["ftz"], match["sat"])


@form("cvt", r"(\.ftz)?\.f32\.(?P<source>b?f16)")
def half_to_f32(kernel, match, operands):
    return kernel.put(operands[0], f"float_bits(float_from_{match['source']}({kernel.get(operands[1], 16)}))")


HALVES = r"\.(?P<round>rn|rz)(?P<ftz>\.ftz)?(?P<sat>\.satfinite)?(?P<relu>\.relu)?(?P<sat2>\.satfinite)?"


def to_half(kernel, match, kind, operand):
    value = kernel.f32(operand, match["ftz"])
    if match["relu"]:
        value = f"relu({value})"
    finite = "true" if match["sat"] or match["sat2"] else "false"
    return f"{kind}_from_float({value},{MODES[match['round']]},{finite})"


@form("cvt", HALVES + r"\.(?P<to>b?f16)\.f32")
def f32_to_half(kernel, match, operands):
    return kernel.put(operands[0], to_half(kernel, match, match["to"], operands[1]))


@form("cvt", HALVES + r"\.(?P<to>b?f16)x2\.f32")
def f32_to_halves(kernel, match, operands):
    high, low = (to_half(kernel, match, match["to"], operand) for operand in operands[1:3])
    return kernel.put(operands[0], f"((uint32_t){high}<<16)|{low}")


SMALL = r"\.rn\.satfinite(?P<relu>\.relu)?\.(?P<to>e2m1|e4m3|e5m2)x2"


@form("cvt", SMALL + r"\.f32")
def f32_to_small(kernel, match, operands):
    shift = BITS[match["to"] + "x2"] // 2
    values = [kernel.f32(operand) for operand in operands[1:3]]
    if match["relu"]:
        values = [f"relu({value})" for value in values]
    high, low = (f"{match['to']}_from_float({value})" for value in values)
    return kernel.put(operands[0], f"pack_small<{shift}>({high},{low})")


@form("cvt", SMALL.replace("e2m1|", "") + r"\.(?P<source>b?f16)x2")
def halves_to_small(kernel, match, operands):
    values = [f"float_from_{match['source']}((uint16_t)(packed>>{16 * i}))" for i in (1, 0)]
    if match["relu"]:
        values = [f"relu({value})" for value in values]
    high, low = (f"{match['to']}_from_float({value})" for value in values)
    return f"uint32_t packed={kernel.get(operands[1], 32)}; " + kernel.put(operands[0], f"({high}<<8)|{low}")


@form("cvt", r"\.rn(?P<relu>\.relu)?\.f16x2\.(?P<source>e2m1|e4m3|e5m2)x2")
def small_to_halves(kernel, match, operands):
    shift = BITS[match["source"] + "x2"] // 2
    values = [f"float_from_{match['source']}((packed>>{i * shift})&{(1 << shift) - 1})" for i in (1, 0)]
    if match["relu"]:
        values = [f"relu({value})" for value in values]
    high, low = (f"(uint32_t)f16_from_float({value},kNearest,false)" for value in values)
    return f"uint16_t packed={kernel.get(operands[1], 16)}; " + kernel.put(operands[0], f"({high}<<16)|{low}")


@form("cvt", r"\.(?P<round>rz|rp)(?P<sat>\.satfinite)?\.ue8m0x2\.f32")
def f32_to_scales(kernel, match, operands):
    high, low = (
        f"ue8m0_from_float({kernel.f32(operand)},{MODES[match['round']]},{'true' if match['sat'] else 'false'})"
        for operand in operands[1:3]
    )
    return kernel.put(operands[0], f"({high}<<8)|{low}")


@form("cvt", r"\.rn\.bf16x2\.ue8m0x2")
def scales_to_halves(kernel, match, operands):
    value = "(uint32_t)bf16_from_ue8m0(packed>>8)<<16|bf16_from_ue8m0(packed&255)"
    return f"uint16_t packed={kernel.get(operands[1], 16)}; {kernel.put(operands[0], value)}"


@form("cvt", r"\.(?P<round>rna|rn|rz)(?P<sat>\.satfinite)?\.tf32\.f32")
def f32_to_tf32(kernel, match, operands):
    if match["round"] != "rna" or match["sat"]:
        raise TranslationError("tf32 is supported with .rna alone")
    return kernel.put(operands[0], f"tf32_from_bits({kernel.get(operands[1], 32)})")


@form("cvt", r"\.pack\.sat\.(?P<to>[us](16|8|4|2))\.s32(\.b32)?")
def pack(kernel, match, operands):
    if match["to"] not in ("u16", "s16", "u8", "s8"):
        raise TranslationError("cvt.pack of fewer than 8 bits is not supported")
    bits = int(match["to"][1:])
    kind = SIGNED[bits] if match["to"][0] == "s" else UNSIGNED[bits]
    high, low = (
        f"(uint32_t)({UNSIGNED[bits]})saturate_integer<{kind}>((i128){kernel.get_signed(x, 32)})" for x in operands[1:3]
    )
    rest = f"|{kernel.get(operands[3], 32)}<<16" if len(operands) > 3 else ""
    return kernel.put(operands[0], f"({high}<<{bits})|{low}{rest}")
