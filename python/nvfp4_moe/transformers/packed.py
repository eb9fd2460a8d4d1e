"""PackedModule: a torch module whose weights are packed by this library and are not parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import _core, release_workspaces
from .._fused_experts import device_name, naming
from ..layer import MoeLayer

# Opener("cpu" or "cuda:N", the object now open on another device or None) returns an open MoeLayer or Nvfp4Linear.
Opener = Callable[[str, Any], Any]


def warm_up(modules: Iterable[PackedModule]) -> None:
    """Warms up all layers on GPUs, so that a graph may be captured at once, and frees their workspaces."""
    on_gpus = [m for m in modules if isinstance(m.packed, MoeLayer) and m.packed.device != "cpu"]
    for module in on_gpus:
        with naming(module.name):
            module.packed.warmup()
    for device in {module.packed.device for module in on_gpus}:
        release_workspaces(device)


def turn_off_gradients(model: nn.Module) -> None:
    """Turns off gradients, and makes gradient_checkpointing_disable remove the hooks of gradient_checkpointing_enable.

    transformers removes them only if the model has adapters. With such a hook every hidden state requires a gradient,
    which PackedModule refuses.
    """
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _remove_hooks_on_disable(module)


def _remove_hooks_on_disable(model: PreTrainedModel) -> None:
    # A strong reference would be a cycle: a dropped model would keep its packed weights until the next collection.
    reference, stock = weakref.ref(model), type(model)

    def enable_input_require_grads() -> None:
        here: Any = reference()
        here.disable_input_require_grads()  # a second call would lose the first one's hooks
        stock.enable_input_require_grads(here)

    def gradient_checkpointing_disable() -> None:
        here: Any = reference()
        stock.gradient_checkpointing_disable(here)
        here.disable_input_require_grads()

    model.enable_input_require_grads = enable_input_require_grads
    model.gradient_checkpointing_disable = gradient_checkpointing_disable


class PackedModule(nn.Module):
    """Holds an open layer or linear, and opens it again on another device if the model is moved there.

    Casting the model (to(dtype)) changes nothing here: the packed weights take bfloat16, float16 and float32 inputs.
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
        self._is_hf_initialized = True  # there is nothing for transformers to initialize

    def place(self, device: torch.device) -> None:
        """Opens the packed weights on a device. Errors name the module."""
        with naming(self.name):
            self.adopt(self._open_on(device_name(device), self.packed))

    def adopt(self, packed: Any) -> None:
        """Runs an open layer or linear from now on."""
        self.packed, self.handle, self.max_tokens = packed, packed.handle, packed.max_tokens

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Called by Module.to(), cuda() and cpu() for each module; detects the target device with a probe tensor."""
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
        """Raises Unsupported if a gradient would be lost silently."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise _core.Unsupported(
                f"{self.name}: NVFP4 layers have no gradient, and their input requires one; run under torch.no_grad() "
                "or torch.inference_mode(), or train on the original weights"
            )

    def extra_repr(self) -> str:
        return repr(self.packed) if self.packed is not None else "not open"
