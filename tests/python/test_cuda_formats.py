"""The format functions and their torch ops on a GPU's tensors: the bits of the host's functions, eager and in graphs.

They run in the current stream. Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name
elsewhere.
"""

from __future__ import annotations

import nvfp4_moe as nv
import pytest
from gpu import captured, needs_gpu, torch

pytestmark = needs_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, ties, zeros of both signs, subnormals, lines of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 9, shape, generator=g).float())
    x = torch.where(torch.rand(shape, generator=g) < 0.2, (torch.randn(shape, generator=g) * 8).round() / 8, x)
    x = torch.where(torch.rand(shape, generator=g) < 0.05, torch.tensor(-0.0), x)
    x = torch.where(torch.rand(shape, generator=g) < 0.02, x * 2.0**-130, x)
    if x.dim() > 1 and x.shape[0] > 2:
        x[1] = 0
    return x.to(dtype)


def on_gpu_if_tensors(options: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def same(actual: torch.Tensor, expected: torch.Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[actual.element_size()]
    assert actual.is_cuda and actual.shape == expected.shape
    return torch.equal(actual.cpu().view(bits), expected.view(bits))


OPTIONS = [
    ("quantize", {}),
    ("quantize", {"tensor_scale": 0.0123, "search": "mse"}),
    ("quantize", {"mode": "dynamic_token"}),
    ("quantize", {"mode": "static", "tensor_scale": 0.01}),
    ("quantize", {"mode": "vllm_order", "tensor_scale": 0.0123}),
    ("swiglu_quantize", {}),
    ("swiglu_quantize", {"activation": "swiglu_clamped", "swiglu_limit": 7.0, "interleaved": True}),
    ("swiglu_quantize", {"activation": "swiglu_oai", "swiglu_limit": 7.0, "power_of_two": 2.0**-7}),
    ("swiglu_quantize", {"activation": "gelu"}),
    ("swiglu_quantize", {"activation": "gelu_tanh", "interleaved": True}),
    ("swiglu_quantize", {"activation": "situ", "situ_gate_limit": 4.0, "situ_up_limit": 25.0}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_quantizes_as_the_host_and_back(name: str, options: dict, dtype: torch.dtype) -> None:
    """tests/cuda/format_test.cpp has numbers that are not finite."""
    for shape in [(1, 32), (5, 2, 4096), (130, 288), (0, 64)]:
        x = numbers(shape, dtype)
        if name == "swiglu_quantize":
            options = {**options, "row_weights": torch.rand(shape[:-1], generator=torch.Generator().manual_seed(2))}
        function = getattr(nv, name)
        expected, actual = function(x, **options), function(x.cuda(), **on_gpu_if_tensors(options))
        for part, a, e in zip(("codes", "scales", "tensor_scale"), actual, expected, strict=True):
            assert same(a, e), (part, shape)
        for out in ("float32", "bfloat16", "float16"):
            assert same(nv.dequantize(*actual, out), nv.dequantize(*expected, out)), (out, shape)
        swizzled = nv.swizzle_scales(actual[1])
        assert same(swizzled, nv.swizzle_scales(expected[1]))
        assert same(nv.unswizzle_scales(swizzled, *expected[1].shape[-2:]), expected[1])


def test_a_tensor_that_begins_anywhere() -> None:
    """Views whose first byte has only the alignment of its element, and transposed ones, which are copied."""
    flat = numbers((1, 16 * 33), torch.bfloat16)[0]
    square = numbers((64, 64), torch.float32)
    for on_host, gpu in (
        (flat[3 : 3 + 16 * 32].view(4, 128), flat.cuda()[3 : 3 + 16 * 32].view(4, 128)),
        (square.t(), square.cuda().t()),
    ):
        expected = nv.quantize(on_host.contiguous(), mode="dynamic_token")
        assert all(same(a, e) for a, e in zip(nv.quantize(gpu, mode="dynamic_token"), expected, strict=True))


def test_the_ops_in_a_graph_follow_its_inputs() -> None:
    import nvfp4_moe.torch_op  # noqa: F401

    op = torch.ops.nvfp4_moe

    def step(x: torch.Tensor, row_weights: torch.Tensor) -> list[torch.Tensor]:
        made = [*op.quantize(x), *op.quantize(x, "dynamic_token"), *op.quantize(x, "vllm_order", 0.02)]
        made += [op.dequantize(*made[:3], torch.bfloat16), op.dequantize(*made[3:6], torch.float16)]
        made += op.swiglu_quantize(x, "swiglu_clamped", 7.0, row_weights=row_weights)
        swizzled = op.swizzle_scales(made[1])
        return [*made, swizzled, op.unswizzle_scales(swizzled, *made[1].shape)]

    x, weights = numbers((40, 512), torch.bfloat16).cuda(), torch.rand(40, device="cuda")
    step(x, weights)
    graph, made = captured(lambda: step(x, weights))
    for seed in range(1, 5):
        x.copy_(numbers((40, 512), torch.bfloat16, seed))
        weights.uniform_()
        graph.replay()
        torch.cuda.synchronize()
        expected = step(x.cpu(), weights.cpu())
        assert all(same(a, e) for a, e in zip(made, expected, strict=True))


def test_wrong_calls_are_named() -> None:
    x = numbers((4, 64), torch.float32).cuda()
    codes, scales, _ = nv.quantize(x)
    ones = torch.ones(4)
    for message, call in {
        r"x: expected .* bfloat16 .* got \(4, 64\) float64 on cuda:0": lambda: nv.quantize(x.double()),
        r"scales: expected \(4, 4\) uint8 on cuda:0": lambda: nv.dequantize(codes, scales.cpu(), 1.0),
        "tensor_scale: .* on cpu, got .* on cuda:0": lambda: nv.dequantize(codes.cpu(), scales.cpu(), ones.cuda()),
        r"row_weights: expected \(4,\) float32 on cuda:0": lambda: nv.swiglu_quantize(x, row_weights=ones),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
