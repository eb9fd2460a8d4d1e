"""ld, st: every state space, vectors, cache hints (which change no value) and polling."""

from ..types import BITS, SIGNED, UNSIGNED
from . import SCOPES, form

TYPE = r"\.(?P<type>[bus](8|16|32|64)|b128|f32|f64)"
SPACE = r"(\.(?P<space>const|global|local|param(::entry|::func)?|shared(::cta|::cluster)?))?"
CACHE = r"(\.(ca|cg|cs|lu|cv|wb|wt))?"
HINTS = (
    r"(\.L1::(evict_normal|evict_unchanged|evict_first|evict_last|no_allocate))?"
    r"(\.L2::(evict_normal|evict_first|evict_last|cache_hint))*(\.L2::(64B|128B|256B))?"
)
ORDER = r"(?P<order>\.(weak|volatile|(relaxed|acquire|release)(\.(cta|cluster|gpu|sys))|mmio\.relaxed\.sys))?"
SHARED_BY_THREADS = ("generic", "global", "shared", "shared::cta", "shared::cluster")


def polls(match):
    """Loads that a loop may wait on let other threads run."""
    return match["order"] not in (None, ".weak")


def told(match, space, pointer, size, access):
    """Makes the call that reports a load or store to the checker of order (runtime/order.h)."""
    if space not in SHARED_BY_THREADS:
        return ""
    if not polls(match):
        if access == "write":
            return f"before_store(T,{pointer},{size});"
        return f"on_read(T,{pointer},{size}{',false' if match.get('nc') else ''});"
    words = match["order"].strip(".").split(".")
    semantics = words[0].capitalize() if words[0] in ("acquire", "release") else "Relaxed"
    scope = SCOPES.get(words[-1], "kSys")  # volatile is relaxed at the widest scope
    return f"on_strong(T,{pointer},{size},Strong::k{access.capitalize()},Semantics::k{semantics},Scope::{scope});"


@form("ld", ORDER + SPACE + CACHE + r"(?P<nc>\.nc)?" + HINTS + r"(\.v[248])?" + TYPE)
@form("ldu", r"(\.(?P<space>global))?(?P<order>)(\.v[24])?" + TYPE)
def ld(kernel, match, operands):
    kind, space = match["type"], match["space"] or "generic"
    match["order"] = match["order"] or None
    bits, names = BITS[kind], kernel.vector(operands[0])
    size = bits // 8
    read = SIGNED[bits] if kind[0] == "s" else UNSIGNED[bits]
    code = ["poll(T);"] if polls(match) else []
    code.append(f"uint8_t* from={kernel.pointer(space, operands[1], size * len(names))};")
    code.append(told(match, space, "from", size * len(names), "read"))
    # All are read before any is assigned: the address may be among the destinations.
    for i, name in enumerate(names):
        if name == "_":
            continue
        value = f"read<{read}>(from+{i * size})"
        width = BITS[kernel.register(name)[0]]
        code.append(f"auto value{i}={f'(int{width}_t){value}' if kind[0] == 's' and width > bits else value};")
    code += [kernel.put(name, f"value{i}") for i, name in enumerate(names) if name != "_"]
    return " ".join(code)


@form("st", ORDER + SPACE + CACHE + HINTS + r"(\.v[248])?" + TYPE)
def st(kernel, match, operands):
    bits, names = BITS[match["type"]], kernel.vector(operands[1])
    size, space = bits // 8, match["space"] or "generic"
    pointer = kernel.pointer(space, operands[0], size * len(names))
    writes = [
        f"write<{UNSIGNED[bits]}>(to+{i * size},{kernel.get(name, bits)});"
        for i, name in enumerate(names)
        if name != "_"
    ]
    before = told(match, space, "to", size * len(names), "write")
    after = before.replace("before_store", "after_store") if before.startswith("before_store") else ""
    return f"uint8_t* to={pointer}; {before} {' '.join(writes)} {after}"


@form(
    "st", r"\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?\.(?P<type>[bus](32|64)|f32|f64)"
)
def st_async(kernel, match, operands):
    bits, names = BITS[match["type"]], kernel.vector(operands[1])
    code = kernel.array("stored", names, bits)
    size = bits // 8 * len(names)
    return f"{code} store_async(T,{kernel.address(operands[0])},stored,{size},{kernel.address(operands[2])});"
