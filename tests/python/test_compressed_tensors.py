"""compressed-tensors: generate_gparam, calculate_qparams, cast_to_fp4, pack_fp4_to_uint8, decompress."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
pytest.importorskip("compressed_tensors")

import judge  # noqa: E402
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.quantization import QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize  # noqa: E402
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4  # noqa: E402

SCHEME: QuantizationScheme = preset_name_to_scheme("NVFP4", ["Linear"])
# Against s = 1/G exactly. scale: amax/6, G*; code: v/G, x/.
SCALE_ROUNDINGS, CODE_ROUNDINGS = 2, 2
SAMPLES = dict(judge.samples())


def guard(exact, their_scales):
    """A scale that rounds to 0 becomes 0.125 (0x20)."""
    return (exact <= 2.0**-10) & (their_scales == 0x20)


def quantize(x: torch.Tensor):
    """As its compressor does: (codes, scales, G)."""
    blocks = x.unflatten(-1, (-1, 16))
    low, high = blocks.amin(-1), blocks.amax(-1)
    g = generate_gparam(low.min(), high.max())
    scales, _ = calculate_qparams(low, high, SCHEME.weights, global_scale=g)
    fp4 = ct_quantize(x, scales, None, SCHEME.weights, global_scale=g)
    return pack_fp4_to_uint8(fp4).numpy(), scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), g


@pytest.mark.parametrize("name", SAMPLES)
def test_quantize(name, count):
    """Our tensor scale is the float32 next to 1/G, one rounding more on both quotients."""
    x = SAMPLES[name]
    codes, scales, g = quantize(torch.from_numpy(x))
    # torch divides a number by a tensor as number * reciprocal: G has two roundings, 2688/amax would have one.
    assert g.numpy() == np.float32(2688) * (np.float32(1) / np.abs(x).max())
    s = float(np.float32(1 / np.float64(g)))
    ours = nv.quantize(x, tensor_scale=s)
    counts = judge.compare(
        x,
        ours[:2],
        (codes, scales),
        s,
        scale_roundings=SCALE_ROUNDINGS + 1,
        code_roundings=CODE_ROUNDINGS + 1,
        guard=guard,
    )
    judge.report(count, name, counts)
    assert (counts["scales at a guard"] > 0) == (name == "zero and tiny blocks")


def test_block_scales_of_a_bf16_tensor(count):
    """calculate_qparams divides amax by 6 in the tensor's dtype: in bfloat16 (8 significant bits) a rounding of 2^-8, which moves bytes.
    Our quotient is exact; each differing byte lies within that rounding of a threshold."""
    x = SAMPLES["normal bf16"]
    _, scales, g = quantize(torch.from_numpy(x).to(torch.bfloat16))
    s = float(np.float32(1 / np.float64(g)))
    ours = nv.quantize(x, tensor_scale=s)[1]
    differs = ours != scales
    exact = judge.scale_quotients(x, s)
    bound = (1 + 2.0**-8) * (1 + 4 * 2.0**-24)
    moved = [nv.encode_e4m3(exact * bound), nv.encode_e4m3(exact / bound)]
    assert ((scales <= moved[0]) & (scales >= moved[1])).all()
    count("block scales where amax/6 was rounded to bf16", differs.sum(), differs.size)
    assert 0 < differs.mean() < 0.08  # numerics.md measured 3.7 %


def test_cast_to_fp4_and_pack():
    x = torch.cat([torch.linspace(-8, 8, 65536), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])])
    x = torch.cat([x, -x, torch.zeros(2)]).reshape(2, -1)
    ours = nv.encode_e2m1(x)
    packed = pack_fp4_to_uint8(cast_to_fp4(x.clone()).clamp(-6, 6))
    assert torch.equal(nv.pack_codes(ours), packed)  # -0 included
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    values = unpack_fp4_from_uint8(every, 4, 128, dtype=torch.float32)
    assert torch.equal(nv.decode_e2m1(nv.unpack_codes(every)), values)
    assert torch.equal(pack_fp4_to_uint8(values), every)


@pytest.mark.parametrize("name", SAMPLES)
def test_dequantize(name, count):
    """decompress computes code * (v/G): two roundings in float32. Ours rounds 1/G, then the product. In double, with
    our s = float32(1/G) as the divisor 1/s, their function gives our bits."""
    x = torch.from_numpy(SAMPLES[name])
    codes, scales, g = quantize(x)
    s = float(np.float32(1 / np.float64(g)))
    ours = nv.dequantize(codes, scales, s)
    values = unpack_fp4_from_uint8(torch.from_numpy(codes), *x.shape, dtype=torch.float32)
    v = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
    theirs = ct_dequantize(values, v, None, SCHEME.weights, dtype=torch.float32, global_scale=g).numpy()
    differs = ours != theirs
    count(f"{name}: last bits of the float32 product", differs.sum(), differs.size)
    wide = ours.astype(np.float64)
    assert (np.abs(wide - theirs) <= 4 * 2.0**-24 * np.abs(wide) * (1 + 2.0**-20)).all()
