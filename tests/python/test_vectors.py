"""Committed vectors equal their scripts' output if the makers are installed. tests/vectors, tests/layer read them."""

from __future__ import annotations

import importlib
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
