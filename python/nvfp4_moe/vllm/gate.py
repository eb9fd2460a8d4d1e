"""Computes a router's GEMM (vLLM's "gate") with the library, on a GPU and for the few tokens of a decode step.

vLLM has its own kernels for some models' gates (GateLinear). They have no quantization config and are left alone. The
other gates are unquantized linear layers, whose config selects how they are computed; these are handled here. cuBLAS
uses two CTAs for such a GEMM, router_gemm one for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch_op  # noqa: F401  defines the operators
from . import internals
from .plan import gates_are_own, pattern

_LINEAR = "vllm.model_executor.layers.linear"
_MOST_TOKENS = 8  # up to here every expert's weights are read once
_MOST_EXPERTS = 1024
_NAMES = (".gate", ".router")


def gate_or(stock: Any, layer: Any, prefix: str) -> Any:
    """Returns the library's method if `stock` is vLLM's plain method for a router's gate, else `stock`."""
    plain = internals.find_or_none(f"{_LINEAR}:UnquantizedLinearMethod")
    if type(stock) is not plain or not prefix.endswith(_NAMES) or not gates_are_own():
        return stock
    if not isinstance(layer, internals.find(f"{_LINEAR}:ReplicatedLinear")):
        return stock
    internals.logger().info_once("nvfp4-moe computes the gates of few tokens of layers such as %s", pattern(prefix))
    return _gate_method(plain)()


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether the library computes x (T, H) times the transposed weight (E, H)."""
    return (
        bias is None
        and x.is_cuda
        and x.dim() == 2
        and 0 < x.size(0) <= _MOST_TOKENS
        and x.dtype == weight.dtype == torch.bfloat16
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.size(1) % 8 == 0
        and weight.size(0) <= _MOST_EXPERTS
    )


_methods: dict[Any, type] = {}


def _gate_method(plain: Any) -> type:
    if plain not in _methods:

        class NvFp4MoeGateMethod(plain):  # type: ignore[misc]
            def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
                # A compiled graph serves any number of tokens, so it must not depend on the number.
                if torch.compiler.is_compiling() or not takes(x, layer.weight, bias):
                    return super().apply(layer, x, bias)
                logits: Tensor = torch.ops.nvfp4_moe.router_gemm(x, layer.weight)
                return logits

        _methods[plain] = NvFp4MoeGateMethod
    return _methods[plain]
