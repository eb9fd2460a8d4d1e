"""ml_dtypes float4_e2m1fn and float8_e4m3fn: every bfloat16, every float16, every code."""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

EVERY = {
    "bfloat16": np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16),
    "float16": np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16),
}


@pytest.mark.parametrize("dtype", EVERY)
def test_e2m1_encodes_as_ml_dtypes(dtype, count):
    x = EVERY[dtype]
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
        theirs = wide.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    ours = nv.encode_e2m1(x)
    number = ~np.isnan(wide)
    assert (ours[~number] == 7).all()  # ml_dtypes leaves NaN undefined
    differs = (ours != theirs) & number
    count(f"{dtype} to E2M1, NaN aside", differs.sum(), number.sum())
    assert not differs.any()
    with np.errstate(invalid="ignore"):
        double = wide.astype(np.float64)
    for other in (wide, double):
        assert (nv.encode_e2m1(other) == ours).all()


@pytest.mark.parametrize("dtype", EVERY)
def test_e4m3_encodes_as_ml_dtypes_where_it_does_not_overflow(dtype, count):
    x = EVERY[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float32)
        theirs = wide.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    ours = nv.encode_e4m3(x)
    fits = np.abs(wide) <= 464  # 464 itself ties to 448
    assert (ours[fits] == theirs[fits]).all()
    above = ~fits & ~np.isnan(wide)
    assert (theirs[above] & 0x7F == 0x7F).all() and (ours[above] & 0x7F == 0x7E).all()
    assert (np.signbit(wide[above]) == (ours[above] >> 7).astype(bool)).all()
    assert (ours[np.isnan(wide)] == 0x7F).all()
    count(f"{dtype} to E4M3: above 464 (ml_dtypes NaN, ours 448)", above.sum(), x.size)
    with np.errstate(invalid="ignore"):
        double = wide.astype(np.float64)
    for other in (wide, double):
        assert (nv.encode_e4m3(other) == ours).all()


def test_every_code_decodes_as_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    e2m1 = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert (nv.decode_e2m1(codes).view(np.uint32) == e2m1.view(np.uint32)).all()
    every = np.arange(256, dtype=np.uint8)
    e4m3 = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nan = np.isnan(e4m3)
    assert (np.isnan(nv.decode_e4m3(every)) == nan).all() and nan.sum() == 2
    assert (nv.decode_e4m3(every)[~nan].view(np.uint32) == e4m3[~nan].view(np.uint32)).all()


def test_ml_dtypes_arrays_come_in_as_themselves():
    x = np.random.default_rng(3).standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    codes, scales, s = nv.quantize(x)
    assert (codes == nv.quantize(x.view(np.uint16))[0]).all()
    fp8 = scales.view(ml_dtypes.float8_e4m3fn)
    assert (nv.dequantize(codes, fp8, s) == nv.dequantize(codes, scales, s)).all()


@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-7, 0.0123, 3.7e-5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_every_code_and_scale_is_the_exact_product_rounded_once(tensor_scale, dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))  # all 16 codes under each of the 127 valid scales
    scales = np.arange(127, dtype=np.uint8)[:, None]
    out = nv.dequantize(nv.pack_codes(codes), scales, tensor_scale, dtype)
    exact = (
        codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        * np.float64(np.float32(tensor_scale))
    )
    if dtype == "bfloat16":
        # 4 + 4 + 24 significant bits: rounding the exact double to odd in float32 keeps the second rounding right.
        narrow = exact.astype(np.float32)
        toward = np.where(
            np.abs(narrow.astype(np.float64)) > np.abs(exact), np.nextafter(narrow, np.float32(0)), narrow
        )
        sticky = (toward.view(np.uint32) | (toward.astype(np.float64) != exact)).view(np.float32)
        expected = sticky.astype(ml_dtypes.bfloat16).view(np.uint16)
        assert (out == expected).all()
    else:
        expected = exact.astype(dtype)
        assert (out.view(np.uint8) == expected.view(np.uint8)).all()
