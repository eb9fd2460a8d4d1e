"""The layer in fp32, in plain torch, and how far an output is from it."""

from __future__ import annotations

import torch

from .workload import Matrix, Routing, Weights

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
SIXTH = 0.16666667163372040  # fl32(1/6), 0x3E2AAAAB

# Relative L2 error of the whole output and of the worst token. One lost expert is above 0.2. bf16: the bf16 rounding of
# h and of the output. nvfp4: also the rare value of h next to a rounding boundary, whose code depends on the order of a
# sum. fp8: Hopper's FP8 tensor cores add with 13 bits, so that many more values of h take the other code: - A sum of K
# products with random signs is off by 2^-15 of sum|p| (rms; docs/explanation/numerics.md, section 7), and sum|p| is
# 0.64 sqrt(K) times the sum: 1.7e-3 of the sum at K = 7168. With gate and up, h is off by d = 2.3e-3 (rms), 1.9e-3 in
# the mean. - Codes of E4M3 are at most s = 2^-3 apart. An error d changes a code with probability d / s, and then by s:
# rms sqrt(d s) = 1.5e-2. The limit has two thirds more for K, clamps and heavier tails than those of a normal
# distribution. A token whose output is mostly one value of h is off by a whole step if that code changes: s of its
# norm, which limits the worst token. (Qwen3-Next, 4096 tokens: 0.061, of which one code is 99 %.)
TOLERANCE = {"bf16": (1e-2, 2e-2), "nvfp4": (2e-2, 6e-2), "fp8": (2.5e-2, 0.125)}


def e4m3_power(scales: torch.Tensor) -> torch.Tensor:
    """Returns the smallest power of two p with 6 * max(block scale) <= 448 * p."""
    return torch.exp2(torch.ceil(torch.log2(6 * scales.max().clamp(min=2.0**-9) / 448)))


def dequantize(matrix: Matrix, expert: int, e4m3: bool = False) -> torch.Tensor:
    """Dequantizes one expert of an NVFP4 matrix to fp32 (rows, k).

    With e4m3, values are rounded to E4M3 as in `fp8`.
    """
    codes, scales, tensor_scale = (part[expert] for part in matrix)
    table = torch.tensor(E2M1, device=codes.device)
    values = torch.empty((*codes.shape, 2), device=codes.device)
    values[..., 0] = table[(codes & 15).long()]
    values[..., 1] = table[(codes >> 4).long()]
    scales = scales.contiguous().view(torch.float8_e4m3fn).float()
    blocks = values.view(len(codes), -1, 16) * scales.unsqueeze(-1)
    if e4m3:
        power = e4m3_power(scales)
        blocks = (blocks / power).to(torch.float8_e4m3fn).float() * power
    return blocks.view(len(codes), -1) * tensor_scale


def row_scale(x: torch.Tensor, mantissa_limit: float, exponent_limit: int) -> torch.Tensor:
    """Returns, per row, the smallest power of two s with amax <= mantissa_limit * 2^exponent_limit * s; 1 for zeros."""
    mantissa, exponent = torch.frexp(x.abs().amax(dim=1, keepdim=True))  # mantissa in [0.5, 1)
    exponent = exponent - exponent_limit + (mantissa > mantissa_limit)
    exponent = torch.where(mantissa > 0, exponent, torch.zeros_like(exponent)).clamp(min=-126)
    return ((exponent + 127).int() << 23).view(torch.float32)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest E2M1 value, ties to even, saturating at 6."""
    magnitude = x.abs().clamp(max=6.0)
    one = torch.ones_like(magnitude)
    step = torch.where(magnitude < 2, 0.5 * one, torch.where(magnitude < 4, one, 2 * one))
    return torch.copysign(torch.round(magnitude / step) * step, x)  # torch.round takes ties to even


def quantize_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 (rows, k) to NVFP4 with a power of two per row: amax <= 6 * 448 = 0.65625 * 2^12 times that power."""
    tensor_scale = row_scale(x, 0.65625, 12)
    blocks = (x / tensor_scale).view(len(x), -1, 16)
    scale = (blocks.abs().amax(dim=2, keepdim=True) * SIXTH).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (round_e2m1(blocks / divisor) * scale).view_as(x) * tensor_scale


def quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 (rows, k) to E4M3 with a power of two per row: amax <= 448 = 0.875 * 2^9 times that power."""
    scale = row_scale(x, 0.875, 9)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


QUANTIZE = {"bf16": lambda x: x, "nvfp4": quantize_nvfp4, "fp8": quantize_e4m3}


def moe(weights: Weights, x: torch.Tensor, routing: Routing, activations: str, limit: float | None) -> torch.Tensor:
    """Computes the layer in fp32, (tokens, hidden): SwiGLU experts, router weights after the down projection.

    silu(gate) * up is rounded to bf16 once in every format. limit: gate is clamped from above and up on both sides
    (DeepSeek-V4).
    """
    quantize, e4m3 = QUANTIZE[activations], activations == "fp8"
    x = quantize(x.float())
    out = torch.zeros_like(x)
    for expert in routing.ids[routing.ids >= 0].unique().tolist():
        token, slot = (routing.ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ dequantize(matrix, expert, e4m3).T for matrix in (weights.gate, weights.up))
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = quantize((torch.nn.functional.silu(gate) * up).bfloat16().float())
        y = h @ dequantize(weights.down, expert, e4m3).T
        out.index_add_(0, token, y * routing.weights[token, slot].unsqueeze(1))
    return out


def errors(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Returns the relative L2 error of the whole output and of the worst token; NaN if any element is NaN.

    A token without a local expert must be exactly zero: anything else counts as an infinite error. A token's error is
    relative to the larger of its own norm and a tenth of the mean norm, so that cancellation does not count.
    """
    difference, norms = (out.float() - expected).norm(dim=1), expected.norm(dim=1)
    empty = norms == 0
    if not bool((out[empty] == 0).all()):
        return float("inf"), float("inf")
    least = 0.1 * norms[~empty].mean() if bool((~empty).any()) else 1.0
    worst = (difference / norms.clamp(min=float(least))).max()
    return float(difference.norm() / expected.norm().clamp(min=1e-30)), float(worst)


def within(error: tuple[float, float], activations: str) -> bool:
    """Returns whether both errors are below their tolerances; False if one is NaN."""
    return all(value < limit for value, limit in zip(error, TOLERANCE[activations], strict=True))
