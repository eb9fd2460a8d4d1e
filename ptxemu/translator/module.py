"""A PTX module: its variables and functions, found without parsing function bodies."""

import collections
import re

from .errors import TranslationError
from .source import Lines, closing, split_operands, without_comments
from .types import BITS

LINKING = r"(?P<linking>(?:\.(?:visible|weak|extern|common)\s+)*)"
DIRECTIVE = re.compile(r"\.(version|target|address_size|file|section|alias)\b[^\n]*")
FUNCTION = re.compile(LINKING + r"\.(?P<kind>entry|func)\b")
HEAD = re.compile(
    r"\s*(\((?P<results>[^()]*)\))?\s*(?P<name>[\w$]+)\s*(\((?P<params>[^()]*)\))?(?P<attributes>.*)", re.S
)
VARIABLE = re.compile(
    LINKING + r"\.(?P<space>global|shared|const)\s+(?P<attributes>(?:\.\w+(?:\([^)]*\))?(?:\s+\d+)?\s+)*?)"
    r"\.(?P<type>\w+)\s+(?P<name>[\w$]+)(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<value>.*))?",
    re.S,
)
PARAMETER = re.compile(
    r"\.(?:param|reg)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)(?:\s+\.ptr(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?)?"
    r"\s+(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?"
)
ATTRIBUTES = {"maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "noreturn", "pragma", "explicitcluster"}
ATTRIBUTES |= {"reqnctapercluster", "maxclusterrank", "blocksareclusters", "abi_preserve", "abi_preserve_control"}


# Named tuples, because importing dataclasses takes as long as translating a short kernel.
class Variable(collections.namedtuple("Variable", "name space size align element extern values")):
    """Size and element are in bytes. Values are the initializer's integers; the rest of the array is zero."""

    @property
    def dynamic(self):
        """Whether it is shared memory whose size the launch sets."""
        return self.space == "shared" and self.extern


Parameter = collections.namedtuple("Parameter", "name type size offset")


class Function(collections.namedtuple("Function", "name kind results parameters attributes body line")):
    """Kind is entry or func; line is that of the body's first character."""

    def numbers(self, attribute):
        """The numbers after .attribute; [] without."""
        match = re.search(rf"\.{attribute}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", self.attributes)
        return [int(number) for number in match.groups() if number] if match else []


def parameters(text):
    found, offset = [], 0
    for declared in split_operands(text or ""):
        match = PARAMETER.fullmatch(re.sub(r"\s+", " ", declared))
        if not match or match["type"] not in BITS:
            raise TranslationError("unknown parameter", None, declared)
        element = BITS[match["type"]] // 8
        size, align = element * int(match["count"] or 1), int(match["align"] or element)
        offset = -(-offset // align) * align
        found.append(Parameter(match["name"], match["type"], size, offset))
        offset += size
    return found


def initializer(text):
    values = []
    for value in split_operands(text.strip().strip("{}")) if text else []:
        try:
            values.append(int(value.rstrip("U"), 0))
        except ValueError:
            raise TranslationError("an initializer that is no integer is not supported", None, value) from None
    return values


class Module:
    """Variables by name, functions in order; `head`, the text outside function bodies, is in every kernel's hash."""

    def __init__(self, text):
        self.text = without_comments(text)
        self.variables, self.functions = {}, []
        self.version = self.target = ""
        self.parse()
        self.head = "\n".join(map(str, self.variables.values()))

    def parse(self):
        text, at, lines = self.text, 0, Lines(self.text)
        while at < len(text):
            if text[at].isspace() or text[at] == ";":
                at += 1
                continue
            line = lines.of(at)
            try:
                if match := DIRECTIVE.match(text, at):
                    self.directive(match)
                    at = match.end()
                elif match := FUNCTION.match(text, at):
                    at = self.function(match)
                else:
                    end = text.find(";", at)
                    if end < 0:
                        raise TranslationError("expected a semicolon", line, text[at : at + 60])
                    self.variable(text[at:end].strip())
                    at = end + 1
            except TranslationError as error:
                error.line = error.line or line
                raise

    def directive(self, match):
        words = match.group().split()
        if match.group(1) == "section" or match.group(1) == "alias":
            raise TranslationError(f"unknown directive .{match.group(1)}", None, match.group())
        if match.group(1) in ("version", "target"):
            setattr(self, match.group(1), words[1].rstrip(","))

    def variable(self, text):
        match = VARIABLE.fullmatch(text)
        if not match or match["type"] not in BITS:
            raise TranslationError("unknown declaration", None, text[:120])
        element, count = BITS[match["type"]] // 8, 1
        for size in re.findall(r"\[(\d*)\]", match["dims"]):
            count *= int(size or 0)
        align = re.search(r"\.align\s+(\d+)", match["attributes"])
        values = initializer(match["value"])
        if "[]" in match["dims"] and values:
            count = len(values)
        self.variables[match["name"]] = Variable(
            match["name"],
            match["space"],
            element * count,
            int(align.group(1)) if align else element,
            element,
            ".extern" in match["linking"],
            values,
        )

    def function(self, match):
        """Notes the function and returns the offset after it."""
        text, at = self.text, match.end()
        depth = 0
        while depth or text[at] not in "{;":
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        head = HEAD.fullmatch(text[match.end() : at])
        for attribute in re.findall(r"\.([a-z]\w*)", head["attributes"]):
            if attribute not in ATTRIBUTES:
                raise TranslationError(f"unknown attribute .{attribute}", None, head["name"])
        if text[at] == ";":  # a declaration
            return at + 1
        end = closing(text, at)
        self.functions.append(
            Function(
                head["name"],
                match["kind"],
                parameters(head["results"]),
                parameters(head["params"]),
                head["attributes"],
                text[at + 1 : end],
                text.count("\n", 0, at + 1) + 1,
            )
        )
        return end + 1

    def entries(self):
        return [function for function in self.functions if function.kind == "entry"]
