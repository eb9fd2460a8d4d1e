"""Writes a kernel's C++ file: the variables and functions that it may use, its body, and a description for launches."""

from .errors import TranslationError
from .kernel import POISON, KernelEmitter
from .names import identifier
from .types import BITS, UNSIGNED


def declared_registers(emitter):
    by_type = {}
    for name, kind in emitter.registers.items():
        by_type.setdefault(BITS[kind], []).append(name)
    for bits, names in by_type.items():
        for first in range(0, len(names), 30):
            yield f"  {UNSIGNED[bits]} {','.join(f'{name}={POISON[bits]}' for name in names[first : first + 30])};"


def body(emitter):
    lines = list(declared_registers(emitter))
    for name, align, size, local in emitter.local_arrays:
        lines.append(f"  alignas({align}) uint8_t {name}[{size}];")
        if local:
            lines.append(f"  T->add_local({name},{size});")
    return [*lines, *("  " + line for line in emitter.code)]


def shared_offsets(emitter):
    """Lines that place the function's shared variables, the dynamic one last; the bytes before the dynamic one."""
    variables = [emitter.module.variables[name] for name in emitter.shared]
    offset, lines = 0, []
    for variable in sorted(variables, key=lambda v: v.dynamic):
        align = max(variable.align, 16) if variable.dynamic else variable.align
        offset = -(-offset // align) * align
        name = f"kShared_{identifier(emitter.function.name)}_{identifier(variable.name)}"
        lines.append(f"constexpr uint32_t {name}={offset};")
        offset += 0 if variable.dynamic else variable.size
    return lines, offset


def variables(module):
    """Returns the position of each global and constant in the module's memory, and that memory's initial content."""
    lines, initial = [], bytearray()
    for variable in module.variables.values():
        if variable.space == "shared":
            continue
        align = max(variable.align, 16)
        initial += bytes(-len(initial) % align)
        lines.append(f"constexpr uint32_t kVariable_{identifier(variable.name)}={len(initial)};")
        values = [value % (1 << (8 * variable.element)) for value in variable.values]
        data = b"".join(value.to_bytes(variable.element, "little") for value in values)
        initial += data.ljust(variable.size, b"\0")
    if initial:
        lines.append(f"static const uint8_t initial[]={{{','.join(map(str, initial))}}};")
    where = "initial" if initial else "nullptr"
    lines.append("struct ModuleVariables{uint64_t bytes; const uint8_t* initial;};")
    lines.append(f'extern "C" const ModuleVariables module_variables{{{len(initial)},{where}}};')
    return lines


def program(module, entry):
    """C++ of one kernel; `kernel_info` describes it to the run time."""
    emitters = {}
    for function in [*(f for f in module.functions if f.kind == "func"), entry]:
        emitter = KernelEmitter(module, function)
        for declared in [*function.results, *function.parameters] if function.kind == "func" else []:
            emitter.locals[declared.name] = f"argument_{identifier(declared.name)}"
        emitter.emit()
        emitters[function.name] = emitter
    lines = ["// -include runtime/kernel.h", "using namespace ptxemu;"]
    lines += variables(module)
    static_bytes, signatures, texts = 0, [], []
    for name, emitter in emitters.items():
        function = emitter.function
        if function.kind == "func" and emitter.shared:
            raise TranslationError("shared variables of called functions are not supported", function.line, name)
        offsets, static_bytes = shared_offsets(emitter)
        lines += offsets
        if function.kind == "func":
            arguments = [
                "Thread* T",
                *(f"uint8_t* argument_{identifier(p.name)}" for p in function.results + function.parameters),
            ]
            signatures.append(f"static void function_{identifier(name)}({','.join(arguments)})")
            texts += [signatures[-1] + "{", *body(emitter), "}"]
        else:
            texts += ["static void run(Thread* T){", *body(emitter), "}"]
    lines += [signature + ";" for signature in signatures] + texts
    lines.append(info(entry, static_bytes, sum(e.count for e in emitters.values())))
    return "\n".join(lines) + "\n"


def info(entry, static_bytes, instructions):
    def three(attribute):
        numbers = entry.numbers(attribute)
        return ",".join(map(str, (numbers + [1, 1])[:3] if numbers else [0, 0, 0]))

    size = max([p.offset + p.size for p in entry.parameters], default=0)
    offsets = ",".join(str(p.offset) for p in entry.parameters) or "0"
    sizes = ",".join(str(p.size) for p in entry.parameters) or "0"
    threads = "reqntid" if entry.numbers("reqntid") else "maxntid"
    exact = "true" if entry.numbers("reqntid") else "false"
    limits = ",".join(str((entry.numbers(name) or [0])[0]) for name in ("maxclusterrank", "maxnreg"))
    return (
        f'extern "C" const KernelInfo kernel_info{{"{entry.name}",run,{size},{static_bytes},{{{three(threads)}}},'
        f"{{{three('reqnctapercluster')}}},{len(entry.parameters)},{{{offsets}}},{{{sizes}}},"
        f"{instructions}u,{exact},{limits}}};"
    )
