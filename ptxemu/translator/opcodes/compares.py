"""setp, set, selp, slct."""

from ..types import BITS
from . import form

INTEGER_TESTS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_TESTS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
JOINS = {"and": "&&", "or": "||", "xor": "!="}
TEST = (
    r"\.(?P<test>eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan)(\.(?P<join>and|or|xor))?(?P<ftz>\.ftz)?"
)
TYPE = r"\.(?P<type>[bus](16|32|64)|f32|f64|b?f16)"
OPPOSITE = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}


def floating(test, first, second):
    """An ordered test is false with a NaN, its unordered twin (with u) true."""
    if test in ("num", "nan"):
        return f"{'!' if test == 'num' else ''}either_nan({first},{second})"
    if test in ("ne", "equ"):
        return f"{'!' if test == 'equ' else ''}ordered_unequal({first},{second})"
    if test == "neu":
        return f"!({first}=={second})"
    if test in INTEGER_TESTS:
        return f"({first}{INTEGER_TESTS[test]}{second})"
    return f"!({first}{OPPOSITE[test[:-1]]}{second})"


def compare(kernel, match, first, second):
    kind, test = match["type"], match["test"]
    if kind == "f32":
        return floating(test, kernel.f32(first, match["ftz"]), kernel.f32(second, match["ftz"]))
    if kind == "f64":
        return floating(test, kernel.f64(first), kernel.f64(second))
    if kind in ("f16", "bf16"):
        return floating(test, *(f"float_from_{kind}({kernel.get(operand, 16)})" for operand in (first, second)))
    symbol = {**INTEGER_TESTS, **UNSIGNED_TESTS}.get(test)
    if not symbol:
        raise ValueError(f"{test} is no test of integers")
    return f"({kernel.get_typed(first, kind)}{symbol}{kernel.get_typed(second, kind)})"


@form("setp", TEST + TYPE)
def setp(kernel, match, operands):
    test = compare(kernel, match, operands[1], operands[2])
    yes, no = f"(bool){test}", f"!{test}"
    if match["join"]:
        other = kernel.predicate(operands[3])
        yes, no = (f"({side}){JOINS[match['join']]}(bool)({other})" for side in (yes, no))
    names = [name.strip() for name in operands[0].split("|")]
    if len(names) == 1:
        return kernel.put(names[0], yes)
    return f"bool yes={yes},no={no}; {kernel.put(names[0], 'yes')} {kernel.put(names[1], 'no')}"


@form("setp", r"\.(?P<test>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?P<ftz>\.ftz)?\.(?P<type>b?f16)x2")
def setp_halves(kernel, match, operands):
    first, second = (kernel.get(operand, 32) for operand in operands[1:3])
    tests = [
        floating(match["test"], *(f"float_from_{match['type']}((uint16_t)({x}>>{16 * i}))" for x in (first, second)))
        for i in range(2)
    ]
    names = [name.strip() for name in operands[0].split("|")]
    return f"bool low={tests[0]},high={tests[1]}; {kernel.put(names[0], 'low')} {kernel.put(names[1], 'high')}"


@form("set", TEST.replace("join", "joined") + r"\.(?P<result>[us]32|f32)" + TYPE)
def set_value(kernel, match, operands):
    if match["joined"]:
        raise ValueError("set with a second predicate is not supported")
    true = "0x3f800000u" if match["result"] == "f32" else "0xffffffffu"
    return kernel.put(operands[0], f"{compare(kernel, match, operands[1], operands[2])}?{true}:0u")


@form(
    "set",
    r"\.(?P<test>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)\.(?P<result>b?f16x2|[us]32)?\.?(?P<type>b?f16)x2",
)
def set_halves(kernel, match, operands):
    first, second = (kernel.get(operand, 32) for operand in operands[1:3])
    kind = match["type"]
    true = {"f16x2": "0x3c00u", "bf16x2": "0x3f80u"}.get(match["result"], "0xffffu")
    halves = [
        f"({floating(match['test'], *(f'float_from_{kind}((uint16_t)({x}>>{16 * i}))' for x in (first, second)))}?{true}:0u)"
        for i in range(2)
    ]
    return kernel.put(operands[0], f"{halves[0]}|{halves[1]}<<16")


@form("selp", r"\.(?P<type>[bus](16|32|64)|f32|f64)")
def selp(kernel, match, operands):
    bits = BITS[match["type"]]
    values = f"{kernel.get(operands[1], bits)}:{kernel.get(operands[2], bits)}"
    return kernel.put(operands[0], f"{kernel.predicate(operands[3])}?{values}")


@form("slct", r"(?P<ftz>\.ftz)?\.(?P<type>[bus](16|32|64)|f32|f64)\.(?P<by>s32|f32)")
def slct(kernel, match, operands):
    bits = BITS[match["type"]]
    test = (
        f"({kernel.f32(operands[3], match['ftz'])}>=0)"
        if match["by"] == "f32"
        else f"({kernel.get_signed(operands[3], 32)}>=0)"
    )
    return kernel.put(operands[0], f"{test}?{kernel.get(operands[1], bits)}:{kernel.get(operands[2], bits)}")
