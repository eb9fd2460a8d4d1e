"""A layer's parameters while vLLM loads or reloads them.

A parameter that no file provides is an error, and a layer whose reload failed does not run.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch

from .._fused_parameters import mark_missing
from . import op

_MUST_COME = ("_weight_scale", "_weight_scale_2", "_weight_global_scale", "_bias")


def prepare(layer: Any) -> None:
    """Zeros the codes and marks scales and biases as missing.

    8-bit scales stay zero until the first of them is loaded.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.nvfp4_moe_must_come = name.endswith(_MUST_COME)
        if parameter.dtype in (torch.uint8, torch.float8_e4m3fn):
            parameter.data.view(torch.uint8).zero_()
        elif parameter.nvfp4_moe_must_come:
            mark_missing(parameter.data)


def loader_of(layer: Any, loader: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's loader of one expert's tensor: before its first write a parameter is marked as missing.

    vLLM's reload makes parameters from uninitialized memory. Without the marks an expert that the checkpoint lacks
    would have arbitrary values. A bound method stays one, because vLLM removes the layer from the methods that it
    keeps.
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
    """Disables a layer: its runs raise RuntimeError with the reason. None enables it again.

    A CUDA graph does not run the plugin's code. If the layer is on a GPU, all graphs of the process are reset, so that
    vLLM's next replay fails.
    """
    if why is None:
        op.refusals.pop(handle, None)
        return
    op.refusals[handle] = why
    if on_gpu:
        for found in gc.get_objects():
            if issubclass(type(found), torch.cuda.CUDAGraph):
                found.reset()
