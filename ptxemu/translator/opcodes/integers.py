"""Integer arithmetic: add to rem, min, max, dp4a, with carries and packed halves."""

from ..types import BITS, UNSIGNED
from . import form, values

INTEGER = r"\.(?P<type>[us](16|32|64))"
WIDE = r"\.wide\.(?P<type>[us](16|32))"
HALVES = r"\.(?P<type>[us]16x2)"
S = r"\.(?P<type>s(16|32|64))"

values(
    ("add", INTEGER, "({type:U})({1}+{2})"),
    ("sub", INTEGER, "({type:U})({1}-{2})"),
    ("add", r"\.sat\.s32", "saturated_add({1:32},{2:32})"),
    ("sub", r"\.sat\.s32", "saturated_sub({1:32},{2:32})"),
    ("add", HALVES, "add_u16x2({1:32},{2:32})"),
    # 16-bit factors would be multiplied as int, whose overflow is undefined.
    ("mul", r"\.lo" + INTEGER, "({type:U32}){1}*({type:U32}){2}"),
    ("mad", r"\.lo" + INTEGER, "({type:U32}){1}*({type:U32}){2}+{3}"),
    ("mul", WIDE, "({type:wide_U})(({type:wide_V}){1:t}*({type:wide_V}){2:t})"),
    ("mad", WIDE, "({type:wide_U})(({type:wide_V}){1:t}*({type:wide_V}){2:t})+{3:wide}"),
    ("mul", r"\.hi" + INTEGER, "high_product<{type:V}>({1},{2})"),
    ("mad", r"\.hi" + INTEGER, "high_product<{type:V}>({1},{2})+{3}"),
    ("mul24", r"\.lo\.(?P<sign>[us])32", "low24_{sign}({1:32})*low24_{sign}({2:32})"),
    ("mad24", r"\.lo\.(?P<sign>[us])32", "low24_{sign}({1:32})*low24_{sign}({2:32})+{3:32}"),
    ("div", INTEGER, "divide({1:t},{2:t})"),
    ("rem", INTEGER, "remainder_of({1:t},{2:t})"),
    ("abs", S, "{type:U} bits_of={1}; ({type:S})bits_of<0?({type:U})(0-bits_of):bits_of"),
    ("neg", S, "({type:U})(0-{1})"),
    ("min", HALVES, "min_{type}({1:32},{2:32})"),
    ("max", HALVES, "max_{type}({1:32},{2:32})"),
    ("dp4a", r"\.(?P<a>[us])32\.(?P<b>[us])32", "dot4<{a:byte},{b:byte}>({1:32},{2:32},{3:32})"),
)
for word, chosen in (("min", "first<second?first:second"), ("max", "first>second?first:second")):
    operands = "auto first={1:t}; auto second={2:t}; "
    values(
        (word, INTEGER, operands + chosen),
        (word, r"\.relu\.(?P<type>s32)", f"{operands}({chosen})>0?({chosen}):0"),
    )


def carried(word, symbol):
    """Computes the sum or difference with 33 or 65 bits; the last bit is the carry or borrow."""

    @form(word, r"(?P<out>\.cc)\.(?P<type>[us](32|64))")
    @form(word + "c", r"(?P<out>\.cc)?(?P<chained>)\.(?P<type>[us](32|64))")
    def carry(kernel, match, operands):
        bits = BITS[match["type"]]
        first, second = kernel.get(operands[1], bits), kernel.get(operands[2], bits)
        carry_in = f"{symbol}T->carry" if "chained" in match else ""
        carry_out = f" T->carry=(uint32_t)(sum>>{bits})&1;" if match["out"] else ""
        total = f"u128 sum=(u128){first}{symbol}(u128){second}{carry_in}; "
        return total + kernel.put(operands[0], f"({UNSIGNED[bits]})sum") + carry_out


carried("add", "+")
carried("sub", "-")
