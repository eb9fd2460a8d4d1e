"""PackedModule: a module of torch whose weights are packed by this library and are no parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _core, release_workspaces
from ..layer import MoeLayer

# ("cpu" or "cuda:N", what is open elsewhere now or None) to an open MoeLayer or Nvfp4Linear
Opener = Callable[[str, Any], Any]


def named(error: _core.Error, name: str) -> _core.Error:
    """The same error with a module's path before its message."""
    renamed = type(error)(f"{name}: {error}")
    renamed.finding = error.finding
    return renamed


def device_name(device: torch.device) -> str:
    """The library's name of a torch device; raises Unsupported for one that it has no kernels for."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    if device.type == "cpu":
        return "cpu"
    raise _core.Unsupported(f"device: expected cpu or cuda, got {device}")


def warm_up(modules: Iterable[PackedModule]) -> None:
    """First calls of all layers on GPUs, so that a graph may be captured at once; gives their workspaces back."""
    layers = [module.packed for module in modules if isinstance(module.packed, MoeLayer)]
    for layer in layers:
        if layer.device != "cpu":
            layer.warmup()
    for device in {layer.device for layer in layers} - {"cpu"}:
        release_workspaces(device)


class PackedModule(nn.Module):
    """Holds what open_on gave for a device, and opens it anew where the model is moved to another device.

    Casting the model (to(dtype)) changes nothing here: the packed weights run on bfloat16, float16 and float32.
    """

    handle: int
    max_tokens: int

    def __init__(self, name: str, open_on: Opener) -> None:
        super().__init__()
        self.name = name
        self.packed: Any = None
        self.handle = 0
        self.max_tokens = 0
        self._open_on = open_on
        self._is_hf_initialized = True  # there is nothing that transformers could initialize

    def place(self, device: torch.device) -> None:
        """Opens the packed weights on a device; errors name the module."""
        where = device_name(device)
        try:
            packed = self._open_on(where, self.packed)
        except _core.Error as error:
            raise named(error, self.name) from error
        self.adopt(packed)

    def adopt(self, packed: Any) -> None:
        """Runs an open layer or linear from now on."""
        self.packed, self.handle, self.max_tokens = packed, packed.handle, packed.max_tokens

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What Module.to(), cuda() and cpu() do to each module: here it is seen where a tensor goes."""
        if self.packed is not None:
            now = torch.device(self.packed.device)
            then = fn(torch.empty(0, device=now)).device
            if device_name(then) != device_name(now):
                self.place(then)
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _core.Unsupported(
            f"{self.name}: packed NVFP4 weights are neither pickled nor copied; load the checkpoint once more instead"
        )

    def refuse_gradient(self, *inputs: Tensor) -> None:
        """Raises Unsupported where a gradient would be lost in silence."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise _core.Unsupported(
                f"{self.name}: NVFP4 layers have no gradient, and their input requires one; run under torch.no_grad() "
                "or torch.inference_mode(), or train on the original weights"
            )

    def extra_repr(self) -> str:
        return repr(self.packed) if self.packed is not None else "not open"
