"""MoeConfig: a layer's sizes, and every option that affects its numbers (docs/explanation/numerics.md)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from . import _core

__all__ = ["MoeConfig"]


def __dir__() -> list[str]:
    return __all__


def dump_options(options: Mapping[str, Any]) -> str:
    """Serializes fields of a config as JSON. Raises InvalidArgument on NaN and infinity, which JSON does not have."""

    def plain(name: str, value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, float) and not math.isfinite(value):
            raise _core.InvalidArgument(f"{name}: expected a finite number, got {value}")
        return value

    return json.dumps({name: plain(name, value) for name, value in options.items()})


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """The sizes and options of a layer. They are checked when the object is made.

    Attributes:
        num_experts: Experts of the whole layer, over all ranks.
        top_k: Experts per token.
        hidden_size: A multiple of 16.
        intermediate_size: A multiple of 16; under tensor parallel, this rank's slice.
        activation: With g = gate, u = up, L = swiglu_limit, a = swiglu_alpha, b = situ_gate_limit, l = situ_up_limit:
            "swiglu": silu(g)*u
            "swiglu_clamped": silu(min(g,L))*clamp(u,-L,L)
            "swiglu_step": min(silu(g),L)*clamp(u,-L,L)
            "swiglu_oai": g=min(g,L), u=clamp(u,-L,L): g*sigmoid(a*g)*(u+1)
            "relu2": relu(u)^2, for experts without a gate, as in Nemotron-3
            "gelu": gelu(g)*u, with gelu(x) = x*Phi(x)
            "gelu_tanh": the same with gelu's approximation by tanh, as in Gemma-4
            "situ": b*tanh(g/b)*sigmoid(g) * l*tanh(u/l), as in Kimi-K3
        swiglu_limit: Required by "swiglu_clamped", "swiglu_step" and "swiglu_oai".
        activation_format: How activations are quantized before both GEMMs.
            "nvfp4": to NVFP4 (W4A4).
            "bf16": not at all (W4A16).
            "int8_block": to int8 with one fp32 scale per 16 values (W4A8). Both scales below must be "dynamic_token".
            "fp8": to E4M3 with a power of two per row; weights are rounded to E4M3 too (W4A8). Neither scale below may
            be "vllm_order".
        activation_scale: The scale of hidden.
            "dynamic_token": a power of two for each row.
            "static": the layer's input scale rounded up to a power of two, times static_headroom.
            "vllm_order": the input scale as it is, with vLLM's order of operations.
        intermediate_scale: The scale of the activation's output: "dynamic_token"; "fixed", one power of two
            (intermediate_fixed, else derived from the activation's limits, else 16 times the input scale); or
            "vllm_order".
        router_weight: When the router weight is multiplied: "after_down"; "before_down", before the intermediate is
            quantized; or "on_input", to hidden before it is quantized, for the routed experts only (requires top_k 1).
        row_format: The dtype of gemm2's rows before they are combined, "bf16" or "fp32".
        batch_invariant: A token's result has the same bits in every batch.
        swiglu_alpha: a above; used by "swiglu_oai" only.
        intermediate_fixed: The power of two for intermediate_scale "fixed".
        static_headroom: A power of two; 1 unless activation_scale is "static".
        max_router_weight: An upper bound of the router weights, for "fixed" with "before_down".
        shared_intermediate_size: The intermediate size of a shared expert; 0 if there is no shared expert.
        expert_biases: The routed experts have biases, as in gpt-oss. They are added in float32 to gemm1's gate and up
            before the activation, and to gemm2's rows.
        situ_gate_limit: b above; required by "situ".
        situ_up_limit: l above; required by "situ".

    Raises:
        ValueError: Names the field, the legal values and what it got.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    activation_format: str = "nvfp4"
    activation_scale: str = "dynamic_token"
    intermediate_scale: str = "dynamic_token"
    router_weight: str = "after_down"
    row_format: str = "bf16"
    batch_invariant: bool = False
    swiglu_alpha: float = 1.702
    intermediate_fixed: float | None = None
    static_headroom: float = 1.0
    max_router_weight: float = 1.0
    shared_intermediate_size: int = 0
    expert_biases: bool = False
    situ_gate_limit: float | None = None
    situ_up_limit: float | None = None

    def __post_init__(self) -> None:
        _core.check_config(self.to_json())

    def to_json(self) -> str:
        """Serializes the fields for the library. NumPy and torch scalars are converted to plain numbers."""

        return dump_options({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_json(cls, text: str) -> MoeConfig:
        """Inverse of to_json."""
        return cls(**json.loads(text))
