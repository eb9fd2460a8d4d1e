"""Tests of the oracle of the layer tests: its roundings against torch, ml_dtypes and exact fractions, and its layers.

The layers are compared with the committed ones (tests/vectors/make_layer_vectors.py, written independently of it).
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_reference as oracle  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = Path(__file__).resolve().parents[1] / "vectors" / "layers.safetensors"
SHAPE = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=80)
BEFORE, ROWS = dict(router_weight="before_down"), dict(row_format="fp32")
CLAMPED, STEP, OAI = (dict(activation=f"swiglu_{name}") for name in ("clamped", "step", "oai"))
LAYERS = {
    "w4a4": {},
    "w4a4_clamped_fixed_before_down": dict(**CLAMPED, swiglu_limit=2.0, intermediate_scale="fixed", **BEFORE),
    "w4a4_oai_static": dict(**OAI, swiglu_limit=1.5, activation_scale="static"),
    "w4a4_rows_fp32": ROWS,
    "w4a16_clamped": dict(activation_format="bf16", **CLAMPED, swiglu_limit=1.5),
    "w4a16_step_before_down": dict(activation_format="bf16", **STEP, swiglu_limit=1.0, **BEFORE),
    "w4a8": dict(activation_format="int8_block"),
    "w4a8_clamped_before_down": dict(activation_format="int8_block", **CLAMPED, swiglu_limit=2.0, **BEFORE),
    "w4a8_rows_fp32": dict(activation_format="int8_block", **ROWS),
}


@pytest.mark.parametrize("accuracy", ["EXACT", "CONTRACT"])
@pytest.mark.parametrize("name", LAYERS)
def test_committed_layers(name, accuracy):
    from safetensors import safe_open

    with safe_open(FILE, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    weights = oracle.Weights(
        *(tuple(tensors[f"{m}.{p}"] for p in ("codes", "scales", "tensor_scale")) for m in ("gate", "up", "down"))
    )
    out = oracle.forward(
        oracle.Options(**SHAPE, **LAYERS[name]),
        weights,
        tensors["hidden"],
        tensors["topk_ids"],
        tensors["topk_weights"],
        input_scale=tuple(tensors["input_scales"].tolist()),
        accuracy=getattr(oracle, accuracy),
    )
    assert not out.free.any()
    assert not oracle.outside(out, tensors[f"out.{name}"]).any()
    # A wide interval would judge nothing: even under the contract's bound nearly every element has one allowed value.
    points = float((out.lo == out.hi).double().mean())
    assert points == 1.0 if accuracy == "EXACT" else points > 0.8


def test_roundings_are_torch_s():
    rng = np.random.default_rng(3)
    wide = torch.from_numpy(rng.standard_normal(200_000) * np.exp2(rng.integers(-160, 140, 200_000)))
    assert torch.equal(oracle.round_to(wide, oracle.FP32), wide.float().double())
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        narrow = wide.float()
        assert torch.equal(oracle.round_to(narrow.double(), oracle.FORMATS[name]), narrow.to(dtype).double())
    for value in (torch.inf, -torch.inf, torch.nan, 0.0, -0.0):
        x = torch.tensor([value], dtype=torch.float64)
        torch.testing.assert_close(oracle.round_to(x, oracle.BF16), x, rtol=0, atol=0, equal_nan=True)


def test_roundings_of_codes_are_those_of_ml_dtypes():
    rng = np.random.default_rng(4)
    x = np.concatenate(
        [rng.standard_normal(100_000) * np.exp2(rng.integers(-12, 10, 100_000)), np.arange(-512, 512) / 32]
    )
    for to, dtype in ((oracle.E4M3, ml_dtypes.float8_e4m3fn), (oracle.E2M1, ml_dtypes.float4_e2m1fn)):
        expected = np.clip(x, -to.largest, to.largest).astype(dtype).astype(np.float64)
        assert np.array_equal(oracle.round_to(torch.from_numpy(x), to).numpy(), expected)


def nearest(exact: Fraction) -> float:
    """A positive number rounded once to 24 bits, ties to even."""
    exponent = math.frexp(float(exact))[1] - 24
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)  # round() takes ties to even


def test_a_product_or_sum_of_more_than_53_bits_is_rounded_once():
    """The product is closer to a tie of fp32 than float64 can hold: plain float64 would round twice."""
    rng = np.random.default_rng(5)
    a = rng.integers(2**23, 2**24, 400).astype(np.float64)
    b = np.round((2.0**23 + 0.5) * 2.0**29 / a * 2.0**23)  # the product is next to an odd multiple of half an ulp
    tie = np.full(400, 2.0**24 + 1)
    small = rng.choice([-1.0, 1.0], 400) * np.exp2(rng.integers(-60, -20, 400))
    for rounded, exact, x, y in (
        (oracle.product_to_odd, Fraction.__mul__, a, b),
        (oracle.sum_to_odd, Fraction.__add__, tie, small),
    ):
        out = oracle.round_to(rounded(torch.from_numpy(x), torch.from_numpy(y)), oracle.FP32).tolist()
        assert out == [nearest(exact(Fraction(one), Fraction(other))) for one, other in zip(x, y, strict=True)]
    assert len(set(out)) == 2  # both neighbours of the tie are reached


@pytest.mark.parametrize("times", [1.0, 448.0, 2688.0])
def test_the_next_power_of_two(times):
    for exponent in (-120, -7, 0, 5):
        edge = times * 2.0**exponent
        x = torch.tensor([edge, np.nextafter(edge, 0), np.nextafter(edge, np.inf)], dtype=torch.float64)
        assert oracle.next_power_of_two(x, times).tolist() == [exponent, exponent, exponent + 1]
