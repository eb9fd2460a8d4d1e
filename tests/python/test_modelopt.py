"""ModelOpt NVFP4QTensor.quantize and dequantize."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
NVFP4QTensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor

import judge  # noqa: E402

# scale: 6*s, amax/; code: v*s, x/.
SCALE_ROUNDINGS, CODE_ROUNDINGS = 2, 2
SAMPLES = dict(judge.samples())


def guard(exact, their_scales):
    """Blocks of zeros carry 1.0 (0x38); what would round to 0 is clamped to 2^-9 (0x01)."""
    return ((exact == 0) & (their_scales == 0x38)) | ((exact > 0) & (exact <= 2.0**-10) & (their_scales == 0x01))


def quantize(x: np.ndarray, s: torch.Tensor):
    tensor, scales, _ = NVFP4QTensor.quantize(torch.from_numpy(x.copy()), 16, None, s, try_tensorrt=False)
    return tensor, scales


@pytest.mark.parametrize("name", SAMPLES)
def test_quantize(name, count):
    x = SAMPLES[name]
    s = NVFP4QTensor.get_weights_scaling_factor_2(torch.from_numpy(x))
    codes, scales, ours = nv.quantize(x)
    assert ours == float(s)
    tensor, their_scales = quantize(x, s)
    oracle = (tensor._quantized_data.numpy(), their_scales.view(torch.uint8).numpy())
    counts = judge.compare(
        x,
        (codes, scales),
        oracle,
        float(s),
        scale_roundings=SCALE_ROUNDINGS,
        code_roundings=CODE_ROUNDINGS,
        guard=guard,
    )
    judge.report(count, name, counts)
    assert (counts["scales at a guard"] > 0) == (name == "zero and tiny blocks")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("power", [None, -12])
def test_dequantize(name, power, count):
    """ModelOpt's dequantize rounds scale * s and then times the code; in double nothing rounds, and one rounding to
    float32 gives our bits. In float32 it gives our bits wherever scale * s is exact, so always for a power of two."""
    x = SAMPLES[name]
    s = NVFP4QTensor.get_weights_scaling_factor_2(torch.from_numpy(x)) if power is None else torch.tensor(2.0**power)
    tensor, scales = quantize(x, s)
    ours = nv.dequantize(tensor._quantized_data, scales, s)
    exact = tensor.dequantize(torch.float64, scale=scales.double(), double_scale=s.double(), block_sizes={-1: 16})
    assert torch.equal(ours, exact.float())
    single = tensor.dequantize(torch.float32, scale=scales, double_scale=s, block_sizes={-1: 16})
    differs = ours != single
    count(
        f"{name}: last bits of ModelOpt's float32 product, s {'amax/2688' if power is None else 'power of two'}",
        differs.sum(),
        differs.numel(),
    )
    if power is not None:
        assert not differs.any()
    wide, narrow = ours.double(), single.double()
    assert ((wide - narrow).abs() <= 3 * 2.0**-24 * wide.abs() * (1 + 2.0**-20)).all()
