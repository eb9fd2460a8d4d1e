"""The floor of an NVFP4 layer: the time below which no kernel of this kind can go.

The weights of an expert with tokens are read once: half a byte an element and one E4M3 scale per 16, 0.5625 byte in all.
Activations are bf16: hidden is read once per token (gathered rows come from the L2 cache), silu(gate) * up is written and
read once per slot, a slot being a token at one of its local experts, and the output is written once. The floor is
max(bytes / BANDWIDTH, flops / RATE).
"""

from __future__ import annotations

from typing import NamedTuple

from .shapes import Shape

# One H200's yardsticks, used on every card, so that floors compare from run to run and from card to card.
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
    """The floor of one step. slots and experts_hit may be means over several routings."""
    size = shape.hidden * shape.intermediate
    tokens_hit = min(tokens, slots)
    read_and_written = 2 * tokens_hit * shape.hidden * 2 + 2 * slots * shape.intermediate * 2
    return Floor(experts_hit * 3 * size * WEIGHT_BYTES + read_and_written, 6 * slots * size)
