"""Reads checkpoints twice: through the safetensors package and through this library."""

from __future__ import annotations

from pathlib import Path

import nvfp4_moe as nv


def raw(directory: Path) -> dict:
    """Reads every tensor of a checkpoint through the safetensors package."""
    from safetensors import safe_open

    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def experts(directory: Path):
    """Yields (loaded expert, layer, expert) for every expert of a checkpoint."""
    info = nv.inspect(directory, layers=[])
    for layer in info["layers"]:
        for expert in range(info["options"]["num_experts"]):
            yield nv.load_expert(directory, layer, expert), layer, expert


def same_values(ours, theirs) -> bool:
    """Bit for bit in float32, except that ModelOpt decodes code 8 (-0) as +0."""
    import torch

    differs = ours.view(torch.int32) != theirs.view(torch.int32)
    return bool(((ours == 0) & (theirs == 0))[differs].all())
