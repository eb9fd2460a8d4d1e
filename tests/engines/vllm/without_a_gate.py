"""Importing this lets vLLM make layers of experts without a gate on a CPU.

vLLM's description of a layer refuses them there before it asks a quantization method, because it has no kernel for
them. The plugin does not need one. Named as worker_extension_cls, this module is imported by each worker before the
model is made.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe import config


class Extension:
    """Adds nothing to a worker."""


class _Platform:
    """vLLM's platform, with another answer to the one query of the layer's description."""

    def __init__(self, own) -> None:
        self._own = own

    def __getattr__(self, name: str):
        return getattr(self._own, name)

    def is_xpu(self) -> bool:
        return True


if not config.current_platform.is_cuda_alike():
    config.current_platform = _Platform(config.current_platform)
