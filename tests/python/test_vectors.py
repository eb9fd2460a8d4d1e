"""Committed vectors and fuzz seeds are what their scripts make, where the makers are installed. They are
read by tests/vectors, tests/layer and tests/fuzz."""

from __future__ import annotations

import filecmp
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("kind", "packages"),
    [
        ("format", ("torch", "torchao", "modelopt", "compressed_tensors", "ml_dtypes")),
        ("layer", ("torch", "modelopt", "safetensors")),
    ],
)
def test_made_again_they_are_the_same(kind, packages):
    for package in packages:
        pytest.importorskip(package)
    import torch
    from safetensors import safe_open

    maker = importlib.import_module(f"make_{kind}_vectors")
    with safe_open(TESTS / f"vectors/{kind}s.safetensors", framework="pt") as file:
        made_with = file.metadata()
        committed = {name: file.get_tensor(name) for name in file.keys()}
    if maker.versions() != made_with:
        pytest.skip(f"made with {made_with}, installed are {maker.versions()}")
    again = maker.make()
    assert set(again) == set(committed)
    assert all(torch.equal(tensor, committed[name]) for name, tensor in again.items())


def test_seeds_of_the_fuzz_targets_are_what_their_script_writes(tmp_path):
    def files(under: Path) -> list[Path]:
        written = [path.relative_to(under) for path in (under / "corpus").rglob("*") if path.is_file()]
        return sorted([*written, Path("json.dict")])

    committed = TESTS / "fuzz"
    subprocess.run([sys.executable, committed / "make_fuzz_corpus.py", tmp_path], check=True, timeout=60)
    assert files(tmp_path) == files(committed)
    _, differing, missing = filecmp.cmpfiles(tmp_path, committed, files(committed), shallow=False)
    assert not differing + missing
