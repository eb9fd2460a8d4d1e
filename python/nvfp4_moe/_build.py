"""Detects a build without CUDA on a machine that has an NVIDIA GPU."""

from __future__ import annotations

import os

from . import _core


def _gpu_is_visible() -> bool:
    """Returns True if NVIDIA's driver offers this process a GPU. Reads names in /dev and does not load CUDA."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    try:
        names = os.listdir("/dev")
    except OSError:
        return False
    return any(name.startswith("nvidia") and name.removeprefix("nvidia").isdigit() for name in names)


def missing_cuda() -> str | None:
    """Returns a warning if this build has no CUDA backends and the process sees a GPU, else None."""
    if _core.built_with_cuda or not _gpu_is_visible():
        return None
    return (
        f"nvfp4_moe {_core.__version__} was built without CUDA, and this machine has an NVIDIA GPU: layers run on the CPU "
        "only. Install it again with nvcc 12.9 or later on PATH (docs/explanation/cuda.md)"
    )
