"""Text of comments, docstrings and --help as Markdown: names become code, and links if the reference has them."""

import re

TOKEN = re.compile(
    r'`[^`\n]+`|"[^"\s]{1,60}"|--[a-z][\w-]*|docs/[\w/-]+\.md'
    r"|[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*(?:<\w+>)?(?:\(\))?|[<>*_\\|]",
    re.ASCII,
)


def inline(text, links):
    """One paragraph. links: {name: URL from the page that the text is for}."""

    def mark(match):
        word = match[0]
        name = word.removesuffix("()")
        if word[0] == "`":
            return word
        if word.startswith("docs/"):
            return f"[{word.rsplit('/', 1)[1]}](../{word.removeprefix('docs/')})"
        # A word in lower case may be a verb of the sentence: quantize, inspect.
        if name in links and not (word == name and word.isalpha() and word.islower()):
            return f"[`{word}`]({links[name]})"
        if word in "<>*_\\|":
            return {"<": "&lt;", ">": "&gt;", "|": "&#124;"}.get(word, "\\" + word)
        return f"`{word}`" if "_" in word or "::" in word or name != word or word[0] in '"-' else word

    return TOKEN.sub(mark, " ".join(text.split()))


def fence(text, language=""):
    return f"```{language}\n{text.rstrip()}\n```\n"


def call(head, arguments, tail, columns=92):
    """A declaration in one line, or with one argument a line."""
    line = f"{head}({', '.join(arguments)}){tail}"
    if len(line) <= columns or not arguments:
        return line
    return f"{head}(\n    " + ",\n    ".join(arguments) + f"\n){tail}"
