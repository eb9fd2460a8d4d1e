"""One function's C++: registers, scopes, labels and operands. The instructions themselves are in opcodes/.

Registers are C++ locals that hold bits (uint32_t for .f32 too), filled with a poison pattern. Statements that can wait
or fault first note their PTX line in the thread.
"""

import re
import struct

from . import opcodes
from .errors import TranslationError
from .module import Variable
from .names import identifier
from .source import split_operands, statements
from .special_registers import SPECIAL
from .types import BITS, UNSIGNED, storage

GUARDED = re.compile(r"@(!?)\s*([%\w$]+)\s+(.*)", re.S)
INSTRUCTION = re.compile(r"([a-z]\w*(?:\.[\w:]+)*)\s*(.*)", re.S)
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
LOCAL = re.compile(r"\.(local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
ADDRESS = re.compile(r"(.*?)\s*\+\s*(-?(?:0x[0-9a-fA-F]+|\d+))", re.S)
INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
POISON = {8: "0xbd", 16: "0xbadb", 32: "0xbadbadbau", 64: "0xbadbadbabadbadbaull", 128: "0", 1: "false"}

WITHOUT_RESULT = {"st", "red", "bar", "barrier", "bra", "brx", "cp", "fence", "membar", "prefetch", "stmatrix", "wgmma"}


class Scope:
    """Names of one pair of braces: single registers, and ranges such as %r<20>."""

    def __init__(self, parent, tag):
        self.parent, self.tag, self.single, self.ranges, self.found = parent, tag, {}, {}, {}

    def find(self, name):
        """(type, C++ name) of a register; None for no register."""
        if name not in self.found:
            found = self.search(name)
            if not found:
                return None  # may be declared later
            self.found[name] = found
        return self.found[name]

    def search(self, name):
        scope = self
        while scope:
            if name in scope.single:
                return scope.single[name], f"v_{scope.tag}{identifier(name)}_"
            stem = name.rstrip("0123456789")
            for cut in range(len(stem), len(name)):  # %r1<10> may be meant by %r12
                declared = scope.ranges.get(name[:cut])
                if declared and int(name[cut:]) < declared[1]:
                    return declared[0], f"v_{scope.tag}{identifier(name)}"
            scope = scope.parent
        return None


class KernelEmitter:
    """Emits the body of one .entry or .func."""

    def __init__(self, module, function):
        self.module, self.function = module, function
        self.registers, self.local_arrays, self.code = {}, [], []
        self.locals, self.shared = {}, []
        self.accumulators = set()
        self.unfenced = {}  # register -> line at which it was written since the last wgmma.fence
        self.line, self.count = function.line, 0

    def emit(self):
        """Fills registers, local_arrays and code."""
        items = list(statements(self.function.body, self.function.line))
        self.scope, self.stack, self.opened = Scope(None, ""), [""], 0
        self.find_labels(items)
        self.find_accumulators(items)
        for kind, text, line in items:
            self.line = line
            try:
                getattr(self, f"emit_{kind}")(text)
            except TranslationError as error:
                error.line = error.line or line
                error.text = error.text or re.sub(r"\s+", " ", str(text))[:200]
                raise

    # ---- names

    def find_labels(self, items):
        stack, opened = [""], 0
        self.labels, self.tables = {}, {}
        for kind, text, _ in items:
            if kind == "open":
                opened += 1
                stack.append(f"s{opened}_")
            elif kind == "close":
                stack.pop()
            elif kind == "label":
                self.labels[stack[-1], text] = f"L_{stack[-1]}{identifier(text)}"
            elif kind == "table":
                self.tables[text[0]] = text[1]

    def find_accumulators(self, items):
        """Registers that wgmma writes, and those they are copied to: a copy may run while the result is in flight."""
        copies = []
        for kind, text, _ in items:
            if kind != "statement":
                continue
            if text.startswith("wgmma.mma_async"):
                self.accumulators |= set(split_operands(text[text.index("{") + 1 : text.index("}")]))
            elif match := re.fullmatch(r"mov\.[bf]32\s+(%\w+),\s*(%\w+)", text):
                copies.append(match.groups())
        while self.accumulators:
            reached = {to for to, source in copies if source in self.accumulators} - self.accumulators
            if not reached:
                break
            self.accumulators |= reached

    def label(self, name):
        for tag in reversed(self.stack):
            if (tag, name) in self.labels:
                return self.labels[tag, name]
        raise TranslationError(f"unknown label {name}")

    # ---- statements

    def emit_open(self, _):
        self.opened += 1
        self.stack.append(f"s{self.opened}_")
        self.scope = Scope(self.scope, self.stack[-1])

    def emit_close(self, _):
        self.stack.pop()
        self.scope = self.scope.parent

    def emit_label(self, name):
        self.unfenced.clear()  # values from other blocks are not tracked
        self.code.append(f"{self.label(name)}:;")

    def emit_table(self, _):
        pass

    def emit_statement(self, text):
        if text.startswith("."):
            self.declare(text)
            return
        guard = ""
        if match := GUARDED.fullmatch(text):
            guard, text = match[1] + self.get(match[2], 1), match[3]
        match = INSTRUCTION.fullmatch(text)
        if not match:
            raise TranslationError("expected an instruction")
        operands = split_operands(re.sub(r"\s+", " ", match[2]).strip())
        self.count += 1
        code = opcodes.translate(self, match[1], operands)
        self.note_writes(match[1], operands)
        if "T->" in code or "(T" in code:
            code = f"T->line={self.line}; {code}"
        self.code.append(f"if({guard}){{{code}}}" if guard else f"{{{code}}}" if ";" in code[:-1] else code)

    def note_writes(self, name, operands):
        """Keeps which registers were written since the last wgmma.fence; a copy is as old as its source."""
        word = name.split(".")[0]
        if name.startswith(("wgmma.fence", "wgmma.mma_async")):
            written = self.vector(operands[0]) if operands else list(self.unfenced)
            for register in written:
                self.unfenced.pop(register, None)
        elif word == "mov" and len(operands) == 2 and operands[1] in self.unfenced:
            self.unfenced[operands[0]] = self.unfenced[operands[1]]
        elif word == "mov" and self.scope.find(operands[1]):
            self.unfenced.pop(operands[0], None)
        elif operands and word not in WITHOUT_RESULT:
            for register in self.vector(operands[0]):
                if register.startswith("%"):
                    self.unfenced[register] = self.line

    def declare(self, text):
        self.scope.found.clear()
        if match := REGISTERS.fullmatch(text):
            if match[1] not in BITS:
                raise TranslationError(f"unknown type .{match[1]}")
            for name in split_operands(match[2]):
                if ranged := re.fullmatch(r"(.*)<(\d+)>", name):
                    self.scope.ranges[ranged[1]] = match[1], int(ranged[2])
                else:
                    self.scope.single[name] = match[1]
        elif match := LOCAL.fullmatch(text):
            size = BITS[match[3]] // 8 * int(match[5] or 1)
            name = f"local_{self.scope.tag}{identifier(match[4])}"
            align = max(16, int(match[2] or 8))
            self.local_arrays.append((name, align, max(size, 1), match[1] == "local"))
            self.locals[match[4]] = name
        elif match := SHARED.fullmatch(text):
            self.declare_shared(match)
        elif not re.match(r"\.(loc|file)\b|\.pragma\s+\"(nounroll|used_bytes_mask[ \dxa-fA-F]*)\"", text):
            raise TranslationError("unknown directive")

    def declare_shared(self, match):
        size, element = BITS[match[2]] // 8 * int(match[4] or 1), BITS[match[2]] // 8
        align = int(match[1] or element)
        self.module.variables[match[3]] = Variable(match[3], "shared", size, align, element, False, [])

    # ---- operands

    def register(self, name):
        found = self.scope.find(name)
        if not found:
            raise TranslationError(f"unknown register {name}")
        self.registers[found[1]] = found[0]
        return found

    def get(self, operand, bits):
        """An operand's bits as a C++ expression of the unsigned type of that width."""
        operand = operand.strip()
        if operand.startswith("{") and "," not in operand:
            operand = operand[1:-1].strip()
        kind = UNSIGNED[bits]
        found = self.scope.find(operand)
        if found:
            self.registers[found[1]] = found[0]
            return found[1] if BITS[found[0]] == bits else f"({kind}){found[1]}"
        if operand in SPECIAL:
            return f"({kind}){SPECIAL[operand]}"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"({kind})0x{match[1]}u"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return f"0x{match[1]}ull"
        if INTEGER.fullmatch(operand):
            return f"({kind}){integer(operand) & ((1 << bits) - 1):#x}ull"
        if re.fullmatch(r"-?\d+\.\d*", operand):
            form = ("<f", "<I") if bits == 32 else ("<d", "<Q")
            return f"({kind}){struct.unpack(form[1], struct.pack(form[0], float(operand)))[0]:#x}ull"
        if operand == "WARP_SZ":
            return "32u"
        return f"({kind})({self.symbol(operand)})"

    def get_signed(self, operand, bits):
        return f"(int{bits}_t){self.get(operand, bits)}"

    def get_typed(self, operand, kind):
        """As the arithmetic type: signed for s types."""
        return self.get_signed(operand, BITS[kind]) if kind[0] == "s" else self.get(operand, BITS[kind])

    def f32(self, operand, flush=False):
        bits = self.get(operand, 32)
        return f"as_float(flush_subnormal({bits}))" if flush else f"as_float({bits})"

    def f64(self, operand):
        return f"as_double({self.get(operand, 64)})"

    def predicate(self, operand):
        if operand.startswith("!"):
            return f"!{self.predicate(operand[1:])}"
        if re.fullmatch(r"-?\d+", operand):
            return "true" if int(operand) else "false"
        return self.get(operand, 1)

    def symbol(self, name):
        """A variable's or parameter's generic or space-bound address."""
        if match := re.fullmatch(r"([^+]+)\+(-?\d+)", name):
            return f"({self.symbol(match[1])}+({match[2]}))"
        if name in self.locals:
            return f"((uint64_t){self.locals[name]})"
        for parameter in self.function.parameters if self.function.kind == "entry" else ():
            if parameter.name == name:
                return f"((uint64_t)T->params+{parameter.offset})"
        variable = self.module.variables.get(name)
        if not variable:
            raise TranslationError(f"unknown name {name}")
        if variable.space == "shared":
            if name not in self.shared:
                self.shared.append(name)
            return f"T->shared_symbol(kShared_{identifier(self.function.name)}_{identifier(name)})"
        return f"variable_address(T, kVariable_{identifier(name)})"

    def address(self, operand):
        """[register+offset] as a 64-bit expression."""
        inside = operand.strip()
        if inside.startswith("["):
            inside = inside[1:-1].strip()
        offset = 0
        if match := ADDRESS.fullmatch(inside):
            inside, offset = match[1].strip(), int(match[2], 0)
        value = self.get(inside, 64)
        return f"({value}+(int64_t){offset}ll)" if offset else f"(uint64_t){value}"

    def pointer(self, space, operand, size):
        """A checked host pointer to `size` bytes at the operand's address in a state space."""
        space = space.split("::")[0]
        address = self.address(operand)
        if space in ("shared", "global", "local", "const"):
            return f"T->{space}_at({address},{size})"
        return f"(uint8_t*)({address})" if space == "param" else f"T->generic_at({address},{size})"

    def vector(self, operand):
        operand = operand.strip()
        return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]

    def array(self, name, operands, bits=32):
        """Declares a C++ array of the operands' bits."""
        values = ",".join(self.get(operand, bits) for operand in operands)
        return f"{UNSIGNED[bits]} {name}[{max(len(operands), 1)}]={{{values}}};"

    # ---- results

    def put(self, operand, value):
        """Assigns an expression of unsigned bits to a register; `_` drops it."""
        if operand == "_":
            return f"(void)({value});"
        kind, name = self.register(operand)
        return f"{name}=({storage(kind)})({value});"

    def put_signed(self, operand, value, bits):
        """Assigns a signed result of `bits` bits, sign-extended if the register is wider."""
        kind, _ = self.register(operand)
        return self.put(operand, f"(int{max(BITS[kind], bits)}_t)(int{bits}_t)({value})")

    def put_f32(self, operand, value, flush=False, saturate=False):
        bits = f"float_bits({value})"
        if flush:
            bits = f"flush_subnormal({bits})"
        return self.put(operand, f"canonical_nan({f'saturate_unit({bits})' if saturate else bits})")

    def put_all(self, operands, array):
        return " ".join(self.put(name, f"{array}[{i}]") for i, name in enumerate(operands) if name != "_")


def integer(text):
    text = text.rstrip("U")
    return int(text, 8) if re.fullmatch(r"-?0\d+", text) else int(text, 0)
