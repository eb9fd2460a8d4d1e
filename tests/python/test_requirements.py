"""The lock files of the test environments have each required package at its version, and a hash for every package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"


def pins(text: str) -> dict[str, str]:
    """Version by normalized name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^\s#]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("environment", ["test", "vllm", "sglang", "docs", "release"])
def test_the_lock_has_each_package_and_its_hash(environment: str) -> None:
    lock = (PYTHON / f"requirements-{environment}.lock").read_text()
    asked = pins((PYTHON / f"requirements-{environment}.txt").read_text())
    asked.pop("torch", None)  # installed before, from its own index
    assert asked and asked.items() <= pins(lock).items() and "torch" not in pins(lock)
    first, *lines = lock.splitlines()
    assert re.fullmatch(r"# cp3\d+-linux-\w+", first)
    assert [line for line in lines if not re.fullmatch(r"#.*|\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []
