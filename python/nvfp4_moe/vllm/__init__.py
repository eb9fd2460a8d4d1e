"""vLLM's NVFP4 routed experts through this library: the plugin that vLLM finds as an entry point of vllm.general_plugins.

Installing the package switches it on. Nothing here imports vLLM before a quantized layer asks for its method, and nothing of
vLLM is patched. docs/how-to/vllm.md says what it takes and how it is configured.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Has the quantization configs registered, which vLLM asks for in each of its processes, possibly several times.

    Does nothing under NVFP4_MOE_MODE=0. Raises ValueError for a value of one of its variables that means nothing. A release of
    vLLM that does not fit is found out when a layer asks for its method (release.py): a RuntimeError under NVFP4_MOE_MODE=1, else
    a warning, and vLLM serves without the library.
    """
    from .._fused_experts import read_settings

    if read_settings().mode != "0":
        from . import configs

        configs.register()
