"""The lock files of the test environments have each required package at its version, and a hash for every package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"
LOCKS = sorted(path.name for path in PYTHON.glob("requirements-*.lock"))


def test_there_are_locks() -> None:
    assert {"requirements-test.lock", "requirements-vllm.lock", "requirements-sglang.lock"} <= set(LOCKS)


def pins(text: str) -> dict[str, str]:
    """Version by normalized name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^\s#]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_what_is_asked_for(lock: str) -> None:
    asked = pins((PYTHON / lock).with_suffix(".txt").read_text())
    locked = pins((PYTHON / lock).read_text())
    if lock != "requirements-docs.lock":  # the site needs no torch
        assert len(asked) > 10 and asked.pop("torch")
    assert asked and "torch" not in locked
    assert {name: locked.get(name) for name in asked} == asked


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_the_lock_has_a_hash(lock: str) -> None:
    first, *lines = (PYTHON / lock).read_text().splitlines()
    assert re.fullmatch(r"# cp3\d+-linux-\w+", first)
    wrong = [line for line in lines if not re.fullmatch(r"#.*|\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)]
    assert wrong == []
