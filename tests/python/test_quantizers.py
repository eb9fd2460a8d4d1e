"""quantize and dequantize against the producers' own: torchao, ModelOpt, compressed-tensors.

Every difference must be one that the formats allow (judge.py). test_producers.py has dequantize of the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import judge  # noqa: E402

SAMPLES = dict(judge.samples())
Arrays = tuple[np.ndarray, np.ndarray]


class Oracle(NamedTuple):
    """A producer's quantizer.

    tensor_scale: its tensor scale for x. quantize(x, s): codes and scales. roundings: the float32 roundings of its
    scale and its code, compared with exact s. guard: the blocks in which its smallest scale acts. guarded: the samples
    with such blocks.
    """

    tensor_scale: Callable[[np.ndarray], float]
    quantize: Callable[[np.ndarray, float], Arrays]
    roundings: tuple[int, int]
    guard: Callable[[np.ndarray, np.ndarray], np.ndarray]
    guarded: tuple[str, ...] = ("zero and tiny blocks",)


# ---- torchao. scale: amax/6, /s; code: 1/s, /v, x*. The clamp of the block scale to 2^-6 (byte 0x08) is its guard.


def torchao() -> Oracle:
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    def quantize(x: np.ndarray, s: float) -> Arrays:
        scales, codes = module.nvfp4_quantize(torch.from_numpy(x), 16, torch.tensor(s, dtype=torch.float32))
        return codes.numpy(), scales.view(torch.uint8).numpy()

    return Oracle(
        lambda x: float(module.per_tensor_amax_to_scale(torch.tensor(np.abs(x).max()))),
        quantize,
        (2, 3),
        lambda exact, theirs: (exact < 2.0**-6) & (theirs == 0x08),
        ("zero and tiny blocks", "14 octaves bf16", "14 octaves fp32"),
    )


# ---- ModelOpt. scale: 6*s, amax/; code: v*s, x/. Blocks of zeros carry 1.0 (0x38); a scale that would round to 0 is
# 2^-9 (0x01).


def modelopt_tensor(x: np.ndarray, s: Any) -> tuple[Any, Any]:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor
    return qtensor.quantize(torch.from_numpy(x.copy()), 16, None, torch.as_tensor(s), try_tensorrt=False)[:2]


def modelopt() -> Oracle:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def quantize(x: np.ndarray, s: float) -> Arrays:
        tensor, scales = modelopt_tensor(x, s)
        return tensor._quantized_data.numpy(), scales.view(torch.uint8).numpy()

    def guard(exact: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        return ((exact == 0) & (theirs == 0x38)) | ((exact > 0) & (exact <= 2.0**-10) & (theirs == 0x01))

    return Oracle(lambda x: float(qtensor.get_weights_scaling_factor_2(torch.from_numpy(x))), quantize, (2, 2), guard)


# ---- compressed-tensors. Against s = 1/G: scale: amax/6, G*; code: v/G, x/. Our tensor scale is the float32 next to
# 1/G, one rounding more on both quotients. A scale that rounds to 0 becomes 0.125 (0x20).


def scheme() -> Any:
    module = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    return module.preset_name_to_scheme("NVFP4", ["Linear"]).weights


def compressed(x: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Compresses x as its compressor does, to (codes, scales, G)."""
    weights = scheme()
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    blocks = x.unflatten(-1, (-1, 16))
    low, high = blocks.amin(-1), blocks.amax(-1)
    g = generate_gparam(low.min(), high.max())
    scales, _ = calculate_qparams(low, high, weights, global_scale=g)
    fp4 = quantize(x, scales, None, weights, global_scale=g)
    return pack_fp4_to_uint8(fp4).numpy(), scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), g


def scale_of(g: Any) -> float:
    return float(np.float32(1 / np.float64(g)))


def compressed_tensors() -> Oracle:
    pytest.importorskip("compressed_tensors")
    return Oracle(
        lambda x: scale_of(compressed(torch.from_numpy(x))[2]),
        lambda x, _: compressed(torch.from_numpy(x))[:2],
        (3, 3),
        lambda exact, theirs: (exact <= 2.0**-10) & (theirs == 0x20),
    )


ORACLES = {"torchao": torchao, "ModelOpt": modelopt, "compressed-tensors": compressed_tensors}


def compare(oracle: Oracle, x: np.ndarray, s: float, roundings: tuple[int, int] | None = None) -> dict[str, int]:
    scale, code = roundings or oracle.roundings
    limits = {"scale_roundings": scale, "code_roundings": code, "guard": oracle.guard}
    return judge.compare(x, nv.quantize(x, tensor_scale=s)[:2], oracle.quantize(x, s), s, **limits)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("maker", ORACLES)
def test_quantize(maker, name, count):
    oracle, x = ORACLES[maker](), SAMPLES[name]
    s = oracle.tensor_scale(x)
    if maker != "compressed-tensors":  # its G has two roundings, 2688/amax has one
        assert nv.quantize(x)[2] == s
    counts = compare(oracle, x, s)
    judge.report(count, f"{maker}, {name}", counts)
    assert (counts["scales at a guard"] > 0) == (name in oracle.guarded)


@pytest.mark.parametrize("name", SAMPLES)
def test_quantize_with_a_power_of_two_scale(name, count):
    """Every division by s is exact: static mode agrees with weights mode, and torchao's x*(1/v) can only miss a tie."""
    x = SAMPLES[name]
    s = float(2.0 ** np.ceil(np.log2(np.abs(x).max() / 2688)))
    assert np.array_equal(nv.quantize(x, tensor_scale=s)[0], nv.quantize(x, mode="static", tensor_scale=s)[0])
    judge.report(count, name, compare(torchao(), x, s, (1, 2)))


def test_compressed_tensors_block_scales_of_a_bf16_tensor(count):
    """calculate_qparams divides amax by 6 in the tensor's dtype. In bfloat16 that is a rounding of 2^-8, which moves
    bytes. Our quotient is exact. Each differing byte is within that rounding of a threshold."""
    x = SAMPLES["normal bf16"]
    _, scales, g = compressed(torch.from_numpy(x).to(torch.bfloat16))
    s = scale_of(g)
    differs = nv.quantize(x, tensor_scale=s)[1] != scales
    exact = judge.scale_quotients(x, s)
    bound = (1 + 2.0**-8) * (1 + 4 * 2.0**-24)
    assert ((scales <= nv.encode_e4m3(exact * bound)) & (scales >= nv.encode_e4m3(exact / bound))).all()
    count("block scales where amax/6 was rounded to bf16", differs.sum(), differs.size)
    assert 0 < differs.mean() < 0.08  # numerics.md measured 3.7 %


# ---- dequantize


def within(ours: Any, theirs: Any, roundings: int) -> bool:
    wide, narrow = (torch.as_tensor(part).double() for part in (ours, theirs))
    return bool(((wide - narrow).abs() <= roundings * 2.0**-24 * wide.abs() * (1 + 2.0**-20)).all())


def test_dequantize_as_torchao():
    """With a power of two every product is exact, so the order of multiplication cannot matter. Otherwise torchao
    rounds e4m3 * s and then the product with the code: two roundings of 2^-24 each; ours rounds once."""
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    s = torch.tensor(2.0**-15)
    tensor = module.NVFP4Tensor.to_nvfp4(torch.from_numpy(SAMPLES["normal bf16"]), per_tensor_scale=s)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(nv.dequantize(tensor.qdata, tensor.scale, s, str(dtype)[6:]), tensor.dequantize(dtype))
    x = SAMPLES["14 octaves fp32"]
    s = module.per_tensor_amax_to_scale(torch.tensor(np.abs(x).max()))
    tensor = module.NVFP4Tensor.to_nvfp4(torch.from_numpy(x), per_tensor_scale=s)
    assert within(nv.dequantize(tensor.qdata, tensor.scale, float(s)), tensor.dequantize(torch.float32), 3)


@pytest.mark.parametrize("rows", [1, 32, 127, 129, 512])
@pytest.mark.parametrize("cols", [1, 4, 5, 33])
def test_blocked_layout_as_torchao(rows, cols):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    blocked = utils.to_blocked(scales)
    assert torch.equal(nv.swizzle_scales(scales), blocked)
    assert torch.equal(nv.unswizzle_scales(blocked, rows, cols), utils.from_blocked(blocked, rows, cols))


# ---- tests of the judge, which must reject each planted fault

X = dict(judge.samples())["normal fp32"]
CODES, SCALES, S = nv.quantize(X)
LIMITS = {"scale_roundings": 3, "code_roundings": 3, "guard": lambda exact, scales: np.zeros_like(exact, bool)}


FAULTS = {
    "one code off by one": lambda c, s: (flip(c, 1), s),
    "one sign": lambda c, s: (flip(c, 8), s),
    "nibbles swapped": lambda c, s: ((c >> 4) | (c << 4), s),
    "one scale off by one": lambda c, s: (c, plus(s, 1)),
    "one scale times or over two": lambda c, s: (c, plus(s, 8)),
    "codes of the next row": lambda c, s: (np.roll(c, 1, axis=0), s),
    "all scales at a guard": lambda c, s: (c, np.full_like(s, 0x38)),
}


def flip(codes, bit):
    at = np.argmax(codes & 7 > 1)  # a code that is neither zero nor its neighbour
    codes = codes.copy()
    codes.reshape(-1)[at] ^= bit
    return codes


def plus(scales, step):
    scales, byte = scales.copy(), int(scales[3, 7])
    scales[3, 7] = byte + step if byte + step < 0x7F else byte - step
    return scales


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("side", ["ours", "the oracle's"])
def test_planted_faults_are_found(fault, side):
    good, bad = (CODES, SCALES), FAULTS[fault](CODES, SCALES)
    assert judge.compare(X, good, good, S, **LIMITS)["codes at a tie"] == 0
    pair = (bad, good) if side == "ours" else (good, bad)
    with pytest.raises(AssertionError):
        judge.compare(X, *pair, S, **LIMITS)


def test_double_rounding_is_found():
    """Rounding to half steps first, as the Python predecessor does, moves 9 % of the codes."""
    quotient = X / (judge.e4m3(SCALES).repeat(16, axis=-1) * S)
    halves = np.sign(quotient) * np.floor(np.abs(quotient) * 2 + 0.5) / 2
    wrong = nv.pack_codes(nv.encode_e2m1(halves))
    assert 0.01 < (nv.unpack_codes(wrong) != nv.unpack_codes(CODES)).mean() < 0.2
    with pytest.raises(AssertionError, match="away from ties"):
        judge.compare(X, (CODES, SCALES), (wrong, SCALES), S, **LIMITS)
