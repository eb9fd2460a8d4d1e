"""The committed layer vectors (read by tests/layer) are what their script makes, where its packages are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "vectors" / "layers.safetensors"


def test_made_again_they_are_the_same():
    for package in ("torch", "modelopt", "safetensors"):
        pytest.importorskip(package)
    import make_layer_vectors
    import torch
    from safetensors import safe_open

    with safe_open(FILE, framework="pt") as file:
        made_with = file.metadata()
        committed = {name: file.get_tensor(name) for name in file.keys()}
    if make_layer_vectors.versions() != made_with:
        pytest.skip(f"made with {made_with}, installed are {make_layer_vectors.versions()}")
    again = make_layer_vectors.make()
    assert set(again) == set(committed)
    for name, tensor in again.items():
        assert torch.equal(tensor, committed[name]), name
