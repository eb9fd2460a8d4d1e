"""A layer on a GPU from torch: eager, in streams, captured in torch.cuda.graph and replayed; against the CPU's layer.

Every backend that the GPU has, W4A4, W4A16 and W4A8 in E4M3. Needs torch with CUDA, a GPU, and a build with the CUDA
backends: skipped by name elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import batch as batch_of
from gpu import captured, needs_gpu, on_gpu, stacks, torch

pytestmark = needs_gpu

GPU_BACKENDS = ("sm100", "sm120", "sm90", "cuda")
FORMATS = ("nvfp4", "bf16", "fp8")
EXPERTS, TOP_K, HIDDEN, INTER = 12, 3, 256, 192


def config(activation_format: str = "nvfp4", **others: object) -> nv.MoeConfig:
    return nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTER, activation_format=activation_format, **others)


def skip_where_declined(backend: str, activation_format: str) -> None:
    refusals = [
        choice["reason"]
        for choice in nv.explain(dataclasses.asdict(config(activation_format)), backend=backend, device="cuda:0")
        if choice["backend"] == backend and not choice["chosen"]
    ]
    if refusals:
        pytest.skip(f"{backend}: {refusals[0]}")


@pytest.fixture(params=GPU_BACKENDS)
def backend(request) -> str:
    skip_where_declined(request.param, "nvfp4")
    return request.param


@pytest.fixture(params=FORMATS)
def activation_format(request, backend: str) -> str:
    skip_where_declined(backend, request.param)
    return request.param


def weights(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    return stacks(seed, EXPERTS, HIDDEN, INTER)


def batch(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return batch_of(tokens, HIDDEN, EXPERTS, TOP_K, seed)


def on_device(backend: str, activation_format: str, w: dict, max_tokens: int, device: str = "cuda:0") -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(
        config(activation_format), **w, device=device, backend=backend, max_tokens=max_tokens
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float().cpu() - expected.float()).norm() / expected.float().norm()).item()


def few_bits(backend: str, activation_format: str, k: int) -> float:
    """The possible error of sums of Hopper's FP8 tensor cores, over the rms of a sum: 13 bits of sum |p|, which is 2 /
    pi sqrt(k) times that rms for products of random sign (docs/explanation/numerics.md, section 7)."""
    return 2.0**-13 * 2 / math.pi * k**0.5 if (backend, activation_format) == ("sm90", "fp8") else 0.0


# The limits of a whole layer, for a batch (docs/explanation/numerics.md, section 8). Most of the limit of quantized
# activations is room for codes that flip and, under fp8, for the few bits that Hopper's FP8 tensor cores add with.
LIMIT = {"nvfp4": 1.5e-2, "bf16": 4.1e-3, "fp8": 2.5e-2}


@pytest.mark.parametrize("tokens", [0, 1, 5, 130])
def test_agrees_with_the_cpu(backend: str, activation_format: str, tokens: int) -> None:
    w, arrays = weights(), batch(tokens)
    gpu = on_device(backend, activation_format, w, 130)
    cpu = nv.MoeLayer.from_tensors(config(activation_format), **w, max_tokens=130)
    assert gpu.device == "cuda:0" and gpu.describe()["backend"] == backend
    out = gpu.run(*on_gpu(arrays))
    assert out.is_cuda and out.dtype == torch.bfloat16 and out.shape == (tokens, HIDDEN)
    if tokens:
        assert relative_error(out, cpu.run(*arrays)) < LIMIT[activation_format]
    # Integer counts are summed in any order. Those of the intermediate may follow a flipped code.
    if tokens:
        ours, expected = ({k: v for k, v in one.status().items() if "intermediate" not in k} for one in (gpu, cpu))
        assert ours == expected


def test_weights_may_lie_on_the_gpu_and_come_back(backend: str, activation_format: str) -> None:
    w, arrays = weights(), on_gpu(batch(9))
    lent = on_gpu(w)
    # gate and up as halves of one tensor: the rows of an expert are contiguous, the experts are not.
    both = [torch.cat([lent["gate"][i], lent["up"][i]], dim=1) for i in (0, 1)]
    lent["gate"] = (both[0][:, :INTER], both[1][:, :INTER], lent["gate"][2])
    lent["up"] = (both[0][:, INTER:], both[1][:, INTER:], lent["up"][2])
    from_gpu = on_device(backend, activation_format, lent, 9)
    from_cpu = on_device(backend, activation_format, w, 9, "cuda")
    assert torch.equal(from_gpu.run(*arrays), from_cpu.run(*arrays))
    for name in ("gate", "up", "down"):
        kept = from_gpu.expert(7)[name]
        assert np.array_equal(kept["codes"], w[name][0][7]) and np.array_equal(kept["scales"], w[name][1][7])


def test_a_graph_replays_with_other_contents(backend: str, activation_format: str) -> None:
    """Two layers of different sizes in one graph, captured in a stream that no eager run has used."""
    wide = on_device(backend, activation_format, weights(1), 200)
    narrow = on_device(backend, "bf16", weights(2), 40)
    hidden, ids, router = on_gpu(batch(40))
    first, second = torch.empty_like(hidden), torch.empty_like(hidden)

    def both() -> None:
        narrow.run(hidden, ids, router, out=first)
        wide.run(first, ids, router, out=second)

    graph, _ = captured(both)
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
    layer = on_device(backend, activation_format, weights(), 64)
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


def test_the_torch_op_runs_on_the_gpu_and_in_a_graph(backend: str, activation_format: str) -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    layer = on_device(backend, activation_format, weights(), 16)
    arrays = on_gpu(batch(16))
    expected = layer.run(*arrays)
    assert torch.equal(torch.ops.nvfp4_moe.moe_layer(*arrays, layer.handle), expected)
    graph, out = captured(lambda: torch.ops.nvfp4_moe.moe_layer(*arrays, layer.handle))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_warms_up_and_replaces_an_expert(backend: str, activation_format: str) -> None:
    w = weights()
    layer = on_device(backend, activation_format, w, 32)
    layer.warmup()
    other = weights(5)
    layer.replace_expert(3, *((*(part[4] for part in other[name][:2]), float(other[name][2][4])) for name in other))
    for name in w:
        for old, new in zip(w[name], other[name], strict=True):
            old[3] = new[4]
    fresh = on_device(backend, activation_format, w, 32)
    arrays = on_gpu(batch(32))
    assert torch.equal(layer.run(*arrays), fresh.run(*arrays))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_linear_on_the_gpu_and_in_a_graph(backend: str, activation_format: str, dtype: torch.dtype) -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    matrix = tuple(part[0] for part in weights()["gate"])
    options = {"activation_format": activation_format, "max_tokens": 1100}
    cpu = nv.Nvfp4Linear.from_tensors(matrix, **options)
    gpu = nv.Nvfp4Linear.from_tensors(matrix, **options, device="cuda:0", backend=backend)
    assert gpu.device == "cuda:0" and gpu.describe()["backend"] == backend
    for tokens in (0, 1, 9, 130, 1100):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        y = gpu.run(x.cuda())
        assert y.is_cuda and y.dtype == dtype and y.shape == (tokens, INTER)
        if tokens:  # the same products, sums in another order, one rounding
            limit = {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 4e-3)
            assert relative_error(y, cpu.run(x)) < limit + few_bits(backend, activation_format, HIDDEN)
    held = torch.randn(40, HIDDEN).to(dtype).cuda()
    graph, out = captured(lambda: torch.ops.nvfp4_moe.linear(held, gpu.handle, INTER))
    for _ in range(3):
        held.normal_()
        graph.replay()
        assert torch.equal(out, gpu.run(held))


def test_what_is_not_here_is_named() -> None:
    layer = on_device("auto", "nvfp4", weights(), 8)
    with pytest.raises(ValueError, match=r"hidden: expected .* on cuda:0, contiguous, got .* on cpu"):
        layer.run(*batch(4))
    with pytest.raises(nv.Unsupported, match="calibrate: expected a layer on cpu"):
        layer.calibrate(*on_gpu(batch(4)))
    with pytest.raises(nv.Unsupported, match="int8_block"):
        nv.MoeLayer.from_tensors(config("int8_block"), **weights(), device="cuda:0")
    with pytest.raises(nv.Unsupported, match="int8_block"):
        nv.Nvfp4Linear.from_tensors(
            [part[0] for part in weights()["gate"]], activation_format="int8_block", device="cuda:0"
        )
    chosen = [c["backend"] for c in nv.explain(json.loads(layer.config_json()), device="cuda:0") if c["chosen"]]
    assert chosen == [layer.describe()["backend"]]


def test_expert_biases(backend: str, activation_format: str) -> None:
    """A layer like gpt-oss': biases on the GPU, added once, kept, replaced with their expert, and in a graph."""
    options = dict(activation="swiglu_oai", swiglu_limit=7.0, expert_biases=True)
    w, g = weights(), torch.Generator().manual_seed(3)
    biases = tuple(2 * torch.randn(EXPERTS, size, generator=g) for size in (INTER, INTER, HIDDEN))
    chosen = config(activation_format, **options)
    placed = dict(device="cuda:0", backend=backend, max_tokens=130)
    gpu = nv.MoeLayer.from_tensors(chosen, **w, biases=on_gpu(biases), **placed)
    cpu = nv.MoeLayer.from_tensors(chosen, **w, biases=biases, max_tokens=130)
    without = nv.MoeLayer.from_tensors(chosen, **w, biases=tuple(0 * bias for bias in biases), **placed)
    for tokens in (1, 5, 130):
        arrays = batch(tokens)
        expected = cpu.run(*arrays)
        assert relative_error(gpu.run(*on_gpu(arrays)), expected) < LIMIT[activation_format]
        assert relative_error(without.run(*on_gpu(arrays)), expected) > 10 * LIMIT[activation_format]
    for name, bias in zip(("gate", "up", "down"), biases, strict=True):
        assert np.array_equal(gpu.expert(7)[name]["bias"], bias[7].numpy())

    hidden, ids, router = on_gpu(batch(40))
    out = torch.empty_like(hidden)
    gpu.run(hidden, ids, router, out=out)  # before the capture
    graph, _ = captured(lambda: gpu.run(hidden, ids, router, out=out))
    others = tuple(-bias for bias in biases)
    for e in range(EXPERTS):
        one = [(codes[e], scales[e], float(scale[e])) for codes, scales, scale in w.values()]
        new = tuple(bias[e] for bias in others)
        with pytest.raises(ValueError, match="a graph has captured this layer"):
            gpu.replace_expert(e, *one, biases=new)
        gpu.replace_expert(e, *one, biases=new, stream=torch.cuda.current_stream())
    graph.replay()
    fresh = nv.MoeLayer.from_tensors(chosen, **w, biases=others, **placed)
    assert torch.equal(out, fresh.run(hidden, ids, router))


def test_experts_without_a_gate(backend: str, activation_format: str) -> None:
    """A layer like Nemotron-3's: two matrices per expert, from the host and from the GPU, against the CPU's."""
    chosen = config(activation_format, activation="relu2")
    w = {**weights(), "gate": None}
    placed = dict(device="cuda:0", backend=backend, max_tokens=130)
    gpu, from_gpu = (nv.MoeLayer.from_tensors(chosen, **arrays, **placed) for arrays in (w, on_gpu(w)))
    cpu = nv.MoeLayer.from_tensors(chosen, **w, max_tokens=130)
    for tokens in (1, 5, 130):
        arrays = batch(tokens)
        out = gpu.run(*on_gpu(arrays))
        assert relative_error(out, cpu.run(*arrays)) < LIMIT[activation_format]
        assert torch.equal(from_gpu.run(*on_gpu(arrays)), out)
    for name in ("up", "down"):
        kept = gpu.expert(7)[name]
        assert np.array_equal(kept["codes"], w[name][0][7]) and np.array_equal(kept["scales"], w[name][1][7])
