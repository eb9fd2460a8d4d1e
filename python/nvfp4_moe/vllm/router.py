"""A layer's router, if the library selects the experts. vLLM then passes the router's logits to the layer.

This uses vLLM's interface for kernels that route themselves. On a GPU the selection is a kernel that starts while the
previous kernel ends, and the layer's first kernel starts while the selection runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from .. import torch_op  # noqa: F401  defines the operators
from ..router import RouterConfig
from . import internals
from .plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class OwnRouter:
    """A softmax router over all experts, or over the selected ones (renormalize)."""

    num_experts: int
    top_k: int
    renormalize: bool

    @functools.cached_property
    def config(self) -> RouterConfig:
        return RouterConfig(
            num_experts=self.num_experts, top_k=self.top_k, scoring="softmax", renormalize=self.renormalize
        )

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Computes topk_ids int32 and topk_weights float32, both (T, top_k), from logits (T, num_experts)."""
        logits = logits.contiguous()
        ids, weights = torch.ops.nvfp4_moe.select_experts(logits, self.top_k, "softmax", self.renormalize)
        return ids, weights


def own_router(layer: Any, plan: LayerPlan) -> OwnRouter | None:
    """Returns the router of a RoutedExperts layer, or None if vLLM selects: not a plain softmax, or not requested."""
    if not plan.own_router or "router" not in internals.fitting:
        return None
    plain = (
        layer.scoring_func == "softmax"
        and not layer.use_grouped_topk
        and layer.custom_routing_function is None
        and layer.e_score_correction_bias is None
        and layer.routed_scaling_factor == 1.0
    )
    if not plain:
        return None
    return OwnRouter(plan.options["num_experts"], plan.options["top_k"], bool(layer.renormalize))
