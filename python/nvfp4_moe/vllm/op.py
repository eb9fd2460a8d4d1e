"""The torch operator that runs a layer in vLLM's compiled graphs.

    nvfp4_moe::moe_layer_by(Tensor(a!) out, Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor handle) -> ()

nvfp4_moe::moe_layer takes the handle as a number. vLLM keeps compiled graphs on disk, and they would contain the number
of the process that compiled them. A tensor is an input of the graph instead, so each process and engine passes its own.
vLLM traces its MoE layers only on CPUs. On GPUs an operator of vLLM hides them, and the layer is called directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _core

_library = torch.library.Library("nvfp4_moe", "FRAGMENT")
_library.define(
    "moe_layer_by(Tensor(a!) out, Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor handle) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)


refusals: dict[int, str] = {}  # handle of a disabled layer -> the reason


def check(handle: int) -> None:
    """Raises RuntimeError if the layer is disabled."""
    if why := refusals.get(handle):
        raise RuntimeError(why)


def _run(out: Tensor, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor) -> None:
    check(int(handle))
    _core.moe_layer(hidden, topk_ids, topk_weights, int(handle), out=out)


for _device in ("CPU", "CUDA"):
    _library.impl("moe_layer_by", _run, _device)


def _fake(out: Tensor, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, handle: Tensor) -> None:
    return None


torch.library.register_fake("nvfp4_moe::moe_layer_by", _fake, lib=_library)
moe_layer_by = torch.ops.nvfp4_moe.moe_layer_by.default
