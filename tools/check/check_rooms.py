#!/usr/bin/env python3
"""Checks that no rooms include each other in a circle, and that no file is longer than 400 lines without a reason.

A reason is a line of the head comment that begins "Long because".
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_LINES = 400
HEAD_LINES = 40
SOURCES = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inc", ".py", ".sh", ".cmake")
INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def tracked(*tops):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *tops], cwd=ROOT, capture_output=True, text=True
    )
    return [name for name in listed.stdout.splitlines() if name.endswith(SOURCES) and (ROOT / name).is_file()]


def room_of(path):
    """Returns a path's room: src/backend/cpu for src/backend/cpu/kernels/x.cpp, include for include/nvfp4_moe/x.h."""
    parts = path.split("/")[:-1]
    if parts[0] in ("src", "cli", "python"):
        return "/".join(parts[: 3 if parts[:2] == ["src", "backend"] else 2])
    return parts[0]


def home_of(name, path, rooted):
    """Resolves `#include "name"` in `path` to a tracked file; None for external headers."""
    for base in (pathlib.PurePosixPath(path).parent.as_posix(), "src", "include", "."):
        candidate = f"{base}/{name}" if base != "." else name
        if candidate in rooted:
            return candidate
    return None


def included_rooms():
    """Returns room -> {room that it includes: one of the including lines}."""
    files = tracked("src", "include", "cli", "python")
    rooted = set(files)
    rooms = collections.defaultdict(dict)
    for path in files:
        for name in INCLUDE.findall((ROOT / path).read_text()):
            home = home_of(name, path, rooted)
            if home and room_of(home) != room_of(path):
                rooms[room_of(path)].setdefault(room_of(home), f"{path} includes {name}")
    return rooms


def circles(rooms):
    """Yields pairs of rooms that include each other, with the shortest path from one to the other and back."""

    def way(start, end):
        ways, queue = {start: [start]}, collections.deque([start])
        while queue:
            at = queue.popleft()
            for other in sorted(rooms.get(at, {})):
                if other == end:
                    return [*ways[at], end]
                if other not in ways:
                    ways[other] = [*ways[at], other]
                    queue.append(other)
        return None

    for first in sorted(rooms):
        for second in sorted(rooms):
            if first < second and (there := way(first, second)) and (back := way(second, first)):
                steps = there + back[1:]
                yield (first, second), [rooms[a][b] for a, b in zip(steps, steps[1:], strict=False)]


def long_files():
    for path in tracked():
        text = (ROOT / path).read_text()
        lines = text.count("\n")
        head = "\n".join(text.splitlines()[:HEAD_LINES])
        if lines > MOST_LINES and not re.search(r"^\W*Long because ", head, re.MULTILINE):
            yield path, lines


def main():
    bad = []
    for pair, includes in circles(included_rooms()):
        bad.append(f"{pair[0]} and {pair[1]} include each other:\n  " + "\n  ".join(includes))
    for path, lines in sorted(long_files()):
        bad.append(f"{path}: {lines} lines; split it by noun, or say in its head: Long because ...")
    print("\n".join(bad), end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
