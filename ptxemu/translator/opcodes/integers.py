"""Integer arithmetic: add to rem, min, max, dp4a, with carries and packed halves."""

from ..types import BITS, SIGNED, UNSIGNED, arithmetic
from . import form

INTEGER = r"\.(?P<type>[us](16|32|64))"
SYMBOL = {"add": "+", "sub": "-", "mul": "*", "min": "<", "max": ">"}


@form("add", INTEGER)
def add(kernel, match, operands, symbol="+"):
    bits = BITS[match["type"]]
    return kernel.put(
        operands[0], f"({UNSIGNED[bits]})({kernel.get(operands[1], bits)}{symbol}{kernel.get(operands[2], bits)})"
    )


@form("sub", INTEGER)
def sub(kernel, match, operands):
    return add(kernel, match, operands, "-")


@form("add", r"\.sat\.s32")
def add_saturated(kernel, match, operands, name="add"):
    return kernel.put(operands[0], f"saturated_{name}({kernel.get(operands[1], 32)},{kernel.get(operands[2], 32)})")


@form("sub", r"\.sat\.s32")
def sub_saturated(kernel, match, operands):
    return add_saturated(kernel, match, operands, "sub")


@form("add", r"\.(?P<type>[us]16x2)")
def add_halves(kernel, match, operands):
    return kernel.put(operands[0], f"add_u16x2({kernel.get(operands[1], 32)},{kernel.get(operands[2], 32)})")


@form("add", r"\.cc\.(?P<type>[us](32|64))")
@form("addc", r"(?P<out>\.cc)?\.(?P<type>[us](32|64))")
def add_carry(kernel, match, operands):
    bits = BITS[match["type"]]
    first, second = kernel.get(operands[1], bits), kernel.get(operands[2], bits)
    carry_in = "+T->carry" if "out" in match else ""
    carry_out = f" T->carry=(uint32_t)(sum>>{bits})&1;" if "out" not in match or match["out"] else ""
    return f"u128 sum=(u128){first}+(u128){second}{carry_in}; {kernel.put(operands[0], f'({UNSIGNED[bits]})sum')}{carry_out}"


@form("sub", r"\.cc\.(?P<type>[us](32|64))")
@form("subc", r"(?P<out>\.cc)?\.(?P<type>[us](32|64))")
def sub_borrow(kernel, match, operands):
    bits = BITS[match["type"]]
    first, second = kernel.get(operands[1], bits), kernel.get(operands[2], bits)
    borrow_in = "-T->carry" if "out" in match else ""
    borrow_out = f" T->carry=(uint32_t)(sum>>{bits})&1;" if "out" not in match or match["out"] else ""
    return f"u128 sum=(u128){first}-(u128){second}{borrow_in}; {kernel.put(operands[0], f'({UNSIGNED[bits]})sum')}{borrow_out}"


def product(kernel, kind, first, second, wide):
    """Both factors widened to `wide`."""
    return f"({wide}){kernel.get_typed(first, kind)}*({wide}){kernel.get_typed(second, kind)}"


@form("mul", r"\.lo" + INTEGER)
@form("mad", r"\.lo" + INTEGER)
def mul_lo(kernel, match, operands):
    bits = BITS[match["type"]]
    # 16-bit factors would be multiplied as int, whose overflow is undefined.
    factors = product(kernel, f"u{bits}", operands[1], operands[2], UNSIGNED[max(bits, 32)])
    return kernel.put(operands[0], f"{factors}{f'+{kernel.get(operands[3], bits)}' if len(operands) > 3 else ''}")


@form("mul", r"\.wide\.(?P<type>[us](16|32))")
@form("mad", r"\.wide\.(?P<type>[us](16|32))")
def mul_wide(kernel, match, operands):
    kind, bits = match["type"], 2 * BITS[match["type"]]
    wide = SIGNED[bits] if kind[0] == "s" else UNSIGNED[bits]
    added = f"+{kernel.get(operands[3], bits)}" if len(operands) > 3 else ""
    return kernel.put(
        operands[0], f"({UNSIGNED[bits]})({product(kernel, kind, operands[1], operands[2], wide)}){added}"
    )


@form("mul", r"\.hi" + INTEGER)
@form("mad", r"\.hi" + INTEGER)
def mul_hi(kernel, match, operands):
    kind, bits = match["type"], BITS[match["type"]]
    factors = ",".join(kernel.get(operand, bits) for operand in operands[1:3])
    added = f"+{kernel.get(operands[3], bits)}" if len(operands) > 3 else ""
    return kernel.put(operands[0], f"high_product<{arithmetic(kind)}>({factors}){added}")


@form("mul24", r"\.lo\.(?P<type>[us]32)")
@form("mad24", r"\.lo\.(?P<type>[us]32)")
def mul24(kernel, match, operands):
    low = f"low24_{match['type'][0]}"
    added = f"+{kernel.get(operands[3], 32)}" if len(operands) > 3 else ""
    return kernel.put(operands[0], f"{low}({kernel.get(operands[1], 32)})*{low}({kernel.get(operands[2], 32)}){added}")


@form("div", INTEGER)
def div(kernel, match, operands, name="divide"):
    kind = match["type"]
    return kernel.put(
        operands[0], f"{name}({kernel.get_typed(operands[1], kind)},{kernel.get_typed(operands[2], kind)})"
    )


@form("rem", INTEGER)
def rem(kernel, match, operands):
    return div(kernel, match, operands, "remainder_of")


@form("abs", r"\.(?P<type>s(16|32|64))")
def absolute(kernel, match, operands):
    bits = BITS[match["type"]]
    negative = f"({SIGNED[bits]})bits_of<0" if bits > 16 else "(int16_t)bits_of<0"
    return f"{UNSIGNED[bits]} bits_of={kernel.get(operands[1], bits)}; " + kernel.put(
        operands[0], f"{negative}?({UNSIGNED[bits]})(0-bits_of):bits_of"
    )


@form("neg", r"\.(?P<type>s(16|32|64))")
def neg(kernel, match, operands):
    bits = BITS[match["type"]]
    return kernel.put(operands[0], f"({UNSIGNED[bits]})(0-{kernel.get(operands[1], bits)})")


def choose(kernel, match, operands, symbol):
    kind, relu = match["type"], match.get("relu")
    first, second = (kernel.get_typed(operand, kind) for operand in operands[1:3])
    chosen = f"first{symbol}second?first:second"
    if relu:
        chosen = f"({chosen})>0?({chosen}):0"
    return f"auto first={first}; auto second={second}; {kernel.put(operands[0], chosen)}"


@form("min", r"(?P<relu>\.relu)?" + r"\.(?P<type>s32)")
@form("min", INTEGER)
def minimum(kernel, match, operands):
    return choose(kernel, match, operands, "<")


@form("max", r"(?P<relu>\.relu)?" + r"\.(?P<type>s32)")
@form("max", INTEGER)
def maximum(kernel, match, operands):
    return choose(kernel, match, operands, ">")


@form("min", r"\.(?P<type>[us]16x2)")
def minimum_halves(kernel, match, operands, name="min"):
    function = f"{name}_{match['type']}"
    return kernel.put(operands[0], f"{function}({kernel.get(operands[1], 32)},{kernel.get(operands[2], 32)})")


@form("max", r"\.(?P<type>[us]16x2)")
def maximum_halves(kernel, match, operands):
    return minimum_halves(kernel, match, operands, "max")


@form("dp4a", r"\.(?P<first>[us])32\.(?P<second>[us])32")
def dp4a(kernel, match, operands):
    types = ",".join("int8_t" if match[name] == "s" else "uint8_t" for name in ("first", "second"))
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:4])
    return kernel.put(operands[0], f"dot4<{types}>({values})")
