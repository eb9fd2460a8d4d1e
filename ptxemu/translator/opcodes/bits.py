"""Logic, shifts and bit fields."""

from ..types import BITS, UNSIGNED
from . import form

SYMBOL = {"and": "&", "or": "|", "xor": "^"}


def logic(word):
    @form(word, r"\.(?P<type>b(16|32|64)|pred)")
    def binary(kernel, match, operands):
        if match["type"] == "pred":
            first, second = (kernel.predicate(operand) for operand in operands[1:])
            return kernel.put(operands[0], f"(bool)({first}){SYMBOL[word]}(bool)({second})")
        bits = BITS[match["type"]]
        first, second = (kernel.get(operand, bits) for operand in operands[1:])
        return kernel.put(operands[0], f"({UNSIGNED[bits]})({first}{SYMBOL[word]}{second})")

    return binary


for name in SYMBOL:
    logic(name)


@form("not", r"\.(?P<type>b(16|32|64)|pred)")
def invert(kernel, match, operands):
    if match["type"] == "pred":
        return kernel.put(operands[0], f"!{kernel.predicate(operands[1])}")
    bits = BITS[match["type"]]
    return kernel.put(operands[0], f"({UNSIGNED[bits]})~{kernel.get(operands[1], bits)}")


@form("cnot", r"\.(?P<type>b(16|32|64))")
def cnot(kernel, match, operands):
    return kernel.put(operands[0], f"{kernel.get(operands[1], BITS[match['type']])}==0")


@form("shl", r"\.(?P<type>b(16|32|64))")
def shl(kernel, match, operands):
    bits = BITS[match["type"]]
    return kernel.put(operands[0], f"shift_left{bits}({kernel.get(operands[1], bits)},{kernel.get(operands[2], 32)})")


@form("shr", r"\.(?P<type>[bus](16|32|64))")
def shr(kernel, match, operands):
    bits = BITS[match["type"]]
    name = "shift_right_signed" if match["type"][0] == "s" else "shift_right"
    return kernel.put(operands[0], f"{name}{bits}({kernel.get(operands[1], bits)},{kernel.get(operands[2], 32)})")


@form("shf", r"\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32")
def shf(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:4])
    return kernel.put(operands[0], f"funnel_{match['side']}_{match['mode']}({values})")


@form("bfe", r"\.(?P<type>[us](32|64))")
def bfe(kernel, match, operands):
    bits = BITS[match["type"]]
    values = ",".join([kernel.get(operands[1], bits), kernel.get(operands[2], 32), kernel.get(operands[3], 32)])
    return kernel.put(operands[0], f"extract_{match['type']}({values})")


@form("bfi", r"\.(?P<type>b(32|64))")
def bfi(kernel, match, operands):
    bits = BITS[match["type"]]
    values = [kernel.get(operand, bits) for operand in operands[1:3]] + [kernel.get(name, 32) for name in operands[3:5]]
    return kernel.put(operands[0], f"insert{bits}({','.join(values)})")


@form("bmsk", r"\.(?P<mode>wrap|clamp)\.b32")
def bmsk(kernel, match, operands):
    values = f"{kernel.get(operands[1], 32)},{kernel.get(operands[2], 32)}"
    return kernel.put(operands[0], f"bit_mask_{match['mode']}({values})")


@form("popc", r"\.(?P<type>b(32|64))")
def popc(kernel, match, operands):
    return kernel.put(operands[0], f"__builtin_popcountll({kernel.get(operands[1], BITS[match['type']])})")


@form("clz", r"\.(?P<type>b(32|64))")
def clz(kernel, match, operands):
    bits = BITS[match["type"]]
    return kernel.put(operands[0], f"leading_zeros{bits}({kernel.get(operands[1], bits)})")


@form("brev", r"\.(?P<type>b(32|64))")
def brev(kernel, match, operands):
    bits = BITS[match["type"]]
    return kernel.put(operands[0], f"reverse{bits}({kernel.get(operands[1], bits)})")


@form("bfind", r"(?P<amount>\.shiftamt)?\.(?P<type>[us](32|64))")
def bfind(kernel, match, operands):
    bits = BITS[match["type"]]
    value = kernel.get(operands[1], bits)
    if match["type"][0] == "s":  # of a negative number, the first bit that differs from the sign
        value = f"magnitude_bits{bits}({value})"
    return kernel.put(operands[0], f"find_first{bits}{'_shift' if match['amount'] else ''}({value})")


@form("fns", r"\.b32")
def fns(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:4])
    return kernel.put(operands[0], f"find_nth({values})")


@form("prmt", r"\.b32(?P<mode>\.(f4e|b4e|rc8|ecl|ecr|rc16))?")
def prmt(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:4])
    return kernel.put(operands[0], f"permute{match['mode'].replace('.', '_') if match['mode'] else ''}({values})")


@form("lop3", r"\.b32")
def lop3(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:5])
    return kernel.put(operands[0], f"logic3({values})")


@form("lop3", r"\.(?P<join>and|or)\.b32")
def lop3_predicate(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:5])
    to, nonzero = (name.strip() for name in operands[0].split("|"))
    joined = f"(result!=0){'&&' if match['join'] == 'and' else '||'}{kernel.predicate(operands[5])}"
    return f"uint32_t result=logic3({values}); bool joined={joined}; {kernel.put(to, 'result')} {kernel.put(nonzero, 'joined')}"
