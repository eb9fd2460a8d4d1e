"""Whether an engine's release has what an adapter relies on: a table of requirements against live objects or source files.

A table has groups of entries (kind, "module:Name" or "module:Class.member", names):

    has         attributes of a class: members, fields, what a method sets on self. No names: it exists itself
    calls       the adapter passes these arguments by name: each exists, and no other one is required
    overrides   the adapter stands in for it: the same names in the same order; starred parameters do not count
    passes      the adapter passes on whatever comes: it exists

names leave out self and cls. The group "core" is what everything needs; another one is a format, which an engine keeps to
itself where its group does not fit. Both readers give the same answers: `misfits` asks imported objects by inspect, as an
adapter does when it is loaded; `misfits_in` reads source text by its syntax tree, from a folder or a wheel, so that a
release can be judged that is not installed, or is without being imported. Needs the standard library alone.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ABSENT = "does not exist"

Entry = tuple[str, str, tuple[str, ...]]
Requirements = Mapping[str, Sequence[Entry]]
ReadModule = Callable[[str], "str | None"]


@dataclasses.dataclass
class _Member:
    """Result of a reader: parameters without self and cls, None if it is no function; and whether a class has one."""

    names: list[str] | None
    required: list[str]
    takes_any: bool
    has: Callable[[str], bool]


def _difference(entry: Entry, found: _Member | str) -> str | None:
    """What differs, in a sentence that begins with the member's name, or None. found: a member, or why there is none."""
    kind, name, names = entry
    if isinstance(found, str):
        return f"{name} {found}"
    if kind == "passes":
        return None
    if kind == "has":
        lacks = [attribute for attribute in names if not found.has(attribute)]
        return f"{name} lacks {', '.join(lacks)}" if lacks else None
    if kind not in ("calls", "overrides"):
        raise ValueError(f"requirement: expected has, calls, overrides or passes, got {kind}")
    if found.names is None:
        return f"{name} is no function"
    takes = f"{name} takes ({', '.join(found.names)})"
    if kind == "overrides":
        return None if found.names == list(names) else f"{takes}, expected ({', '.join(names)})"
    unknown = [argument for argument in names if argument not in found.names]
    if unknown and not found.takes_any:
        return f"{takes}, expected {', '.join(unknown)} too"
    more = [argument for argument in found.required if argument not in names]
    return f"{takes} and needs {', '.join(more)}, expected no more than ({', '.join(names)})" if more else None


def _judge(required: Requirements, find: Callable[[str], _Member | str]) -> dict[str, list[str]]:
    found = {
        group: [why for entry in entries if (why := _difference(entry, find(entry[1])))]
        for group, entries in required.items()
    }
    return {group: problems for group, problems in found.items() if problems}


# ---- live objects


def _live_has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    for base in owner.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return True
        for function in vars(base).values():
            if inspect.isfunction(function) and name in inspect.unwrap(function).__code__.co_names:
                return True
    return False


def _live_member(name: str) -> _Member | str:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if module == error.name or module.startswith(f"{error.name}."):
            return _ABSENT
        return f"cannot be imported: {error}"
    except Exception as error:  # whatever a module does when it is imported
        return f"cannot be imported: {type(error).__name__}: {error}"
    for part in path.split("."):
        if not hasattr(found, part):
            return _ABSENT
        found = getattr(found, part)
    try:
        parameters = list(inspect.signature(found).parameters.values()) if callable(found) else None
    except (TypeError, ValueError):
        parameters = None
    if parameters is None:
        return _Member(None, [], False, lambda attribute: _live_has(found, attribute))
    if "." in path and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return _Member(
        [p.name for p in named],
        [p.name for p in named if p.default is p.empty],
        any(p.kind == p.VAR_KEYWORD for p in parameters),
        lambda attribute: _live_has(found, attribute),
    )


def misfits(required: Requirements) -> dict[str, list[str]]:
    """By group, a sentence for each entry that does not hold; {} if everything does. Imports the modules."""
    return _judge(required, _live_member)


# ---- source text


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, and those under its conditions and tries."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [handled for handler in statement.handlers for handled in handler.body]
            yield from _statements(statement.body + handlers + statement.orelse + statement.finalbody)


def _assigned(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        yield statement.target


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, of_class: bool) -> tuple[list[str], list[str], bool]:
    """Names without self and cls, those without a default, and whether any keyword is taken."""
    args = function.args
    plain = args.posonlyargs + args.args
    required = [a.arg for a in plain[: len(plain) - len(args.defaults)]]
    required += [a.arg for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None]
    names = [a.arg for a in plain + args.kwonlyargs]
    if of_class and names and names[0] in ("self", "cls"):
        required = [name for name in required if name != names[0]]
        names = names[1:]
    return names, required, args.kwarg is not None


class _Sources:
    """Modules' syntax trees, and names found in them."""

    def __init__(self, read: ReadModule):
        self._read = read
        self._bodies: dict[str, list[ast.stmt]] = {}

    def body(self, module: str) -> list[ast.stmt]:
        if module not in self._bodies:
            text = self._read(module)
            self._bodies[module] = [] if text is None else list(_statements(ast.parse(text).body))
        return self._bodies[module]

    def find(self, module: str, name: str, depth: int = 6) -> tuple[str, ast.AST] | None:
        """Where a module's name is defined, through `from X import Y`, and its statement."""
        imported = None
        for statement in self.body(module):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if statement.name == name:
                    return module, statement
            elif isinstance(statement, ast.ImportFrom):
                if any((alias.asname or alias.name) == name for alias in statement.names):
                    original = next(a.name for a in statement.names if (a.asname or a.name) == name)
                    imported = (self._absolute(module, statement), original)
            elif any(isinstance(target, ast.Name) and target.id == name for target in _assigned(statement)):
                return module, statement
        return self.find(*imported, depth - 1) if imported and depth > 0 else None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if statement.level == 0:
            return statement.module or ""
        parts = module.split(".")
        is_package = self._read(module + ".__init__") is not None
        kept = parts[: len(parts) - statement.level + is_package]
        return ".".join([*kept, *([statement.module] if statement.module else [])])

    def attribute(self, module: str, owner: ast.AST, name: str, depth: int = 8) -> tuple[str, ast.AST] | None:
        """A class's member, and the module that has it: of its body, set on self by its methods, or a base's."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for statement in _statements(owner.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                return module, statement
            if any(isinstance(target, ast.Name) and target.id == name for target in _assigned(statement)):
                return module, statement
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                return module, node
        for base in owner.bases:
            if depth > 0 and isinstance(base, ast.Name) and (found := self.find(module, base.id)):
                if inherited := self.attribute(*found, name, depth - 1):
                    return inherited
        return None

    def member(self, name: str) -> _Member | str:
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        found = self.find(module, first)
        for part in rest:
            if found is None:
                return _ABSENT
            found = self.attribute(*found, part)
        if found is None:
            return _ABSENT
        where, node = found
        # A class is called with the parameters of its __init__; a dataclass has none to read.
        function, of_class = node, bool(rest)
        if isinstance(node, ast.ClassDef):
            init = self.attribute(where, node, "__init__")
            if init is None:
                return _Member([], [], False, lambda attribute: self.attribute(where, node, attribute) is not None)
            function, of_class = init[1], True
        has = lambda attribute: self.attribute(where, node, attribute) is not None  # noqa: E731
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _Member(None, [], False, has)
        return _Member(*_parameters(function, of_class), has)


def misfits_in(read: ReadModule, required: Requirements) -> dict[str, list[str]]:
    """As misfits, of source text. read gives the text of a module by its dotted name, or None if there is none; a
    package's own is asked for as "package" and as "package.__init__"."""
    return _judge(required, _Sources(read).member)


def folder_reader(root: Path) -> ReadModule:
    """Modules of an unpacked wheel, or of a site-packages folder."""

    def read(module: str) -> str | None:
        path = root.joinpath(*module.split("."))
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    return read


def wheel_reader(wheel: zipfile.ZipFile) -> ReadModule:
    """Modules of a wheel file, which need not be unpacked."""
    names = set(wheel.namelist())

    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        for name in (path + ".py", path + "/__init__.py"):
            if name in names:
                return wheel.read(name).decode("utf-8")
        return None

    return read
