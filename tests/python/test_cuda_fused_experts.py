"""Fused parameters on a GPU: packed there, run and captured under any placement, replaced under a captured graph.

Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import fused_layers
import pytest
from gpu import captured, needs_gpu, on_gpu, torch
from nvfp4_moe import _fused_experts as fused
from nvfp4_moe._fused_parameters import FusedParameters
from nvfp4_moe._mxfp4 import cast_mxfp4

pytestmark = needs_gpu
E = fused_layers.E


def parameters(seed: int, here: list[int], device: str) -> dict:
    made = fused_layers.parameters(seed, here)
    return {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in made.items()}


def opened(seed: int, here: list[int], device: str) -> fused.FusedExperts:
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    placement = fused.Placement.from_map(expert_map.to(device), E, len(here))
    experts = fused_layers.opened(parameters(seed, here, device), placement)
    experts.layer.warmup()
    return experts


PLACEMENTS = pytest.mark.parametrize("here", [list(range(E)), [2, 3, 4], [5, 0, 3]], ids=["all", "range", "any"])


@PLACEMENTS
def test_a_captured_run_is_the_host_s_and_sees_the_weights_that_replace_its_own(here: list[int]) -> None:
    experts, inputs = opened(0, here, "cuda"), on_gpu(fused_layers.inputs())
    out = torch.zeros_like(inputs[0])
    graph, _ = captured(lambda: experts.run(*inputs, out))
    graph.replay()
    expected = fused_layers.run(opened(0, here, "cpu"), *fused_layers.inputs()).float()
    # Two backends differ only in the order of fp32 sums, and round to bf16 twice.
    assert (out.cpu().float() - expected).norm() <= 2.0**-7 * expected.norm()
    fused.replace_fused(experts, FusedParameters(**parameters(1, here, "cuda")))
    graph.replay()
    assert torch.equal(out, fused_layers.run(opened(1, here, "cuda"), *inputs))


def test_the_cast_from_mxfp4_has_the_host_s_bytes() -> None:
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (3, 64, 64), generator=random, dtype=torch.uint8)
    scales = torch.randint(90, 125, (3, 64, 4), generator=random, dtype=torch.uint8)
    host, device = cast_mxfp4(codes, scales), cast_mxfp4(codes.cuda(), scales.cuda())
    assert host[3] == device[3] > 0
    assert all(torch.equal(a, b.cpu()) for a, b in zip(host[:3], device[:3], strict=True))
