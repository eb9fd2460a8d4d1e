"""The quantization configs, each a subclass of the one that vLLM has under the same name, which it registers itself as.

A name of its own would lose what vLLM decides by the literal names. A class is made right after vLLM has imported its base,
which vLLM does before it resolves a quantization method; so a process without a quantized model pays nothing. If another
plugin has registered a config under the name, that is the base. This file imports nothing of vLLM; taking.py does, when the
first layer asks for a method.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from . import internals, late, release

_QUANTIZATION = "vllm.model_executor.layers.quantization"
# By class: the format, and vLLM's class. vLLM sends the config of an engine to its workers, which find a class by its name
# here, before plugins are loaded there.
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
    # Releases that have it import it on GPUs only, and take it for DeepSeek-V4 too.
    "NvFp4MoeDeepseekV41Config": ("deepseek_v4_fp8", "vllm.models.deepseek_v41.quant_config:DeepseekV4FP8Config"),
    "NvFp4MoeGptOssConfig": ("gpt_oss_mxfp4", f"{_QUANTIZATION}.mxfp4:GptOssMxfp4Config"),
}
_BEFORE = {"NvFp4MoeDeepseekV4Config": "NvFp4MoeDeepseekV41Config"}  # which stays registered once it is


def _registered(format_name: str) -> Any:
    """The class that a plugin has registered for a format, or None."""
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
    """A class by its name: made once, over what is registered for its format then, or over vLLM's."""
    if name not in globals():
        format_name, stock = _CONFIGS[name]
        base = _registered(format_name)
        if base is None or getattr(base, "nvfp4_moe_config", False):
            base = internals.find(stock)
        if name not in globals():  # else importing the base has made it
            globals()[name] = _made(name, format_name, base)
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        return _config(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _take(name: str) -> None:
    """Registers a class whose base vLLM has imported. A module without the base is of a release that does not fit."""
    format_name, stock = _CONFIGS[name]
    there = _registered(format_name)
    if internals.find_or_none(stock) is None or getattr(there, "__name__", "") in (name, _BEFORE.get(name)):
        return
    # Some releases warn of each name that is overwritten.
    log = logging.getLogger(_QUANTIZATION)
    was_disabled, log.disabled = log.disabled, True
    try:
        importlib.import_module(_QUANTIZATION).register_quantization_config(format_name)(_config(name))
    finally:
        log.disabled = was_disabled


_takes = {name: functools.partial(_take, name) for name in _CONFIGS}


def register() -> None:
    """Has each class registered once vLLM has imported its base: now, if it has."""
    release.forget()
    modules = {name: stock.partition(":")[0] for name, (_, stock) in _CONFIGS.items()}
    fits = None
    if all(modules[name] in sys.modules for name in _CONFIGS if name not in _BEFORE.values()):
        fits = release.fitting()  # costs nothing now, and says at once what does not fit
    for name, (format_name, _) in _CONFIGS.items():
        if fits is None or format_name in fits:
            late.after_import(modules[name], _takes[name])
