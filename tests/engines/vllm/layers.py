"""What a quantization method is made of and for: vLLM's description of a layer, and what a method reads of RoutedExperts."""

from __future__ import annotations

import torch

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 32


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """ModelOpt's parameters of all experts; gate and up with tensor scales of their own."""
    random = torch.Generator().manual_seed(seed)

    def codes(*shape):
        return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

    def scales(*shape):
        return torch.randint(0x28, 0x40, shape, generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)

    return {
        "w13_weight": codes(EXPERTS, 2 * INNER, HIDDEN // 2),
        "w2_weight": codes(EXPERTS, HIDDEN, INNER // 2),
        "w13_weight_scale": scales(EXPERTS, 2 * INNER, HIDDEN // 16),
        "w2_weight_scale": scales(EXPERTS, HIDDEN, INNER // 16),
        "w13_weight_scale_2": torch.rand(EXPERTS, 2, generator=random) * 0.02 + 0.005,
        "w2_weight_scale_2": torch.rand(EXPERTS, generator=random) * 0.02 + 0.005,
    }


def moe_config(local: int = EXPERTS, top_k: int = TOP_K, *, tp=(1, 0), **options):
    """tp: (size, rank). options: other fields than these, or in their place."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    ranks = EXPERTS // local
    parallel = FusedMoEParallelConfig(
        tp_size=tp[0],
        pcp_size=1,
        dp_size=1,
        ep_size=ranks,
        tp_rank=tp[1],
        pcp_rank=0,
        dp_rank=0,
        ep_rank=0,
        sp_size=1,
        use_ep=ranks > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    fields = {
        "num_experts": EXPERTS,
        "experts_per_token": top_k,
        "hidden_dim": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": local,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": torch.device("cpu"),
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": 32,
    }
    return FusedMoEConfig(**(fields | options))


class Layer(torch.nn.Module):
    """What a method reads of RoutedExperts."""

    def __init__(self, moe, expert_map=None, on_input: bool = False) -> None:
        super().__init__()
        self.moe_config = moe
        self.activation, self.global_num_experts = moe.activation, moe.num_experts
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.apply_router_weight_on_input = on_input
        self.renormalize, self.scoring_func, self.use_grouped_topk = True, "softmax", False
        self.custom_routing_function = self.e_score_correction_bias = None
        self.routed_scaling_factor = 1.0
        self.register_buffer("expert_map", expert_map, persistent=False)

    def _expert_routing_tables(self):
        return None
