"""What the lanes of a warp do together."""

from ..types import BITS
from . import form


@form("activemask", r"\.b32")
def activemask(kernel, match, operands):
    return kernel.put(operands[0], "active_mask(T)")


@form("shfl", r"\.sync\.(?P<mode>idx|up|down|bfly)\.b32")
def shfl(kernel, match, operands):
    names = [name.strip() for name in operands[0].split("|")]
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:5])
    found = kernel.put(names[1], "in_range") if len(names) > 1 else ""
    mode = f"Shuffle::k{match['mode'].capitalize()}"
    return f"bool in_range; uint32_t value=shuffle(T,{mode},{values},in_range); {kernel.put(names[0], 'value')} {found}"


@form("vote", r"\.sync\.(?P<mode>all|any|uni)\.pred")
@form("vote", r"\.sync\.(?P<mode>ballot)\.b32")
@form("vote", r"\.(?P<mode>ballot)\.sync\.b32")  # as CUB has it, and ptxas takes it
def vote(kernel, match, operands):
    values = f"{kernel.predicate(operands[1])},{kernel.get(operands[2], 32)}"
    return kernel.put(operands[0], f"vote(T,Vote::k{match['mode'].capitalize()},{values})")


@form("match", r"\.any\.sync\.(?P<type>b(32|64))")
def match_any(kernel, match, operands):
    values = f"{kernel.get(operands[1], BITS[match['type']])},{kernel.get(operands[2], 32)}"
    return kernel.put(operands[0], f"match_any(T,{values})")


@form("match", r"\.all\.sync\.(?P<type>b(32|64))")
def match_all(kernel, match, operands):
    names = [name.strip() for name in operands[0].split("|")]
    values = f"{kernel.get(operands[1], BITS[match['type']])},{kernel.get(operands[2], 32)}"
    same = kernel.put(names[1], "equal") if len(names) > 1 else ""
    return f"bool equal; uint32_t lanes=match_all(T,{values},equal); {kernel.put(names[0], 'lanes')} {same}"


@form("redux", r"\.sync\.(?P<op>add|min|max)\.(?P<type>[us]32)")
@form("redux", r"\.sync\.(?P<op>and|or|xor)\.(?P<type>b32)")
def redux(kernel, match, operands):
    kind = match["type"] if match["op"] in ("min", "max") else ""
    values = f"{kernel.get(operands[1], 32)},{kernel.get(operands[2], 32)}"
    return kernel.put(operands[0], f"reduce(T,Reduction::k{match['op'].capitalize()}{kind.upper()},{values})")


@form("elect", r"\.sync")
def elect(kernel, match, operands):
    names = [name.strip() for name in operands[0].split("|")]
    mask = kernel.get(operands[1], 32)
    return f"uint32_t leader; bool mine=elect(T,{mask},leader); {kernel.put(names[0], 'leader')} {kernel.put(names[1], 'mine')}"
