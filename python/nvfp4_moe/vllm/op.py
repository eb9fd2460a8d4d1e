"""A layer as torch.compile sees it: nvfp4_moe::moe_layer_by(Tensor(a!) out, Tensor hidden, Tensor topk_ids, Tensor topk_weights,
Tensor handle) -> ().

nvfp4_moe::moe_layer takes a handle that is a number. In a compiled graph that vLLM keeps on disk, a number would be the one of
the process that compiled it. A tensor is an input of the graph, which each process and each engine gives its own. vLLM
traces its MoE layers on CPUs alone; elsewhere they stand behind an operator of its own, and the layer is called directly.
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


refusals: dict[int, str] = {}  # why a layer does not run, by its handle


def check(handle: int) -> None:
    """Raises RuntimeError if the layer does not run."""
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
