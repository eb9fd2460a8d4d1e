"""Which method a layer of a quantized model gets: the plugin's, or vLLM's own with the reason why the plugin has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import internals, methods
from .gate import gate_or
from .plan import GPT_OSS, MXFP4, NVFP4, left_to_vllm, plan_of

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_routed_experts = internals.find("vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts")

_modelopt = functools.cache(methods.modelopt_method)
_compressed = functools.cache(methods.compressed_tensors_method)
_mxfp4 = functools.cache(methods.mxfp4_method)
_gpt = functools.cache(methods.gpt_oss_method)


def method_of(format_name: str, config: Any, layer: Any, prefix: str, stock: Callable[[], Any]) -> Any:
    """The method of a layer under a config of the plugin. stock: what the config's base answers.

    Raises what plan_of raises, and what vLLM raises if it has no kernel for experts that the plugin refused: with the
    refusal in a warning before it, and as a note of the exception.
    """
    if isinstance(layer, _routed_experts):
        if method := _OWN[format_name](config, layer, prefix):
            return method
    try:
        return gate_or(stock(), layer, prefix)
    except Exception as error:
        left_to_vllm(prefix, error)
        raise


def _is_vision(prefix: str) -> bool:
    """The towers that vLLM's ModelOpt config leaves unquantized by name."""
    return any(word in prefix for word in ("vision_tower", "vision_model", "vit_large_projector"))


def _of_modelopt_fp4(config: Any, layer: Any, prefix: str) -> Any:
    if config.is_layer_excluded(prefix) or _is_vision(prefix):
        return None
    plan = plan_of(layer, prefix)
    return plan and _modelopt()(config, layer.moe_config, plan)


def _of_modelopt_mixed(config: Any, layer: Any, prefix: str) -> Any:
    if config.is_layer_excluded(prefix):
        return None
    algorithm = config._resolve_quant_algo(prefix)
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or not (plan := plan_of(layer, prefix)):
        return None
    own = config.nvfp4_config if algorithm == "NVFP4" else config.w4a16_nvfp4_config
    return _modelopt()(own, layer.moe_config, plan)


def _of_compressed_tensors(config: Any, layer: Any, prefix: str) -> Any:
    if not _is_nvfp4_everywhere(config, layer, prefix):
        return None
    plan = plan_of(layer, prefix)
    return plan and _compressed()(layer.moe_config, plan)


def _is_nvfp4_everywhere(config: Any, layer: Any, prefix: str) -> bool:
    """Whether all projections are NVFP4; what differs between them is vLLM's to refuse."""
    config._add_fused_moe_to_target_scheme_map()
    # Experts without a gate have no name for the second of them.
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    schemes = [config.get_scheme_dict(layer=layer, layer_name=f"{prefix}.0.{name}") for name in names if name]
    weights = [scheme.get("weights") if scheme else None for scheme in schemes]
    return all(config._is_nvfp4_format(weight) for weight in weights) and all(s == schemes[0] for s in schemes)


def _of_deepseek_v4(config: Any, layer: Any, prefix: str) -> Any:
    skipped = internals.find(f"{_QUANTIZATION}.utils.quant_utils:is_layer_skipped")
    mapping = config.packed_modules_mapping
    if config.expert_dtype != "fp4" or skipped(
        prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=mapping
    ):
        return None
    is_nvfp4 = _has_nvfp4_experts(config, prefix)
    plan = plan_of(layer, prefix, NVFP4 if is_nvfp4 else MXFP4)
    if plan is None:
        return None
    if is_nvfp4:
        return _modelopt()(config._get_nvfp4_config(), layer.moe_config, plan)
    return _mxfp4()(layer.moe_config, plan)


def _has_nvfp4_experts(config: Any, prefix: str) -> bool:
    """ModelOpt's exports keep the experts that they ignore in MXFP4; releases that know it can tell."""
    if by_layer := getattr(config, "_is_nvfp4_expert_layer", None):
        return bool(by_layer(prefix))
    return bool(config.moe_quant_algo == "NVFP4")


def _of_gpt_oss(config: Any, layer: Any, prefix: str) -> Any:
    plan = plan_of(layer, prefix, GPT_OSS)
    return plan and _gpt()(layer.moe_config, plan)


_OWN: dict[str, Callable[[Any, Any, str], Any]] = {
    "modelopt_fp4": _of_modelopt_fp4,
    "modelopt_mixed": _of_modelopt_mixed,
    "compressed-tensors": _of_compressed_tensors,
    "deepseek_v4_fp8": _of_deepseek_v4,
    "gpt_oss_mxfp4": _of_gpt_oss,
}
