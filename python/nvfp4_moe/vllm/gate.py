"""A router's GEMM, which vLLM calls its gate: on a GPU and for the few tokens of a decode step by the library.

vLLM has kernels of its own for some models' gates (GateLinear), which know no quantization config and stay as they are. The
others are unquantized linear layers whose config decides how they are computed, and those come here. cuBLAS gives such a
GEMM two CTAs; router_gemm gives it one for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch_op  # noqa: F401  defines the operators
from . import internals
from .plan import gates_are_own, pattern

_LINEAR = "vllm.model_executor.layers.linear"
_MOST_TOKENS = 8  # up to which every expert's weights are read once
_MOST_EXPERTS = 1024
_NAMES = (".gate", ".router")


def gate_or(stock: Any, layer: Any, prefix: str) -> Any:
    """The method of a linear layer: the library's if vLLM's own config gives a router's gate its plain one, else stock."""
    plain = internals.find_or_none(f"{_LINEAR}:UnquantizedLinearMethod")
    if type(stock) is not plain or not prefix.endswith(_NAMES) or not gates_are_own():
        return stock
    if not isinstance(layer, internals.find(f"{_LINEAR}:ReplicatedLinear")):
        return stock
    internals.logger().info_once("nvfp4-moe computes the gates of few tokens of layers such as %s", pattern(prefix))
    return _gate_method(plain)()


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the library computes x (T, H) times the transposed weight (E, H)."""
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
                # A compiled graph is for any number of tokens, of which it must not ask.
                if torch.compiler.is_compiling() or not takes(x, layer.weight, bias):
                    return super().apply(layer, x, bias)
                logits: Tensor = torch.ops.nvfp4_moe.router_gemm(x, layer.weight)
                return logits

        _methods[plain] = NvFp4MoeGateMethod
    return _methods[plain]
