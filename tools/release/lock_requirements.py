#!/usr/bin/env python3
"""Writes python/requirements-NAME.lock: every package of an environment with its exact version and its file's hash.

    .venv/bin/python tools/release/lock_requirements.py
    .deps/engines/vllm/bin/python tools/release/lock_requirements.py vllm

Run it in an environment made from python/requirements-NAME.txt (default NAME: test) by Debian 12's own Python, whose
patch level excludes some versions, after that file changed. The lock is for this interpreter and platform, which the
first line names; ./dev uses it there and the plain requirements elsewhere. torch is left out, because indexes offer
different builds of it under the same version.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "python"
LEFT_OUT = ("torch==", "pip==", "nvfp4-moe==", "nvfp4-moe @")  # the package itself comes from this tree


def tag() -> str:
    """Returns interpreter and platform in the form that ./dev setup compares."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}-{sys.platform}-{platform.machine()}"


def main() -> None:
    lock = PYTHON / f"requirements-{sys.argv[1] if len(sys.argv) > 1 else 'test'}.lock"
    pip = [sys.executable, "-m", "pip"]
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as scratch:
        requirements, report = Path(scratch) / "requirements.txt", Path(scratch) / "report.json"
        requirements.write_text("\n".join(line for line in frozen if not line.startswith(LEFT_OUT)) + "\n")
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--quiet"]
        command = [*pip, "install", *options, "--report", str(report), "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    lines = [f"# {tag()}", "# Made by tools/release/lock_requirements.py."]
    for install in sorted(installs, key=lambda one: one["metadata"]["name"].lower()):
        name, version = install["metadata"]["name"], install["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{install['download_info']['archive_info']['hashes']['sha256']}")
    lock.write_text("\n".join(lines) + "\n")
    print(f"{lock}: {len(installs)} packages")


if __name__ == "__main__":
    main()
