"""Registers the quantizer with transformers: under two method names, and for a config that a caller passes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from .config import METHOD, Nvfp4MoeConfig
from .quantizer import Nvfp4MoeQuantizer

log = logging.getLogger("nvfp4_moe.transformers")


def _ours(registered: Any, ours: type) -> bool:
    """Returns whether it is the same class, even if a reload imported this module a second time."""
    return (registered.__module__, registered.__qualname__) == (ours.__module__, ours.__qualname__)


def register() -> None:
    """Registers the method names "modelopt" and "nvfp4_moe" with transformers. A second call changes nothing."""
    for method in (METHOD, "modelopt"):
        taken = AUTO_QUANTIZER_MAPPING.get(method), AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        ours = Nvfp4MoeQuantizer, Nvfp4MoeConfig
        if any(there is not None and not _ours(there, own) for there, own in zip(taken, ours, strict=True)):
            log.warning(
                "transformers has a quantizer of its own for %r: it stays, and quantization_config=Nvfp4MoeConfig() takes this one",
                method,
            )
            continue
        AUTO_QUANTIZER_MAPPING[method], AUTO_QUANTIZATION_CONFIG_MAPPING[method] = ours
    _prefer_given_config()


def _warn_of_stock(declared: Any) -> None:
    """Warns of checkpoints whose NVFP4 experts transformers 5.17 loads wrongly without an error."""
    fields = declared if isinstance(declared, dict) else declared.to_dict()
    named = (fields.get("format"), str(fields.get("moe_quant_algo")).upper())
    if "nvfp4-pack-quantized" in named or "NVFP4" in named:
        log.warning(
            "quant_method %r is transformers' own, which loads NVFP4 experts of this checkpoint with wrong scales; pass "
            "quantization_config=nvfp4_moe.transformers.Nvfp4MoeConfig()",
            fields.get("quant_method"),
        )


def _prefer_given_config() -> None:
    """Gives an Nvfp4MoeConfig from the caller precedence over the method that the checkpoint names.

    transformers compares the class names of the two configs and has no hook for it. Other configs are not affected.
    """
    stock = AutoHfQuantizer.__dict__["merge_quantization_configs"].__func__
    stock = getattr(stock, "nvfp4_moe_stock", stock)

    @functools.wraps(stock)
    def merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config_from_args, Nvfp4MoeConfig):
            return quantization_config_from_args.of_checkpoint(quantization_config)
        _warn_of_stock(quantization_config)
        return stock(cls, quantization_config, quantization_config_from_args)

    merge.nvfp4_moe_stock = stock  # type: ignore[attr-defined]
    AutoHfQuantizer.merge_quantization_configs = classmethod(merge)
