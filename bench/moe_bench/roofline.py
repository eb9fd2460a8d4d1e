"""The floor of an NVFP4 layer: a lower bound on the time of kernels of this kind.

The weights of an expert with tokens are read once: half a byte per element and one E4M3 scale per 16, 0.5625 byte
together. Activations are bf16: hidden is read once per token (gathered rows come from the L2 cache), silu(gate) * up is
written and read once per slot (a token at one of its local experts), and the output is written once. The floor is
max(bytes / BANDWIDTH, flops / RATE).
"""

from __future__ import annotations

from typing import NamedTuple

from .shapes import Shape

# An H200's rates, used for every card, so that floors are comparable between runs and cards.
BANDWIDTH = 4.3e12  # B/s
RATE = 790e12  # FLOP/s, dense bf16
WEIGHT_BYTES = 0.5625


class Floor(NamedTuple):
    bytes: float
    flops: float

    @property
    def us(self) -> float:
        return 1e6 * max(self.bytes / BANDWIDTH, self.flops / RATE)

    @property
    def bound(self) -> str:
        return "memory" if self.bytes / BANDWIDTH > self.flops / RATE else "math"


def floor(shape: Shape, tokens: int, slots: float, experts_hit: float) -> Floor:
    """Returns the floor of one step. slots and experts_hit may be means over several routings."""
    size = shape.hidden * shape.intermediate
    tokens_hit = min(tokens, slots)
    read_and_written = 2 * tokens_hit * shape.hidden * 2 + 2 * slots * shape.intermediate * 2
    return Floor(experts_hit * 3 * size * WEIGHT_BYTES + read_and_written, 6 * slots * size)
