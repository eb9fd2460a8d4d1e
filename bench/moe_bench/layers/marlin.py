"""The Marlin layer of an installed vLLM: its weight preparation and fused_marlin_moe, as its MarlinExperts calls it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import vllm._custom_ops as ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_workspace
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
from vllm.scalar_type import scalar_types

from ..shapes import Shape
from ..workload import Routing, Weights
from . import expert_map


def add_slots(rows: torch.Tensor, out: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor | None) -> None:
    """Adds a token's experts, as MarlinExperts.moe_sum does."""
    if numbers is None:
        ops.moe_sum(rows, out)
    else:
        ops.moe_sum(rows, out, ids, numbers)


class Marlin:
    def __init__(self, variant: str, shape: Shape, weights: Sequence[Weights], most: int):
        self.shape = shape
        device = weights[0].down.codes.device
        layer = SimpleNamespace(
            num_experts=shape.local_experts,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            params_dtype=torch.bfloat16,
        )
        self.prepared = []
        for gate_up, down in weights:
            w1, scale1, global1, w2, scale2, global2 = prepare_nvfp4_moe_layer_for_marlin(
                layer,
                w13=gate_up.codes,
                w13_scale=gate_up.scales.view(torch.float8_e4m3fn),
                w13_scale_2=gate_up.tensor_scale,
                w2=down.codes,
                w2_scale=down.scales.view(torch.float8_e4m3fn),
                w2_scale_2=down.tensor_scale,
                is_act_and_mul=True,
            )
            self.prepared.append(
                {
                    "w1": w1,
                    "w2": w2,
                    "w1_scale": scale1,
                    "w2_scale": scale2,
                    "global_scale1": global1,
                    "global_scale2": global2,
                }
            )
        self.map = expert_map(shape, device)
        self.workspace = get_marlin_workspace(device)

    def prepare(self, tokens: int) -> None:
        pass

    def run(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        fused_marlin_moe(
            hidden_states=x,
            **self.prepared[number],
            bias1=None,
            bias2=None,
            topk_weights=routing.weights,
            topk_ids=routing.global_ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=self.shape.experts,
            activation=MoEActivation.SILU,
            moe_sum=add_slots,
            expert_map=self.map,
            workspace=self.workspace,
            output=out,
        )


open_layer = Marlin
