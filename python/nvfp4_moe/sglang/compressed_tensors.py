"""compressed-tensors' NVFP4 experts, W4A4 and W4A16. A hook gives a layer this scheme instead of SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import Unsupported
from .._declared import Declared, Refused, declared_by_schemes, plain
from .._settings import Settings
from . import internals
from .experts import COMPRESSED_W4A4, COMPRESSED_W4A16, Experts, Format
from .hooks import output_scale
from .refusals import check_loading, is_first_rank, layer_options, refuse
from .refusals import layer_name as name_of
from .runner import BACKEND, NvFp4MoeQuantInfo, make_runner

TARGET = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig.get_moe_scheme"


def _is_nvfp4(arguments: Any) -> bool:
    """Returns whether compressed-tensors' QuantizationArgs are NVFP4: groups of 16 E2M1 codes and one tensor scale."""
    return (
        arguments is not None
        and arguments.num_bits == 4
        and plain(arguments.type) == "float"
        and plain(arguments.strategy) == "tensor_group"
        and arguments.group_size == 16
        and bool(arguments.symmetric)
    )


def _declared(config: Any, layer: Any, layer_name: str | None) -> tuple[Format, Declared | Refused] | None:
    """Returns the parameters' format and the declared activations, or None if no expert matrix is NVFP4."""
    config._add_fused_moe_to_target_scheme_map()
    matrices = ("gate_proj", "up_proj", "down_proj")[0 if layer.moe_runner_config.is_gated else 1 :]
    names = [f"{layer_name}.0.{matrix}" for matrix in matrices]
    schemes = {name: config.get_scheme_dict(layer, name) or {} for name in names}
    declared = declared_by_schemes(schemes, _is_nvfp4)
    if declared is None:
        return None
    # Input scales have parameters if any matrix has them in the files.
    weight_only = all(scheme.get("input_activations") is None for scheme in schemes.values())
    return COMPRESSED_W4A16 if weight_only else COMPRESSED_W4A4, declared


class NvFp4MoeScheme(internals.CompressedTensorsMoEScheme):  # type: ignore[misc]
    """The scheme of a layer that the adapter took."""

    def __init__(self, experts: Experts):
        self._experts = experts

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **extra: Any,
    ) -> None:
        try:
            check_loading(extra)
        except Refused as refused:  # too late to leave the layer to SGLang: it already has this scheme
            raise Unsupported(f"{name_of(layer)}: {refused}. NVFP4_MOE_MODE=0 leaves the model to SGLang") from refused
        layer.params_dtype = params_dtype
        self._experts.create(layer, num_experts, int(layer.num_experts), extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        self._experts.pack(layer)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.moe_runner_config = moe_runner_config
        self.runner = make_runner(moe_runner_config)

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return internals.resolve_moe_runner_backend(BACKEND)

    def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
        info = NvFp4MoeQuantInfo(self._experts.ready().layer, output_scale(layer))
        return self.runner.run(dispatch_output, info)


def register(settings: Settings) -> None:
    """Hooks the method that gives each layer its scheme."""

    def get_moe_scheme(own: Callable[..., Any], config: Any, layer: Any, layer_name: str | None = None) -> Any:
        name = layer_name or name_of(layer)
        sizes = layer.hidden_size, layer.moe_runner_config.intermediate_size_per_partition
        try:
            found = _declared(config, layer, layer_name)
            if found is None:
                return own(config, layer, layer_name)
            form, declared = found
            options, activations = layer_options(layer, *sizes, settings, {}, False, declared)
        except Refused as refused:
            refuse(name, refused, settings)
            return own(config, layer, layer_name)
        return NvFp4MoeScheme(Experts(name, form, options, is_first_rank(layer), activations))

    internals.HookRegistry.register(TARGET, get_moe_scheme, internals.HookType.AROUND)
