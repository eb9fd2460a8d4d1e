"""ModelOpt's NVFP4 experts: hooks on the methods of SGLang's own class.

The class itself stays in its place, since other modules ask isinstance of it; each of its objects is SGLang's own, or, once
create_weights has seen a layer that the library takes, the adapter's. Before that its __init__ is held back: on a GPU that
SGLang has no kernel for, or a CPU, it would refuse. Subclasses (experts quantized while they are loaded) are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import Unsupported
from .._fused_experts import Settings
from . import internals
from .experts import MODELOPT, Experts
from .refusals import Refused, check_server, is_first_rank, layer_name, layer_options, refuse
from .runner import BACKEND, NvFp4MoeQuantInfo, make_runner

TARGET = "sglang.srt.layers.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod"
_STATE = "nvfp4_moe_state"
Method = Callable[..., Any]


class _Undecided:
    """An object whose layer is not known yet. own_init is SGLang's __init__, which runs if the layer is not taken."""

    def __init__(self, own_init: Callable[[], Any]):
        self.own_init = own_init


def output_scale(layer: Any) -> float | None:
    """routed_scaling_factor where the router has not multiplied its weights by it."""
    factor = layer.moe_runner_config.routed_scaling_factor
    return None if factor is None or layer.should_fuse_routed_scaling_factor_in_topk else float(factor)


class Hooks:
    """One process's hooks. settings: what the environment asks for."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def register(self) -> None:
        for name in (
            "__init__",
            "create_weights",
            "process_weights_after_loading",
            "create_moe_runner",
            "get_moe_quant_info",
            "apply",
        ):
            hook = getattr(self, name.strip("_"))
            internals.HookRegistry.register(f"{TARGET}.{name}", hook, internals.HookType.AROUND)

    def init(self, own: Method, method: Any, quant_config: Any) -> None:
        is_plain = type(method) is internals.ModelOptNvFp4FusedMoEMethod
        if not is_plain or not getattr(quant_config, "is_checkpoint_nvfp4_serialized", False):
            own(method, quant_config)
            return
        try:
            check_server()
        except Refused as refused:
            refuse("experts of ModelOpt", refused, self._settings)
            own(method, quant_config)
            return
        method.quant_config = quant_config
        # What SGLang's own __init__ sets for a backend without a layout of its own.
        method._lora_marlin = method.enable_flashinfer_trtllm_moe = method.use_flashinfer_trtllm_weight_layout = False
        method._cache_permute_indices = {}
        setattr(method, _STATE, _Undecided(lambda: own(method, quant_config)))

    def create_weights(self, own: Method, method: Any, layer: Any, *sizes: Any, **named: Any) -> None:
        undecided = getattr(method, _STATE, None)
        if undecided is None:
            own(method, layer, *sizes, **named)
            return
        names = ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")
        values = dict(zip(names, sizes, strict=False)) | named
        extra = {key: value for key, value in values.items() if key not in names}
        inner = int(values["intermediate_size_per_partition"])
        try:
            if getattr(method.quant_config, "is_awq", False):
                raise Refused("NVFP4_AWQ: scales of the input's channels are not read")
            if method.quant_config.group_size not in (None, 16):
                raise Refused(f"group_size: expected 16, got {method.quant_config.group_size}")
            options = layer_options(layer, values["hidden_size"], inner, self._settings, extra)
        except Refused as refused:
            refuse(layer_name(layer), refused, self._settings)
            delattr(method, _STATE)
            undecided.own_init()
            own(method, layer, *sizes, **named)
            return
        layer.intermediate_size_per_partition = inner
        layer.params_dtype, layer.quant_config = values["params_dtype"], method.quant_config
        experts = Experts(layer_name(layer), MODELOPT, options, is_first_rank(layer))
        experts.create(layer, int(values["num_experts"]), int(layer.num_experts), extra)
        setattr(method, _STATE, experts)

    def process_weights_after_loading(self, own: Method, method: Any, layer: Any) -> None:
        experts = getattr(method, _STATE, None)
        if experts is None:
            own(method, layer)
            return
        if getattr(layer, "inference_moe_w13_interleaved", False):
            raise Unsupported(f"{layer_name(layer)}: rows of gate and up alternate, which is not read. Set NVFP4_MOE=0")
        experts.pack(layer)

    def create_moe_runner(self, own: Method, method: Any, layer: Any, moe_runner_config: Any) -> None:
        if getattr(method, _STATE, None) is None:
            own(method, layer, moe_runner_config)
            return
        method.moe_runner_config = moe_runner_config
        method._moe_runner_backend = internals.resolve_moe_runner_backend(BACKEND)
        method.runner = make_runner(moe_runner_config)

    def get_moe_quant_info(self, own: Method, method: Any, layer: Any, runner_backend: Any) -> Any:
        experts = getattr(method, _STATE, None)
        if experts is None or runner_backend.value != BACKEND:
            return own(method, layer, runner_backend)
        return NvFp4MoeQuantInfo(experts.ready().layer, output_scale(layer))

    def apply(self, own: Method, method: Any, layer: Any, dispatch_output: Any) -> Any:
        experts = getattr(method, _STATE, None)
        if experts is None:
            return own(method, layer, dispatch_output)
        info = NvFp4MoeQuantInfo(experts.ready().layer, output_scale(layer))
        return method.runner.run(dispatch_output, info)
