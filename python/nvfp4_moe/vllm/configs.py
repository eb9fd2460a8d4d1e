"""The plugin's quantization configs. Each is a subclass of vLLM's config and is registered under the same name.

With a name of its own it would lose the behavior that vLLM selects by literal names. A class is made right after vLLM
has imported its base, which happens before vLLM resolves a quantization method, so a process without a quantized model
pays nothing. If another plugin has registered a config under the name, that config is the base. This file imports
nothing of vLLM. taking.py does, when the first layer requests a method.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from . import internals, late, release

_QUANTIZATION = "vllm.model_executor.layers.quantization"
# Format and vLLM's class, by our class. vLLM sends the engine's config to its workers, which look up a class by its
# name here before they load plugins.
_CONFIGS = {
    "NvFp4MoeModelOptConfig": ("modelopt_fp4", f"{_QUANTIZATION}.modelopt:ModelOptNvFp4Config"),
    "NvFp4MoeModelOptMixedConfig": (
        "modelopt_mixed",
        f"{_QUANTIZATION}.modelopt:ModelOptMixedPrecisionConfig",
    ),
    "NvFp4MoeCompressedTensorsConfig": (
        "compressed-tensors",
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors:CompressedTensorsConfig",
    ),
    "NvFp4MoeDeepseekV4Config": ("deepseek_v4_fp8", "vllm.models.deepseek_v4.quant_config:DeepseekV4FP8Config"),
    # Releases that have this config import it only on GPUs, and use it for DeepSeek-V4 too.
    "NvFp4MoeDeepseekV41Config": ("deepseek_v4_fp8", "vllm.models.deepseek_v41.quant_config:DeepseekV4FP8Config"),
    "NvFp4MoeGptOssConfig": ("gpt_oss_mxfp4", f"{_QUANTIZATION}.mxfp4:GptOssMxfp4Config"),
}
_BEFORE = {"NvFp4MoeDeepseekV4Config": "NvFp4MoeDeepseekV41Config"}  # the latter takes precedence once registered


def _registered(format_name: str) -> Any:
    """Returns the class that a plugin has registered for a format, or None."""
    found = internals.find_or_none(f"{_QUANTIZATION}:_CUSTOMIZED_METHOD_TO_QUANT_CONFIG") or {}
    return found.get(format_name)


def _made(name: str, format_name: str, base: Any) -> type:
    class Config(base):  # type: ignore[misc]
        nvfp4_moe_config = True

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            stock = functools.partial(super().get_quant_method, layer, prefix)
            if format_name not in release.fitting():
                return stock()
            from .taking import method_of

            return method_of(format_name, self, layer, prefix, stock)

    Config.__name__ = Config.__qualname__ = name
    return Config


def _config(name: str) -> Any:
    """Returns a class by its name. Made once, derived from the class registered for its format, or from vLLM's."""
    if name not in globals():
        format_name, stock = _CONFIGS[name]
        base = _registered(format_name)
        if base is None or getattr(base, "nvfp4_moe_config", False):
            base = internals.find(stock)
        if name not in globals():  # importing the base may have made it
            globals()[name] = _made(name, format_name, base)
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        return _config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _take(name: str) -> None:
    """Registers a class whose base vLLM has imported. A release whose module lacks the base does not fit."""
    format_name, stock = _CONFIGS[name]
    there = _registered(format_name)
    if internals.find_or_none(stock) is None or getattr(there, "__name__", "") in (name, _BEFORE.get(name)):
        return
    # Some releases warn about each overwritten name.
    log = logging.getLogger(_QUANTIZATION)
    was_disabled, log.disabled = log.disabled, True
    try:
        importlib.import_module(_QUANTIZATION).register_quantization_config(format_name)(_config(name))
    finally:
        log.disabled = was_disabled


_takes = {name: functools.partial(_take, name) for name in _CONFIGS}


def register() -> None:
    """Registers each class as soon as vLLM has imported its base, or now if it already has."""
    release.forget()
    modules = {name: stock.partition(":")[0] for name, (_, stock) in _CONFIGS.items()}
    fits = None
    if all(modules[name] in sys.modules for name in _CONFIGS if name not in _BEFORE.values()):
        fits = release.fitting()  # costs nothing now, and reports misfits early
    for name, (format_name, _) in _CONFIGS.items():
        if fits is None or format_name in fits:
            late.after_import(modules[name], _takes[name])
