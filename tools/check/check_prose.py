#!/usr/bin/env python3
"""Counts words and forms that make comments, docstrings and markdown hard to read (CONTRIBUTING.md, "Words").

Exits with 1 if an area has more of one than its limit. `--list AREA` prints each place that counts.
"""

import argparse
import ast
import collections
import io
import re
import sys
import textwrap
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = {top: (top,) for top in ("include", "src", "python", "cli", "tests", "bench", "tools", "ptxemu")}
AREAS["docs"] = ("docs", "examples", "*.md")

# Words: a pattern, and how often an area may have it per 1,000 words of prose (rounded up to a whole number).
# The first word may also not be more frequent than "if": conditions begin with "if".
WORDS = {
    "where": (r"where", 1.5),
    "behind": (r"(?<!look-)behind", 0.06),
    "alone": (r"alone", 0.06),
    "says": (r"says?", 0.02),
    "beside": (r"besides?", 0.05),
    "so many": (r"so many", 0.05),
    "is none": (r"(?:is|are|was|were) none|of none", 0.2),
    "whatever": (r"(?:who|what|which)ever", 0.1),
    "alike": (r"alike", 0.05),
    "anew": (r"anew", 0),
    "by turns": (r"by turns", 0),
}
# Forms: how many an area may have.
FORMS = {
    "What or Of": 0,  # comments and docstrings that begin so
    "long paragraph": 0,  # markdown paragraphs above PARAGRAPH words
    "long line": 0,  # above COLUMNS; tables and lines with a link or URL in markdown are excepted
}
PARAGRAPH = 120  # words
COLUMNS = {".md": 120, ".py": 120}  # other files: 100
# Areas that do not reach a limit yet, with their numbers when this was last lowered (--ceilings prints them as they are
# now). They may only fall.
# fmt: off
CEILINGS = {
    "src": {"long line": 1},
    "python": {"long line": 15},
    "cli": {"is none": 3},
    "tests": {"long line": 106},
    "tools": {"long line": 12},
    "docs": {"long line": 26},
}
# fmt: on

SUFFIXES = (".h", ".hpp", ".cpp", ".cu", ".cuh", ".c", ".inc", ".py", ".md")
CPP_TOKEN = re.compile(
    r"""R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'|(?P<comment>//[^\n]*|/\*.*?\*/)""", re.DOTALL
)
PATTERNS = {"words": re.compile(r"\S+"), "if": re.compile(r"\bif\b", re.IGNORECASE)} | {
    # A phrase may go on in the next line of a comment.
    word: re.compile(rf"\b(?:{pattern})\b".replace(" ", r"[\s/#*]+"), re.IGNORECASE)
    for word, (pattern, _) in WORDS.items()
}
MARKDOWN_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`|<!--.*?-->|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE)


def cpp_comments(text):
    """(line, column, whether the line begins with it, comment) of each."""
    for match in CPP_TOKEN.finditer(text):
        if comment := match["comment"]:
            start, begin = match.start(), text.rfind("\n", 0, match.start()) + 1
            yield text.count("\n", 0, start) + 1, start - begin, not text[begin:start].strip(), comment


def python_comments(text):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield *token.start, not token.line[: token.start[1]].strip(), token.string
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, -1, True, node.body[0].value.value


def joined(comments):
    """(line, text) of each comment: lines of comment that follow it in the same column belong to it."""
    last, block = None, []
    for line, column, begins_line, comment in comments:
        if block and last == (line - 1, column) and begins_line and not comment.startswith("/*"):
            block[1] += "\n" + comment
        else:
            if block:
                yield tuple(block)
            block = [line, comment]
        last = (line, column)
    if block:
        yield tuple(block)


def paragraphs(text):
    """(line, text) of each paragraph, list item, heading and table row, without code and the targets of links."""
    text = MARKDOWN_CODE.sub(lambda match: re.sub(r"[^\n]+", " ", match[0]), text)
    begin, block = 0, []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        is_one = line.lstrip().startswith(("#", "|"))
        if block and (not line.strip() or is_one or re.match(r" *([-*]|\d+\.) ", line)):
            yield begin, "\n".join(block)
            block = []
        if is_one:
            yield number, line
        elif line.strip():
            begin = begin if block else number
            block.append(line)


def blocks_of(path, text):
    if path.endswith(".md"):
        return paragraphs(text)
    return joined(python_comments(text) if path.endswith(".py") else cpp_comments(text))


def found_in(path, text):
    """(rule, line) of everything that counts, with ("if", line) and ("words", line) of each word of prose."""
    markdown = path.endswith(".md")
    for number, block in blocks_of(path, text):
        for name, pattern in PATTERNS.items():
            for match in pattern.finditer(block):
                yield name, number + block.count("\n", 0, match.start())
        if not markdown and re.match(r"[\s/*#<!]*(What|Of)\b", block):
            yield "What or Of", number
        if markdown and len(block.split()) > PARAGRAPH and not block.lstrip().startswith("|"):
            yield "long paragraph", number
    columns = COLUMNS.get(Path(path).suffix, 100)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > columns and not (markdown and re.search(r"^\s*\||\]\(|\]:|https?://", line)):
            yield "long line", number


def files_of(area):
    for top in AREAS[area]:
        for file in sorted(ROOT.glob(top)):
            yield from (file,) if file.is_file() else sorted(f for f in file.rglob("*") if f.suffix in SUFFIXES)


def places(area):
    """{rule: ["path:line", ...]}."""
    found = collections.defaultdict(list)
    for file in files_of(area):
        path = file.relative_to(ROOT).as_posix()
        for rule, line in found_in(path, file.read_text()):
            found[rule].append(f"{path}:{line}")
    return found


def limit(rule, found):
    if rule in FORMS:
        return FORMS[rule]
    per_thousand = -(-WORDS[rule][1] * len(found["words"]) // 1000)
    return int(min(per_thousand, len(found["if"])) if rule == "where" else per_thousand)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", choices=AREAS, metavar="AREA", help=f"prints file:line; areas: {', '.join(AREAS)}")
    parser.add_argument("--ceilings", action="store_true", help="prints CEILINGS as they would be now")
    options = parser.parse_args()
    if options.list:
        found = places(options.list)
        print("\n".join(f"{place}: {rule}" for rule in (*WORDS, *FORMS) for place in found[rule]))
        return 0
    bad, over = [], collections.defaultdict(dict)
    for area in AREAS:
        found = places(area)
        for rule in (*WORDS, *FORMS):
            count, most = len(found[rule]), limit(rule, found)
            if count > most:
                over[area][rule] = count
            most = max(most, CEILINGS.get(area, {}).get(rule, 0))
            if count > most:
                bad.append(f'{area}: "{rule}" {count} times, at most {most} (check_prose.py --list {area})')
    if options.ceilings:
        for area, rules in over.items():
            counts = ", ".join(f'"{rule}": {count}'.replace(" ", "~") for rule, count in rules.items())
            print(textwrap.fill(f'    "{area}": {{{counts}}},', 120, subsequent_indent=" " * 8).replace("~", " "))
        return 0
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
