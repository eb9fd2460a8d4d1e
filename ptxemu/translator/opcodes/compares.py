"""setp, set, selp, slct."""

from . import form, put_two, values

INTEGER_TESTS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_TESTS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
JOINS = {"and": "&&", "or": "||", "xor": "!="}
FLOAT_TEST = r"\.(?P<test>eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)"
TEST = r"(" + FLOAT_TEST.replace("<test>", "<float_test>") + r"|\.(?P<unsigned_test>lo|ls|hi|hs))"
JOIN = r"(\.(?P<join>and|or|xor))?(?P<ftz>\.ftz)?"
TYPE = r"\.(?P<type>[bus](16|32|64)|f32|f64|b?f16)"
SELECTED = r"\.(?P<type>[bus](16|32|64)|f32|f64)"
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
    kind, test = match["type"], match["float_test"] or match["unsigned_test"]
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


def compare_halves(kernel, match, first, second):
    """The low halves, then the high ones."""
    for i in range(2):
        halves = (f"float_from_{match['type']}((uint16_t)({kernel.get(x, 32)}>>{16 * i}))" for x in (first, second))
        yield floating(match["test"], *halves)


@form("setp", TEST + JOIN + TYPE)
def setp(kernel, match, operands):
    test = compare(kernel, match, operands[1], operands[2])
    yes, no = f"(bool){test}", f"!{test}"
    if match["join"]:
        other = kernel.predicate(operands[3])
        yes, no = (f"({side}){JOINS[match['join']]}(bool)({other})" for side in (yes, no))
    if "|" not in operands[0]:
        return kernel.put(operands[0], yes)
    return f"bool yes={yes},no={no}; {put_two(kernel, operands[0], 'yes', 'no')}"


@form("setp", FLOAT_TEST + r"(?P<ftz>\.ftz)?\.(?P<type>b?f16)x2")
def setp_halves(kernel, match, operands):
    low, high = compare_halves(kernel, match, operands[1], operands[2])
    return f"bool low={low},high={high}; {put_two(kernel, operands[0], 'low', 'high')}"


@form("set", TEST + r"(?P<ftz>\.ftz)?\.(?P<result>[us]32|f32)" + TYPE)
def set_value(kernel, match, operands):
    true = "0x3f800000u" if match["result"] == "f32" else "0xffffffffu"
    return kernel.put(operands[0], f"{compare(kernel, match, operands[1], operands[2])}?{true}:0u")


@form("set", FLOAT_TEST + r"(\.(?P<result>b?f16x2|[us]32))?\.(?P<type>b?f16)x2")
def set_halves(kernel, match, operands):
    true = {"f16x2": "0x3c00u", "bf16x2": "0x3f80u"}.get(match["result"], "0xffffu")
    low, high = (f"({test}?{true}:0u)" for test in compare_halves(kernel, match, operands[1], operands[2]))
    return kernel.put(operands[0], f"{low}|{high}<<16")


values(
    ("selp", SELECTED, "{3:p}?{1}:{2}"),
    ("slct", r"(?P<ftz>\.ftz)?" + SELECTED + r"\.f32", "({3:f}>=0)?{1}:{2}"),
    ("slct", r"(?P<ftz>\.ftz)?" + SELECTED + r"\.s32", "((int32_t){3:32}>=0)?{1}:{2}"),
)
