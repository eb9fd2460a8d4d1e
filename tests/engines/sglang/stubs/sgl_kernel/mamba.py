"""Stubs of CPU linear attention, which modules of hybrid models import."""

import torch

from . import __getattr__  # noqa: F401  any name can be imported

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"):
    _library.define(f"{_name}() -> ()")
