"""Casts MXFP4 matrices to NVFP4 on any device, by the definition in docs/reference/checkpoints.md."""

from __future__ import annotations

import torch
from torch import Tensor

from . import InvalidArgument

BLOCK = 32  # elements that share a scale
_TOP, _BOTTOM = 8, -9  # exponents of E4M3's largest and smallest power of two
_E8M0_BIAS = 127
# Midpoints between the magnitudes. A value on a midpoint rounds to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def padded_to_blocks(size: int) -> int:
    """Rounds a rank's intermediate size up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def as_bytes(tensor: Tensor) -> Tensor:
    """Views the same memory as uint8."""
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def _power_bytes(exponent: Tensor) -> Tensor:
    """Returns the E4M3 byte of 2^e, e in [-9, 8]."""
    normal = (exponent + 7) << 3
    subnormal = torch.ones_like(exponent) << (exponent + 9).clamp(0, 3)
    return torch.where(exponent >= -6, normal, subnormal).to(torch.uint8)


def _rounded_codes(codes: Tensor, factor: Tensor) -> Tensor:
    """Multiplies packed codes uint8 (n, 8) by powers of two below 1, float64 (n, 1), and rounds to nearest even."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=codes.device)
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float64, device=codes.device)

    def rounded(code: Tensor) -> Tensor:
        value = magnitudes[(code & 7).long()] * factor
        below, above = torch.bucketize(value, midpoints), torch.bucketize(value, midpoints, right=True)
        return torch.where(below % 2 == 0, below, above).to(torch.uint8) | (code & 8)

    packed = rounded(codes & 15) | (rounded(codes >> 4) << 4)
    # A block of zeros has no signs.
    return torch.where(((packed & 0x77) != 0).any(-1, keepdim=True), packed, torch.zeros_like(packed))


def cast_mxfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Casts one MXFP4 matrix per expert to NVFP4.

    Args:
        codes: uint8 (E, rows, K/2).
        scales: E8M0 bytes (E, rows, K/32).

    Returns:
        (codes, scales uint8 (E, rows, K/16), tensor_scale float32 (E,), rounded). codes is the input if every block is
        exact, else a copy. rounded is the number of 16-blocks whose values changed.

    Raises:
        ValueError: A scale is NaN.
    """
    codes, scales = as_bytes(codes), as_bytes(scales)
    experts, rows, half = codes.shape
    if scales.shape != (experts, rows, half // 16) or half % 16 != 0:
        raise InvalidArgument(
            f"MXFP4 scales: expected {(experts, rows, half // 16)} for codes {tuple(codes.shape)}, got {tuple(scales.shape)}"
        )
    out_scales = torch.empty((experts, rows, half // 8), dtype=torch.uint8, device=codes.device)
    tensor_scale = torch.empty(experts, dtype=torch.float32)
    out_codes, rounded = codes, 0
    for expert in range(experts):
        exponent = scales[expert].to(torch.int32).repeat_interleave(2, -1)  # (rows, K/16)
        low, high = int(exponent.min()), int(exponent.max())
        if high == 0xFF:
            raise InvalidArgument(f"MXFP4 scales of local expert {expert}: expected bytes below 0xFF, got NaN")
        exact = high - low <= _TOP - _BOTTOM
        nonzero = None
        if not exact:
            nonzero = ((codes[expert] & 0x77) != 0).reshape(rows, half // 8, 8).any(-1)
            high = int(exponent.masked_fill(~nonzero, 0).max())
        power = max(high - _E8M0_BIAS - _TOP, -126)
        exponent -= _E8M0_BIAS + power
        tensor_scale[expert] = 2.0**power
        block_scales = _power_bytes(exponent.clamp(_BOTTOM, _TOP))
        outside = (exponent > _TOP) | (exponent < _BOTTOM)
        if bool(outside.any()):
            if out_codes is codes:
                out_codes = codes.clone()
            if nonzero is None:
                nonzero = ((codes[expert] & 0x77) != 0).reshape(rows, half // 8, 8).any(-1)
            below = outside & nonzero  # blocks above the top hold only zeros
            rounded += int(below.sum())
            blocks = out_codes[expert].view(rows, half // 8, 8)
            factor = torch.exp2((exponent[below] - _BOTTOM).double())[:, None]
            replaced = torch.zeros_like(blocks[outside])
            replaced[nonzero[outside]] = _rounded_codes(blocks[below], factor)
            blocks[outside] = replaced
            block_scales[outside] = torch.where((replaced != 0).any(-1), 1, 0).to(torch.uint8)  # 2^-9 is byte 1
        out_scales[expert] = block_scales
    return out_codes, out_scales, tensor_scale.to(codes.device), rounded
