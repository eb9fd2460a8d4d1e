"""Whether an engine's release has what an adapter relies on: a table of requirements against live objects or source files.

A table maps "module:Name" or "module:Class.member" to how the adapter uses it:

    ("has",)                        it exists: a class, a function, a field, an attribute that a method sets on self
    ("calls", "self", "a", "b")     the adapter calls it with these parameters; every other one must have a default
    ("overrides", "self", "a")      the adapter stands in for it, so that the engine passes exactly these, in this order

Both readers give the same answers: `missing_live` asks imported objects by inspect, as an adapter does when it is loaded;
`missing_in` reads source text by its syntax tree, from a folder or a wheel, so that a release can be judged that is not
installed, or is without being imported. A class method is written without cls. Needs the standard library alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Requirements = Mapping[str, tuple[str, ...]]
ReadModule = Callable[[str], "str | None"]


class Parameter(NamedTuple):
    """name has its stars. optional: a default, or starred."""

    name: str
    optional: bool


# ---- one requirement against one signature


def _difference(use: tuple[str, ...], parameters: list[Parameter] | None) -> str | None:
    """What differs, as a sentence's end, or None. parameters None: not a function, of which only ("has",) is legal."""
    kind, wanted = use[0], list(use[1:])
    if kind == "has":
        return None
    if parameters is None:
        return "is no function"
    names = [parameter.name for parameter in parameters]
    shown = f"takes ({', '.join(names)})"
    if kind == "overrides":
        return None if names == wanted else f"{shown}, expected ({', '.join(wanted)})"
    if kind != "calls":
        raise ValueError(f"requirement: expected has, calls or overrides, got {kind}")
    takes_any = any(name.startswith("**") for name in names)
    absent = [name for name in wanted if name not in names and not takes_any]
    if absent:
        return f"{shown}, expected a parameter {absent[0]}"
    needed = [parameter.name for parameter in parameters if not parameter.optional and parameter.name not in wanted]
    return f"{shown}, where {needed[0]} has no default" if needed else None


# ---- live objects


def _live_parameters(found: Any) -> list[Parameter] | None:
    if not callable(found) or isinstance(found, type):
        return None
    try:
        signature = inspect.signature(found, follow_wrapped=True)
    except (TypeError, ValueError):
        return None
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        Parameter(stars.get(p.kind, "") + p.name, p.kind in stars or p.default is not p.empty)
        for p in signature.parameters.values()
    ]


def _live_member(owner: Any, name: str) -> tuple[bool, Any]:
    """(whether it is there, what it is): an attribute, a field that has an annotation alone, or what a method sets."""
    if hasattr(owner, name):
        return True, getattr(owner, name)
    if isinstance(owner, type):
        for base in owner.__mro__:
            if name in getattr(base, "__annotations__", {}):
                return True, None
        for base in owner.__mro__:
            for function in vars(base).values():
                if inspect.isfunction(function) and name in inspect.unwrap(function).__code__.co_names:
                    return True, None
    return False, None


def missing_live(required: Requirements) -> list[str]:
    """One sentence a requirement that does not hold, naming the member and what differs. Imports the modules."""
    problems = []
    for member, use in required.items():
        module, _, path = member.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            problems.append(f"{member}: {module} cannot be imported ({error})")
            continue
        there = True
        for name in path.split("."):
            there, found = _live_member(found, name)
            if not there:
                problems.append(f"{member} does not exist")
                break
        if there and (difference := _difference(use, _live_parameters(found))):
            problems.append(f"{member} {difference}")
    return problems


# ---- source text


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A body's statements, and those under its conditions and tries."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [line for handler in statement.handlers for line in handler.body]
            yield from _statements(statement.body + handlers + statement.orelse + statement.finalbody)


def _assigned(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        yield statement.target


def _text_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Parameter]:
    args = function.args
    plain = args.posonlyargs + args.args
    defaults = len(plain) - len(args.defaults)
    out = [Parameter(a.arg, index >= defaults) for index, a in enumerate(plain)]
    if any(ast.unparse(decorator) == "classmethod" for decorator in function.decorator_list):
        out = out[1:]
    if args.vararg:
        out.append(Parameter("*" + args.vararg.arg, True))
    out += [Parameter(a.arg, value is not None) for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        out.append(Parameter("**" + args.kwarg.arg, True))
    return out


class _Sources:
    """Modules' syntax trees, and names found in them."""

    def __init__(self, read: ReadModule):
        self._read = read
        self._bodies: dict[str, list[ast.stmt] | None] = {}

    def body(self, module: str) -> list[ast.stmt] | None:
        if module not in self._bodies:
            text = self._read(module)
            self._bodies[module] = None if text is None else list(_statements(ast.parse(text).body))
        return self._bodies[module]

    def find(self, module: str, name: str, depth: int = 4) -> tuple[str, ast.AST] | None:
        """Where a module's name is defined, through `from X import Y`, and its statement."""
        imported = None
        for statement in self.body(module) or []:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if statement.name == name:
                    return module, statement
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and statement.module:
                        imported = (self._absolute(module, statement), alias.name)
            elif any(isinstance(target, ast.Name) and target.id == name for target in _assigned(statement)):
                return module, statement
        if imported and depth > 0:
            return self.find(*imported, depth - 1)
        return None

    @staticmethod
    def _absolute(module: str, statement: ast.ImportFrom) -> str:
        if statement.level == 0:
            return statement.module or ""
        return ".".join([*module.split(".")[: -statement.level], statement.module or ""])

    def member(self, module: str, owner: ast.AST, name: str, depth: int = 8) -> ast.AST | None:
        """A class's member: what its body defines, what its methods set on self, or a base's."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for statement in _statements(owner.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                return statement
            if any(isinstance(target, ast.Name) and target.id == name for target in _assigned(statement)):
                return statement
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                return node
        for base in owner.bases:
            if depth > 0 and isinstance(base, ast.Name) and (found := self.find(module, base.id)):
                if (inherited := self.member(*found, name, depth - 1)) is not None:
                    return inherited
        return None


def missing_in(read: ReadModule, required: Requirements) -> list[str]:
    """As missing_live, of source text: read gives a module's, or None where there is no such module."""
    sources = _Sources(read)
    problems = []
    for member, use in required.items():
        module, _, path = member.partition(":")
        if sources.body(module) is None:
            problems.append(f"{member}: there is no module {module}")
            continue
        first, *rest = path.split(".")
        found = sources.find(module, first)
        node = found[1] if found else None
        for name in rest:
            node = sources.member(found[0], node, name) if found and node is not None else None
        if node is None:
            problems.append(f"{member} does not exist")
            continue
        function = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
        if difference := _difference(use, _text_parameters(function) if function else None):
            problems.append(f"{member} {difference}")
    return problems


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
