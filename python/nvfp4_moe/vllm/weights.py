"""A layer's parameters while vLLM loads them, the first time or again: what no file writes is an error, and a layer whose
reload failed does not run."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch

from .._fused_experts import mark_missing
from . import op

_MUST_COME = ("_weight_scale", "_weight_scale_2", "_weight_global_scale", "_bias")


def prepare(layer: Any) -> None:
    """Codes of zeros, and scales and biases that a checkpoint has to bring. Those of 8 bits are zeros until the first of them
    is loaded."""
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.nvfp4_moe_must_come = name.endswith(_MUST_COME)
        if parameter.dtype in (torch.uint8, torch.float8_e4m3fn):
            parameter.data.view(torch.uint8).zero_()
        elif parameter.nvfp4_moe_must_come:
            mark_missing(parameter.data)


def loader_of(layer: Any, loader: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's loader of one expert's tensor, before whose first write a parameter is marked as missing.

    vLLM's reload makes parameters of fresh memory: without the marks an expert that the checkpoint lacks would be whatever
    was there. A method of the layer stays one, since vLLM takes the layer out of methods that it keeps.
    """
    function: Callable[..., Any] = loader
    if is_method := isinstance(loader, types.MethodType) and loader.__self__ is layer:
        function = loader.__func__

    @functools.wraps(function)
    def load(*inputs: Any, **named: Any) -> Any:
        parameter = named["param"] if "param" in named else inputs[1 if is_method else 0]
        if not parameter.is_meta and getattr(parameter, "nvfp4_moe_must_come", False):
            mark_missing(parameter.data)
            parameter.nvfp4_moe_must_come = False
        return function(*inputs, **named)

    return types.MethodType(load, layer) if is_method else load


def refuse(handle: int, why: str | None, on_gpu: bool) -> None:
    """Runs of a layer raise RuntimeError with these words from now on, or, with None, run again.

    A CUDA graph runs no code of the plugin: if the layer is on a GPU, all graphs of the process are reset, and vLLM's next
    replay fails.
    """
    if why is None:
        op.refusals.pop(handle, None)
        return
    op.refusals[handle] = why
    if on_gpu:
        for found in gc.get_objects():
            if issubclass(type(found), torch.cuda.CUDAGraph):
                found.reset()
