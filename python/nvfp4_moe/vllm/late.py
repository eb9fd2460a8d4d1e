"""Runs callbacks right after vLLM imports a module, so that the plugin need not import vLLM's modules itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules through the other finders and adds the calls to the loader. In sys.meta_path while calls wait."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Callable[[], None]]] = {}
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.calls or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        stock = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stock(module)
            for call in self.calls.pop(name, []):
                call()
            if not self.calls and self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def after_import(name: str, call: Callable[[], None]) -> None:
    """Runs call now if the module is already imported, else right after its import. Repeating it has no effect."""
    if name in sys.modules:
        call()
        return
    waiting = _finder.calls.setdefault(name, [])
    if call not in waiting:
        waiting.append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
