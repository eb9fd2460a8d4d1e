"""Checks whether the installed vLLM release fits, when vLLM first requests one of the plugin's methods."""

from __future__ import annotations

from .._settings import read_settings
from .._signatures import misfits
from . import internals

_fitting: frozenset[str] | None = None


def fitting() -> frozenset[str]:
    """Returns the groups of internals.REQUIRED that fit; empty if "core" does not. Imports those modules of vLLM.

    The first call logs each format that does not fit. If NVFP4_MOE_MODE=1 it raises RuntimeError instead.
    """
    global _fitting
    if _fitting is None:
        _fitting = _compared()
    return _fitting


def forget() -> None:
    """Makes the next call of fitting() compare again."""
    global _fitting
    _fitting = None


def _compared() -> frozenset[str]:
    insists = read_settings().insists
    missing = misfits(internals.REQUIRED)
    sentences = [
        f"vLLM {internals.version()} does not fit nvfp4-moe ({group}): {'; '.join(problems[:3])}"
        for group, problems in missing.items()
        if group not in internals.OPTIONAL
    ]
    if sentences and insists:
        raise RuntimeError("; ".join(sentences) + "; NVFP4_MOE_MODE=auto serves without the library")
    for sentence in sentences:
        internals.logger().warning("%s; vLLM serves these layers by itself", sentence)
    if "core" in missing:
        return frozenset()
    try:
        from .experts import NvFp4MoeExperts

        if left := sorted(NvFp4MoeExperts.__abstractmethods__):
            raise TypeError(f"FusedMoEExpertsModular has abstract members that the plugin lacks: {', '.join(left)}")
    except Exception:
        # The release changed in a way that the table does not cover. vLLM must still start.
        if insists:
            raise
        internals.logger().exception(
            "nvfp4-moe cannot register with vLLM %s, which serves without it", internals.version()
        )
        return frozenset()
    return frozenset(internals.REQUIRED).difference(missing)
