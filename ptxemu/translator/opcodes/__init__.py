"""What each PTX instruction is in C++, one file a family.

A form is a regular expression over the whole of an instruction's name after its first word, modifiers and types with
their order included. It is the whitelist: what no form matches is an error, so that no modifier is ever ignored.
"""

import importlib
import re

from ..errors import TranslationError

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


def form(word, pattern=""):
    """Declares that the function translates `word` followed by what the pattern matches; blanks in it do not count.

    The function gets the kernel's emitter, the match's named groups and the operands' texts, and returns C++.
    """

    def declare(function):
        FORMS.setdefault(word, []).append((re.compile(re.sub(r"\s+", "", pattern)), function))
        return function

    return declare


def translate(kernel, name, operands):
    """The C++ of one instruction without its guard."""
    word, _, modifiers = name.partition(".")
    if word not in FORMS:
        raise TranslationError(f"unknown instruction {name}")
    for pattern, function in FORMS[word]:
        if match := pattern.fullmatch("." + modifiers if modifiers else ""):
            try:
                return function(kernel, match.groupdict(), operands)
            except (IndexError, ValueError) as error:
                raise TranslationError(f"{name}: unexpected operands ({error})") from error
    raise TranslationError(f"unknown modifiers or types of {word} in {name}")


for family in FAMILIES:
    importlib.import_module(f"{__name__}.{family}")
