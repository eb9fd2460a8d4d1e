"""Checks whether an engine's release has the members that an adapter relies on.

An adapter's table of requirements has groups of entries (kind, "module:Name" or "module:Class.member", names):

    has         a class has these attributes: members, fields, or attributes set on self; without names, it exists
    calls       the adapter passes these arguments by name: each exists, and no other argument is required
    overrides   the adapter overrides it: the same names in the same order; starred parameters do not count
    passes      the adapter passes all arguments on: it exists

names leave out self and cls. Everything needs the group "core". Every other group is a format; if it does not fit, the
engine keeps that format.

Two readers give the same answers. `misfits` inspects imported objects, as an adapter does when it is loaded.
`misfits_in` parses source text from a folder or a wheel, so it can judge a release that is not installed or not
imported. This file needs only the standard library.
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
    """A member that a reader found.

    It has the parameters without self and cls (None if it is not a function) and a test for attributes.
    """

    names: list[str] | None
    required: list[str]
    takes_any: bool
    has: Callable[[str], bool]


def _difference(entry: Entry, found: _Member | str) -> str | None:
    """Describes the difference in a sentence that begins with the member's name, or returns None.

    found is the member, or the reason for its absence.
    """
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
    except Exception as error:  # importing a module can raise anything
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
    """Returns, by group, a sentence for each entry that does not hold; {} if all hold. Imports the modules."""
    return _judge(required, _live_member)


# ---- source text


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields a body's statements, including those inside if and try."""
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
    """Returns the names without self and cls, the names without a default, and whether it takes **kwargs."""
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
    """Syntax trees of modules, and a search for names in them."""

    def __init__(self, read: ReadModule):
        self._read = read
        self._bodies: dict[str, list[ast.stmt]] = {}

    def body(self, module: str) -> list[ast.stmt]:
        if module not in self._bodies:
            text = self._read(module)
            self._bodies[module] = [] if text is None else list(_statements(ast.parse(text).body))
        return self._bodies[module]

    def find(self, module: str, name: str, depth: int = 6) -> tuple[str, ast.AST] | None:
        """Returns the module and statement that define a name, following `from X import Y`."""
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
        """Returns a class's member and its module: from the class body, set on self by a method, or from a base."""
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
        # A class takes the parameters of its __init__. A dataclass has no __init__ in its source.
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
    """Like misfits(), from source text.

    read returns the text of a module by its dotted name, or None. It is called with "package" and "package.__init__"
    for a package's own module.
    """
    return _judge(required, _Sources(read).member)


def folder_reader(root: Path) -> ReadModule:
    """Reads modules from an unpacked wheel or a site-packages folder."""

    def read(module: str) -> str | None:
        path = root.joinpath(*module.split("."))
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return None

    return read


def wheel_reader(wheel: zipfile.ZipFile) -> ReadModule:
    """Reads modules from a wheel file without unpacking it."""
    names = set(wheel.namelist())

    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        for name in (path + ".py", path + "/__init__.py"):
            if name in names:
                return wheel.read(name).decode("utf-8")
        return None

    return read
