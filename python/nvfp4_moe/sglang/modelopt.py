"""ModelOpt's NVFP4 experts: hooks on the methods of SGLang's class.

Its __init__ is delayed until the layer is known, because it fails on CPUs and on GPUs for which SGLang has no kernel.
Experts that are quantized during loading use a subclass, which is not hooked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import Unsupported
from .._declared import Declared, Refused, declared_by_algorithms, declared_by_modelopt, modelopt_algorithms
from . import internals
from .experts import MODELOPT
from .hooks import Hooks, Method
from .refusals import layer_name


def _config_of(quant_config: Any) -> Any:
    """Returns the only argument of __init__."""
    return quant_config


class ModelOptHooks(Hooks):
    target = "sglang.srt.layers.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod"
    what = "experts of ModelOpt"
    form = MODELOPT
    names = (*Hooks.names, "get_moe_quant_info")

    def is_plain(self, method: Any, *inputs: Any, **named: Any) -> bool:
        is_serialized = getattr(_config_of(*inputs, **named), "is_checkpoint_nvfp4_serialized", False)
        return type(method) is internals.ModelOptNvFp4FusedMoEMethod and bool(is_serialized)

    def hold_back(self, own: Callable[[], Any], method: Any, *inputs: Any, **named: Any) -> Callable[[], Any]:
        method.quant_config = _config_of(*inputs, **named)
        # SGLang's __init__ sets the same values for a backend without its own layout.
        method._lora_marlin = method.enable_flashinfer_trtllm_moe = method.use_flashinfer_trtllm_weight_layout = False
        method._cache_permute_indices = {}
        return own

    def check(self, method: Any, layer: Any) -> None:
        if getattr(method.quant_config, "is_awq", False):
            raise Refused("NVFP4_AWQ: scales of the input's channels are not read")
        if method.quant_config.group_size not in (None, 16):
            raise Refused(f"group_size: expected 16, got {method.quant_config.group_size}")

    def declared(self, method: Any, layer: Any) -> Declared | Refused:
        whole, name = getattr(layer, "quant_config", None), layer_name(layer)
        if layers := getattr(whole, "quantized_layers", None):
            candidates = getattr(whole, "_quantized_layer_prefix_candidates", lambda prefix: (prefix,))(name)
            algorithms = modelopt_algorithms(layers, candidates, ("gate_proj", "up_proj", "down_proj"))
            if algorithms:
                return declared_by_algorithms(algorithms)
        is_w4a16 = bool(getattr(method.quant_config, "is_w4a16", False))
        return declared_by_modelopt("W4A16_NVFP4" if is_w4a16 else "NVFP4", internals.config_groups())

    def create_weights(self, own: Method, method: Any, layer: Any, *sizes: Any, **named: Any) -> None:
        super().create_weights(own, method, layer, *sizes, **named)
        if self.has_taken(method):
            layer.quant_config = method.quant_config

    def process_weights_after_loading(self, own: Method, method: Any, layer: Any) -> None:
        if self.has_taken(method) and getattr(layer, "inference_moe_w13_interleaved", False):
            raise Unsupported(
                f"{layer_name(layer)}: rows of gate and up alternate, which is not read. Set NVFP4_MOE_MODE=0"
            )
        super().process_weights_after_loading(own, method, layer)
