"""Mistakes that mypy --strict must find (test_wheel.py): exactly the marked lines are errors."""

from __future__ import annotations

import nvfp4_moe as nv

nv.quantize([1.0] * 16, mode=3)  # error
nv.quantise([1.0] * 16)  # error
nv.expert_scale_row("0", 1)  # error
nv.Checkpoint("model").expert("0", 1)  # error
nv.Checkpoint("model").expert(0, 1)
nv.quantize_checkpoint("in", "out", progress=lambda: None)  # error
number: str = nv.BadInput.status  # error
