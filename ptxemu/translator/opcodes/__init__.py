"""The C++ code of each PTX instruction, one file per family.

A form is a regular expression that must match an instruction's whole name after its first word, including modifiers and
types in their order. Forms are a whitelist: an instruction that matches none is an error, so no modifier is ever
ignored. Most forms are rows of a table whose last column is a C++ template; `form` declares a function for the others.
"""

import functools
import importlib
import re
import string

from ..errors import TranslationError
from ..types import BITS, SIGNED, UNSIGNED, arithmetic

FAMILIES = (
    "moves",
    "loads",
    "integers",
    "bits",
    "floats",
    "halves",
    "compares",
    "conversions",
    "control",
    "warps",
    "barriers",
    "atomics",
    "mbarriers",
    "copies",
    "tensor_maps",
    "matrices",
    "tensor_memory",
)
FORMS = {}
MODES = {"rn": "kNearest", "rz": "kToZero", "rm": "kDown", "rp": "kUp"}
SCOPES = {"cta": "kCta", "cluster": "kCluster", "gpu": "kGpu", "gl": "kGpu", "sys": "kSys"}


def form(word, pattern=""):
    """Declares that the function translates `word` followed by what the pattern matches; blanks in it do not count.

    The function gets the kernel's emitter, the match's named groups and the operands' texts without the policy of a
    cache hint, and returns C++; None if the operands are of another form.
    """

    def declare(function):
        # Not compiled here: compiling all took half of a short translation, and re caches those that a kernel uses.
        FORMS.setdefault(word, []).append(("".join(pattern.split()), function))
        return function

    return declare


class Operand:
    """An operand in a template, by its number: {1} has the bits of the form's type."""

    def __init__(self, kernel, match, text):
        self.kernel, self.match, self.text = kernel, match, text

    def __format__(self, kind):
        kernel, match, text = self.kernel, self.match, self.text
        if kind.isdigit():
            return kernel.get(text, int(kind))
        if kind == "t":  # signed if the type is
            return kernel.get_typed(text, match["type"])
        if kind == "wide":  # of twice the bits
            return kernel.get(text, 2 * BITS[match["type"]])
        if kind == "f":  # f32, flushed by .ftz
            return kernel.f32(text, match.get("ftz"))
        if kind == "flushed":  # its bits
            return f"flush_subnormal({kernel.get(text, 32)})" if match.get("ftz") else kernel.get(text, 32)
        if kind == "d":
            return kernel.f64(text)
        if kind == "p":
            return kernel.predicate(text)
        if kind == "address":
            return kernel.address(text)
        if kind == "shared":  # an address in shared memory; a generic one names it too
            return kernel.address(text) if match["space"] else f"generic_to_shared({kernel.address(text)})"
        return kernel.get(text, BITS[match["type"]])


class Group:
    """Inserts the match of a named group into a template."""

    KINDS = {
        "flag": lambda text: "true" if text else "false",
        "kind": lambda text: "".join(word.capitalize() for word in text.split("_")),
        "mode": lambda text: MODES[text[:2]],
        "scope": lambda text: SCOPES[text],
        "bits": lambda text: str(BITS[text]),
        "U": lambda text: UNSIGNED[BITS[text]],
        "S": lambda text: SIGNED[BITS[text]],
        "V": arithmetic,
        "U32": lambda text: UNSIGNED[max(BITS[text], 32)],
        "wide_U": lambda text: UNSIGNED[2 * BITS[text]],
        "wide_V": lambda text: arithmetic(f"{text[0]}{2 * BITS[text]}"),
        "is_64": lambda text: "true" if BITS[text] == 64 else "false",
        "byte": lambda text: "int8_t" if text == "s" else "uint8_t",
        "is_signed": lambda text: "true" if text[0] == "s" else "false",
    }

    def __init__(self, text):
        self.text = text

    def __format__(self, kind):
        return self.KINDS[kind](self.text) if kind else self.text


def filled(template, unused=0):
    """(kernel, match, operands) -> the template's C++; None for another number of operands than it names.

    unused: operands that the emulator ignores."""
    numbers = [int(name) for _, name, _, _ in string.Formatter().parse(template) if name and name.isdigit()]

    def fill(kernel, match, operands, results):
        if len(operands) != max([results - 1, *numbers]) + 1 + unused:
            return None
        texts = [Operand(kernel, match, operand) for operand in operands]
        return template.format(*texts, **{name: Group(text) for name, text in match.items()})

    return fill


def effects(*rows):
    """Rows (word, pattern, template[, unused operands]) of instructions without a result: statements."""
    for word, pattern, *template in rows:
        fill = filled(*template)
        form(word, pattern)(lambda kernel, match, operands, fill=fill: fill(kernel, match, operands, 0))


def results(rows, put):
    """Declares forms whose result (after the template's last "; ") put(kernel, match, operand 0, result) assigns."""
    for word, pattern, template in rows:
        fill = filled(template)

        def value(kernel, match, operands, fill=fill):
            code = fill(kernel, match, operands, 1)
            if code is None:
                return None
            before, end, last = code.rpartition("; ")
            return before + end + put(kernel, match, operands[0], last)

        form(word, pattern)(value)


def values(*rows, put=lambda kernel, match, to, value: kernel.put(to, value)):
    """The same rows of instructions that have one result."""
    results(rows, put)


def pairs(*rows):
    """The same for instructions with two results, "first, second". Operand 0 is "first|second", or only the first."""
    results(rows, lambda kernel, match, to, value: put_two(kernel, to, *value.split(", ")))


def put_two(kernel, operand, first, second):
    names = [name.strip() for name in operand.split("|")]
    return " ".join(kernel.put(name, value) for name, value in zip(names, (first, second), strict=False))


def translate(kernel, name, operands):
    """The C++ of one instruction without its guard."""
    word, _, modifiers = name.partition(".")
    if word not in FORMS:
        raise TranslationError(f"unknown instruction {name}")
    if modifiers.endswith("L2::cache_hint") or "L2::cache_hint." in modifiers:
        operands = operands[:-1]
    known = matches(word, modifiers)
    for groups, function in known:
        try:
            code = function(kernel, dict(groups), list(operands))
        except (IndexError, ValueError) as error:
            raise TranslationError(f"{name}: unexpected operands ({error})") from error
        if code is not None:
            return code
    raise TranslationError(
        f"{name}: unexpected operands" if known else f"unknown modifiers or types of {word} in {name}"
    )


@functools.cache
def matches(word, modifiers):
    """The forms that match an instruction's name, as (named groups, function). A kernel uses few names, each often."""
    text = "." + modifiers if modifiers else ""
    found = ((re.fullmatch(pattern, text), function) for pattern, function in FORMS[word])
    return [(match.groupdict(), function) for match, function in found if match]


for family in FAMILIES:
    importlib.import_module(f"{__name__}.{family}")
