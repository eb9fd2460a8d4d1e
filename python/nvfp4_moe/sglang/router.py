"""Selects the experts of the adapter's layers, if the library knows the router. The rest of SGLang's TopK stays.

bind_runner_backend tells a TopK which runner its experts have, and so which configs of routers belong to the adapter.
For these SGLang's select_experts gets a view of the config with a routing function, which is SGLang's own interface for
models with a selection of their own. Everything that SGLang does after the selection is therefore still SGLang's:
padded rows, the recorders of selected experts, simulated routing.

Every field of the config is known. If one is new, or has another value than the library implements, SGLang selects and
the log gives the reason. It also selects in graphs that torch compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._own_router import LeftToEngine, check_bias, group_options, naming_router, score_options, select
from ..router import RouterConfig
from . import internals
from .refusals import log
from .runner import BACKEND

_TOPK = "sglang.srt.layers.moe.topk"
_STATE = "nvfp4_moe_router"  # attribute of a config that belongs to the adapter

# Fields that determine the selection.
_FIELDS = (
    "top_k",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "renormalize",
    "scoring_func",
    "routed_scaling_factor",
    "apply_routed_scaling_factor_on_output",
    "shared_experts",
    "custom_routing_function",
    "fused_gate_packed_ids",
)
# Fields that the selection ignores, and those of how SGLang rounds or caches what it computes.
_IGNORED = (
    "torch_native",
    "sqrtsoftplus_log1p",
    "fused_shared_experts_scaling_factor",  # without fused shared experts
    "output_format",
    "runner_backend",
    "routing_method_type",
    "allow_routed_experts_capture",
    "layer_id",
    "_correction_bias_dtype_cache",
    "_correction_bias_cache_key",
)
_KNOWN = frozenset([*_FIELDS, *_IGNORED, "correction_bias", _STATE])
_PASSED = ("layer_id", "num_token_non_padded")  # arguments of select_experts that SGLang uses after the selection
_LOGITS = (torch.float32, torch.float16, torch.bfloat16)

_said: set[str] = set()


class _View:
    """A TopKConfig whose selection is the library's. All other fields are SGLang's, read when they are used."""

    use_grouped_topk = False
    apply_routed_scaling_factor_on_output = False  # the weights below include the factor

    def __init__(self, stock: Any, router: RouterConfig):
        self._stock, self.router, self.calls = stock, router, 0

    def custom_routing_function(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns topk_weights float32 and topk_ids int32, both (T, top_k), for gating_output (T, num_experts)."""
        self.calls += 1
        bias = self._stock.correction_bias
        ids, weights = select(gating_output, self.router, None if bias is None else bias.data)
        return weights, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class OwnRouter:
    """The router of one of the adapter's layers. is_first_rank: this process logs for all ranks."""

    def __init__(self, stock: Any, is_first_rank: bool):
        self._stock, self._reports = stock, is_first_rank
        self._facts: tuple[Any, ...] | None = None
        self._view: _View | None = None

    def view(self, logits: Tensor) -> _View | None:
        """Returns the config for select_experts and logits (T, num_experts), or None if SGLang selects."""
        bias = self._stock.correction_bias
        of_bias = None if bias is None else (bias.dtype, bias.shape, bias.device, bias.is_contiguous())
        facts = (
            logits.shape[1:],
            logits.dtype,
            logits.device.type,
            of_bias,
            *[getattr(self._stock, name) for name in _FIELDS],
        )
        if facts != self._facts:  # the first call, or another than before
            self._facts, self._view = facts, self._decide(logits)
        return self._view

    def leave(self, why: str) -> None:
        """Logs why SGLang selects."""
        self._say(f"leaves the selection of experts in layer %s and others to SGLang: {why}")

    def _decide(self, logits: Tensor) -> _View | None:
        try:
            router = known_router(self._stock, logits)
        except LeftToEngine as why:
            self.leave(str(why))
            return None
        kind = f"{router.scoring}, top-{router.top_k} of {router.num_experts}"
        self._say(f"selects the experts of layer %s and others: {kind}")
        return _View(self._stock, router)

    def _say(self, text: str) -> None:
        if self._reports and text not in _said:
            _said.add(text)
            log.info("nvfp4_moe " + text.replace("%s", str(self._stock.layer_id), 1))


def known_router(config: Any, logits: Tensor) -> RouterConfig:
    """Returns what SGLang's select_experts computes for a TopKConfig and logits (T, num_experts).

    Raises LeftToEngine if the library does not know it, or does not compute it.
    """
    if more := sorted(vars(config).keys() - _KNOWN):
        raise LeftToEngine(f"TopKConfig has the unknown field {more[0]}")
    if logits.ndim != 2 or logits.dtype not in _LOGITS:
        raise LeftToEngine(f"TopK gets {logits.ndim}-dimensional logits of {logits.dtype}")
    with naming_router("TopK"):
        shared = config.shared_experts
        if shared.num_fused_shared_experts != 0 or shared.use_waterfill:
            raise LeftToEngine("TopK also selects fused shared experts")
        for option in ("custom_routing_function", "fused_gate_packed_ids"):
            if getattr(config, option):
                raise LeftToEngine(f"TopK has a {option}")
        router = RouterConfig(int(logits.shape[1]), int(config.top_k), **_options(config, int(logits.shape[1])))
    if router.correction_bias:
        check_bias("correction_bias", config.correction_bias, router.num_experts, logits.device.type)
    return router


def _options(config: Any, experts: int) -> dict[str, Any]:
    """Returns the fields of RouterConfig. May raise AttributeError, TypeError or ValueError for odd values."""
    biased, scoring_func = config.correction_bias is not None, config.scoring_func
    if config.use_grouped_topk:
        if scoring_func not in ("softmax", "sigmoid"):
            raise LeftToEngine(f"TopK has no scores by {scoring_func} with groups")
        if biased:
            scoring_func = "sigmoid"  # SGLang's code for groups and a bias ignores the name
    elif biased and scoring_func == "softmax":
        raise LeftToEngine("TopK has softmax and a bias, which only some of SGLang's kernels add")
    options = score_options("TopK", scoring_func, config.renormalize) | {"correction_bias": biased}
    if config.use_grouped_topk:
        options |= group_options("TopK", experts, config.num_expert_group, config.topk_group, biased)
    if config.apply_routed_scaling_factor_on_output and config.routed_scaling_factor is not None:
        options["routed_scaling_factor"] = float(config.routed_scaling_factor)
    return options


def register() -> None:
    """Hooks the method that associates a router with a runner, and the function that selects."""

    def bind_runner_backend(own: Callable[..., Any], topk: Any, *inputs: Any, **named: Any) -> None:
        own(topk, *inputs, **named)
        config = topk.topk_config
        if getattr(config.runner_backend, "value", None) == BACKEND:
            setattr(config, _STATE, OwnRouter(config, internals.is_first_rank_of_layers()))

    def select_experts(
        own: Callable[..., Any], hidden_states: Tensor, router_logits: Tensor, topk_config: Any, **named: Any
    ) -> Any:
        def result(config: Any) -> Any:
            return own(hidden_states=hidden_states, router_logits=router_logits, topk_config=config, **named)

        router = getattr(topk_config, _STATE, None)
        if router is None or torch.compiler.is_compiling():
            return result(topk_config)
        for name, value in named.items():
            if value is not None and name not in _PASSED:
                router.leave(f"select_experts gets {name}")
                return result(topk_config)
        view = router.view(router_logits)
        if view is None:
            return result(topk_config)
        before = view.calls
        selected = result(view)
        if view.calls == before + 1:
            return selected
        router.leave("select_experts does not call the config's custom_routing_function")
        return result(topk_config)

    internals.HookRegistry.register(f"{_TOPK}.TopK.bind_runner_backend", bind_runner_backend, internals.HookType.AROUND)
    internals.HookRegistry.register(f"{_TOPK}.select_experts", select_experts, internals.HookType.AROUND)
