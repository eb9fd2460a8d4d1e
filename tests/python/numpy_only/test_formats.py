"""The module's own contract: shapes, frameworks, errors, and identities that need no oracle. NumPy only."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import operator
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import nvfp4_moe as nv
import pytest
from layers import bf16, from_bf16

RNG = np.random.default_rng(1)
X = RNG.standard_normal((6, 64)).astype(np.float32)


def test_imports_without_torch_or_ml_dtypes():
    code = (
        "import sys, nvfp4_moe, numpy; nvfp4_moe.quantize(numpy.ones((2, 16), 'f4')); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'ml_dtypes')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pack_unpack_every_byte():
    every = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = nv.unpack_codes(every)
    assert codes.shape == (4, 128) and codes.max() == 15
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


def test_requantizing_decoded_values_is_the_identity():
    """A power-of-two scale: every decoded value is on the grid, and quantizing it again keeps it."""
    codes, scales, s = nv.quantize(X, mode="static", tensor_scale=2.0**-9)
    again = nv.quantize(nv.dequantize(codes, scales, s), mode="static", tensor_scale=s)
    assert (nv.dequantize(*again) == nv.dequantize(codes, scales, s)).all()


def block_errors(weights=1.0, **search) -> np.ndarray:
    y = nv.dequantize(*nv.quantize(X, **search))
    return (weights * (y.astype(np.float64) - X) ** 2).reshape(6, -1, 16).sum(-1)


def test_each_search_is_never_worse_than_the_one_before():
    error = [block_errors(search=search) for search in ("max", "mse", "sweep")]
    for worse, better in pairwise(error):
        assert (better <= worse * (1 + 1e-12)).all() and better.sum() < worse.sum()


def test_channel_weights_weigh_the_error_of_columns():
    weights = np.geomspace(1e-3, 1e3, 64).astype(np.float32)[np.random.default_rng(3).permutation(64)]
    for search in ("mse", "sweep"):
        weighted = block_errors(weights, search=search, channel_weights=weights)
        plain = block_errors(weights, search=search)
        assert (weighted <= plain * (1 + 1e-12)).all() and weighted.sum() < 0.9 * plain.sum()
        same = nv.quantize(X, search=search, channel_weights=np.full(64, 3, np.float32))
        assert all(np.array_equal(a, b) for a, b in zip(same, nv.quantize(X, search=search), strict=True))


def test_static_rounds_its_scale_up_to_a_power_of_two():
    assert nv.quantize(X, mode="static", tensor_scale=0.0011)[2] == 2.0**-9
    assert nv.quantize(X, mode="static", tensor_scale=2.0**-9)[2] == 2.0**-9
    assert nv.quantize(X, mode="compat", tensor_scale=0.0011)[2] == np.float32(0.0011)


def test_dynamic_token_scale_is_the_smallest_power_of_two():
    x = X.copy()
    x[2] = 0
    _, _, s = nv.quantize(x, mode="dynamic_token")
    amax = np.abs(x.astype(np.float64)).max(1)
    live = amax > 0
    assert (s[live] * 2688.0 >= amax[live]).all() and (s[live] / 2 * 2688.0 < amax[live]).all()
    assert (np.frexp(s)[0] == 0.5).all() and s[2] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_rows(bad):
    x = X.copy()
    x[3, 5] = bad
    codes, scales, s = nv.quantize(x, mode="dynamic_token")
    assert np.isnan(s[3]) and np.isfinite(np.delete(s, 3)).all() and (codes[3] == 0).all() and (scales[3] == 0).all()
    for dtype in ("float32", "float16", "bfloat16"):
        y = nv.dequantize(codes, scales, s, dtype)
        is_nan = np.isnan(y) if dtype != "bfloat16" else (y & 0x7FFF) > 0x7F80
        assert is_nan[3].all() and not np.delete(is_nan, 3, axis=0).any()
    for mode, scale in (("weights", None), ("static", 1.0), ("compat", 1.0)):
        with pytest.raises(ValueError, match="row 3 holds NaN or Inf"):
            nv.quantize(x, mode=mode, tensor_scale=scale)


def test_bf16_bits_and_float16():
    half = X.astype(np.float16)
    for a, b in ((bf16(X), from_bf16(bf16(X))), (half, half.astype(np.float32))):
        for left, right in zip(nv.quantize(a), nv.quantize(b), strict=True):
            assert np.array_equal(left, right)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 5), (300, 3), (33, 17), (0, 4)])
def test_swizzle_is_the_closed_form(rows, cols):
    linear = RNG.integers(1, 127, (rows, cols), dtype=np.uint8)
    swizzled = nv.swizzle_scales(linear)
    expected = np.zeros(-(-rows // 128) * 128 * (-(-cols // 4) * 4), np.uint8)
    for m in range(rows):
        for k in range(cols):
            tile = (m // 128) * -(-cols // 4) + k // 4
            expected[tile * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4] = linear[m, k]
    assert (swizzled == expected).all()
    assert (nv.unswizzle_scales(swizzled, rows, cols) == linear).all()


def test_swizzle_experts_places_each_expert_at_its_base():
    counts = [0, 5, 200, 1, 0, 128]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    scales = RNG.integers(1, 127, (offsets[-1], 6), dtype=np.uint8)
    out = nv.swizzle_experts(scales, offsets)
    covered = 0
    for e, n in enumerate(counts):
        base = nv.expert_scale_row(int(offsets[e]), e)
        tile = nv.swizzle_scales(scales[offsets[e] : offsets[e + 1]])
        assert base % 128 == 0 and (out[base * 8 : base * 8 + tile.size] == tile).all()
        covered += n * 6
    assert np.count_nonzero(out) == covered  # all scales are non-zero, all padding is zero


def test_swizzle_of_stacked_experts():
    scales = RNG.integers(0, 127, (3, 130, 5), dtype=np.uint8)
    stacked = nv.swizzle_scales(scales)
    assert stacked.shape == (3, 256 * 8)
    for e in range(3):
        assert (stacked[e] == nv.swizzle_scales(scales[e])).all()
    assert (nv.unswizzle_scales(stacked, 130, 5) == scales).all()


@pytest.mark.parametrize("block", [None, (128, 128), (16, 48)])
def test_to_fp8_is_one_rounding_from_the_exact_value(block):
    x = RNG.standard_normal((144, 160)).astype(np.float32)
    x[:, :128][:128] = 0  # a block of zeros for (128, 128)
    codes, scales, s = nv.quantize(x)
    out, fp8_scale = nv.convert_to_fp8(codes, scales, s, block)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exact = values[nv.unpack_codes(codes)] * nv.decode_e4m3(scales).astype(np.float64).repeat(16, 1) * s
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
    low, thresholds = [0, 0.5, 1, 1.5, 2, 3, 4], [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    for i, t in enumerate(thresholds):
        below, above = nv.encode_e2m1(np.array([np.nextafter(t, 0), np.nextafter(t, 9)]))
        assert (below, above) == (i, i + 1)
        assert nv.decode_e2m1(np.array([below], np.uint8))[0] == low[i]
    values = nv.decode_e4m3(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    assert (nv.encode_e4m3(np.nextafter(middles, 0)) == np.arange(0x7E)).all()
    assert (nv.encode_e4m3(np.nextafter(middles, 999)) == np.arange(1, 0x7F)).all()
    assert (nv.encode_e4m3(middles) == np.arange(0x7E) + np.arange(0x7E) % 2).all()


CODES, SCALES = np.zeros((6, 32), np.uint8), np.zeros((6, 4), np.uint8)
SWIZZLED = np.zeros(512, np.uint8)
SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 64}
ERRORS = {
    r"x: expected K \(cols\) to be a multiple of 16, got 5": lambda: nv.quantize(X[:, :5]),
    r"x: expected \(..., K\) bfloat16 .*, got \(6, 64\) float64 on cpu": lambda: nv.quantize(X.astype("d")),
    r"x: expected \(..., K\) .*, got \(\) float32": lambda: nv.quantize(np.float32(1)),
    'mode: expected one of weights, dynamic_token, static, compat, got "foo"': lambda: nv.quantize(X, mode="foo"),
    'search: expected one of max, mse, sweep, got "min"': lambda: nv.quantize(X, search="min"),
    "search: sweep is for mode weights, got": lambda: nv.quantize(X, mode="dynamic_token", search="sweep"),
    "channel_weights: expected search mse or sweep": lambda: nv.quantize(X, channel_weights=np.ones(64, "f")),
    r"channel_weights: expected \(64,\) float32 on cpu, got \(63,\) float32": lambda: weighed(np.ones(63, "f")),
    "channel_weights: expected .* at least 0, got -1.0+ for column 0": lambda: weighed(-np.ones(64, "f")),
    "tensor_scale: mode static needs one": lambda: nv.quantize(X, mode="static"),
    "tensor_scale: expected a positive finite float32": lambda: nv.quantize(X, tensor_scale=-1.0),
    "tensor_scale: expected a positive": lambda: nv.quantize(X, mode="compat", tensor_scale=1e-60),
    r"scales: expected \(6, 4\) uint8 on cpu, got \(4, 6\) uint8": lambda: nv.dequantize(
        CODES, SCALES.reshape(4, 6), 1.0
    ),
    r"tensor_scale: expected one number or \(6,\) .* got \(4,\)": lambda: nv.dequantize(CODES, SCALES, np.ones(4)),
    "dtype: expected float32, bfloat16 or float16": lambda: nv.dequantize(CODES, SCALES, 1.0, "float64"),
    r"codes: expected \(..., K/2\) uint8, got \(6, 64\) float32 on cpu": lambda: nv.dequantize(X, SCALES, 1.0),
    "codes: expected 0 to 15, element 3 is 16": lambda: nv.pack_codes(np.array([[1, 2, 3, 16]], np.uint8)),
    r"swizzled: expected \(..., 512\) .* got \(511,\)": lambda: nv.unswizzle_scales(SWIZZLED[1:], 5, 4),
    r"\(rows, scale_cols\): expected 0 to 2\^30 each, got \(-1, 4\)": lambda: nv.unswizzle_scales(SWIZZLED, -1, 4),
    r"\(rows, scale_cols\): expected .* got \(1099511627776": lambda: nv.unswizzle_scales(SWIZZLED, 1 << 40, 1 << 40),
    "matrices: expected": lambda: nv.unswizzle_scales(SWIZZLED, 1 << 30, 1 << 30),  # too large for any memory
    "row_offsets: expected offsets from 0 to 6, got 0 to 7": lambda: nv.swizzle_experts(SCALES, [0, 7]),
    "row_offsets: expected not to decrease": lambda: nv.swizzle_experts(SCALES, [0, 5, 4, 6]),
    r"block: expected none, or 1 to 2\^30 rows and columns": lambda: nv.convert_to_fp8(CODES, SCALES, 1.0, (0, 128)),
    "device: expected cpu or cuda:N, got gpu": lambda: nv.explain(SIZES, device="gpu"),
    "expected dynamic_token with activation_format int8_block": lambda: nv.explain(
        {**SIZES, "activation_format": "int8_block", "activation_scale": "static"}
    ),
    "hidden_size: expected a positive multiple of 16": lambda: nv.explain({**SIZES, "hidden_size": 63}),
    "got num_expert": lambda: nv.explain({"num_expert": 8}),
    "activation: expected one of swiglu": lambda: nv.explain({**SIZES, "activation": "gelu"}),
}


def weighed(channel_weights):
    return nv.quantize(X, search="sweep", channel_weights=channel_weights)


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=message) as error:
        ERRORS[message]()
    assert isinstance(error.value, nv.BadInput if message.startswith("activation") else nv.InvalidArgument)


@pytest.mark.parametrize(
    ("cls", "status", "builtin"),
    [
        (nv.CheckFailed, 1, RuntimeError),
        (nv.InvalidArgument, 2, ValueError),
        (nv.Unsupported, 3, NotImplementedError),
        (nv.BadInput, 4, ValueError),
        (nv.IoError, 5, OSError),
        (nv.OutOfMemory, 6, MemoryError),
        (nv.Busy, 7, RuntimeError),
        (nv.Internal, 8, RuntimeError),
        (nv.Cancelled, 9, RuntimeError),
    ],
)
def test_errors_are_the_built_in_ones_too(cls, status, builtin):
    assert cls.__bases__ == (nv.Error, builtin) and cls.status == status and cls.finding is None
    assert cls.__module__ == "nvfp4_moe" and nv.Error.__bases__ == (Exception,)
    error = pickle.loads(pickle.dumps(cls("what: expected this, got that")))
    assert type(error) is cls and str(error) == "what: expected this, got that"


def test_what_is_not_here_is_an_error_by_name(tmp_path):
    with pytest.raises(OSError, match="nowhere") as told:
        nv.inspect(tmp_path / "nowhere")
    assert isinstance(told.value, nv.IoError) and told.value.finding is None
    with pytest.raises(NotImplementedError, match="device cuda:999: ") as told:  # no machine has a thousand
        nv.explain(SIZES, device="cuda:999")
    assert isinstance(told.value, nv.Unsupported)


def test_no_parameter_shadows_a_builtin():
    for public in [*nv.__all__, *(f"MoeLayer.{name}" for name in dir(nv.MoeLayer) if not name.startswith("_"))]:
        thing = operator.attrgetter(public)(nv)
        try:
            parameters = inspect.signature(thing).parameters
        except (TypeError, ValueError):  # no signature: a property, or compiled
            continue
        assert not [name for name in parameters if hasattr(builtins, name)], public


def test_arrays_of_every_kind():
    """One array type takes numbers, lists, strides, any alignment and read-only memory. It copies only if it must."""
    expected = nv.quantize(X, mode="dynamic_token")
    crooked = np.frombuffer(b"\0" + X.tobytes(), np.float32, offset=1).reshape(X.shape)
    assert not crooked.flags.aligned and not crooked.flags.writeable
    for x in (np.asfortranarray(X), X[::-1].copy()[::-1], X.repeat(2, 1)[:, ::2], crooked):
        assert all(np.array_equal(a, b) for a, b in zip(nv.quantize(x, mode="dynamic_token"), expected, strict=True))
    codes, scales, rows = expected
    for given in (rows, rows.tolist(), rows.astype(np.float64), memoryview(rows)):
        assert np.array_equal(nv.dequantize(codes, scales, given), nv.dequantize(*expected))
    for one in (0.5, np.float32(0.5), np.array(0.5), np.array([0.5]), [0.5]):
        assert np.array_equal(nv.dequantize(codes, scales, one), nv.dequantize(codes, scales, 0.5))
    assert nv.encode_e2m1([1.0, 6.0]).tolist() == [2, 7] and nv.encode_e4m3(1.0).shape == ()
    assert nv.quantize(np.zeros((0, 16), np.float32))[2] == 1.0
    with pytest.raises(TypeError, match="expected an array"):
        nv.quantize("weights")
    nan_row = nv.quantize(np.full((1, 16), np.nan, np.float32), mode="dynamic_token")
    assert np.isnan(nv.dequantize(*nan_row)).all()


def test_explain():
    choices = nv.explain(SIZES)
    assert sum(choice["chosen"] for choice in choices) == 1
    assert "reference" in [choice["backend"] for choice in choices] and all(choice["reason"] for choice in choices)

    def chosen(options, **asked):
        return [choice["backend"] for choice in nv.explain(options, **asked) if choice["chosen"]]

    assert chosen(SIZES, backend="reference") == ["reference"]
    for name in ("int8_block", "fp8"):
        assert chosen({**SIZES, "activation_format": name}, backend="cpu") == ["cpu"]
    every_field = dataclasses.asdict(nv.MoeConfig(**SIZES))
    assert nv.explain(every_field) == choices
    assert chosen({**every_field, "expert_biases": True}) == ["cpu"]


@pytest.mark.attack("hostile files")
@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 8, (10).to_bytes(8, "little") + b'{"a":1}   '])
def test_broken_files_are_bad_input(tmp_path, content, attacked):
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    attacked()
    with pytest.raises(nv.BadInput, match="model.safetensors"):
        nv.inspect(tmp_path)
