"""mov, cvta, mapa, getctarank, isspacep, createpolicy, and hints that change no value."""

from ..types import BITS, UNSIGNED
from . import effects, form, values

SHARED = r"\.shared(::cta|::cluster)?"
PLAIN = r"\.(global|local|const|param(::entry)?)"


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


values(
    ("cvta", r"\.to" + PLAIN + r"\.u64", "{1:64}"),
    ("cvta", PLAIN + r"\.u64", "{1:64}"),
    ("cvta", r"\.to" + SHARED + r"\.u64", "generic_to_shared({1:64})"),
    ("cvta", SHARED + r"\.u64", "shared_to_generic({1:64})"),
    ("mapa", r"\.shared::cluster\.u(32|64)", "map_rank(T,{1:64},{2:32})"),
    ("mapa", r"\.u(32|64)", "shared_to_generic(map_rank(T,generic_to_shared({1:64}),{2:32}))"),
    ("getctarank", r"(\.shared::cluster)?\.u(32|64)", "({1:64}>>24)&0xff"),
    ("isspacep", SHARED, "is_shared({1:64})"),
    ("isspacep", r"\.global", "!is_shared({1:64})"),
)


@form("createpolicy", r"\.fractional(\.L2::\w+){1,2}\.b64")
@form("createpolicy", r"\.range\.global(\.L2::\w+){1,2}\.b64")
@form("createpolicy", r"\.cvt\.L2\.b64")
def createpolicy(kernel, match, operands):
    return kernel.put(operands[0], "0")


effects(
    ("prefetch", r"(\.(global|local))?\.(L1|L2)(::evict_\w+)?", ";", 1),
    ("prefetch", r"(\.(const|param))?\.tensormap", ";", 1),
    ("prefetchu", r"\.L1", ";", 1),
    ("applypriority", r"(\.global)?\.L2::evict_normal", ";", 2),
)
