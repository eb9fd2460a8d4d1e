"""Shared by tests of model families: compares a checkpoint of one block with transformers' own block in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moe_reference as oracle
import numpy as np
import nvfp4_moe as nv
import torch
from safetensors.torch import save_file

W4A16: dict[str, Any] = dict(activation_format="bf16", row_format="fp32")
# Roundings of hidden and of h to bf16: each moves its vector by at most 2^-9. The first moves g and u by as much on
# average, and h by less than 1.1 times twice that: (2 * 1.1 + 1) * 2^-9. The limit has some room above that.
LIMIT = 5 * 2.0**-9


def relative_l2(actual: Any, expected: Any) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def decoded(matrix: Any) -> torch.Tensor:
    """Returns an expert's matrix as this library holds it, (rows, K) float64."""
    codes, scales = (torch.as_tensor(np.asarray(matrix[part]))[None] for part in ("codes", "scales"))
    return oracle.decode((codes, scales), 0) * float(matrix["tensor_scale"])


def write(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def warnings_of(path: Path) -> list[dict[str, Any]]:
    return [finding for finding in nv.inspect(path)["findings"] if finding["severity"] != "note"]


def check_slices_add_up(path: Path, layer: int, batch: Any, first_rows: int, rows: int) -> None:
    """Checks tensor parallel slices. If experts have biases, only one rank adds the down bias."""
    options = dict(backend="reference", **W4A16)
    whole = nv.MoeLayer.from_checkpoint(path, layer, **options).run(*batch)
    one, two = (
        nv.MoeLayer.from_checkpoint(path, layer, intermediate_slice=part, **options).run(*batch)
        for part in ((0, first_rows), (first_rows, rows - first_rows))
    )
    assert relative_l2(one + two, whole.double()) < 1e-6


def from_cache(path: Path, layer: int, batch: Any, cache: Path, **options: Any) -> tuple[nv.MoeLayer, nv.MoeLayer]:
    """Returns a layer packed into a cache, and one mapped from it. Checks that both give the same bits."""
    first = nv.MoeLayer.from_checkpoint(path, layer, cache_directory=cache, **options)
    assert len(list(cache.glob("*.packed"))) == 1
    mapped = nv.MoeLayer.from_checkpoint(path, layer, cache_directory=cache, **options)
    assert torch.equal(mapped.run(*batch), first.run(*batch))
    return first, mapped
