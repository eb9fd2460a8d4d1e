"""An SGLang plugin that runs NVFP4 experts with nvfp4_moe. SGLang loads it by the entry point `sglang.srt.plugins`.

SGLang calls register() in every process that it starts, before it makes a model. docs/how-to/sglang.md describes the
plugin, its environment variables and its options. Importing this package imports nothing of SGLang; register() does.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping

from .._settings import Settings, read_settings
from .required import OPTIONAL, RELEASES, REQUIRED

__all__ = ["register"]


def __dir__() -> list[str]:
    return __all__


_log = logging.getLogger("nvfp4_moe.sglang")
_registered = False


def register() -> None:
    """Registers the runner core, the option --moe-runner-backend nvfp4_moe and the hooks, once per process.

    Does nothing if NVFP4_MOE_MODE=0. An SGLang release without the members that the adapter needs is left unchanged,
    and a log message names its version and the members. If NVFP4_MOE_MODE=1 that is SystemExit, because SGLang ignores
    other exceptions of plugins.
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
    from .._signatures import misfits

    missing = misfits(REQUIRED)
    version = importlib.metadata.version("sglang")
    for group, problems in missing.items():
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        if group in OPTIONAL:
            if settings.router == "own":
                _log.warning("nvfp4_moe leaves the selection of experts to SGLang %s: %s%s", version, problems[0], more)
            continue
        what = "NVFP4 experts" if group == "core" else f"{group} experts"
        why = f"SGLang {version} does not fit this adapter: {'; '.join(problems[:3])}{more}"
        if settings.insists:
            raise SystemExit(f"nvfp4_moe: {why}. Releases that fit: {', '.join(RELEASES)}")
        _log.warning("nvfp4_moe leaves %s to SGLang: %s. Releases that fit: %s", what, why, ", ".join(RELEASES))
    if "core" in missing:
        return
    try:
        _hook(settings, missing)
    except Exception as error:
        if settings.insists:  # SGLang would log an exception and serve without the plugin
            raise SystemExit(f"nvfp4_moe: SGLang {version}: {type(error).__name__}: {error}") from error
        raise
    _registered = True
    beyond = "" if version in RELEASES else f", which is none of {', '.join(RELEASES)} but has all that is relied on"
    _log.info("nvfp4_moe takes NVFP4 experts of SGLang %s%s", version, beyond)


def _hook(settings: Settings, missing: Mapping[str, object]) -> None:
    """Registers everything except the missing formats, once SGLang is known to fit. Imports SGLang."""
    from . import compressed_tensors, experts, internals, router
    from .modelopt import ModelOptHooks
    from .mxfp4 import Mxfp4Hooks
    from .runner import BACKEND, NvFp4MoeRunnerCore

    internals.register_moe_runner_core(BACKEND, NvFp4MoeRunnerCore)
    if BACKEND not in internals.MOE_RUNNER_BACKEND_CHOICES:
        internals.add_moe_runner_backend_choices([BACKEND])
    experts.register_loads()
    if "modelopt" not in missing:
        ModelOptHooks(settings).register()
    if "mxfp4" not in missing:
        Mxfp4Hooks(settings).register()
    if "compressed-tensors" not in missing:
        compressed_tensors.register(settings)
    if "router" not in missing and settings.router == "own":
        router.register()
