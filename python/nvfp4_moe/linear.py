"""Nvfp4Linear: a dense linear with NVFP4 weights."""

from __future__ import annotations

import json
from typing import Any

from . import _core


class Nvfp4Linear(_core.Linear):
    """A dense NVFP4 linear y = x W^T through the same kernels, for attention projections kept in NVFP4."""

    @classmethod
    def from_tensors(
        cls,
        weight: Any,
        *,
        activation_format: str = "nvfp4",
        activation_scale: str = "dynamic_token",
        input_scale: float | None = None,
        static_headroom: float = 1.0,
        max_tokens: int = 8192,
        device: str = "cpu",
        backend: str = "auto",
    ) -> Nvfp4Linear:
        """From weight = (codes uint8 (out_features, in_features/2), scales uint8 (out_features, in_features/16),
        tensor_scale float) on the host, which is copied. The options are those of MoeConfig for hidden; input_scale is
        needed by activation_scale "static" and "compat". Raises ValueError, BadInput, Unsupported, OutOfMemory.
        """
        codes = weight[0]
        if len(codes.shape) != 2:
            raise _core.InvalidArgument(
                f"weight codes: expected (out_features, in_features/2), got {tuple(codes.shape)}"
            )
        rows, half = codes.shape
        return cls(
            _core.open_linear(
                tuple(weight),
                int(rows),
                2 * int(half),
                activation_format,
                activation_scale,
                input_scale,
                static_headroom,
                max_tokens,
                device,
                backend,
            )
        )

    def describe(self) -> dict[str, Any]:
        """backend, rows, cols, tensor_scale, activation_format, activation_scale, fp8_weights (under fp8 how many weights
        E4M3 rounds, and its shift; else None), sizes in bytes, notes."""
        described: dict[str, Any] = json.loads(self.describe_json())
        return described
