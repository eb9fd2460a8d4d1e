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
def test_codes_of_every_number_are_those_of_ml_dtypes(dtype, count):
    """ml_dtypes leaves NaN of E2M1 undefined, and E4M3 overflows to NaN above 464 (464 itself ties to 448)."""
    x = EVERY[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        single, double = x.astype(np.float32), x.astype(np.float64)
        e2m1, e4m3 = (
            single.astype(getattr(ml_dtypes, f"float{name}")).view(np.uint8) for name in ("4_e2m1fn", "8_e4m3fn")
        )
    nan, fits = np.isnan(single), np.abs(single) <= 464
    ours = nv.encode_e2m1(x)
    assert (ours[nan] == 7).all() and (ours == e2m1 & 15)[~nan].all()
    wide = nv.encode_e4m3(x)
    above = ~fits & ~nan
    assert (wide == e4m3)[fits].all() and (wide[nan] == 0x7F).all()
    assert (e4m3[above] & 0x7F == 0x7F).all() and (wide[above] & 0x7F == 0x7E).all()
    assert (np.signbit(single[above]) == (wide[above] >> 7).astype(bool)).all()
    count(f"{dtype} to E4M3: above 464 (ml_dtypes NaN, ours 448)", above.sum(), x.size)
    for other in (single, double):
        assert (nv.encode_e2m1(other) == ours).all() and (nv.encode_e4m3(other) == wide).all()


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


@pytest.mark.parametrize("tensor_scale", [2.0**-7, 3.7e-5])
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
