"""The committed format vectors: read with NumPy alone, and made again where their makers are installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import nvfp4_moe as nv
import pytest

FILE = Path(__file__).resolve().parents[1] / "vectors" / "formats.safetensors"
DTYPES = {"U8": np.uint8, "F32": np.float32}


def read() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    raw = FILE.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        data = np.frombuffer(raw[8 + size + begin : 8 + size + end], DTYPES[info["dtype"]])
        tensors[name] = data.reshape(info["shape"])
    return tensors, metadata


TENSORS, VERSIONS = read()


@pytest.mark.parametrize("oracle", ["modelopt", "torchao", "compressed_tensors"])
def test_quantize(oracle):
    x, s = TENSORS[f"{oracle}.x"], float(TENSORS[f"{oracle}.tensor_scale"])
    codes, scales, ours = nv.quantize(x, tensor_scale=s)
    assert ours == s
    assert (scales == TENSORS[f"{oracle}.scales"]).all()
    unpacked, theirs = nv.unpack_codes(codes), nv.unpack_codes(TENSORS[f"{oracle}.codes"])
    assert (np.where(unpacked == 8, 0, unpacked) == np.where(theirs == 8, 0, theirs)).all()
    if oracle != "compressed_tensors":  # whose G is not the reciprocal of amax/2688
        assert nv.quantize(x)[2] == s


def test_decoded():
    parts = (TENSORS[f"modelopt.{part}"] for part in ("codes", "scales", "tensor_scale"))
    decoded, expected = nv.dequantize(*parts), TENSORS["modelopt.decoded"]
    differs = decoded.view(np.uint32) != expected.view(np.uint32)
    assert (decoded[differs] == 0).all() and (expected[differs] == 0).all()  # ModelOpt decodes code 8 (-0) as +0


@pytest.mark.parametrize("shape", ["1x1", "130x5", "33x8"])
def test_blocked(shape):
    rows, cols = map(int, shape.split("x"))
    linear, swizzled = TENSORS[f"blocked.{shape}.linear"], TENSORS[f"blocked.{shape}.swizzled"]
    assert (nv.swizzle_scales(linear) == swizzled).all()
    assert (nv.unswizzle_scales(swizzled, rows, cols) == linear).all()


def test_made_again_they_are_the_same():
    for package in ("torch", "torchao", "modelopt", "compressed_tensors", "ml_dtypes"):
        pytest.importorskip(package)
    import make_format_vectors

    if make_format_vectors.versions() != VERSIONS:
        pytest.skip(f"made with {VERSIONS}, installed are {make_format_vectors.versions()}")
    again = make_format_vectors.make()
    assert set(again) == set(TENSORS)
    for name, tensor in again.items():
        assert np.array_equal(tensor.numpy(), TENSORS[name]), name
