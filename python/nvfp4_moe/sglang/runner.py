"""The runner core: runs a MoeLayer on the tokens that SGLang dispatches.

SGLang's standard dispatcher passes ids that are local to the rank, and -1 for another rank's expert, which adds
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import Unsupported, torch_op
from .._fused_experts import run_in_parts
from ..layer import MoeLayer
from . import internals

BACKEND = "nvfp4_moe"
MAX_TOKENS = 8192  # per call of the library; larger batches take several calls

assert torch_op.library is not None  # importing it registers torch.ops.nvfp4_moe


@dataclasses.dataclass
class NvFp4MoeQuantInfo(internals.MoeQuantInfo):  # type: ignore[misc]
    """The layer with the rank's experts, and a factor of its output; output_scale None means 1."""

    layer: MoeLayer
    output_scale: float | None = None


def run_layer(layer: MoeLayer, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Runs the layer on hidden (T, H), local topk_ids (T, top_k) and float32 topk_weights (T, top_k); returns (T, H).

    Only enqueues work.
    """
    op, handle = torch.ops.nvfp4_moe.moe_layer, layer.handle
    return run_in_parts(lambda *rows: op(*rows, handle), MAX_TOKENS, hidden, topk_ids, topk_weights)


class NvFp4MoeRunnerCore(internals.DispatchMoeRunnerCore):  # type: ignore[misc]
    """The runner core that SGLang makes, by register_moe_runner_core, for a layer of the adapter."""

    @property
    def runner_backend(self) -> Any:
        return internals.resolve_moe_runner_backend(BACKEND)

    def run_from_dispatch(self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
        if not isinstance(quant_info, NvFp4MoeQuantInfo):
            raise Unsupported(
                f"--moe-runner-backend {BACKEND}: expected a layer of NVFP4 experts, got {type(quant_info).__name__}, a "
                "layer of another format in the same model. Leave the option out and set NVFP4_MOE_MODE=1"
            )
        if hooks is not None:
            raise Unsupported(
                f"--moe-runner-backend {BACKEND}: LoRA on experts is not supported; leave the option or the adapter out"
            )
        if dispatch_output.hidden_states_scale is not None:
            raise Unsupported("hidden_states: expected floats, got activations that the dispatcher has quantized")
        topk = dispatch_output.topk_output
        if not internals.TopKOutputChecker.format_is_standard(topk):
            topk = topk.to_standard()
        out = run_layer(
            quant_info.layer,
            dispatch_output.hidden_states.contiguous(),
            topk.topk_ids.contiguous(),
            topk.topk_weights.to(torch.float32).contiguous(),
        )
        if quant_info.output_scale is not None:
            out.mul_(quant_info.output_scale)
        return internals.StandardCombineInput(hidden_states=out)


def make_runner(runner_config: Any) -> Any:
    """Makes SGLang's MoeRunner over the core."""
    return internals.MoeRunner(internals.resolve_moe_runner_backend(BACKEND), runner_config)
