"""Extracts a MoeLayer's weights and biases from the fused tensors in which engines keep a rank's experts.

Engines keep a rank's E_local experts in four tensors (H = hidden_size, I = the rank's slice of the intermediate
dimension):

    w13        uint8 (E_local, 2I, H/2)    rows [gate; up]; [up; gate] with up_first; alternating gate and up with
                                           interleaved; without gated only up, (E_local, I, H/2)
    w13_scale  e4m3  (E_local, 2I, H/16)   row-major, not swizzled; with mxfp4 E8M0 (E_local, 2I, H/32)
    w2         uint8 (E_local, H, I/2)
    w2_scale   e4m3  (E_local, H, I/16)    with mxfp4 E8M0 (E_local, H, I/32)

Tensor scales are float32: (E_local, 2) or (E_local,) for w13, (E_local,) for w2. Experts with biases have two more
tensors of any float dtype: w13_bias (E_local, 2I), in the order of w13's rows, and w2_bias (E_local, H). Needs torch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import InvalidArgument, Unsupported
from ._mxfp4 import as_bytes, cast_mxfp4


@dataclasses.dataclass(frozen=True)
class FusedParameters:
    """A rank's fused parameters, as described at the top of this file. The caller keeps the tensors.

    Attributes:
        w13_tensor_scale: (E_local, 2) in the order of the rows; or (E_local,) or (E_local, 1), shared by gate and up.
            With mxfp4 pass None here and for w2_tensor_scale, because the cast computes them.
        intermediate_size: If the engine pads I, the size without padding: the first rows of gate and of up and the
            first columns of w2. The padding is not read.
        w13_bias, w2_bias: Both or neither. In a tensor parallel group w2_bias must be zeros on all ranks but one,
            because the ranks' rows are added.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_tensor_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_tensor_scale: Tensor | None
    intermediate_size: int | None = None
    up_first: bool = False
    mxfp4: bool = False
    gated: bool = True
    interleaved: bool = False
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def inner_size(self) -> int:
        """Returns the intermediate size without padding. Raises ValueError if the shapes do not fit together."""
        experts, rows, _ = self.w13.shape
        matrices = 2 if self.gated else 1
        if rows % matrices != 0 or self.w2.ndim != 3 or self.w2.shape[0] != experts:
            raise InvalidArgument(
                f"w13, w2: expected (E, {'2I' if self.gated else 'I'}, H/2) and (E, H, I/2), got {tuple(self.w13.shape)} "
                f"and {tuple(self.w2.shape)}"
            )
        padded = rows // matrices
        inner = padded if self.intermediate_size is None else self.intermediate_size
        if not 0 < inner <= padded or inner % 16 != 0:
            raise InvalidArgument(f"intermediate_size: expected a multiple of 16 from 16 to {padded}, got {inner}")
        if self.w2.shape[2] < inner // 2:
            raise InvalidArgument(f"w2: expected at least {inner // 2} bytes a row, got {self.w2.shape[2]}")
        if self.mxfp4 and inner % 32 != 0:
            raise Unsupported(
                "MXFP4 experts: expected a rank's slice of the intermediate dimension in whole blocks of 32, "
                f"got {inner}"
            )
        return inner

    def _rows_of(self, name: str, tensor: Tensor) -> Tensor:
        """Returns gate's or up's rows of w13, its scales or bias (E, rows, ...), as a view (E, inner_size(), ...)."""
        inner = self.inner_size()
        if not self.gated:
            return tensor[:, :inner]
        if self.interleaved:
            return tensor[:, 0 if name == "gate" else 1 :: 2][:, :inner]
        first = tensor.shape[1] // 2 if (name == "up") != self.up_first else 0
        return tensor[:, first : first + inner]

    def zero_padding(self, filled: int) -> None:
        """Zeros the engine's padding in place: rows of gate and up, and columns of w2, from `filled` on.

        After a reload the padding is uninitialized memory, and MXFP4's whole blocks would include it.
        """
        inner, block = self.inner_size(), 32 if self.mxfp4 else 16
        if filled >= inner:
            return
        for name in ("gate", "up") if self.gated else ("up",):
            for tensor in (self.w13, self.w13_scale):
                self._rows_of(name, as_bytes(tensor))[:, filled:].zero_()
            if self.w13_bias is not None:
                self._rows_of(name, self.w13_bias)[:, filled:].zero_()
        as_bytes(self.w2)[:, :, filled // 2 :].zero_()
        as_bytes(self.w2_scale)[:, :, -(-filled // block) :].zero_()

    def stacks(self) -> tuple[dict[str, tuple[Tensor, Tensor, Tensor]], int]:
        """Returns gate (if present), up and down for MoeLayer.from_tensors, and how many blocks the MXFP4 cast rounded.

        They are views unless the weights are cast. Raises ValueError, Unsupported.
        """
        experts, inner = self.w13.shape[0], self.inner_size()
        columns = inner // (32 if self.mxfp4 else 16)
        matrices = {
            name: (self._rows_of(name, as_bytes(self.w13)), self._rows_of(name, as_bytes(self.w13_scale)))
            for name in (("gate", "up") if self.gated else ("up",))
        }
        matrices["down"] = (as_bytes(self.w2)[:, :, : inner // 2], as_bytes(self.w2_scale)[:, :, :columns])
        if self.mxfp4:
            cast = {name: cast_mxfp4(*matrix) for name, matrix in matrices.items()}
            return {name: stack[:3] for name, stack in cast.items()}, sum(stack[3] for stack in cast.values())
        if self.w13_tensor_scale is None or self.w2_tensor_scale is None:
            raise InvalidArgument("w13_tensor_scale, w2_tensor_scale: expected tensors, got None")
        pair = self.w13_tensor_scale.detach().reshape(experts, -1)
        if pair.shape[1] not in ((1, 2) if self.gated else (1,)):
            raise InvalidArgument(
                f"w13_tensor_scale: expected ({experts},) or ({experts}, {2 if self.gated else 1}), got "
                f"{tuple(self.w13_tensor_scale.shape)}"
            )
        of_rows = {
            "gate": pair[:, -1 if self.up_first else 0],
            "up": pair[:, 0 if self.up_first else -1],
            "down": self.w2_tensor_scale.detach().reshape(experts),
        }
        return {name: (*matrices[name], of_rows[name].float()) for name in matrices}, 0

    def biases(self) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """Returns (gate (E, I) or None, up (E, I), down (E, H)) as float32 on the host, or None without biases."""
        if self.w13_bias is None or self.w2_bias is None:
            if self.w13_bias is not self.w2_bias:
                raise InvalidArgument("w13_bias, w2_bias: expected both or neither, got one")
            return None
        expected = (self.w13.shape[:2], (self.w13.shape[0], self.w2.shape[1]))
        if (self.w13_bias.shape, self.w2_bias.shape) != expected:
            raise InvalidArgument(
                f"w13_bias, w2_bias: expected {tuple(expected[0])} and {expected[1]}, got {tuple(self.w13_bias.shape)} and "
                f"{tuple(self.w2_bias.shape)}"
            )
        w13, w2 = (bias.detach().to("cpu", torch.float32) for bias in (self.w13_bias, self.w2_bias))
        return self._rows_of("gate", w13) if self.gated else None, self._rows_of("up", w13), w2
