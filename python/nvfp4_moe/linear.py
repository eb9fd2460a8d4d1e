"""Nvfp4Linear: a dense linear with NVFP4 weights."""

from __future__ import annotations

import json
from typing import Any

from . import _core

__all__ = ["Nvfp4Linear"]


def __dir__() -> list[str]:
    return __all__


class Nvfp4Linear(_core.Linear):
    """A dense linear layer y = x W^T with NVFP4 weights, for example an attention projection.

    It uses the same kernels as MoeLayer.
    """

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
        """Opens a linear layer from NVFP4 arrays.

        Args:
            weight: (codes, scales, tensor_scale): uint8 (out_features, in_features/2), uint8 (out_features,
                in_features/16) and a float, on the host. They are copied.
            activation_format, activation_scale, static_headroom: As in MoeConfig.
            input_scale: Required by activation_scale "static" and "vllm_order".
            max_tokens: The most tokens a run may have.
            device: "cpu" or "cuda:N".
            backend: "auto", or a name from explain().

        Raises:
            ValueError: Wrong shapes, dtypes or options.
            BadInput: A scale is illegal.
            Unsupported: No backend takes the layer.
            OutOfMemory: Memory ran out.
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
        """Describes the layer: backend, rows, cols, tensor_scale, activation format and scale, sizes in bytes, notes.

        If activations are fp8, "fp8_weights" has the number of weights that E4M3 rounds, and the shift; otherwise None.
        """
        described: dict[str, Any] = json.loads(self.describe_json())
        return described
