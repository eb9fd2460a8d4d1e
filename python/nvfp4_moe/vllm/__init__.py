"""A vLLM plugin that runs NVFP4 routed experts with this library. vLLM finds it as an entry point of
vllm.general_plugins.

Installing the package enables it. It imports nothing of vLLM before a quantized layer requests its method, and it
patches nothing in vLLM. docs/how-to/vllm.md describes which layers it takes and how to configure it.
"""

from __future__ import annotations

__all__ = ["register"]


def __dir__() -> list[str]:
    return __all__


def register() -> None:
    """Registers the quantization configs. vLLM calls it in each of its processes, possibly several times.

    Does nothing if NVFP4_MOE_MODE=0. Raises ValueError for an illegal value of the plugin's variables. A vLLM release
    that does not fit is detected when a layer requests its method (release.py). That is a RuntimeError if
    NVFP4_MOE_MODE=1, else a warning, and vLLM serves without the library.
    """
    from .._settings import read_settings

    if read_settings().mode != "0":
        from . import configs

        configs.register()
