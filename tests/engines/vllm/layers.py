"""Inputs of a quantization method: vLLM's description of a layer, and the attributes of RoutedExperts that it reads."""

from __future__ import annotations

import torch

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 32
NAME = "model.layers.0.mlp.experts"


class Log:
    """Replaces vLLM's logger and keeps the levels and lines that the plugin writes."""

    def __init__(self) -> None:
        self.levels: list[str] = []
        self.lines: list[str] = []

    def __getattr__(self, level: str):
        return lambda line, *args: (self.levels.append(level), self.lines.append(line % args))


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


def library(config, seed: int = 0):
    """The library's layer of all experts over the same numbers."""
    import nvfp4_moe

    w = {name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in weights(seed).items()}

    def half(i: int):
        rows = slice(i * INNER, (i + 1) * INNER)
        return w["w13_weight"][:, rows], w["w13_weight_scale"][:, rows], w["w13_weight_scale_2"][:, i].contiguous()

    down = w["w2_weight"], w["w2_weight_scale"], w["w2_weight_scale_2"]
    return nvfp4_moe.MoeLayer.from_tensors(config, gate=half(0), up=half(1), down=down, max_tokens=32)


def moe_config(local: int = EXPERTS, top_k: int = TOP_K, *, tp=(1, 0), **options):
    """tp: (size, rank). options: additional or replaced fields."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    ranks = EXPERTS // local
    parallel = FusedMoEParallelConfig(
        tp_size=tp[0], tp_rank=tp[1], pcp_size=1, pcp_rank=0, dp_size=1, dp_rank=0, ep_size=ranks, ep_rank=0,
        sp_size=1, use_ep=ranks > 1, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    fields = {
        "num_experts": EXPERTS, "num_local_experts": local, "num_logical_experts": EXPERTS,
        "experts_per_token": top_k, "hidden_dim": HIDDEN, "intermediate_size": INNER,
        "activation": MoEActivation.SILU, "device": torch.device("cpu"), "in_dtype": torch.bfloat16,
        "routing_method": RoutingMethodType.Renormalize, "moe_parallel_config": parallel,
        "max_num_tokens": 32,
    }  # fmt: skip
    return FusedMoEConfig(**(fields | options))


# The options of a router that vLLM also gives to the layer, for a plain softmax.
ROUTER = {
    "renormalize": True, "scoring_func": "softmax", "use_grouped_topk": False, "num_expert_group": None,
    "topk_group": None, "custom_routing_function": None, "e_score_correction_bias": None, "routed_scaling_factor": 1.0,
}  # fmt: skip


class Layer(torch.nn.Module):
    """The attributes of RoutedExperts that a method reads."""

    def __init__(self, moe, expert_map=None, on_input: bool = False) -> None:
        super().__init__()
        self.moe_config = moe
        self.activation, self.global_num_experts = moe.activation, moe.num_experts
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.apply_router_weight_on_input = on_input
        self.set_router(**ROUTER)
        self.register_buffer("expert_map", expert_map, persistent=False)

    def set_router(self, **options) -> None:
        for name, value in options.items():
            setattr(self, name, value)

    def _expert_routing_tables(self):
        return None


def with_runner(layer: Layer, more: dict | None = None, **options) -> Layer:
    """Puts vLLM's runner around a layer, with the router that vLLM makes for these options instead of a plain softmax.

    more: options of the router that the layer does not have.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    options, moe = ROUTER | options, layer.moe_config
    layer.set_router(**options)
    runner = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(runner)
    runner.routed_experts = layer
    runner.router = create_fused_moe_router(moe.experts_per_token, moe.num_experts, **options, **(more or {}))
    get_current_vllm_config().compilation_config.static_forward_context[NAME] = runner
    return layer


def with_parameters(methods, kind: str, layer: Layer):
    """Returns the method of a layer of kind "modelopt" or "compressed-tensors". Nothing is loaded yet."""
    from nvfp4_moe.vllm.plan import plan_of
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    moe, plan = layer.moe_config, plan_of(layer, NAME)
    if kind == "modelopt":
        config = ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=[])
        method = methods.modelopt_method()(config, moe, plan)
    else:
        method = methods.compressed_tensors_method()(moe, plan)
    method.create_weights(
        layer,
        num_experts=moe.num_local_experts,
        hidden_size=moe.hidden_dim,
        intermediate_size_per_partition=moe.intermediate_size_per_partition,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *args: None,
        global_num_experts=moe.num_experts,
    )
    return method
