"""mov, cvta, mapa, getctarank, isspacep, createpolicy, and hints that change no value."""

from ..types import BITS, UNSIGNED
from . import form

SHARED = r"shared(::cta|::cluster)?"


@form("mov", r"\.(?P<type>[bus](16|32|64)|b128|f32|f64|pred)")
def mov(kernel, match, operands):
    kind = match["type"]
    to, source = operands
    if kind == "pred":
        return kernel.put(to, kernel.predicate(source))
    bits = BITS[kind]
    if to.startswith("{"):
        names = kernel.vector(to)
        width = bits // len(names)
        parts = [
            kernel.put(name, f"({UNSIGNED[width]})(packed>>{i * width})") for i, name in enumerate(names) if name != "_"
        ]
        return f"{UNSIGNED[bits]} packed={kernel.get(source, bits)}; " + " ".join(parts)
    if source.startswith("{"):
        names = kernel.vector(source)
        width = bits // len(names)
        parts = [f"(({UNSIGNED[bits]}){kernel.get(name, width)}<<{i * width})" for i, name in enumerate(names)]
        return kernel.put(to, "|".join(parts))
    if to in kernel.accumulators and bits == 32:
        return copied_accumulator(kernel, to, source)
    return kernel.put(to, kernel.get(source, bits))


def copied_accumulator(kernel, to, source):
    """A copy of a register that wgmma may still write is written with it."""
    moved = kernel.put(to, kernel.get(source, 32))
    if source in kernel.accumulators:
        return f"{moved} if(T->in_flight) copy_in_flight(T,&{kernel.register(to)[1]},&{kernel.register(source)[1]});"
    return f"{moved} if(T->in_flight) drop_in_flight(T,&{kernel.register(to)[1]});"


@form("cvta", rf"\.to\.(?P<space>global|local|const|param(::entry)?|{SHARED})\.u64")
def cvta_to(kernel, match, operands):
    value = kernel.get(operands[1], 64)
    return kernel.put(operands[0], f"generic_to_shared({value})" if match["space"].startswith("shared") else value)


@form("cvta", rf"\.(?P<space>global|local|const|param(::entry)?|{SHARED})\.u64")
def cvta(kernel, match, operands):
    value = kernel.get(operands[1], 64)
    return kernel.put(operands[0], f"shared_to_generic({value})" if match["space"].startswith("shared") else value)


@form("mapa", r"(?P<space>\.shared::cluster)?\.u(?P<bits>32|64)")
def mapa(kernel, match, operands):
    address, rank = kernel.get(operands[1], 64), kernel.get(operands[2], 32)
    if match["space"]:
        return kernel.put(operands[0], f"map_rank(T,{address},{rank})")
    return kernel.put(operands[0], f"shared_to_generic(map_rank(T,generic_to_shared({address}),{rank}))")


@form("getctarank", r"(\.shared::cluster)?\.u(32|64)")
def getctarank(kernel, match, operands):
    return kernel.put(operands[0], f"({kernel.get(operands[1], 64)}>>24)&0xff")


@form("isspacep", rf"\.(?P<space>global|{SHARED})")
def isspacep(kernel, match, operands):
    sign = "" if match["space"].startswith("shared") else "!"
    return kernel.put(operands[0], f"{sign}is_shared({kernel.get(operands[1], 64)})")


@form("createpolicy", r"\.fractional(\.L2::\w+){1,2}\.b64")
@form("createpolicy", r"\.range\.global(\.L2::\w+){1,2}\.b64")
@form("createpolicy", r"\.cvt\.L2\.b64")
def createpolicy(kernel, match, operands):
    return kernel.put(operands[0], "0")


@form("prefetch", r"(\.(global|local))?\.(L1|L2)(::evict_\w+)?")
@form("prefetch", r"(\.(const|param))?\.tensormap")
@form("prefetchu", r"\.L1")
@form("applypriority", r"(\.global)?\.L2::evict_normal")
def no_effect(kernel, match, operands):
    return ";"
