"""Small layers from seeded NumPy arrays, for the tests of the layer's surface."""

from __future__ import annotations

import threading

import numpy as np
import nvfp4_moe as nv

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 64, 48


def matrices(random: np.random.Generator, experts: int, rows: int, cols: int) -> tuple[np.ndarray, ...]:
    """(codes, scales, tensor_scale) of a stack: every code, scales 2^-2 to 2^1, a tensor scale for each expert."""
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


def floats(seed: int = 3, experts: int = EXPERTS, intermediate: int = INTERMEDIATE) -> dict[str, np.ndarray]:
    """Weights in float32, as from_bf16 takes them."""
    random = np.random.default_rng(seed)
    sizes = {"gate": (intermediate, HIDDEN), "up": (intermediate, HIDDEN), "down": (HIDDEN, intermediate)}
    return {name: random.standard_normal((experts, *size), dtype=np.float32) / 8 for name, size in sizes.items()}


def biases(seed: int = 3) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((EXPERTS, n), dtype=np.float32) for n in (INTERMEDIATE, INTERMEDIATE, HIDDEN))


def expert_of(stacks: dict[str, tuple[np.ndarray, ...]], expert: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Returns one expert of weights, as replace_expert takes it."""
    return {name: tuple(part[expert] for part in stack) for name, stack in stacks.items()}


def stacked(experts: list[dict]) -> dict[str, tuple[np.ndarray, ...]]:
    """Stacks the weights of all experts, each as load_expert and MoeLayer.expert return it."""
    return {
        name: (
            *(np.stack([expert[name][part] for expert in experts]) for part in ("codes", "scales")),
            np.array([expert[name]["tensor_scale"] for expert in experts], np.float32),
        )
        for name in ("gate", "up", "down")
    }


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(codes: np.ndarray, scales: np.ndarray, tensor_scale: float) -> np.ndarray:
    """Decodes the float64 weights (rows, K) of a matrix, without the library."""
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)]
    exponent, mantissa = scales.astype(np.int64) >> 3, scales & 7
    block = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return values * np.repeat(block, 16, 1) * np.float64(tensor_scale)


def plain_layer(stacks, hidden, ids, router_weights) -> np.ndarray:
    """The layer in float64 without any rounding: its values are near, not equal."""
    out = np.zeros(hidden.shape)
    for token, experts in enumerate(ids):
        for expert, weight in zip(experts, router_weights[token], strict=True):
            if expert >= 0:
                gate, up, down = (decoded(*(part[expert] for part in stacks[name])) for name in ("gate", "up", "down"))
                g, u = gate @ hidden[token].astype(np.float64), up @ hidden[token].astype(np.float64)
                out[token] += weight * (down @ (g / (1 + np.exp(-g)) * u))
    return out


def relative_l2(actual, expected) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def bf16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def aligned(size: int, offset: int = 0) -> np.ndarray:
    """uint8 (size,) whose address is `offset` bytes after a multiple of 256."""
    array = np.empty(size + 512, np.uint8)
    begin = -array.ctypes.data % 256 + offset
    return array[begin : begin + size]


def on_threads(count: int, work) -> None:
    """Runs work(0), ..., work(count - 1), each on a thread of its own, until all have ended."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def config(**choices) -> nv.MoeConfig:
    return nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, **choices)


def layer(seed: int = 0, max_tokens: int = 32, backend: str = "auto", **choices) -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(config(**choices), **weights(seed), max_tokens=max_tokens, backend=backend)
