"""The members of transformers that this adapter uses, checked before any of them is used."""

from __future__ import annotations

# Releases whose members were compared with the table. check() compares any other one.
RELEASES = ("5.16", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")

# nvfp4_moe._signatures defines the entries. Plain data, which nvfp4_moe.engines reads without importing transformers.
REQUIRED: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "core": (
        ("calls", "transformers.conversion_mapping:get_model_conversion_mapping", ("model",)),
        ("has", "transformers.core_model_loading:WeightConverter", ("rename_source_key", "target_patterns")),
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
        (
            "has",
            "transformers.modeling_utils:PreTrainedModel",
            (
                "_keys_to_ignore_on_load_missing",
                "_keys_to_ignore_on_load_unexpected",
                "_tied_weights_keys",
                "all_tied_weights_keys",
                "base_model_prefix",
            ),
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
        ("overrides", "transformers.quantizers.base:HfQuantizer.update_dtype", ("dtype",)),
        ("passes", "transformers.quantizers.base:HfQuantizer.is_serializable", ()),
        ("has", "transformers.quantizers.base:HfQuantizer", ("is_compileable", "is_trainable")),
        ("has", "transformers.utils.hub:cached_file", ()),
        ("has", "transformers.utils.logging:tqdm", ()),
        ("has", "transformers.utils.quantization_config:QuantizationConfigMixin", ()),
    ),
}


def check() -> None:
    """Raises ImportError with one sentence if transformers is missing or lacks a member that the adapter needs."""
    from .._signatures import misfits

    first, last = RELEASES[0], RELEASES[-1]
    major, minor = last.split(".")
    ask = f"nvfp4_moe.transformers: expected transformers {first} to {last}"
    remedy = f"pip install 'transformers>={first},<{major}.{int(minor) + 1}'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{ask}, found none that imports ({error}); {remedy}") from error
    if problems := misfits(REQUIRED).get("core"):
        raise ImportError(f"{ask}, found {transformers.__version__}: {'; '.join(problems)}; {remedy}")
