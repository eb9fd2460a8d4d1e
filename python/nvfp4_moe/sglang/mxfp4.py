"""gpt-oss' MXFP4 experts with biases: hooks on the methods of SGLang's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._declared import Declared, Refused
from .._mxfp4 import BLOCK, padded_to_blocks
from . import internals
from .experts import GPT_OSS
from .hooks import Hooks


class Mxfp4Hooks(Hooks):
    target = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod"
    what = "experts in MXFP4"
    form = GPT_OSS

    def is_plain(self, method: Any, *inputs: Any, **named: Any) -> bool:
        return type(method) is internals.Mxfp4MoEMethod

    def hold_back(self, own: Callable[[], Any], method: Any, *inputs: Any, **named: Any) -> Callable[[], Any]:
        own()
        return lambda: None

    def check(self, method: Any, layer: Any) -> None:
        config = layer.moe_runner_config
        if config.gemm1_alpha is None or not getattr(config, "gate_up_interleaved", True):
            raise Refused("MXFP4 experts of another form than gpt-oss', whose rows of gate and up alternate")
        hidden, real = int(layer.hidden_size), int(getattr(layer, "hidden_size_unpadded", layer.hidden_size))
        if hidden != real:  # SGLang pads by default on Blackwell, but not if the user names the library's backend
            raise Refused(f"hidden size {real} padded to {hidden} for SGLang's flashinfer_mxfp4")

    def declared(self, method: Any, layer: Any) -> Declared:
        return Declared("bf16", "quant_method mxfp4")

    def sizes(self, layer: Any, inner: int, extra: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the sizes.

        The loader gives each rank whole blocks as long as any are left; the last may get fewer.
        """
        padded = padded_to_blocks(inner)
        left = int(extra.get("moe_intermediate_size", inner * layer.moe_tp_size)) - padded * int(layer.moe_tp_rank)
        if left <= 0:
            raise Refused(f"no blocks of {BLOCK} are left for rank {layer.moe_tp_rank} of {layer.moe_tp_size}")
        return min(padded, left), padded
