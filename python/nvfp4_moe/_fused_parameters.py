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
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import InvalidArgument, Unsupported
from ._mxfp4 import BLOCK, as_bytes, cast_mxfp4

# ---- scales


def reciprocal(global_scale: Tensor) -> Tensor:
    """Converts compressed-tensors' global scales to tensor scales: fl32(1/double(global)), as for a checkpoint."""
    return (1.0 / global_scale.double()).float()


def mark_missing(tensor: Tensor) -> None:
    """Fills scales and biases with NaN, so that a value that no file provides becomes an error."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype == torch.uint8:  # E8M0
        tensor.fill_(0xFF)
    else:
        tensor.fill_(float("nan"))


def make_legal(scale: Tensor) -> None:
    """Makes scales of random weights (load_format=dummy) legal, in place. Keeps magnitudes; NaN and 0 become 1.

    Only for dummy weights. An illegal scale in a checkpoint remains an error.
    """
    if scale.dtype == torch.float8_e4m3fn:
        bits = scale.view(torch.uint8)
        bits.bitwise_and_(0x7F)
        bits.masked_fill_((bits == 0x7F) | (bits == 0), 0x38)  # 1.0
    elif scale.is_floating_point():
        scale.abs_()
        scale.masked_fill_(~torch.isfinite(scale) | (scale == 0), 1.0)
    else:  # E8M0 bytes
        scale.masked_fill_(scale == 0xFF, 127)


# ---- an engine's layer


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters that an engine has for a checkpoint format. Each name follows "w13_" or "w2_".

    Attributes:
        weight, bias: The names of codes and biases. Scales are always weight_scale.
        tensor_scale: The name of the tensor scales; "" if there are none.
        reciprocal: The tensor scales are stored as 1/s.
        mxfp4: E8M0 scales of 32 elements each. Only in these formats engines have parameters for biases.
        interleaved: Rows of gate and up alternate.
    """

    weight: str = "weight"
    tensor_scale: str = "weight_scale_2"
    bias: str = "bias"
    reciprocal: bool = False
    mxfp4: bool = False
    interleaved: bool = False


def gate_and_up(stack: Tensor, gated: bool, interleaved: bool) -> tuple[Tensor | None, Tensor]:
    """Splits gemm1's weights, scales or biases (E, 2I, ...) into gate and up, as views (E, I, ...).

    They are stored one after the other or in alternating rows. Without a gate all rows (E, I, ...) are up's.
    """
    if not gated:
        return None, stack
    if interleaved:
        return stack[:, 0::2], stack[:, 1::2]
    gate, up = stack.chunk(2, 1)
    return gate, up


def empty_parameters(parameters: Iterable[Tensor]) -> None:
    """Frees packed parameters. Their names stay in the layer's state, so that a reload finds what it expects."""
    on_gpu = False
    for parameter in parameters:
        shape = (0,) if parameter.ndim == 1 else (parameter.shape[0], 0, 0)[: parameter.ndim]
        parameter.data = parameter.data.new_empty(shape)
        on_gpu = on_gpu or parameter.is_cuda
    if on_gpu:
        # The library cannot use memory of freed parameters that torch still caches. Without this a model of half the
        # GPU's size would have no room for its packed layers.
        torch.cuda.empty_cache()


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

    @classmethod
    def of_layer(
        cls, layer: Any, form: Form, options: Mapping[str, Any], intermediate_size: int | None = None
    ) -> FusedParameters:
        """Reads an engine's layer, whose options are fields of MoeConfig."""

        def of(matrix: str) -> dict[str, Tensor | None]:
            def read(name: str) -> Tensor:
                tensor: Tensor = getattr(layer, f"{matrix}_{name}").data
                return tensor

            tensor_scale = read(form.tensor_scale) if form.tensor_scale else None
            if tensor_scale is not None and form.reciprocal:
                tensor_scale = reciprocal(tensor_scale)
            return {
                matrix: read(form.weight),
                f"{matrix}_scale": read("weight_scale"),
                f"{matrix}_tensor_scale": tensor_scale,
                f"{matrix}_bias": read(form.bias) if options.get("expert_biases") else None,
            }

        made: Any = {**of("w13"), **of("w2"), "mxfp4": form.mxfp4, "interleaved": form.interleaved}
        return cls(**made, intermediate_size=intermediate_size, gated=options["activation"] != "relu2")

    def make_scales_legal(self) -> None:
        """Makes the scales of random weights (load_format=dummy) legal, in place."""
        for scale in (self.w13_scale, self.w2_scale, self.w13_tensor_scale, self.w2_tensor_scale):
            if scale is not None:
                make_legal(scale)

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
        if self.mxfp4 and inner % BLOCK != 0:
            raise Unsupported(
                f"MXFP4 experts: expected a rank's slice of the intermediate dimension in whole blocks of {BLOCK}, "
                f"got {inner}"
            )
        return inner

    def _rows_of(self, name: str, tensor: Tensor) -> Tensor:
        """Returns gate's or up's rows of w13, its scales or bias (E, rows, ...), as a view (E, inner_size(), ...)."""
        gate, up = gate_and_up(tensor, self.gated, self.interleaved)
        if self.up_first and gate is not None:
            gate, up = up, gate
        rows = gate if name == "gate" and gate is not None else up
        return rows[:, : self.inner_size()]

    def zero_padding(self, filled: int) -> None:
        """Zeros the engine's padding in place: rows of gate and up, and columns of w2, from `filled` on.

        After a reload the padding is uninitialized memory, and MXFP4's whole blocks would include it.
        """
        inner, block = self.inner_size(), BLOCK if self.mxfp4 else 16
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
        columns = inner // (BLOCK if self.mxfp4 else 16)
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
