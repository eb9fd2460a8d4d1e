"""Nvfp4MoeConfig: options for loading a model's NVFP4 weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import _core
from .._declared import Declared, choose_activations
from ..config import MoeConfig

METHOD = "nvfp4_moe"

# Not options: a layer's sizes come from the files, and its shared expert is a separate module of the model.
_SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size", "shared_intermediate_size")
_OPTIONS = tuple(field.name for field in dataclasses.fields(MoeConfig) if field.name not in _SIZES)
_LINEAR_OPTIONS = ("activation_format", "activation_scale", "static_headroom")


class Nvfp4MoeConfig(QuantizationConfigMixin):
    """The quantization_config of from_pretrained, for any checkpoint that nvfp4_moe reads.

    Args:
        max_tokens: The most tokens of one run of a layer. Longer batches run in parts.
        backend: "auto", or a name from nvfp4_moe.explain().
        cache_directory: Keeps packed experts here and reads them on the next start.
        gate_up_order, accept_tensors, family: As in nvfp4_moe.Checkpoint.
        options: Fields of nvfp4_moe.MoeConfig that replace the checkpoint's, for example activation_format="bf16".
            activation_format, activation_scale and static_headroom also apply to NVFP4 linears. Without an
            activation_format, or with "auto", experts run in the format that the checkpoint declares or a more precise
            one (nvfp4_moe.choose_activation_format), and linears in the declared format.

    Raises:
        ValueError: An unknown option, or max_tokens below 1.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 8192,
        backend: str = "auto",
        cache_directory: str | os.PathLike[str] | None = None,
        gate_up_order: str | None = None,
        accept_tensors: Sequence[str] = (),
        family: str = "",
        **options: Any,
    ) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise _core.InvalidArgument(
                    f"Nvfp4MoeConfig: expected max_tokens, backend, cache_directory, gate_up_order, accept_tensors, "
                    f"family, {', '.join(_OPTIONS)}, got {name}"
                )
        if max_tokens < 1:
            raise _core.InvalidArgument(f"Nvfp4MoeConfig max_tokens: expected 1 or more, got {max_tokens}")
        self.quant_method = METHOD
        self.max_tokens = max_tokens
        self.backend = backend
        self.cache_directory = None if cache_directory is None else os.fspath(cache_directory)
        self.gate_up_order = gate_up_order
        self.accept_tensors = list(accept_tensors)
        self.family = family
        self.options = options
        self.checkpoint: dict[str, Any] | None = None  # the quantization_config of the checkpoint's config.json

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Makes the config of a checkpoint loaded without one: its own quantization_config and our defaults.

        Restores a config that to_dict() of this class wrote.
        """
        if config_dict.get("quant_method") == METHOD:
            config = cls(**{name: value for name, value in config_dict.items() if name != "quant_method"})
        else:
            config = cls().of_checkpoint(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def of_checkpoint(self, declared: Any) -> Nvfp4MoeConfig:
        """Returns a copy with the quantization_config (a dict or a config object) of the checkpoint's config.json."""
        config = copy.deepcopy(self)
        config.checkpoint = copy.deepcopy(declared if isinstance(declared, dict) else declared.to_dict())
        return config

    def linear_options(self) -> dict[str, Any]:
        """Returns the options that Nvfp4Linear.from_tensors takes."""
        given = {name: value for name, value in self.options.items() if name in _LINEAR_OPTIONS}
        return {name: value for name, value in given.items() if (name, value) != ("activation_format", "auto")}

    def activations(self, checkpoint: Any, layer: int, device: str) -> tuple[str, str]:
        """Returns (activation_format, why) for a layer's experts on a device.

        If the caller chose a scale, the declared format is used.
        """
        fields = json.loads(_core.checkpoint_options(checkpoint, layer, None))
        declared = Declared(fields["activation_format"], "by the checkpoint")
        options = {**fields, "shared_intermediate_size": 0, **self.options}
        asked = options.pop("activation_format") if "activation_format" in self.options else "auto"
        if asked == "auto" and any(
            self.options.get(name, "dynamic_token") != "dynamic_token"
            for name in ("activation_scale", "intermediate_scale")
        ):
            return declared.format, "the scale that was asked for belongs to what is declared"
        return choose_activations(options, device, asked, declared, self.backend)

    def to_dict(self) -> dict[str, Any]:
        """Returns the checkpoint's quantization_config, or this config for a model that was quantized in memory."""
        if self.checkpoint is not None:
            return copy.deepcopy(self.checkpoint)
        reading = ("gate_up_order", "accept_tensors", "family")
        names = ("quant_method", "max_tokens", "backend", "cache_directory", *reading)
        fields = {name: copy.copy(getattr(self, name)) for name in names}
        return {**fields, **copy.deepcopy(self.options)}
