"""A layer's router, if the library selects the experts. vLLM then passes the router's logits to the layer.

This uses vLLM's interface for kernels that route themselves. On a GPU the selection is a kernel that starts while the
previous kernel ends, and the layer's first kernel starts while the selection runs.

What a layer selects depends on the class of its router in vLLM, and some classes ignore options of the layer. So the
router object decides. Each class is known with all its attributes: if one is missing, new, or has another value than
the library implements, vLLM selects and the log gives the reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._own_router import LeftToEngine, check_bias, group_options, naming_router, score_options, select
from ..router import RouterConfig
from . import internals
from .plan import LayerPlan, pattern
from .ranks import runner_of

_FUSED = "vllm.model_executor.layers.fused_moe"
_GROUPED = "GroupedTopKRouter"  # GPUs: use_grouped_topk
_BIASED = "FusedTopKBiasRouter"  # GPUs: a correction bias or a hash table, without groups
_PLAIN = "FusedTopKRouter"  # GPUs: the others
_CPU = "CPURouter"  # CPUs: all, from vLLM 0.30 on

_ALL = "top_k global_num_experts eplb_state capture_fn _routing_replay_out bias_vl image_sentinel_lo".split()
_ATTRIBUTES = {
    name: frozenset([*_ALL, "renormalize", "scoring_func", *more.split()])
    for name, more in {
        _GROUPED: "num_expert_group topk_group routed_scaling_factor e_score_correction_bias num_fused_shared_experts "
        "skip_padding",
        _BIASED: "routed_scaling_factor e_score_correction_bias _hash_indices_table num_fused_shared_experts "
        "shared_expert_weight",
        _PLAIN: "",
        _CPU: "use_grouped_topk num_expert_group topk_group routed_scaling_factor e_score_correction_bias "
        "custom_routing_function _hash_indices_table",
    }.items()
}
_MODULES = {_GROUPED: "grouped_topk_router", _BIASED: "fused_topk_bias_router", _PLAIN: "fused_topk_router"}
# Attributes that some releases or classes lack, and the only values that the library implements.
_OFF = {
    "eplb_state": None,
    "capture_fn": None,
    "_routing_replay_out": None,
    "bias_vl": None,
    "_hash_indices_table": None,
    "custom_routing_function": None,
    "num_fused_shared_experts": 0,
    "skip_padding": False,
}
# Options that vLLM gives to the layer and to its router.
_SHARED = ("top_k", "renormalize", "scoring_func", "num_expert_group", "topk_group", "routed_scaling_factor")


@dataclasses.dataclass(frozen=True)
class OwnRouter:
    """A router of vLLM's as the library computes it.

    Attributes:
        config: The router.
        stock: vLLM's router. It keeps the bias, whose values a reload changes.
    """

    config: RouterConfig
    stock: Any

    @property
    def correction_bias(self) -> Tensor | None:
        """float32 (num_experts,), or None if the router has no bias."""
        return self.stock.e_score_correction_bias.data if self.config.correction_bias else None

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Computes topk_ids int32 and topk_weights float32, both (T, top_k), from logits (T, num_experts)."""
        return select(logits, self.config, self.correction_bias)


def own_router(layer: Any, plan: LayerPlan) -> OwnRouter | None:
    """Returns the router of a RoutedExperts layer, or None if vLLM selects: not requested, or not known."""
    if not plan.own_router or "router" not in internals.fitting:
        return None
    try:
        found = _known(layer, plan)
    except LeftToEngine as why:
        internals.logger().info_once(
            "nvfp4-moe leaves the selection of the experts of layers such as %s to vLLM: %s",
            pattern(plan.name),
            str(why),
        )
        return None
    internals.logger().info_once("nvfp4-moe selects the experts of layers such as %s", pattern(plan.name))
    return found


def _known(layer: Any, plan: LayerPlan) -> OwnRouter:
    router = _stock_router(layer, plan)
    name = _class_of(router)
    if more := sorted(vars(router).keys() - _ATTRIBUTES[name]):
        raise LeftToEngine(f"{name} has the unknown attribute {more[0]}")
    for option, value in _OFF.items():
        found = getattr(router, option, value)
        if found is not value and (value is None or found != value):
            raise LeftToEngine(f"{name} has a {option}")
    _check_same(layer, router, name)
    with naming_router(name):
        options = _options(name, router)
        config = RouterConfig(int(router.global_num_experts), int(router.top_k), **options)
    if (config.num_experts, config.top_k) != (plan.options["num_experts"], plan.options["top_k"]):
        raise LeftToEngine(f"{name} selects {config.top_k} of {config.num_experts} experts, and the layer does not")
    if config.num_expert_group > 1 and not plan.own_groups:
        raise LeftToEngine("its kernel for groups of experts is faster; NVFP4_MOE_ROUTER=own has the library select")
    if config.correction_bias:
        device_type = torch.device(layer.moe_config.device).type
        check_bias("e_score_correction_bias", router.e_score_correction_bias, config.num_experts, device_type)
    return OwnRouter(config, router)


def _stock_router(layer: Any, plan: LayerPlan) -> Any:
    """Returns vLLM's router of a layer, if vLLM's own runner passes its logits to the layer."""
    if getattr(layer.moe_config, "require_decomposed_backend", False):
        raise LeftToEngine("vLLM's config requires it")
    runner = runner_of(layer, plan.runners)
    if runner is None:
        raise LeftToEngine("the layer has no runner of vLLM's")
    base = internals.find_or_none(f"{_FUSED}.runner.moe_runner:MoERunner")
    for step in ("_forward_impl", "_apply_quant_method"):
        expected = getattr(base, step, None)
        if expected is None or getattr(type(runner), step, None) is not expected:
            raise LeftToEngine(f"{type(runner).__name__} is a runner of the model's own")
    return runner.router


def _class_of(router: Any) -> str:
    name = type(router).__name__
    if name not in _ATTRIBUTES or type(router).__module__ != f"{_FUSED}.router.{_MODULES.get(name, 'cpu_router')}":
        raise LeftToEngine(f"the router is a {name}")
    return name


def _check_same(layer: Any, router: Any, name: str) -> None:
    """Checks that the layer and its router have the same options. Those that a router lacks must be off."""
    if layer.custom_routing_function is not None:
        raise LeftToEngine("the model has a routing function of its own")
    if getattr(layer, "hash_indices_table", None) is not None:
        raise LeftToEngine("the layer has a hash_indices_table")
    if layer.e_score_correction_bias is not getattr(router, "e_score_correction_bias", None):
        raise LeftToEngine(f"{name} has another e_score_correction_bias than the layer")
    for option in _SHARED:
        found = getattr(layer, option, None)
        if hasattr(router, option) and hasattr(layer, option) and found != getattr(router, option):
            raise LeftToEngine(f"{name} has another {option} than the layer")
    if not hasattr(router, "routed_scaling_factor") and layer.routed_scaling_factor != 1.0:
        raise LeftToEngine(f"{name} ignores the layer's routed_scaling_factor")


def _options(name: str, router: Any) -> dict[str, Any]:
    """Returns the fields of RouterConfig. May raise AttributeError, TypeError or ValueError for odd values."""
    options = score_options(name, router.scoring_func, router.renormalize)
    scoring, renormalize = options["scoring"], options["renormalize"]
    if name == _PLAIN:
        if scoring == "sqrt_softplus":
            raise LeftToEngine(f"{name} has no scores by {router.scoring_func}")
        return options
    biased = router.e_score_correction_bias is not None
    options |= {"correction_bias": biased, "routed_scaling_factor": float(router.routed_scaling_factor)}
    if name == _GROUPED or (name == _CPU and router.use_grouped_topk):
        if scoring == "sqrt_softplus":
            raise LeftToEngine(f"{name} has no scores by {router.scoring_func}")
        groups = router.global_num_experts, router.num_expert_group, router.topk_group
        return options | group_options(name, *groups, biased)
    if name == _BIASED:
        if not biased:
            raise LeftToEngine(f"{name} without a bias")
    elif scoring == "sqrt_softplus":
        if not (biased and renormalize):
            raise LeftToEngine(f"{name} has no such scores without a bias and renormalize")
    elif scoring != "softmax" or biased or options["routed_scaling_factor"] != 1.0:
        raise LeftToEngine(f"{name} ignores an option of the layer")
    return options
