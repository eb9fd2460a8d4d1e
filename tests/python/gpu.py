"""What the GPU tests begin with: torch with CUDA, a GPU, and a build with the CUDA backends; skipped by name elsewhere."""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")


def why_not() -> str:
    """Why no layer can be opened on a GPU here; empty if one can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        nv.explain({"num_experts": 2, "top_k": 1, "hidden_size": 16, "intermediate_size": 16}, device="cuda:0")
    except nv.Unsupported as refused:
        return str(refused)
    return ""


needs_gpu = pytest.mark.skipif(why_not() != "", reason=why_not())
