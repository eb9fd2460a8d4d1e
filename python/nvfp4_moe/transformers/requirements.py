"""What this adapter takes from transformers, checked by name before any of it is used."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

TESTED = "5.16 to 5.23"

# (module, dotted name in it, parameters that a call of it passes)
_NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("transformers.conversion_mapping", "get_model_conversion_mapping", ("model",)),
    ("transformers.core_model_loading", "WeightConverter", ()),
    ("transformers.core_model_loading", "WeightRenaming", ()),
    (
        "transformers.core_model_loading",
        "rename_source_key",
        ("source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
    ),
    ("transformers.integrations.moe", "use_experts_implementation", ("has_gate", "has_bias", "is_transposed")),
    ("transformers.modeling_utils", "PreTrainedModel._get_dtype_plan", ("dtype",)),
    ("transformers.quantizers.auto", "AUTO_QUANTIZATION_CONFIG_MAPPING", ()),
    ("transformers.quantizers.auto", "AUTO_QUANTIZER_MAPPING", ()),
    (
        "transformers.quantizers.auto",
        "AutoHfQuantizer.merge_quantization_configs",
        ("quantization_config", "quantization_config_from_args"),
    ),
    ("transformers.quantizers.base", "HfQuantizer._process_model_before_weight_loading", ("model",)),
    ("transformers.quantizers.base", "HfQuantizer._process_model_after_weight_loading", ("model",)),
    ("transformers.quantizers.base", "HfQuantizer.update_weight_conversions", ("weight_conversions",)),
    ("transformers.quantizers.base", "HfQuantizer.update_device_map", ("device_map",)),
    ("transformers.utils.quantization_config", "QuantizationConfigMixin", ()),
)


def _lacks(module: str, name: str, parameters: tuple[str, ...]) -> str | None:
    """What is not there, as a dotted name; None where all is."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"{module}.{name}"
    if parameters:
        known = inspect.signature(found).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            return f"{module}.{name}({', '.join(missing)})"
    return None


def check() -> None:
    """Raises ImportError with one sentence where transformers is not installed, or lacks what the adapter needs."""
    ask = f"nvfp4_moe.transformers: expected transformers {TESTED}"
    remedy = "pip install 'transformers>=5.16,<5.24'"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{ask}, found none that imports ({error}); {remedy}") from error
    lacking = [missing for needed in _NEEDED if (missing := _lacks(*needed)) is not None]
    if lacking:
        raise ImportError(f"{ask}, found {transformers.__version__}, which lacks {', '.join(lacking)}; {remedy}")
