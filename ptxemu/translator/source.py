"""A PTX file's text as statements: comments are blanked, line numbers are kept."""

import re

from .errors import TranslationError

BRACE = re.compile("[{}]")
BRACKET = re.compile(r"[{}()\[\]]")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
LABEL = re.compile(r"([A-Za-z$_%][\w$]*)\s*:(?!:)")
TABLE = re.compile(r"\s*\.branchtargets\b([^;]*);")


def without_comments(text):
    """The text with every comment replaced by blanks, so that offsets and lines stay."""
    return COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def split_operands(text):
    """Splits at commas outside brackets."""
    if not BRACKET.search(text):
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    found, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*found, last] if last else found


def closing(text, at):
    """The offset of the brace that closes the one at `at`."""
    depth = 0
    for brace in BRACE.finditer(text, at):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    raise TranslationError("expected a closing }")


class Lines:
    """Line numbers (from 1) of offsets that only grow."""

    def __init__(self, text, first=1):
        self.text, self.line, self.at = text, first, 0

    def of(self, offset):
        self.line += self.text.count("\n", self.at, offset)
        self.at = offset
        return self.line


def statements(body, first_line):
    """Yields (kind, text, line) of a function's body: open, close, label, table ((name, targets)), statement."""
    at, lines = 0, Lines(body, first_line)
    while at < len(body):
        character = body[at]
        if character.isspace() or character == ";":
            at += 1
        elif character in "{}":
            yield ("open" if character == "{" else "close"), "", lines.of(at)
            at += 1
        elif match := LABEL.match(body, at):
            table = TABLE.match(body, match.end())
            if table:
                yield "table", (match.group(1), split_operands(table.group(1))), lines.of(at)
            else:
                yield "label", match.group(1), lines.of(at)
            at = table.end() if table else match.end()
        else:
            end = statement_end(body, at)
            yield "statement", body[at:end].strip(), lines.of(at)
            at = end + 1


def statement_end(body, at):
    """A statement ends at its semicolon, .loc and .file at their line's end."""
    if re.compile(r"\.(loc|file)\b").match(body, at):
        end = body.find("\n", at)
        return len(body) if end < 0 else end
    end = body.find(";", at)
    if end < 0:
        raise TranslationError("expected a semicolon", None, body[at : at + 60])
    return end
