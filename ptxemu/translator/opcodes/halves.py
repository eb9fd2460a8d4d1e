"""f16 and bf16 arithmetic, single and packed."""

from ..types import BITS
from . import form

HALF = r"\.(?P<type>b?f16(x2)?)"


def binary(word):
    @form(word, r"(\.rn)?(?P<sat>\.sat)?" + HALF)
    def half(kernel, match, operands):
        kind = match["type"]
        values = ",".join(kernel.get(operand, BITS[kind]) for operand in operands[1:3])
        value = f"{word}_{kind}({values})"
        return kernel.put(operands[0], f"saturate_{kind}({value})" if match["sat"] else value)

    return half


for name in ("add", "sub", "mul"):
    binary(name)


@form("fma", r"\.rn(?P<sat>\.sat)?(?P<relu>\.relu)?" + HALF)
def fma(kernel, match, operands):
    kind = match["type"]
    value = f"fma_{kind}({','.join(kernel.get(operand, BITS[kind]) for operand in operands[1:4])})"
    for name in ("sat", "relu"):
        if match[name]:
            value = f"{'saturate' if name == 'sat' else 'relu'}_{kind}({value})"
    return kernel.put(operands[0], value)


def choice(word):
    @form(word, r"(?P<nan>\.NaN)?" + HALF)
    def half(kernel, match, operands):
        kind = match["type"]
        values = ",".join(kernel.get(operand, BITS[kind]) for operand in operands[1:3])
        return kernel.put(operands[0], f"{word}{'_nan' if match['nan'] else ''}_{kind}({values})")

    return half


choice("min")
choice("max")


def masks(kind, half):
    return f"0x{half}{half}u" if kind.endswith("x2") else f"0x{half}u"


@form("abs", HALF)
def absolute(kernel, match, operands):
    kind = match["type"]
    return kernel.put(operands[0], f"{kernel.get(operands[1], BITS[kind])}&{masks(kind, '7fff')}")


@form("neg", HALF)
def neg(kernel, match, operands):
    kind = match["type"]
    return kernel.put(operands[0], f"{kernel.get(operands[1], BITS[kind])}^{masks(kind, '8000')}")
