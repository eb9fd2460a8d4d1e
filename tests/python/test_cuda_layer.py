"""A layer on a GPU from torch: eager, in streams, captured in torch.cuda.graph and replayed; against the CPU's layer.

tests/cuda compares every backend with the CPU. These tests are about torch's tensors, streams and graphs, with the
backend that a user gets and the one for any GPU. Needs torch with CUDA, a GPU, and a build with the CUDA backends:
skipped by name elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import batch as batch_of
from gpu import captured, needs_gpu, on_gpu, stacks, torch

pytestmark = needs_gpu

EXPERTS, TOP_K, HIDDEN, INTER = 12, 3, 256, 192


def config(activation_format: str = "nvfp4", **others: Any) -> nv.MoeConfig:
    return nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTER, activation_format=activation_format, **others)


@pytest.fixture(params=["auto", "cuda"])
def backend(request) -> str:
    return request.param


@pytest.fixture(params=["nvfp4", "bf16", "fp8"])
def activation_format(request, backend: str) -> str:
    choices = nv.explain(dataclasses.asdict(config(request.param)), backend=backend, device="cuda:0")
    if not any(choice["chosen"] for choice in choices):
        pytest.skip(f"{backend}: {choices[0]['reason']}")
    return request.param


def weights(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    return stacks(seed, EXPERTS, HIDDEN, INTER)


def batch(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return batch_of(tokens, HIDDEN, EXPERTS, TOP_K, seed)


def on_device(backend: str, chosen: nv.MoeConfig, w: dict | None = None, **options: Any) -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(chosen, **(w or weights()), device="cuda:0", backend=backend, **options)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float().cpu() - expected.float()).norm() / expected.float().norm()).item()


# The limits of a whole layer, for a batch (docs/explanation/numerics.md, section 8). Most of the limit of quantized
# activations is room for codes that flip and, under fp8, for the few bits that Hopper's FP8 tensor cores add with.
LIMIT = {"nvfp4": 1.5e-2, "bf16": 4.1e-3, "fp8": 2.5e-2}
KINDS = {
    "plain": {},
    "biases": dict(activation="swiglu_oai", swiglu_limit=7.0, expert_biases=True),  # as in gpt-oss
    "no gate": dict(activation="relu2"),  # as in Nemotron-3
}


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_cpu(backend: str, activation_format: str, kind: str) -> None:
    chosen, w, g = config(activation_format, **KINDS[kind]), weights(), torch.Generator().manual_seed(3)
    biases = tuple(2 * torch.randn(EXPERTS, size, generator=g) for size in (INTER, INTER, HIDDEN))
    own = {"biases": biases} if kind == "biases" else {}
    if kind == "no gate":
        w["gate"] = None
    gpu = on_device(backend, chosen, w, **on_gpu(own), max_tokens=130)
    cpu = nv.MoeLayer.from_tensors(chosen, **w, **own, max_tokens=130)
    assert gpu.device == "cuda:0" and backend in ("auto", gpu.describe()["backend"])
    for tokens in (0, 1, 5, 130):
        arrays = batch(tokens)
        out = gpu.run(*on_gpu(arrays))
        assert out.is_cuda and out.dtype == torch.bfloat16 and out.shape == (tokens, HIDDEN)
        if tokens:
            assert relative_error(out, cpu.run(*arrays)) < LIMIT[activation_format]
            # Integer counts are summed in any order. Those of the intermediate may follow a flipped code.
            ours, expected = ({k: v for k, v in one.status().items() if "intermediate" not in k} for one in (gpu, cpu))
            assert ours == expected
    for name, bias in zip(("gate", "up", "down"), own.get("biases", ()), strict=False):
        assert np.array_equal(gpu.expert(7)[name]["bias"], bias[7].numpy())


def test_a_graph_replays_with_other_contents(backend: str, activation_format: str) -> None:
    """Two layers of different sizes in one graph, captured in a stream that no eager run has used. The second one runs
    by torch's operator."""
    import nvfp4_moe.torch_op  # noqa: F401

    wide = on_device(backend, config(activation_format), weights(1), max_tokens=200)
    narrow = on_device(backend, config("bf16"), weights(2), max_tokens=40)
    hidden, ids, router = on_gpu(batch(40))
    first = torch.empty_like(hidden)

    def both() -> torch.Tensor:
        narrow.run(hidden, ids, router, out=first)
        return torch.ops.nvfp4_moe.moe_layer(first, ids, router, wide.handle)

    graph, second = captured(both)
    for seed in range(1, 6):
        for held, fresh in zip((hidden, ids, router), batch(40, seed), strict=True):
            held.copy_(fresh)
        ids[40 - seed :] = -1
        # An eager run of the same layer between replays must not share the graph's workspace.
        wide.run(*on_gpu(batch(200, seed)))
        graph.replay()
        torch.cuda.synchronize()
        expected_first = narrow.run(hidden, ids, router)
        assert torch.equal(first, expected_first)
        assert torch.equal(second, wide.run(expected_first, ids, router))
        assert not first[40 - seed :].any()


def test_streams_do_not_share_a_workspace(backend: str, activation_format: str) -> None:
    layer = on_device(backend, config(activation_format), max_tokens=64)
    batches = [on_gpu(batch(64, seed)) for seed in range(4)]
    expected = [layer.run(*arrays) for arrays in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(10):
        outs = []
        for stream, arrays in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                outs.append(layer.run(*arrays))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_linear_on_the_gpu_and_in_a_graph(backend: str, activation_format: str, dtype: torch.dtype) -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    matrix = tuple(part[0] for part in weights()["gate"])
    options = {"activation_format": activation_format, "max_tokens": 130}
    cpu = nv.Nvfp4Linear.from_tensors(matrix, **options)
    gpu = nv.Nvfp4Linear.from_tensors(matrix, **options, device="cuda:0", backend=backend)
    # The same products, sums in another order, one rounding. Hopper's FP8 tensor cores keep 13 bits of sum |p|, which
    # is 2 / pi sqrt(K) times the rms of a sum (docs/explanation/numerics.md, section 7).
    limit = {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 4e-3)
    if (gpu.describe()["backend"], activation_format) == ("sm90", "fp8"):
        limit += 2.0**-13 * 2 / math.pi * HIDDEN**0.5
    for tokens in (0, 9, 130):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        y = gpu.run(x.cuda())
        assert y.is_cuda and y.dtype == dtype and y.shape == (tokens, INTER)
        assert not tokens or relative_error(y, cpu.run(x)) < limit
    held = torch.randn(40, HIDDEN).to(dtype).cuda()
    graph, out = captured(lambda: torch.ops.nvfp4_moe.linear(held, gpu.handle, INTER))
    for _ in range(3):
        held.normal_()
        graph.replay()
        assert torch.equal(out, gpu.run(held))


def test_what_is_not_here_is_named() -> None:
    layer = on_device("auto", config(), max_tokens=8)
    with pytest.raises(ValueError, match=r"hidden: expected .* on cuda:0, contiguous, got .* on cpu"):
        layer.run(*batch(4))
    with pytest.raises(nv.Unsupported, match="calibrate: expected a layer on cpu"):
        layer.calibrate(*on_gpu(batch(4)))
    with pytest.raises(nv.Unsupported, match="int8_block"):
        on_device("auto", config("int8_block"))
    chosen = [c["backend"] for c in nv.explain(json.loads(layer.config_json()), device="cuda:0") if c["chosen"]]
    assert chosen == [layer.describe()["backend"]]
