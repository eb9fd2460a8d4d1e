"""SGLang's NVFP4 experts through nvfp4_moe: the plugin that SGLang loads by the entry point `sglang.srt.plugins`.

register() is called in every process that SGLang starts, before a model is made. docs/sglang.md says what it does and
which environment variables and options it reads. Importing this package imports nothing of SGLang; register does.
"""

from __future__ import annotations

import logging

from .._fused_experts import read_settings
from .required import RELEASES

__all__ = ["register"]

_log = logging.getLogger("nvfp4_moe.sglang")
_registered = False


def register() -> None:
    """Registers the runner core, the option --moe-runner-backend nvfp4_moe and the hooks; once a process.

    NVFP4_MOE=0: nothing. An SGLang that lacks what the adapter relies on is left as it is, with one line that names its
    version and the members. Under NVFP4_MOE=1 that is an error; SystemExit, since SGLang swallows exceptions of plugins.
    """
    global _registered
    if _registered:
        return
    try:
        settings = read_settings()
    except ValueError as error:
        raise SystemExit(f"nvfp4_moe: {error}") from error
    if settings.mode == "0":
        return
    why = _why_not()
    if why is not None:
        if settings.insists:
            raise SystemExit(f"nvfp4_moe: {why}")
        _log.warning("nvfp4_moe is off: %s", why)
        return
    from . import compressed_tensors, internals, modelopt
    from .runner import BACKEND, NvFp4MoeRunnerCore

    internals.register_moe_runner_core(BACKEND, NvFp4MoeRunnerCore)
    if BACKEND not in internals.MOE_RUNNER_BACKEND_CHOICES:
        internals.add_moe_runner_backend_choices([BACKEND])
    modelopt.Hooks(settings).register()
    compressed_tensors.register(settings)
    _registered = True
    version = internals.version()
    beyond = "" if version in RELEASES else f", which is none of {', '.join(RELEASES)} but has all that is relied on"
    _log.info("nvfp4_moe takes NVFP4 experts of SGLang %s%s", version, beyond)


def _why_not() -> str | None:
    """Why this SGLang is not taken, in a sentence that names its version and the first members that differ."""
    import importlib.metadata

    from .._signatures import missing_live
    from .required import REQUIRED

    missing = missing_live(REQUIRED)
    if not missing:
        return None
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"SGLang {importlib.metadata.version('sglang')} is not one that this adapter fits: {'; '.join(missing[:3])}{more}. "
        f"Releases that fit: {', '.join(RELEASES)}"
    )
