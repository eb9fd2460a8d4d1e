"""The reference pages of the C and C++ interfaces, from the two headers."""

import re

from prose import call, fence, inline

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
OPAQUE = re.compile(r"typedef struct (\w+) \1;$")
NAME = re.compile(r"#define (\w+)|\(\*(\w+)\)|(\w+)\(|(\w+);$")


def comment_text(comment):
    """The text of a comment, line by line."""
    lines = comment.removeprefix("/*").removesuffix("*/").strip().splitlines()
    return "\n".join(re.sub(r"^\s*\*? ?", "", line).rstrip() for line in lines)


def declaration_end(text):
    """The end of a preprocessor line, or after the semicolon that is in no brace and no comment."""
    if text[0] == "#":
        return len(text.split("\n", 1)[0])
    depth = 0
    for token in re.finditer(r"/\*.*?\*/|[{};]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if token[0] == ";" and depth == 0:
            return token.end()
    return len(text)


def declarations(text):
    """(comment, code) of each declaration, in order; a section's heading has no code."""
    comment = ""
    while text := text.lstrip():
        if found := COMMENT.match(text):
            comment = comment_text(found[0])
            text = text[found.end() :]
            if comment.startswith("----"):
                yield " ".join(comment.split()).strip("- "), ""
                comment = ""
            continue
        end = declaration_end(text)
        # A comment in the same line belongs to the declaration, and an enum to the typedef before it.
        for more in (r" */\*.*?\*/(?=\n)", r"\nenum \{.*?\};"):
            if found := re.compile(more, re.DOTALL).match(text, end):
                end = found.end()
        yield comment, text[:end]
        text, comment = text[end:], ""


def name_of(code):
    """The name that a declaration declares."""
    plain = COMMENT.sub("", code).split("\nenum")[0].strip()
    if plain.startswith("typedef struct"):  # its fields may be functions
        return re.search(r"(\w+);$", plain)[1]
    return next(filter(None, NAME.search(plain).groups()))


def tidy(code):
    """A function without its macro, laid out again; everything else as it is written."""
    if not code.startswith("NVFP4_MOE_API"):
        return code
    plain = " ".join(COMMENT.sub("", code).removeprefix("NVFP4_MOE_API").split())
    head, arguments = re.match(r"(.*?)\((.*)\);$", plain).groups()
    return call(head, arguments.split(", "), ";") + "".join("  " + comment for comment in COMMENT.findall(code))


def entries(header):
    body = re.search(r'extern "C" \{\n#endif\n(.*)#ifdef __cplusplus', header, re.DOTALL)[1]
    return list(declarations(body))


def c_names(header):
    return [name_of(code) for _, code in entries(header) if code]


def c_page(header):
    links = {name: f"#{name}" for name in c_names(header)}
    title, rules = comment_text(COMMENT.search(header)[0]).split("\nRules for all functions\n")
    lines = ["# C interface", "", inline(title.split("\nLong because")[0], links), ""]
    lines += ["`#include <nvfp4_moe/nvfp4_moe.h>`", "", "## Rules for all functions", ""]
    lines += ["- " + inline(rule, links) for rule in re.split(r"^- ", rules, flags=re.MULTILINE)[1:]] + [""]
    handles = []
    for comment, code in entries(header):
        if OPAQUE.match(code):
            handles.append(code)
            continue
        if handles:
            anchors = "".join(f"[](){{ #{name_of(one)} }}" for one in handles)
            lines += ["### Handles", "", anchors, "", fence("\n".join(handles), "c")]
            handles = []
        if code:
            name = name_of(code)
            lines += [f"### `{name}` {{ #{name} }}", "", inline(comment, links), "", fence(tidy(code), "c")]
        else:
            heading, _, more = comment.partition(": ")
            lines += [f"## {heading[0].upper()}{heading[1:]}", "", inline(more[:1].upper() + more[1:], links), ""]
    return "\n".join(lines)


def cpp_page(header):
    """The header as it is: each function is one call of the C interface."""
    intro, code = header.split("#pragma once\n", 1)
    intro = re.sub(r"^// ?(Long because.*)?", "", intro, flags=re.MULTILINE)
    lines = ["# C++ interface", "", inline(intro, {"nvfp4_moe.h": "c-api.md"}), "", fence(code.strip(), "cpp")]
    return "\n".join(lines)
