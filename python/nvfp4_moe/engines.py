"""Shows this build, the installed inference engines, and whether the adapters support their releases.

    python -m nvfp4_moe.engines [--json]

Engines are not imported, because that takes seconds and may open a GPU. Versions come from package metadata, and each
adapter's table of requirements is compared with the engine's source files.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from . import InvalidArgument, __version__, _core
from ._build import missing_cuda
from ._settings import read_settings
from ._signatures import Requirements, folder_reader, misfits_in

__all__ = ["Engine", "main", "missing", "report", "summary"]


def __dir__() -> list[str]:
    return __all__


# Each adapter's table of requirements. Loaded by path, because importing an adapter's package may import its engine.
_TABLES = {
    "transformers": "transformers/requirements.py",
    "vllm": "vllm/internals.py",
    "sglang": "sglang/required.py",
}
_ENGINES = ("torch", "transformers", "vllm", "sglang")


@dataclasses.dataclass(frozen=True)
class Engine:
    """One row of the report.

    Attributes:
        version: The installed version, or None.
        fits: True if the adapter supports this release. None if the engine is not installed or has no adapter.
        misfits: For each group of the adapter's table, one sentence per member that differs.
        note: A one-sentence summary.
    """

    name: str
    version: str | None
    fits: bool | None
    misfits: dict[str, list[str]]
    note: str


def _source_folder(name: str) -> Path | None:
    """Returns the folder that contains a package, without importing the package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]).parent if locations else None


def _version(name: str) -> str | None:
    # A CPU build of vLLM is another distribution of the same package.
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _requirements(name: str) -> Requirements | None:
    """Returns an adapter's table of requirements, or None if this build has no such adapter."""
    path = Path(__file__).parent / _TABLES[name]
    spec = importlib.util.spec_from_file_location(f"_nvfp4_moe_{name}_requirements", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    required: Requirements = module.REQUIRED
    return required


def _adapter(name: str, version: str) -> Engine:
    required = _requirements(name)
    if required is None:
        return Engine(name, version, None, {}, "this build of nvfp4_moe has no adapter for it")
    folder = _source_folder(name)
    if folder is None:
        return Engine(name, version, None, {}, "its source files are not where Python would import them from")
    try:
        problems = misfits_in(folder_reader(folder), required)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return Engine(name, version, None, {}, f"its source files cannot be read: {error}")
    if not problems:
        return Engine(name, version, True, {}, "the adapter fits")
    if "core" in problems:
        return Engine(name, version, False, problems, f"the adapter does not fit: {problems['core'][0]}")
    first = next(iter(problems.values()))[0]
    return Engine(name, version, True, problems, f"the adapter fits, but for {', '.join(problems)}: {first}")


def report() -> list[Engine]:
    """Reports on all known engines in a fixed order, installed or not. Reads files only."""
    rows = []
    for name in _ENGINES:
        version = _version(name)
        if version is None:
            rows.append(Engine(name, None, None, {}, "not installed"))
        elif name in _TABLES:
            rows.append(_adapter(name, version))
        else:
            rows.append(Engine(name, version, None, {}, "operators by import nvfp4_moe.torch_op"))
    return rows


def summary(rows: list[Engine]) -> str:
    """Returns one line: the engines that are installed and whether they fit, then those that are not."""
    engines = [row for row in rows if row.name != "torch"]  # torch is what engines use
    found = []
    for row in engines:
        if row.version is not None:
            fits = {True: "fits in part" if row.misfits else "fits", False: "does not fit", None: f"({row.note})"}
            found.append(f"{row.name} {row.version} {fits[row.fits]}")
    absent = ", ".join(row.name for row in engines if row.version is None)
    return "; ".join(filter(None, (", ".join(found), absent and f"no {absent}")))


def missing(rows: list[Engine]) -> list[str]:
    """Returns one sentence for each engine that the adapter does not fit.

    One more if adapters are switched off, or if settings in environment variables are wrong, which ends the engine.
    """
    found = [
        f"a release of {row.name} that fits (docs/reference/engines-compatibility.md): {row.note}"
        for row in rows
        if row.fits is False
    ]
    if wrong := wrong_settings():
        found.append(f"settings that the adapters of engines take: {wrong}")
    elif os.environ.get("NVFP4_MOE_MODE") == "0":
        found.append("the adapters of engines: NVFP4_MOE_MODE=0 switches them off")
    return found


def wrong_settings() -> str | None:
    """Returns why the adapters refuse the settings in environment variables, or None if they take them."""
    try:
        read_settings()
    except InvalidArgument as error:
        return str(error)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Prints the report and returns 0, or 2 if an environment variable is wrong.

    With --json it is {"nvfp4_moe": {"version", "built_with_cuda", "note"}, "python", "mode", "summary", "missing",
    "engines"}.
    """
    parser = argparse.ArgumentParser(prog="python -m nvfp4_moe.engines", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    rows = report()
    mode, wrong = os.environ.get("NVFP4_MOE_MODE", "auto"), wrong_settings()
    if asked.json:
        engines = [dataclasses.asdict(row) for row in rows]
        build = {"version": __version__, "built_with_cuda": _core.built_with_cuda, "note": missing_cuda()}
        head = {"nvfp4_moe": build, "python": sys.executable, "mode": mode}
        print(json.dumps({**head, "summary": summary(rows), "missing": missing(rows), "engines": engines}, indent=1))
        return 0
    note = missing_cuda() or ("with CUDA" if _core.built_with_cuda else "for CPUs only")
    print(f"{'nvfp4_moe':<13} {__version__:<16} {note}")
    for row in rows:
        print(f"{row.name:<13} {row.version or '--':<16} {row.note}")
    if wrong:
        print(f"engines end with: {wrong}")
        return 2
    if mode != "auto":
        print(
            f"NVFP4_MOE_MODE={mode} is set: {'adapters are off' if mode == '0' else 'a layer that is not taken is an error'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
