"""SGLang's NVFP4 experts through nvfp4_moe: the plugin that SGLang loads by the entry point `sglang.srt.plugins`.

register() is called in every process that SGLang starts, before a model is made. docs/how-to/sglang.md says what it does and
which environment variables and options it reads. Importing this package imports nothing of SGLang; register does.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping

from .._fused_experts import Settings, read_settings
from .required import RELEASES, REQUIRED

__all__ = ["register"]

_log = logging.getLogger("nvfp4_moe.sglang")
_registered = False


def register() -> None:
    """Registers the runner core, the option --moe-runner-backend nvfp4_moe and the hooks; once a process.

    NVFP4_MOE_MODE=0: nothing. An SGLang that lacks what the adapter relies on is left as it is, with one line that names its
    version and the members. Under NVFP4_MOE_MODE=1 that is an error; SystemExit, since SGLang swallows exceptions of plugins.
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
        if settings.insists:  # SGLang would log it and serve without the plugin
            raise SystemExit(f"nvfp4_moe: SGLang {version}: {type(error).__name__}: {error}") from error
        raise
    _registered = True
    beyond = "" if version in RELEASES else f", which is none of {', '.join(RELEASES)} but has all that is relied on"
    _log.info("nvfp4_moe takes NVFP4 experts of SGLang %s%s", version, beyond)


def _hook(settings: Settings, missing: Mapping[str, object]) -> None:
    """What register does once SGLang fits, but for the formats that are missing. Imports SGLang."""
    from . import compressed_tensors, experts, internals
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
