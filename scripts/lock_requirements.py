#!/usr/bin/env python3
"""Writes python/requirements-test.lock: every package of an environment by exact version and by the hash of its file.

    .venv/bin/python scripts/lock_requirements.py

Run in an environment that `pip install -r python/requirements-test.txt` made, after that file changed. The files are
those of this interpreter and platform, which the first line names; ./dev setup uses the lock there and the plain
requirements elsewhere. torch is left out: which of its builds an index offers under one version differs.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "python/requirements-test.lock"


def tag() -> str:
    """Interpreter and platform, as ./dev setup asks for it."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}-{sys.platform}-{platform.machine()}"


def main() -> None:
    pip = [sys.executable, "-m", "pip"]
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        requirements, report = Path(scratch) / "requirements.txt", Path(scratch) / "report.json"
        requirements.write_text("\n".join(line for line in frozen if not line.startswith(("torch==", "pip=="))) + "\n")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command = [*pip, "install", *options, "--report", str(report), "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    lines = [f"# {tag()}", "# Made by scripts/lock_requirements.py."]
    for install in sorted(installs, key=lambda one: one["metadata"]["name"].lower()):
        name, version = install["metadata"]["name"], install["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{install['download_info']['archive_info']['hashes']['sha256']}")
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{LOCK}: {len(installs)} packages")


if __name__ == "__main__":
    main()
