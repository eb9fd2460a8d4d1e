"""activation_format fp8 element by element, against ml_dtypes' and torch's float8_e4m3fn and layers in numpy float64.

A linear with weights of one shows its rows, and rows of one show its weights: every bf16 and fp16 number as an
activation, every code under every block scale under every shift as a weight, on every host backend.
"""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

SHAPE = dict(num_experts=2, top_k=1, hidden_size=64, intermediate_size=64, activation_format="fp8")
HOSTS = [
    c["backend"]
    for c in nv.explain(SHAPE)
    if c["backend"] == "reference" or (c["backend"].startswith("cpu") and (c["chosen"] or "supports" in c["reason"]))
]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float64 values within +-448, rounded once. Two libraries must agree."""
    theirs = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(theirs, torch.from_numpy(x).to(torch.float8_e4m3fn).to(torch.float64).numpy())
    return theirs


def linear(codes: np.ndarray, scales: np.ndarray, backend: str, tensor_scale: float = 1.0, **options) -> nv.Nvfp4Linear:
    """codes (rows, cols) 0..15, scales (rows, cols/16) bytes."""
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return nv.Nvfp4Linear.from_tensors(
        (packed, scales.astype(np.uint8), tensor_scale), activation_format="fp8", backend=backend, **options
    )


def exact_values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7] * np.repeat(E4M3[scales], 16, -1)


def identity(size: int, backend: str, **options) -> nv.Nvfp4Linear:
    """Weights of one on the diagonal: code 2 under a block scale of 1."""
    return linear(2 * np.eye(size, dtype=np.uint8), np.full((size, size // 16), 0x38), backend, **options)


@pytest.mark.parametrize("backend", HOSTS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_number_as_an_activation(backend, dtype, count):
    """A 448 in each row makes its scale 1, so out in fp32 shows the codes."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        wide = every.astype(np.float64)
    fits = every[np.abs(wide) <= 448]
    rows = np.zeros((-(-len(fits) // 31), 32), dtype=dtype)
    rows[:, 0] = 448
    rows[:, 1:].reshape(-1)[: len(fits)] = fits
    out = np.empty(rows.shape, dtype=np.float32)
    identity(32, backend, max_tokens=len(rows)).run(rows, out=out)
    expected = to_e4m3(rows.astype(np.float64))
    differs = out.astype(np.float64) != expected
    count(f"{dtype.__name__} to E4M3 on {backend}", differs.sum(), len(fits))
    assert not differs.any()


@pytest.mark.parametrize("backend", HOSTS)
def test_the_scale_of_a_row(backend):
    """The smallest power of two that brings the row to 448, in fp32 at its edges. The remaining steps of 1/16 show the
    scale. A row of zeros is zero, and one of subnormal numbers has 2^-126."""
    edges = [448.0, np.nextafter(np.float32(448), np.float32(500)), np.nextafter(np.float32(448), np.float32(0)), 449.0]
    amax = [np.float32(e) * np.float32(2.0**k) for k in (-126, -40, -1, 0, 1, 60, 118) for e in edges]
    rows = np.zeros((len(amax) + 3, 32), dtype=np.float32)
    rng = np.random.default_rng(1)
    for row, a in zip(rows, amax, strict=False):
        row[:] = rng.standard_normal(32).clip(-3, 3) / 4 * float(a)
        row[5] = -a
    rows[-2, 3] = 2.0**-149
    rows[-1, :] = np.linspace(-448, 448, 32) * 2.0**-126
    scale = np.ones((len(rows), 1))
    for r, row in enumerate(np.abs(rows).max(-1).astype(np.float64)):
        exponent = -126
        while row > 448 * 2.0**exponent:
            exponent += 1
        scale[r] = 1.0 if row == 0 else 2.0**exponent
    out = np.empty(rows.shape, dtype=np.float32)
    identity(32, backend).run(rows, out=out)
    assert np.array_equal(out.astype(np.float64), to_e4m3(rows.astype(np.float64) / scale) * scale)


@pytest.mark.parametrize("backend", HOSTS)
def test_every_weight_under_every_shift(backend, count):
    """A matrix of every code under every block scale up to a largest one, which determines the shift. Each group of 16
    rows has block scales close to each other, so that whole panels are far from the subnormal numbers."""
    seen = inexact_seen = 0
    shifts = set()
    for largest in range(1, 0x7F):
        if largest not in (1, 2, 3, 5) and largest % 4 != 2 and largest != 0x7E:
            continue
        codes = np.tile(np.arange(16, dtype=np.uint8), (128, 4))
        scales = np.tile(np.minimum(np.arange(128), largest)[:, None], 4)
        layer = linear(codes, scales, backend, tensor_scale=0.5)
        exact = exact_values(codes, scales)
        shift = -15
        while 6 * E4M3[largest] * 2.0**-shift > 448:
            shift += 1
        expected = to_e4m3(exact * 2.0**-shift) * 2.0**shift
        told = layer.describe()["fp8_weights"]
        inexact = int((expected != exact).sum())
        assert told == {"weights": codes.size, "inexact": inexact, "least_shift": shift, "most_shift": shift}
        out = np.empty((64, 128), dtype=np.float32)
        layer.run(np.eye(64, dtype=np.float32), out=out)
        assert np.array_equal(out.T.astype(np.float64), 0.5 * expected), f"largest block scale {largest}"
        seen += codes.size
        inexact_seen += inexact
        shifts.add(shift)
    count(f"weights that E4M3 rounds, {backend}", inexact_seen, seen)
    assert shifts == set(range(-15, 4))


@pytest.mark.parametrize("backend", HOSTS)
@pytest.mark.parametrize("cols", [16, 208, 1024])
@pytest.mark.parametrize("tokens", [1, 4, 9, 140])
def test_linears_in_float64(backend, cols, tokens):
    """Exact products, and sums within the bound of one element (docs/explanation/numerics.md, section 7)."""
    rng = np.random.default_rng(cols + tokens)
    rows = 40
    codes = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, cols // 16), dtype=np.uint8)
    x = (rng.standard_normal((tokens, cols)) * np.exp2(rng.integers(-12, 12, (tokens, cols)))).astype(np.float32)
    layer = linear(codes, scales, backend, tensor_scale=0.37)
    out = np.empty((tokens, rows), dtype=np.float32)
    layer.run(x, out=out)
    scale = np.exp2(np.ceil(np.log2(np.abs(x).max(-1, keepdims=True).astype(np.float64) / 448)))
    x8 = to_e4m3(x / scale)
    shift = layer.describe()["fp8_weights"]["least_shift"]
    w8 = to_e4m3(exact_values(codes, scales) * 2.0**-shift)
    alpha = np.float32(scale * (float(np.float32(0.37)) * 2.0**shift)).astype(np.float64)
    value = (x8 @ w8.T) * alpha  # sums of whole units of 2^-18 below 2^46: exact
    if backend == "reference":
        assert np.array_equal(out, value.astype(np.float32))
    bound = alpha * (np.abs(x8) @ np.abs(w8).T) * (cols / 16 + 1) * 2.0**-22 + np.abs(value) * 2.0**-24
    assert (np.abs(out - value) <= bound).all()


@pytest.mark.parametrize("backend", HOSTS)
def test_a_static_scale(backend):
    """An input_scale means a range of 2688 times itself. A row holds 448 times its scale and saturates beyond that."""
    rows = np.zeros((3, 32), dtype=np.float32)
    rows[0, :4] = [448, 464, 1000, -1e30]
    rows[1, :3] = [2.0**-9, 2.0**-10, 1.5 * 2.0**-10]
    rows[2, 0] = np.nan
    out = np.empty(rows.shape, dtype=np.float32)
    identity(32, backend, activation_scale="static", input_scale=0.7 / 6).run(rows, out=out)
    assert out[0, :4].tolist() == [448, 448, 448, -448]
    assert out[1, :3].tolist() == [2.0**-9, 0, 2.0**-9]
    assert np.isnan(out[2]).all() and not np.isnan(out[:2]).any()
