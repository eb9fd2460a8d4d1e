"""Requirements of the GPU tests: torch with CUDA, a GPU, and a build with the CUDA backends. Skipped by name else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

LAYERS = Path(__file__).resolve().parent / "numpy_only"
sys.path.insert(0, str(LAYERS))
import layers  # noqa: E402, F401  small ones, for the tests that take them

SLACK_BYTES = 64 << 20  # bytes of a GPU's memory that the driver may keep


def why_not() -> str:
    """Returns why no layer can be opened on a GPU here, or ""."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        nv.explain({"num_experts": 2, "top_k": 1, "hidden_size": 16, "intermediate_size": 16}, device="cuda:0")
    except nv.Unsupported as refused:
        return str(refused)
    return ""


needs_gpu = pytest.mark.skipif(why_not() != "", reason=why_not())


def on_gpu(value: Any) -> Any:
    """Copies tensors and arrays to the GPU, single ones or in tuples and dictionaries."""
    if isinstance(value, dict):
        return {name: on_gpu(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(on_gpu(part) for part in value)
    return None if value is None else torch.as_tensor(value).cuda()


def captured(call: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Returns a graph of a call, and the call's result, which replays write. options: of torch.cuda.graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        made = call()
    return graph, made


def stack(random: np.random.Generator, experts: int, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """NVFP4 weights whose products keep the size of the inputs."""
    codes = random.integers(0, 256, (experts, rows, cols // 2), dtype=np.uint8)
    scales = random.integers(0x58, 0x7E, (experts, rows, cols // 16), dtype=np.uint8)
    return codes, scales, (random.uniform(0.75, 1.25, experts) / (800 * cols**0.5)).astype(np.float32)


def stacks(seed: int, experts: int, hidden: int, inner: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {name: stack(random, experts, *size) for name, size in sizes.items()}


def batch(tokens: int, hidden: int, experts: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """hidden states bfloat16, ids int32, router weights float32, in host memory"""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, experts, generator=g).topk(top_k, dim=1).indices.int()
    return states, ids, torch.rand(tokens, top_k, generator=g)


def assert_comes_back(free_before: int, free_bytes: Callable[[], int], limit_s: float = 30) -> None:
    """The GPU's free memory; the driver takes a moment to clear up after a process."""
    until = time.monotonic() + limit_s
    while (lost := free_before - free_bytes()) > SLACK_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    assert lost <= SLACK_BYTES, f"{lost} bytes are gone, {torch.cuda.memory_reserved()} of them torch's"
