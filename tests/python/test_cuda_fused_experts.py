"""Fused parameters on a GPU: packed there, run and captured under any placement, replaced under a captured graph.

Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import pytest
from gpu import captured, needs_gpu, torch
from nvfp4_moe import _fused_experts as fused
from nvfp4_moe._fused_parameters import FusedParameters
from nvfp4_moe._mxfp4 import cast_mxfp4

pytestmark = needs_gpu
E, K, H, INNER = 8, 2, 128, 64


def parameters(seed: int, here: list[int], device: str) -> FusedParameters:
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int, low: int = 0, high: int = 256):
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8)[here].to(device)

    def tensor_scale(*shape: int):
        return (torch.rand(shape, generator=random) * 0.02 + 0.005)[here].to(device)

    return FusedParameters(
        some(E, 2 * INNER, H // 2),
        some(E, 2 * INNER, H // 16, low=0x28, high=0x40).view(torch.float8_e4m3fn),
        tensor_scale(E, 2),
        some(E, H, INNER // 2),
        some(E, H, INNER // 16, low=0x28, high=0x40).view(torch.float8_e4m3fn),
        tensor_scale(E),
    )


def opened(seed: int, here: list[int], device: str) -> fused.FusedExperts:
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    placement = fused.Placement.from_map(expert_map.to(device), E, len(here))
    experts = fused.open_fused(
        parameters(seed, here, device), placement=placement, top_k=K, max_tokens=64, activation_format="bf16"
    )
    experts.layer.warmup()
    return experts


def batch(device: str = "cuda"):
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, H, generator=random).bfloat16()
    ids = torch.rand(9, E, generator=random).argsort(-1)[:, :K].int()
    return [tensor.to(device) for tensor in (hidden, ids, torch.rand(9, K, generator=random))]


def run(experts: fused.FusedExperts, inputs):
    out = torch.empty_like(inputs[0])
    experts.run(*inputs, out)
    return out


@pytest.mark.parametrize("here", [list(range(E)), [2, 3, 4], [5, 0, 7]], ids=["all", "range", "any"])
def test_a_gpu_s_fused_experts_are_the_host_s(here):
    ours, expected = run(opened(0, here, "cuda"), batch()).cpu(), run(opened(0, here, "cpu"), batch("cpu"))
    # Two backends differ only in the order of fp32 sums, and round to bf16 twice.
    assert (ours.float() - expected.float()).norm() <= 2.0**-7 * expected.float().norm()


@pytest.mark.parametrize("here", [list(range(E)), [5, 0, 7]], ids=["all", "any"])
def test_a_captured_run_sees_the_weights_that_replace_its_own(here):
    experts, inputs = opened(0, here, "cuda"), batch()
    out = torch.zeros_like(inputs[0])
    graph, _ = captured(lambda: experts.run(*inputs, out))
    graph.replay()
    assert torch.equal(out, run(opened(0, here, "cuda"), inputs))
    fused.replace_fused(experts, parameters(1, here, "cuda"))
    graph.replay()
    assert torch.equal(out, run(opened(1, here, "cuda"), inputs))


def test_the_cast_from_mxfp4_has_the_host_s_bytes():
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (3, 64, 64), generator=random, dtype=torch.uint8)
    scales = torch.randint(90, 125, (3, 64, 4), generator=random, dtype=torch.uint8)
    host, device = cast_mxfp4(codes, scales), cast_mxfp4(codes.cuda(), scales.cuda())
    assert host[3] == device[3] > 0
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], device[:3], strict=True))
