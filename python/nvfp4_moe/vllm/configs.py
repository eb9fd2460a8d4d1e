"""The quantization configs, each a subclass of the one that vLLM has under the same name, which it registers itself as.

A name of its own would lose what vLLM decides by the literal names. The base is whatever is registered when this runs, so
that another plugin's config is built upon and not thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import internals, methods
from .experts import NvFp4MoeExperts
from .gate import gate_or
from .plan import GPT_OSS, MXFP4, NVFP4, plan_of

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_routed_experts = internals.find("vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts")
_register = internals.find(f"{_QUANTIZATION}:register_quantization_config")
_registered = internals.find(f"{_QUANTIZATION}:get_quantization_config")


def _modelopt_fp4(base: Any) -> type:
    method = methods.modelopt_method()

    class NvFp4MoeModelOptConfig(base):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, _routed_experts) and not self.is_layer_excluded(prefix) and not _is_vision(prefix):
                if plan := plan_of(layer, prefix):
                    return method(self, layer.moe_config, plan)
            return gate_or(super().get_quant_method(layer, prefix), layer, prefix)

    return NvFp4MoeModelOptConfig


def _is_vision(prefix: str) -> bool:
    """The towers that vLLM's ModelOpt config leaves unquantized by name."""
    return any(word in prefix for word in ("vision_tower", "vision_model", "vit_large_projector"))


def _modelopt_mixed(base: Any) -> type:
    method = methods.modelopt_method()

    class NvFp4MoeModelOptMixedConfig(base):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, _routed_experts) and not self.is_layer_excluded(prefix):
                algorithm = self._resolve_quant_algo(prefix)
                if algorithm in ("NVFP4", "W4A16_NVFP4") and (plan := plan_of(layer, prefix)):
                    own = self.nvfp4_config if algorithm == "NVFP4" else self.w4a16_nvfp4_config
                    return method(own, layer.moe_config, plan)
            return gate_or(super().get_quant_method(layer, prefix), layer, prefix)

    return NvFp4MoeModelOptMixedConfig


def _compressed_tensors(base: Any) -> type:
    method = methods.compressed_tensors_method()

    class NvFp4MoeCompressedTensorsConfig(base):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, _routed_experts) and self._is_nvfp4_everywhere(layer, prefix):
                if plan := plan_of(layer, prefix):
                    return method(layer.moe_config, plan)
            return gate_or(super().get_quant_method(layer, prefix), layer, prefix)

        def _is_nvfp4_everywhere(self, layer: Any, prefix: str) -> bool:
            """Whether all projections are NVFP4; what differs between them is vLLM's to refuse."""
            self._add_fused_moe_to_target_scheme_map()
            # Experts without a gate have no name for the second of them.
            names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            schemes = [self.get_scheme_dict(layer=layer, layer_name=f"{prefix}.0.{name}") for name in names if name]
            weights = [scheme.get("weights") if scheme else None for scheme in schemes]
            return all(self._is_nvfp4_format(weight) for weight in weights) and all(s == schemes[0] for s in schemes)

    return NvFp4MoeCompressedTensorsConfig


def _deepseek_v4(base: Any) -> type:
    nvfp4, mxfp4 = methods.modelopt_method(), methods.mxfp4_method()
    skipped = internals.find(f"{_QUANTIZATION}.utils.quant_utils:is_layer_skipped")

    class NvFp4MoeDeepseekV4Config(base):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, _routed_experts) and self.expert_dtype == "fp4" and not self._is_skipped(prefix):
                is_nvfp4 = self._has_nvfp4_experts(prefix)
                if plan := plan_of(layer, prefix, NVFP4 if is_nvfp4 else MXFP4):
                    if is_nvfp4:
                        return nvfp4(self._get_nvfp4_config(), layer.moe_config, plan)
                    return mxfp4(layer.moe_config, plan)
            return gate_or(super().get_quant_method(layer, prefix), layer, prefix)

        def _is_skipped(self, prefix: str) -> bool:
            mapping = self.packed_modules_mapping
            return bool(skipped(prefix=prefix, ignored_layers=self.ignored_layers, fused_mapping=mapping))

        def _has_nvfp4_experts(self, prefix: str) -> bool:
            """ModelOpt's exports keep the experts that they ignore in MXFP4; releases that know it can tell."""
            if by_layer := getattr(self, "_is_nvfp4_expert_layer", None):
                return bool(by_layer(prefix))
            return bool(self.moe_quant_algo == "NVFP4")

    return NvFp4MoeDeepseekV4Config


def _gpt_oss(base: Any) -> type:
    method = methods.gpt_oss_method()

    class NvFp4MoeGptOssConfig(base):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, _routed_experts) and (plan := plan_of(layer, prefix, GPT_OSS)):
                return method(layer.moe_config, plan)
            return gate_or(super().get_quant_method(layer, prefix), layer, prefix)

    return NvFp4MoeGptOssConfig


_MAKERS: dict[str, Callable[[Any], type]] = {
    "modelopt_fp4": _modelopt_fp4,
    "modelopt_mixed": _modelopt_mixed,
    "compressed-tensors": _compressed_tensors,
    "deepseek_v4_fp8": _deepseek_v4,
    "gpt_oss_mxfp4": _gpt_oss,
}
# vLLM sends the config of an engine to its workers: a class is found by its name here, before plugins are loaded there.
_NAMES = {
    "modelopt_fp4": "NvFp4MoeModelOptConfig",
    "modelopt_mixed": "NvFp4MoeModelOptMixedConfig",
    "compressed-tensors": "NvFp4MoeCompressedTensorsConfig",
    "deepseek_v4_fp8": "NvFp4MoeDeepseekV4Config",
    "gpt_oss_mxfp4": "NvFp4MoeGptOssConfig",
}


def _config_of(format_name: str) -> Any:
    """The class of a format: made once, over what vLLM has registered then."""
    name = _NAMES[format_name]
    if name not in globals():
        config: Any = _MAKERS[format_name](_registered(format_name))
        config.__qualname__ = config.__name__ = name
        config.nvfp4_moe_config = True
        globals()[name] = config
    return globals()[name]


def __getattr__(name: str) -> Any:
    for format_name, known in _NAMES.items():
        if name == known:
            return _config_of(format_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(formats: Sequence[str]) -> None:
    """Registers the configs of some formats; those that are registered already stay as they are."""
    if left := sorted(NvFp4MoeExperts.__abstractmethods__):
        raise TypeError(f"FusedMoEExpertsModular has abstract members that the plugin lacks: {', '.join(left)}")
    new = [name for name in formats if not getattr(_registered(name), "nvfp4_moe_config", False)]
    for name in new:
        _register(name)(_config_of(name))
    if new:
        internals.logger().info("nvfp4-moe takes the routed experts of %s", ", ".join(new))
