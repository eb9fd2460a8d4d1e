#!/usr/bin/env python3
"""Writes records of benchmarks as JSON with one row per line, so that a diff shows what changed.

    python3 bench/records.py FILE...      rewrites files that another program wrote

bench/results holds one current record per published claim, named what-device-commit.json. Older ones are in the
history: `git log --all --oneline -- bench/results/NAME`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LINE = 120


def _holds_rows(value: Any) -> bool:
    """Returns whether it needs several lines: a list of lists or objects, or an object that has one or only objects."""
    if isinstance(value, list):
        return any(isinstance(item, list | dict) and item for item in value)
    if isinstance(value, dict):
        return any(map(_holds_rows, value.values())) or all(isinstance(item, dict) for item in value.values())
    return False


def text(value: Any, indent: int = 0) -> str:
    """Formats the value as JSON. An object or list goes on one line if it is short or is one row."""
    shown = json.dumps(value, ensure_ascii=False)
    if indent and (len(shown) <= LINE or not _holds_rows(value)):
        return shown
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {text(item, indent + 1)}" for key, item in value.items()]
    else:
        lines = [pad + text(item, indent + 1) for item in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n" + ",\n".join(lines) + "\n" + " " * indent + last + ("" if indent else "\n")


def main() -> None:
    for name in sys.argv[1:]:
        Path(name).write_text(text(json.loads(Path(name).read_text())))


if __name__ == "__main__":
    main()
