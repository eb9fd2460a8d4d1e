"""Chooses the method of a layer in a quantized model: the plugin's, or vLLM's with a logged reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._declared import (
    NVFP4_ALGORITHMS,
    Declared,
    declared_by_algorithms,
    declared_by_modelopt,
    declared_by_schemes,
    modelopt_algorithms,
)
from . import internals, methods
from .gate import gate_or
from .plan import COMPRESSED, GPT_OSS, MXFP4, NVFP4, left_to_vllm, plan_of

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_routed_experts = internals.find("vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts")
_current_config = internals.find("vllm.config:get_current_vllm_config")


def method_of(format_name: str, config: Any, layer: Any, prefix: str, stock: Callable[[], Any]) -> Any:
    """Returns the method of a layer under one of the plugin's configs. stock() returns the base config's method.

    Raises what plan_of raises. If the plugin refused the experts and vLLM has no kernel for them either, it raises
    vLLM's exception, with the refusal as a warning before it and as a note on it.
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
    """Returns whether vLLM's ModelOpt config leaves a layer unquantized because of its name: vision towers."""
    return any(word in prefix for word in ("vision_tower", "vision_model", "vit_large_projector"))


def _of_modelopt_fp4(config: Any, layer: Any, prefix: str) -> Any:
    if config.is_layer_excluded(prefix) or _is_vision(prefix):
        return None
    declared = declared_by_modelopt(getattr(config, "quant_method", "NVFP4"), _config_groups())
    plan = plan_of(layer, prefix, declared=declared)
    return plan and methods.modelopt_method()(config, layer.moe_config, plan)


def _config_groups() -> Any:
    """Reads config_groups, next to ModelOpt's quant_algo, from the model's config.json; vLLM's config drops them."""
    model = getattr(_current_config(), "model_config", None)
    quantization = getattr(getattr(model, "hf_config", None), "quantization_config", None)
    return quantization.get("config_groups") if isinstance(quantization, Mapping) else None


def _of_modelopt_mixed(config: Any, layer: Any, prefix: str) -> Any:
    if config.is_layer_excluded(prefix):
        return None
    algorithm = config._resolve_quant_algo(prefix)
    candidates = getattr(config, "_quantized_layer_prefix_candidates", lambda name: (name,))(prefix)
    algorithms = modelopt_algorithms(config.quantized_layers, candidates, _projections(layer)) or {prefix: algorithm}
    if not NVFP4_ALGORITHMS.intersection(algorithms.values()):
        return None
    if not (plan := plan_of(layer, prefix, declared=declared_by_algorithms(algorithms))):
        return None
    own = config.nvfp4_config if algorithm == "NVFP4" else config.w4a16_nvfp4_config
    return methods.modelopt_method()(own, layer.moe_config, plan)


def _projections(layer: Any) -> list[str]:
    """Returns the checkpoint's names of gate, up and down. Experts without a gate have no name for the second."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [name for name in names if name]


def _of_compressed_tensors(config: Any, layer: Any, prefix: str) -> Any:
    config._add_fused_moe_to_target_scheme_map()
    names = [f"{prefix}.0.{name}" for name in _projections(layer)]
    schemes = {name: config.get_scheme_dict(layer=layer, layer_name=name) or {} for name in names}
    declared = declared_by_schemes(schemes, config._is_nvfp4_format)
    plan = declared and plan_of(layer, prefix, COMPRESSED, declared)
    return plan and methods.compressed_tensors_method()(layer.moe_config, plan)


def _of_deepseek_v4(config: Any, layer: Any, prefix: str) -> Any:
    skipped = internals.find(f"{_QUANTIZATION}.utils.quant_utils:is_layer_skipped")
    mapping = config.packed_modules_mapping
    if config.expert_dtype != "fp4" or skipped(
        prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=mapping
    ):
        return None
    is_nvfp4 = _has_nvfp4_experts(config, prefix)
    declared = declared_by_modelopt("NVFP4") if is_nvfp4 else Declared("fp8", "quant_method fp8 over MXFP4 experts")
    plan = plan_of(layer, prefix, NVFP4 if is_nvfp4 else MXFP4, declared)
    if plan is None:
        return None
    if is_nvfp4:
        return methods.modelopt_method()(config._get_nvfp4_config(), layer.moe_config, plan)
    return methods.mxfp4_method()(layer.moe_config, plan)


def _has_nvfp4_experts(config: Any, prefix: str) -> bool:
    """Returns whether ModelOpt's export quantized this layer.

    It leaves ignored experts in MXFP4; newer vLLM can tell.
    """
    if by_layer := getattr(config, "_is_nvfp4_expert_layer", None):
        return bool(by_layer(prefix))
    return bool(config.moe_quant_algo == "NVFP4")


def _of_gpt_oss(config: Any, layer: Any, prefix: str) -> Any:
    plan = plan_of(layer, prefix, GPT_OSS, Declared("bf16", "quant_method mxfp4"))
    return plan and methods.gpt_oss_method()(layer.moe_config, plan)


_OWN: dict[str, Callable[[Any, Any, str], Any]] = {
    "modelopt_fp4": _of_modelopt_fp4,
    "modelopt_mixed": _of_modelopt_mixed,
    "compressed-tensors": _of_compressed_tensors,
    "deepseek_v4_fp8": _of_deepseek_v4,
    "gpt_oss_mxfp4": _of_gpt_oss,
}
