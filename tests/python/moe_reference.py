"""The layer of the numeric contract in torch float64, with an interval around every output element.

Long because the layer and its intervals are one computation.

`forward` computes the layer choice by choice as docs/explanation/numerics.md defines it. With each value it computes
the set of values that the contract allows, an interval [lo, hi]. It starts as a point (hidden is quantized bit for bit)
and gains the bound of one GEMM element at gemm1. Then it goes through SwiGLU, the rounding to bf16, the second
quantization (row scale, block scale and code of every element that may fall on the other side of a boundary), gemm2 and
combine. Every step after a GEMM is a chain of monotone functions and correct roundings, so the ends of the interval are
found by computing them. A result outside its interval breaks the contract; there is no tolerance to choose.

EXACT is the reference backend: its W4A4 sums have no error, so the intervals are points and the bits must be equal.
CONTRACT is any other backend.

float64 holds everything that must be exact: a W4A4 dot of these sizes is an integer of at most 53 bits in units of
2^-21. A product or sum that needs more bits is rounded to odd, after which rounding to 24 bits or fewer is right. This
file uses nothing of the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

F64 = torch.float64


class Format(NamedTuple):
    bits: int  # of the significand, the hidden one included
    min_exponent: int  # of the smallest normal
    largest: float
    saturates: bool


E2M1 = Format(2, 0, 6.0, True)
E4M3 = Format(4, -6, 448.0, True)
BF16 = Format(8, -126, (2 - 2.0**-7) * 2.0**127, False)
FP16 = Format(11, -14, 65504.0, False)
FP32 = Format(24, -126, (2 - 2.0**-23) * 2.0**127, False)
FORMATS = {"bfloat16": BF16, "float16": FP16, "float32": FP32}

SIXTH = 0xAAAAAB * 2.0**-26  # fl32(1/6), the fp32 number 0x3E2AAAAB
INT8_MIN_SCALE = 2.0**-116
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)
E4M3_VALUES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(F64)
# silu falls up to this argument and rises after it.
SILU_ARGMIN, SILU_MIN = -1.2784645427610738, -0.27846454276107379


@dataclass(frozen=True)
class Options:
    """The fields of nvfp4_moe.MoeConfig, with its defaults."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    activation_format: str = "nvfp4"
    activation_scale: str = "dynamic_token"
    intermediate_scale: str = "dynamic_token"
    intermediate_fixed: float | None = None
    max_router_weight: float = 1.0
    static_headroom: float = 1.0
    router_weight: str = "after_down"
    row_format: str = "bf16"
    situ_gate_limit: float | None = None
    situ_up_limit: float | None = None


class Weights(NamedTuple):
    """A layer's matrices. Each is (codes uint8 (E_local, rows, K/2), scales uint8 (E_local, rows, K/16), tensor_scale
    float32 (E_local)). relu2 ignores gate."""

    gate: tuple
    up: tuple
    down: tuple


class Interval(NamedTuple):
    lo: torch.Tensor
    hi: torch.Tensor

    def map(self, monotone: Callable) -> Interval:
        return Interval(monotone(self.lo), monotone(self.hi))


class Output(NamedTuple):
    """lo and hi are (T, hidden) float64, equal if the contract leaves one value. NaN: the element must be NaN. free
    (T): tokens that are not checked, because a value may or may not overflow."""

    lo: torch.Tensor
    hi: torch.Tensor
    free: torch.Tensor
    dtype: str


@dataclass(frozen=True)
class Accuracy:
    gemm: Callable[[int, str], float]  # (K, activation_format) -> the bound's factor of alpha * sum|p|
    silu: float  # relative error of silu before it is multiplied
    activation: float  # relative error of the whole activation
    flushed: float  # possible error of silu(x) below x = -88
    fp32_range: bool  # a sum before alpha, and the activation before the router weight, are held in fp32


def _exact_gemm(k: int, activation_format: str) -> float:
    # Under bf16 the reference adds in double in its own order, and so does torch in another. Under int8_block the
    # reference's sum is exact, torch's is not. Products of two E4M3 numbers are whole units of 2^-18 below 2^36: their
    # sums are exact in both.
    return 0.0 if activation_format in ("nvfp4", "fp8") else k * 2.0**-52


# The activation is computed in double: another library's exponential, and another order of two operations.
EXACT = Accuracy(_exact_gemm, 2.0**-50, 0.0, 0.0, False)
# One partial sum; 4 ulp of fp32 for the exponential and the operations around it, half an ulp for the router weight.
# exp(-x) overflows fp32 below -88. silu is 0 there instead of up to 88 exp(-88) < 2^-120.
CONTRACT = Accuracy(lambda k, _: (k / 16 + 1) * 2.0**-22, 0.0, 4.5 * 2.0**-23, 2.0**-120, True)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent for integers within float64's normal range, by its bits."""
    return ((exponent.long() + 1023) << 52).view(F64)


def round_to(x: torch.Tensor, to: Format) -> torch.Tensor:
    """float64 x rounded once to nearest even, subnormals included; beyond the largest value 448 and 6 stay, others
    become Inf."""
    last = (torch.frexp(x)[1] - 1).clamp(to.min_exponent, 1000) - (to.bits - 1)
    rounded = torch.round(x * power_of_two(-last)) * power_of_two(last)
    if to.saturates:
        rounded = rounded.clamp(-to.largest, to.largest)
    else:
        rounded = torch.where(rounded.abs() > to.largest, torch.copysign(torch.full_like(x, torch.inf), x), rounded)
    return torch.where(x.isfinite(), rounded, x.clamp(-to.largest, to.largest) if to.saturates else x)


def _to_odd(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, |residual| at most half an ulp of x. An inexact sum becomes the neighbour whose last bit is 1."""
    inexact = (residual != 0) & residual.isfinite() & x.isfinite()
    even = (x.view(torch.int64) & 1) == 0
    toward = torch.copysign(torch.full_like(x, torch.inf), residual)
    return torch.where(inexact & even, torch.nextafter(x, toward), x)


def product_to_odd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b rounded to odd (Dekker's exact product)."""
    a, b = torch.broadcast_tensors(a, b)
    p = a * b

    def halves(x):
        big = x * (2.0**27 + 1)
        high = big - (big - x)
        return high, x - high

    (ah, al), (bh, bl) = halves(a), halves(b)
    return _to_odd(p, ((ah * bh - p) + ah * bl + al * bh) + al * bl)


def sum_to_odd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b rounded to odd (Knuth's exact sum)."""
    s = a + b
    part = s - a
    return _to_odd(s, (a - (s - part)) + (b - part))


def decode(matrix: tuple, expert: int) -> torch.Tensor:
    """(rows, K) of e2m1 * e4m3: the tensor scale stays outside, in alpha."""
    codes, scales = (torch.as_tensor(part[expert]) for part in matrix[:2])
    values = torch.stack([E2M1_VALUES[(codes & 15).long()], E2M1_VALUES[(codes >> 4).long()]], -1).flatten(-2)
    return values * E4M3_VALUES[scales.long()].repeat_interleave(16, -1)


def decode_fp8(matrix: tuple, expert: int) -> tuple[torch.Tensor, int]:
    """(w8 (rows, K), shift) under fp8: w8 = E4M3 of decode() * 2^-shift, and alpha has 2^shift."""
    largest = float(E4M3_VALUES[torch.as_tensor(matrix[1][expert]).long()].max())
    shift = int(next_power_of_two(torch.tensor(6 * largest, dtype=F64), 448.0)) if largest > 0 else 0
    return round_to(decode(matrix, expert) * 2.0**-shift, E4M3), shift


def next_power_of_two(x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """The exponent of the smallest power of two s with x <= times * s; x, times > 0."""
    exponent = torch.frexp(x / times)[1] - 1  # of a power of two at most twice too small, at most twice too large
    exponent = exponent - (times * power_of_two(exponent) >= x).long()
    return exponent + (times * power_of_two(exponent) < x).long()


class RowScales(NamedTuple):
    """The quantization of a line (R, K): candidates() of its scale, then the two fp32 formulas."""

    kind: str  # dynamic_token, power (of two), vllm_order
    scale: float = 0.0
    holds: float = 2688.0  # the largest value under a scale of 1: 448 under fp8

    def candidates(self, amax: Interval) -> Interval:
        """(R, 1): the smallest and the largest scale that the line may have."""
        if self.kind != "dynamic_token":
            return Interval(*[torch.full_like(amax.lo, self.scale)] * 2)
        low, high = (
            torch.where(a > 0, next_power_of_two(a.clamp(min=2.0**-1000), self.holds).clamp(min=-126), 0) for a in amax
        )
        low = torch.where((amax.lo == 0) & (amax.hi > 0), -126, low)  # a line of zeros has scale 1, without effect
        return Interval(power_of_two(low), power_of_two(high))

    def block_scale(self, amax: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if self.kind == "vllm_order":
            g = round_to(1 / s, FP32)
            quotient = round_to(g * round_to(amax * SIXTH, FP32), FP32)
        else:
            quotient = round_to(round_to(amax / s, FP32) * SIXTH, FP32)
        return round_to(quotient, E4M3)

    def decoded(self, x: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """e2m1 code * v of each element, 0 in a block whose scale v is 0."""
        safe = torch.where(v > 0, v, torch.ones_like(v))
        if self.kind == "vllm_order":
            inverse = round_to(1 / round_to(safe * round_to(1 / round_to(1 / s, FP32), FP32), FP32), FP32)
            quotient = round_to(x * inverse, FP32)
        else:
            quotient = round_to(round_to(x / s, FP32) / safe, FP32)
        return torch.where(v > 0, round_to(quotient, E2M1) * v, torch.zeros_like(x))


def _magnitude(x: Interval) -> Interval:
    low = torch.where((x.lo <= 0) & (x.hi >= 0), torch.zeros_like(x.lo), torch.minimum(x.lo.abs(), x.hi.abs()))
    return Interval(low, torch.maximum(x.lo.abs(), x.hi.abs()))


def quantize(x: Interval, scales: RowScales) -> tuple[Interval, torch.Tensor]:
    """(decoded codes (R, K), line scale (R, 1)) of finite lines: value = decoded * line scale.

    If a line may have two scales, the decoded values are in units of the larger. Every block scale that a block may
    have is tried on both ends of each element, because a fixed scale is monotone. If there are too many to try, because
    a block's largest element is nearly free, its values are at most twice that element (6 v s <= 2 A, for the scale's
    smallest value, the worst case).
    """
    if len(x.lo) == 0:
        return x, torch.ones((0, 1), dtype=F64)
    blocks = x.map(lambda end: end.unflatten(-1, (-1, 16)))
    block_amax = _magnitude(blocks).map(lambda end: end.amax(-1, keepdim=True))
    smallest, unit = scales.candidates(block_amax.map(lambda end: end.amax(-2)))
    low, high = torch.full_like(blocks.lo, torch.inf), torch.full_like(blocks.lo, -torch.inf)
    wide = (unit > 2 * smallest).expand(blocks.lo.shape[:2])
    for s in (unit, smallest):
        line = s.unsqueeze(-1).expand_as(block_amax.lo)
        first, last = (
            torch.searchsorted(E4M3_VALUES, scales.block_scale(a, line)) for a in (block_amax.lo, block_amax.hi)
        )
        ratio = line / unit.unsqueeze(-1)
        wide = wide | (last > first + 8).squeeze(-1)
        which = ~wide & ((s < unit) | (s is unit))
        while bool(which.any()):
            v = E4M3_VALUES[first[which]]
            for end in blocks:
                value = scales.decoded(end[which], v, line[which]) * ratio[which]
                low[which], high[which] = torch.minimum(low[which], value), torch.maximum(high[which], value)
            first = first + 1
            which = which & (first <= last).squeeze(-1)
    if bool(wide.any()):
        most = (2.01 * block_amax.hi / unit.unsqueeze(-1)).expand_as(low)[wide]
        low[wide], high[wide] = -most, most
    return Interval(low.flatten(-2), high.flatten(-2)), unit


def quantize_fp8(x: Interval, scales: RowScales) -> tuple[Interval, torch.Tensor]:
    """(E4M3 values (R, K), line scale (R, 1)) of finite lines under fp8, in units of the larger scale if a line may
    have two. Each is tried on both ends of every element. If there are more than two, a half step on each side of x
    encloses them: a sixteenth of it, or 2^-10 of the scale."""
    if len(x.lo) == 0:
        return x, torch.ones((0, 1), dtype=F64)
    smallest, unit = scales.candidates(_magnitude(x).map(lambda end: end.amax(-1, keepdim=True)))
    ends = [round_to(end / s, E4M3) * (s / unit) for s in (smallest, unit) for end in x]
    low, high = torch.stack(ends).amin(0), torch.stack(ends).amax(0)
    wide = (unit > 2 * smallest).squeeze(-1)
    if bool(wide.any()):
        half = [torch.maximum(end[wide].abs() / unit[wide] / 16, torch.full_like(end[wide], 2.0**-10)) for end in x]
        low[wide], high[wide] = x.lo[wide] / unit[wide] - half[0], x.hi[wide] / unit[wide] + half[1]
    return Interval(low, high), unit


def quantize_int8(x: Interval) -> Interval:
    """Decoded values (R, K), code * scale, of finite lines under int8_block, which has no line scale.

    A block's scale follows from its largest element, a bf16 value that may be known only as a range. Each value of the
    range is tried, on both ends of every element. If there are too many, half a step on each side of x encloses them.
    """
    blocks = x.map(lambda end: end.unflatten(-1, (-1, 16)))
    amax, last = _magnitude(blocks).map(lambda end: end.amax(-1, keepdim=True))

    def scale(largest: torch.Tensor) -> torch.Tensor:
        return round_to(largest / 127, FP32).clamp(min=INT8_MIN_SCALE)

    low, high = torch.full_like(blocks.lo, torch.inf), torch.full_like(blocks.lo, -torch.inf)
    which = torch.ones_like(amax[..., 0], dtype=torch.bool)
    for _ in range(9):
        s = scale(amax[which])
        for end in blocks:
            value = torch.round(round_to(end[which] / s, FP32)) * s
            low[which], high[which] = torch.minimum(low[which], value), torch.maximum(high[which], value)
        exponent = torch.where(amax > 0, torch.frexp(amax)[1] - 1, -126)
        amax = amax + power_of_two(exponent.clamp(min=-126) - 7)
        which = (amax <= last).squeeze(-1)
        if not bool(which.any()):
            break
    half = scale(last)[which] * (0.5 + 2.0**-17)
    low[which], high[which] = blocks.lo[which] - half, blocks.hi[which] + half
    return Interval(low.flatten(-2), high.flatten(-2))


def gemm(x: Interval, weight: torch.Tensor, alpha: torch.Tensor, factor: float, to: Format) -> Interval:
    """Rounds alpha * sum (R, N) to `to` once; the sum is within `factor` of sum|p|. x (R, K) finite, weight (N, K)."""
    positive, negative = weight.clamp(min=0).T, weight.clamp(max=0).T
    low, high = x.lo @ positive + x.hi @ negative, x.hi @ positive + x.lo @ negative
    largest = torch.maximum(x.lo.abs(), x.hi.abs())
    # The bound's own sum is within K 2^-53.
    bound = factor * (1 + 2.0**-30) * (largest @ weight.abs().T)
    if factor >= 2.0**-24:
        # An fp32 sum may take inputs, products and partial sums below 2^-126 as 0. If x is 2^-100 or larger there are
        # no such values: all are multiples of 2^-7 * 2^-10 * 2^-100.
        tiny = ((largest > 0) & (largest < 2.0**-100)).any(-1, keepdim=True)
        bound = bound + tiny * 2.0**-126 * (weight.abs() + 2).sum(-1)
    return Interval(round_to(product_to_odd(alpha, low - bound), to), round_to(product_to_odd(alpha, high + bound), to))


def overflows(x: Interval, weight: torch.Tensor, accuracy: Accuracy) -> torch.Tensor:
    """(R): lines of bf16 values whose sum, without alpha, may exceed fp32's range if a backend keeps it in fp32."""
    largest = torch.maximum(x.lo.abs(), x.hi.abs()) @ weight.abs().T
    return (largest.amax(-1) * (1 + 2.0**-10) > FP32.largest) & bool(accuracy.fp32_range)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _silu_range(g: Interval, slope: float, accuracy: Accuracy) -> Interval:
    """g * sigmoid(slope * g) = silu(slope g) / slope, slope > 0."""
    ends = [_silu(end * slope) / slope for end in g]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    passes = (g.lo * slope < SILU_ARGMIN) & (g.hi * slope > SILU_ARGMIN)
    low = torch.where(passes, SILU_MIN / slope, low)
    flushed = torch.where(g.lo * slope < -88, accuracy.flushed / slope, 0.0)
    return Interval(low - low.abs() * accuracy.silu, high + torch.maximum(high.abs() * accuracy.silu, flushed))


def _gated_range(g: Interval, gate, accuracy: Accuracy) -> Interval:
    """A gate function over an interval. It falls down to its one minimum, left of 0, and rises from there."""
    grid = torch.linspace(-3, 0, 30001, dtype=F64)
    least = gate(grid).min()  # within 2^-26 of the minimum
    at = grid[gate(grid).argmin()]
    ends = [gate(end) for end in g]
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    passes = (g.lo < at + 1e-4) & (g.hi > at - 1e-4)
    low = torch.where(passes, torch.minimum(low, least * (1 + 2.0**-26)), low)
    flushed = torch.where(high < 0, accuracy.flushed, 0.0)
    return Interval(low - low.abs() * accuracy.silu, high + torch.maximum(high.abs() * accuracy.silu, flushed))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.special.erfc(-x / math.sqrt(2)) / 2


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


def _situ(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit) * torch.sigmoid(x)


def _times(a: Interval, b: Interval) -> Interval:
    corners = torch.stack([x * y for x in a for y in b])
    return Interval(corners.amin(0), corners.amax(0))


def activate(options: Options, g: Interval, u: Interval, accuracy: Accuracy) -> Interval:
    limit = options.swiglu_limit
    if options.activation in ("swiglu_clamped", "swiglu_oai"):
        g = g.map(lambda x: x.clamp(max=limit))
    if options.activation in ("swiglu_clamped", "swiglu_step", "swiglu_oai"):
        u = u.map(lambda x: x.clamp(-limit, limit))
    if options.activation in ("swiglu", "swiglu_clamped"):
        result = _times(_silu_range(g, 1.0, accuracy), u)
    elif options.activation == "swiglu_step":
        result = _times(_silu_range(g, 1.0, accuracy).map(lambda x: x.clamp(max=limit)), u)
    elif options.activation == "swiglu_oai":
        slope = float(torch.tensor(options.swiglu_alpha, dtype=torch.float32))
        result = _times(_silu_range(g, slope, accuracy), u.map(lambda x: x + 1))
    elif options.activation in ("gelu", "gelu_tanh"):
        result = _times(_gated_range(g, _gelu if options.activation == "gelu" else _gelu_tanh, accuracy), u)
    elif options.activation == "situ":
        of_gate, of_up = (float(torch.tensor(x)) for x in (options.situ_gate_limit, options.situ_up_limit))
        gate = _gated_range(g, lambda x: _situ(x, of_gate), accuracy)
        result = _times(gate, u.map(lambda x: of_up * torch.tanh(x / of_up)))
    elif options.activation == "relu2":
        result = u.map(lambda x: x.clamp(min=0.0) ** 2)
    else:
        raise ValueError(f"activation: {options.activation}")
    return Interval(
        result.lo - result.lo.abs() * accuracy.activation, result.hi + result.hi.abs() * accuracy.activation
    )


def _largest(scale) -> float:
    """The largest scale, given one number or one per expert."""
    return float(torch.as_tensor(scale, dtype=torch.float32).max())


def line_range(activation_format: str) -> float:
    """The largest value under a line scale of 1."""
    return 448.0 if activation_format == "fp8" else 2688.0


def _power(value: float, holds: float, times: float = 1.0) -> RowScales:
    """times the smallest power of two under which a line holds the value."""
    exponent = next_power_of_two(torch.tensor(value, dtype=F64), holds)
    return RowScales("power", float(power_of_two(exponent)) * times, holds)


def hidden_scales(options: Options, input_scale) -> RowScales:
    holds = line_range(options.activation_format)
    if options.activation_scale == "dynamic_token":
        return RowScales("dynamic_token", holds=holds)
    scale = _largest(input_scale[0])
    if options.activation_scale == "vllm_order":
        return RowScales("vllm_order", scale)
    return _power(2688 * scale, holds, options.static_headroom)


def intermediate_scales(options: Options, input_scale) -> RowScales:
    holds = line_range(options.activation_format)
    if options.intermediate_scale == "dynamic_token":
        return RowScales("dynamic_token", holds=holds)
    if options.intermediate_scale == "vllm_order":
        return RowScales("vllm_order", _largest(input_scale[1]))
    if options.intermediate_fixed is not None:
        return RowScales("power", options.intermediate_fixed, holds)
    if options.activation == "situ":
        bound = math.prod(float(torch.tensor(x)) for x in (options.situ_gate_limit, options.situ_up_limit))
        return _power(
            bound * (max(1.0, options.max_router_weight) if options.router_weight == "before_down" else 1), holds
        )
    if options.swiglu_limit is None:
        return _power(2688 * _largest(input_scale[1]), holds, 16)
    limit = float(torch.tensor(options.swiglu_limit, dtype=torch.float32))
    # |silu| reaches 0.2785 below zero under every limit.
    if options.activation == "swiglu_oai":
        bound = max(limit, -SILU_MIN / options.swiglu_alpha) * (limit + 1)
    else:
        bound = max(limit, -SILU_MIN) * limit
    if options.router_weight == "before_down":
        bound *= max(1.0, options.max_router_weight)
    return _power(bound, holds)


def _alpha(row_scale: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    return round_to(product_to_odd(row_scale, torch.full_like(row_scale, tensor_scale)), FP32)


def _rows(options, weights, expert, x, row_scale, router_weight, accuracy, requantize):
    """(row (R, hidden) interval, free (R)) of one expert's assignments. x (R, hidden), row_scale (R, 1)."""
    if options.activation == "relu2":
        weights = weights._replace(gate=weights.up)  # its result is not used
    gate, up, down = (decode(matrix, expert) for matrix in weights)
    scale_of = [float(matrix[2][expert]) for matrix in weights]
    w4a4, bf16, fp8 = (options.activation_format == name for name in ("nvfp4", "bf16", "fp8"))
    if fp8:
        (gate, up, down), shifts = zip(*(decode_fp8(matrix, expert) for matrix in weights), strict=True)
        scale_of = [scale * 2.0**shift for scale, shift in zip(scale_of, shifts, strict=True)]
    point = Interval(x, x)
    gemm1 = accuracy.gemm(options.hidden_size, options.activation_format)
    if w4a4:
        largest = max(float((x.abs() @ matrix.abs().T).amax()) for matrix in (gate, up))
        assert largest < 2.0**31, "sum|p| in units of 2^-21 would pass float64's 53 bits: choose a smaller hidden_size"
    g = gemm(point, gate, _alpha(row_scale, scale_of[0]), gemm1, FP32)
    u = gemm(point, up, _alpha(row_scale, scale_of[1]), gemm1, FP32)
    h = activate(options, g, u, accuracy)
    too_large = torch.maximum(h.lo.abs(), h.hi.abs()).amax(-1) > FP32.largest
    if options.router_weight == "before_down":
        h = _times(h, Interval(router_weight, router_weight))
    h = h.map(lambda end: round_to(end, BF16))

    settled = (h.lo == h.hi) | (h.lo.isnan() & h.hi.isnan())
    usable = h.lo.isfinite().all(-1) & h.hi.isfinite().all(-1)
    broken = (settled & ~h.lo.isfinite()).any(-1)
    free = ~usable & ~broken  # h may or may not overflow
    if accuracy.fp32_range and options.router_weight == "before_down":
        free = free | too_large  # Inf for every router weight
    free = free | overflows(point, gate, accuracy) | overflows(point, up, accuracy)
    row = Interval(*(torch.full((len(x), options.hidden_size), torch.nan, dtype=F64) for _ in range(2)))
    if bool(usable.any()):
        lines = h.map(lambda end: end[usable])
        scale = torch.ones((len(lines.lo), 1), dtype=F64)
        if w4a4:
            lines, scale = quantize(lines, requantize)
        elif fp8:
            lines, scale = quantize_fp8(lines, requantize)
        elif not bf16:
            lines = quantize_int8(lines)
        to = BF16 if options.row_format == "bf16" else FP32
        factor = accuracy.gemm(options.intermediate_size, options.activation_format)
        free[usable] |= overflows(lines, down, accuracy)
        part = gemm(lines, down, _alpha(scale, scale_of[2]), factor, to)
        row.lo[usable], row.hi[usable] = part.lo, part.hi
    if bf16 and bool(broken.any()):
        # IEEE rules: a sum with an infinite or NaN term is Inf or NaN for any finite terms.
        known = broken & (settled | (h.lo.isfinite() & h.hi.isfinite())).all(-1)
        finite = h.map(lambda end: torch.where(end.isfinite(), end, torch.zeros_like(end)))
        free = free | (broken & ~known) | (broken & overflows(finite, down, accuracy))
        row.lo[known] = row.hi[known] = (h.lo[known].unsqueeze(1) * (down * scale_of[2]).unsqueeze(0)).sum(-1)
    return row, free


def forward(
    options: Options,
    weights: Weights,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    input_scale=None,
    first_expert: int = 0,
    out_dtype: str | None = None,
    accuracy: Accuracy = EXACT,
) -> Output:
    """hidden (T, hidden) bf16, fp16 or fp32; topk_ids (T, top_k) global ids; topk_weights (T, top_k) fp32."""
    tokens, local_experts = len(hidden), len(weights.gate[0])
    dtype = out_dtype or str(hidden.dtype).removeprefix("torch.")
    x = hidden.to(F64)
    if options.router_weight == "on_input":  # both factors and the product are numbers of hidden's dtype
        own = FORMATS[str(hidden.dtype).removeprefix("torch.")]
        x = round_to(x * round_to(topk_weights.to(F64), own), own)
    spoiled = ~x.isfinite().all(-1)
    x = torch.where(spoiled.unsqueeze(-1), torch.zeros_like(x), x)
    if by_line := {"nvfp4": quantize, "fp8": quantize_fp8}.get(options.activation_format):
        lines, scale = by_line(Interval(x, x), hidden_scales(options, input_scale))
        x, requantize = lines.lo, intermediate_scales(options, input_scale)
    else:
        scale, requantize = torch.ones((tokens, 1), dtype=F64), None
        x = round_to(x, BF16) if options.activation_format == "bf16" else quantize_int8(Interval(x, x)).lo

    local = topk_ids.long() - first_expert  # an id near -2^63 wraps, and is not valid either way
    valid = (topk_ids.long() >= 0) & (topk_ids.long() < options.num_experts) & (local >= 0) & (local < local_experts)
    shape = (tokens, options.top_k, options.hidden_size)
    rows = Interval(torch.zeros(shape, dtype=F64), torch.zeros(shape, dtype=F64))
    free = torch.zeros((tokens, options.top_k), dtype=torch.bool)
    for expert in torch.unique(local[valid]).tolist():
        token, k = torch.nonzero(valid & (local == expert), as_tuple=True)
        weight = topk_weights[token, k].to(F64).unsqueeze(-1)
        row, unknown = _rows(options, weights, expert, x[token], scale[token], weight, accuracy, requantize)
        for end, value in zip(rows, row, strict=True):
            end[token, k] = torch.where(spoiled[token].unsqueeze(-1), torch.nan, value)
        free[token, k] = unknown & ~spoiled[token]

    acc = Interval(*torch.zeros((2, tokens, options.hidden_size), dtype=F64))
    for k in range(options.top_k):
        row, weight = Interval(rows.lo[:, k], rows.hi[:, k]), topk_weights[:, k].to(F64).unsqueeze(-1)
        if options.router_weight == "after_down":
            # 0 * Inf is NaN, which an interval around 0 cannot express
            free[:, k] |= (weight.isinf() & (row.lo < row.hi) & (row.lo <= 0) & (row.hi >= 0)).any(-1)
            row = _times(row, Interval(weight, weight))
        acc = Interval(
            *(
                torch.where(valid[:, k : k + 1], round_to(sum_to_odd(a, r), FP32), a)
                for a, r in zip(acc, row, strict=True)
            )
        )
    out = acc.map(lambda end: round_to(end, FORMATS[dtype]))
    # for example Inf - Inf at one end only
    free = free.any(-1) | (out.lo.isnan() ^ out.hi.isnan()).any(-1)
    return Output(out.lo, out.hi, free, dtype)


def outside(expected: Output, actual: torch.Tensor) -> torch.Tensor:
    """Returns (T, hidden) bool: the elements of actual that the contract does not allow."""
    value = actual.to(F64)
    same = (value >= expected.lo) & (value <= expected.hi)
    both_nan = expected.lo.isnan() & expected.hi.isnan() & value.isnan()
    return ~(same | both_nan | expected.free.unsqueeze(-1))
