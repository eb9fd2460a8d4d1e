"""Makes an engine's fused parameters from numpy_only/layers.py's weights, and a layer from them."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "numpy_only"))

import layers  # noqa: E402
from nvfp4_moe import _fused_experts as fused  # noqa: E402
from nvfp4_moe._fused_parameters import FusedParameters  # noqa: E402

E, K, H, INNER = layers.EXPERTS, layers.TOP_K, layers.HIDDEN, layers.INTERMEDIATE


def parameters(seed: int = 0, experts: range = range(E), up_first: bool = False) -> dict:
    """Returns the tensors that an engine holds of layers.weights, for some of the experts."""
    stacks = {
        name: tuple(torch.from_numpy(part[list(experts)]) for part in stack)
        for name, stack in layers.weights(seed).items()
    }
    order = ("up", "gate") if up_first else ("gate", "up")
    return {
        "w13": torch.cat([stacks[name][0] for name in order], 1),
        "w13_scale": torch.cat([stacks[name][1] for name in order], 1).view(torch.float8_e4m3fn),
        "w13_tensor_scale": torch.stack([stacks[name][2] for name in order], 1),
        "w2": stacks["down"][0],
        "w2_scale": stacks["down"][1].view(torch.float8_e4m3fn),
        "w2_tensor_scale": stacks["down"][2],
        "up_first": up_first,
    }


def opened(parameters: dict, placement=None, **options):
    placement = placement or fused.Placement(E)
    options = {"activation_format": "bf16", "top_k": K, "max_tokens": 32} | options
    known = {field.name for field in dataclasses.fields(FusedParameters)}
    given = parameters | {name: options.pop(name) for name in list(options) if name in known}
    return fused.open_fused(FusedParameters(**given), placement=placement, **options)


def inputs(tokens: int = 9, seed: int = 1):
    hidden, ids, router_weights = layers.batch(tokens, seed)
    return torch.from_numpy(hidden).bfloat16(), torch.from_numpy(ids), torch.from_numpy(router_weights)


def run(experts, *batch):
    out = torch.full_like(batch[0], float("nan"))
    experts.run(*batch, out)
    return out
