"""MoeConfig: the sizes of a layer and every named choice of the numeric contract (docs/explanation/numerics.md)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from . import _core


def dump_options(options: Mapping[str, Any]) -> str:
    """Fields of a config as JSON, which has no NaN and no infinity."""

    def plain(name: str, value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, float) and not math.isfinite(value):
            raise _core.InvalidArgument(f"{name}: expected a finite number, got {value}")
        return value

    return json.dumps({name: plain(name, value) for name, value in options.items()})


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A layer's sizes and options. Checked when it is made; ValueError names the field, what is legal and what came.

    num_experts: of the whole layer, over all ranks. top_k: experts per token. hidden_size, intermediate_size:
      multiples of 16; intermediate_size is this rank's slice under tensor parallel.
    activation (g gate, u up, L swiglu_limit, a swiglu_alpha): "swiglu" silu(g)*u; "swiglu_clamped"
      silu(min(g,L))*clamp(u,-L,L); "swiglu_step" min(silu(g),L)*clamp(u,-L,L); "swiglu_oai" g=min(g,L),
      u=clamp(u,-L,L): g*sigmoid(a*g)*(u+1). These three need a swiglu_limit; a is for swiglu_oai only. "relu2" relu(u)^2, as
      Nemotron-3's: experts have no gate.
    activation_format: "nvfp4" quantizes activations before both GEMMs (W4A4); "bf16" does not (W4A16); "int8_block" to
      int8 with one fp32 scale per 16 (W4A8), which takes no other scale: the two below must be "dynamic_token"; "fp8" to
      E4M3 with a power of two per row, and rounds weights to E4M3 (W4A8): neither of the two below may be "compat".
    activation_scale, of hidden: "dynamic_token", each row its own power of two; "static", the layer's input scale rounded
      up to a power of two times static_headroom (a power of two, 1 without "static"); "compat", the input scale as it is,
      in vLLM's order.
    intermediate_scale, of the activation's output: "dynamic_token"; "fixed", one power of two (intermediate_fixed, else from the
      limit, else 16x the input scale); "compat".
    router_weight: multiplies "after_down"; "before_down" (before the intermediate is quantized); or "on_input" (hidden
      before it is quantized, for the routed experts and not the shared one; top_k is 1). max_router_weight bounds it for
      "fixed" under "before_down".
    row_format: of gemm2's rows before they are combined, "bf16" or "fp32".
    batch_invariant: a token's bits do not depend on what else is in the batch.
    shared_intermediate_size: of a shared expert, 0 for none.
    expert_biases: gate, up and down of the routed experts have biases, as gpt-oss's: added in float32 to both of gemm1's
      results before the activation, and to gemm2's rows.
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

    def __post_init__(self) -> None:
        _core.check_config(self.to_json())

    def to_json(self) -> str:
        """The fields as the library reads them; numbers of NumPy and torch are taken for what they hold."""

        return dump_options({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def from_json(cls, text: str) -> MoeConfig:
        return cls(**json.loads(text))
