"""Branches, calls, returns, traps, and dependent launches."""

from ..errors import TranslationError
from ..names import identifier
from . import effects, form

effects(
    ("ret", r"(\.uni)?", "return;"),
    ("exit", "", "exit_thread(T);"),
    ("trap", "", 'fault(T,"trap");'),
    ("brkpt", "", 'fault(T,"brkpt");'),
    ("nanosleep", r"\.u32", "sleep_briefly(T);", 1),
    ("pmevent", r"(\.mask)?", ";", 1),
    ("griddepcontrol", r"\.wait", "wait_for_prerequisites(T);"),
    ("griddepcontrol", r"\.launch_dependents", "launch_dependents(T);"),
    ("setmaxnreg", r"\.inc\.sync\.aligned\.u32", "set_max_registers(T,{0:32},true);"),
    ("setmaxnreg", r"\.dec\.sync\.aligned\.u32", "set_max_registers(T,{0:32},false);"),
)


@form("bra", r"(\.uni)?")
def bra(kernel, match, operands):
    return f"goto {kernel.label(operands[0])};"


@form("brx", r"\.idx(\.uni)?")
def brx(kernel, match, operands):
    targets = kernel.tables.get(operands[1])
    if targets is None:
        raise TranslationError(f"unknown branch table {operands[1]}")
    cases = " ".join(f"case {i}: goto {kernel.label(name)};" for i, name in enumerate(targets))
    return f'switch({kernel.get(operands[0], 32)}){{{cases} default: fault(T,"brx.idx: index outside its table");}}'


@form("call", r"(\.uni)?")
def call(kernel, match, operands):
    names = [operand for operand in operands if not operand.startswith("(")]
    if len(names) != 1:
        raise TranslationError("indirect calls are not supported")
    if names[0] == "__assertfail":
        return 'fault(T,"a device assertion failed");'
    if names[0] == "vprintf":
        return ";"
    if not any(function.name == names[0] for function in kernel.module.functions):
        raise TranslationError(f"unknown function {names[0]}")
    # Results come before the name, arguments after it.
    arrays = []
    for operand in operands:
        if operand.startswith("("):
            arrays += [kernel.locals[name.strip()] for name in operand[1:-1].split(",") if name.strip()]
    return f"function_{identifier(names[0])}({','.join(['T', *arrays])});"
