"""The members of transformers that this adapter uses, checked before any of them is used."""

from __future__ import annotations

TESTED = "5.16 to 5.24"

# nvfp4_moe._signatures defines the entries. Plain data, which nvfp4_moe.engines reads without importing transformers.
REQUIRED: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "core": (
        ("calls", "transformers.conversion_mapping:get_model_conversion_mapping", ("model",)),
        ("has", "transformers.core_model_loading:WeightConverter", ()),
        ("has", "transformers.core_model_loading:WeightRenaming", ()),
        (
            "calls",
            "transformers.core_model_loading:rename_source_key",
            ("source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
        ),
        (
            "calls",
            "transformers.integrations.moe:use_experts_implementation",
            ("has_gate", "has_bias", "is_transposed"),
        ),
        ("calls", "transformers.modeling_utils:PreTrainedModel._get_dtype_plan", ("dtype",)),
        ("calls", "transformers.modeling_utils:PreTrainedModel.disable_input_require_grads", ()),
        ("overrides", "transformers.modeling_utils:PreTrainedModel.enable_input_require_grads", ()),
        ("overrides", "transformers.modeling_utils:PreTrainedModel.gradient_checkpointing_disable", ()),
        ("has", "transformers.quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING", ()),
        ("has", "transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING", ()),
        (
            "calls",
            "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
            ("quantization_config", "quantization_config_from_args"),
        ),
        ("calls", "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading", ("model",)),
        ("calls", "transformers.quantizers.base:HfQuantizer._process_model_after_weight_loading", ("model",)),
        # Overridden with any arguments; from 5.23 on the model is one of them.
        ("passes", "transformers.quantizers.base:HfQuantizer.update_weight_conversions", ()),
        ("calls", "transformers.quantizers.base:HfQuantizer.update_device_map", ("device_map",)),
        ("has", "transformers.utils.quantization_config:QuantizationConfigMixin", ()),
    ),
}


def check() -> None:
    """Raises ImportError with one sentence if transformers is missing or lacks a member that the adapter needs."""
    from .._signatures import misfits

    ask = f"nvfp4_moe.transformers: expected transformers {TESTED}"
    remedy = "pip install 'transformers>=5.16,<5.25'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{ask}, found none that imports ({error}); {remedy}") from error
    if problems := misfits(REQUIRED).get("core"):
        raise ImportError(f"{ask}, found {transformers.__version__}: {'; '.join(problems)}; {remedy}")
