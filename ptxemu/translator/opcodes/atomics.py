"""atom and red."""

from ..types import BITS
from . import SCOPES, form

ORDER = r"(\.(?P<order>relaxed|acquire|release|acq_rel))?(\.(?P<scope>cta|cluster|gpu|sys))?"
SPACE = r"(\.(?P<space>global|shared(::cta|::cluster)?))?"
HINT = r"(\.L2::cache_hint)?"
VALUE = (
    r"\.(?P<op>add|inc|dec|min|max|and|or|xor|exch|cas)(?P<noftz>\.noftz)?"
    + HINT
    + r"\.(?P<type>[bus](16|32|64)|f32|f64|b?f16(x2)?)"
)
ALLOWED = {
    "add": {"u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"},
    "min": {"u32", "s32", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2"},
    "inc": {"u32"},
    "dec": {"u32"},
    "and": {"b32", "b64"},
    "exch": {"b32", "b64"},
    "cas": {"b16", "b32", "b64", "u32", "u64", "s32"},
}
ALLOWED |= {"max": ALLOWED["min"], "or": ALLOWED["and"], "xor": ALLOWED["and"]}


def function(match):
    op, kind = match["op"], match["type"]
    if kind not in ALLOWED[op]:
        raise ValueError(f"{op} of {kind}")
    bits = BITS[kind]
    if "f" in kind:
        return f"atomic_{op}_{kind}"
    return f"atomic_{op}<{'int' if kind[0] == 's' else 'uint'}{bits}_t>"


def told(kernel, match, operand, count=1):
    """Returns the pointer, reported to the checker of order (runtime/order.h). The default scope is the device."""
    semantics = {"acquire": "kAcquire", "release": "kRelease", "acq_rel": "kAcqRel"}.get(match["order"], "kRelaxed")
    scope = SCOPES[match["scope"] or "gpu"]
    size = BITS[match["type"]] // 8 * count
    pointer = kernel.pointer(match["space"] or "generic", operand, size)
    return f"on_strong(T,{pointer},{size},Strong::kUpdate,Semantics::{semantics},Scope::{scope})"


@form("atom", ORDER + SPACE + VALUE)
def atom(kernel, match, operands):
    pointer = told(kernel, match, operands[1])
    if len(operands) != (4 if match["op"] == "cas" else 3):
        return None
    values = ",".join(kernel.get(operand, BITS[match["type"]]) for operand in operands[2:])
    return f"poll(T); {kernel.put(operands[0], f'{function(match)}({pointer},{values})')}"


@form("red", ORDER + SPACE + VALUE)
def red(kernel, match, operands):
    pointer = told(kernel, match, operands[0])
    return f"{function(match)}({pointer},{kernel.get(operands[1], BITS[match['type']])});"


@form(
    "red", ORDER + r"\.(?P<space>global)\.(?P<op>add)(?P<noftz>\.noftz)?" + HINT + r"\.v[248]\.(?P<type>f32|b?f16(x2)?)"
)
def red_vector(kernel, match, operands):
    bits, names = BITS[match["type"]], kernel.vector(operands[1])
    pointer = told(kernel, match, operands[0], len(names))
    adds = [f"{function(match)}(to+{i * bits // 8},{kernel.get(name, bits)});" for i, name in enumerate(names)]
    return f"uint8_t* to={pointer}; " + " ".join(adds)
