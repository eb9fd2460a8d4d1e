"""Unquantized bf16 weights through torch's grouped_mm: sort slots by expert, two grouped products, weigh and add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import grouped_mm, silu

from ..reference import dequantize
from ..shapes import Shape
from ..workload import Matrix, Routing, Weights


def unquantized(matrix: Matrix) -> torch.Tensor:
    """Returns (experts, k, rows) of bf16, a view of row-major weights, as the second operand of grouped_mm."""
    experts, rows, half = matrix.codes.shape
    out = torch.empty((experts, rows, 2 * half), dtype=torch.bfloat16, device=matrix.codes.device)
    for expert in range(experts):
        out[expert] = dequantize(matrix, expert)
    return out.transpose(1, 2)


class GroupedMm:
    def __init__(self, variant: str, shape: Shape, weights: Sequence[Weights], most: int):
        self.shape = shape
        self.weights = [(unquantized(each.gate_up), unquantized(each.down)) for each in weights]

    def prepare(self, tokens: int) -> None:
        pass

    def run(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        gate_up, down = self.weights[number]
        local, k = self.shape.local_experts, self.shape.top_k
        # Slots of other ranks sort to the end, after the last group, and are masked out of the sum.
        ids = routing.ids.flatten()
        keys = torch.where(ids < 0, local, ids)
        sorted_ids, order = keys.sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(1, local + 1, dtype=ids.dtype, device=ids.device)).int()
        gate, up = grouped_mm(x[order // k], gate_up, offs=ends).chunk(2, dim=1)
        rows = grouped_mm(silu(gate) * up, down, offs=ends)
        slots = torch.empty_like(rows).index_copy_(0, order, rows).view(-1, k, self.shape.hidden)
        mine = (routing.ids >= 0).unsqueeze(2)
        scaled = torch.where(mine, slots.float() * routing.weights.unsqueeze(2), 0.0)
        out.copy_(scaled.sum(dim=1))


open_layer = GroupedMm
