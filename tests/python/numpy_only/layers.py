"""Small layers from seeded NumPy arrays, for the tests of the layer's surface."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 64, 48


def matrices(random: np.random.Generator, experts: int, rows: int, cols: int) -> tuple[np.ndarray, ...]:
    """(codes, scales, tensor_scale) of a stack with every code, scales 2^-2 to 2^1 and tensor scales of their own."""
    return (
        random.integers(0, 256, (experts, rows, cols // 2), dtype=np.uint8),
        random.integers(0x28, 0x40, (experts, rows, cols // 16), dtype=np.uint8),
        random.uniform(0.005, 0.02, experts).astype(np.float32),
    )


def weights(
    seed: int = 0, experts: int = EXPERTS, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE
) -> dict[str, tuple[np.ndarray, ...]]:
    random = np.random.default_rng(seed)
    return {
        "gate": matrices(random, experts, intermediate, hidden),
        "up": matrices(random, experts, intermediate, hidden),
        "down": matrices(random, experts, hidden, intermediate),
    }


def batch(tokens: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hidden float32, topk_ids int64, topk_weights float32)"""
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((tokens, HIDDEN), dtype=np.float32),
        random.integers(0, EXPERTS, (tokens, TOP_K)),
        random.random((tokens, TOP_K), dtype=np.float32),
    )


def config(**choices) -> nv.MoeConfig:
    return nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, **choices)


def layer(seed: int = 0, max_tokens: int = 32, backend: str = "auto", **choices) -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(config(**choices), **weights(seed), max_tokens=max_tokens, backend=backend)
