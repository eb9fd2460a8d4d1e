"""This library's layer, through its Python module."""

from __future__ import annotations

from collections.abc import Sequence

import nvfp4_moe
import torch

from ..shapes import Shape
from ..workload import Routing, Weights


class Ours:
    def __init__(self, variant: str, shape: Shape, weights: Sequence[Weights], most: int, limit: float | None = None):
        config = nvfp4_moe.MoeConfig(
            num_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            activation="swiglu" if limit is None else "swiglu_clamped",
            swiglu_limit=limit,
            activation_format=variant,
            activation_scale="dynamic_token",
            router_weight="after_down",
        )
        self.layers = [
            nvfp4_moe.MoeLayer.from_tensors(
                config,
                gate=tuple(each.gate),
                up=tuple(each.up),
                down=tuple(each.down),
                first_expert=0,
                max_tokens=most,
                device=str(each.down.codes.device),
            )
            for each in weights
        ]

    def describe(self) -> dict[str, object]:
        return self.layers[0].describe()

    def prepare(self, tokens: int) -> None:
        pass

    def run(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        self.layers[number].run(x, routing.ids, routing.weights, out=out)


open_layer = Ours
