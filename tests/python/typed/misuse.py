"""Mistakes that mypy --strict has to see (test_wheel.py): each marked line is an error, and no other is."""

from __future__ import annotations

import nvfp4_moe as nv

nv.quantize([1.0] * 16, mode=3)  # error
nv.quantise([1.0] * 16)  # error
nv.expert_scale_row("0", 1)  # error
nv.Checkpoint("model").expert("0", 1)  # error
nv.Checkpoint("model").expert(0, 1)
nv.quantize_checkpoint("in", "out", progress=lambda: None)  # error
number: str = nv.BadInput.status  # error
