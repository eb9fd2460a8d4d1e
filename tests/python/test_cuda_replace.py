"""Experts replaced on a GPU in the order of a stream, while another thread replays graphs in that stream.

Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import itertools
import threading

import gpu
import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import SLACK_BYTES, layers, needs_gpu, torch

pytestmark = needs_gpu

TOKENS, INPUTS, REPLAYS = 16, 7, 5000
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 2, 512, 256


def weights(seed: int) -> dict[str, tuple[np.ndarray, ...]]:
    return layers.weights(seed, EXPERTS, HIDDEN, INTERMEDIATE)


def opened(activation_format: str, seed: int = 0) -> nv.MoeLayer:
    config = nv.MoeConfig(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, activation_format=activation_format)
    return nv.MoeLayer.from_tensors(config, **weights(seed), max_tokens=TOKENS, device="cuda:0")


def expert_of(seed: int) -> dict[str, tuple[np.ndarray, ...]]:
    """Expert 0 of a seed, as replace_expert takes it."""
    return layers.expert_of(weights(seed), 0)


def on_gpu(expert: dict[str, tuple[np.ndarray, ...]]) -> dict[str, tuple]:
    return {
        name: (torch.from_numpy(codes).cuda(), torch.from_numpy(scales).cuda(), float(scale))
        for name, (codes, scales, scale) in expert.items()
    }


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    """ids and router weights that send all tokens to expert 0."""
    draw = np.random.default_rng(4)
    ids = draw.integers(1, EXPERTS, (TOKENS, TOP_K))
    ids[:, 0] = 0
    return torch.from_numpy(ids).cuda(), torch.from_numpy(draw.random((TOKENS, TOP_K), dtype=np.float32)).cuda()


def captured(layer: nv.MoeLayer, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Returns a graph of a run, its hidden states and its out."""
    hidden = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    arrays = routing()
    layer.warmup()
    graph, out = gpu.captured(lambda: layer.run(hidden, *arrays), stream=stream)
    graph.keep = arrays  # the graph reads them
    return graph, hidden, out


@pytest.mark.parametrize("activation_format", ["nvfp4", "bf16", "fp8"])
def test_replays_during_replacements_have_the_old_expert_or_the_new_one(activation_format: str) -> None:
    inputs = torch.randn(INPUTS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    # One version from the host, one from the GPU, as a trainer has it.
    versions = [expert_of(0), on_gpu(expert_of(1))]
    layer, right = opened(activation_format), []
    for version in versions:
        layer.replace_expert(0, **version)
        right.append(torch.stack([layer.run(hidden, *routing()).clone() for hidden in inputs]))
    layer.replace_expert(0, **versions[0])
    assert all(not torch.equal(*pair) for pair in zip(*right, strict=True))
    stream = torch.cuda.Stream()
    graph, hidden, out = captured(layer, stream)
    torch.cuda.synchronize()

    stop, replaced, errors = threading.Event(), itertools.count(), []

    def replace() -> None:
        try:
            while not stop.is_set():
                layer.replace_expert(0, **versions[(next(replaced) + 1) % 2], stream=stream)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replace)
    thread.start()
    with torch.cuda.stream(stream):
        seen = torch.zeros(3, dtype=torch.int64, device="cuda")  # old, new, mixed
        for replay in range(REPLAYS):
            hidden.copy_(inputs[replay % INPUTS])
            graph.replay()
            old, new = ((out == bits[replay % INPUTS]).all() for bits in right)
            seen += torch.stack([old, new, ~(old | new)])
    stop.set()
    thread.join(60)
    assert not thread.is_alive() and not errors, errors
    old, new, mixed = seen.tolist()
    replacements = next(replaced)
    print(f"{REPLAYS} replays, {replacements} replacements: {old} old, {new} new, {mixed} mixed")
    assert mixed == 0, f"{mixed} of {REPLAYS}"
    assert old > 0 and new > 0 and replacements > 10
    with torch.cuda.stream(stream):
        layer.replace_expert(0, **versions[1], stream=stream)
        hidden.copy_(inputs[0])
        graph.replay()
        assert torch.equal(out, right[1][0])


def test_a_captured_layer_is_replaced_only_on_a_stream() -> None:
    layer = opened("nvfp4")
    layer.replace_expert(0, **expert_of(1))  # no graph has captured it
    graph, _, out = captured(layer, torch.cuda.Stream())
    for wrong, message in (
        ({}, r"a graph has captured this layer.*stream="),
        ({"stream": "default"}, "stream: expected an integer or a stream object, got str"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.replace_expert(0, **expert_of(2), **wrong)
    assert np.array_equal(layer.expert(0)["down"]["codes"], expert_of(1)["down"][0])
    layer.replace_expert(0, **expert_of(2), stream=torch.cuda.current_stream().cuda_stream)
    assert np.array_equal(layer.expert(0)["down"]["codes"], expert_of(2)["down"][0])
    del graph, out


def test_arrays_and_memory_are_given_back() -> None:
    """The source may be overwritten once the call has returned, even if the stream has not reached the replacement."""
    layer, stream = opened("bf16"), torch.cuda.Stream()
    expert = on_gpu(expert_of(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # 0.1 s
    layer.replace_expert(0, **expert, stream=stream)
    assert not stream.query()
    for codes, scales, _ in expert.values():
        codes.zero_()
        scales.zero_()
    back = layer.expert(0)
    assert np.array_equal(back["gate"]["codes"], expert_of(3)["gate"][0])
    free = torch.cuda.mem_get_info()[0]
    for seed in range(50):
        layer.replace_expert(0, **expert_of(seed), stream=stream)
    stream.synchronize()
    assert free - torch.cuda.mem_get_info()[0] <= SLACK_BYTES
