"""The Python package as its sources and the compiled module's stub declare it, read without importing anything."""

import ast
import importlib.util
import pathlib
import sys

PYTHON = pathlib.Path(__file__).resolve().parents[2] / "python"
CORE = "nvfp4_moe._core"


def load_signatures():
    """The package's reader of sources, without the package and its compiled part."""
    spec = importlib.util.spec_from_file_location("_signatures", PYTHON / "nvfp4_moe/_signatures.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Api:
    """Looks names up. A result is (module, syntax tree of the definition), the tree None for a module, or None."""

    def __init__(self, stub):
        signatures = load_signatures()
        read_source = signatures.folder_reader(PYTHON)
        self.read = lambda module: stub.read_text() if module == CORE else read_source(module)
        self._sources = signatures._Sources(self.read)

    def module(self, name):
        return (name, None) if self.read(name) is not None else None

    def named(self, module, name):
        """A module's name: a definition, through imports, or a module below it."""
        return self._sources.find(module, name) or self.module(f"{module}.{name}")

    def text(self, name):
        """A module's documentation."""
        return ast.get_docstring(ast.parse(self.read(name))) or ""

    def public(self, module):
        """The names in a module's __all__."""
        return ast.literal_eval(self._sources.find(module, "__all__")[1].value)

    def members(self, module, owner):
        """{name: (module, definition)} of a class and its bases, and whether a base is outside the package."""
        found, is_open = {}, False
        for base in reversed(owner.bases):
            where, _, name = ast.unparse(base).rpartition(".")
            definition = self._sources.find(CORE if where == "_core" else module, name)
            if definition is None or not isinstance(definition[1], ast.ClassDef):
                is_open = True
                continue
            more, more_open = self.members(*definition)
            found, is_open = found | more, is_open or more_open
        for statement in owner.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                found[statement.name] = (module, statement)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                for target in getattr(statement, "targets", None) or [statement.target]:
                    found[ast.unparse(target)] = (module, statement)
        return found, is_open


def is_dataclass(owner):
    return any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list)


def parameters(api, module, node):
    """Names of the parameters of a function or of a class's constructor; None if it takes any name."""
    if isinstance(node, ast.ClassDef):
        members, is_open = api.members(module, node)
        if is_dataclass(node):
            return [name for name, (_, one) in members.items() if isinstance(one, ast.AnnAssign)]
        if is_open or "__init__" not in members:
            return None
        node = members["__init__"][1]
    arguments = node.args
    if arguments.kwarg is not None:
        return None
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
