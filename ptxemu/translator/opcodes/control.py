"""Branches, calls, returns, traps, and dependent launches."""

from ..errors import TranslationError
from ..names import identifier
from . import form


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


@form("ret", r"(\.uni)?")
def ret(kernel, match, operands):
    return "return;"


@form("exit")
def leave(kernel, match, operands):
    return "exit_thread(T);"


@form("trap")
def trap(kernel, match, operands):
    return 'fault(T,"trap");'


@form("brkpt")
def brkpt(kernel, match, operands):
    return 'fault(T,"brkpt");'


@form("nanosleep", r"\.u32")
def nanosleep(kernel, match, operands):
    return "sleep_briefly(T);"


@form("pmevent", r"(\.mask)?")
def pmevent(kernel, match, operands):
    return ";"


@form("griddepcontrol", r"\.(?P<what>wait|launch_dependents)")
def griddepcontrol(kernel, match, operands):
    return "wait_for_prerequisites(T);" if match["what"] == "wait" else "launch_dependents(T);"


@form("setmaxnreg", r"\.(?P<way>inc|dec)\.sync\.aligned\.u32")
def setmaxnreg(kernel, match, operands):
    return f"set_max_registers(T,{kernel.get(operands[0], 32)},{'true' if match['way'] == 'inc' else 'false'});"


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
    # Results stand before the name, arguments after it.
    arrays = []
    for operand in operands:
        if operand.startswith("("):
            arrays += [kernel.locals[name.strip()] for name in operand[1:-1].split(",") if name.strip()]
    return f"function_{identifier(names[0])}({','.join(['T', *arrays])});"
