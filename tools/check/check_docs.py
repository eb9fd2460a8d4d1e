#!/usr/bin/env python3
"""Checks of the docs that a machine can make:

- Links and their anchors resolve.
- Environment variables are documented, and there are seven at most.
- Tests that docs/contribute/features.md names exist.
- Examples hold: Python blocks compile, and every ./dev verb exists. With --built FOLDER, a build folder with the tool
  and the Python module, names and arguments of nvfp4_moe exist too, and so do the verbs and options of nvfp4-moe.

usage: check_docs.py [--built FOLDER]
"""

import argparse
import ast
import pathlib
import re
import subprocess
import sys
import textwrap

from python_api import Api, parameters

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools/docs"))
from cli_reference import help_of, options_of  # noqa: E402

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# Records of the past. Their commands may no longer exist.
HISTORY = ("CHANGELOG.md", "bench/notes/")


def anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", title).strip().lower()).replace(" ", "-") for title in titles}


def broken_links(page, root=ROOT):
    for _, link, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target = page.parent / link if link else page
        if not target.exists():
            yield f"link to {link}, which does not exist"
        elif anchor and target.suffix == ".md" and anchor[1:] not in anchors(target.read_text()):
            yield f"link to {link}{anchor}, which has no such heading"
        elif anchor and target.resolve() == root / "README.md" and page.is_relative_to(root / "docs"):
            yield f"link to {link}{anchor}: in the site, the front page takes this file's place and lacks the heading"


class PythonBlocks(ast.NodeVisitor):
    """Follows the names of nvfp4_moe through one page's Python blocks, and collects problems."""

    def __init__(self, api):
        self._api, self._names, self.problems = api, {"nvfp4_moe": ("nvfp4_moe", None)}, []

    def _report(self, problem):
        if problem not in self.problems:
            self.problems.append(problem)

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.split(".")[0] == "nvfp4_moe":
                found = self._api.module(alias.name)
                if found is None:
                    self._report(f"no module {alias.name}")
                elif alias.asname:
                    self._names[alias.asname] = found

    def visit_ImportFrom(self, node):
        if (node.module or "").split(".")[0] == "nvfp4_moe":
            for alias in node.names:
                found = self._api.named(node.module, alias.name)
                self._names[alias.asname or alias.name] = found
                if found is None:
                    self._report(f"no {node.module}.{alias.name}")

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._names[target.id] = self._look(node.value)

    def visit_Attribute(self, node):
        self._look(node)
        self.generic_visit(node)

    def visit_Call(self, node):
        self._look(node)
        self.generic_visit(node)

    def _look(self, node):
        """(module, definition) of an expression, or of its class if it is an object; None if not known."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._look(node.value)):
            return self._attribute(*owner, node)
        if isinstance(node, ast.Call) and (called := self._look(node.func)):
            return self._called(*called, node)
        return None

    def _attribute(self, module, owner, node):
        if owner is None:
            found, is_open = self._api.named(module, node.attr), False
        elif isinstance(owner, ast.ClassDef):
            members, is_open = self._api.members(module, owner)
            found = members.get(node.attr)
        else:
            return None
        if found is None and not is_open:
            self._report(f"no {ast.unparse(node)}")
        return found

    def _called(self, module, called, node):
        if not isinstance(called, (ast.FunctionDef, ast.ClassDef)):
            return None
        known = parameters(self._api, module, called)
        for keyword in node.keywords:
            if known is not None and keyword.arg is not None and keyword.arg not in known:
                self._report(f"{ast.unparse(node.func)} has no argument {keyword.arg}")
        if isinstance(called, ast.ClassDef):
            return module, called
        found = self._api.named(module, ast.unparse(called.returns)) if called.returns else None
        return found if found and isinstance(found[1], ast.ClassDef) else None


def wrong_python(blocks, api=None):
    """Finds problems in a page's Python blocks. api: the members of nvfp4_moe, if known."""
    visitor = PythonBlocks(api)
    for block in blocks:
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            yield f"Python block: {error.msg}: {(error.text or '').strip()}"
            continue
        if api is not None:
            visitor.visit(tree)
    yield from visitor.problems


def commands_in(page):
    """Commands of ./dev and nvfp4-moe in a page's shell blocks and in `code` in its text.

    Yields (whether it is surely a command, its words): a line of a block without a language may be output."""
    text = FENCE.sub("", page)
    lines = [(True, code) for code in re.findall(r"`((?:\./dev|nvfp4-moe) [^`]+)`", text)]
    for _, language, block in FENCE.findall(page):
        if language in ("", "sh", "bash", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                lines.append((language in ("sh", "bash") or line.lstrip().startswith("$ "), line))
    for is_sure, line in lines:
        for command in re.split(r"[|;&<>]|\s#", line):
            words = [word.strip("\"'") for word in command.replace("\\", "").split()]
            for place, word in enumerate(words[:-1]):
                if word == "./dev" or word.rsplit("/", 1)[-1] == "nvfp4-moe":
                    yield is_sure, [word, *words[place + 1 :]]
                    break


def wrong_commands(page, dev_verbs, tool=None):
    """tool: {verb: its options}, if they are known. A verb that is not one lower-case word is a placeholder."""
    for is_sure, (program, verb, *words) in commands_in(page):
        known = dev_verbs if program == "./dev" else tool
        if known is None or not re.fullmatch(r"[a-z]+", verb):
            continue
        if verb not in known:
            if is_sure:
                yield f"no verb {'./dev' if program == './dev' else 'nvfp4-moe'} {verb}"
        elif known is tool:
            for option in re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", " ".join(words)):
                if option not in tool[verb]:
                    yield f"nvfp4-moe {verb} has no option {option}"


TEST = re.compile(r"^(?:ATTACK_)?TEST(_F|_P)?\(\s*(?:k\w+,\s*)?(\w+),\s*(\w+)\)", re.MULTILINE)
# Text that shows that a suite runs for every backend of the registry: a list from the registry, or, if a backend has
# more than its table, the names of all backends.
OVER_BACKENDS = re.compile(
    r"INSTANTIATE_TEST_SUITE_P\(\s*\w+,\s*(\w+),\s*[\w:]*ValuesIn\((?:test::)?(?:step|judged|device)_backends\(\)"
)
NAMES = re.compile(r"constexpr std::array kNames = \{([^}]*)\}")
# Suites for a single backend, or without a backend.
ANY_GPU = ("CApiOnGpu",)


def tests_in(sources):
    """Reads C++ files. Returns {"Suite.Name": kind of macro} and the suites that run for every backend."""
    tests, over_backends = {}, set()
    rooms = {path.name for path in (ROOT / "src/backend").glob("sm*") if path.name != "sm80"} | {"cuda"}
    for text in sources:
        tests.update({f"{suite}.{name}": kind for kind, suite, name in TEST.findall(text)})
        over_backends |= set(OVER_BACKENDS.findall(text))
        for names in NAMES.findall(text):
            if rooms <= set(re.findall(r'"(\w+)"', names)):
                over_backends |= {suite for _, suite, _ in TEST.findall(text)}
    return tests, over_backends


def wrong_tests(page, tests, over_backends, choices):
    """Yields names in a page's tables that are not tests or cases, and tests in column 2 that skip a backend."""
    for row in (line for line in page.splitlines() if line.startswith("| ") and "`" in line):
        for column, cell in enumerate(row.strip("|").split("|")):
            for name in re.findall(r"`([A-Z]\w*\.\w+)`", cell):
                if name not in tests:
                    yield f"no test {name}"
                elif column == 1 and name.split(".")[0] not in (*over_backends, *ANY_GPU):
                    yield f"{name} does not run for every backend"
            for name in re.findall(r"`(w4a\w+)`", cell):
                if f'"{name}"' not in choices:
                    yield f"no named choice {name}"


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--built", type=pathlib.Path)
    built = parser.parse_args().built
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in tracked.stdout.split() if (ROOT / name).exists()]
    dev_verbs = re.findall(r"^verb_([a-z]+)\(\)", (ROOT / "dev").read_text(), re.MULTILINE)
    api = built and Api(built / "python/nvfp4_moe/_core.pyi")
    tool = built and {verb: options_of(text) for verb, text in help_of(str(built / "cli/nvfp4-moe")).items()}
    bad = []
    for file in files:
        name = str(file.relative_to(ROOT))
        if file.suffix != ".md":
            continue
        problems = [*broken_links(file)]
        if not name.startswith(HISTORY):
            text = file.read_text()
            blocks = [textwrap.dedent(block) for _, language, block in FENCE.findall(text) if language == "python"]
            problems += [*wrong_python(blocks, api), *wrong_commands(text, dev_verbs, tool)]
        bad += [f"{name}: {problem}" for problem in dict.fromkeys(problems)]

    sources = [file for file in files if file.relative_to(ROOT).parts[0] == "src"]
    names = {name for file in sources for name in re.findall(r'"(NVFP4_MOE_[A-Z_]+)"', file.read_text())}
    documented = (ROOT / "docs/reference/environment.md").read_text()
    bad += [
        f"docs/reference/environment.md: {name} is read but not documented"
        for name in sorted(names)
        if name not in documented
    ]
    if len(names) > 7:
        bad.append(f"{len(names)} environment variables are read, seven at most: {sorted(names)}")

    texts = [file.read_text() for file in files if file.match("tests/*/*.cpp")]
    features, choices = ROOT / "docs/contribute/features.md", ROOT / "tests/cases/case_table.cpp"
    bad += [
        f"docs/contribute/features.md: {what}"
        for what in wrong_tests(features.read_text(), *tests_in(texts), choices.read_text())
    ]
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
