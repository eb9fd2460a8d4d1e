"""Decides which of SGLang's layers the adapter takes: a layer's options, or the reason why SGLang runs it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from .. import Unsupported
from .._declared import WEIGHT_ONLY, Declared, Refused
from .._fused_experts import clamped, why_slice_refused, with_activations
from .._settings import Settings
from . import internals
from .runner import BACKEND

log = logging.getLogger("nvfp4_moe.sglang")

_said: set[str] = set()


def refuse(name: str, refused: Refused, settings: Settings) -> None:
    """Logs why a layer is left to SGLang, once for each reason. An error if the user insists."""
    if settings_now(settings).insists:
        raise Unsupported(f"{name}: {refused}. NVFP4_MOE_MODE=auto would leave it to SGLang") from refused
    if str(refused) not in _said:
        _said.add(str(refused))
        log.warning("%s: left to SGLang, and others for the same reason: %s", name, refused)


def settings_now(settings: Settings) -> Settings:
    """Returns the settings, updated from the command line: a user who names the backend insists on it."""
    chosen = internals.get_moe_runner_backend().value == BACKEND
    return dataclasses.replace(settings, mode="1") if chosen else settings


def check_server() -> None:
    """Raises Refused if the server's arguments request something that a packed layer cannot do."""
    backend = internals.get_moe_runner_backend()
    if not backend.is_auto() and backend.value != BACKEND and not internals.backend_is_sglangs_default():
        raise Refused(f"--moe-runner-backend is {backend.value}: expected auto or {BACKEND}")
    all_to_all = internals.get_moe_a2a_backend()
    if not all_to_all.is_none():
        raise Refused(f"--moe-a2a-backend {all_to_all.value}: expected none")
    for option, why in (
        ("enable_eplb", "packed experts cannot be moved between ranks"),
        ("enable_lora", "LoRA on experts is not supported"),
        ("kt_weight_path", "experts are shared with another runner"),
        ("enable_paged_experts", "experts are kept elsewhere"),
    ):
        if internals.server_argument(option):
            raise Refused(f"--{option.replace('_', '-')}: {why}")
    if (internals.server_argument("dwdp_size") or 1) > 1:
        raise Refused("--dwdp-size: experts are kept elsewhere")


def check_loading(extra: Mapping[str, Any], has_bias_parameters: bool = False) -> None:
    """Raises Refused depending on the arguments of create_weights other than sizes."""
    if extra.get("with_bias") and not has_bias_parameters:
        raise Refused("experts with biases in a format for which SGLang has no parameters of biases")
    if getattr(extra.get("weight_loader"), "__name__", "") == "weight_loader_fused":
        raise Refused("the model loads gate and up as one tensor, whose order is its own")


def _activation(config: Any) -> dict[str, Any]:
    """Returns activation and its numbers for a MoeRunnerConfig. Raises Refused."""
    if config.activation == "relu2" and not config.is_gated:
        return {"activation": "relu2"}
    if config.activation == "situ" and config.is_gated:
        if config.gemm1_alpha is None or config.gemm1_clamp_limit is None:
            raise Refused("activation situ: expected both limits, as Kimi-K3 has them")
        return {
            "activation": "situ",
            "situ_gate_limit": float(config.gemm1_alpha),
            "situ_up_limit": float(config.gemm1_clamp_limit),
        }
    if config.activation in ("gelu", "gelu_tanh") and config.is_gated:
        return {"activation": _gelu(config)}
    if config.activation != "silu" or not config.is_gated:
        raise Refused(
            f"activation {config.activation}, {'' if config.is_gated else 'not '}gated: expected a gated silu, gelu or "
            "situ, or relu2 that is not gated"
        )
    if config.gemm1_alpha is not None:
        if config.gemm1_clamp_limit is None or getattr(config, "gemm1_beta", None) not in (None, 1.0):
            raise Refused("gemm1_alpha: expected a clamp limit and 1 added to up, as gpt-oss and MiniMax-M3 have them")
        return {
            "activation": "swiglu_oai",
            "swiglu_limit": float(config.gemm1_clamp_limit),
            "swiglu_alpha": float(config.gemm1_alpha),
        }
    if config.gemm1_clamp_limit is not None:
        return {"activation": "swiglu_step", "swiglu_limit": float(config.gemm1_clamp_limit)}
    limit = None if config.swiglu_limit is None else float(config.swiglu_limit)
    return {"activation": clamped("swiglu", limit), "swiglu_limit": limit}


def _gelu(config: Any) -> str:
    """Returns which gelu a gated layer computes. Raises Refused.

    SGLang's "gelu" does not decide it: its Gemma-4 passes that name for either, and of its runners some compute it by
    tanh and others exactly. So the model's own config decides.
    """
    if config.gemm1_alpha is not None or config.gemm1_clamp_limit is not None or config.swiglu_limit is not None:
        raise Refused(f"activation {config.activation}: expected no limit and no alpha")
    if config.activation == "gelu_tanh":
        return "gelu_tanh"
    declared = internals.hidden_activation()
    known = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    if declared not in known:
        raise Refused(
            f"activation gelu: expected hidden_activation {' or '.join(known)} in the model's config.json, "
            f"got {declared}; the layer's name of it does not decide between gelu by tanh and exact gelu"
        )
    return known[declared]


def layer_options(
    layer: Any,
    hidden_size: int,
    intermediate_size: int,
    settings: Settings,
    extra: Mapping[str, Any],
    has_bias_parameters: bool = False,
    declared: Declared | Refused = WEIGHT_ONLY,
) -> tuple[dict[str, Any], str]:
    """Returns the layer's options as fields of MoeConfig, and their activations for the log. Raises Refused.

    extra has the arguments of create_weights other than sizes. has_bias_parameters: the format has parameters for
    biases. declared: the checkpoint's declaration for activations, or the reason why the checkpoint's layer cannot run.
    """
    if isinstance(declared, Refused):
        raise declared
    check_server()
    check_loading(extra, has_bias_parameters)
    config = layer.moe_runner_config
    if config.no_combine:
        raise Refused("no_combine: rows that are not combined are not given out")
    if config.top_k is None:
        raise Refused("top_k: expected a number, got None")
    options = {
        "num_experts": int(layer.num_experts),
        "top_k": int(config.top_k),
        "hidden_size": int(hidden_size),
        "intermediate_size": int(intermediate_size),
        "router_weight": "on_input" if config.apply_router_weight_on_input else "after_down",
        **_activation(config),
    }
    if extra.get("with_bias"):
        options["expert_biases"] = True
    if why := why_slice_refused(int(intermediate_size), int(layer.moe_tp_size), 16, "--ep-size"):
        raise Refused(why)
    return with_activations(options, torch.empty(0).device, settings_now(settings), declared)


def layer_name(layer: Any) -> str:
    """Names the layer in messages."""
    return str(layer.layer_name or f"layer {layer.layer_id}")


def is_first_rank(layer: Any) -> bool:
    """Returns whether this process logs for the ranks of its group."""
    return int(layer.moe_ep_rank) == 0 and int(layer.moe_tp_rank) == 0
