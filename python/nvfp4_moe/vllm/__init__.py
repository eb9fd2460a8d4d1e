"""vLLM's NVFP4 routed experts through this library: the plugin that vLLM finds as an entry point of vllm.general_plugins.

Installing the package switches it on. Nothing here imports vLLM before vLLM calls register(), and nothing of vLLM is
patched. docs/vllm.md says what it takes and how it is configured.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers the quantization methods with vLLM, which calls this in each of its processes, possibly several times.

    Does nothing under NVFP4_MOE=0. Raises ValueError for a value of one of its variables that means nothing, and
    RuntimeError for a release of vLLM that does not fit under NVFP4_MOE=1; under auto such a release is named in the log
    and serves without the library.
    """
    from .._fused_experts import read_settings

    settings = read_settings()
    if settings.mode == "0":
        return
    from .._signatures import misfits
    from . import internals

    missing = misfits(internals.REQUIRED)
    internals.fitting = frozenset(internals.OPTIONAL).difference(missing)
    sentences = [
        f"vLLM {internals.version()} does not fit nvfp4-moe ({group}): {'; '.join(problems[:3])}"
        for group, problems in missing.items()
        if group not in internals.OPTIONAL
    ]
    if sentences and settings.insists:
        raise RuntimeError("; ".join(sentences) + "; NVFP4_MOE=auto serves without the library")
    for sentence in sentences:
        internals.logger().warning("%s; vLLM serves these layers by itself", sentence)
    if "core" in missing:
        return
    try:
        from . import configs

        configs.register([name for name in internals.FORMATS if name not in missing])
    except Exception:
        # A release that changed where the table does not look: vLLM has to start all the same.
        if settings.insists:
            raise
        internals.logger().exception(
            "nvfp4-moe cannot register with vLLM %s, which serves without it", internals.version()
        )
