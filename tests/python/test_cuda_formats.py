"""The format functions and their torch ops on a GPU's tensors: the bits of the host's functions, eager and in graphs.

They run in the current stream. Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name
elsewhere.
"""

from __future__ import annotations

import math

import nvfp4_moe as nv
import pytest
from gpu import captured, needs_gpu, on_gpu, torch

pytestmark = needs_gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 16), (3, 48), (5, 2, 4096), (130, 272), (0, 64)]


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


def same(actual: torch.Tensor, expected: torch.Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[actual.element_size()]
    assert actual.is_cuda and actual.shape == expected.shape
    return torch.equal(actual.cpu().view(bits), expected.view(bits))


MODES = [
    ("weights", None, "max"),
    ("weights", 0.0123, "mse"),
    ("dynamic_token", None, "max"),
    ("static", 0.01, "max"),
    ("compat", 0.0123, "max"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "scale", "search"), MODES)
def test_quantizes_as_the_host_and_back(dtype: torch.dtype, mode: str, scale: float | None, search: str) -> None:
    for shape in SHAPES:
        x = numbers(shape, dtype)
        expected = nv.quantize(x, mode=mode, tensor_scale=scale, search=search)
        actual = nv.quantize(x.cuda(), mode=mode, tensor_scale=scale, search=search)
        for name, a, e in zip(("codes", "scales", "tensor_scale"), actual, expected, strict=True):
            assert same(a, e), (name, shape)
        for out in ("float32", "bfloat16", "float16"):
            assert same(nv.dequantize(*actual, out), nv.dequantize(*expected, out)), (out, shape)


def test_what_a_host_refuses_is_nan() -> None:
    x = numbers((4, 64), torch.float32)
    x[2, 5] = math.inf
    gpu = x.cuda()
    codes, scales, row_scales = nv.quantize(gpu, mode="dynamic_token")
    assert row_scales.isnan().tolist() == [False, False, True, False]
    assert not codes[2].any() and not scales[2].any() and codes[0].any()
    assert nv.dequantize(codes, scales, row_scales)[2].isnan().all()
    for mode, scale in (("weights", None), ("static", 0.1), ("compat", 0.1)):
        assert nv.quantize(gpu, mode=mode, tensor_scale=scale)[2].isnan()
    bad = torch.full((1, 4), 0x7F, dtype=torch.uint8, device="cuda")
    assert nv.dequantize(torch.zeros(1, 32, dtype=torch.uint8, device="cuda"), bad, 1.0).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swiglu_clamped", "interleaved": True}, {"activation": "swiglu_oai", "power_of_two": 2.0**-7}],
    ids=str,
)
def test_silu_mul_quantizes_as_the_host(options: dict, dtype: torch.dtype) -> None:
    if "activation" in options:
        options = {"swiglu_limit": 7.0, **options}
    for shape in [(1, 32), (33, 4096), (2, 3, 1536)]:
        x, weights = numbers(shape, dtype, 1), torch.rand(shape[:-1], generator=torch.Generator().manual_seed(2))
        for row_weights in (None, weights):
            expected = nv.swiglu_quantize(x, **options, row_weights=row_weights)
            actual = nv.swiglu_quantize(x.cuda(), **options, row_weights=on_gpu(row_weights))
            assert all(same(a, e) for a, e in zip(actual, expected, strict=True))


def test_swizzles_as_the_host() -> None:
    for shape in [(1, 1), (129, 5), (3, 300, 24), (0, 4)]:
        scales = torch.randint(0, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
        swizzled = nv.swizzle_scales(scales.cuda())
        assert same(swizzled, nv.swizzle_scales(scales))
        assert same(nv.unswizzle_scales(swizzled, *shape[-2:]), scales)
        assert same(nv.swizzle_scales(scales.cuda().view(torch.float8_e4m3fn)), nv.swizzle_scales(scales))


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
        made = [*op.quantize(x), *op.quantize(x, "dynamic_token"), *op.quantize(x, "compat", 0.02)]
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
