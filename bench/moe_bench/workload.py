"""Seeded weights, hidden states and routings.

The draws come from the device's generator. Their order and shapes are part of the protocol: changing them makes records
incomparable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .shapes import Shape


class Matrix(NamedTuple):
    """One NVFP4 matrix per expert: element = e2m1(code) * e4m3(scale) * tensor_scale."""

    codes: torch.Tensor  # uint8 (experts, rows, k / 2), the low nibble is the even k
    scales: torch.Tensor  # e4m3 bytes as uint8 (experts, rows, k / 16)
    tensor_scale: torch.Tensor  # float32 (experts,)


class Weights(NamedTuple):
    gate_up: Matrix  # (experts, 2 * intermediate, hidden), gate rows first; one tensor scale for both
    down: Matrix  # (experts, hidden, intermediate)

    @property
    def gate(self) -> Matrix:
        return self._half(0)

    @property
    def up(self) -> Matrix:
        return self._half(1)

    def _half(self, which: int) -> Matrix:
        rows = self.gate_up.codes.shape[1] // 2
        part = slice(which * rows, (which + 1) * rows)
        return Matrix(self.gate_up.codes[:, part], self.gate_up.scales[:, part], self.gate_up.tensor_scale)


class Routing(NamedTuple):
    ids: torch.Tensor  # int32 (tokens, top_k), experts of the model; -1 for an expert of another rank
    global_ids: torch.Tensor  # the same with an expert of another rank instead of -1
    weights: torch.Tensor  # float32 (tokens, top_k), each row sums to 1
    slots: int  # ids that are not -1
    experts_hit: int  # distinct ones among them


def _matrix(experts: int, rows: int, k: int, seed: int, device: torch.device) -> Matrix:
    """Draws uniform codes and block scales; the tensor scale makes products of the order of 1 / sqrt(k)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device, generator=generator)
    scales = torch.empty((experts, rows, k // 16), dtype=torch.float8_e4m3fn, device=device)
    for expert in range(experts):
        scales[expert].copy_(torch.rand((rows, k // 16), device=device, generator=generator) * 400 + 48)
    tensor_scale = 0.75 + 0.5 * torch.rand(experts, device=device, generator=generator)
    return Matrix(codes, scales.view(torch.uint8), (tensor_scale / (801 * math.sqrt(k))).float())


def make_weights(shape: Shape, layer: int, device: torch.device) -> Weights:
    """Makes layer number `layer` of the rotation."""
    experts, size = shape.local_experts, shape.intermediate
    return Weights(
        _matrix(experts, 2 * size, shape.hidden, 10 + 2 * layer, device),
        _matrix(experts, shape.hidden, size, 11 + 2 * layer, device),
    )


def hard_weights(weights: Weights) -> Weights:
    """Returns the same codes with block scales over every finite positive E4M3 byte, including subnormals."""

    def spread(matrix: Matrix) -> Matrix:
        count = matrix.scales.numel()
        scales = (torch.arange(count, device=matrix.scales.device) * 37 % 126 + 1).to(torch.uint8)
        return Matrix(matrix.codes, scales.view_as(matrix.scales), matrix.tensor_scale * 4)

    return Weights(spread(weights.gate_up), spread(weights.down))


def make_hidden(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(2000 + tokens)
    return torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, generator=generator)


def _draw(shape: Shape, tokens: int, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, int, int]:
    chosen = torch.rand((tokens, shape.experts), device=device, generator=generator).topk(shape.top_k, dim=1).indices
    ids = torch.where(chosen < shape.local_experts, chosen, torch.full_like(chosen, -1)).int().contiguous()
    here = ids[ids >= 0]
    return ids, here.numel(), here.unique().numel()


def make_routings(shape: Shape, tokens: int, count: int, device: torch.device) -> list[Routing]:
    """Draws `count` uniform random routings, with top_k distinct experts per token.

    Up to 64 tokens a draw is repeated, at most 40 times, until its slots and experts hit are together within 1 of their
    expected values; otherwise the nearest draw is used. So small routings have average cost, and a rank with few
    experts always has work.
    """
    local, experts, k = shape.local_experts, shape.experts, shape.top_k
    generator = torch.Generator(device=device).manual_seed(1000 + tokens)
    want_slots = max(tokens * k * local / experts, 1)
    want_hit = max(local * (1 - (1 - k / experts) ** tokens), 1)
    tries = 40 if tokens <= 64 else 1
    others = torch.arange(tokens * k, device=device).view(tokens, k) % max(experts - local, 1) + local
    routings = []
    for number in range(count):
        best = None
        for _ in range(tries):
            ids, slots, hit = _draw(shape, tokens, generator, device)
            if slots == 0:
                continue
            distance = abs(slots - want_slots) + abs(hit - want_hit)
            if best is None or distance < best[0]:
                best = (distance, ids, slots, hit)
            if tries > 1 and distance <= 1.0:
                break
        if best is None:  # no draw had a local expert: take one
            ids[0, 0] = number % local
            best = (0, ids, 1, 1)
        _, ids, slots, hit = best
        weights = torch.rand((tokens, k), device=device, generator=generator) + 0.1
        weights = (weights / weights.sum(1, keepdim=True)).float().contiguous()
        global_ids = torch.where(ids < 0, others.int(), ids).contiguous()
        routings.append(Routing(ids, global_ids, weights, slots, hit))
    return routings
