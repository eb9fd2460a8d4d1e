"""torchao nvfp4_quantize, NVFP4Tensor, to_blocked / from_blocked."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
torchao_nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
torchao_utils = pytest.importorskip("torchao.prototype.mx_formats.utils")

import judge  # noqa: E402

# scale: amax/6, /s; code: 1/s, /v, x*. The clamp of the block scale to 2^-6 (byte 0x08) is torchao's guard.
SCALE_ROUNDINGS, CODE_ROUNDINGS = 2, 3
SAMPLES = dict(judge.samples())


def guard(exact, their_scales):
    return (exact < 2.0**-6) & (their_scales == 0x08)


def quantize(x: np.ndarray, s: float):
    scales, codes = torchao_nvfp4.nvfp4_quantize(torch.from_numpy(x), 16, torch.tensor(s, dtype=torch.float32))
    return codes.numpy(), scales.view(torch.uint8).numpy()


@pytest.mark.parametrize("name", SAMPLES)
def test_quantize(name, count):
    x = SAMPLES[name]
    s = float(torchao_nvfp4.per_tensor_amax_to_scale(torch.tensor(np.abs(x).max())))
    codes, scales, ours = nv.quantize(x)
    assert ours == s
    counts = judge.compare(
        x,
        (codes, scales),
        quantize(x, s),
        s,
        scale_roundings=SCALE_ROUNDINGS,
        code_roundings=CODE_ROUNDINGS,
        guard=guard,
    )
    judge.report(count, name, counts)
    assert (counts["scales at a guard"] > 0) == (name in ("zero and tiny blocks", "14 octaves bf16", "14 octaves fp32"))


@pytest.mark.parametrize("name", SAMPLES)
def test_quantize_with_a_power_of_two_scale(name, count):
    """Every division by s is exact: exact mode, weights mode and torchao agree; only x*(1/v) can miss a tie."""
    x = SAMPLES[name]
    s = float(2.0 ** np.ceil(np.log2(np.abs(x).max() / 2688)))
    weights = nv.quantize(x, tensor_scale=s)
    static = nv.quantize(x, mode="static", tensor_scale=s)
    assert static[2] == s
    for left, right in zip(weights[:2], static[:2], strict=True):
        assert (left == right).all()
    counts = judge.compare(x, weights[:2], quantize(x, s), s, scale_roundings=1, code_roundings=2, guard=guard)
    judge.report(count, name, counts)


def test_dequantize():
    x = SAMPLES["normal bf16"]
    s = torch.tensor(2.0**-15)  # every product is exact, so the order of multiplication cannot show
    tensor = torchao_nvfp4.NVFP4Tensor.to_nvfp4(torch.from_numpy(x), per_tensor_scale=s)
    ours = nv.dequantize(tensor.qdata, tensor.scale, s)
    assert torch.equal(ours, tensor.dequantize(torch.float32))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(nv.dequantize(tensor.qdata, tensor.scale, s, str(dtype)[6:]), tensor.dequantize(dtype))


def test_dequantize_with_any_scale():
    """torchao rounds e4m3 * s, then times the code: two roundings of 2^-24 each; ours rounds once."""
    x = SAMPLES["14 octaves fp32"]
    s = torchao_nvfp4.per_tensor_amax_to_scale(torch.tensor(np.abs(x).max()))
    tensor = torchao_nvfp4.NVFP4Tensor.to_nvfp4(torch.from_numpy(x), per_tensor_scale=s)
    ours = nv.dequantize(tensor.qdata, tensor.scale, float(s)).numpy().astype(np.float64)
    theirs = tensor.dequantize(torch.float32).numpy().astype(np.float64)
    assert (np.abs(ours - theirs) <= 3 * 2.0**-24 * np.abs(ours) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("rows", [1, 31, 32, 127, 128, 129, 300, 512])
@pytest.mark.parametrize("cols", [1, 3, 4, 5, 28, 33])
def test_blocked_layout(rows, cols):
    scales = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    blocked = torchao_utils.to_blocked(scales)
    assert torch.equal(nv.swizzle_scales(scales), blocked)
    assert torch.equal(nv.unswizzle_scales(blocked, rows, cols), torchao_utils.from_blocked(blocked, rows, cols))
