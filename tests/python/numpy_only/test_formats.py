"""The module's own contract: shapes, frameworks, errors, and identities that need no oracle. NumPy only."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import E2M1, bf16, from_bf16

RNG = np.random.default_rng(1)
X = RNG.standard_normal((6, 64)).astype(np.float32)


def same(left, right) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_imports_without_torch_or_ml_dtypes():
    code = (
        "import sys, nvfp4_moe, numpy; nvfp4_moe.quantize(numpy.ones((2, 16), 'f4')); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ml_dtypes')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pack_unpack_every_byte():
    every = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = nv.unpack_codes(every)
    assert (codes[:, 0::2] == every & 15).all() and (codes[:, 1::2] == every >> 4).all()
    assert (nv.pack_codes(codes) == every).all()


@pytest.mark.parametrize("shape", [(16,), (3, 32), (2, 3, 48), (0, 16)])
def test_leading_dimensions(shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    codes, scales, rows = nv.quantize(x, mode="dynamic_token")
    assert codes.shape == (*shape[:-1], shape[-1] // 2) and scales.shape == (*shape[:-1], shape[-1] // 16)
    assert np.shape(rows) == shape[:-1]
    y = nv.dequantize(codes, scales, rows)
    assert y.shape == shape and y.dtype == np.float32
    flat = nv.quantize(x.reshape(-1, shape[-1]), mode="dynamic_token")
    assert (flat[0].reshape(codes.shape) == codes).all()


def test_searches_and_channel_weights_lower_the_error_that_they_are_asked_for():
    weights = np.geomspace(1e-3, 1e3, 64).astype(np.float32)[np.random.default_rng(3).permutation(64)]

    def error(by, **search) -> float:
        y = nv.dequantize(*nv.quantize(X, **search))
        return (by * (y.astype(np.float64) - X) ** 2).sum()

    plain, four_six, swept = (error(1, search=search) for search in ("max", "mse", "sweep"))
    assert plain > four_six > swept
    for search in ("mse", "sweep"):
        assert error(weights, search=search, channel_weights=weights) < 0.9 * error(weights, search=search)
        equal = nv.quantize(X, search=search, channel_weights=np.full(64, 3, np.float32))
        assert same(equal, nv.quantize(X, search=search))


def test_tensor_scales_of_the_modes():
    assert nv.quantize(X, mode="static", tensor_scale=0.0011)[2] == 2.0**-9
    assert nv.quantize(X, mode="static", tensor_scale=2.0**-9)[2] == 2.0**-9
    assert nv.quantize(X, mode="vllm_order", tensor_scale=0.0011)[2] == np.float32(0.0011)
    x = X.copy()
    x[2] = 0
    s, amax = nv.quantize(x, mode="dynamic_token")[2], np.abs(x.astype(np.float64)).max(1)
    live = amax > 0
    assert (s[live] * 2688.0 >= amax[live]).all() and (s[live] / 2 * 2688.0 < amax[live]).all() and s[2] == 1


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nonfinite_rows(bad):
    x = X.copy()
    x[3, 5] = bad
    codes, scales, s = nv.quantize(x, mode="dynamic_token")
    assert np.isnan(s[3]) and np.isfinite(np.delete(s, 3)).all() and (codes[3] == 0).all() and (scales[3] == 0).all()
    for dtype in ("float32", "float16", "bfloat16"):
        y = nv.dequantize(codes, scales, s, dtype)
        is_nan = np.isnan(y) if dtype != "bfloat16" else (y & 0x7FFF) > 0x7F80
        assert is_nan[3].all() and not np.delete(is_nan, 3, axis=0).any()
    with pytest.raises(ValueError, match="row 3 holds NaN or Inf"):
        nv.quantize(x)


def test_swizzle_is_the_closed_form_of_each_matrix():
    rows, cols = 129, 5
    linear = RNG.integers(1, 127, (3, rows, cols), dtype=np.uint8)
    expected = np.zeros((3, 256 * 8), np.uint8)
    for m in range(rows):
        for k in range(cols):
            tile = (m // 128) * -(-cols // 4) + k // 4
            expected[:, tile * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4] = linear[:, m, k]
    assert (nv.swizzle_scales(linear) == expected).all()
    assert (nv.unswizzle_scales(expected, rows, cols) == linear).all()


def test_swizzle_experts_places_each_expert_at_its_base():
    offsets = np.array([0, 0, 5, 205, 206, 206, 334])
    scales = RNG.integers(1, 127, (offsets[-1], 6), dtype=np.uint8)
    out = nv.swizzle_experts(scales, offsets)
    for e in range(6):
        base = nv.expert_scale_row(int(offsets[e]), e)
        tile = nv.swizzle_scales(scales[offsets[e] : offsets[e + 1]])
        assert base % 128 == 0 and (out[base * 8 : base * 8 + tile.size] == tile).all()
    assert np.count_nonzero(out) == scales.size  # all scales are non-zero, all padding is zero


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_to_fp8_is_one_rounding_from_the_exact_value(block):
    x = RNG.standard_normal((144, 160)).astype(np.float32)
    x[:, :128][:128] = 0  # a block of zeros for (128, 128)
    codes, scales, s = nv.quantize(x)
    out, fp8_scale = nv.convert_to_fp8(codes, scales, s, block)
    exact = E2M1[nv.unpack_codes(codes)] * nv.decode_e4m3(scales).astype(np.float64).repeat(16, 1) * s
    rows, cols = block or exact.shape
    for i in range(0, exact.shape[0], rows):
        for j in range(0, exact.shape[1], cols):
            part = np.s_[i : i + rows, j : j + cols]
            scale = np.float32(fp8_scale if block is None else fp8_scale[i // rows, j // cols])
            amax = np.abs(exact[part]).max()
            assert scale == (np.float32(amax / 448) if amax else np.float32(1))
            assert (out[part] == nv.encode_e4m3(exact[part] / np.float64(scale))).all()


def test_thresholds_in_double_are_one_rounding():
    """A float64 next to a threshold must not be rounded through float32 first."""
    thresholds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nv.encode_e2m1(np.nextafter(thresholds, 0)).tolist() == list(range(7))
    assert nv.encode_e2m1(np.nextafter(thresholds, 9)).tolist() == list(range(1, 8))
    values = nv.decode_e4m3(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    assert (nv.encode_e4m3(np.nextafter(middles, 0)) == np.arange(0x7E)).all()
    assert (nv.encode_e4m3(np.nextafter(middles, 999)) == np.arange(1, 0x7F)).all()
    assert (nv.encode_e4m3(middles) == np.arange(0x7E) + np.arange(0x7E) % 2).all()


CODES, SCALES = np.zeros((6, 32), np.uint8), np.zeros((6, 4), np.uint8)
SWIZZLED = np.zeros(512, np.uint8)
SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64}
# One refusal for each argument of the binding. The library's own tests have its other refusals.
ERRORS = {
    r"x: expected K \(cols\) to be a multiple of 16, got 5": lambda: nv.quantize(X[:, :5]),
    r"x: expected \(..., K\) bfloat16 .*, got \(6, 64\) float64 on cpu": lambda: nv.quantize(X.astype("d")),
    'mode: expected one of weights, dynamic_token, static, vllm_order, got "foo"': lambda: nv.quantize(X, mode="foo"),
    'search: expected one of max, mse, sweep, got "min"': lambda: nv.quantize(X, search="min"),
    "channel_weights: expected search mse or sweep": lambda: nv.quantize(X, channel_weights=np.ones(64, "f")),
    "tensor_scale: mode static needs one": lambda: nv.quantize(X, mode="static"),
    r"scales: expected \(6, 4\) uint8 on cpu, got \(4, 6\)": lambda: nv.dequantize(CODES, SCALES.reshape(4, 6), 1.0),
    r"tensor_scale: expected one number or \(6,\) .* got \(4,\)": lambda: nv.dequantize(CODES, SCALES, np.ones(4)),
    "dtype: expected float32, bfloat16 or float16": lambda: nv.dequantize(CODES, SCALES, 1.0, "float64"),
    "codes: expected 0 to 15, element 3 is 16": lambda: nv.pack_codes(np.array([[1, 2, 3, 16]], np.uint8)),
    r"swizzled: expected \(..., 512\) .* got \(511,\)": lambda: nv.unswizzle_scales(SWIZZLED[1:], 5, 4),
    "matrices: expected": lambda: nv.unswizzle_scales(SWIZZLED, 1 << 30, 1 << 30),  # too large for any memory
    "row_offsets: expected offsets from 0 to 6, got 0 to 7": lambda: nv.swizzle_experts(SCALES, [0, 7]),
    r"block: expected none, or 1 to 2\^30 rows and columns": lambda: nv.convert_to_fp8(CODES, SCALES, 1.0, (0, 128)),
    "device: expected cpu or cuda:N, got gpu": lambda: nv.explain(SIZES, device="gpu"),
    "got num_expert": lambda: nv.explain({"num_expert": 8}),
    "activation: expected one of swiglu": lambda: nv.explain({**SIZES, "activation": "geglu"}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=message) as error:
        ERRORS[message]()
    assert isinstance(error.value, nv.BadInput if message.startswith("activation") else nv.InvalidArgument)


def test_errors_are_the_built_in_ones_too(tmp_path):
    for status, cls, builtin in (
        (1, nv.CheckFailed, RuntimeError),
        (2, nv.InvalidArgument, ValueError),
        (3, nv.Unsupported, NotImplementedError),
        (4, nv.BadInput, ValueError),
        (5, nv.IoError, OSError),
        (6, nv.OutOfMemory, MemoryError),
        (7, nv.Busy, RuntimeError),
        (8, nv.Internal, RuntimeError),
        (9, nv.Cancelled, RuntimeError),
    ):
        assert cls.__bases__ == (nv.Error, builtin) and cls.status == status and cls.finding is None
        error = pickle.loads(pickle.dumps(cls("what: expected this, got that")))
        assert cls.__module__ == "nvfp4_moe" and type(error) is cls and str(error) == "what: expected this, got that"
    with pytest.raises(nv.IoError, match="nowhere"):
        nv.inspect(tmp_path / "nowhere")
    with pytest.raises(nv.Unsupported, match="device cuda:999: "):  # no machine has a thousand
        nv.explain(SIZES, device="cuda:999")


def test_arrays_of_every_kind():
    """One array type takes numbers, lists, strides, any alignment and read-only memory. It copies only if it must."""
    expected = nv.quantize(X, mode="dynamic_token")
    crooked = np.frombuffer(b"\0" + X.tobytes(), np.float32, offset=1).reshape(X.shape)
    assert not crooked.flags.aligned and not crooked.flags.writeable
    for x in (np.asfortranarray(X), X[::-1].copy()[::-1], X.repeat(2, 1)[:, ::2], crooked):
        assert same(nv.quantize(x, mode="dynamic_token"), expected)
    codes, scales, rows = expected
    for given in (rows, rows.tolist(), rows.astype(np.float64), memoryview(rows)):
        assert np.array_equal(nv.dequantize(codes, scales, given), nv.dequantize(*expected))
    for one in (0.5, np.float32(0.5), np.array([0.5]), [0.5]):
        assert np.array_equal(nv.dequantize(codes, scales, one), nv.dequantize(codes, scales, 0.5))
    half = X.astype(np.float16)
    assert same(nv.quantize(bf16(X)), nv.quantize(from_bf16(bf16(X))))
    assert same(nv.quantize(half), nv.quantize(half.astype(np.float32)))
    assert nv.encode_e2m1([1.0, 6.0]).tolist() == [2, 7] and nv.encode_e4m3(1.0).shape == ()
    assert nv.quantize(np.zeros((0, 16), np.float32))[2] == 1.0
    with pytest.raises(TypeError, match="expected an array"):
        nv.quantize("weights")


def test_explain():
    choices = nv.explain(SIZES)
    assert sum(choice["chosen"] for choice in choices) == 1
    assert "reference" in [choice["backend"] for choice in choices] and all(choice["reason"] for choice in choices)
    every_field = dataclasses.asdict(nv.MoeConfig(**SIZES))
    assert nv.explain(every_field) == choices
    for options, asked in (
        (SIZES, "reference"),
        ({**SIZES, "activation_format": "int8_block"}, "cpu"),
        ({**every_field, "expert_biases": True}, "cpu"),
    ):
        assert [choice["backend"] for choice in nv.explain(options, backend=asked) if choice["chosen"]] == [asked]
