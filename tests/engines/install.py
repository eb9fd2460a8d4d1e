#!/usr/bin/env python3
"""Installs the package of a build tree into the Python that runs this, with the files that pip leaves, without a wheel.

    install.py BUILD/python

Engines find adapters by entry points, so the environment gets the distribution's metadata and entry points from
pyproject.toml, and a path file that leads to the build tree. tests/python/test_wheel.py tests the wheel itself.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def entry_points() -> str:
    """pyproject.toml's entry points in the form of entry_points.txt. Python 3.10 has no tomllib."""
    lines, inside = [], False
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("["):
            group = re.fullmatch(r'\[project\.entry-points\."?([\w.]+)"?\]', line)
            inside = group is not None
            if group:
                lines.append(f"[{group[1]}]")
        elif inside and (entry := re.fullmatch(r'(\w+) = "([\w.:]+)"', line)):
            lines.append(f"{entry[1]} = {entry[2]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    (version,) = re.findall(r"project\(nvfp4_moe VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    (site / "nvfp4_moe_build.pth").write_text(f"{Path(sys.argv[1]).resolve()}\n")
    metadata = site / "nvfp4_moe_build.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvfp4-moe\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points())


if __name__ == "__main__":
    main()
