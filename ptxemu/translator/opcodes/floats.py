"""f32, f32x2 and f64 arithmetic. Approximations (.approx) are the correctly rounded value: a chip's may differ by ulps."""

from ..errors import TranslationError
from . import form

MODES = {"rz": "kToZero", "rm": "kDown", "rp": "kUp"}
ROUND = r"(\.(?P<round>rn|rz|rm|rp))?"


def directed(match):
    return MODES.get(match.get("round") or "rn")


def arithmetic(word, symbol, name):
    """add, sub, mul of f32, f32x2 and f64."""

    @form(word, ROUND + r"(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32")
    def single(kernel, match, operands):
        first, second = (kernel.f32(operand, match["ftz"]) for operand in operands[1:3])
        mode = directed(match)
        value = f"{name}_directed({first},{second},{mode})" if mode else f"{first}{symbol}{second}"
        return kernel.put_f32(operands[0], value, match["ftz"], match["sat"])

    @form(word, r"\.(?P<round>rn)?\.?(?P<ftz>ftz)?\.?f32x2")
    def packed(kernel, match, operands):
        if match["ftz"]:
            raise TranslationError("f32x2 with .ftz is not supported")
        return kernel.put(operands[0], f"{name}_f32x2({kernel.get(operands[1], 64)},{kernel.get(operands[2], 64)})")

    @form(word, ROUND + r"\.f64")
    def double(kernel, match, operands):
        if directed(match):
            raise TranslationError("f64 is supported with .rn alone")
        return kernel.put(operands[0], f"double_bits({kernel.f64(operands[1])}{symbol}{kernel.f64(operands[2])})")


arithmetic("add", "+", "add")
arithmetic("sub", "-", "sub")
arithmetic("mul", "*", "mul")


@form("fma", r"\.(?P<round>rn|rz|rm|rp)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32")
@form("mad", r"\.(?P<round>rn|rz|rm|rp)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.f32")
def fma(kernel, match, operands):
    values = ",".join(kernel.f32(operand, match["ftz"]) for operand in operands[1:4])
    mode = directed(match)
    value = f"fma_directed({values},{mode})" if mode else f"__builtin_fmaf({values})"
    return kernel.put_f32(operands[0], value, match["ftz"], match["sat"])


@form("fma", r"\.rn\.f32x2")
def fma_packed(kernel, match, operands):
    values = ",".join(kernel.get(operand, 64) for operand in operands[1:4])
    return kernel.put(operands[0], f"fma_f32x2({values})")


@form("fma", r"\.rn\.f64")
@form("mad", r"\.rn\.f64")
def fma_double(kernel, match, operands):
    values = ",".join(kernel.f64(operand) for operand in operands[1:4])
    return kernel.put(operands[0], f"double_bits(__builtin_fma({values}))")


@form("div", r"\.(?P<round>rn|rz|rm|rp|full|approx)(?P<ftz>\.ftz)?\.f32")
def div(kernel, match, operands):
    if match["round"] in MODES:
        raise TranslationError("div.f32 is supported with .rn, .full and .approx")
    first, second = (kernel.f32(operand, match["ftz"]) for operand in operands[1:3])
    return kernel.put_f32(operands[0], f"{first}/{second}", match["ftz"])


@form("div", r"\.rn\.f64")
def div_double(kernel, match, operands):
    return kernel.put(operands[0], f"double_bits({kernel.f64(operands[1])}/{kernel.f64(operands[2])})")


FUNCTIONS = {
    "rcp": "1.0f/({})",
    "sqrt": "__builtin_sqrtf({})",
    "rsqrt": "(float)(1.0/__builtin_sqrt((double)({})))",
    "ex2": "(float)__builtin_exp2((double)({}))",
    "lg2": "(float)__builtin_log2((double)({}))",
    "tanh": "(float)__builtin_tanh((double)({}))",
    "sin": "(float)__builtin_sin((double)({}))",
    "cos": "(float)__builtin_cos((double)({}))",
}
EXACT = ("rcp", "sqrt")


def function(word):
    modes = r"\.(?P<round>approx|rn)" if word in EXACT else r"\.(?P<round>approx)"

    @form(word, modes + r"(?P<ftz>\.ftz)?\.f32")
    def single(kernel, match, operands):
        return kernel.put_f32(operands[0], FUNCTIONS[word].format(kernel.f32(operands[1], match["ftz"])), match["ftz"])

    return single


for name in FUNCTIONS:
    function(name)


@form("rcp", r"\.rn\.f64")
def rcp_double(kernel, match, operands):
    return kernel.put(operands[0], f"double_bits(1.0/{kernel.f64(operands[1])})")


@form("rcp", r"\.approx\.ftz\.f64")
def rcp_double_approximate(kernel, match, operands):
    # The low word of the result is zero, as documented.
    return kernel.put(operands[0], f"double_bits(1.0/{kernel.f64(operands[1])})&0xffffffff00000000ull")


@form("sqrt", r"\.rn\.f64")
def sqrt_double(kernel, match, operands):
    return kernel.put(operands[0], f"double_bits(__builtin_sqrt({kernel.f64(operands[1])}))")


def flushed(kernel, match, operand):
    bits = kernel.get(operand, 32)
    return f"flush_subnormal({bits})" if match.get("ftz") else bits


@form("abs", r"(?P<ftz>\.ftz)?\.f32")
def absolute(kernel, match, operands):
    return kernel.put(operands[0], f"{flushed(kernel, match, operands[1])}&0x7fffffffu")


@form("neg", r"(?P<ftz>\.ftz)?\.f32")
def neg(kernel, match, operands):
    return kernel.put(operands[0], f"{flushed(kernel, match, operands[1])}^0x80000000u")


@form("abs", r"\.f64")
def absolute_double(kernel, match, operands):
    return kernel.put(operands[0], f"{kernel.get(operands[1], 64)}&0x7fffffffffffffffull")


@form("neg", r"\.f64")
def neg_double(kernel, match, operands):
    return kernel.put(operands[0], f"{kernel.get(operands[1], 64)}^0x8000000000000000ull")


def choice(word):
    @form(word, r"(?P<ftz>\.ftz)?(?P<nan>\.NaN)?(?P<magnitude>\.xorsign\.abs)?\.f32")
    def single(kernel, match, operands):
        name = f"{word}imum_{'nan' if match['nan'] else 'number'}"
        values = [kernel.f32(operand, match["ftz"]) for operand in operands[1:]]
        if match["magnitude"]:
            if len(values) != 2:
                raise TranslationError("three operands with .xorsign.abs are not supported")
            return kernel.put(operands[0], f"xorsign_abs({name},{values[0]},{values[1]})")
        value = f"{name}({values[0]},{values[1]})"
        for other in values[2:]:
            value = f"{name}({value},{other})"
        return kernel.put_f32(operands[0], value)

    @form(word, r"\.f64")
    def double(kernel, match, operands):
        return kernel.put(
            operands[0], f"double_bits({word}imum_double({kernel.f64(operands[1])},{kernel.f64(operands[2])}))"
        )


choice("min")
choice("max")


@form("copysign", r"\.f32")
def copysign(kernel, match, operands):
    sign, magnitude = kernel.get(operands[1], 32), kernel.get(operands[2], 32)
    return kernel.put(operands[0], f"({sign}&0x80000000u)|({magnitude}&0x7fffffffu)")


@form("copysign", r"\.f64")
def copysign_double(kernel, match, operands):
    sign, magnitude = kernel.get(operands[1], 64), kernel.get(operands[2], 64)
    return kernel.put(operands[0], f"({sign}&(1ull<<63))|({magnitude}&~(1ull<<63))")


@form("testp", r"\.(?P<test>finite|infinite|number|notanumber|normal|subnormal)\.f32")
def testp(kernel, match, operands):
    return kernel.put(operands[0], f"test_{match['test']}({kernel.get(operands[1], 32)})")
