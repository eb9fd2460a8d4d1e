"""Nvfp4LinearModule, which replaces an nn.Linear with an NVFP4 weight."""

from __future__ import annotations

import torch
from torch import Tensor

from .._fused_experts import run_in_parts
from .packed import Opener, PackedModule


class Nvfp4LinearModule(PackedModule):
    """Computes y = x W^T + bias for x (..., in_features), in x's dtype. The module has no `weight`."""

    def __init__(self, name: str, open_on: Opener, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(name, open_on)
        self.in_features = in_features
        self.out_features = out_features
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the linear. Raises Unsupported if x requires a gradient."""
        self.refuse_gradient(x)
        rows = x.reshape(-1, self.in_features).contiguous()
        op, handle, features = torch.ops.nvfp4_moe.linear, self.handle, self.out_features
        out = run_in_parts(lambda part: op(part, handle, features), self.max_tokens, rows)
        out = out.reshape(*x.shape[:-1], features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        where = self.packed.device if self.packed is not None else "not open"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {where}"
        )
